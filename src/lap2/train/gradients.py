"""Per-example gradients in a few shapes, none of them larger than it must be.

Each kind knows its parameter, how long every example's gradient is, and how to add the examples'
gradients, under given weights, to a sum. Which layer has which is in :mod:`lap2.train.layers`; a
parameter that is used several times has the :func:`summed` of them.
"""

# pyright: basic

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from lap2.train.arena import Arena
from lap2.train.compiled import kernel

__all__ = [
    "Dense",
    "Outer",
    "PerExample",
    "Probes",
    "Rows",
    "Size",
    "Tied",
    "best_formed",
    "summed",
]

_LARGEST = 1 << 29
"""Explicit gradients of more numbers than this (2 GB in float32) are refused."""

_CACHED = 1 << 18
"""Numbers of gradients that are formed or widened at a time, if each is needed once."""

_WIDENED = 1 << 24
"""Numbers of inputs and gradients that are held in float64 at a time, 128 MB."""

_WORTH_THREADS = 1 << 18
"""Numbers whose sum takes longer than to wake a thread."""

Order = tuple[int, ...] | None


class Size(NamedTuple):
    """How long every example's gradient is.

    Attributes:
        norms: at least its norm; rounded up where rounding could hide some of it.
        lengths: at least the sum of the norms of the terms that the gradient is a sum of, which
            rounding errors are in proportion to.
    """

    norms: Tensor
    lengths: Tensor


class Probes(NamedTuple):
    """A few random matrices of rank one, shaped as a parameter, to tell its gradients apart.

    Attributes:
        first: factors for the parameter's first dimension, (size, probes).
        rest: factors for all others together, (size, probes).
    """

    first: Tensor
    rest: Tensor

    @classmethod
    def of(cls, param: Tensor, count: int) -> "Probes":
        """The same for every parameter of this shape."""
        first = param.shape[0] if param.dim() else 1
        made = _random_factors(first, param.numel() // max(1, first), count)
        return cls(*(_home(param, values) for values in made))

    def of_gradient(self, grad: Tensor) -> Tensor:
        """Inner products with (any, *param.shape), for each of any."""
        flat = grad.reshape(grad.shape[0], len(self.first), len(self.rest)).to(self.first)
        return ((flat @ self.rest) * self.first).sum(dim=1)


@functools.lru_cache(maxsize=64)
def _random_factors(first: int, rest: int, count: int) -> tuple[Tensor, Tensor]:
    maker = torch.Generator().manual_seed(first * rest)
    one, other = (
        torch.randn(n, count, generator=maker, dtype=torch.float64) for n in (first, rest)
    )
    return one, other


class PerExample(Protocol):
    """The gradients of one parameter, one per example of a batch."""

    param: Tensor
    terms: int
    """How many terms each example's gradient is a sum of when gradients are added up."""

    def size(self, power: int, dtype: torch.dtype) -> Size:
        """By their l1 or l2 norm (``power``), in arithmetic of a type."""
        ...

    def add_to(self, total: Tensor, weights: Tensor) -> None:
        """Add ``weights[i]`` times the i-th gradient, for all i, to a tensor like the parameter."""
        ...

    def zero(self, bad: Tensor) -> None:
        """Make the gradients of the examples marked ``bad`` zero, whatever they hold."""
        ...

    def explicit(self) -> Tensor:
        """All of them, with the batch as first dimension."""
        ...

    def project(self, probes: Probes) -> Tensor:
        """The inner product of each gradient with each probe, (batch, probes)."""
        ...


class Dense:
    """Gradients that are held as they are: biases, convolutions, and everything small.

    Args:
        param: the parameter.
        values: of shape (batch, *param.shape).
        order: of the parameter's dimensions in ``values``, if it is another.
        squares: squared norms of the examples' values, if they are known, in float64.
        lengths: sums of the l1 and of the l2 norms of the terms the values were formed of, if these
            may cancel, and what is left is made of rounding.
    """

    terms = 1

    def __init__(
        self,
        param: Tensor,
        values: Tensor,
        *,
        order: Order = None,
        squares: Tensor | None = None,
        lengths: tuple[Tensor, Tensor] | None = None,
    ) -> None:
        """Keep the values in the order they have."""
        self.param, self._values = param, values.reshape(values.shape[0], param.numel())
        self._order, self._squares, self._lengths = order, squares, lengths

    def size(self, power: int, dtype: torch.dtype) -> Size:
        """See :class:`PerExample`."""
        if power == 2 and self._squares is not None:
            norms = self._squares.sqrt().to(dtype)
        else:
            norms = _norms(self._values, power, dtype)
        known = None if self._lengths is None else self._lengths[power - 1].to(norms)
        return Size(norms, norms if known is None else torch.maximum(norms, known))

    def add_to(self, total: Tensor, weights: Tensor) -> None:
        """See :class:`PerExample`."""
        _add_rows(_ordered(total, self._order), weights, self._values)

    def zero(self, bad: Tensor) -> None:
        """See :class:`PerExample`."""
        self._values, self._squares = self._values.masked_fill(bad[:, None], 0.0), None
        self._lengths = None

    def explicit(self) -> Tensor:
        """See :class:`PerExample`."""
        return _shaped(self._values, self.param, self._order)

    def project(self, probes: Probes) -> Tensor:
        """See :class:`PerExample`."""
        return probes.of_gradient(self.explicit())


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
        self._formed = positions > 1 and best_formed(positions, width, grads.shape[2])
        self._values: Tensor | None = None
        self.terms = 1 if self._formed else positions

    def size(self, power: int, dtype: torch.dtype) -> Size:
        """See :class:`PerExample`. Never forms a gradient when positions are few."""
        a, g = self._factors(self._a, self._g, dtype)
        if self._formed or a.shape[1] == 1:
            lengths = (_norms(a, power, dtype) * _norms(g, power, dtype)).sum(dim=1)
            if not self._formed:
                return Size(lengths, lengths)
            # Where terms cancel, what is left of them is rounding: that must not be all there is.
            norms = _norms(self._form().flatten(1), power, dtype)
            return Size(norms, torch.maximum(norms, lengths))
        if power == 1:
            return self._abs_size(a, g)
        return _products_size(a, g)

    def _abs_size(self, a: Tensor, g: Tensor) -> Size:
        """By their l1 norm, which needs them formed: a few at a time."""
        shape = (1, g.shape[2], a.shape[2])
        _refuse_huge(shape)
        count = max(1, _CACHED // math.prod(shape))
        held = a.new_empty((count, *shape[1:]))
        pieces = zip(g.mT.split(count), a.split(count), strict=True)
        formed = (torch.bmm(one, other, out=held[: len(one)]) for one, other in pieces)
        sums = torch.cat([values.abs_().sum(dim=(1, 2)) for values in formed])
        lengths = (a.abs().sum(dim=2) * g.abs().sum(dim=2)).sum(dim=1)
        return Size(sums + a.shape[1] * _eps(sums) * lengths, lengths)

    def add_to(self, total: Tensor, weights: Tensor) -> None:
        """See :class:`PerExample`."""
        if self._formed:
            _add_rows(_ordered(total, self._order), weights, self._form().flatten(1))
            return
        shape = (self._g.shape[2], self._a.shape[2])
        in_place = self._order is None and total.dtype == weights.dtype
        found = total.view(shape) if in_place else total.new_zeros(shape, dtype=weights.dtype)
        count = max(1, _WIDENED // max(1, self._a[0].numel() + self._g[0].numel()))
        pieces = (t.split(count) for t in (self._a, self._g, weights))
        for inputs, grads, some in zip(*pieces, strict=True):
            a, g = self._factors(inputs, grads, weights.dtype)
            g.mul_(some[:, None, None])
            found.addmm_(g.flatten(0, 1).mT, a.flatten(0, 1))
        if not in_place:
            ordered = _ordered(total, self._order)
            ordered += found.view(ordered.shape)

    def zero(self, bad: Tensor) -> None:
        """See :class:`PerExample`."""
        mask = bad[:, None, None]
        self._a, self._g = self._a.masked_fill(mask, 0.0), self._g.masked_fill(mask, 0.0)
        self._values = None if self._values is None else self._values.masked_fill(mask, 0.0)

    def explicit(self) -> Tensor:
        """See :class:`PerExample`."""
        return _shaped(self._form(), self.param, self._order)

    def project(self, probes: Probes) -> Tensor:
        """See :class:`PerExample`."""
        rest = probes.rest
        if self._order is not None:
            shape = [self.param.shape[dim] for dim in range(1, self.param.dim())]
            places = [dim - 1 for dim in self._order[1:]]
            rest = rest.view(*shape, -1).permute(*places, len(shape)).reshape(len(rest), -1)
        a, g = (_home(t, t).to(rest) for t in (self._a, self._g))
        return ((g @ probes.first) * (a @ rest)).sum(dim=1)

    def _factors(self, a: Tensor, g: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Copies in a type in which squares neither vanish nor overflow; valid until the next."""
        gained = dtype not in {a.dtype, g.dtype}
        shift = None if gained else _shift(a, g)
        a, g = (_home(t, t) for t in (a, g))
        a, g = self._arena.widened("inputs", a, dtype), self._arena.widened("grads", g, dtype)
        if shift is not None:
            a, g = torch.ldexp(a, shift), torch.ldexp(g, -shift)
        return a, g

    def _form(self) -> Tensor:
        """In float64, whatever cancels: float32 would leave what depends on the order of terms."""
        if self._values is not None:
            return self._values
        shape = (self._a.shape[0], self._g.shape[2], self._a.shape[2])
        _refuse_huge(shape)
        a, g = _alike(self._a, self._g)
        a, g = self._factors(a, g, a.dtype if a.device.type == "mps" else torch.float64)
        if not self._formed:
            return torch.bmm(g.mT, a)
        self._values = self._arena.empty(shape, a)
        return torch.bmm(g.mT, a, out=self._values)


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
        self.terms = index.shape[1]

    def size(self, power: int, dtype: torch.dtype) -> Size:
        """See :class:`PerExample`. Positions with the same row add up before they are squared."""
        g = _home(self._g, self._g).to(dtype)
        if power == 1:
            lengths = g.abs().sum(dim=(1, 2))
            sums = _abs_sums(self.explicit(), dtype)
            # They were added up in the type of the gradients.
            return Size(sums + g.shape[1] * _eps(self._g) * lengths, lengths)
        inner = torch.bmm(g, g.mT)
        lengths = _diagonal(inner).sqrt().sum(dim=1)
        same = self._index[:, :, None] == self._index[:, None, :]
        inner = inner.mul_(_home(same, same)).sum(dim=(1, 2))
        return _upper(inner, lengths, g.shape[2] + g.shape[1] ** 2)

    def add_to(self, total: Tensor, weights: Tensor) -> None:
        """See :class:`PerExample`."""
        g = _home(self._g, self._g).to(total.dtype) * weights[:, None, None]
        index = _home(self._index, self._index).flatten()
        total.index_add_(0, index, g.flatten(0, 1))

    def zero(self, bad: Tensor) -> None:
        """See :class:`PerExample`."""
        self._g = self._g.masked_fill(bad[:, None, None], 0.0)

    def explicit(self) -> Tensor:
        """See :class:`PerExample`."""
        batch, _, width = self._g.shape
        shape = (batch, self.param.shape[0], width)
        index = self._index[:, :, None].expand(-1, -1, width)
        _refuse_huge(shape)
        g = _home(self._g, self._g).double()
        return g.new_zeros(shape).scatter_add_(1, _home(index, index), g)

    def project(self, probes: Probes) -> Tensor:
        """See :class:`PerExample`."""
        index, g = (_home(t, t) for t in (self._index, self._g))
        return (probes.first[index] * (g.to(probes.rest) @ probes.rest)).sum(dim=1)


class Tied:
    """Gradients of a table that is looked up *and* applied as a weight: tied embeddings.

    The norm of the sum needs the inner product of both parts, which is found without forming
    either: ``<sum_t e_{i_t} r_t^T, sum_s g_s a_s^T> = sum_{t,s} g_s[i_t] <r_t, a_s>``.
    """

    def __init__(self, rows: Rows, outer: Outer) -> None:
        """Take the gradients of both uses of one parameter."""
        self.param, self._rows, self._outer = rows.param, rows, outer
        # Formed, it would be rounded: its inner products with the rows are those of its factors.
        outer._formed, outer._values, outer.terms = False, None, outer._a.shape[1]
        self.terms = rows.terms + outer.terms

    def size(self, power: int, dtype: torch.dtype) -> Size:
        """See :class:`PerExample`."""
        rows, outer = self._rows.size(power, dtype), self._outer.size(power, dtype)
        lengths = rows.lengths + outer.lengths
        if power == 1:
            sums = _abs_sums(self.explicit(), dtype)
            # In the type of the gradients, so that parts of it were rounded there.
            eps = max(_eps(self._rows._g), _eps(self._outer._g))
            return Size(sums + 2 * self.terms * eps * lengths, lengths)
        a, g = self._outer._factors(self._outer._a, self._outer._g, dtype)
        index, r = (_home(t, t) for t in (self._rows._index, self._rows._g))
        batch, positions, outputs = g.shape
        taken = g.gather(2, index[:, None, :].expand(batch, positions, -1))
        cross = taken.mul_(torch.bmm(a, r.to(dtype).mT)).sum(dim=(1, 2))
        inner = rows.norms.square() + outer.norms.square() + 2 * cross
        additions = a.shape[2] + outputs + self.terms**2
        return _upper(inner, lengths, additions)

    def add_to(self, total: Tensor, weights: Tensor) -> None:
        """See :class:`PerExample`."""
        self._outer.add_to(total, weights)
        self._rows.add_to(total, weights)

    def zero(self, bad: Tensor) -> None:
        """See :class:`PerExample`."""
        self._rows.zero(bad)
        self._outer.zero(bad)

    def explicit(self) -> Tensor:
        """See :class:`PerExample`."""
        return self._rows.explicit().add_(self._outer.explicit())

    def project(self, probes: Probes) -> Tensor:
        """See :class:`PerExample`."""
        return self._rows.project(probes) + self._outer.project(probes)


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


def _ordered(total: Tensor, order: Order) -> Tensor:
    """A view of a tensor like the parameter, with its dimensions in another order."""
    return total if order is None else total.permute(*order)


def _home(like: Tensor, tensor: Tensor) -> Tensor:
    """The tensor where float64 can be computed with: on the device of ``like``, if that can."""
    return tensor.to("cpu" if like.device.type == "mps" else like.device)


def _alike(a: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """Both in the wider of their types."""
    dtype = torch.promote_types(a.dtype, g.dtype)
    return a.to(dtype), g.to(dtype)


def _add_rows(total: Tensor, weights: Tensor, values: Tensor) -> None:
    """Add the sum of the rows of ``values`` under weights to a tensor of as many numbers."""
    values = _home(values, values)
    flat = total if total.is_contiguous() else total.new_zeros(total.shape)
    compiled = kernel("sum") if values.numel() > _CACHED // 8 else None
    if compiled is not None and compiled.fits(weights, values, flat):
        threads = torch.get_num_threads() if values.numel() > _WORTH_THREADS else 1
        compiled.add(weights, values, flat, threads)
    else:
        count = max(1, _CACHED // max(1, values.shape[1]))
        sums = flat.view(-1)
        for some, factors in zip(values.split(count), weights.split(count), strict=True):
            sums.addmv_(some.to(total.dtype).mT, factors.to(total.dtype))
    if flat is not total:
        total += flat


def _norms(values: Tensor, power: int, dtype: torch.dtype) -> Tensor:
    """Of the vectors along the last dimension."""
    values = _home(values, values)
    if values.dtype == dtype or values.numel() <= _CACHED:
        return torch.linalg.vector_norm(values.to(dtype), power, dim=-1)
    rows = values.flatten(0, -2)
    count = max(1, _CACHED // max(1, rows.shape[1]))
    found = [torch.linalg.vector_norm(some.to(dtype), power, dim=1) for some in rows.split(count)]
    return torch.cat(found).view(values.shape[:-1])


def _abs_sums(values: Tensor, dtype: torch.dtype) -> Tensor:
    return _norms(values.flatten(1), 1, dtype)


def _diagonal(squares: Tensor) -> Tensor:
    return squares.diagonal(dim1=1, dim2=2).clone()


def _products_size(a: Tensor, g: Tensor) -> Size:
    """Norms and lengths of ``sum_t g_t a_t^T``, from inner products."""
    inner_a, inner_g = torch.bmm(a, a.mT), torch.bmm(g, g.mT)
    lengths = (_diagonal(inner_a) * _diagonal(inner_g)).sqrt().sum(dim=1)
    inner = inner_a.mul_(inner_g).sum(dim=(1, 2))
    return _upper(inner, lengths, a.shape[2] + g.shape[2] + a.shape[1] ** 2)


def _upper(inner: Tensor, lengths: Tensor, additions: int) -> Size:
    """Norms of sums whose terms may cancel, at their upper end, from computed squares.

    The squares are sums of products of inner products of the terms; each is wrong by at most half
    a unit for each addition in it, in proportion to what the terms would add up to if they did not
    cancel. What overflowed on the way is infinite, not zero.
    """
    slack = (additions + 8) * _eps(inner) * lengths.square()
    inner = torch.where(inner.isfinite(), inner.clamp_min(0.0), math.inf)
    return Size((inner + slack).sqrt(), lengths)


def _eps(tensor: Tensor) -> float:
    """Two units: each bound below that is made of units is doubled, for what is of second order."""
    return torch.finfo(tensor.dtype).eps


def _shift(inputs: Tensor, grads: Tensor) -> Tensor:
    """Powers of two to move from gradients to inputs, so that the squares of both are ordinary.

    The square of a very small input vanishes, though its product with a very large gradient does
    not: its norm would be too small. None where numbers are ordinary or zero.
    """
    if not inputs.numel() or not grads.numel():
        return torch.zeros((*inputs.shape[:2], 1), dtype=torch.int32, device=inputs.device)
    a, g = (_largest(t) for t in (inputs, grads))
    shift = (torch.frexp(g).exponent - torch.frexp(a).exponent) // 2
    ordinary = (a > 1e-15) & (a < 1e15) & (g > 1e-15) & (g < 1e15)
    return torch.where(ordinary | (a == 0) | (g == 0) | ~(a + g).isfinite(), 0, shift)


def _largest(tensor: Tensor) -> Tensor:
    """The largest absolute value in each row, without a temporary of the tensor's size."""
    return torch.maximum(tensor.amax(dim=2, keepdim=True), -tensor.amin(dim=2, keepdim=True))


def _refuse_huge(shape: tuple[int, ...]) -> None:
    if math.prod(shape) > _LARGEST:
        raise ValueError(
            f"per-example gradients of shape {shape[1:]} are too large to be formed, which the l1 "
            "norm needs: use mechanism='laplace', a smaller max_physical_batch_size, or freeze it"
        )
