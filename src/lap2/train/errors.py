"""What stops a step."""

__all__ = ["BookkeepingError"]


class BookkeepingError(RuntimeError):
    """What would be released is not what the ledger would say; so nothing was released."""
