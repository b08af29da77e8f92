"""Signal to noise: what a noisy gradient is worth, released as values or as signs.

Post-processing is free, so noise should be compared by what is left after the best of it. At equal
privacy in high dimension Laplace noise has the scale of Gaussian noise but twice its variance. Its
score is the sign: released signs of ``s + Laplace(b)`` have, for small signals s, unit gain and the
variance ``b^2`` of Gaussian noise. Between the two is the clamp at ``tau`` noise scales. Everything
here is in units of the noise scale b, and exact.
"""

import math
from dataclasses import dataclass

from lap2 import _validate
from lap2.mechanism import Gaussian, Laplace, LaplaceL1, MajorizedLaplace, Mechanism

__all__ = [
    "SignalToNoise",
    "block_size",
    "copies",
    "effective_variance",
    "same_noise_ratio",
    "signal_to_noise",
    "spread_size",
]


def effective_variance(signal: float, tau: float = 0.0) -> float:
    """Variance of a noisy coordinate's sign, or of its clamp, over the square of its gain, in b^2.

    The gain is how fast its mean moves with the signal, so this is the variance with which the
    average of many releases tells the signal. It is never below 1, the inverse of the Fisher
    information: that is reached by the sign of a signal of zero.

    Args:
        signal: size of the coordinate's noise-free sum, in b; at least 0.
        tau: where the noisy coordinate is clamped, in b; 0 is its sign, infinity no clamp at all.
    """
    s = _validate.non_negative("signal", signal)
    if tau == math.inf:
        return 2.0
    t = _validate.non_negative("tau", tau)
    if t < 1e-3:
        # Clamping this close is taking the sign, up to the factor t.
        return 2 * math.exp(s) - 1 if s < 700 else math.inf
    near, far = math.exp(-abs(t - s)), math.exp(-t - s)
    cosh, sinh = (near + far) / 2, (near - far) / 2  # of the smaller, times exp(-the larger)
    if s > t:
        gain, mean, square = sinh, t - sinh, t * t - 2 * (t * cosh - sinh)
    else:
        own = math.exp(-2 * s)
        gain, mean = 1 - cosh, s - sinh
        square = s * s - s * (1 + own) + (1 - own) + (s + 1) * (1 + own) - 2 * (t + 1) * cosh
    # A coordinate that is always clamped tells nothing (and its variance is lost to rounding).
    return (square - mean * mean) / (gain * gain) if gain > 1e-6 else math.inf


def block_size(size: int) -> int:
    """How many coordinates :mod:`lap2.train.rotate` mixes with each other, of ``size``.

    The largest power of two that is at most a sixteenth of them, within bounds.
    """
    return min(2**15, 1 << max(0, (size // 16).bit_length() - 1))


def spread_size(size: int) -> int:
    """How many coordinates :mod:`lap2.train.rotate` makes of ``size``.

    Up to a sixteenth more. Fewer than 32 coordinates are left as they are.
    """
    block = block_size(size)
    return -(-size // block) * block


def copies(dimension: int, *, batch_size: float, noise_multiplier: float) -> int:
    """How often training releases the sign of each coordinate, with "auto".

    k times at ``1 / sqrt(k)`` of its size has the norm of once, so the bound of k times as many
    coordinates. Signs of signals that are small beside the noise tell as much as Gaussian noise
    leaves, so there are as many copies as make the sum's coordinates at most a quarter of the noise
    scale in root mean square, whatever the gradients are: a sum is at most ``batch_size`` clips
    long, or hardly longer. But no more than take about a millisecond or a tenth of the step to
    draw. The number is a power of two.

    Args:
        dimension: number of coordinates.
        batch_size: expected number of records in a step.
        noise_multiplier: b / C.
    """
    n = _validate.finite_dimension("dimension", dimension)
    batch = _validate.positive("batch_size", batch_size)
    noise = _validate.positive("noise_multiplier", noise_multiplier)
    wanted = (batch / noise) ** 2 / (_SMALL**2 * n)
    most = max(_BITS // n, int(batch) // _RECORDS_A_COPY, 1)
    return 1 << min(math.ceil(math.log2(max(wanted, 1.0))), most.bit_length() - 1)


_SMALL = 0.25
"""Of the noise scale: signals up to which signs lose little."""
_BITS = 2**21
"""Bits that are drawn in about a millisecond."""
_RECORDS_A_COPY = 128
"""A tenth of the time that a record's gradient takes is about that of a 128th of a bit."""


@dataclass(frozen=True)
class SignalToNoise:
    """Power of the mean clipped gradient over power of the noise.

    Attributes:
        per_step: in one step's release.
        total: over all steps, which add up when the noise is independent.
        variance: of the noise on one coordinate of the released sum, in C^2, after the use stated.
    """

    per_step: float
    total: float
    variance: float


def signal_to_noise(
    mechanism: Mechanism,
    *,
    dimension: int,
    batch_size: float,
    steps: int,
    signal: float = 0.1,
    copies: int = 0,
) -> SignalToNoise:
    """The signal-to-noise ratio of a run, for noisy values used linearly or for their signs.

    Args:
        mechanism: what one step releases.
        dimension: number of coordinates.
        batch_size: expected number of records in a step.
        steps: number of steps.
        signal: l2 norm of the mean clipped gradient, as a fraction of the clip: 1 if all gradients
            agree, usually far less.
        copies: of each coordinate, whose signs are released, for Laplace noise on l2-clipped sums;
            zero releases values.

    For the l1-clipped baseline the same dense gradient must be scaled down to l1 norm C, which
    costs it a factor ``sqrt(2 n / pi)`` of its l2 norm (that of a normal direction).
    """
    n = _validate.finite_dimension("dimension", dimension)
    batch = _validate.positive("batch_size", batch_size)
    count = _validate.integer("steps", steps, least=0)
    times = _validate.integer("copies", copies, least=0)
    fraction = _validate.positive("signal", signal)
    if not fraction <= 1:
        raise ValueError(f"signal must be at most 1, the clip itself, got {signal!r}")
    if not isinstance(mechanism, (Laplace, LaplaceL1, Gaussian, MajorizedLaplace)):
        raise TypeError(f"mechanism must be a single group with a guarantee, got {mechanism!r}")
    if times and not isinstance(mechanism, Laplace):
        raise ValueError(f"copies must be 0 for {mechanism!r}, whose values are released")
    noise = _validate.positive("noise_multiplier", mechanism.noise_multiplier)
    shrunk = max(1.0, math.sqrt(2 * n / math.pi)) if isinstance(mechanism, LaplaceL1) else 1.0
    coordinate = batch * fraction / shrunk / math.sqrt(n)
    if isinstance(mechanism, Gaussian):
        spread = 1.0
    elif times:
        spread = effective_variance(coordinate / noise / math.sqrt(times))
    else:
        spread = 2.0
    per_step = (coordinate / noise) ** 2 / spread
    return SignalToNoise(per_step, count * per_step, spread * (noise * shrunk) ** 2)


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
