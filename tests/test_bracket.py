"""The lower bound against closed forms, another library and an independent upper bound."""

import itertools
import math
import warnings

import numpy as np
import pytest
from dp_accounting import dp_event, pld
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scipy.optimize import brentq
from scipy.stats import norm

import lap2
from lap2.bracket import Bracket, _merge, bracket, lower_epsilon

DELTA = 1e-5


def spend(mechanism, zeta, steps=1):
    return lap2.Accountant().compose(mechanism, sampling_prob=zeta, steps=steps)


def published(noise, n):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", lap2.NotAGuaranteeWarning)
        return lap2.PublishedLaplace(noise, n)


def amplified(epsilon_of, zeta, delta):
    """Epsilon of one sampled release: H(R || Q) at g is zeta H(P || Q) at 1 + (g - 1) / zeta."""
    epsilon = epsilon_of(delta / zeta)
    return math.log1p(zeta * math.expm1(epsilon)) if zeta < 1 else epsilon


def gaussian_epsilon(mu, delta):
    """Epsilon of N(mu, 1) against N(0, 1) (Balle and Wang 2018), by root finding."""

    def excess(eps):
        tail = norm.logcdf(-eps / mu - mu / 2)
        return norm.cdf(mu / 2 - eps / mu) - math.exp(eps + tail) - delta

    return brentq(excess, 0, mu * mu + 40 * mu, xtol=1e-13) if excess(0) > 0 else 0.0


@pytest.mark.parametrize("noise", [0.01, 0.3, 1.0, 20.0])
@pytest.mark.parametrize("zeta", [0.01, 0.6, 1.0])
@pytest.mark.parametrize("delta", [1e-9, 1e-5, 3e-3])
def test_one_release_of_one_coordinate_has_a_closed_form(noise, zeta, delta):
    truth = amplified(lambda d: 1 / noise + 2 * math.log1p(-d), zeta, delta)
    lower = lower_epsilon(spend(lap2.Laplace(noise, 1), zeta), delta)
    assert truth * 0.99 <= lower <= max(0.0, truth)
    if zeta == 1:
        assert lower_epsilon(spend(lap2.LaplaceL1(noise), zeta), delta) == lower


@pytest.mark.parametrize("noise", [0.3, 1.0, 30.0])
@pytest.mark.parametrize(
    ("zeta", "steps"), [(1.0, 1), (1.0, 9), (1.0, 10_000), (0.01, 1), (0.9, 1)]
)
@pytest.mark.parametrize("delta", [1e-11, 1e-5, 3e-3])
def test_gaussian_has_a_closed_form(noise, zeta, steps, delta):
    mu = math.sqrt(steps) / noise
    truth = amplified(lambda d: gaussian_epsilon(mu, d), zeta, delta)
    lower = lower_epsilon(spend(lap2.Gaussian(noise), zeta, steps), delta)
    assert truth * 0.998 <= lower <= truth
    if steps == 9:
        assert lower_epsilon(spend(lap2.Laplace(noise, math.inf), zeta, steps), delta) == lower


REFERENCES = [  # mechanism, noise, zeta, steps, delta, grid of the other library
    ("laplace", 1.0, 1.0, 100, 1e-5, 1e-4),
    ("laplace", 1.0, 0.01, 1000, 1e-5, 1e-5),
    ("laplace", 0.3, 0.01, 100, 1e-5, 1e-4),
    ("laplace", 0.3, 1e-4, 10, 1e-12, 1e-5),
    ("laplace", 1.0, 0.999, 5, 1e-8, 1e-4),
    ("laplace", 10.0, 0.5, 1000, 1e-5, 1e-4),
    ("laplace", 11.0, 0.07, 9, 2e-4, 1e-6),  # here removing costs 2% more than adding
    ("gaussian", 1.0, 0.1, 100, 1e-5, 2e-4),
    ("gaussian", 2.7, 0.01, 3, 5e-5, 1e-5),
    ("gaussian", 3.0, 0.01, 10_000, 1e-5, 1e-5),
    ("gaussian", 10.0, 0.01, 1000, 1e-3, 1e-5),
]


def by_pld(kind, noise, zeta, steps, delta, grid):  # noqa: PLR0917
    """An upper bound for the same mechanism, by dp_accounting's privacy-loss distributions."""
    event = dp_event.LaplaceDpEvent(noise) if kind == "laplace" else dp_event.GaussianDpEvent(noise)
    accountant = pld.PLDAccountant(value_discretization_interval=grid)
    accountant.compose(dp_event.PoissonSampledDpEvent(zeta, event), steps)
    return accountant.get_epsilon(delta)


def ours(kind, noise, zeta, steps, delta):
    mechanism = lap2.LaplaceL1(noise) if kind == "laplace" else lap2.Gaussian(noise)
    return lower_epsilon(spend(mechanism, zeta, steps), delta)


@pytest.mark.parametrize("case", REFERENCES, ids=str)
def test_just_below_the_pld_accountant(case):
    *setting, grid = case
    lower, reference = ours(*setting), by_pld(*setting, grid)
    assert reference * 0.998 <= lower <= reference


@pytest.mark.parametrize("case", REFERENCES, ids=str)
def test_that_comparison_notices_a_wrong_noise(case):
    kind, noise, *setting, grid = case
    assert ours(kind, noise, *setting) > by_pld(kind, noise * 1.05, *setting, grid)
    assert ours(kind, noise * 1.05, *setting) < by_pld(kind, noise, *setting, grid) * 0.998


def test_different_entries_compose():
    accountant, reference = lap2.Accountant(), pld.PLDAccountant()
    for i, (noise, zeta, steps) in enumerate([(1.0, 0.05, 30), (2.0, 0.1, 100), (5.0, 1.0, 7)]):
        gaussian = i % 2
        step = lap2.Gaussian(noise) if gaussian else lap2.LaplaceL1(noise)
        event = dp_event.GaussianDpEvent(noise) if gaussian else dp_event.LaplaceDpEvent(noise)
        accountant.compose(step, sampling_prob=zeta, steps=steps)
        reference.compose(dp_event.PoissonSampledDpEvent(zeta, event), steps)
    upper = reference.get_epsilon(DELTA)
    assert upper * 0.998 <= lower_epsilon(accountant, DELTA) <= upper


def by_rounding_up(n, zeta, steps, noise, delta, grid):  # noqa: PLR0917
    """An upper bound for equal coordinates: all losses rounded up, plain Fourier transforms."""
    x = 1 / noise / math.sqrt(n)
    edge = grid * np.arange(math.floor(-x / grid) - 1, math.ceil(x / grid) + 1)
    size = 1 << (n * edge.size).bit_length()
    laws = []
    for shift in (0.0, x):
        z = (edge + x) / 2 - shift
        cdf = np.where(z < 0, np.exp(np.minimum(z, 0)) / 2, 1 - np.exp(-np.maximum(z, 0)) / 2)
        cdf = np.where(edge < -x, 0.0, np.where(edge >= x, 1.0, cdf))
        one = np.diff(cdf, prepend=0.0)
        laws.append(np.fft.irfft(np.fft.rfft(one, size) ** n, size).clip(0))
    loss = n * edge[0] + grid * np.arange(size)
    mass = (1 - zeta) * laws[0] + zeta * laws[1]
    loss = np.logaddexp(math.log1p(-zeta), math.log(zeta) + loss)
    cell = np.ceil((loss - loss[0]) / grid).astype(int)
    assert steps * cell[-1] < 2**21  # nothing wraps around
    total = np.fft.rfft(np.bincount(cell, mass), 2**21) ** steps
    total, loss = np.fft.irfft(total).clip(0), steps * loss[0] + grid * np.arange(2**21)

    def excess(eps):
        return float(total[loss > eps] @ -np.expm1(eps - loss[loss > eps])) - delta

    return brentq(excess, 0, 50, xtol=1e-9)


@pytest.mark.parametrize(
    "setting",
    [(2, 0.1, 1, 1.0, 1e-4, 2e-6), (5, 0.3, 2, 0.5, 1e-5, 1e-5), (20, 0.05, 4, 0.5, 1e-6, 4e-5)],
    ids=str,
)
def test_just_below_an_independent_bound_for_many_coordinates(setting):
    n, zeta, steps, noise, delta, _ = setting
    lower = lower_epsilon(spend(lap2.Laplace(noise, n), zeta, steps), delta)
    reference = by_rounding_up(*setting)
    assert reference * 0.999 <= lower <= reference


def test_golden_brackets():
    both = bracket(spend(lap2.Laplace(1.0, 26010), 0.0043, 5860), DELTA)
    assert 1.774 < both.lower < 1.776  # the Gaussian limit has 1.7785 by dp_accounting
    assert both.upper == pytest.approx(1.96646, rel=1e-4)
    assert (both.delta, both.is_guarantee) == (DELTA, True)
    counterexample = bracket(spend(published(0.3, 100), 0.01), DELTA)
    assert 9.18 < counterexample.lower < 9.2
    assert counterexample.upper == pytest.approx(11.0767, rel=1e-4)
    assert counterexample.is_guarantee
    assert spend(published(0.3, 100), 0.01).get_epsilon(DELTA) < 0.33
    assert lower_epsilon(spend(lap2.Laplace(1.0, 1000), 0.1), DELTA) == pytest.approx(
        1.66, abs=5e-3
    )
    wide = spend(lap2.Laplace(4.0, 26010), 0.0043, 5860)
    assert lower_epsilon(wide, DELTA) == pytest.approx(0.2818, rel=1e-3)


def test_descriptions_of_the_same_release_have_the_same_bracket():
    exact, *others = (
        bracket(spend(make(0.5, 30), 0.1, 5), DELTA)
        for make in (lap2.Laplace, lap2.MajorizedLaplace, published)
    )
    assert others == [exact, exact]


def test_lower_grows_with_the_dimension_to_the_gaussian():
    lowers = [
        lower_epsilon(spend(lap2.Laplace(1.0, n), 0.02, 500), DELTA)
        for n in (1, 10, 100, 10_000, 10**6, 10**9, math.inf)
    ]
    for few, more in itertools.pairwise(lowers):  # up to the precision of the bound itself
        assert few <= more * (1 + 3e-4)
    assert lowers[0] < 0.6 * lowers[-1]
    assert lowers[-1] * 0.999 < lowers[-2] < lowers[-1]


noises = st.floats(math.log(0.3), math.log(100)).map(math.exp)
entries = st.tuples(
    noises,
    st.one_of(st.integers(1, 64), st.integers(1, 10**9), st.just(math.inf)),
    st.floats(math.log(1e-4), 0).map(math.exp),
    st.floats(0, math.log(1e5)).map(lambda t: round(math.exp(t))),
)


@settings(max_examples=30, deadline=None)
@given(
    st.lists(entries, min_size=1, max_size=2), st.floats(math.log(1e-12), math.log(1e-2)), noises
)
@example([(1.0, 1, 1.0, 1)], math.log(1e-12), 1.0)
@example([(100.0, 1, 1.0, 100_000)], math.log(1e-12), 100.0)
@example([(0.3, math.inf, 1e-4, 100_000)], math.log(1e-12), 0.3)
@example([(0.3, math.inf, 1.0, 100_000), (100.0, 1, 1e-4, 100_000)], math.log(1e-2), 0.3)
@example([(1.0, 1, math.exp(-1), 1), (math.exp(3), 1, math.exp(-4), 148)], -5.0, 1.0)
def test_never_inverted(steps, log_delta, other):
    accountant = lap2.Accountant()
    for noise, n, zeta, count in steps:
        accountant.compose(lap2.Laplace(noise, n), sampling_prob=zeta, steps=count)
    one = bracket(accountant, math.exp(log_delta))
    assert 0 <= one.lower <= one.upper
    accountant.compose(lap2.Gaussian(other), sampling_prob=0.01, steps=3)
    more = bracket(accountant, math.exp(log_delta))
    # Another step makes the grid of losses wider, and so a little coarser.
    assert one.lower * (1 - 2e-2) <= more.lower <= more.upper


@settings(deadline=None)
@given(st.integers(2, 60), st.floats(1e-3, 3), st.floats(-3, 1), st.integers(0, 2**32))
def test_merging_only_lowers_and_rounding_up_would_not(size, width, log_step, seed):
    random = np.random.default_rng(seed)
    loss = np.sort(width * random.normal(size=size))
    mass = np.exp(2 * random.normal(size=size))
    step = width * math.exp(log_step)
    start, cells, merged = _merge(loss, mass, step)
    on_grid = start + step * cells

    def hockey_stick(loss, mass, eps):
        return np.sum(mass * np.maximum(0, -np.expm1(eps[:, None] - loss)), axis=1)

    eps = np.sort(np.concatenate([loss, on_grid]))
    before, after = hockey_stick(loss, mass, eps), hockey_stick(on_grid, merged, eps)
    assert np.all(cells >= 0)
    assert np.all(after <= before + 1e-12 * mass.sum())
    assert np.sum(merged) <= mass.sum() * (1 + 1e-12)
    assert np.sum(merged * np.exp(-on_grid)) <= np.sum(mass * np.exp(-loss)) * (1 + 1e-12)
    up = start + step * np.ceil((loss - start) / step)
    assert np.any(hockey_stick(up, mass, eps) > before + 1e-12 * mass.sum())


def test_merging_costs_second_order():
    loss = np.linspace(-6, 6, 4001)
    mass = norm.pdf(loss - 0.5)
    mass /= mass.sum()
    for step in (0.2, 0.1, 0.05):
        start, cells, merged = _merge(loss, mass, step)
        mean, merged_mean = mass @ loss, merged @ (start + step * cells)
        assert 0 < mean - merged_mean < step**2 / 2


def test_edges_are_answers():
    assert bracket(lap2.Accountant(), DELTA) == Bracket(0.0, 0.0, DELTA)
    assert bracket(spend(lap2.Laplace(1.0, 3), 0.0, 10), DELTA) == Bracket(0.0, 0.0, DELTA)
    assert bracket(spend(lap2.Laplace(0.0, 3), 0.0, 10), DELTA) == Bracket(0.0, 0.0, DELTA)
    for step in (lap2.Laplace(0.0, 3), lap2.Gaussian(0.0), lap2.LaplaceL1(0.0)):
        for zeta in (1.0, 0.1):
            assert bracket(spend(step, zeta), DELTA) == Bracket(math.inf, math.inf, DELTA)
    assert lower_epsilon(spend(lap2.Laplace(1e100, 3), 1.0, 10), DELTA) == 0
    assert lower_epsilon(spend(lap2.Gaussian(1e100), 1.0, 10), DELTA) == 0
    assert lower_epsilon(spend(lap2.Laplace(1.0, 3), 5e-324, 10), DELTA) == 0
    assert lower_epsilon(spend(lap2.Laplace(1e-100, 3), 1.0, 10), DELTA) > 1000
    assert lower_epsilon(spend(lap2.Gaussian(1e-100), 1.0, 10), DELTA) > 1000


@pytest.mark.parametrize("noise", [1e-2, 1e-5])
@pytest.mark.parametrize("make", [lap2.Gaussian, lambda noise: lap2.Laplace(noise, math.inf)])
def test_where_floats_end_nothing_is_shown_and_nothing_fails(make, noise):
    accountant = spend(make(noise), 1.0, 10**6)
    assert 0 <= lower_epsilon(accountant, DELTA, points=2**12) <= accountant.get_epsilon(DELTA)


def test_noiseless_but_rarer_than_delta_is_not_infinite():
    """One step without noise at zeta < delta is (0, zeta)-private: infinity would be no bound."""
    accountant = spend(lap2.Gaussian(0.0), DELTA / 20, 10)
    assert lower_epsilon(accountant, DELTA) == 0
    assert lower_epsilon(accountant, DELTA / 3) == math.inf
    accountant.compose(lap2.Laplace(1.0, 1), sampling_prob=1.0)
    assert lower_epsilon(accountant, DELTA) == pytest.approx(1, rel=1e-3)


def test_fewer_points_are_sound_too():
    accountant = spend(lap2.Laplace(1.0, 1000), 0.01, 2000)
    coarse, default = (lower_epsilon(accountant, DELTA, points=points) for points in (5000, 2**19))
    assert default * 0.9 < coarse < default


def test_refusals():
    joint = lap2.Joint([lap2.Laplace(1.0, 3), lap2.Gaussian(1.0)])
    with pytest.raises(TypeError, match="to have a lower bound, got Joint"):
        bracket(spend(joint, 0.1), DELTA)
    accountant = spend(lap2.Laplace(1.0, 3), 0.1)
    for delta in (0.0, 1.0, math.nan):
        with pytest.raises(ValueError, match="delta must be strictly between 0 and 1"):
            bracket(accountant, delta)
    with pytest.raises(ValueError, match="points must be an integer at least 4096"):
        lower_epsilon(accountant, DELTA, points=100)


def test_an_inverted_bracket_is_an_error(monkeypatch):
    monkeypatch.setattr(lap2.Accountant, "get_epsilon", lambda *_: 0.1)
    with pytest.raises(RuntimeError, match=r"is above the upper bound 0\.1"):
        bracket(spend(lap2.Laplace(1.0, 3), 1.0), DELTA)
