"""Choosing the clip: Algorithm 1 of the Lap2 paper, and quantiles of gradient norms."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from lap2 import _validate
from lap2.accountant import Accountant
from lap2.calibration import CalibrationError, Target, calibrate_noise
from lap2.ledger import Entry
from lap2.mechanism import Laplace, SingleGroup

if TYPE_CHECKING:
    from lap2.noise import Sampler

__all__ = [
    "ClipSearch",
    "ClipTrial",
    "FirstOrder",
    "clip_from_private_norms",
    "clip_from_public_norms",
    "first_order",
    "search_clip",
]


@dataclass(frozen=True)
class ClipTrial:
    """One clip of the grid: the least scale found for it, or None if no scale is enough."""

    clip: float
    scale: float | None


@dataclass(frozen=True)
class ClipSearch:
    """The answer of Algorithm 1 and the direct one.

    Only the ratio C / b matters for privacy, so "the largest C with a feasible b" is decided by the
    largest allowed b alone: ``direct_clip = rho b_max``, put on the grid, with ``direct_scale`` its
    own least scale. The two agree to the tolerance of the search.

    Attributes:
        clip: C*, the largest feasible clip of the grid.
        scale: b*, the scale found for it.
        trace: every clip of the grid, in order.
        noise_multiplier: the least feasible b / C, exact to 2e-6.
        direct_clip: C* without a search.
        direct_scale: its least scale.
        is_guarantee: whether the bound that was searched is one.
    """

    clip: float
    scale: float
    trace: tuple[ClipTrial, ...]
    noise_multiplier: float
    direct_clip: float
    direct_scale: float
    is_guarantee: bool


def search_clip(
    mechanism: SingleGroup,
    *,
    epsilon: float,
    delta: float,
    sampling_prob: float,
    steps: int,
    clip_min: float,
    clip_max: float,
    clip_step: float,
    scale_min: float,
    scale_max: float,
    tolerance: float,
    grid: Literal["linear", "log"] = "linear",
) -> ClipSearch:
    """Algorithm 1 of the paper as printed: grid over C, binary search over b, largest C wins.

    Args:
        mechanism: the bound to search with; its own noise multiplier is ignored.
        epsilon: the target.
        delta: the target.
        sampling_prob: Poisson sampling probability.
        steps: number of steps.
        clip_min: first clip of the grid.
        clip_max: last clip of the grid.
        clip_step: added from one clip to the next (linear), or the factor between them (log).
        scale_min: least scale b considered.
        scale_max: largest scale b considered.
        tolerance: how far apart the ends of the binary search may remain.
        grid: "linear" or "log".

    Raises:
        CalibrationError: even the smallest clip needs more noise than ``scale_max``.
    """
    target = Target(epsilon, delta)
    tolerance = _validate.positive("tolerance", tolerance)
    low_scale = _validate.positive("scale_min", scale_min)
    high_scale = _validate.positive("scale_max", scale_max)
    if not low_scale <= high_scale:
        raise ValueError(f"scale_max must be at least scale_min, got {scale_max!r} < {scale_min!r}")
    clips = _clip_grid(clip_min, clip_max, clip_step, grid)
    feasible = _Feasible(mechanism, target, sampling_prob, steps)
    trace = tuple(
        ClipTrial(clip, _least_scale(feasible, clip, low_scale, high_scale, tolerance))
        for clip in clips
    )
    found = [(trial.clip, trial.scale) for trial in trace if trial.scale is not None]
    noise = calibrate_noise(
        replace(mechanism, noise_multiplier=1.0),
        epsilon=epsilon,
        delta=delta,
        sampling_prob=sampling_prob,
        steps=steps,
    ).noise_multiplier
    if not found:
        raise CalibrationError(
            f"clip_min must be at most {high_scale / noise:.6g}, the largest clip that scale_max = "
            f"{scale_max!r} can cover for epsilon {epsilon!r}; got {clip_min!r}"
        )
    clip, scale = max(found)
    direct_clip = max((c for c in clips if c * noise <= high_scale), default=clip)
    return ClipSearch(
        clip=clip,
        scale=scale,
        trace=trace,
        noise_multiplier=noise,
        direct_clip=direct_clip,
        direct_scale=max(low_scale, direct_clip * noise),
        is_guarantee=mechanism.is_guarantee,
    )


class _Feasible:
    """Whether (C, b) meets the target; asks the accountant only for ratios not yet decided."""

    def __init__(
        self, mechanism: SingleGroup, target: Target, sampling_prob: float, steps: int
    ) -> None:
        self._ask: Callable[[float], bool] = lambda noise: (
            target.spent_by(replace(mechanism, noise_multiplier=noise), sampling_prob, steps)
            <= target.epsilon
        )
        self._enough, self._too_little = math.inf, 0.0

    def __call__(self, clip: float, scale: float) -> bool:
        noise = scale / clip
        if self._too_little < noise < self._enough:
            if self._ask(noise):
                self._enough = noise
            else:
                self._too_little = noise
        return noise >= self._enough


def _least_scale(
    feasible: _Feasible, clip: float, low: float, high: float, tolerance: float
) -> float | None:
    if not feasible(clip, high):
        return None
    if feasible(clip, low):
        return low
    while high - low > tolerance:
        middle = (low + high) / 2
        if not low < middle < high:
            break
        low, high = (low, middle) if feasible(clip, middle) else (middle, high)
    return high


def _clip_grid(first: float, last: float, step: float, kind: str) -> list[float]:
    first, last = _validate.positive("clip_min", first), _validate.positive("clip_max", last)
    step = _validate.positive("clip_step", step)
    _validate.choice("grid", kind, ("linear", "log"))
    if not first <= last:
        raise ValueError(f"clip_max must be at least clip_min, got {last!r} < {first!r}")
    if kind == "linear":
        count = math.floor((last - first) / step * (1 + 1e-12)) + 1
    else:
        if not step > 1:
            raise ValueError(f"clip_step must be a factor above 1 on a log grid, got {step!r}")
        count = math.floor(math.log(last / first) / math.log(step) * (1 + 1e-12)) + 1
    if not count <= 1_000_000:
        raise ValueError(f"clip_step must give at most 1,000,000 clips, got {step!r}: {count}")
    return [first + k * step if kind == "linear" else first * step**k for k in range(count)]


@dataclass(frozen=True)
class FirstOrder:
    """The paper's closed-form starts (section IV-B) beside the exact answer; none is a bound.

    Attributes:
        scale: ``b0 = (2 zeta / eps) sqrt(T log(1/delta))`` for C = 1. ratio_as_printed: rho0 with
        ``alpha = T zeta^2 rho^2 lam (lam+1) / (2 (2 lam + 1))``, at its best
            order; the coefficient as printed does not match the expansion of the moments.
        ratio: rho0 with the true small-rho limit ``alpha = T zeta^2 rho^2 lam (lam + 1) / 2``.
        exact_scale: the least b that meets the target for C = 1.
        scale_error: ``b0 / exact_scale - 1``.
        ratio_as_printed_error: relative to the exact ratio ``1 / exact_scale``.
        ratio_error: relative to the exact ratio.
    """

    scale: float
    ratio_as_printed: float
    ratio: float
    exact_scale: float
    scale_error: float
    ratio_as_printed_error: float
    ratio_error: float


def first_order(
    mechanism: SingleGroup, *, epsilon: float, delta: float, sampling_prob: float, steps: int
) -> FirstOrder:
    """How far the paper's first-order starts are from the exact answer, at one setting."""
    exact = calibrate_noise(
        replace(mechanism, noise_multiplier=1.0),
        epsilon=epsilon,
        delta=delta,
        sampling_prob=sampling_prob,
        steps=steps,
    ).noise_multiplier
    log_delta = -math.log(delta)
    scale = 2 * sampling_prob / epsilon * math.sqrt(steps * log_delta)
    orders = np.geomspace(1.0, 1e9, 20_001)
    pairs = orders * (orders + 1) / 2
    room = np.maximum(orders * epsilon - log_delta, 0.0) / (steps * sampling_prob**2)
    ratio = math.sqrt(float(np.max(room / pairs)))
    printed = math.sqrt(float(np.max(room / (pairs / (2 * orders + 1)))))
    return FirstOrder(
        scale=scale,
        ratio_as_printed=printed,
        ratio=ratio,
        exact_scale=exact,
        scale_error=scale / exact - 1,
        ratio_as_printed_error=printed * exact - 1,
        ratio_error=ratio * exact - 1,
    )


def clip_from_public_norms(norms: ArrayLike, *, percentile: float) -> float:
    """A percentile of per-example gradient norms of **public** data: no privacy cost, no noise.

    On private data this leaks, and nothing accounts for it: use :func:`clip_from_private_norms`.
    """
    values = _norms(norms)
    rank = _validate.non_negative("percentile", percentile)
    if not rank <= 100:
        raise ValueError(f"percentile must be in [0, 100], got {percentile!r}")
    finite = values[np.isfinite(values)]
    if not finite.size:
        raise ValueError("norms must hold at least one finite number, got none")
    return float(np.percentile(finite, rank))


def clip_from_private_norms(
    norms: ArrayLike,
    *,
    quantile: float,
    low: float,
    high: float,
    noise_multiplier: float,
    rounds: int,
    accountant: Accountant,
    sampler: "Sampler | None" = None,
) -> float:
    """A noisy quantile of per-example gradient norms of **private** data, its cost accounted.

    Bisects ``[low, high]`` on a logarithmic scale. Each round releases the centred count
    ``sum_i (1[norm_i <= c] - quantile)`` with Laplace noise; one record moves it by at most
    ``max(quantile, 1 - quantile)``. All rounds are composed before the first is released.

    Args:
        norms: one per record; a record without a finite norm counts as above every threshold.
        quantile: strictly between 0 and 1.
        low: a public lower end of the search, above 0.
        high: a public upper end.
        noise_multiplier: Laplace scale over that sensitivity, per round.
        rounds: number of releases.
        accountant: is charged ``rounds`` unsampled one-dimensional Laplace releases.
        sampler: the noise; by default :class:`lap2.noise.SecureLaplace`, whose rounding is part of
            what is charged.

    Formal guarantee:
        What the accountant reports; of a sampler that is not secure it says that it is none. Counts
        are integers, centred exactly, and rounded to a grid of which the sensitivity knows.
    """
    values = _norms(norms)
    q = _validate.open_probability("quantile", quantile)
    bottom, top = _validate.positive("low", low), _validate.positive("high", high)
    noise = _validate.positive("noise_multiplier", noise_multiplier)
    count = _validate.integer("rounds", rounds, least=1)
    if not bottom < top:
        raise ValueError(f"high must be above low, got {high!r} <= {low!r}")
    from lap2 import noise as samplers  # noqa: PLC0415 - needs cryptography, which is slow to load

    source = samplers.SecureLaplace() if sampler is None else sampler
    samplers.check_law(source, "laplace")
    exact = Fraction(q)
    moves = math.nextafter(float(max(exact, 1 - exact)), math.inf)
    scale = noise * moves
    grid = math.ldexp(1.0, math.frexp(scale)[1] - 31)
    charged = samplers.accounted_noise_multiplier(
        source, scale=scale, max_grad_norm=moves + grid, size=1
    )
    kind = "secure" if source.is_secure else "ordinary"
    accountant.enter(Entry(Laplace(charged, 1), 1.0, count, noise=kind))
    for _ in range(count):
        threshold = math.sqrt(bottom) * math.sqrt(top)
        below = int(np.count_nonzero(values <= threshold))
        centred = np.array([_centred(below, values.size, exact, grid)])
        source.add(centred, scale)
        if centred[0] < 0:
            bottom = threshold
        else:
            top = threshold
    return top


def _centred(below: int, total: int, quantile: Fraction, grid: float) -> float:
    """``below - quantile * total``, rounded down to the grid; nothing else is rounded.

    What is more than 2^52 steps, and so far beyond the noise that only its sign matters, becomes
    that: neighbours come no further apart by it.
    """
    steps = math.floor((below - quantile * total) / Fraction(grid))
    return grid * max(-(2**52), min(steps, 2**52))


def _norms(norms: ArrayLike) -> NDArray[np.float64]:
    try:
        values = np.asarray(norms, dtype=np.float64).ravel()
    except (TypeError, ValueError):
        raise TypeError("norms must be numbers, got something else") from None
    if np.any(values < 0):
        raise ValueError("norms must be at least 0, got some below")  # which one is private
    return values
