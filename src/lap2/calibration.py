"""Noise, clip, steps or sampling probability for a target (epsilon, delta).

Each is one root of a monotone function, found by false position between a value that meets the
target and one that does not. What is returned always meets it: the last value on the private
side, checked by the accountant itself.
"""

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import TypeVar

from lap2 import _validate
from lap2._digits import rounded_up
from lap2.accountant import Accountant
from lap2.divergence import worst_shift
from lap2.mechanism import Joint, Mechanism, SingleGroup

__all__ = [
    "CalibrationError",
    "Target",
    "calibrate_clip",
    "calibrate_noise",
    "calibrate_sampling_prob",
    "calibrate_steps",
    "scale_noise",
]

M = TypeVar("M", bound=Mechanism)

_ENOUGH = 2e-6
"""Stop when epsilon is this close below its target, relatively."""
_LARGEST_FACTOR = 2.0**60


class CalibrationError(ValueError):
    """No admissible value meets the target; the message says what the nearest possible is."""


@dataclass(frozen=True)
class Target:
    """The guarantee to be met: epsilon above 0, delta strictly between 0 and 1."""

    epsilon: float
    delta: float

    def __post_init__(self) -> None:
        object.__setattr__(self, "epsilon", _validate.positive("epsilon", self.epsilon))
        object.__setattr__(self, "delta", _validate.open_probability("delta", self.delta))

    def spent_by(self, mechanism: Mechanism, sampling_prob: float, steps: int) -> float:
        """The epsilon of ``steps`` steps at this delta, rounded up."""
        accountant = Accountant().compose(mechanism, sampling_prob=sampling_prob, steps=steps)
        return accountant.get_epsilon(self.delta)


def scale_noise(mechanism: M, factor: float, groups: Collection[int] | None = None) -> M:
    """The same description with its noise multiplier times ``factor``.

    Args:
        mechanism: what to scale.
        factor: above 0.
        groups: for a :class:`~lap2.Joint`, the positions of the groups to scale; all if None.
    """
    factor = _validate.positive("factor", factor)
    if isinstance(mechanism, Joint):
        chosen = range(len(mechanism.groups)) if groups is None else groups
        for position in chosen:
            if not 0 <= _validate.integer("groups", position, least=0) < len(mechanism.groups):
                raise ValueError(
                    f"groups must name positions below {len(mechanism.groups)}, got {position!r}"
                )
        members = enumerate(mechanism.groups)
        return replace(
            mechanism, groups=[scale_noise(g, factor) if k in chosen else g for k, g in members]
        )
    if groups is not None:
        raise ValueError(f"groups must be None unless the mechanism is a Joint, got {groups!r}")
    if not isinstance(mechanism, SingleGroup):
        raise TypeError(f"mechanism must have a noise_multiplier to scale, got {mechanism!r}")
    return replace(mechanism, noise_multiplier=mechanism.noise_multiplier * factor)


def calibrate_noise(
    mechanism: M,
    *,
    epsilon: float,
    delta: float,
    sampling_prob: float,
    steps: int,
    groups: Collection[int] | None = None,
) -> M:
    """The least noise with which ``steps`` steps stay within (epsilon, delta).

    Args:
        mechanism: a description whose noise multipliers are scaled by one common factor. For a
        single
            group their size does not matter; for a :class:`~lap2.Joint` their proportions stay.
        epsilon: the target.
        delta: the target.
        sampling_prob: Poisson sampling probability.
        steps: number of steps.
        groups: for a Joint, the positions of the groups that may be scaled; all if None.

    Returns:
        The description with the calibrated noise. Its epsilon is at most the target.

    Raises:
        CalibrationError: the groups that may not be scaled spend more than the target by
        themselves.

    >>> import lap2
    >>> lap2.calibrate_noise(lap2.Laplace(1.0, 125_000_000), epsilon=1.0, delta=1e-5,
    ...     sampling_prob=0.0043, steps=5860).noise_multiplier
    1.52...
    """
    target = Target(epsilon, delta)
    start = _with_noise(mechanism, groups)

    def spent(log_factor: float) -> float:
        scaled = scale_noise(start, math.exp(log_factor), groups)
        return target.spent_by(scaled, sampling_prob, steps)

    if isinstance(start, Joint) and groups is not None:
        fixed = [group for k, group in enumerate(start.groups) if k not in groups]
        least = target.spent_by(Joint(fixed), sampling_prob, steps) if fixed else 0.0
        if least >= target.epsilon:
            raise CalibrationError(
                f"epsilon must be above {rounded_up(least)} with {steps} steps at delta {delta!r}: "
                f"the groups whose noise is fixed spend that much; got {epsilon!r}"
            )
    shift = worst_shift(start)
    moved = math.sqrt(shift.quadratic + float(shift.counts @ shift.values**2))
    guess = moved * first_order_noise(target, sampling_prob, steps)
    limit = math.log(_LARGEST_FACTOR)
    first = min(max(math.log(guess), -limit / 2), limit / 2)
    log_factor = _boundary(spent, target.epsilon, private=limit, start=first, other=-limit)
    return scale_noise(start, math.exp(log_factor), groups)


def first_order_noise(target: Target, sampling_prob: float, steps: int) -> float:
    """The noise multiplier at which the small-shift moments meet the target: a start, not a bound.

    With ``alpha(lam) = T zeta^2 rho^2 lam (lam + 1) / 2`` the tail bound is least at ``lam =
    sqrt(2 log(1/delta) / (T zeta^2 rho^2))`` and gives ``epsilon = s + s sqrt(2 log(1/delta))``
    for ``s = rho zeta sqrt(T)`` up to terms of order ``s^2``.
    """
    log_delta = -math.log(target.delta)
    # The positive root of s^2 / 2 + s sqrt(2 log(1/delta)) = epsilon, without cancellation.
    s = (
        2
        * target.epsilon
        / (math.sqrt(2 * log_delta) + math.sqrt(2 * log_delta + 2 * target.epsilon))
    )
    return max(sampling_prob, 1e-12) * math.sqrt(max(steps, 1)) / s


def _with_noise(mechanism: M, groups: Collection[int] | None) -> M:
    """The mechanism, unless a group that is to be scaled has no noise to scale."""
    members = mechanism.groups if isinstance(mechanism, Joint) else (mechanism,)
    for position, member in enumerate(members):
        scaled = groups is None or position in groups
        if scaled and not getattr(member, "noise_multiplier", 0.0) > 0:
            raise ValueError(
                f"mechanism must have noise_multiplier above 0 where it is scaled, got {member!r}"
            )
    return scale_noise(mechanism, 1.0, groups)


def calibrate_steps(
    mechanism: Mechanism, *, epsilon: float, delta: float, sampling_prob: float, limit: int = 2**50
) -> int:
    """The largest number of steps that stays within (epsilon, delta), up to ``limit``.

    Raises:
        CalibrationError: not even one step does.
    """
    target = Target(epsilon, delta)
    limit = _validate.integer("limit", limit, least=1)

    def fits(steps: int) -> bool:
        return target.spent_by(mechanism, sampling_prob, steps) <= target.epsilon

    if not fits(1):
        least = target.spent_by(mechanism, sampling_prob, 1)
        raise CalibrationError(
            f"epsilon must be at least {rounded_up(least)}, what one step spends at delta "
            f"{delta!r}; got {epsilon!r}"
        )
    if fits(limit):
        return limit
    low, high = 1, 2
    while high < limit and fits(high):
        low, high = high, min(limit, 2 * high)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def calibrate_sampling_prob(
    mechanism: Mechanism, *, epsilon: float, delta: float, steps: int
) -> float:
    """The largest Poisson sampling probability that stays within (epsilon, delta).

    Raises:
        CalibrationError: no probability above 1e-12 does.
    """
    target = Target(epsilon, delta)
    least = math.log(1e-12)

    def spent(log_prob: float) -> float:
        return target.spent_by(mechanism, min(1.0, math.exp(log_prob)), steps)

    if spent(0.0) <= target.epsilon:
        return 1.0
    if spent(least) > target.epsilon:
        raise CalibrationError(
            f"epsilon must be at least {rounded_up(spent(least))} with {steps} steps at delta "
            f"{delta!r}, even at sampling probability 1e-12; got {epsilon!r}"
        )
    return math.exp(_boundary(spent, target.epsilon, private=least, start=-1.0, other=0.0))


def calibrate_clip(
    mechanism: SingleGroup,
    *,
    scale: float,
    epsilon: float,
    delta: float,
    sampling_prob: float,
    steps: int,
) -> float:
    """The largest clip C that noise of the given ``scale`` (b, or sigma) covers.

    Args:
        mechanism: a single group; its noise multiplier is what is solved for, and C = scale / it.
        scale: the noise's own parameter, b for Laplace and sigma for Gaussian.
        epsilon: the target.
        delta: the target.
        sampling_prob: Poisson sampling probability.
        steps: number of steps.
    """
    scale = _validate.positive("scale", scale)
    if not isinstance(mechanism, SingleGroup):
        raise TypeError(
            f"mechanism must be a single group to solve for its clip, got {mechanism!r}"
        )
    calibrated = calibrate_noise(
        mechanism, epsilon=epsilon, delta=delta, sampling_prob=sampling_prob, steps=steps
    )
    clip = scale / calibrated.noise_multiplier
    return clip if scale / clip >= calibrated.noise_multiplier else math.nextafter(clip, 0.0)


def _boundary(
    spent: Callable[[float], float], target: float, *, private: float, start: float, other: float
) -> float:
    """The last point, seen from ``private``, at which ``spent`` is at most ``target``.

    Args:
        spent: monotone between ``private`` and ``other``.
        target: what may be spent.
        private: a point known to meet the target.
        start: a point between them to begin at.
        other: the far end.

    Returns:
        A point that meets the target, with ``spent`` within 2e-6 of it unless the two ends meet.
    """
    inside, outside = private, other
    value_inside, value_outside = 0.0, math.inf
    point, stride = start, math.copysign(0.7, other - private)
    while not (value_inside > 0 and value_outside < math.inf):
        value = spent(point)
        if value <= target:
            inside, value_inside = point, max(value, 5e-324)
            ahead = point + stride
        else:
            outside, value_outside = point, value
            ahead = point - stride
        stride *= 2
        inner, outer = min(inside, outside), max(inside, outside)
        point = ahead if inner < ahead < outer else (inside + outside) / 2
        if abs(outside - inside) < 1e-13:
            return inside
    # False position on logarithms, aimed a little to the private side so that both ends move.
    aim = math.log(target * (1 - _ENOUGH / 2))
    for attempt in range(200):
        if value_inside >= target * (1 - _ENOUGH) or abs(outside - inside) < 1e-14:
            break
        low, high = math.log(value_inside), math.log(value_outside)
        share = (aim - low) / (high - low) if attempt % 3 < 2 and high > low else 0.5
        point = inside + min(max(share, 0.001), 0.999) * (outside - inside)
        value = spent(point)
        if value <= target:
            inside, value_inside = point, max(value, 5e-324)
        else:
            outside, value_outside = point, value
    return inside
