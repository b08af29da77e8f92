"""Counts become bounds that hold as often as they say, and closed forms are right."""

import math

import numpy as np
import pytest
from scipy import stats

from lap2.audit import statistics
from lap2.audit.result import Bound, Check, judged


def test_clopper_pearson_covers_as_often_as_it_says_and_not_much_more():
    n, error = 200, 0.05
    for p in (0.05, 0.2, 0.9):
        k = np.arange(n + 1)
        weight = stats.binom.pmf(k, n, p)
        missed_above = weight[statistics.at_most(k, n, error=error) < p].sum()
        missed_below = weight[statistics.at_least(k, n, error=error) > p].sum()
        assert 0.1 * error < missed_above <= error + 1e-12
        assert 0.1 * error < missed_below <= error + 1e-12
    assert statistics.at_most(n, n, error=error) == 1
    assert statistics.at_least(0, n, error=error) == 0


def test_gaussian_epsilon_inverts_the_known_delta():
    for mu, delta in ((0.3, 1e-5), (1.0, 1e-3), (4.0, 1e-6)):
        e = statistics.gaussian_epsilon(mu, delta)
        found = stats.norm.cdf(mu / 2 - e / mu) - math.exp(e) * stats.norm.cdf(-mu / 2 - e / mu)
        assert found == pytest.approx(delta, rel=1e-6)
    assert statistics.gaussian_epsilon(0.001, 0.1) == 0


def test_laplace_epsilon_agrees_with_the_hockey_stick_integral():
    z = np.linspace(-40, 40, 800_001)
    p, q = np.exp(-np.abs(z - 2)) / 2, np.exp(-np.abs(z)) / 2
    for epsilon in (0.5, 1.9):
        delta = np.maximum(p - math.exp(epsilon) * q, 0).sum() * (z[1] - z[0])
        assert statistics.laplace_epsilon(2.0, delta) == pytest.approx(epsilon, rel=1e-3)
    assert statistics.laplace_epsilon(2.0, 0.0) == 2


def test_one_run_p_value_by_hand():
    # All of 3 guesses right at epsilon = log 3: (3/4)^3, plus 2 m delta times the best ratio.
    pure = statistics.one_run_p_value(
        canaries=5, guesses=3, correct=3, epsilon=math.log(3), delta=0.0
    )
    assert pure == pytest.approx(27 / 64)
    ratios = [27 / 64, (27 + 9) / 64 / 2, (27 + 9 + 1) / 64 / 3]
    approximate = statistics.one_run_p_value(
        canaries=5, guesses=3, correct=3, epsilon=math.log(3), delta=0.01
    )
    assert approximate == pytest.approx(27 / 64 + 10 * 0.01 * max(ratios))
    with pytest.raises(ValueError, match="guesses"):
        statistics.one_run_p_value(canaries=2, guesses=3, correct=1, epsilon=1.0, delta=0.0)


def test_one_run_bound_is_valid_for_the_hardest_private_mechanism():
    """Randomised response is exactly epsilon-private: the bound may exceed it in 5% of runs."""
    rng, epsilon, m, error = np.random.default_rng(5), 1.0, 400, 0.05
    right = rng.binomial(m, 1 / (1 + math.exp(-epsilon)), size=600)
    bounds = [
        statistics.one_run_bound(canaries=m, guesses=m, correct=int(c), delta=0.0, error=error)
        for c in right
    ]
    exceeded = np.mean(np.array(bounds) > epsilon)
    assert 0.005 < exceeded <= error + 3 * math.sqrt(error / 600)
    assert np.median(bounds) > 0.6


def test_one_run_bound_with_delta_is_valid_for_a_mechanism_that_uses_it():
    """With probability delta for each canary the coin is shown, else randomised response."""
    rng, epsilon, delta, m = np.random.default_rng(6), 0.5, 0.01, 300
    shown = rng.random((400, m)) < delta
    answer = rng.random((400, m)) < 1 / (1 + math.exp(-epsilon))
    correct = (shown | answer).sum(axis=1)
    bounds = [
        statistics.one_run_bound(canaries=m, guesses=m, correct=int(c), delta=delta, error=0.05)
        for c in correct
    ]
    assert np.mean(np.array(bounds) > epsilon) <= 0.08


def test_an_event_chosen_on_noise_promises_nothing():
    rng = np.random.default_rng(7)
    with_record, without = rng.normal(size=(2, 5000))
    event = statistics.best_event(with_record, without, delta=0.0, error=1e-3)
    assert event.expected == 0
    assert event.count(with_record) == 0
    moved = statistics.best_event(with_record + 1, without, delta=0.0, error=1e-3)
    assert moved.expected > 0.5


def test_verdict_counts_only_what_assumes_nothing_and_corrects_for_many_checks():
    def verdict(bounds=(), checks=()):
        return judged(
            level="test",
            what="",
            delta=0.0,
            confidence=0.99,
            claimed_epsilon=1.0,
            bounds=bounds,
            checks=checks,
            check_error=0.01,
        )

    shaped = verdict((Bound("a", 0.5), Bound("b", 2.0, "a shape")))
    assert shaped.verdict == "consistent"
    assert shaped.epsilon_lower == 0.5
    assert shaped.violated_if == ("a shape",)
    assert verdict((Bound("a", 1.5),)).violated
    two = (Check("x", 0.006, "", ""), Check("y", 0.5, "", ""))
    assert not verdict(checks=two).violated
    assert verdict(checks=two[:1]).violated
    assert verdict(checks=(Check("x", math.nan, "", ""),)).violated
