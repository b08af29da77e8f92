"""Seeded noise for experiments, which may be repeated: **no guarantee** holds for what uses it."""

import math
from abc import ABC, abstractmethod
from typing import Any, ClassVar

import numpy as np

from lap2 import _validate
from lap2.noise import grid_numpy, signs_numpy
from lap2.noise.arrays import finite_range
from lap2.noise.grid import check_scale, checked
from lap2.noise.grid_numpy import Noise
from lap2.noise.signs import check_copies, check_finite, estimates

__all__ = ["ReproducibleGaussian", "ReproducibleLaplace", "ReproducibleSigns"]

_CHUNK = 1 << 14
"""Coordinates handled at a time."""


class _Reproducible:
    """What the seeded samplers have in common."""

    is_secure = False
    law: ClassVar[str]

    def __init__(self, seed: int) -> None:
        """Start the generator."""
        self._rng = np.random.default_rng(_validate.integer("seed", seed, least=0))

    def added_sensitivity(self, scale: float, size: int) -> float:
        """Zero: nothing is rounded."""
        check_scale(scale)
        _validate.integer("size", size, least=0)
        return 0.0


class _ReproducibleNoise(_Reproducible, ABC):
    """Adds seeded noise to values."""

    def add(self, array: Any, scale: float) -> float:
        """Add noise in place. Refuses and clamps what :class:`SecureLaplace` does."""
        found, _, _ = checked(grid_numpy, array, scale)
        for segment in found:
            for values in segment.chunks(_CHUNK, write=True):
                noise = self._standard(values.size)
                noise *= float(scale)
                noise += values
                np.clip(noise, *finite_range(values.dtype), out=noise)
                values[:] = noise
        return 0.0

    @abstractmethod
    def _standard(self, size: int) -> Noise:
        """Noise of scale 1."""


class ReproducibleLaplace(_ReproducibleNoise):
    """Fast, seeded Laplace noise for experiments: **no guarantee** holds for what uses it.

    Args:
        seed: the same seed gives the same noise, on every machine with the same NumPy.
    """

    law = "laplace"

    def _standard(self, size: int) -> Noise:
        magnitudes = self._rng.standard_exponential(size)
        return magnitudes * (1 - 2 * self._rng.integers(0, 2, size, dtype=np.int8))


class ReproducibleGaussian(_ReproducibleNoise):
    """Fast, seeded Gaussian noise for experiments: **no guarantee** holds for what uses it.

    Args:
        seed: as for :class:`ReproducibleLaplace`.
    """

    law = "gaussian"

    def _standard(self, size: int) -> Noise:
        return self._rng.standard_normal(size)


class ReproducibleSigns(_Reproducible):
    """Fast, seeded signs for experiments: **no guarantee** holds for what uses them.

    Args:
        seed: as for :class:`ReproducibleLaplace`.
        copies: as for :class:`lap2.noise.SecureSigns`.
    """

    law = "laplace"

    def __init__(self, seed: int, copies: int = 1) -> None:
        """Start the generator."""
        super().__init__(seed)
        self.copies = check_copies(copies)

    def times(self, copies: int) -> "ReproducibleSigns":
        """The same with another number of copies, which goes on with the same generator."""
        other = ReproducibleSigns(0, copies)
        other._rng = self._rng
        return other

    def add(self, array: Any, scale: float) -> float:
        """Replace coordinates by their estimates. Refuses and clamps what ``SecureSigns`` does."""
        inverse = 1 / (check_scale(scale) * math.sqrt(self.copies))
        for segment in check_finite(array, _CHUNK, signs_numpy):
            for values in segment.chunks(_CHUNK, write=True):
                with np.errstate(over="ignore"):
                    flips = np.exp(-np.abs(values.astype(np.float64) * inverse)) / 2
                counts = self._rng.binomial(self.copies, np.where(values >= 0, 1 - flips, flips))
                exact = estimates(counts, copies=self.copies, scale=scale)
                values[:] = np.clip(exact, *finite_range(values.dtype))
        return 0.0
