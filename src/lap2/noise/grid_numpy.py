"""The noise kernel that needs nothing but NumPy (docs/noise.md, section 4)."""

import math

import numpy as np
from numpy.typing import NDArray

from lap2.noise.arrays import Floats, finite_range

__all__ = ["Noise", "Words", "add", "fits", "gaussian", "laplace"]

Words = NDArray[np.uint64]
Noise = NDArray[np.float64]

_U = np.uint64((1 << 63) - 1)
"""The bits of a word that belong to the uniform variate; the other one is the sign."""
_COS = [(-1) ** n / math.factorial(2 * n) for n in range(9)]
_SIN = [(-1) ** n / math.factorial(2 * n + 1) for n in range(9)]


def fits(values: Floats, limit: float) -> bool:
    """Whether all values are between ``-limit`` and ``limit``; NaN is not."""
    return float(values.max()) < limit and float(values.min()) > -limit


def laplace(words: Words, ratio: float, noise: Noise) -> NDArray[np.intp]:
    """Write ``floor(X / g) + 1/2`` for each word; the indices left undecided, NaN in ``noise``.

    The first bit of a word is the sign, the other 63 are u and begin U; X = -b ln U, signed.
    ``floor(-ln(U) b/g)`` is trusted where it is further from an integer than float64 can err
    (taking the platform's logarithm to be right to 2^-50) and than the bits of U that follow can
    matter, which is 1/u.
    """
    u = words & _U
    noise[:] = u
    margin = u.view(np.float64)  # u is done with: memory that is in the cache is faster
    with np.errstate(divide="ignore", invalid="ignore"):  # u = 0
        np.divide(ratio, noise, out=margin)
        noise *= 2.0**-63
        y = np.log(noise, out=noise)
        y *= -ratio
        middle = y * 2.0**-49
        margin += middle
        margin += ratio * 2.0**-50
        np.floor(y, out=middle)
        middle += 0.5
        y -= middle
    np.abs(y, out=y)
    np.subtract(0.5, y, out=y)
    undecided = (~(y > margin)).nonzero()[0]
    np.copysign(middle, words.view(np.float64), out=noise)
    noise[undecided] = np.nan
    return undecided


def gaussian(words: Words, ratio: float, noise: Noise) -> NDArray[np.intp]:
    """The same for normal X; each two words make two coordinates.

    The first bits are the signs. The others begin U and V, of which the magnitudes are
    ``sigma sqrt(-ln U) (cos t -+ sin t)`` with ``t = pi/2 (V - 1/2)``.
    """
    uv = np.empty((2, words.size // 2))
    uv[:] = (words & _U).reshape(-1, 2).T
    u, v = uv
    y = noise.reshape(-1, 2)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):  # u = 0, and U = 1
        log = np.log(u * 2.0**-63)
        np.negative(log, out=log)
        stretch = ratio / np.sqrt(log)
        np.divide(2.0, u, out=u)
        u += 2.0**-50
        u += log * (6 * 2.0**-50)
        u *= stretch
        stretch *= log
        v -= 2.0**62
        v *= math.pi / 2**64
        s = v * v
        cosine, sine = _series(_COS, s), _series(_SIN, s)
        sine *= v
        np.subtract(cosine, sine, out=y[:, 0])
        np.add(cosine, sine, out=y[:, 1])
        y *= stretch[:, None]
        middle = np.floor(y)
        middle += 0.5
        y -= middle
        np.abs(y, out=y)
        undecided = (~(y < np.subtract(0.5, u)[:, None])).ravel().nonzero()[0]
    np.copysign(middle.ravel(), words.view(np.float64), out=noise)
    noise[undecided] = np.nan
    return undecided


def _series(coefficients: list[float], s: Noise) -> Noise:
    total = np.full_like(s, coefficients[-1])
    for coefficient in coefficients[-2::-1]:
        total *= s
        total += coefficient
    return total


def add(values: Floats, noise: Noise, grid: float) -> None:
    """Round ``values`` to the grid, add ``noise`` grid steps and clamp, in place.

    The float64 sum is a correctly rounded function of the exact one: post-processing.
    """
    released = values.astype(np.float64)
    released *= 1 / grid
    np.rint(released, out=released)
    released += noise
    released *= grid
    np.clip(released, *finite_range(values.dtype), out=released)
    values[:] = released
