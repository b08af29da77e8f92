"""The kernel of signs that needs nothing but NumPy (docs/noise.md, section 9)."""

import numpy as np
from numpy.typing import NDArray

from lap2.noise.arrays import Floats, finite_range
from lap2.noise.grid_numpy import fits

__all__ = ["MARGIN", "Counts", "Words", "count", "fits", "write"]

Words = NDArray[np.uint16]
Counts = NDArray[np.uint32]

MARGIN = 2.0**-5
"""How far a kernel's threshold for a word of 16 bits may be from the exact one."""


def count(
    values: Floats, words: Words, inverse: float, copies: int, counts: Counts
) -> NDArray[np.intp]:
    """Write how many of each value's noisy copies are positive; the indices left undecided.

    Args:
        values: u is each of them times ``inverse``.
        words: the first 16 bits of U, for each copy of each value.
        inverse: 1 over the scale and the root of the number of copies.
        copies: how many.
        counts: written to; what is undecided may be anything.
    """
    with np.errstate(over="ignore"):
        # In float64, whatever the values are: float32 does not have every scale.
        size = np.multiply(values, inverse, dtype=np.float64).astype(np.float32)
    np.abs(size, out=size)
    np.minimum(size, np.float32(60), out=size)
    np.negative(size, out=size)
    threshold = np.exp(size, out=size)
    threshold *= np.float32(2**15)
    # Words below the first flip for all continuations of their bits; from the second on, none does.
    first = np.floor(threshold - np.float32(MARGIN)).clip(min=0).astype(np.uint16)
    second = np.ceil(threshold + np.float32(MARGIN)).astype(np.uint16)
    if copies == 1:
        flips = words < first
        undecided = flips != (words < second)
        counts[:] = flips != (values >= 0)
        return undecided.nonzero()[0]
    table = words.reshape(len(values), copies)
    flips = np.count_nonzero(table < first[:, None], axis=1)
    undecided = flips != np.count_nonzero(table < second[:, None], axis=1)
    counts[:] = np.where(values >= 0, copies - flips, flips)
    return undecided.nonzero()[0]


def write(values: Floats, counts: Counts, gain: float, copies: int) -> None:
    """Replace values by ``gain (2 X - k)``, where X of k copies are positive."""
    estimates = counts * 2.0
    estimates -= copies
    estimates *= gain
    np.clip(estimates, *finite_range(values.dtype), out=estimates)
    values[:] = estimates
