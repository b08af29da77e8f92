"""From counts to statements that hold with a stated confidence.

Everything here is one-sided and exact, or says that it is not. ``error`` is the probability with
which a bound may be wrong.
"""

# pyright: basic

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

try:
    from scipy import optimize, special
except ImportError as missing:
    raise ImportError("lap2.audit needs scipy: pip install 'lap2[audit]'") from missing

from lap2 import _validate

__all__ = [
    "Event",
    "at_least",
    "at_most",
    "best_event",
    "best_gdp_event",
    "epsilon_bound",
    "gaussian_epsilon",
    "gdp_bound",
    "laplace_epsilon",
    "one_run_bound",
    "one_run_p_value",
]

Floats = NDArray[np.float64]

_THRESHOLDS = 4000
"""At most this many thresholds are tried; more would not be told apart by the counts."""


def at_most(successes: Any, trials: Any, *, error: float) -> Any:
    """Clopper-Pearson: an upper bound on the probability of what happened ``successes`` times.

    >>> round(float(at_most(0, 1000, error=0.05)), 5)  # the rule of three
    0.00299
    """
    k, n = np.asarray(successes, dtype=float), np.asarray(trials, dtype=float)
    found = special.betaincinv(k + 1, np.maximum(n - k, 1), 1 - error)
    return np.where(k >= n, 1.0, found)[()]


def at_least(successes: Any, trials: Any, *, error: float) -> Any:
    """Clopper-Pearson: a lower bound on the probability of what happened ``successes`` times.

    >>> round(float(at_least(1000, 1000, error=0.05)), 5)
    0.99701
    """
    k, n = np.asarray(successes, dtype=float), np.asarray(trials, dtype=float)
    found = special.betaincinv(np.maximum(k, 1), n - k + 1, error)
    return np.where(k <= 0, 0.0, found)[()]


@dataclass(frozen=True)
class Event:
    """A set of outcomes, chosen before it is counted.

    Attributes:
        threshold: of the score.
        added: True is "the score is at least the threshold", held to be more likely with the
            record; False is "at most", held to be more likely without.
        expected: the bound that the trials it was chosen on would give.
    """

    threshold: float
    added: bool
    expected: float

    def count(self, scores: Floats) -> int:
        """How many of the scores are in the event."""
        hits = scores >= self.threshold if self.added else scores <= self.threshold
        return int(np.count_nonzero(hits))


def _curves(with_record: Floats, without: Floats) -> list[tuple[bool, Any, Any, Any]]:
    """For each direction: thresholds, and how often each side's scores are in the event."""
    pooled = np.unique(np.concatenate([with_record, without]))
    pooled = pooled[np.isfinite(pooled)]
    if pooled.size > _THRESHOLDS:
        # Even steps in rank, and every one of the extreme scores, where small errors are made.
        ends = _THRESHOLDS // 4
        middle = pooled[:: max(1, pooled.size // (2 * ends))]
        pooled = np.unique(np.concatenate([pooled[:ends], middle, pooled[-ends:]]))
    w, o = np.sort(with_record), np.sort(without)
    above_w, above_o = (s.size - np.searchsorted(s, pooled, "left") for s in (w, o))
    below_w, below_o = (np.searchsorted(s, pooled, "right") for s in (w, o))
    return [(True, pooled, above_w, above_o), (False, pooled, below_o, below_w)]


def best_event(with_record: Floats, without: Floats, *, delta: float, error: float) -> Event:
    """The event with the largest lower bound in these trials, to be counted in *new* trials.

    The best of many is best by luck in part. Bounds that allow for chance, and not mere
    frequencies, are compared, so that what is chosen does about as well on new trials.

    Args:
        with_record: scores of releases with the record, larger where it is more likely.
        without: scores of releases without it.
        delta: of the bound.
        error: with which probability the bound may be wrong.
    """
    best = Event(math.inf, True, 0.0)
    for added, thresholds, first, second in _curves(with_record, without):
        sizes = (with_record.size, without.size) if added else (without.size, with_record.size)
        bounds = epsilon_bound(first, sizes[0], second, sizes[1], delta=delta, error=error)
        if bounds.size and bounds.max() > best.expected:
            at = int(np.argmax(bounds))
            best = Event(float(thresholds[at]), added, float(bounds[at]))
    return best


def epsilon_bound(
    common: Any, common_trials: int, rare: Any, rare_trials: int, *, delta: float, error: float
) -> Any:
    """A lower bound on epsilon from how often an event happened under two neighbours.

    (epsilon, delta)-privacy says ``P(E) <= exp(epsilon) Q(E) + delta``, so epsilon is at least
    ``log((P(E) - delta) / Q(E))``. Both probabilities are bounded with half of the error.
    """
    p = at_least(common, common_trials, error=error / 2)
    q = at_most(rare, rare_trials, error=error / 2)
    excess = np.maximum(p - delta, 0.0)
    with np.errstate(divide="ignore"):
        return np.maximum(np.log(excess / q), 0.0)[()]


def best_gdp_event(with_record: Floats, without: Floats, *, error: float) -> Event:
    """The event with the largest mu in these trials, to be counted in new ones."""
    best = Event(math.inf, True, 0.0)
    for added, thresholds, first, second in _curves(with_record, without):
        sizes = (with_record.size, without.size) if added else (without.size, with_record.size)
        mu = _mu(first, sizes[0], second, sizes[1], error)
        if mu.size and mu.max() > best.expected:
            at = int(np.argmax(mu))
            best = Event(float(thresholds[at]), added, float(mu[at]))
    return best


def _mu(common: Any, common_trials: int, rare: Any, rare_trials: int, error: float) -> Any:
    p = at_least(common, common_trials, error=error / 2)
    q = at_most(rare, rare_trials, error=error / 2)
    with np.errstate(invalid="ignore"):
        mu = special.ndtri(p) - special.ndtri(q)
    return np.nan_to_num(mu, nan=0.0, neginf=0.0, posinf=0.0)


def gdp_bound(
    common: int, common_trials: int, rare: int, rare_trials: int, *, delta: float, error: float
) -> float:
    """A lower bound on epsilon **if** the true trade-off between errors is that of a Gaussian.

    A mechanism whose trade-off curve is that of N(0, 1) against N(mu, 1) has, for every event,
    ``Phi^-1(P(E)) - Phi^-1(Q(E)) <= mu``. One event that is common enough to be counted bounds mu
    from below, and mu yields epsilon at any delta, however small. For another shape of the
    trade-off curve this is not a bound.
    """
    mu = float(_mu(common, common_trials, rare, rare_trials, error))
    return gaussian_epsilon(mu, delta) if mu > 0 else 0.0


def gaussian_epsilon(mu: float, delta: float) -> float:
    """The exact epsilon of N(0, 1) against N(mu, 1) at ``delta`` (Balle and Wang 2018).

    >>> round(gaussian_epsilon(1.0, 1e-5), 4)
    4.3772
    """
    mu = _validate.positive("mu", mu)
    log_delta = math.log(_validate.open_probability("delta", delta))

    def excess(epsilon: float) -> float:
        first = special.log_ndtr(mu / 2 - epsilon / mu)
        second = epsilon + special.log_ndtr(-mu / 2 - epsilon / mu)
        return first + math.log(max(-math.expm1(second - first), 1e-300)) - log_delta

    if excess(0.0) <= 0:
        return 0.0
    high = 1.0
    while excess(high) > 0:
        high *= 2
    root: Any = optimize.brentq(excess, 0.0, high, xtol=1e-12)
    return float(root)


def laplace_epsilon(shift: float, delta: float) -> float:
    """The exact epsilon of one coordinate with Laplace noise that a record moves by ``shift`` b.

    ``delta(epsilon) = 1 - exp((epsilon - shift) / 2)`` up to ``epsilon = shift``, which is the
    epsilon at delta = 0.
    """
    shift = _validate.non_negative("shift", shift)
    return max(0.0, shift + 2 * math.log1p(-_validate.probability("delta", delta)))


def one_run_p_value(
    *, canaries: int, guesses: int, correct: int, epsilon: float, delta: float
) -> float:
    """How likely so many correct guesses are at most, if the run is (epsilon, delta)-private.

    Steinke, Nasr and Jagielski (2023), "Privacy auditing with one (1) training run", theorem 5.2:
    let each of m canaries be in the data by an independent fair coin S_i = +-1, and let a guess
    T_i be made of at most r of them (0 abstains), from the output of an (epsilon, delta)-private
    algorithm (adding or removing one record). With W ~ Binomial(r, exp(epsilon) / (1 +
    exp(epsilon))), for every v

        P[sum_i max(0, T_i S_i) >= v]
            <= P[W >= v] + 2 m delta max_{1 <= i <= m} P[v > W >= v - i] / i.

    Args:
        canaries: m.
        guesses: r, which must not depend on the output.
        correct: v.
        epsilon: of the hypothesis.
        delta: of the hypothesis.
    """
    m = _validate.integer("canaries", canaries, least=1)
    r = _validate.integer("guesses", guesses, least=0)
    v = _validate.integer("correct", correct, least=0)
    if not v <= r <= m:
        raise ValueError(
            f"guesses must be between correct and canaries, got {guesses!r} with {correct!r} "
            f"correct of {canaries!r} canaries"
        )
    q = float(special.expit(epsilon))
    beta = float(special.bdtrc(v - 1, r, q)) if v else 1.0
    if v == 0 or delta == 0:
        return min(1.0, beta)
    w = np.arange(v - 1, -1, -1)
    log_choose = special.gammaln(r + 1) - special.gammaln(w + 1) - special.gammaln(r - w + 1)
    log_pmf = log_choose + special.xlogy(w, q) + (r - w) * special.log_expit(-epsilon)
    below = np.cumsum(np.exp(log_pmf))  # P[v > W >= v - i] for i = 1, ..., v
    alpha = float(np.max(below / np.arange(1, v + 1)))
    return min(1.0, beta + 2 * m * delta * alpha)


def one_run_bound(
    *, canaries: int, guesses: int, correct: int, delta: float, error: float
) -> float:
    """The largest epsilon that :func:`one_run_p_value` refutes at level ``error``; 0 if none."""

    def refuted(epsilon: float) -> bool:
        p_value = one_run_p_value(
            canaries=canaries, guesses=guesses, correct=correct, epsilon=epsilon, delta=delta
        )
        return p_value <= error

    if not refuted(0.0):
        return 0.0
    low, high = 0.0, 1.0
    while refuted(high):  # ends: at large epsilon all guesses are right with probability near 1
        low, high = high, 2 * high
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if refuted(middle) else (low, middle)
    return low
