"""Ranks among simulated steps: exact whatever is compared, and not blind."""

import numpy as np
import pytest
from scipy import stats

from lap2.audit.comparison import Comparison, simulations_for


def compare(law, other, *, steps=12, seed=0):
    """Steps of ``other`` against simulations of ``law``; both know the steps before."""
    rng = np.random.default_rng(seed)
    comparison, past = Comparison(rng), [0.0]
    for _ in range(steps):
        observed = {"number": other(rng, past)}
        simulated = [{"number": law(rng, past)} for _ in range(simulations_for(steps))]
        comparison.add(observed, simulated)
        past.append(observed["number"])
    return comparison


def wild(rng, past):
    """No second moment, and a scale that depends on what was observed before."""
    return (1 + abs(past[-1])) ** 0.5 * rng.standard_t(1.5) + past[0]


def coarse(rng, _past):
    return float(rng.integers(2))


@pytest.mark.parametrize("law", [wild, coarse])
@pytest.mark.parametrize("test", ["level", "above", "steadiness"])
def test_p_values_are_uniform_for_any_law(law, test):
    runs = [compare(law, law, seed=seed) for seed in range(200)]
    checks = {
        "level": lambda run: run.level("number"),
        "above": lambda run: run.level("number", only_above=True),
        "steadiness": lambda run: run.steadiness("number"),
    }
    p_values = [checks[test](run).p_value for run in runs]
    assert stats.kstest(p_values, "uniform").pvalue > 1e-3


def normal(mean, deviation):
    def law(rng, _past):
        return rng.normal(mean, deviation)

    return law


def test_what_is_too_large_or_unsteady_is_seen():
    larger = compare(normal(0, 1), normal(1.5, 1), steps=40)
    assert larger.level("number").p_value < 1e-6
    assert larger.level("number", only_above=True).p_value < 1e-6
    smaller = compare(normal(0, 1), normal(-1.5, 1), steps=40)
    assert smaller.level("number").p_value < 1e-6
    assert smaller.level("number", only_above=True).p_value > 0.99
    wilder = compare(normal(0, 1), normal(0, 8), steps=60)
    assert wilder.steadiness("number").p_value < 1e-6
    calmer = compare(normal(0, 1), normal(0, 0.1), steps=60)
    assert calmer.steadiness("number").p_value < 1e-6
    broken = compare(normal(0, 1), normal(np.nan, 1), steps=40)
    assert broken.level("number").p_value < 1e-6


def test_few_steps_are_compared_with_more_simulations():
    assert simulations_for(1000) == simulations_for(25) == 5
    assert simulations_for(5) == 20
    loud = compare(normal(0, 1), normal(9, 1), steps=5)
    assert loud.level("number").p_value < 1e-4
