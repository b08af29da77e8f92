"""The kernel: log-moments of the likelihood ratio, for one coordinate and for a whole release.

Everything is in units of the noise scale b: a coordinate that a record can move by ``v`` has
shift ``x = |v| / b``. Symbols are those of docs/theory.md.
"""

import math
from dataclasses import dataclass, field
from functools import singledispatch

import numpy as np
from numpy.typing import ArrayLike, NDArray

from lap2.mechanism import Gaussian, Joint, Laplace, LaplaceL1, Mechanism

__all__ = ["Shift", "log_f", "log_moment", "worst_shift"]

Floats = NDArray[np.float64]

_SERIES = [1 / math.factorial(k) for k in range(2, 13)]


def _expm1_minus(y: Floats) -> Floats:
    """``exp(y) - 1 - y`` without cancellation (never negative); relative error below 1e-14."""
    series = y * y * np.polynomial.polynomial.polyval(y, _SERIES)
    return np.where(np.abs(y) < 0.1, series, np.expm1(y) - y)


def log_f(x: ArrayLike, eta: ArrayLike) -> Floats:
    """``log F(x, eta)``, the log-moment of order ``eta`` of one coordinate with shift ``x``.

    ``F(x, eta) = E_{z ~ Lap(0, 1)} [(density of Lap(x, 1) / density of Lap(0, 1))(z) ** eta]
    = (eta exp((eta-1) x) + (eta-1) exp(-eta x)) / (2 eta - 1)``, exact (docs/theory.md, section 2).

    Args:
        x: shifts in units of b, at least 0 (infinity allowed for eta > 1).
        eta: orders, real, 0 or at least 1; broadcast against ``x``.

    Returns:
        The values, with relative error below 1e-14 and no overflow. Shifts below 1e-150, whose
        squares leave the range of floats, are not met: see :func:`ratio` and the largest dimension.
    """
    x, eta = np.asarray(x, dtype=np.float64), np.asarray(eta, dtype=np.float64)
    growth = (eta - 1) * x
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        # The two first-order terms cancel exactly, so they are left out of both.
        excess = (eta * _expm1_minus(growth) + (eta - 1) * _expm1_minus(-eta * x)) / (2 * eta - 1)
        small = np.log1p(excess)
        large = (
            growth
            + np.log(eta / (2 * eta - 1))
            + np.log1p((1 - 1 / np.maximum(eta, 1)) * np.exp(-(2 * eta - 1) * x))
        )
    return np.where(growth <= 1, small, large)


@dataclass(frozen=True)
class Shift:
    """How far one record can move a release, coordinate by coordinate, in units of the noise scale.

    It is the worst case of a mechanism, in the form the moments need: ``counts[j]`` coordinates
    with Laplace noise move by ``values[j]``, and all Gaussian coordinates together contribute
    ``quadratic = |v|^2 / sigma^2``.
    """

    quadratic: float = 0.0
    values: Floats = field(default_factory=lambda: np.empty(0))
    counts: Floats = field(default_factory=lambda: np.empty(0))
    shared_sample: bool = True
    """False only for the published bound, in which each coordinate draws a sample of its own."""

    @property
    def l1(self) -> float:
        """The l1 norm of the shift: the epsilon of one unsampled release with delta = 0."""
        if self.quadratic > 0:
            return math.inf
        with np.errstate(over="ignore"):
            return float(self.counts @ self.values)


def log_moment(shift: Shift, eta: ArrayLike) -> Floats:
    """Log-moments ``m(eta)`` of one unsampled release: the sum over its coordinates.

    Exact for the given shift; zero at eta = 0 and 1, convex in eta. An upper bound for a
    mechanism when the shift is its worst one (docs/theory.md, theorem 1).
    """
    eta = np.asarray(eta, dtype=np.float64)
    per_value = log_f(shift.values[:, None], eta.ravel())
    laplace = np.tensordot(shift.counts, per_value, axes=1).reshape(eta.shape)
    return laplace + shift.quadratic * (eta * (eta - 1) / 2)


def ratio(noise_multiplier: float) -> float:
    """``rho = C / b``, infinite for zero noise.

    Never below 1e-100: more noise than that buys nothing. Spread over fewer than 2^63 coordinates
    it leaves shifts above 1e-110, whose squares and their sums over all coordinates are ordinary
    floats: nothing underflows to a release that looks free.
    """
    return max(1 / noise_multiplier, 1e-100) if noise_multiplier else math.inf


@singledispatch
def worst_shift(mechanism: Mechanism) -> Shift:
    """The shift whose moments bound every pair of neighbours of ``mechanism``, at all orders.

    Refuses what it does not know: a type without a registered shift is not private.
    """
    raise TypeError(
        f"mechanism must be a description that lap2 can account for, got {mechanism!r} "
        f"of type {type(mechanism).__name__}"
    )


@worst_shift.register
def _(mechanism: Laplace) -> Shift:
    """Exact (docs/theory.md, theorem 1): all coordinates move alike; in the limit, a Gaussian."""
    rho = ratio(mechanism.noise_multiplier)
    if mechanism.dimension == math.inf:
        return Shift(quadratic=rho * rho)
    return Shift(
        values=np.array([rho / math.sqrt(mechanism.dimension)]),
        counts=np.array([float(mechanism.dimension)]),
    )


@worst_shift.register
def _(mechanism: LaplaceL1) -> Shift:
    """Exact: log F is convex in the shift, so over the l1 ball one coordinate takes it all."""
    return Shift(values=np.array([ratio(mechanism.noise_multiplier)]), counts=np.ones(1))


@worst_shift.register
def _(mechanism: Gaussian) -> Shift:
    """Exact: rotation invariance makes all directions alike."""
    rho = ratio(mechanism.noise_multiplier)
    return Shift(quadratic=rho * rho)


@worst_shift.register
def _(mechanism: Joint) -> Shift:
    """Exact for the joint release: the groups' worst cases can all be met by one record."""
    shifts = [worst_shift(group) for group in mechanism.groups]
    return Shift(
        quadratic=math.fsum(shift.quadratic for shift in shifts),
        values=np.concatenate([shift.values for shift in shifts]),
        counts=np.concatenate([shift.counts for shift in shifts]),
    )
