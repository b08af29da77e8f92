"""Products in full precision, whatever the user allows elsewhere.

With TF32, bfloat16 or autocast a product loses digits, and an example's part of the sum could
exceed its clip by more than clipping leaves room for.
"""

# pyright: basic

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

__all__ = ["full_precision"]


class _Global:
    """The only setting before torch 2.9, in the form of the later ones."""

    @property
    def fp32_precision(self) -> str:
        return torch.get_float32_matmul_precision()

    @fp32_precision.setter
    def fp32_precision(self, value: str) -> None:
        torch.set_float32_matmul_precision("highest" if value == "ieee" else value)


def _settings() -> list[Any]:
    backends = (torch.backends.cuda, torch.backends.mkldnn)
    found = [b.matmul for b in backends if hasattr(getattr(b, "matmul", None), "fp32_precision")]
    return found or [_Global()]


_SETTINGS = _settings()


_CASTING = [d for d in ("cpu", "cuda", "xpu", "mps") if torch.amp.is_autocast_available(d)]


@contextmanager
def full_precision() -> Iterator[None]:
    """Within it, float32 matrices are multiplied in float32, also where autocast is on."""
    lower = [(s, s.fp32_precision) for s in _SETTINGS]
    lower = [(s, value) for s, value in lower if value not in {"ieee", "none", "highest"}]
    with ExitStack() as stack:
        for device in _CASTING:
            if torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        for setting, value in lower:
            stack.callback(setattr, setting, "fp32_precision", value)
            setting.fp32_precision = "ieee"
        yield
