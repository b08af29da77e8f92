"""Signal to noise: what a noisy gradient is worth, used linearly or through the Laplace score.

Post-processing is free, so noise should be compared by what is left after the best of it. The score
of Laplace noise is bounded: clamping each coordinate of the noisy sum at ``tau`` noise scales,

    y -> clamp(y, -tau b, tau b) / (1 - exp(-tau)),

has unit gain for small signals and noise variance ``V(tau) b^2``, with V(0+) = 1, the variance of
Gaussian noise at equal privacy in high dimension, and V(inf) = 2, the variance of the noise itself.
Everything here is in units of the noise scale b, and exact.
"""

import math
from dataclasses import dataclass

import numpy as np

from lap2 import _validate
from lap2.mechanism import Gaussian, Laplace, LaplaceL1, MajorizedLaplace, Mechanism

__all__ = [
    "SignalToNoise",
    "best_clamp",
    "clamp_variance",
    "copies",
    "effective_variance",
    "same_noise_ratio",
    "signal_to_noise",
]


def clamp_variance(tau: float) -> float:
    """``V(tau)``: the noise variance of the clamped gradient at unit gain, signal zero, in b^2.

    ``V = 2 (1 - exp(-tau) (1 + tau)) / (1 - exp(-tau))^2``, rising from 1 to 2.
    """
    return effective_variance(0.0, tau)


def effective_variance(signal: float, tau: float) -> float:
    """Variance of the clamped coordinate over the square of its gain, for a given signal, in b^2.

    The gain is how fast the clamped coordinate's mean moves with the signal, so this is the
    variance with which the average of many clamped releases tells the signal. It is never below
    1, the inverse of the Fisher information; ``tau = inf`` is the linear use: 2.

    Args:
        signal: size of the coordinate's noise-free sum, in b; at least 0.
        tau: where the noisy coordinate is clamped, in b; above 0, infinity allowed.
    """
    s = _validate.non_negative("signal", signal)
    if tau == math.inf:
        return 2.0
    t = _validate.positive("tau", tau)
    near, far = math.exp(-abs(t - s)), math.exp(-t - s)
    cosh, sinh = (near + far) / 2, (near - far) / 2  # of the smaller, times exp(-the larger)
    if s > t:
        gain, mean, square = sinh, t - sinh, t * t - 2 * (t * cosh - sinh)
    elif t < 1e-3:
        # Clamping this close is taking the sign, up to the factor t.
        gain, mean, square = math.exp(-s), -math.expm1(-s), 1.0
    else:
        own = math.exp(-2 * s)
        gain, mean = 1 - cosh, s - sinh
        square = s * s - s * (1 + own) + (1 - own) + (s + 1) * (1 + own) - 2 * (t + 1) * cosh
    # A coordinate that is always clamped tells nothing (and its variance is lost to rounding).
    return (square - mean * mean) / (gain * gain) if gain > 1e-6 else math.inf


def best_clamp(signal: float) -> tuple[float, float]:
    """The clamp ``tau`` with the least effective variance for a given signal, and that variance.

    Searched over a geometric grid of 0.001 to 1000, and no clamp at all.
    """
    grid = [*np.geomspace(1e-3, 1e3, 181).tolist(), math.inf]
    variance, tau = min((effective_variance(signal, tau), tau) for tau in grid)
    return tau, variance


def copies(dimension: int) -> int:
    """How often denoised training releases each of ``dimension`` coordinates.

    k times at ``1 / sqrt(k)`` of its size has the norm of once, so the bound of k times as many
    coordinates, and signals so small that a clamp does nearly as well as Gaussian noise. Many
    coordinates are released once, and so are few: their bound would grow with their number.
    """
    return max(1, _RELEASED // dimension) if dimension >= 32 else 1


_RELEASED = 2**17
"""The number of coordinates that repeating does not exceed: about a millisecond of noise."""


@dataclass(frozen=True)
class SignalToNoise:
    """Power of the mean clipped gradient over power of the noise.

    Attributes:
        per_step: in one step's release.
        total: over all steps, which add up when the noise is independent.
        variance: of the noise on one coordinate of the released sum, in C^2, after the use stated.
        tau: the clamp used: infinity for linear use, None for Gaussian noise.
    """

    per_step: float
    total: float
    variance: float
    tau: float | None


def signal_to_noise(
    mechanism: Mechanism,
    *,
    dimension: int,
    batch_size: float,
    steps: int,
    signal: float = 0.1,
    denoise: bool = True,
) -> SignalToNoise:
    """The signal-to-noise ratio of a run, for noise used linearly or clamped at its best.

    Args:
        mechanism: what one step releases.
        dimension: number of coordinates.
        batch_size: expected number of records in a step.
        steps: number of steps.
        signal: l2 norm of the mean clipped gradient, as a fraction of the clip: 1 if all gradients
            agree, usually far less.
        denoise: for Laplace noise, whether each coordinate is clamped at its best; on l2-clipped
            gradients, each of its :func:`copies`.

    For the l1-clipped baseline the same dense gradient must be scaled down to l1 norm C, which
    costs it a factor ``sqrt(2 n / pi)`` of its l2 norm (that of a normal direction).
    """
    n = _validate.finite_dimension("dimension", dimension)
    batch = _validate.positive("batch_size", batch_size)
    count = _validate.integer("steps", steps, least=0)
    fraction = _validate.positive("signal", signal)
    if not fraction <= 1:
        raise ValueError(f"signal must be at most 1, the clip itself, got {signal!r}")
    if not isinstance(mechanism, (Laplace, LaplaceL1, Gaussian, MajorizedLaplace)):
        raise TypeError(f"mechanism must be a single group with a guarantee, got {mechanism!r}")
    noise = _validate.positive("noise_multiplier", mechanism.noise_multiplier)
    shrunk = max(1.0, math.sqrt(2 * n / math.pi)) if isinstance(mechanism, LaplaceL1) else 1.0
    coordinate = batch * fraction / shrunk / math.sqrt(n)
    if isinstance(mechanism, Gaussian):
        tau, spread = None, 1.0
    elif denoise:
        times = copies(n) if isinstance(mechanism, Laplace) else 1
        tau, spread = best_clamp(coordinate / noise / math.sqrt(times))
    else:
        tau, spread = math.inf, 2.0
    per_step = (coordinate / noise) ** 2 / spread
    return SignalToNoise(per_step, count * per_step, spread * (noise * shrunk) ** 2, tau)


def same_noise_ratio(
    *, sampling_prob: float, noise_multiplier: float, new_sampling_prob: float
) -> float:
    """The noise multiplier that keeps ``sampling_prob / noise_multiplier`` when the batch changes.

    The "total amount of noise" of Sander, Stock and Sablayrolles (2023): runs with the same ratio
    and number of steps have about the same signal-to-noise ratio and training curve, so that a
    search at small batches predicts training at large ones. Their *privacy* is not the same:
    small batches with little noise cost far more, so a simulation is for public data or for
    choosing settings only.
    """
    q = _validate.probability("sampling_prob", sampling_prob)
    new = _validate.probability("new_sampling_prob", new_sampling_prob)
    noise = _validate.positive("noise_multiplier", noise_multiplier)
    if not q > 0:
        raise ValueError(f"sampling_prob must be above 0, got {sampling_prob!r}")
    return noise * new / q
