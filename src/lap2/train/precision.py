"""Products in full precision, whatever the user allows elsewhere.

With TF32 or bfloat16 a product loses digits, and an example's part of the sum could exceed its clip
by more than clipping leaves room for.
"""

# pyright: basic

from collections.abc import Iterator
from contextlib import contextmanager
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


@contextmanager
def full_precision() -> Iterator[None]:
    """Within it, float32 matrices are multiplied in float32."""
    lower = [(s, s.fp32_precision) for s in _SETTINGS]
    lower = [(s, value) for s, value in lower if value not in {"ieee", "none", "highest"}]
    for setting, _ in lower:
        setting.fp32_precision = "ieee"
    try:
        yield
    finally:
        for setting, value in lower:
            setting.fp32_precision = value
