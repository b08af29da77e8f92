"""Scratch memory that is kept from step to step.

Large temporaries that are freed after every step go back to the operating system, and are paid for
again, page by page, in the next. The requests of a step come in the same order every time, so each
has a buffer of its own that only grows.
"""

# pyright: basic

import math

import torch
from torch import Tensor

from lap2.train.secrecy import StaysHere

__all__ = ["Arena"]


class Arena(StaysHere):
    """Buffers handed out in order; :meth:`reset` starts over and makes earlier ones invalid."""

    def __init__(self) -> None:
        """Start with no memory."""
        self._buffers: list[Tensor] = []
        self._next = 0
        self._wide: dict[str, Tensor] = {}

    def reset(self) -> None:
        """Begin a new step."""
        self._next = 0

    def free(self) -> None:
        """Hold no memory any more; what was handed out stays valid for whoever has it."""
        self._buffers.clear()
        self._wide.clear()
        self._next = 0

    def empty(self, shape: tuple[int, ...], like: Tensor) -> Tensor:
        """An uninitialised tensor of the given shape, of the type and on the device of ``like``."""
        size = math.prod(shape)
        if self._next == len(self._buffers):
            self._buffers.append(like.new_empty(0))
        held = self._buffers[self._next]
        if held.numel() < size or held.dtype != like.dtype or held.device != like.device:
            held = self._buffers[self._next] = like.new_empty(size)
        self._next += 1
        return held[:size].view(shape)

    def widened(self, name: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        """A copy in another type, valid until the next of this name is made."""
        held = self._wide.get(name)
        if held is None or held.numel() < tensor.numel() or held.dtype != dtype:
            held = self._wide[name] = torch.empty(tensor.numel(), dtype=dtype, device=tensor.device)
        elif held.device != tensor.device:
            held = self._wide[name] = held.new_empty(tensor.numel(), device=tensor.device)
        return held[: tensor.numel()].view(tensor.shape).copy_(tensor)
