"""Signal to noise, and the planner's recommendations."""

import math

import numpy as np
import pytest

import lap2
from lap2.planner import steps_for
from lap2.signal import copies, effective_variance, spread_size


def test_variance_of_clamps_and_signs_matches_theory():
    table = [(0.0, 1.0), (1e-3, 1.0), (0.1, 1.03), (0.3, 1.10), (1.0, 1.32), (60.0, 2.0)]
    for tau, value in table:
        assert effective_variance(0.0, tau) == pytest.approx(value, abs=6e-3)


@pytest.mark.parametrize(("signal", "tau"), [(0.0, 0.3), (0.5, 0.3), (0.5, 2.0), (2.0, 1.0)])
def test_effective_variance_by_simulation(signal, tau):
    """Variance of the clamped coordinate over the squared slope of its mean, by common draws."""
    z = np.random.default_rng(2).laplace(size=2_000_000)
    clamped = np.clip(signal + z, -tau, tau)
    step = 0.05
    slope = np.mean(np.clip(signal + step + z, -tau, tau) - np.clip(signal - step + z, -tau, tau))
    estimate = clamped.var() / (slope / (2 * step)) ** 2
    assert effective_variance(signal, tau) == pytest.approx(estimate, rel=0.02)
    assert effective_variance(signal, tau * 1.5) != pytest.approx(estimate, rel=0.02)


@pytest.mark.parametrize("signal", [0.0, 0.1, 0.5, 2.0])
def test_effective_variance_of_signs_by_simulation(signal):
    z = np.random.default_rng(3).laplace(size=2_000_000)
    mean, step = np.mean(signal + z > 0), 0.02
    slope = np.mean(abs(signal + z) < step) / step  # of twice the probability
    assert effective_variance(signal) == pytest.approx(4 * mean * (1 - mean) / slope**2, rel=0.05)
    assert effective_variance(signal) >= 1  # the Fisher information


def test_signal_to_noise_of_the_three_uses():
    run = {"dimension": 10_000, "batch_size": 100, "steps": 50, "signal": 0.01}
    gaussian = lap2.signal_to_noise(lap2.Gaussian(2.0), **run)
    values = lap2.signal_to_noise(lap2.Laplace(2.0, 10_000), **run)
    bits = lap2.signal_to_noise(lap2.Laplace(2.0, 10_000), **run, copies=1)
    assert gaussian.per_step == pytest.approx(1**2 / (10_000 * 4))
    assert gaussian.total == pytest.approx(50 * gaussian.per_step)
    assert values.per_step == pytest.approx(gaussian.per_step / 2)
    assert 0.97 < bits.per_step / gaussian.per_step < 1
    with pytest.raises(TypeError, match="single group"):
        lap2.signal_to_noise(lap2.Joint([lap2.Gaussian(1.0)]), **run)
    with pytest.raises(ValueError, match="copies must be 0 for Gaussian"):
        lap2.signal_to_noise(lap2.Gaussian(1.0), **run, copies=1)


def test_copies_make_up_for_strong_signals():
    run = {"dimension": 10_000, "batch_size": 100, "steps": 50, "signal": 1.0}
    gaussian = lap2.signal_to_noise(lap2.Gaussian(2.0), **run)
    alone, several = (
        lap2.signal_to_noise(lap2.Laplace(2.0, 10_000), **run, copies=k) for k in (1, 64)
    )
    assert alone.per_step / gaussian.per_step < 0.5
    assert 0.85 < several.per_step / gaussian.per_step < 0.9


def test_auto_copies_keep_signals_small_within_bounds():
    """A sum of B clips is a quarter of the noise or less, in root mean square, if time allows."""
    for n, batch, noise in [(10_000, 100, 2.0), (100, 64, 1.0), (10**6, 32, 1.0), (7, 128, 1.0)]:
        k = copies(n, batch_size=batch, noise_multiplier=noise)
        assert batch / noise / math.sqrt(n * k) <= 0.25
        assert k == 1 or batch / noise / math.sqrt(n * k / 2) > 0.25
    assert copies(26_048, batch_size=1024, noise_multiplier=0.5) == 64  # no more than 2^21 bits
    assert copies(10**8, batch_size=65_536, noise_multiplier=0.01) == 512  # or a tenth of the step
    assert copies(10**8, batch_size=100, noise_multiplier=0.01) == 1


def test_constant_ratio_keeps_the_signal_but_not_the_privacy():
    small = lap2.same_noise_ratio(sampling_prob=0.1, noise_multiplier=10, new_sampling_prob=0.01)
    assert small == pytest.approx(1.0)
    run = {"dimension": 1000, "steps": 100}
    big_run = lap2.signal_to_noise(lap2.Gaussian(10.0), batch_size=5000, **run)
    small_run = lap2.signal_to_noise(lap2.Gaussian(small), batch_size=500, **run)
    assert small_run.total == pytest.approx(big_run.total)
    with pytest.raises(ValueError, match="sampling_prob must be above 0"):
        lap2.same_noise_ratio(sampling_prob=0, noise_multiplier=1, new_sampling_prob=0.1)


MNIST = {
    "dataset_size": 60_000,
    "batch_size": 258,
    "epochs": 25,
    "dimension": 26010,
    "epsilon": 1.0,
    "delta": 1e-5,
}


def test_plan_is_calibrated_and_says_no_difference_where_there_is_none():
    plan = lap2.plan(**MNIST)
    assert plan.recommendation == "no difference"
    options = {option.name: option for option in plan.options if not option.copies}
    assert not options["published"].is_guarantee
    bits = plan.options[0]
    assert (bits.name, bits.release) == ("laplace", "bits")
    released = spread_size(26010) * bits.copies
    for name, mechanism in [
        ("bits", lap2.Laplace(bits.noise_multiplier, released)),
        ("laplace", lap2.Laplace(options["laplace"].noise_multiplier, 26010)),
        ("gaussian", lap2.Gaussian(options["gaussian"].noise_multiplier)),
        ("laplace-l1", lap2.LaplaceL1(options["laplace-l1"].noise_multiplier)),
    ]:
        accountant = lap2.Accountant().compose(
            mechanism, sampling_prob=plan.sampling_prob, steps=plan.steps
        )
        assert 0.9999 <= accountant.get_epsilon(1e-5) <= 1, name
    ratio = options["laplace"].noise_to_signal / options["gaussian"].noise_to_signal
    assert ratio == pytest.approx(math.sqrt(2), rel=2e-3)
    assert bits.noise_to_signal / options["gaussian"].noise_to_signal < 1.03


def test_plan_finds_the_regions_where_one_side_wins():
    one = {"dataset_size": 1000, "batch_size": 1000, "epochs": 1, "dimension": 1}
    win = lap2.plan(**one, epsilon=1.0, delta=1e-10)
    assert win.recommendation == "laplace"
    laplace, gaussian = win.options[1], win.options[2]
    assert laplace.noise_to_signal / gaussian.noise_to_signal == pytest.approx(0.23, abs=0.01)
    loud = lap2.plan(**{**MNIST, "batch_size": 6000, "dimension": 100, "signal": 1.0})
    assert loud.recommendation == "gaussian"


def test_steps_are_whole_and_never_too_few():
    assert steps_for(dataset_size=60_000, batch_size=258, epochs=25) == (258 / 60_000, 5814)
    assert steps_for(dataset_size=10, batch_size=3, epochs=3) == (0.3, 10)
    for n in range(1, 500):
        assert steps_for(dataset_size=n, batch_size=1, epochs=1)[1] == n
    with pytest.raises(ValueError, match="batch_size must be at most dataset_size = 5, got 6"):
        steps_for(dataset_size=5, batch_size=6, epochs=1)
