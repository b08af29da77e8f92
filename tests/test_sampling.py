"""The Binomial mean against arbitrary precision."""

import mpmath as mp
import numpy as np
import pytest

import lap2
from lap2 import sampling
from lap2.divergence import Shift, worst_shift
from lap2.sampling import SampledMoments

mp.mp.dps = 60


def mp_alpha(noise, n, zeta, order):
    rho = 1 / mp.mpf(noise)
    x = rho / mp.sqrt(n)

    def f(eta):
        eta = mp.mpf(eta)
        return (eta * mp.exp((eta - 1) * x) + (eta - 1) * mp.exp(-eta * x)) / (2 * eta - 1)

    zeta = mp.mpf(zeta)
    trials = order + 1
    return mp.log(
        mp.fsum(
            mp.binomial(trials, k) * zeta**k * (1 - zeta) ** (trials - k) * f(k) ** n
            for k in range(trials + 1)
        )
    )


@pytest.mark.parametrize("order", [1, 2, 8, 127, 128, 129, 400, 2000])
@pytest.mark.parametrize(
    ("noise", "n", "zeta"),
    [(1.0, 26010, 0.0043), (30.0, 10**9, 1e-4), (300.0, 1, 1e-6), (0.5, 3, 0.5), (8.0, 100, 0.9)],
)
def test_moment_is_rounded_up_and_accurate(order, noise, n, zeta):
    ours = SampledMoments([(worst_shift(lap2.Laplace(noise, n)), zeta, 1.0)])(order)
    exact = mp_alpha(noise, n, zeta, order)
    assert exact <= ours <= exact * (1 + 2e-9)


def test_truncation_is_an_upper_bound_and_is_used(monkeypatch):
    """With few terms the geometric tail must cover what is left out."""
    row = [(worst_shift(lap2.Laplace(60.0, 1000)), 0.01, 1.0)]
    short = SampledMoments(row)(3000)
    monkeypatch.setattr(sampling, "_FULL_SUM", 10**9)
    full = SampledMoments(row)(3000)
    assert short == pytest.approx(full, rel=1e-9)
    block = SampledMoments(row)._blocks[0]
    monkeypatch.setattr(sampling, "_FULL_SUM", 128)
    assert block._terms_needed(3001)[0] < 500


def test_blocks_do_not_change_the_answer(monkeypatch):
    rows = [(worst_shift(lap2.Laplace(1 + k / 10, 10 + k)), 0.01, k + 1.0) for k in range(40)]
    rows += [
        (worst_shift(lap2.Gaussian(2.0)), 1.0, 2.0),
        (worst_shift(lap2.LaplaceL1(3.0)), 0.5, 1.0),
    ]
    expected = [SampledMoments(rows)(order) for order in (1, 20, 300)]
    monkeypatch.setattr(sampling, "_BLOCK", 512)
    np.testing.assert_allclose(
        [SampledMoments(rows)(o) for o in (1, 20, 300)], expected, rtol=1e-12
    )


def test_rows_add_up_with_their_multiplicity():
    a, b = worst_shift(lap2.Laplace(2.0, 5)), worst_shift(lap2.Gaussian(1.5))
    both = SampledMoments([(a, 0.1, 3.0), (b, 0.2, 7.0)])
    separate = 3 * SampledMoments([(a, 0.1, 1.0)])(6) + 7 * SampledMoments([(b, 0.2, 1.0)])(6)
    assert both(6) == pytest.approx(separate, rel=1e-12)


def test_joint_release_costs_more_than_separately_sampled_groups():
    """Chebyshev's association inequality: why the published bound is not one."""
    a, b = lap2.Laplace(1.0, 50), lap2.Laplace(1.0, 50)
    joint = SampledMoments([(worst_shift(lap2.Joint([a, b])), 0.1, 1.0)])
    separate = SampledMoments([(worst_shift(a), 0.1, 2.0)])
    assert joint(5) > 1.01 * separate(5)
    whole = SampledMoments([(worst_shift(lap2.Joint([a, b])), 1.0, 1.0)])
    whole_separate = SampledMoments([(worst_shift(a), 1.0, 2.0)])
    assert whole(5) == pytest.approx(whole_separate(5), rel=1e-12)


def test_joint_of_equal_groups_is_one_group():
    """Two halves with clips C/sqrt(2) are a whole with clip C."""
    halves = lap2.Joint([lap2.Laplace(2**0.5, 50), lap2.Laplace(2**0.5, 50)])
    ours = SampledMoments([(worst_shift(halves), 0.1, 1.0)])
    whole = SampledMoments([(worst_shift(lap2.Laplace(1.0, 100)), 0.1, 1.0)])
    assert ours(9) == pytest.approx(whole(9), rel=1e-9)


def test_univariate_moment_is_the_one_coordinate_accountant():
    ours = lap2.univariate_log_moment(5, noise_multiplier=2.0, sampling_prob=0.1)
    exact = mp_alpha(2.0, 1, 0.1, 5)
    assert exact <= ours <= exact * (1 + 2e-9)
    assert lap2.univariate_log_moment(5, noise_multiplier=2.0, sampling_prob=0) == 0
    assert lap2.univariate_log_moment(0, noise_multiplier=2.0, sampling_prob=0.1) == 0
    with pytest.raises(ValueError, match="order must be an integer at least 0, got -1"):
        lap2.univariate_log_moment(-1, noise_multiplier=2.0, sampling_prob=0.1)


def test_nothing_moves_nothing_costs():
    assert SampledMoments([(Shift(), 0.5, 10.0)])(7) == 0
