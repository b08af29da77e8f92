"""From log-moments to (epsilon, delta): the two conversions, and the search for the best order.

With ``c(lam)`` the offset of a conversion, every order ``lam > 0`` gives the valid statements

    log delta = alpha(lam) - lam * epsilon + c(lam)
    epsilon = (alpha(lam) + c(lam) - log delta) / lam

and both right-hand sides have a single minimum over ``lam``, because alpha and c are convex
(docs/theory.md, section 8). Between integer orders alpha is replaced by its chord, which convexity
makes an upper bound.
"""

import math
from collections.abc import Callable
from typing import Literal, Protocol

__all__ = ["Conversion", "Moments", "smallest_delta", "smallest_epsilon"]

Conversion = Literal["tight", "tail"]

_ORDER_LIMIT = 2**20
_START_LIMIT = 64
"""Larger orders cost more, so the search climbs to them from here."""
_ULPS = 8 * 2.0**-52
"""More than the terms of a score can err by rounding. An epsilon carries three times as much, so
that :func:`smallest_delta`, which adds its own share, gives back the delta it is for, or less."""
_GOLDEN = (3 - math.sqrt(5)) / 2


class Moments(Protocol):
    """Total log-moments alpha at integer orders, ``alpha(0) = 0``, convex."""

    @property
    def curvature(self) -> float:
        """``alpha(lam)`` is about ``curvature * lam (lam + 1) / 2`` when small."""
        ...

    def __call__(self, order: int, /) -> float:
        """The log-moment at ``order``, an upper bound."""
        ...


def smallest_epsilon(
    moments: Moments, delta: float, *, conversion: Conversion, pure: float = math.inf
) -> tuple[float, float]:
    """The smallest epsilon at ``delta`` over all orders, and the order; rounded up.

    Args:
        moments: what was released.
        delta: strictly between 0 and 1.
        conversion: "tight" is Balle et al. (2020), theorem 21; "tail" is Markov's inequality.
        pure: an epsilon known by other means; orders that cannot beat it are not searched.
    """
    log_delta = math.log(delta)

    def score(lam: float, alpha: float) -> float:
        c = _offset(lam, conversion)
        return (alpha + c - log_delta + 3 * _ULPS * (alpha - c - log_delta)) / lam

    def stationary(intercept: float, _: float) -> float:
        return math.exp(min(700.0, intercept - log_delta)) - 1

    def enough(before: int, now: int) -> bool:
        # alpha stays above the line through its last two values, whose best score is known.
        value = score(now, moments(now))
        slope = (moments(now) - moments(before)) / (now - before)
        best_order = stationary(moments(now) - slope * now, slope)
        if value <= 0 or best_order <= now:
            return value <= 0
        least = slope - (math.log1p(1 / best_order) if conversion == "tight" else 0.0)
        return least >= min(value * (1 - 1e-7), pure * (1 - 9e-5))

    guess = math.sqrt(-2 * log_delta / max(moments.curvature, 1e-300))
    epsilon, order = _minimise(moments, score, stationary, enough, guess)
    return max(0.0, epsilon), order


def smallest_delta(
    moments: Moments, epsilon: float, *, conversion: Conversion
) -> tuple[float, float]:
    """The smallest delta at ``epsilon`` over all orders (at most 1), and the order; rounded up."""

    def score(lam: float, alpha: float) -> float:
        c = _offset(lam, conversion)
        # Nothing larger than alpha is formed, which may be close to the largest float.
        return alpha - lam * epsilon + c + (_ULPS * alpha + _ULPS * lam * epsilon - _ULPS * c)

    def stationary(_: float, slope: float) -> float:
        return 1 / math.expm1(min(700.0, slope - epsilon)) if slope > epsilon else math.inf

    def enough(_: int, now: int) -> bool:
        return score(now, moments(now)) < -745  # exp underflows

    guess = epsilon / max(moments.curvature, 1e-300)
    log_delta, order = _minimise(moments, score, stationary, enough, guess)
    return min(1.0, math.nextafter(math.exp(min(0.0, log_delta)), math.inf)), order


def _offset(lam: float, conversion: Conversion) -> float:
    """``c(lam)``: never positive, convex."""
    if conversion == "tail":
        return 0.0
    return -lam * math.log1p(1 / lam) - math.log1p(lam)


def _minimise(
    moments: Moments,
    score: Callable[[float, float], float],
    stationary: Callable[[float, float], float],
    enough: Callable[[int, int], bool],
    guess: float,
) -> tuple[float, float]:
    """The least ``score(lam, alpha(lam))`` over real orders, and the order that has it.

    Args:
        moments: alpha at integer orders.
        score: what one order proves.
        stationary: where the tight score of the line ``intercept + slope * lam`` has its minimum.
        enough: whether doubling the order again is not worth it, from the last two orders.
        guess: where to start.
    """
    start = round(min(max(1.0, guess), _START_LIMIT))
    best = _best_integer(lambda k: score(k, moments(k)), start, enough)
    candidates = [(score(best, moments(best)), float(best))]
    for left in (best - 1, best):
        slope = moments(left + 1) - moments(left)
        intercept = moments(left) - left * slope
        lam = stationary(intercept, slope) if slope < math.inf else 0.0
        if left < lam < left + 1:
            chord = moments(left) + (lam - left) * slope
            candidates.append((score(lam, chord), lam))
    return min(candidates)


def _best_integer(f: Callable[[int], float], start: int, enough: Callable[[int, int], bool]) -> int:
    """The minimiser over the integers from 1 of a function with a single minimum.

    Doubles or halves until the minimum is enclosed, then narrows by the golden section. ``f``
    is expected to remember its values.
    """
    low, mid, high = start // 2, start, 2 * start
    while f(high) < f(mid) and high < _ORDER_LIMIT:
        if enough(mid, high):
            return high
        low, mid, high = mid, high, 2 * high
    while low >= 1 and f(low) <= f(mid):
        low, mid, high = low // 2, low, mid
    while high - low > 2:
        right = high - mid > mid - low
        width = high - mid if right else mid - low
        step = max(1, round(_GOLDEN * width))
        probe = mid + step if right else mid - step
        if f(probe) < f(mid):
            low, mid, high = (mid, probe, high) if right else (low, probe, mid)
        else:
            low, high = (low, probe) if right else (probe, high)
    return mid
