"""The auditor's own bits: their law, how they are read back, and what is wrong with broken ones."""

import numpy as np
import pytest
import torch
from scipy import integrate, stats

from lap2.audit.bits import IdealNoise, counts_of, likelihood_ratio, log_odds, repetition, wholeness
from lap2.audit.controls import FAULTS
from lap2.noise import SecureSigns, estimates


@pytest.mark.parametrize("u", [-3.0, -0.2, 0.0, 1.0])
def test_log_odds_are_those_of_the_sign_of_a_noisy_number(u):
    density = stats.laplace(loc=u).pdf
    positive = integrate.quad(density, 0, 60, points=[abs(u)], epsabs=1e-12)[0]
    assert log_odds(u) == pytest.approx(np.log(positive / (1 - positive)), abs=1e-8)


def counted(source, copies, scale, values):
    """How often each count of one coordinate came, over many of them."""
    array = torch.full((40_000,), values, dtype=torch.float64)
    source.times(copies).add(array, scale)
    counts = np.rint(counts_of(array.numpy(), copies=copies, scale=scale)).astype(int)
    return np.bincount(np.clip(counts, 0, copies), minlength=copies + 1)


def binomial_p_value(observed, copies, scale, value):
    u = value / (np.sqrt(copies) * scale)
    chance = stats.laplace.sf(-u)
    expected = stats.binom(copies, chance).pmf(np.arange(copies + 1)) * observed.sum()
    enough = expected > 5
    groups = [np.append(x[enough], x[~enough].sum()) for x in (observed, expected)]
    return stats.chisquare(*(g[groups[1] > 0] for g in groups)).pvalue


@pytest.mark.parametrize("copies", [1, 4, 300])
def test_ideal_bits_and_the_real_ones_have_the_binomial_law(copies):
    for source in (IdealNoise(np.random.default_rng(1)), SecureSigns()):
        observed = counted(source, copies, 1.5, -1.0)
        assert binomial_p_value(observed, copies, 1.5, -1.0) > 1e-6


@pytest.mark.parametrize("name", ["noise", "layer", "copies", "ledger", "whole", "twins"])
def test_broken_bits_have_not(name):
    source = FAULTS[name].sampler("bits")
    assert binomial_p_value(counted(source, 4, 1.5, -1.0), 4, 1.5, -1.0) < 1e-9


def test_controls_of_uniform_variates_repeat_or_share_them():
    first, second = (torch.zeros(1000, dtype=torch.float64) for _ in range(2))
    repeating = FAULTS["repeat"].sampler("bits")
    for array in (first, second):
        repeating.times(3).add(array, 1.0)
    assert first.equal(second)
    shared = torch.zeros(1000, dtype=torch.float64)
    FAULTS["shared"].sampler("bits").times(3).add(shared, 1.0)
    assert shared[:500].equal(shared[500:])
    assert not shared[:500].equal(first[:500])


def test_controls_of_what_is_not_noise_leave_the_real_source():
    for name in ("none", "clip", "sampling", "divisor"):
        assert isinstance(FAULTS[name].sampler("bits"), SecureSigns)
    with pytest.raises(ValueError, match="release must be 'bits'"):
        FAULTS["copies"].sampler("values")


@pytest.mark.parametrize("copies", [1, 5, 255, 256, 1000])
def test_counts_are_read_back(copies):
    counts = np.arange(copies + 1)
    told = estimates(counts, copies=copies, scale=0.7)
    assert counts_of(told, copies=copies, scale=0.7) == pytest.approx(counts, abs=1e-6)
    found = counts_of(told.astype(np.float32)[:, None], copies=copies, scale=0.7)
    assert wholeness(found) == 1
    assert wholeness(0.77 * found + 0.1) < 0.9


def test_counts_are_whole_but_for_what_is_missing_of_a_column():
    rng = np.random.default_rng(4)
    signs = rng.choice([-1.0, 1.0], size=(2, 256, 1))
    missing = (signs * rng.normal(size=(2, 1, 40))).sum(axis=0)
    counts = rng.binomial(32, 0.5, size=(256, 40))
    assert 0.35 < wholeness(counts + missing) < 0.65
    assert wholeness(counts + missing + rng.integers(2, size=counts.shape) / 2) < 0.1


def test_the_likelihood_ratio_is_that_of_binomial_counts():
    shift, scale, copies = np.array([0.6, -1.1]), 0.9, 3
    counts = np.array([[0, 3], [1, 1], [2, 3], [3, 0]])
    score = likelihood_ratio(shift, copies=copies, scale=scale)
    found = score(estimates(counts, copies=copies, scale=scale))
    chance = stats.laplace.sf(-shift / (np.sqrt(copies) * scale))
    exact = stats.binom.logpmf(counts, copies, chance) - stats.binom.logpmf(counts, copies, 0.5)
    expected = exact.sum(axis=1)
    assert found - found[0] == pytest.approx(expected - expected[0])


def test_repetition_at_any_distance_is_seen():
    rng = np.random.default_rng(2)
    noise = rng.choice([-1.0, 1.0], size=4096)
    assert repetition(noise) < 0.1
    assert repetition(np.repeat(noise[:2048], 2)) > 0.4
    assert repetition(np.tile(noise[:2048], 2)) > 0.9
    assert repetition(np.zeros(7)) == 0
