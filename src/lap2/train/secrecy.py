"""What must not leave the process: in a pickle, a copy, or the variables a traceback shows."""

import copyreg
import traceback
from contextlib import suppress
from typing import Any, ClassVar, NoReturn

__all__ = ["StaysHere", "forget_locals", "reduced_as"]

_PACKAGES = ("lap2", "torch", "opacus")
_NEW: Any = copyreg.__newobj__  # type: ignore[attr-defined]
_AS_BEFORE: Any = copyreg._reconstructor  # type: ignore[attr-defined]
"""What makes an object again in pickles of protocol 2 and later, and in earlier ones."""


class StaysHere:
    """Cannot be pickled or copied, because private records can be reached from it."""

    _instead: ClassVar[str] = "it is of use only where it was made"

    def __reduce_ex__(self, _protocol: object) -> NoReturn:
        """Refuse; ``torch.save``, ``copy`` and other processes all come here."""
        raise TypeError(
            f"{type(self).__name__} must not be pickled or copied, as it may hold private records: "
            f"{self._instead}"
        )


def reduced_as(kind: type, reduced: Any, instead_of: type) -> Any:
    """What ``__reduce_ex__`` gave for an object of one class, for an ordinary one of another."""
    call, args, *state = reduced
    if call is _NEW:  # pickle insists that its class be the object's
        call, args = _AS_BEFORE, (kind, object, None)
    return call, tuple(kind if value is instead_of else value for value in args), *state


def forget_locals(error: BaseException) -> None:
    """Empty the frames that an error came through, so that no report of it can show a record.

    Lines and functions stay. Frames of the user's own functions are left as they are, and so are
    those that have not ended yet: whoever calls this has nothing private in variables of its own.
    """
    waiting: list[BaseException | None] = [error]
    seen: set[int] = set()
    while waiting:
        this = waiting.pop()
        if this is None or id(this) in seen:
            continue
        seen.add(id(this))
        waiting += [this.__cause__, this.__context__]
        for frame, _ in traceback.walk_tb(this.__traceback__):
            if str(frame.f_globals.get("__name__")).partition(".")[0] in _PACKAGES:
                with suppress(RuntimeError):  # it is still running
                    frame.clear()
