"""The majorization set of the Lap2 paper, its sound use and its published one.

The set ``x_j = C (sqrt(j) - sqrt(j-1))`` weakly majorizes the absolute coordinates of every
vector of l2 norm at most C, so a sum of increasing convex functions over it bounds the same sum
over any clipped gradient. :class:`~lap2.MajorizedLaplace` uses that inside one Binomial mean and
is a guarantee; :class:`~lap2.PublishedLaplace` uses it outside, as printed, and is not.
"""

import math
from functools import lru_cache

import numpy as np
from numpy.typing import ArrayLike, NDArray

from lap2 import _validate
from lap2.divergence import Shift, ratio, worst_shift
from lap2.mechanism import MajorizedLaplace, PublishedLaplace

__all__ = ["grouped_majorization_set", "majorization_set", "weakly_majorizes"]

Floats = NDArray[np.float64]

_SINGLES = 512
"""Coordinates of the set that are kept one by one; the rest come in groups."""
_GROWTH = 1.005
"""Each group ends at this multiple of where it starts."""


def majorization_set(n: int, C: float = 1.0) -> Floats:  # noqa: N803 - the paper's symbol
    """The set ``C (sqrt(j) - sqrt(j-1))``, j = 1..n, in decreasing order (paper, section III-B).

    Its partial sums are ``C sqrt(k)``, the most that k coordinates of a vector of l2 norm C can
    sum to: it is the smallest set that weakly majorizes them all.
    """
    n = _validate.finite_dimension("n", n)
    scale = _validate.non_negative("C", C)
    return scale * _element(np.arange(1, n + 1, dtype=np.float64))


def _element(j: Floats) -> Floats:
    """``sqrt(j) - sqrt(j-1)`` without cancellation."""
    return 1 / (np.sqrt(j) + np.sqrt(j - 1))


def weakly_majorizes(x: ArrayLike, y: ArrayLike) -> bool:
    """Whether, for every k, the k largest entries of ``x`` sum to at least those of ``y``.

    Both hold non-negative numbers (for a gradient, its absolute coordinates); the shorter one is
    padded with zeros. Sums are compared up to a rounding error of 1e-12 relative.
    """
    a, b = _descending("x", x), _descending("y", y)
    size = max(a.size, b.size)
    sums_a, sums_b = (np.cumsum(np.pad(v, (0, size - v.size))) for v in (a, b))
    return bool(np.all(sums_a >= sums_b * (1 - 1e-12)))


def _descending(name: str, vector: ArrayLike) -> Floats:
    entries = np.asarray(vector, dtype=np.float64).ravel()
    if not np.all(entries >= 0):
        raise ValueError(f"{name} must hold non-negative numbers only, got {vector!r}")
    return -np.sort(-entries)


@lru_cache(maxsize=32)
def grouped_majorization_set(n: int) -> tuple[Floats, Floats]:
    """The majorization set of ``n`` coordinates (C = 1) as few (values, counts): an upper bound.

    The first 512 coordinates stay as they are. A later group of coordinates j = a+1..b, whose
    sum is ``sqrt(b) - sqrt(a)``, becomes two values, its largest and its smallest, with real
    counts that keep the number of coordinates and their sum. That replacement majorizes the
    group, so for every convex function the grouped sum is **at least** the plain one
    (Schur-convexity). For an unsampled log-moment the relative excess is proven to stay below
    1.6e-6, and epsilon was never seen to rise by more than 4e-6 (docs/theory.md, section 7);
    n = 125 million needs about 5,400 values.
    """
    n = _validate.finite_dimension("n", n)
    edges = [min(n, _SINGLES)]
    while edges[-1] < n:
        edges.append(min(n, math.ceil(edges[-1] * _GROWTH)))
    below, end = np.array(edges[:-1], dtype=np.float64), np.array(edges[1:], dtype=np.float64)
    largest, smallest, size = _element(below + 1), _element(end), end - below
    total = size / (np.sqrt(end) + np.sqrt(below))
    spread = largest - smallest
    at_largest = np.divide(
        total - size * smallest, spread, out=np.zeros_like(size), where=spread > 0
    ).clip(0, size)
    singles = majorization_set(edges[0])
    values = np.concatenate([singles, largest, smallest])
    counts = np.concatenate([np.ones_like(singles), at_largest, size - at_largest])
    values.flags.writeable = counts.flags.writeable = False
    return values, counts


@worst_shift.register
def _(mechanism: MajorizedLaplace) -> Shift:
    """Upper bound: log F(., eta) is convex and increasing, so the set bounds every gradient."""
    values, counts = grouped_majorization_set(mechanism.dimension)
    return Shift(values=values * ratio(mechanism.noise_multiplier), counts=counts)


@worst_shift.register
def _(mechanism: PublishedLaplace) -> Shift:
    """Not a bound (docs/theory.md, section 4): the coordinates do not share their sample."""
    values, counts = grouped_majorization_set(mechanism.dimension)
    return Shift(
        values=values * ratio(mechanism.noise_multiplier), counts=counts, shared_sample=False
    )
