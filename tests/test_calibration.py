"""Calibration: round trips, impossible targets, Algorithm 1, clips from data."""

import math
import warnings
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import lap2
from lap2 import calibration, clip_search
from lap2.noise import ReproducibleLaplace

RUN = {"sampling_prob": 0.0043, "steps": 5860}
TARGET = {"epsilon": 1.0, "delta": 1e-5}


def published(noise, n):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", lap2.NotAGuaranteeWarning)
        return lap2.PublishedLaplace(noise, n)


def spent(mechanism, delta, sampling_prob, steps):
    accountant = lap2.Accountant().compose(mechanism, sampling_prob=sampling_prob, steps=steps)
    return accountant.get_epsilon(delta)


def test_golden_noise_multiplier():
    step = lap2.calibrate_noise(lap2.Laplace(1.0, 125_000_000), **TARGET, **RUN)
    assert step.noise_multiplier == pytest.approx(1.5228, rel=5e-4)
    assert 0.9999 <= spent(step, 1e-5, **RUN) <= 1


def test_round_trip_on_two_hundred_settings():
    """Never above the target, never more than 0.01% below it."""
    rng = np.random.default_rng(11)
    for _ in range(200):
        epsilon = float(np.exp(rng.uniform(math.log(0.01), math.log(20))))
        prob = float(np.exp(rng.uniform(math.log(1e-4), 0)))
        steps = int(np.exp(rng.uniform(0, math.log(1e5))))
        delta = float(rng.choice([1e-3, 1e-5, 1e-8]))
        dimension = [1, 3, 50, 26010, 10**9, math.inf][rng.integers(6)]
        template = [lap2.Laplace(1.0, dimension), lap2.Gaussian(7.0), lap2.LaplaceL1(0.1)][
            rng.integers(3)
        ]
        step = lap2.calibrate_noise(
            template, epsilon=epsilon, delta=delta, sampling_prob=prob, steps=steps
        )
        achieved = spent(step, delta, prob, steps)
        assert epsilon * (1 - 1e-4) <= achieved <= epsilon, (step, epsilon, delta, prob, steps)


@pytest.mark.filterwarnings("ignore::lap2.NotAGuaranteeWarning")
@pytest.mark.parametrize("template", [lap2.MajorizedLaplace(1.0, 500), published(1.0, 500)])
def test_every_bound_can_be_calibrated(template):
    step = lap2.calibrate_noise(template, **TARGET, **RUN)
    assert 0.9999 <= spent(step, 1e-5, **RUN) <= 1


def test_joint_scales_only_the_groups_it_is_told_to():
    joint = lap2.Joint([lap2.Laplace(1.0, 100), lap2.Laplace(20.0, 1)])
    both = lap2.calibrate_noise(joint, **TARGET, **RUN)
    assert both.groups[1].noise_multiplier / both.groups[0].noise_multiplier == pytest.approx(20)
    first = lap2.calibrate_noise(joint, **TARGET, **RUN, groups=[0])
    assert first.groups[1].noise_multiplier == 20
    for step in (both, first):
        assert 0.9999 <= spent(step, 1e-5, **RUN) <= 1


def test_impossible_joint_target_names_the_nearest_possible():
    joint = lap2.Joint([lap2.Laplace(1.0, 100), lap2.Gaussian(0.5)])
    least = spent(lap2.Joint([lap2.Gaussian(0.5)]), 1e-5, **RUN)
    with pytest.raises(lap2.CalibrationError, match=f"epsilon must be above {least:.6g}"):
        lap2.calibrate_noise(joint, **TARGET, **RUN, groups=[0])


def test_steps_is_the_last_that_fits():
    step = lap2.Laplace(2.0, 1000)
    steps = lap2.calibrate_steps(step, **TARGET, sampling_prob=0.01)
    assert spent(step, 1e-5, 0.01, steps) <= 1 < spent(step, 1e-5, 0.01, steps + 1)
    assert lap2.calibrate_steps(step, **TARGET, sampling_prob=0.01, limit=10) == 10
    assert lap2.calibrate_steps(step, **TARGET, sampling_prob=0, limit=77) == 77
    with pytest.raises(lap2.CalibrationError, match="what one step spends"):
        lap2.calibrate_steps(lap2.Laplace(0.1, 10), epsilon=0.1, delta=1e-5, sampling_prob=1)


def test_sampling_prob_is_the_largest_that_fits():
    prob = lap2.calibrate_sampling_prob(lap2.Gaussian(2.0), **TARGET, steps=1000)
    assert 0.9999 <= spent(lap2.Gaussian(2.0), 1e-5, prob, 1000) <= 1
    assert lap2.calibrate_sampling_prob(lap2.Gaussian(1000.0), **TARGET, steps=1) == 1
    with pytest.raises(lap2.CalibrationError, match="sampling probability 1e-12"):
        lap2.calibrate_sampling_prob(lap2.Gaussian(0.0), **TARGET, steps=1)


def test_clip_is_the_largest_that_the_scale_covers():
    step = lap2.Laplace(1.0, 100)
    clip = lap2.calibrate_clip(step, scale=3.0, **TARGET, **RUN)
    assert 0.9999 <= spent(lap2.Laplace(3.0 / clip, 100), 1e-5, **RUN) <= 1
    with pytest.raises(TypeError, match="single group"):
        lap2.calibrate_clip(lap2.Joint([step]), scale=3.0, **TARGET, **RUN)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"epsilon": 0.0}, "epsilon must be a finite number above 0, got 0.0"),
        ({"epsilon": math.nan}, "epsilon must be"),
        ({"delta": 1.0}, "delta must be"),
        ({"sampling_prob": 1.5}, "sampling_prob must be"),
        ({"steps": 1.5}, "steps must be"),
        ({"groups": [0]}, "groups must be None unless"),
    ],
)
def test_bad_calibration_input_is_refused(change, message):
    with pytest.raises((TypeError, ValueError), match=message):
        lap2.calibrate_noise(lap2.Laplace(1.0, 10), **{**TARGET, **RUN, **change})


def test_templates_without_noise_or_with_wrong_groups_are_refused():
    with pytest.raises(ValueError, match="above 0 where it is scaled"):
        lap2.calibrate_noise(lap2.Laplace(0.0, 10), **TARGET, **RUN)
    joint = lap2.Joint([lap2.Gaussian(1.0)])
    with pytest.raises(ValueError, match="positions below 1, got 3"):
        calibration.scale_noise(joint, 2.0, [3])


SEARCH = {
    "clip_min": 0.1,
    "clip_max": 5.0,
    "clip_step": 0.1,
    "scale_min": 0.1,
    "scale_max": 4.0,
    "tolerance": 1e-3,
}


@pytest.mark.filterwarnings("ignore::lap2.NotAGuaranteeWarning")
@pytest.mark.parametrize(
    "template", [lap2.Laplace(1.0, 26010), lap2.Gaussian(1.0), published(1.0, 300)]
)
@pytest.mark.parametrize("grid", [{}, {"grid": "log", "clip_step": 1.1}])
def test_algorithm_one_agrees_with_the_direct_answer(template, grid):
    found = lap2.search_clip(template, **TARGET, **RUN, **{**SEARCH, **grid})
    assert found.clip == found.direct_clip
    assert 0 <= found.scale - found.direct_scale + 1e-5 <= SEARCH["tolerance"] + 2e-5
    assert found.is_guarantee == template.is_guarantee
    feasible = [trial.scale is not None for trial in found.trace]
    assert feasible == sorted(feasible, reverse=True)
    assert any(feasible)
    assert not all(feasible)
    for trial in found.trace[::7]:
        if trial.scale:
            noise = calibration.replace(template, noise_multiplier=trial.scale / trial.clip)
            assert spent(noise, 1e-5, **RUN) <= 1


def test_algorithm_one_says_what_would_be_possible():
    with pytest.raises(lap2.CalibrationError, match="clip_min must be at most 0"):
        lap2.search_clip(lap2.Laplace(1.0, 10), **TARGET, **RUN, **{**SEARCH, "scale_max": 0.11})
    for change, message in [
        ({"clip_step": 0.0}, "clip_step must be"),
        ({"grid": "cubic"}, "grid must be one of"),
        ({"grid": "log", "clip_step": 0.5}, "factor above 1"),
        ({"clip_max": 0.01}, "clip_max must be at least clip_min"),
        ({"scale_max": 0.01}, "scale_max must be at least scale_min"),
    ]:
        with pytest.raises(ValueError, match=message):
            lap2.search_clip(lap2.Laplace(1.0, 10), **TARGET, **RUN, **{**SEARCH, **change})


def test_first_order_starts_are_reported_with_their_error():
    start = lap2.first_order(lap2.Laplace(1.0, 26010), **TARGET, **RUN)
    assert start.exact_scale == pytest.approx(1.5218, rel=1e-3)
    assert start.scale == pytest.approx(2 * 0.0043 * math.sqrt(5860 * math.log(1e5)))
    assert abs(start.ratio_error) < 0.1
    assert start.ratio_as_printed_error > 5  # the printed coefficient is far off


def test_public_percentile_is_plain_and_private_quantile_is_charged():
    rng = np.random.default_rng(5)
    norms = rng.lognormal(sigma=0.5, size=5000)
    assert lap2.clip_from_public_norms(norms, percentile=50) == pytest.approx(np.median(norms))
    accountant = lap2.Accountant()
    clip = lap2.clip_from_private_norms(
        norms,
        quantile=0.5,
        low=1e-3,
        high=1e3,
        noise_multiplier=20.0,
        rounds=20,
        accountant=accountant,
    )
    assert clip == pytest.approx(np.median(norms), rel=0.1)
    (entry,) = accountant.ledger
    assert (entry.sampling_prob, entry.steps, entry.mechanism.dimension) == (1.0, 20, 1)
    assert 20 * (1 - 1e-6) < entry.mechanism.noise_multiplier < 20  # rounding is charged too


QUANTILE = {"quantile": 0.5, "low": 0.1, "high": 1.0, "noise_multiplier": 1.0, "rounds": 3}


class Noiseless:
    """Adds nothing, and remembers what it was given."""

    is_secure = False
    law = "laplace"

    def __init__(self):
        self.given = []

    def added_sensitivity(self, _scale, _size):
        return 0.0

    def add(self, array, scale):
        self.given.append((float(array[0]), scale))
        return 0.0


@pytest.mark.parametrize("sampler", [Noiseless(), ReproducibleLaplace(0)])
def test_a_private_quantile_without_secure_noise_is_no_guarantee(sampler):
    accountant = lap2.Accountant()
    lap2.clip_from_private_norms([1.0, 2.0], **QUANTILE, accountant=accountant, sampler=sampler)
    answer = accountant.answer(delta=1e-5)
    assert not answer.is_guarantee
    assert "ordinary generator" in answer.caveats[0]
    accountant = lap2.Accountant()
    lap2.clip_from_private_norms([1.0, 2.0], **QUANTILE, accountant=accountant)
    assert accountant.answer(delta=1e-5).is_guarantee


@pytest.mark.parametrize("quantile", [0.3, 0.9, 1 / 3, 1 - 2**-40])
@pytest.mark.parametrize("noise", [1e-6, 1.0, 30.0])
def test_counts_of_neighbours_are_no_further_apart_than_is_charged(quantile, noise):
    terms = {**QUANTILE, "quantile": quantile, "noise_multiplier": noise, "rounds": 1}
    for norm in (0.0, 1e9):  # of the record that is added: below the threshold, or above
        sampler, accountant = Noiseless(), lap2.Accountant()
        for norms in (np.zeros(1000), np.append(np.zeros(1000), norm)):
            lap2.clip_from_private_norms(norms, **terms, accountant=accountant, sampler=sampler)
        (one, scale), (other, _) = sampler.given
        charged = Fraction(accountant.ledger[0].mechanism.noise_multiplier)
        assert charged * abs(Fraction(other) - Fraction(one)) <= Fraction(scale)
        assert float(charged) == pytest.approx(noise, rel=2e-9 * (1 + noise))


@given(
    total=st.integers(1, 10**15),
    share=st.floats(0, 1),
    quantile=st.floats(1e-6, 1 - 1e-6),
    is_below=st.booleans(),
    log_grid=st.integers(-60, 10),
)
def test_counts_are_centred_exactly_however_many_there_are(
    total, share, quantile, is_below, log_grid
):
    below, q, grid = int(share * total), Fraction(quantile), 2.0**log_grid
    one = clip_search._centred(below, total, q, grid)
    other = clip_search._centred(below + is_below, total + 1, q, grid)
    assert abs(Fraction(one) - Fraction(other)) <= max(q, 1 - q) + Fraction(grid)
    if abs(below - q * total) < 2**51 * Fraction(grid):
        assert 0 <= below - q * total - Fraction(one) < Fraction(grid)


def test_the_search_may_begin_with_any_range():
    for low, high, truth in ((1e-300, 1e300, 1e200), (1e-3, 1e300, 1.0)):
        clip = lap2.clip_from_private_norms(
            np.full(1000, truth), quantile=0.5, low=low, high=high, noise_multiplier=1.0,
            rounds=60, accountant=lap2.Accountant(),
        )  # fmt: skip
        assert clip == pytest.approx(truth, rel=1e-6)


@pytest.mark.parametrize("norms", [[1.0, -0.123456789], ["1234x"]])
def test_errors_show_no_norm(norms):
    with pytest.raises((TypeError, ValueError), match="norms must be") as caught:
        lap2.clip_from_private_norms(norms, **QUANTILE, accountant=lap2.Accountant())
    assert not any(letter in str(caught.value) for letter in "123456789")
    assert caught.value.__suppress_context__ or caught.value.__context__ is None


def test_private_quantile_refuses_before_it_charges():
    accountant = lap2.Accountant()
    good = QUANTILE
    for change in ({"quantile": 1.0}, {"high": 0.1}, {"rounds": 0}, {"noise_multiplier": 0.0}):
        with pytest.raises(ValueError, match="must be"):
            lap2.clip_from_private_norms([1.0], **{**good, **change}, accountant=accountant)
    with pytest.raises(ValueError, match="norms must be at least 0"):
        lap2.clip_from_private_norms([-1.0], **good, accountant=accountant)
    assert accountant.steps == 0
    for bad in ([], [math.nan]):
        with pytest.raises(ValueError, match="at least one finite"):
            lap2.clip_from_public_norms(bad, percentile=50)
