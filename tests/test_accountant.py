"""Golden numbers, properties and refusals of the accountant."""

import math
import warnings

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import lap2

DELTA = 1e-5


def published(noise, n):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", lap2.NotAGuaranteeWarning)
        return lap2.PublishedLaplace(noise, n)


def spend(mechanism, zeta=0.0043, steps=5860):
    return lap2.Accountant().compose(mechanism, sampling_prob=zeta, steps=steps)


@pytest.mark.parametrize(
    ("make", "epsilons", "orders"),
    [
        (lap2.Laplace, [1.96646, 0.69994, 0.31133, 0.14484, 0.06796], [8, 23, 46, 90, 173]),
        (published, [2.66003, 1.24928, 0.59396, 0.28257, 0.13406], [7, 14, 26, 51, 97]),
        (lap2.MajorizedLaplace, [9.58738, 1.63112, 0.63556, 0.28814, 0.13489], [2, 11, 25, 49, 96]),
        (
            lambda noise, _: lap2.Gaussian(noise),
            [1.97024, 0.70040, 0.31142, 0.14486, 0.06797],
            None,
        ),
    ],
)
def test_golden_numbers(make, epsilons, orders):
    answers = [spend(make(noise, 26010)).answer(delta=DELTA) for noise in (1, 2, 4, 8, 16)]
    np.testing.assert_allclose([a.epsilon for a in answers], epsilons, rtol=1e-4)
    if orders:
        assert [round(a.order) for a in answers] == orders


def test_golden_counterexamples_and_the_wide_model():
    assert spend(lap2.Laplace(1, 1000), 0.1, 1).answer(delta=DELTA).order == 5
    assert spend(lap2.Laplace(1, 1000), 0.1, 1).get_epsilon(DELTA) == pytest.approx(2.10375, 1e-4)
    assert spend(lap2.Laplace(0.3, 100), 0.01, 1).get_epsilon(DELTA) == pytest.approx(11.0767, 1e-4)
    assert spend(published(0.3, 100), 0.01, 1).get_epsilon(DELTA) == pytest.approx(0.32, 2e-2)
    assert spend(lap2.Laplace(1.5228, 125_000_000)).get_epsilon(DELTA) == pytest.approx(1, 1e-3)


def test_published_is_never_called_a_guarantee():
    with pytest.warns(lap2.NotAGuaranteeWarning, match=r"docs/theory\.md, section 4") as caught:
        step = lap2.PublishedLaplace(1.0, 10)
    assert caught[0].filename == __file__
    accountant = spend(lap2.Laplace(1.0, 10))
    assert accountant.is_guarantee
    assert accountant.answer(delta=DELTA).is_guarantee
    accountant.compose(step, sampling_prob=0.1)
    assert not accountant.is_guarantee
    assert not accountant.answer(delta=DELTA).is_guarantee
    assert not accountant.answer(epsilon=1.0).is_guarantee
    assert accountant.pure_epsilon == math.inf
    assert "is_guarantee=False" in repr(accountant)


noises = st.floats(0.3, 100)
probs = st.floats(1e-4, 1)
steps = st.integers(1, 10_000)
dims = st.one_of(st.integers(1, 10**9), st.just(math.inf))
up = 1 + 1e-8


@settings(max_examples=40, deadline=None)
@given(noises, dims, probs, steps, st.floats(1e-12, 0.1), st.floats(1.0001, 3))
def test_epsilon_is_monotone_in_everything(  # noqa: PLR0917
    noise, n, zeta, count, delta, factor
):
    def epsilon(noise=noise, n=n, zeta=zeta, count=count, delta=delta):
        return spend(lap2.Laplace(noise, n), zeta, count).get_epsilon(delta)

    base = epsilon()
    assert epsilon(noise=noise * factor) <= base * up
    assert epsilon(delta=min(0.99, delta * factor)) <= base * up
    assert epsilon(count=math.ceil(count * factor)) * up >= base
    assert epsilon(zeta=min(1, zeta * factor)) * up >= base
    assert epsilon(n=math.inf) * up >= base
    if n < math.inf:
        assert epsilon(n=math.ceil(n * factor)) * up >= base


@given(noises, st.sampled_from([10**15, 10**18]))
def test_infinite_dimension_is_the_limit(noise, n):
    finite = spend(lap2.Laplace(noise, n)).get_epsilon(DELTA)
    limit = spend(lap2.Laplace(noise, math.inf)).get_epsilon(DELTA)
    gaussian = spend(lap2.Gaussian(noise)).get_epsilon(DELTA)
    assert finite == pytest.approx(limit, rel=1e-6)
    assert limit == gaussian


entries = st.lists(st.tuples(noises, dims, probs, st.integers(1, 100)), min_size=1, max_size=6)


@settings(deadline=None)
@given(entries, st.randoms(use_true_random=False))
def test_order_and_split_of_composition_do_not_matter(entries, random):
    plain, shuffled = lap2.Accountant(), lap2.Accountant()
    pieces = []
    for noise, n, zeta, count in entries:
        plain.compose(lap2.Laplace(noise, n), sampling_prob=zeta, steps=count)
        first = random.randint(0, count)
        pieces += [(noise, n, zeta, first), (noise, n, zeta, count - first)]
    random.shuffle(pieces)
    for noise, n, zeta, count in pieces:
        shuffled.compose(lap2.Laplace(noise, n), sampling_prob=zeta, steps=count)
    assert plain.steps == shuffled.steps
    assert shuffled.get_epsilon(DELTA) == pytest.approx(plain.get_epsilon(DELTA), rel=1e-12)


@settings(deadline=None)
@given(noises, dims, probs, steps, st.floats(1e-9, 1e-2))
def test_delta_inverts_epsilon_and_tail_is_looser(noise, n, zeta, count, delta):
    accountant = spend(lap2.Laplace(noise, n), zeta, count)
    answer = accountant.answer(delta=delta)
    if answer.method == "tight" and answer.epsilon > 0:
        assert accountant.get_delta(answer.epsilon) == pytest.approx(delta, rel=1e-3)
    assert answer.epsilon <= accountant.get_epsilon(delta, conversion="tail") * up


def test_every_order_gives_a_valid_bound_and_none_is_better():
    accountant = spend(lap2.Laplace(4, 26010))
    orders = np.arange(1, 400)
    alpha = accountant.log_moments(orders)
    each = alpha / orders + np.log(orders / (orders + 1)) - (np.log(DELTA * (orders + 1))) / orders
    best = accountant.get_epsilon(DELTA)
    assert best <= each.min() * up
    assert best == pytest.approx(each.min(), rel=1e-5)


def test_orders_in_the_thousands_are_reached():
    answer = spend(lap2.Laplace(100, 10**6)).answer(delta=DELTA)
    assert answer.epsilon < 0.012
    assert 900 < answer.order < 1400
    tiny = spend(lap2.Gaussian(3000.0), 0.01, 100).answer(delta=1e-10)
    assert tiny.order > 100_000


def test_chord_between_orders_matters_near_one():
    """Large losses: the best order lies between integers, and beats both."""
    accountant = spend(lap2.Gaussian(1 / math.sqrt(10.6)), 1.0, 1)
    answer = accountant.answer(delta=DELTA)
    orders = np.array([1, 2])
    alpha = accountant.log_moments(orders)
    each = alpha / orders + np.log(orders / (orders + 1)) - np.log(DELTA * (orders + 1)) / orders
    assert 1 < answer.order < 2
    assert answer.epsilon < each.min() * (1 - 1e-4)
    assert 0 < spend(lap2.Gaussian(0.1), 1.0, 1).answer(delta=0.7).order < 1


def test_pure_dp_is_reported_where_it_is_smaller():
    one = spend(lap2.Laplace(2.0, 4), 1.0, 1)
    assert one.pure_epsilon == pytest.approx(1.0)
    assert one.answer(delta=1e-10).method == "pure"
    assert one.get_epsilon(1e-10) == pytest.approx(1.0)
    assert one.get_delta(1.0 + 1e-9) == 0
    sampled = spend(lap2.LaplaceL1(1.0), 0.25, 3)
    assert sampled.pure_epsilon == pytest.approx(3 * math.log1p(0.25 * math.expm1(1)))
    assert spend(lap2.Gaussian(1.0)).pure_epsilon == math.inf


def test_conversion_against_the_exact_delta_of_one_laplace_release():
    """Closed form for n = 1: delta(eps) = 1 - exp((eps - 1/b) / 2); ours must lie above it."""
    for noise in (0.2, 1.0, 5.0):
        accountant = spend(lap2.LaplaceL1(noise), 1.0, 1)
        for epsilon in (0.0, 0.05, 0.15):
            exact = max(0.0, -math.expm1((epsilon - 1 / noise) / 2))
            assert exact <= accountant.get_delta(epsilon) <= 1


def test_edges_are_answers():
    accountant = lap2.Accountant()
    assert accountant.get_epsilon(DELTA) == 0
    assert accountant.get_delta(0.0) == 0
    for silent in (
        (lap2.Laplace(1, 10), 0.0, 10),
        (lap2.Laplace(1, 10), 0.5, 0),
        (lap2.Laplace(0, 1), 0, 1),
    ):
        accountant.compose(silent[0], sampling_prob=silent[1], steps=silent[2])
        assert accountant.get_epsilon(DELTA) == 0
    for loud in (
        lap2.Laplace(0, 10),
        lap2.Laplace(0, math.inf),
        lap2.Gaussian(0),
        lap2.LaplaceL1(0),
    ):
        for zeta in (0.1, 1.0):
            assert spend(loud, zeta, 1).get_epsilon(DELTA) == math.inf
            assert spend(loud, zeta, 1).get_delta(5.0) == 1
    assert spend(lap2.Laplace(1e-300, 10), 0.1, 1).get_epsilon(DELTA) > 1e100
    assert spend(lap2.Gaussian(1e-200), 0.1, 1).get_epsilon(DELTA) == math.inf
    assert 0 <= spend(lap2.Gaussian(1e300)).get_epsilon(DELTA) < 1e-6


GOOD = {"mechanism": lap2.Laplace(1.0, 10), "sampling_prob": 0.1, "steps": 3}


@pytest.mark.parametrize(
    ("argument", "value", "error"),
    [
        ("sampling_prob", math.nan, ValueError),
        ("sampling_prob", -0.1, ValueError),
        ("sampling_prob", 1.1, ValueError),
        ("sampling_prob", math.inf, ValueError),
        ("sampling_prob", "0.1", TypeError),
        ("sampling_prob", None, TypeError),
        ("sampling_prob", True, TypeError),
        ("steps", -1, ValueError),
        ("steps", 2.5, TypeError),
        ("steps", 3.0, TypeError),
        ("steps", math.nan, TypeError),
        ("steps", "3", TypeError),
        ("steps", True, TypeError),
        ("mechanism", "laplace", TypeError),
        ("mechanism", lap2.Laplace, TypeError),
        ("mechanism", lap2.Mechanism(), TypeError),
    ],
)
def test_bad_steps_are_refused_and_change_nothing(argument, value, error):
    accountant = spend(lap2.Laplace(1.0, 10), 0.1, 5)
    before = accountant.to_json()
    arguments = {**GOOD, argument: value}
    with pytest.raises(error, match=f"{argument} must be") as caught:
        accountant.compose(
            arguments["mechanism"],
            sampling_prob=arguments["sampling_prob"],
            steps=arguments["steps"],
        )
    assert repr(value) in str(caught.value)
    assert accountant.to_json() == before


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, -1.0, "1", None, True, 1j])
@pytest.mark.parametrize(
    "make",
    [
        lambda v: lap2.Laplace(v, 10),
        lap2.LaplaceL1,
        lap2.Gaussian,
        lambda v: lap2.MajorizedLaplace(v, 10),
        lambda v: lap2.PublishedLaplace(v, 10),
    ],
)
def test_bad_noise_is_refused(make, value):
    with pytest.raises((TypeError, ValueError), match="noise_multiplier must be a finite number"):
        make(value)


@pytest.mark.parametrize("value", [0, -1, 2.5, 1e9, math.nan, -math.inf, "10", None, True])
@pytest.mark.parametrize("make", [lap2.Laplace, lap2.MajorizedLaplace, lap2.PublishedLaplace])
def test_bad_dimension_is_refused(make, value):
    with pytest.raises(
        (TypeError, ValueError), match="dimension must be an integer at least 1"
    ) as e:
        make(1.0, value)
    assert repr(value) in str(e.value)


@pytest.mark.parametrize("make", [lap2.MajorizedLaplace, lap2.PublishedLaplace])
def test_majorization_needs_a_finite_dimension(make):
    with pytest.raises((TypeError, ValueError), match="dimension must be an integer at least 1"):
        make(1.0, math.inf)


@pytest.mark.parametrize("value", [0, 1, -0.1, 1.5, math.nan, "1e-5", None])
def test_bad_delta_is_refused(value):
    accountant = spend(lap2.Laplace(1.0, 10))
    with pytest.raises((TypeError, ValueError), match="delta"):
        accountant.get_epsilon(value)


@pytest.mark.parametrize("value", [-0.1, math.nan, math.inf, "1"])
def test_bad_epsilon_is_refused(value):
    with pytest.raises((TypeError, ValueError), match="epsilon must be"):
        spend(lap2.Laplace(1.0, 10)).get_delta(value)


def test_answer_needs_exactly_one_target_and_a_known_conversion():
    accountant = spend(lap2.Laplace(1.0, 10))
    with pytest.raises(ValueError, match="exactly one"):
        accountant.answer()
    with pytest.raises(ValueError, match="exactly one"):
        accountant.answer(delta=DELTA, epsilon=1.0)
    with pytest.raises(ValueError, match="conversion must be one of tight, tail; got 'loose'"):
        accountant.get_epsilon(DELTA, conversion="loose")


@pytest.mark.parametrize("groups", [[], [lap2.Joint([lap2.Gaussian(1.0)])], ["laplace"]])
def test_joint_refuses_what_it_cannot_hold(groups):
    with pytest.raises((TypeError, ValueError), match="groups"):
        lap2.Joint(groups)


def test_joint_refuses_the_published_bound():
    with pytest.raises(TypeError, match=r"groups\[1\]"):
        lap2.Joint([lap2.Gaussian(1.0), published(1.0, 10)])


def test_numpy_numbers_are_numbers():
    step = lap2.Laplace(np.float32(1.0), np.int64(26010))
    accountant = lap2.Accountant().compose(
        step, sampling_prob=np.float64(0.0043), steps=np.int32(5860)
    )
    assert accountant.get_epsilon(DELTA) == spend(lap2.Laplace(1.0, 26010)).get_epsilon(DELTA)


def test_thousands_of_different_steps():
    accountant = lap2.Accountant()
    for k in range(2000):
        accountant.compose(lap2.Laplace(2 + k / 2000, 26010), sampling_prob=0.01)
    assert len(accountant.ledger) == accountant.steps == 2000
    low, high = (spend(lap2.Laplace(b, 26010), 0.01, 2000).get_epsilon(DELTA) for b in (3, 2))
    assert low < accountant.get_epsilon(DELTA) < high
