"""Lower bounds stay below known truths, come close to them, and refute false claims."""

import math

import numpy as np
import pytest

from lap2.audit import Pair, audit_claim, audit_mechanism, audit_releases, canary_directions
from lap2.audit.statistics import gaussian_epsilon, laplace_epsilon
from lap2.noise import SecureLaplace


def gaussian(sigma, rng):
    return lambda batch, count: batch + rng.normal(scale=sigma, size=(count, batch.size))


def laplace(scale):
    def draw(batch, count):
        rows = np.tile(batch, (count, 1))
        SecureLaplace().add(rows, scale)
        return rows

    return draw


ONE = Pair("one", np.zeros(1), np.ones(1), np.ones(1))


@pytest.mark.parametrize("delta", [1e-5, 1e-2])
def test_gaussian_truth_is_never_exceeded_and_nearly_reached(delta):
    truth = gaussian_epsilon(1.0, delta)
    draw = gaussian(1.0, np.random.default_rng(1))
    result = audit_releases(
        draw, [ONE], claimed_epsilon=truth, delta=delta, gdp_shape=True, trials=1_000_000
    )
    free, shaped = result.bounds
    assert result.verdict == "consistent"
    assert free.epsilon_lower <= truth
    assert 0.85 * truth < shaped.epsilon_lower <= truth
    if delta == 1e-2:
        assert free.epsilon_lower > 0.85 * truth


@pytest.mark.parametrize("shift", [0.5, 1.0, 3.0])
def test_laplace_truth_is_never_exceeded_and_nearly_reached(shift):
    result = audit_releases(
        laplace(1 / shift),
        [ONE],
        claimed_epsilon=shift,
        delta=1e-5,
        trials=1_000_000,
        confidence=0.99999,  # this noise has no seed
    )
    truth = laplace_epsilon(shift, 1e-5)
    assert 0.85 * truth < result.epsilon_lower <= truth
    assert result.verdict == "consistent"


def test_bounds_hold_as_often_as_they_say():
    """At 80% confidence, some of 60 bounds on a known truth may fail: not more than that."""
    exceeded = 0
    for seed in range(60):
        draw = gaussian(1.0, np.random.default_rng(seed))
        result = audit_releases(
            draw,
            [ONE],
            claimed_epsilon=1.0,
            delta=0.1,
            trials=4000,
            confidence=0.8,
        )
        exceeded += result.epsilon_lower > gaussian_epsilon(1.0, 0.1)
    assert exceeded <= 20


def test_less_noise_than_claimed_is_refuted_at_n_64():
    rng = np.random.default_rng(2)
    pairs = [Pair(name, np.zeros(64), v, v) for name, v in canary_directions(64, 1.0, rng).items()]
    claim = gaussian_epsilon(1 / 2.0, 1e-3)  # no l2-clipped Laplace mechanism costs more
    honest, broken = (
        audit_releases(laplace(b), pairs, claimed_epsilon=claim, delta=1e-3, trials=100_000)
        for b in (2.0, 1.0)
    )
    assert honest.verdict == "consistent"
    assert broken.violated


def test_rounding_in_the_release_is_left_to_the_sampler_audit():
    """float64 noise splits the atoms of the score in its last digit: that must not count here."""
    rng = np.random.default_rng(3)
    for _ in range(4):
        result = audit_releases(
            gaussian(2.0, rng),
            [ONE],
            claimed_epsilon=gaussian_epsilon(0.5, 1e-3),
            delta=1e-3,
            trials=200_000,
        )
        assert result.verdict == "consistent"


def test_any_step_can_be_audited():
    rng = np.random.default_rng(4)

    def step(batch):
        return np.sum(batch, axis=0) + rng.laplace(scale=0.5, size=2)

    def scaled_by_batch(batch):
        return step(batch) / len(batch)

    batches = [np.ones((1, 2)), np.array([[1.0, 1.0], [0.5, 0.5]])]
    pairs = [Pair("second record", *batches)]
    truth = 2 * 0.5 / 0.5
    honest = audit_mechanism(step, pairs, claimed_epsilon=truth, delta=0.0, trials=20_000)
    assert honest.verdict == "consistent"
    assert honest.epsilon_lower > 0.7 * truth
    # The whole sum is rescaled, noise included: no epsilon holds. (The shift is not given.)
    wide = [Pair("second record", np.ones((1, 64)), np.ones((2, 64)))]

    def wide_step(batch):
        return (batch.sum(axis=0) + rng.laplace(scale=16.0, size=64)) / len(batch)

    claim = 64 / 16.0
    assert audit_mechanism(wide_step, wide, claimed_epsilon=claim, delta=0.0, trials=8000).violated


def test_a_release_that_is_not_finite_does_not_hide():
    rng = np.random.default_rng(5)

    def draw(batch, count):
        rows = rng.laplace(size=(count, 1))
        return np.full((count, 1), np.nan) if batch else rows

    assert audit_releases(
        draw, [Pair("nan", 0, 1)], claimed_epsilon=3.0, delta=0.0, trials=4000
    ).violated


def test_what_is_undefined_or_infinite_in_other_places_does_not_hide():
    """As numbers they are all far out; which of them, and where, tells the record."""
    rng = np.random.default_rng(6)

    def audited(without, added):
        def draw(batch, count):
            rows = rng.laplace(size=(count, 3))
            hit = rng.random(count) < 0.4
            rows[np.ix_(hit, [1, 2])] = added if batch else without
            return rows

        pair = Pair("record", 0, 1)
        return audit_releases(draw, [pair], claimed_epsilon=1.0, delta=0.0, trials=4000)

    assert audited((np.inf, np.inf), (np.nan, np.inf)).violated
    assert audited((np.nan, np.inf), (np.inf, np.nan)).violated
    assert audited((-np.inf, 0.0), (0.0, -np.inf)).violated
    assert not audited((np.nan, np.inf), (np.nan, np.inf)).violated


def test_releases_that_were_not_asked_for_are_refused():
    """A draw that gives more could put what tells of the record where nobody looks."""
    given = []

    def honest(batch, count):
        given.append(count)
        return np.full((count, 2), float(batch))

    def audited(draw):
        terms = {"claimed_epsilon": 1.0, "delta": 0.0, "trials": 4000}
        return audit_releases(draw, [Pair("record", 0, 1)], **terms)

    for change in (
        lambda rows: np.concatenate([rows, rows]),
        lambda rows: rows[:-1],
        lambda rows: rows[:, :0],
        lambda rows: rows[:, : 1 + (len(given) > 3)],
    ):
        given.clear()
        with pytest.raises(ValueError, match=r"draw must give the .* that it is asked for"):
            audited(lambda batch, count, change=change: change(honest(batch, count)))
    assert audited(honest).violated


def test_the_published_bound_is_refuted_and_the_exact_one_is_not():
    published, exact = (
        audit_claim(bound, trials=250_000, rng=np.random.default_rng(6))
        for bound in ("published", "exact")
    )
    assert published.violated
    assert published.confidence == 0.999
    assert published.epsilon_lower > 5 * published.claimed_epsilon
    assert exact.verdict == "consistent"


def test_claims_of_composed_steps():
    result = audit_claim(
        "exact",
        dimension=1,
        noise_multiplier=1.0,
        sampling_prob=1.0,
        steps=2,
        delta=1e-6,
        trials=100_000,
        rng=np.random.default_rng(7),
    )
    assert result.claimed_epsilon == pytest.approx(2.0)
    assert 1.7 < result.epsilon_lower <= 2


def test_directions_have_the_norm_and_the_shape():
    found = canary_directions(10, 3.0, np.random.default_rng(8))
    for vector in found.values():
        assert np.linalg.norm(vector) == pytest.approx(3)
    assert np.ptp(found["spread"]) == 0
    assert np.count_nonzero(found["sparse"]) == 1
    assert math.isfinite(found["random"].sum())


def test_bad_arguments_are_named():
    with pytest.raises(ValueError, match="pairs must hold"):
        audit_releases(laplace(1.0), [], claimed_epsilon=1.0, delta=0.0)
    with pytest.raises(ValueError, match="trials"):
        audit_releases(laplace(1.0), [ONE], claimed_epsilon=1.0, delta=0.0, trials=10)
    with pytest.raises(ValueError, match="one in each row"):
        audit_releases(
            lambda _, count: np.zeros(count), [ONE], claimed_epsilon=1.0, delta=0.0, trials=1000
        )
    with pytest.raises(ValueError, match="bound must be one of"):
        audit_claim("imagined", rng=np.random.default_rng(0))
