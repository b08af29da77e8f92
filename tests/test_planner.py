"""Signal to noise, and the planner's recommendations."""

import math

import numpy as np
import pytest

import lap2
from lap2.planner import steps_for
from lap2.signal import clamp_variance, copies, effective_variance


def test_clamp_variance_matches_theory():
    table = [(1e-3, 1.0), (0.1, 1.03), (0.3, 1.10), (1.0, 1.32), (60.0, 2.0)]
    for tau, value in table:
        assert clamp_variance(tau) == pytest.approx(value, abs=6e-3)


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


def test_clamping_never_beats_the_fisher_information():
    for signal in (0.0, 0.01, 0.1, 1.0, 10.0, 1e4):
        tau, variance = lap2.best_clamp(signal)
        assert 1 <= variance <= 2
        assert tau > signal or math.isinf(tau)


def test_signal_to_noise_of_the_three_uses():
    run = {"dimension": 10_000, "batch_size": 100, "steps": 50, "signal": 0.01}
    gaussian = lap2.signal_to_noise(lap2.Gaussian(2.0), **run)
    linear = lap2.signal_to_noise(lap2.Laplace(2.0, 10_000), **run, denoise=False)
    denoised = lap2.signal_to_noise(lap2.Laplace(2.0, 10_000), **run)
    assert gaussian.per_step == pytest.approx(1**2 / (10_000 * 4))
    assert gaussian.total == pytest.approx(50 * gaussian.per_step)
    assert linear.per_step == pytest.approx(gaussian.per_step / 2)
    assert 0.97 < denoised.per_step / gaussian.per_step < 1
    with pytest.raises(TypeError, match="single group"):
        lap2.signal_to_noise(lap2.Joint([lap2.Gaussian(1.0)]), **run)


def test_strong_signals_are_denoised_as_well_as_training_does_it():
    """Alone, a coordinate with a signal of half the noise keeps 1 / 1.45; 13 copies of it more."""
    run = {"dimension": 10_000, "batch_size": 100, "steps": 50, "signal": 1.0}
    gaussian = lap2.signal_to_noise(lap2.Gaussian(2.0), **run)
    denoised = lap2.signal_to_noise(lap2.Laplace(2.0, 10_000), **run)
    assert 0.85 < denoised.per_step / gaussian.per_step < 0.9
    assert [copies(n) for n in (1, 31, 32, 10_000, 65_536, 65_537, 10**9)] == [
        *(1, 1, 4096, 13, 2, 1, 1)
    ]


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
    options = {option.name: option for option in plan.options}
    assert not options["published"].is_guarantee
    for name, mechanism in [
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


def test_plan_finds_the_regions_where_one_side_wins():
    one = {"dataset_size": 1000, "batch_size": 1000, "epochs": 1, "dimension": 1}
    win = lap2.plan(**one, epsilon=1.0, delta=1e-10)
    assert win.recommendation == "laplace"
    laplace, gaussian = win.options[0], win.options[1]
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
