"""Per-example gradients in three shapes, none of them larger than it must be.

Each kind knows its parameter, the squared norm of every example's gradient, and the sum of the
examples' gradients under given weights. Which layer has which is in :mod:`lap2.train.layers`.
"""

# pyright: basic

import math
from typing import Protocol

import torch
from torch import Tensor

from lap2.train.arena import Arena

__all__ = ["Dense", "Outer", "PerExample", "Rows", "summed"]

_KEEP = 1 << 25
"""Explicit per-example gradients of up to this many numbers are kept between norm and sum."""


class PerExample(Protocol):
    """The gradients of one parameter, one per example of a batch."""

    param: Tensor

    def square_norms(self) -> Tensor:
        """Squared l2 norm of each example's gradient; rounded up where rounding could hide it."""
        ...

    def abs_sums(self) -> Tensor:
        """l1 norm of each example's gradient."""
        ...

    def weighted_sum(self, weights: Tensor) -> Tensor:
        """Sum over the batch of ``weights[i]`` times the i-th gradient, shaped as the parameter."""
        ...

    def zero(self, bad: Tensor) -> None:
        """Make the gradients of the examples marked ``bad`` zero, whatever they hold."""
        ...

    def explicit(self) -> Tensor:
        """All of them, with the batch as first dimension."""
        ...


class Dense:
    """Gradients that are held as they are: biases, normalisation layers, and everything small."""

    def __init__(self, param: Tensor, values: Tensor) -> None:
        """Take ``values`` of shape (batch, *param.shape)."""
        self.param, self._values = param, values.reshape(values.shape[0], param.numel())

    def square_norms(self) -> Tensor:
        """See :class:`PerExample`."""
        return (self._values * self._values).sum(dim=1)

    def abs_sums(self) -> Tensor:
        """See :class:`PerExample`."""
        return self._values.abs().sum(dim=1)

    def weighted_sum(self, weights: Tensor) -> Tensor:
        """See :class:`PerExample`."""
        return (weights @ self._values).reshape(self.param.shape)

    def zero(self, bad: Tensor) -> None:
        """See :class:`PerExample`."""
        self._values = self._values.masked_fill(bad[:, None], 0.0)

    def explicit(self) -> Tensor:
        """See :class:`PerExample`."""
        return self._values.reshape(-1, *self.param.shape)


class Outer:
    """Gradients ``sum_t g_t a_t^T`` of a weight: linear layers and convolutions.

    Args:
        param: the weight; its gradient has ``outputs * inputs`` numbers in that order.
        inputs: what the weight was applied to, (batch, positions, inputs).
        grads: gradients of what came out, (batch, positions, outputs).
        arena: where explicit gradients are put.
        channels_last: whether ``inputs`` has the weight's second dimension last.
    """

    def __init__(
        self,
        param: Tensor,
        inputs: Tensor,
        grads: Tensor,
        *,
        arena: Arena,
        channels_last: bool = False,
    ) -> None:
        """Choose between the inner-product form and the explicit one by what they cost."""
        self.param, self._a, self._g = param, inputs, grads
        self._channels_last, self._arena = channels_last, arena
        batch, positions, width = inputs.shape
        size = width * grads.shape[2]
        inner = positions * positions * (width + grads.shape[2])
        # Explicit gradients that can be kept make the sum nearly free.
        self._ghost = inner < (2 * size if batch * size <= _KEEP else positions * size)
        self._values: Tensor | None = None

    def square_norms(self) -> Tensor:
        """See :class:`PerExample`. Never forms a gradient when positions are few."""
        a, g = self._a, self._g
        if a.shape[1] == 1:
            return (a * a).sum(dim=(1, 2)) * (g * g).sum(dim=(1, 2))
        if self._ghost:
            inner = (torch.bmm(a, a.mT) * torch.bmm(g, g.mT)).sum(dim=(1, 2))
            # Terms may cancel; what rounding may hide is bounded by their absolute sum.
            lengths = (a.norm(dim=2) * g.norm(dim=2)).sum(dim=1)
            return inner.clamp_min(0.0) + 2.0**-20 * lengths * lengths
        # Row by row first: no sum is long enough to lose digits.
        return torch.linalg.vector_norm(self._form(), dim=2).square().sum(dim=1)

    def abs_sums(self) -> Tensor:
        """See :class:`PerExample`."""
        if self._a.shape[1] == 1:
            return self._a.abs().sum(dim=(1, 2)) * self._g.abs().sum(dim=(1, 2))
        return self._form().abs().sum(dim=(1, 2))

    def zero(self, bad: Tensor) -> None:
        """See :class:`PerExample`."""
        mask = bad[:, None, None]
        self._a, self._g = self._a.masked_fill(mask, 0.0), self._g.masked_fill(mask, 0.0)
        self._values = None if self._values is None else self._values.masked_fill(mask, 0.0)

    def weighted_sum(self, weights: Tensor) -> Tensor:
        """See :class:`PerExample`."""
        if self._values is not None:
            total = weights @ self._values.flatten(1)
        else:
            weighted = (self._g * weights[:, None, None]).flatten(0, 1)
            total = weighted.mT @ self._a.flatten(0, 1)
        return self._shaped(total.unsqueeze(0))[0]

    def explicit(self) -> Tensor:
        """See :class:`PerExample`."""
        return self._shaped(self._form())

    def _shaped(self, values: Tensor) -> Tensor:
        """From (any, outputs * inputs) to (any, *param.shape)."""
        shape = list(self.param.shape)
        if not self._channels_last:
            return values.reshape(-1, *shape)
        shape = [shape[0], *shape[2:], shape[1]]
        return values.reshape(-1, *shape).movedim(-1, 2)

    def _form(self) -> Tensor:
        if self._values is not None:
            return self._values
        shape = (self._a.shape[0], self._g.shape[2], self._a.shape[2])
        if math.prod(shape) > _KEEP:
            return torch.bmm(self._g.mT, self._a)
        self._values = self._arena.empty(shape, self._a)
        return torch.bmm(self._g.mT, self._a, out=self._values)


class Rows:
    """Gradients of a table of which each example uses a few rows: embeddings.

    Args:
        param: the table.
        index: the rows used, (batch, positions).
        grads: gradients of what was looked up, (batch, positions, width).
    """

    def __init__(self, param: Tensor, index: Tensor, grads: Tensor) -> None:
        """Keep indices and gradients; the table's size never matters."""
        self.param, self._index, self._g = param, index, grads

    def square_norms(self) -> Tensor:
        """See :class:`PerExample`. Positions with the same row add up before they are squared."""
        same = (self._index[:, :, None] == self._index[:, None, :]).to(self._g.dtype)
        inner = (torch.bmm(self._g, self._g.mT) * same).sum(dim=(1, 2))
        lengths = self._g.norm(dim=2).sum(dim=1)
        return inner.clamp_min(0.0) + 2.0**-20 * lengths * lengths

    def abs_sums(self) -> Tensor:
        """See :class:`PerExample`."""
        return self.explicit().abs().sum(dim=(1, 2))

    def zero(self, bad: Tensor) -> None:
        """See :class:`PerExample`."""
        self._g = self._g.masked_fill(bad[:, None, None], 0.0)

    def weighted_sum(self, weights: Tensor) -> Tensor:
        """See :class:`PerExample`."""
        total = torch.zeros(self.param.shape, dtype=self._g.dtype, device=self._g.device)
        weighted = (self._g * weights[:, None, None]).flatten(0, 1)
        return total.index_add_(0, self._index.flatten(), weighted)

    def explicit(self) -> Tensor:
        """See :class:`PerExample`."""
        batch, _, width = self._g.shape
        shape = (batch, self.param.shape[0], width)
        index = self._index[:, :, None].expand(-1, -1, width)
        zeros = torch.zeros(shape, dtype=self._g.dtype, device=self._g.device)
        return zeros.scatter_add_(1, index, self._g)


def summed(uses: list[PerExample]) -> PerExample:
    """The gradients of a parameter that was used several times: explicit, so that uses add up."""
    if len(uses) == 1:
        return uses[0]
    return Dense(uses[0].param, torch.stack([use.explicit() for use in uses]).sum(dim=0))
