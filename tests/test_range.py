"""Upper bounds over the whole documented range of arguments, and refusals beyond it."""

import math

import mpmath as mp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import lap2

mp.mp.dps = 60

noises = st.floats(-300, 300).map(lambda t: 10.0**t)
probs = st.just(1.0) | st.floats(-323, 0).map(lambda t: 10.0**t)
dims = st.just(math.inf) | st.floats(0, 62.99).map(lambda t: int(2.0**t)) | st.just(2**63 - 1)
counts = st.floats(0, 53).map(lambda t: int(2.0**t))


def spend(mechanism, zeta, steps):
    return lap2.Accountant().compose(mechanism, sampling_prob=zeta, steps=steps)


def exact_alpha(noise, n, zeta, steps, order):
    """By arbitrary precision; noise above 1e100 counts as 1e100, which costs more."""
    rho, zeta = 1 / mp.mpf(min(noise, 1e100)), mp.mpf(zeta)
    x = rho / mp.sqrt(n)

    def moment_less_1(eta):
        if n == math.inf:
            return mp.expm1(eta * (eta - 1) * rho**2 / 2)
        log_f = mp.log1p(excess(x, eta))
        return mp.expm1(n * log_f)

    terms = [
        mp.binomial(order + 1, eta)
        * zeta**eta
        * (1 - zeta) ** (order + 1 - eta)
        * moment_less_1(mp.mpf(eta))
        for eta in range(2, order + 2)
    ]
    return steps * mp.log1p(mp.fsum(terms))


def excess(x, eta):
    """``F(x, eta) - 1`` by its series where x is small: 60 digits are not enough otherwise."""
    if x * eta < mp.mpf(10) ** -8:
        first, second = (y**2 / 2 + y**3 / 6 + y**4 / 24 for y in ((eta - 1) * x, -eta * x))
        return (eta * first + (eta - 1) * second) / (2 * eta - 1)
    return (eta * mp.exp((eta - 1) * x) + (eta - 1) * mp.exp(-eta * x)) / (2 * eta - 1) - 1


@settings(max_examples=300, deadline=None)
@given(noises, dims, probs, counts, st.integers(1, 12))
@example(1e100, 2**63 - 1, 1.0, 2**53, 1)
@example(1e100, math.inf, 5e-324, 1, 1)
@example(1e100, 1, 1e-160, 2**53, 12)
@example(1e-4, 10**12, 1e-310, 7, 3)
def test_no_moment_is_ever_below_the_exact_one(noise, n, zeta, steps, order):
    with mp.workprec(400):
        exact = exact_alpha(noise, n, zeta, steps, order)
        (found,) = spend(lap2.Laplace(noise, n), zeta, steps).log_moments([order]).tolist()
        assert 0 < exact <= found
        if found < math.inf and exact > 1e-250:
            assert found <= exact * (1 + 1e-6)


@settings(max_examples=300)
@given(noises, st.integers(1, 2**63 - 1), probs, counts)
@example(1 / 745, 1, 5e-324, 1)
@example(1 / 700.5, 1, 5e-324, 3)
@example(1e100, 1, 5e-324, 1)
def test_pure_epsilon_is_never_below_the_exact_one(noise, n, zeta, steps):
    l1 = mp.sqrt(n) / mp.mpf(noise)
    exact = steps * mp.log1p(mp.mpf(zeta) * mp.expm1(l1))
    found = spend(lap2.Laplace(noise, n), zeta, steps).pure_epsilon
    assert 0 < exact <= found
    if 1e-250 < found < math.inf:
        assert found <= exact * (1 + 3e-12) or noise > 1e100


deltas = st.floats(-320, -1e-12).map(lambda t: 10.0**t) | st.floats(1e-12, 0.999999999)
kinds = st.sampled_from([lap2.Laplace, lambda noise, _: lap2.Gaussian(noise)])


@settings(max_examples=150, deadline=None)
@given(kinds, noises, dims, probs, counts, deltas)
@example(lap2.Laplace, 1.5617293895945576e-06, math.inf, 1.0, 169355023, 7.69e-286)
@example(lap2.Laplace, 1e-8, 1, 1.0, 1000, 0.3)
@example(lap2.Laplace, 1e-6, math.inf, 0.001, 10**7, 0.7)
def test_delta_at_the_epsilon_of_a_delta_is_not_above_it(  # noqa: PLR0917
    kind, noise, n, zeta, steps, delta
):
    accountant = spend(kind(noise, n), zeta, steps)
    epsilon = accountant.get_epsilon(delta)
    if epsilon < math.inf:
        assert accountant.get_delta(epsilon) <= delta * (1 + 1e-12) + 5e-324


def test_more_dimensions_and_steps_than_the_range_are_refused_by_name():
    for n in (2**63, 10**130, 10**5000):
        for make in (lap2.Laplace, lap2.MajorizedLaplace):
            with pytest.raises(
                ValueError, match=r"dimension must be .* below 2\^63.*, got"
            ) as error:
                make(1e100, n)
            assert len(str(error.value)) < 400
    accountant = spend(lap2.Laplace(1.0, 3), 0.1, 2**53)
    for steps in (1, 10**200, 10**5000):
        with pytest.raises(ValueError, match=r"steps must be at most 2\^53"):
            accountant.compose(lap2.Laplace(1.0, 3), sampling_prob=0.1, steps=steps)
    assert accountant.steps == 2**53
    with pytest.raises(ValueError, match=r"noise_multiplier must be .*, got one too large"):
        lap2.Gaussian(10**400)


def test_many_steps_with_much_noise_cost_what_the_limit_of_dimensions_does():
    """At the far corner of the range, too, nothing underflows to a release that looks free."""
    few, limit = (
        spend(lap2.Laplace(1e100, n), 1.0, 2**53).log_moments(np.arange(1, 9))
        for n in (2**63 - 1, math.inf)
    )
    np.testing.assert_allclose(few, limit, rtol=1e-9)
    assert limit[0] == pytest.approx(2.0**53 * 1e-200, rel=1e-8)
