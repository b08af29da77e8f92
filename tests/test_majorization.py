"""The majorization set, its grouping, and Schur-convexity."""

import math
import warnings

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import lap2
from lap2.divergence import log_f, worst_shift
from lap2.majorization import grouped_majorization_set
from lap2.sampling import SampledMoments

vectors = hnp.arrays(np.float64, st.integers(1, 30), elements=st.just(0.0) | st.floats(1e-100, 10))


def test_partial_sums_and_golden_square_sum():
    x = lap2.majorization_set(26010)
    np.testing.assert_allclose(np.cumsum(x), np.sqrt(np.arange(1, 26011)), rtol=1e-12)
    assert (x**2).sum() == pytest.approx(3.539214, abs=5e-7)
    assert lap2.majorization_set(4, 3.0).sum() == pytest.approx(6.0)


@given(vectors)
def test_the_set_weakly_majorizes_every_clipped_vector(v):
    norm = float(np.linalg.norm(v))
    assert lap2.weakly_majorizes(lap2.majorization_set(len(v), norm), v)


def test_weakly_majorizes_can_say_no():
    assert not lap2.weakly_majorizes([1, 1], [1.5, 0.5])
    assert lap2.weakly_majorizes([1.5, 0.5], [1, 1])
    assert lap2.weakly_majorizes([2], [1, 1])
    assert not lap2.weakly_majorizes(0.99 * lap2.majorization_set(4), np.full(4, 0.5))
    with pytest.raises(ValueError, match="y must hold non-negative"):
        lap2.weakly_majorizes([1], [-1])


@given(vectors, st.randoms(use_true_random=False), st.sampled_from([2, 3, 10, 50]))
def test_moments_are_schur_convex(v, random, eta):
    """Moving two coordinates towards each other never raises the sum of log F."""
    if len(v) < 2:
        return
    i, j = random.sample(range(len(v)), 2)
    part = random.random()
    smoother = v.copy()
    smoother[i], smoother[j] = (1 - part) * v[i] + part * v[j], part * v[i] + (1 - part) * v[j]
    assert lap2.weakly_majorizes(v, smoother)
    assert log_f(smoother, eta).sum() <= log_f(v, eta).sum() * (1 + 1e-12) + 1e-12


@pytest.mark.parametrize("n", [1, 2, 511, 512, 513, 530, 100_000, 125_000_000])
def test_grouping_keeps_the_number_and_the_sum(n):
    values, counts = grouped_majorization_set(n)
    assert counts.sum() == pytest.approx(n, rel=1e-12)
    assert counts @ values == pytest.approx(math.sqrt(n), rel=1e-12)
    assert np.all(counts >= 0)
    assert values.size < 5500


def _published(noise, n):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", lap2.NotAGuaranteeWarning)
        return lap2.PublishedLaplace(noise, n)


@pytest.mark.parametrize("make", [lap2.MajorizedLaplace, _published])
@pytest.mark.parametrize("noise", [0.5, 1.0, 4.0, 16.0])
@pytest.mark.parametrize("zeta", [0.001, 0.0043, 0.1, 1.0])
def test_grouping_is_an_upper_bound_within_one_in_a_hundred_thousand(make, noise, zeta):
    """Against the plain sum over 100,000 coordinates."""
    n = 100_000
    grouped_shift = worst_shift(make(noise, n))
    plain_shift = type(grouped_shift)(
        values=lap2.majorization_set(n) / noise,
        counts=np.ones(n),
        shared_sample=grouped_shift.shared_sample,
    )
    grouped, plain = (SampledMoments([(s, zeta, 1.0)]) for s in (grouped_shift, plain_shift))
    for order in (1, 8, 30):
        assert plain(order) * (1 - 1e-9) <= grouped(order) <= plain(order) * (1 + 1e-5)


@pytest.mark.parametrize("make", [lap2.MajorizedLaplace, _published])
@pytest.mark.parametrize("noise", [0.5, 1.0, 4.0, 16.0])
def test_grouping_excess_is_certified_at_125_million(make, noise):
    """Jensen: replacing each group by its mean gives a lower bound, so the excess is enclosed."""
    n = 125_000_000
    shift = worst_shift(make(noise, n))
    values, counts = shift.values, shift.counts
    groups = (values.size - 512) // 2
    pairs = slice(512, 512 + groups), slice(512 + groups, None)
    size = counts[pairs[0]] + counts[pairs[1]]
    total = sum(counts[p] * values[p] for p in pairs)
    lower_shift = type(shift)(
        values=np.concatenate([values[:512], total / size]),
        counts=np.concatenate([counts[:512], size]),
        shared_sample=shift.shared_sample,
    )
    upper, lower = (SampledMoments([(s, 0.0043, 1.0)]) for s in (shift, lower_shift))
    for order in (1, 8, 25):
        assert lower(order) <= upper(order) <= lower(order) * (1 + 1e-5)
