"""Attacks on the set of possible outputs: what floating point gives away whatever epsilon says.

A secret is added to noise and rounded. If the outputs that one secret can give are not those that
another can, one output may settle which it was. Each attack turns a release of several coordinates
into a score, larger when the secret 0 explains it better; the audit then counts an event, so that
no statement depends on the attack's idea of how the noise was made.
"""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

__all__ = ["SUPPORT_ATTACKS", "last_bit", "possible_numpy", "possible_torch"]

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

_NEIGHBOURS = range(-12, 13)
"""Uniform variates tried on each side of the one that the output suggests."""


def possible_torch(outputs: Floats, secret: float, scale: float, *, ulps: int = 0) -> Bools:
    """Which outputs ``secret`` plus float32 noise of ``torch.distributions.Laplace`` can be.

    torch maps 24 random bits k to ``u = k 2^-24 (1 - low) + low``, ``low = 2^-23 - 1``, and u to
    ``-scale sign(u) log1p(-|u|)``, all in float32. Some 2^24 numbers are possible noise, and the
    float32 numbers between them are not: those are the holes.

    Args:
        outputs: what was released.
        secret: what the noise was added to.
        scale: of the noise.
        ulps: how many units in the last place the logarithm may be off: 0 takes it to be correctly
            rounded, as torch's is in 99% of cases, 1 in all of them.
    """
    single = np.float32
    low = single(2.0**-23 - 1)
    y = outputs.astype(single)
    noise = y.astype(np.float64) - secret
    u = -np.expm1(-np.abs(noise) / scale) * np.sign(noise)
    start = np.rint((u - float(low)) / (1 - float(low)) * 2**24)
    found = np.zeros(y.shape, dtype=bool)
    for offset in _NEIGHBOURS:
        k = np.clip(start + offset, 0, 2**24 - 1)
        # One rounding, as a fused multiply-add has it.
        uniform = (k * 2.0**-24 * (1 - float(low)) + float(low)).astype(single)
        exact = np.log1p(-np.abs(uniform.astype(np.float64)))
        size = exact.astype(single)
        for unit in range(-ulps, ulps + 1):
            logarithm = size + single(unit) * np.spacing(size)
            made = -(single(scale) * np.sign(uniform)) * logarithm
            found |= single(secret) + made == y
    return found


def possible_numpy(outputs: Floats, secret: float, scale: float, *, ulps: int = 0) -> Bools:
    """Which outputs ``secret`` plus float64 noise of ``numpy.random.Generator.laplace`` can be.

    NumPy maps a multiple U of 2^-54 to ``scale log(2 U)`` below 1/2 and ``-scale log(2 - 2 U)``
    from there on. Near zero the float64 numbers are finer than that, which leaves holes. The
    arguments are those of :func:`possible_torch`.
    """
    noise = outputs - secret
    tail = np.exp(-np.abs(noise) / scale)  # 2 U, or 2 - 2 U
    start = np.rint(tail * 2.0**53)
    found = np.zeros(outputs.shape, dtype=bool)
    for offset in _NEIGHBOURS:
        size = np.log(np.clip(start + offset, 1, 2.0**53) * 2.0**-53)
        for unit in range(-ulps, ulps + 1):
            logarithm = size + unit * np.spacing(size)
            made = np.copysign(scale * logarithm, noise)
            found |= secret + made == outputs
    return found


def last_bit(outputs: Floats) -> Floats:
    """The exponent of the lowest bit that is set: how fine a number is, 1100 for zero.

    Ordinary noise is fine near zero if the secret is 0 and only there; a secret of size 1 makes
    the outputs near zero coarse, because they are differences of numbers near 1.
    """
    mantissa, exponent = np.frexp(outputs)
    whole = np.abs(mantissa * 2.0**53).astype(np.int64)
    lowest = np.frexp((whole & -whole).astype(np.float64))[1] - 1
    return np.where(outputs == 0, 1100.0, lowest - 53.0 + exponent)


def _by(possible: Callable[[Floats, float, float], Bools]) -> Callable[..., Floats]:
    def score(outputs: Floats, secret: float, scale: float) -> Floats:
        with_zero = possible(outputs, 0.0, scale).sum(axis=1)
        return (with_zero - possible(outputs, secret, scale).sum(axis=1)).astype(np.float64)

    return score


def _precision(outputs: Floats, secret: float, scale: float) -> Floats:  # noqa: ARG001
    return -last_bit(outputs).min(axis=1)


SUPPORT_ATTACKS: dict[str, Callable[[Floats, float, float], Floats]] = {
    "torch float32 holes": _by(possible_torch),
    "numpy float64 holes": _by(possible_numpy),
    "fineness": _precision,
}
"""Scores of rows of outputs against a secret other than 0, by name."""
