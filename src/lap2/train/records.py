"""What is kept of one use of a layer between forward and collection."""

# pyright: basic

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lap2.train.errors import BookkeepingError
from lap2.train.gradients import PerExample
from lap2.train.nested import tensors
from lap2.train.secrecy import StaysHere, forget_locals

__all__ = ["Record", "Tap", "batch_size"]


@dataclass(eq=False, repr=False)
class Record(StaysHere):
    """One use of a module's parameters.

    Attributes:
        name: of the module's class, for messages.
        batch: number of examples in the batch.
        rule: from the gradient of what came out to the per-example gradients.
        inputs: tensors that the rule holds, and must find unchanged.
        at_once: whether the rule is applied as soon as the gradient is known.
        grad: the gradient of what came out, once there is one.
        found: what the rule has given so far.
    """

    name: str
    batch: int
    rule: Callable[[Tensor], list[PerExample]]
    inputs: tuple[Tensor, ...] = ()
    at_once: Callable[[Tensor], bool] | None = None
    grad: Tensor | None = None
    found: list[PerExample] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._versions = [t._version for t in self.inputs]

    @property
    def intact(self) -> bool:
        """Whether what is held is what was used."""
        return self._versions == [t._version for t in self.inputs]

    def keep(self, grad: Tensor) -> None:
        """Take in the gradient of what came out."""
        whole = self.intact and grad.shape[0] == self.batch
        if whole and self.at_once is not None and self.at_once(grad):
            self.found += self.rule(grad)
        else:
            self.grad = grad if self.grad is None else self.grad + grad

    def gradients(self) -> list[PerExample]:
        """Per-example gradients; holds nothing afterwards.

        Raises:
            BookkeepingError: they cannot be known.
        """
        if not self.intact:
            raise BookkeepingError(
                f"the input of a {self.name} was changed in place after it was used: its gradient "
                "cannot be known. Avoid in-place operations on it"
            )
        if self.grad is not None and self.grad.shape[0] != self.batch:
            raise BookkeepingError(
                "every layer must see the batch as its first dimension, got another one in a "
                f"{self.name}"
            )
        found = self.found + (self.rule(self.grad) if self.grad is not None else [])
        self.forget()
        return found

    def forget(self) -> None:
        """Hold nothing any more, though the graph of the loss may still hold the record."""
        self.rule, self.inputs, self.grad, self.found = _nothing, (), None, []


class Tap(torch.autograd.Function):
    """The identity, which also shows the gradient that comes back through it."""

    @staticmethod
    def forward(ctx, output, anchor, receive):  # noqa: ARG004 - an anchor has a gradient
        """Let ``receive`` have the gradient; ``anchor`` makes sure that there is one."""
        ctx.receive = receive
        return output.view_as(output)

    @staticmethod
    def backward(ctx, grad):
        """Pass the gradient on."""
        with torch.no_grad():
            try:
                ctx.receive(grad.detach())
            except Exception as error:
                del grad
                forget_locals(error)
                raise
        return grad if ctx.needs_input_grad[0] else None, None, None


def _nothing(_: Tensor) -> list[PerExample]:
    return []


def batch_size(value: Any) -> int | None:
    """The first dimension that most tensors of a call have; of two as frequent, the larger."""
    counts = Counter(tensor.shape[0] for tensor in tensors(value) if tensor.dim())
    return max(counts, key=lambda size: (counts[size], size)) if counts else None
