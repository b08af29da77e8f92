"""What bits ought to be: signs of Laplace-noised coordinates, drawn and read by the auditor.

From the definition alone (docs/noise.md), with NumPy's generator: a coordinate s of a sum has k
bits, each of which is 1 with the probability that ``s / sqrt(k)`` plus Laplace noise of scale b is
positive. Only the public readout of counts as estimates is the library's own.
"""

import math
from collections.abc import Callable
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray
from scipy import special

from lap2.noise import estimates

__all__ = ["IdealNoise", "counts_of", "likelihood_ratio", "log_odds", "repetition", "wholeness"]

Floats = NDArray[np.float64]


def log_odds(u: Any) -> Any:
    """The log-odds of a positive sign, of noise of scale 1 that is added to ``u``.

    >>> float(log_odds(0.0)), round(float(log_odds(-1.0)), 4)
    (0.0, -1.4899)
    """
    size = np.abs(u)
    return np.copysign(size + np.log(2 - np.exp(-size)), u)


class IdealNoise:
    """Correct noise for an engine's public readout, of values or, after ``times``, of bits.

    Args:
        rng: draws it.
        copies: bits of each coordinate; zero adds noise to values.
    """

    is_secure = False
    law = "laplace"

    def __init__(self, rng: np.random.Generator, copies: int = 0) -> None:
        """Draw from ``rng``."""
        self._rng, self.copies = rng, copies

    def times(self, copies: int) -> "IdealNoise":
        """So many bits of each coordinate."""
        return IdealNoise(self._rng, copies)

    def add(self, array: Any, scale: float) -> float:
        """Make a tensor on the CPU noisy, or a list of them, in place."""
        parts = cast("list[Any]", array if isinstance(array, list) else [array])
        for part in parts:
            values: Floats = part.numpy()
            if self.copies:
                chance = special.expit(log_odds(values / (math.sqrt(self.copies) * scale)))
                counts = self._rng.binomial(self.copies, np.asarray(chance, dtype=np.float64))
                values[...] = estimates(counts, copies=self.copies, scale=scale)
            else:
                # The difference of two exponential variates.
                first, second = self._rng.standard_exponential((2, *values.shape), dtype=np.float32)
                values += scale * (first - second)
        return 0.0


def counts_of(released: Any, *, copies: int, scale: float) -> Floats:
    """The opposite of :func:`lap2.noise.estimates`, continued between and beyond whole counts."""
    table = estimates(np.arange(copies + 1), copies=copies, scale=scale)
    far = 1e6  # straight on from the ends
    first, last = table[0] - far * (table[1] - table[0]), table[-1] + far * (table[-1] - table[-2])
    counts = np.concatenate([[-far], np.arange(copies + 1), [copies + far]])
    places = np.concatenate([[first], table, [last]])
    return np.interp(np.asarray(released, dtype=np.float64), places, counts)


def likelihood_ratio(shift: Floats, *, copies: int, scale: float) -> Callable[[Floats], Floats]:
    """The log-likelihood ratio of released rows, of bits of ``shift`` to bits of nothing.

    Each positive bit counts the log-odds of its coordinate, up to a constant.
    """
    weights = log_odds(np.asarray(shift) / (math.sqrt(copies) * scale))
    return lambda rows: np.rint(counts_of(rows, copies=copies, scale=scale)) @ weights


def wholeness(counts: Floats) -> float:
    """1 if all counts are whole, near 0 if they are anything; rounded, as releases are.

    Where something of a column is not known, its counts are off by the same few numbers, with
    signs: the mean cosine is then the product of some cosines, and may be negative.

    Args:
        counts: those of a column were mixed with each other.
    """
    columns = np.cos(2 * np.pi * counts).mean(axis=0)
    return round(math.sqrt(float((columns * columns).mean())), 3)


def repetition(noisy: Floats) -> float:
    """The largest correlation of a vector with itself, moved on by any number of places."""
    power = np.abs(np.fft.rfft(noisy)) ** 2
    correlation = np.fft.irfft(power, noisy.size)
    return float(np.abs(correlation[1:]).max() / max(correlation[0], 1e-300))
