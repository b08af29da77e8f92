"""Per-example gradients in a few shapes, none of them larger than it must be.

Each kind knows its parameter, the squared norm of every example's gradient, and the sum of the
examples' gradients under given weights. Which layer has which is in :mod:`lap2.train.layers`; a
parameter that is used several times has the :func:`summed` of them.
"""

# pyright: basic

import math
from collections.abc import Sequence
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from lap2.train.arena import Arena

__all__ = ["Dense", "Outer", "PerExample", "Rows", "Tied", "best_formed", "summed"]

_LARGEST = 1 << 29
"""Explicit gradients of more numbers than this (2 GB in float32) are refused."""

_LONG_ROW = 1 << 11
"""torch's vector_norm, which needs no temporary, adds numbers that follow each other in four lanes
or more: of n it may lose ``n / 4`` units, ``2^-25`` each, and of a product's two factors both may.
"""

_CACHED = 1 << 18
"""Numbers of gradients that are formed at a time, if each is needed once."""

_SLICES = 8
"""Of large gradients, for several threads."""

Order = tuple[int, ...] | None


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
    """Gradients that are held as they are: biases, convolutions, and everything small.

    Args:
        param: the parameter.
        values: of shape (batch, *param.shape).
        order: of the parameter's dimensions in ``values``, if it is another.
        squares: squared norms of the examples' values, if they are known.
    """

    def __init__(
        self,
        param: Tensor,
        values: Tensor,
        *,
        order: Order = None,
        squares: Tensor | None = None,
    ) -> None:
        """Keep the values in the order they have."""
        self.param, self._values = param, values.reshape(values.shape[0], param.numel())
        self._order, self._squares = order, squares

    def square_norms(self) -> Tensor:
        """See :class:`PerExample`."""
        return _norms(self._values).square() if self._squares is None else self._squares

    def abs_sums(self) -> Tensor:
        """See :class:`PerExample`."""
        return self._values.abs().sum(dim=1)

    def weighted_sum(self, weights: Tensor) -> Tensor:
        """See :class:`PerExample`."""
        return _shaped(_weighted(weights, self._values)[None], self.param, self._order)[0]

    def zero(self, bad: Tensor) -> None:
        """See :class:`PerExample`."""
        self._values, self._squares = self._values.masked_fill(bad[:, None], 0.0), None

    def explicit(self) -> Tensor:
        """See :class:`PerExample`."""
        return _shaped(self._values, self.param, self._order)


class Outer:
    """Gradients ``sum_t g_t a_t^T`` of a weight: linear layers and convolutions.

    Args:
        param: the weight; its gradient has ``outputs * inputs`` numbers in that order.
        inputs: what the weight was applied to, (batch, positions, inputs).
        grads: gradients of what came out, (batch, positions, outputs).
        arena: where explicit gradients are put.
        order: of the weight's dimensions in outputs and ``inputs``, if it is another.
    """

    def __init__(
        self,
        param: Tensor,
        inputs: Tensor,
        grads: Tensor,
        *,
        arena: Arena,
        order: Order = None,
    ) -> None:
        """Choose between the inner-product form and the explicit one by what they cost."""
        self.param, self._a, self._g = param, inputs, grads
        self._order, self._arena = order, arena
        _, positions, width = inputs.shape
        self._ghost = not best_formed(positions, width, grads.shape[2])
        self._values: Tensor | None = None
        self._terms: Tensor | None = None
        if positions == 1 or self._ghost:  # where the factors are squared, not their product
            self._a, self._g, self._terms = _balanced(inputs, grads)

    def square_norms(self) -> Tensor:
        """See :class:`PerExample`. Never forms a gradient when positions are few."""
        a, g = self._a, self._g
        if a.shape[1] == 1:
            return self._term_norms().square().sum(dim=1)
        if self._ghost:
            inner = torch.bmm(a, a.mT).mul_(torch.bmm(g, g.mT)).sum(dim=(1, 2))
            return _rounded_up(inner, self.lengths())
        return _norms(self._form()).square().sum(dim=1)

    def lengths(self) -> Tensor:
        """Sum of the norms of each example's terms; at least its gradient's norm."""
        return self._term_norms().sum(dim=1)

    def _term_norms(self) -> Tensor:
        """Norms of ``g_t a_t^T``."""
        return _norms(self._a) * _norms(self._g) if self._terms is None else self._terms

    def abs_sums(self) -> Tensor:
        """See :class:`PerExample`."""
        if self._a.shape[1] == 1:
            return self._a.abs().sum(dim=(1, 2)) * self._g.abs().sum(dim=(1, 2))
        if not self._ghost:
            return self._form().abs().sum(dim=(1, 2))
        shape = (1, self._g.shape[2], self._a.shape[2])
        _refuse_huge(shape)
        count = max(1, _CACHED // math.prod(shape))
        held = self._a.new_empty((count, *shape[1:]))
        pieces = zip(self._g.mT.split(count), self._a.split(count), strict=True)
        formed = (torch.bmm(g, a, out=held[: len(g)]) for g, a in pieces)
        sums = torch.cat([values.abs_().sum(dim=(1, 2)) for values in formed])
        return sums + self.hidden()

    def hidden(self) -> Tensor:
        """How much rounding may add to each example's l1 norm, where terms cancel."""
        terms = self._a.abs().sum(dim=2) * self._g.abs().sum(dim=2)
        return _hidden(terms)

    def zero(self, bad: Tensor) -> None:
        """See :class:`PerExample`."""
        mask = bad[:, None, None]
        self._a, self._g = self._a.masked_fill(mask, 0.0), self._g.masked_fill(mask, 0.0)
        self._terms = None
        self._values = None if self._values is None else self._values.masked_fill(mask, 0.0)

    def weighted_sum(self, weights: Tensor) -> Tensor:
        """See :class:`PerExample`."""
        if self._values is not None:
            total = _weighted(weights, self._values.flatten(1))
        else:
            weighted = (self._g * weights[:, None, None]).flatten(0, 1)
            total = weighted.mT @ self._a.flatten(0, 1)
        return _shaped(total[None], self.param, self._order)[0]

    def explicit(self) -> Tensor:
        """See :class:`PerExample`."""
        return _shaped(self._form(), self.param, self._order)

    def _form(self) -> Tensor:
        if self._values is not None:
            return self._values
        shape = (self._a.shape[0], self._g.shape[2], self._a.shape[2])
        _refuse_huge(shape)
        if self._ghost:
            return torch.bmm(self._g.mT, self._a)
        self._values = self._arena.empty(shape, self._a)
        return torch.bmm(self._g.mT, self._a, out=self._values)


def best_formed(positions: int, inputs: int, outputs: int) -> bool:
    """Whether gradients ``sum_t g_t a_t^T`` are best formed, rather than their inner products.

    Then their sum is nearly free. They must not need much more memory than what is held anyway:
    those of convolutions do not, those of wide sequence layers do.
    """
    size, held = inputs * outputs, positions * (inputs + outputs)
    return size <= 2 * held and positions * held >= 2 * size


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
        inner = torch.bmm(self._g, self._g.mT).mul_(same).sum(dim=(1, 2))
        return _rounded_up(inner, self.lengths())

    def lengths(self) -> Tensor:
        """Sum of the norms of each example's terms; at least its gradient's norm."""
        return _norms(self._g).sum(dim=1)

    def abs_sums(self) -> Tensor:
        """See :class:`PerExample`."""
        return self.explicit().abs().sum(dim=(1, 2)) + self.hidden()

    def hidden(self) -> Tensor:
        """How much rounding may add to each example's l1 norm, where terms cancel."""
        return _hidden(self._g.abs().sum(dim=2))

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
        _refuse_huge(shape)
        return self._g.new_zeros(shape).scatter_add_(1, index, self._g)


class Tied:
    """Gradients of a table that is looked up *and* applied as a weight: tied embeddings.

    The norm of the sum needs the inner product of both parts, which is found without forming
    either: ``<sum_t e_{i_t} r_t^T, sum_s g_s a_s^T> = sum_{t,s} g_s[i_t] <r_t, a_s>``.
    """

    def __init__(self, rows: Rows, outer: Outer) -> None:
        """Take the gradients of both uses of one parameter."""
        self.param, self._rows, self._outer = rows.param, rows, outer

    def square_norms(self) -> Tensor:
        """See :class:`PerExample`."""
        rows, outer = self._rows, self._outer
        batch, positions, _ = outer._g.shape
        index = rows._index[:, None, :].expand(batch, positions, -1)
        cross = outer._g.gather(2, index).mul_(torch.bmm(outer._a, rows._g.mT)).sum(dim=(1, 2))
        inner = rows.square_norms() + outer.square_norms() + 2 * cross
        return _rounded_up(inner, rows.lengths() + outer.lengths())

    def abs_sums(self) -> Tensor:
        """See :class:`PerExample`."""
        formed = self.explicit().abs().sum(dim=(1, 2))
        # Twice: adding both parts errs by no more than adding up each.
        return formed + 2 * (self._rows.hidden() + self._outer.hidden())

    def weighted_sum(self, weights: Tensor) -> Tensor:
        """See :class:`PerExample`."""
        return self._outer.weighted_sum(weights).add_(self._rows.weighted_sum(weights))

    def zero(self, bad: Tensor) -> None:
        """See :class:`PerExample`."""
        self._rows.zero(bad)
        self._outer.zero(bad)

    def explicit(self) -> Tensor:
        """See :class:`PerExample`."""
        return self._rows.explicit().add_(self._outer.explicit())


def summed(uses: Sequence[PerExample]) -> PerExample:
    """The gradients of a parameter that was used several times.

    Uses of one kind are one use with more positions, so that no gradient is formed.
    """
    if len(uses) == 1:
        return uses[0]
    rows, outers = _of(Rows, uses), _of(Outer, uses)
    joined: list[PerExample] = [use for use in uses if isinstance(use, (Dense, Tied))]
    if rows:
        index, grads = zip(*((r._index, r._g) for r in rows), strict=True)
        joined.append(Rows(rows[0].param, torch.cat(index, dim=1), torch.cat(grads, dim=1)))
    if outers:
        a, g = zip(*((o._a, o._g) for o in outers), strict=True)
        first = outers[0]
        joined.append(
            Outer(
                first.param,
                torch.cat(a, dim=1),
                torch.cat(g, dim=1),
                arena=first._arena,
                order=first._order,
            )
        )
    if len(joined) == 1:
        return joined[0]
    if len(joined) == 2 and rows and outers:
        return Tied(_of(Rows, joined)[0], _of(Outer, joined)[0])
    return Dense(uses[0].param, sum(use.explicit() for use in joined))  # type: ignore[arg-type]


Kind = TypeVar("Kind")


def _of(kind: type[Kind], uses: Sequence[object]) -> list[Kind]:
    return [use for use in uses if isinstance(use, kind)]


def _shaped(values: Tensor, param: Tensor, order: Order) -> Tensor:
    """From (any, numbers of the parameter) to (any, *param.shape)."""
    if order is None:
        return values.reshape(-1, *param.shape)
    places = [1 + order.index(dim) for dim in range(param.dim())]
    return values.reshape(-1, *(param.shape[dim] for dim in order)).permute(0, *places)


def _weighted(weights: Tensor, values: Tensor) -> Tensor:
    """The sum of the rows of ``values`` under weights."""
    batch, size = values.shape
    if batch * size < _CACHED or size % _SLICES:
        return weights[None].mm(values)[0]
    # A product with one row is done by one thread, several products by all.
    slices = values.view(batch, _SLICES, -1).transpose(0, 1)
    return torch.bmm(weights.expand(_SLICES, 1, batch), slices).flatten()


def _norms(values: Tensor) -> Tensor:
    """Of the vectors along the last dimension."""
    if values.shape[-1] <= _LONG_ROW and values.stride(-1) == 1:
        return torch.linalg.vector_norm(values, dim=-1)
    return (values * values).sum(dim=-1).sqrt()  # in pairs, and so loses no digits


def _balanced(inputs: Tensor, grads: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Both factors with numbers whose squares are ordinary, and the norms of their products.

    The square of a very small input vanishes, though its product with a very large gradient does
    not: its norm would be too small. Powers of two move from one factor to the other, so that their
    outer products are the same.
    """
    a, g = _norms(inputs), _norms(grads)
    if a.numel():
        least, most = torch.stack([a, g]).aminmax()
        if least > 1e-12 and most < 1e15:
            return inputs, grads, a * g
    shift = _shift(inputs, grads)
    if shift.any():
        inputs, grads = torch.ldexp(inputs, shift), torch.ldexp(grads, -shift)
    return inputs, grads, _norms(inputs) * _norms(grads)


def _shift(inputs: Tensor, grads: Tensor) -> Tensor:
    """The powers of two that :func:`_balanced` moves: none where numbers are ordinary or zero."""
    if not inputs.numel() or not grads.numel():
        return torch.zeros((*inputs.shape[:2], 1), dtype=torch.int32, device=inputs.device)
    a, g = (_largest(t) for t in (inputs, grads))
    shift = (torch.frexp(g).exponent - torch.frexp(a).exponent) // 2
    ordinary = (a > 1e-15) & (a < 1e15) & (g > 1e-15) & (g < 1e15)
    return torch.where(ordinary | (a == 0) | (g == 0) | ~(a + g).isfinite(), 0, shift)


def _largest(tensor: Tensor) -> Tensor:
    """The largest absolute value in each row, without a temporary of the tensor's size."""
    return torch.maximum(tensor.amax(dim=2, keepdim=True), -tensor.amin(dim=2, keepdim=True))


def _rounded_up(squares: Tensor, lengths: Tensor) -> Tensor:
    """Squared norms made of terms that may cancel, plus what rounding may have hidden.

    That is bounded by the square of the terms' absolute sum, ``lengths``, times a few units. What
    overflowed on the way is infinite, not zero.
    """
    squares = torch.where(squares.isfinite(), squares.clamp_min(0.0), math.inf)
    return squares + 8 * torch.finfo(squares.dtype).eps * lengths * lengths


def _hidden(terms: Tensor) -> Tensor:
    """What rounding may add to the sum of each row's terms, given their sizes.

    Each addition errs by half a unit of what there is so far, both in the norm and in the sum.
    """
    return terms.shape[1] * torch.finfo(terms.dtype).eps * terms.sum(dim=1)


def _refuse_huge(shape: tuple[int, ...]) -> None:
    if math.prod(shape) > _LARGEST:
        raise ValueError(
            f"per-example gradients of shape {shape} are too large to be formed, which the l1 "
            "norm needs: use mechanism='laplace', a smaller max_physical_batch_size, or freeze it"
        )
