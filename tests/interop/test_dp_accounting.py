"""The dp_accounting adapter: that library's contract, its numbers, and what is refused."""

import copy
import itertools
import math
import pickle
from functools import cache

import attrs
import dp_accounting
import numpy as np
import pytest
from dp_accounting import (
    ComposedDpEvent,
    GaussianDpEvent,
    LaplaceDpEvent,
    NeighboringRelation,
    NonPrivateDpEvent,
    NoOpDpEvent,
    PoissonSampledDpEvent,
    SelfComposedDpEvent,
    UnsupportedEventError,
    privacy_accountant_test,
)
from dp_accounting.pld import privacy_loss_distribution as pld
from dp_accounting.rdp import RdpAccountant
from hypothesis import given, settings
from hypothesis import strategies as st

import lap2
from lap2.interop.dp_accounting import L2LaplaceDpEvent, LaplaceAccountant

SAME = 1e-12
UNKNOWN = dp_accounting.UnsupportedDpEvent()


def epsilon(event, delta, count=1):
    return LaplaceAccountant().compose(event, count).get_epsilon(delta)


def direct(*entries):
    accountant = lap2.Accountant()
    for mechanism, sampling_prob, steps in entries:
        accountant.compose(mechanism, sampling_prob=sampling_prob, steps=steps)
    return accountant


class TestContract(privacy_accountant_test.PrivacyAccountantTest):
    """dp_accounting's own suite for accountants, inherited whole."""

    def _make_test_accountants(self):
        return [LaplaceAccountant()]


# The event


def test_the_event_is_a_frozen_description_like_the_library_s_own():
    event = L2LaplaceDpEvent(1.5, dimension=10)
    assert isinstance(event, dp_accounting.DpEvent)
    assert event == L2LaplaceDpEvent(noise_multiplier=1.5, dimension=10)
    assert event != L2LaplaceDpEvent(1.5)
    assert event != GaussianDpEvent(1.5)
    assert hash(event) == hash(L2LaplaceDpEvent(1.5, 10))
    assert L2LaplaceDpEvent(1).dimension == math.inf
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        event.noise_multiplier = 2.0


def test_the_event_takes_the_types_of_the_description():
    event = L2LaplaceDpEvent(np.float32(2), np.int64(7))
    assert type(event.noise_multiplier) is float
    assert type(event.dimension) is int


@pytest.mark.parametrize(
    "arguments",
    [
        (-1.0,),
        (math.nan,),
        (math.inf,),
        ("1",),
        (True,),
        (1.0, 0),
        (1.0, 2.5),
        (1.0, math.nan),
        (1.0, 2**63),
        (1.0, 10**400),
    ],
)
def test_the_event_follows_the_rules_of_the_description(arguments):
    with pytest.raises((TypeError, ValueError)) as ours:
        lap2.Laplace(*arguments, **({} if len(arguments) == 2 else {"dimension": 3}))
    with pytest.raises(ours.type) as theirs:
        L2LaplaceDpEvent(*arguments)
    assert str(theirs.value) == str(ours.value)


@pytest.mark.parametrize(
    "event",
    [
        L2LaplaceDpEvent(1.5, 10),
        L2LaplaceDpEvent(0.0),
        PoissonSampledDpEvent(0.1, ComposedDpEvent([L2LaplaceDpEvent(2.0, 3), NoOpDpEvent()])),
    ],
)
def test_the_event_survives_serialization(event):
    names = event.to_named_tuple()
    assert names.module_name == type(event).__module__
    assert dp_accounting.DpEvent.from_named_tuple(names) == event
    assert pickle.loads(pickle.dumps(event)) == event
    assert copy.deepcopy(event) == event


# Translation to lap2's own accountant

BASES = [
    (L2LaplaceDpEvent(1.3, 1), lap2.Laplace(1.3, 1)),
    (L2LaplaceDpEvent(1.3, 1000), lap2.Laplace(1.3, 1000)),
    (L2LaplaceDpEvent(1.3), lap2.Laplace(1.3, math.inf)),
    (GaussianDpEvent(1.3), lap2.Gaussian(1.3)),
    (LaplaceDpEvent(1.3), lap2.LaplaceL1(1.3)),
]


@pytest.mark.parametrize("delta", [1e-2, 1e-3, 1e-5])
@pytest.mark.parametrize(("event", "mechanism"), BASES)
def test_single_sampled_and_repeated_events_agree_with_lap2(event, mechanism, delta):
    cases = [
        (event, (mechanism, 1, 1)),
        (PoissonSampledDpEvent(0.02, event), (mechanism, 0.02, 1)),
        (PoissonSampledDpEvent(1, event), (mechanism, 1, 1)),
        (SelfComposedDpEvent(PoissonSampledDpEvent(0.02, event), 300), (mechanism, 0.02, 300)),
        (SelfComposedDpEvent(SelfComposedDpEvent(event, 3), 4), (mechanism, 1, 12)),
    ]
    for described, entry in cases:
        ours = LaplaceAccountant().compose(described)
        expected = direct(entry)
        assert ours.get_epsilon(delta) == pytest.approx(expected.get_epsilon(delta), rel=SAME)
        assert ours.get_delta(1.0) == pytest.approx(expected.get_delta(1.0), rel=SAME)


def test_composition_and_counts_agree_with_lap2():
    first, second = PoissonSampledDpEvent(0.01, L2LaplaceDpEvent(1.0, 50)), GaussianDpEvent(8.0)
    inner = ComposedDpEvent([first, SelfComposedDpEvent(second, 2), NoOpDpEvent(), first])
    accountant = LaplaceAccountant().compose(inner, 10).compose(first)
    expected = direct((lap2.Laplace(1.0, 50), 0.01, 21), (lap2.Gaussian(8.0), 1, 20))
    assert accountant.get_epsilon(1e-6) == pytest.approx(expected.get_epsilon(1e-6), rel=SAME)
    assert sum(entry.steps for entry in accountant.entries) == 41


def test_a_sampled_composition_is_one_joint_release():
    parts = [L2LaplaceDpEvent(1.0, 100), SelfComposedDpEvent(GaussianDpEvent(3.0), 2)]
    groups = [lap2.Laplace(1.0, 100), lap2.Gaussian(3.0), lap2.Gaussian(3.0)]
    shared = PoissonSampledDpEvent(0.01, ComposedDpEvent(parts))
    expected = direct((lap2.Joint(groups), 0.01, 200)).get_epsilon(1e-6)
    assert epsilon(shared, 1e-6, count=200) == pytest.approx(expected, rel=SAME)
    # Taking the parts for steps with samples of their own would promise too much.
    separate = ComposedDpEvent([PoissonSampledDpEvent(0.01, part) for part in parts[:1]])
    own = LaplaceAccountant().compose(separate, 200)
    own.compose(PoissonSampledDpEvent(0.01, GaussianDpEvent(3.0)), 400)
    assert own.get_epsilon(1e-6) < 0.99 * expected


def test_a_sampled_composition_of_gaussians_costs_what_rdp_says():
    event = PoissonSampledDpEvent(
        0.02, ComposedDpEvent([SelfComposedDpEvent(GaussianDpEvent(4.0), 3), GaussianDpEvent(2.0)])
    )
    theirs = RdpAccountant(orders=range(2, 65)).compose(event, 500).get_epsilon(1e-6)
    assert epsilon(event, 1e-6, count=500) == pytest.approx(theirs, rel=1e-5)
    assert epsilon(event, 1e-6, count=510) != pytest.approx(theirs, rel=1e-3)


@pytest.mark.parametrize("event", [event for event, _ in BASES])
def test_a_sample_of_a_sample_is_a_sample(event):
    pair = ComposedDpEvent([event, GaussianDpEvent(2.0)])
    for released in (event, pair):
        nested = PoissonSampledDpEvent(0.25, PoissonSampledDpEvent(0.125, released))
        once = PoissonSampledDpEvent(0.03125, released)
        assert epsilon(nested, 1e-6, 50) == pytest.approx(epsilon(once, 1e-6, 50), rel=SAME)
        for whole in (
            PoissonSampledDpEvent(1.0, once),
            PoissonSampledDpEvent(0.03125, PoissonSampledDpEvent(1, released)),
        ):
            assert LaplaceAccountant().compose(whole).entries == (
                LaplaceAccountant().compose(once).entries
            )


def test_probabilities_that_underflow_do_not_become_free():
    tiny = PoissonSampledDpEvent(1e-200, PoissonSampledDpEvent(1e-200, GaussianDpEvent(1.0)))
    (entry,) = LaplaceAccountant().compose(tiny).entries
    assert entry.sampling_prob > 0


# Edges


@pytest.mark.parametrize(("event", "mechanism"), BASES)
def test_the_edges_of_delta_and_epsilon(event, mechanism):
    accountant = LaplaceAccountant().compose(event, 3)
    assert accountant.get_epsilon(0) == direct((mechanism, 1, 3)).pure_epsilon
    assert accountant.get_epsilon(1) == 0
    assert accountant.get_delta(math.inf) == 0
    assert 0 < accountant.get_delta(0) < 1


def test_pure_epsilon_is_that_of_the_l1_norm():
    assert epsilon(L2LaplaceDpEvent(2.0, 16), 0) == pytest.approx(4 / 2, rel=1e-9)
    assert epsilon(LaplaceDpEvent(2.0), 0, count=5) == pytest.approx(5 / 2, rel=1e-9)
    assert epsilon(L2LaplaceDpEvent(2.0), 0) == math.inf


@pytest.mark.parametrize(
    "event",
    [
        GaussianDpEvent(0),
        LaplaceDpEvent(0.0),
        L2LaplaceDpEvent(0.0, 5),
        L2LaplaceDpEvent(0.0),
        PoissonSampledDpEvent(0.1, GaussianDpEvent(0.0)),
        PoissonSampledDpEvent(0.1, ComposedDpEvent([GaussianDpEvent(1), LaplaceDpEvent(0)])),
        PoissonSampledDpEvent(0.1, NonPrivateDpEvent()),
        ComposedDpEvent([L2LaplaceDpEvent(1.0), NonPrivateDpEvent()]),
    ],
)
def test_no_noise_costs_infinity(event):
    accountant = LaplaceAccountant().compose(event).compose(L2LaplaceDpEvent(1.0))
    assert all(accountant.get_epsilon(delta) == math.inf for delta in (0, 1e-5, 0.99, 1))
    assert all(accountant.get_delta(e) == 1 for e in (0, 1.0, 1e3, math.inf))


@pytest.mark.parametrize(
    "event",
    [
        PoissonSampledDpEvent(0, GaussianDpEvent(0.0)),
        PoissonSampledDpEvent(0.0, ComposedDpEvent([L2LaplaceDpEvent(1.0), LaplaceDpEvent(1.0)])),
        PoissonSampledDpEvent(0.5, PoissonSampledDpEvent(0, GaussianDpEvent(1.0))),
        PoissonSampledDpEvent(0.5, NoOpDpEvent()),
        ComposedDpEvent([]),
        ComposedDpEvent([SelfComposedDpEvent(NonPrivateDpEvent(), 0)]),
    ],
)
def test_nothing_released_costs_nothing(event):
    accountant = LaplaceAccountant().compose(event)
    assert [accountant.get_epsilon(delta) for delta in (0, 1e-5, 1)] == [0, 0, 0]
    assert [accountant.get_delta(e) for e in (0, 1.0, math.inf)] == [0, 0, 0]


# Refusals


def wrapped(event, wrap, times):
    for _ in range(times):
        event = wrap(event)
    return event


def once(event):
    return SelfComposedDpEvent(event, 1)


def twice(event):
    return ComposedDpEvent([event, event])


OWN_SAMPLES = ComposedDpEvent([PoissonSampledDpEvent(0.5, L2LaplaceDpEvent(1.0))] * 2)
REFUSED = [
    (UNKNOWN, UNKNOWN, "must be one that lap2 can account for"),
    (dp_accounting.ZCDpEvent(0.1), dp_accounting.ZCDpEvent(0.1), "got ZCDpEvent"),
    (PoissonSampledDpEvent(0.5, UNKNOWN), UNKNOWN, "got UnsupportedDpEvent"),
    (PoissonSampledDpEvent(0, UNKNOWN), UNKNOWN, "got UnsupportedDpEvent"),
    (ComposedDpEvent([GaussianDpEvent(1.0), UNKNOWN]), UNKNOWN, "got UnsupportedDpEvent"),
    (ComposedDpEvent([NonPrivateDpEvent(), UNKNOWN]), UNKNOWN, "got UnsupportedDpEvent"),
    (GaussianDpEvent(-1.0), GaussianDpEvent(-1.0), "noise_multiplier must be a finite number"),
    (LaplaceDpEvent("1"), LaplaceDpEvent("1"), "noise_multiplier must be a finite number"),
    (SelfComposedDpEvent(GaussianDpEvent(1.0), -1), None, "count must be an integer at least 0"),
    (SelfComposedDpEvent(GaussianDpEvent(1.0), 1.5), None, "count must be an integer at least 0"),
    (PoissonSampledDpEvent(1.1, GaussianDpEvent(1.0)), None, "sampling_probability must be"),
    (PoissonSampledDpEvent(math.nan, GaussianDpEvent(1.0)), None, "sampling_probability must be"),
    (PoissonSampledDpEvent(0.5, OWN_SAMPLES), None, "draws a sample of its own"),
    (
        PoissonSampledDpEvent(0.5, ComposedDpEvent([*OWN_SAMPLES.events[:1], GaussianDpEvent(1)])),
        None,
        "draws a sample of its own",
    ),
    (
        PoissonSampledDpEvent(0.5, SelfComposedDpEvent(GaussianDpEvent(1.0), 1025)),
        None,
        "at most 1024 releases from one sample, got 1025",
    ),
    (GaussianDpEvent(10**400), None, "noise_multiplier must be a finite .* too large for a float"),
    (SelfComposedDpEvent(GaussianDpEvent(1.0), 10**400), None, r"count must be at most 2\^53"),
    (SelfComposedDpEvent(GaussianDpEvent(1.0), 10**5000), None, r"count must be at most 2\^53"),
    (SelfComposedDpEvent(GaussianDpEvent(1.0), 2**53), None, r"releases to at most 2\^53"),
    (wrapped(GaussianDpEvent(1.0), twice, 60), None, "at most 1000000 parts"),
]


@pytest.mark.parametrize(("event", "culprit", "reason"), REFUSED)
def test_a_refusal_names_the_culprit_and_changes_nothing(event, culprit, reason):
    accountant = LaplaceAccountant().compose(GaussianDpEvent(2.0), 5)
    before = (accountant.entries, accountant.ledger, accountant.get_epsilon(1e-5))
    details = accountant._maybe_compose(event, 1, do_compose=False)
    assert details is not None
    assert details.invalid_event == (culprit or event)
    assert not accountant.supports(event)
    with pytest.raises(UnsupportedEventError, match=reason):
        accountant.compose(event)
    assert (accountant.entries, accountant.ledger, accountant.get_epsilon(1e-5)) == before


@pytest.mark.parametrize(
    "wrap", [once, lambda event: ComposedDpEvent([event]), lambda e: PoissonSampledDpEvent(0.5, e)]
)
def test_an_event_may_be_nested_64_deep_and_no_deeper(wrap):
    assert LaplaceAccountant().supports(wrapped(GaussianDpEvent(1.0), wrap, 63))
    for depth in (64, 3000):
        accountant = LaplaceAccountant().compose(GaussianDpEvent(2.0), 5)
        before = (accountant.entries, accountant.ledger)
        event = wrapped(GaussianDpEvent(1.0), wrap, depth)
        assert not accountant.supports(event)
        with pytest.raises(UnsupportedEventError, match="nested at most 64 deep"):
            accountant.compose(event)
        assert (accountant.entries, accountant.ledger) == before


@pytest.mark.parametrize("count", [2**53 - 4, 10**400, 10**5000], ids=["one more", "e400", "e5000"])
def test_a_count_that_no_ledger_holds_is_refused_at_once(count):
    accountant = LaplaceAccountant().compose(GaussianDpEvent(2.0), 5)
    before = (accountant.entries, accountant.ledger)
    with pytest.raises(UnsupportedEventError, match=r"releases to at most 2\^53"):
        accountant.compose(GaussianDpEvent(2.0), count)
    assert (accountant.entries, accountant.ledger) == before
    assert accountant.compose(GaussianDpEvent(2.0), 2**53 - 5).get_epsilon(1e-5) > 1e12


@pytest.mark.parametrize("count", [0, -1, 1.5, "2"])
def test_a_bad_count_changes_nothing(count):
    accountant = LaplaceAccountant().compose(GaussianDpEvent(2.0))
    before = (accountant.entries, accountant.ledger)
    for event in (GaussianDpEvent(1.0), NonPrivateDpEvent()):
        with pytest.raises((TypeError, ValueError)):
            accountant.compose(event, count)
    assert (accountant.entries, accountant.ledger) == before
    assert accountant.get_epsilon(1e-5) < math.inf


def test_asking_changes_nothing():
    accountant = LaplaceAccountant()
    for event in (
        GaussianDpEvent(1.0),
        NonPrivateDpEvent(),
        PoissonSampledDpEvent(0.1, BASES[1][0]),
    ):
        assert accountant.supports(event)
        assert accountant._maybe_compose(event, 3, do_compose=False) is None
    assert accountant.entries == ()
    assert accountant.get_epsilon(1e-5) == 0


@pytest.mark.parametrize(
    "relation", [NeighboringRelation.REPLACE_ONE, NeighboringRelation.REPLACE_SPECIAL, None, 1]
)
def test_other_relations_are_refused(relation):
    with pytest.raises(ValueError, match=r"neighboring_relation must be .*ADD_OR_REMOVE_ONE, got"):
        LaplaceAccountant(neighboring_relation=relation)


def test_targets_are_validated():
    accountant = LaplaceAccountant().compose(NonPrivateDpEvent())
    for delta in (-0.1, 1.1, math.nan):
        with pytest.raises(ValueError, match="target_delta must be a probability"):
            accountant.get_epsilon(delta)
    for target in (-1.0, math.nan):
        with pytest.raises(ValueError, match="target_epsilon must be a number at least 0"):
            accountant.get_delta(target)
    with pytest.raises(TypeError, match="target_epsilon"):
        accountant.get_delta("1")


# Properties

releases = st.builds(
    L2LaplaceDpEvent, st.floats(0.5, 20), st.sampled_from([1, 7, 10**6, math.inf])
) | st.builds(GaussianDpEvent, st.floats(0.5, 20))
steps = releases | st.builds(PoissonSampledDpEvent, st.floats(0.001, 1), releases)
compositions = st.recursive(
    steps,
    lambda inner: (
        st.builds(ComposedDpEvent, st.lists(inner, max_size=3))
        | st.builds(SelfComposedDpEvent, inner, st.integers(1, 20))
    ),
    max_leaves=6,
)


@settings(max_examples=60, deadline=None)
@given(event=compositions, count=st.integers(2, 5))
def test_counting_is_repeating_and_the_ledger_tells_it_all(event, count):
    counted = LaplaceAccountant().compose(event, count)
    repeated = LaplaceAccountant()
    for _ in range(count):
        repeated.compose(event)
    assert counted.get_epsilon(1e-5) == pytest.approx(repeated.get_epsilon(1e-5), rel=SAME)
    retold = LaplaceAccountant().compose(counted.ledger)
    assert retold.get_epsilon(1e-5) == pytest.approx(counted.get_epsilon(1e-5), rel=SAME)


@settings(max_examples=60, deadline=None)
@given(parts=st.lists(releases, min_size=1, max_size=4), prob=st.floats(0.001, 0.999))
def test_sampling_helps_and_sharing_the_sample_does_not(parts, prob):
    whole = epsilon(ComposedDpEvent(parts), 1e-5)
    shared = epsilon(PoissonSampledDpEvent(prob, ComposedDpEvent(parts)), 1e-5)
    apart = epsilon(ComposedDpEvent([PoissonSampledDpEvent(prob, p) for p in parts]), 1e-5)
    assert apart * (1 - 1e-6) <= shared <= whole * (1 + 1e-6)


# Calibration by their code


def test_their_calibration_finds_the_noise():
    def step(noise_multiplier):
        release = L2LaplaceDpEvent(noise_multiplier, 125_000_000)
        return SelfComposedDpEvent(PoissonSampledDpEvent(0.0043, release), 5860)

    noise = dp_accounting.calibrate_dp_mechanism(LaplaceAccountant, step, 1.0, 1e-5)
    assert noise == pytest.approx(1.5228, rel=1e-3)
    assert epsilon(step(noise), 1e-5) <= 1 < epsilon(step(noise * 0.999), 1e-5)


def test_their_calibration_finds_the_number_of_steps():
    def training(count):
        return SelfComposedDpEvent(PoissonSampledDpEvent(0.01, L2LaplaceDpEvent(1.0)), count)

    count = dp_accounting.calibrate_dp_mechanism(
        LaplaceAccountant,
        training,
        2.0,
        1e-5,
        dp_accounting.LowerEndpointAndGuess(1, 100),
        discrete=True,
    )
    assert epsilon(training(count), 1e-5) <= 2 < epsilon(training(count + 2), 1e-5)


# Their Renyi accountant. With its default orders (tenths up to 10.9, integers up to 63, then powers
# of two) it agrees with integer orders where both search finely enough: a best order of about 5
# to 63. Below that its tenths are finer than our integers, above it our integers are finer.

TRAINING = [
    *itertools.product([0.001], [1000, 5860], [1.0, 1.5, 2.0], [1e-5, 1e-6]),
    *itertools.product([0.0043], [2500, 5860], [1.5, 2.0, 2.5, 3.0], [1e-5, 1e-6]),
    *itertools.product([0.01, 0.02], [1000, 2500, 5860], [2.0, 3.0, 4.0], [1e-5, 1e-6]),
]
LAPLACE = [
    *itertools.product([100, 300], [30, 50, 100], [1e-5, 1e-6]),
    *itertools.product([1000, 3000], [100, 150], [1e-5, 1e-6]),
]


@pytest.mark.parametrize(("prob", "count", "noise", "delta"), TRAINING)
def test_gaussian_agrees_with_rdp_in_training(prob, count, noise, delta):
    event = SelfComposedDpEvent(PoissonSampledDpEvent(prob, GaussianDpEvent(noise)), count)
    theirs = RdpAccountant().compose(event).get_epsilon(delta)
    assert epsilon(event, delta) == pytest.approx(theirs, rel=2e-3)
    less = PoissonSampledDpEvent(prob, GaussianDpEvent(0.98 * noise))
    assert epsilon(less, delta, count) > theirs * 1.004  # the tolerance can fail


@pytest.mark.parametrize(("count", "noise", "delta"), LAPLACE)
def test_l1_laplace_agrees_with_rdp(count, noise, delta):
    theirs = RdpAccountant().compose(LaplaceDpEvent(noise), count).get_epsilon(delta)
    for event in (LaplaceDpEvent, lambda b: L2LaplaceDpEvent(b, dimension=1)):
        assert epsilon(event(noise), delta, count) == pytest.approx(theirs, rel=2e-3)
        assert epsilon(event(0.98 * noise), delta, count) > theirs * 1.004


ORDERS = np.arange(2, 513)


@cache
def one_step_of_rdp(prob, noise):
    event = PoissonSampledDpEvent(prob, GaussianDpEvent(noise))
    return RdpAccountant(orders=ORDERS).compose(event).rdp


WIDE = [
    (0.0005, 0.6),
    (0.001, 4.0),
    (0.0043, 1.0),
    (0.02, 0.7),
    (0.02, 8.0),
    (0.1, 2.0),
    (0.5, 9.0),
]


@pytest.mark.parametrize(("prob", "noise"), WIDE)
def test_moments_are_theirs_at_integer_orders(prob, noise):
    ours = direct((lap2.Gaussian(noise), prob, 1)).log_moments(ORDERS - 1)
    np.testing.assert_allclose(ours, one_step_of_rdp(prob, noise) * (ORDERS - 1), rtol=1e-8)


@pytest.mark.parametrize("delta", [1e-4, 1e-6, 1e-9])
@pytest.mark.parametrize("count", [10, 1000, 20_000])
@pytest.mark.parametrize(("prob", "noise"), WIDE)
def test_gaussian_agrees_with_rdp_at_integer_orders(prob, noise, count, delta):
    rdp = count * one_step_of_rdp(prob, noise)
    theirs, order = dp_accounting.rdp.compute_epsilon(ORDERS, rdp, delta)
    event = PoissonSampledDpEvent(prob, GaussianDpEvent(noise))
    ours = epsilon(event, delta, count)
    if order < ORDERS[-1]:
        # Never above. The chord between two integers may put us below, by a hair.
        assert theirs * (1 - 1e-5) <= ours <= theirs * (1 + 1e-6)
    else:
        assert ours <= theirs * (1 + 1e-6)  # a larger order than they were given


# Their privacy-loss distributions. PLDAccountant rounds losses up, so its answer lies above the
# true epsilon, by O(interval^2) a step: to be above it is more than a bound must be. Over many
# steps a moments bound has the room (5% to 13%), so there it is asked for, without a tolerance.
# Over a few steps of Laplace noise there is no such room: our answer is exact to within the
# rounding. There the losses are rounded down instead, which gives a lower bound of the true
# epsilon, at most one interval a step below it: two per cent less noise than claimed is seen.

MANY_STEPS = [
    (GaussianDpEvent, 1.0, 0.0043, 5860),
    (GaussianDpEvent, 2.0, 0.0043, 5860),
    (GaussianDpEvent, 1.0, 0.02, 500),
    (GaussianDpEvent, 2.0, 0.1, 100),
    (GaussianDpEvent, 4.0, 0.01, 1000),
    (GaussianDpEvent, 3.0, 0.5, 10),
    (GaussianDpEvent, 20.0, 1.0, 100),
    (LaplaceDpEvent, 1.0, 0.0043, 5860),
    (LaplaceDpEvent, 2.0, 0.0043, 5860),
    (LaplaceDpEvent, 1.0, 0.02, 500),
    (LaplaceDpEvent, 2.0, 0.1, 100),
    (LaplaceDpEvent, 4.0, 0.01, 1000),
    (LaplaceDpEvent, 20.0, 1.0, 100),
]


@pytest.mark.parametrize(("kind", "noise", "prob", "count"), MANY_STEPS)
def test_never_below_their_pld_answer(kind, noise, prob, count):
    def step(noise_multiplier):
        event = kind(noise_multiplier)
        return PoissonSampledDpEvent(prob, event) if prob < 1 else event

    theirs = dp_accounting.pld.PLDAccountant().compose(step(noise), count)
    for delta in (1e-5, 1e-8):
        floor = theirs.get_epsilon(delta)
        assert epsilon(step(noise), delta, count) >= floor
        # Claiming 15% more noise than there was takes up all the room, and is seen.
        assert epsilon(step(1.15 * noise), delta, count) < floor


def pld_lower_bound(noise, *, sampling_prob, count, delta):
    once = pld.from_laplace_mechanism(
        noise,
        sampling_prob=sampling_prob,
        pessimistic_estimate=False,
        value_discretization_interval=1e-5,
        use_connect_dots=False,
    )
    return once.self_compose(count).get_epsilon_for_delta(delta)


@pytest.mark.parametrize("noise", [1.0, 5.0])
@pytest.mark.parametrize("prob", [1.0, 0.5, 0.1])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_few_laplace_steps_are_exact(count, prob, noise):
    def ours(noise_multiplier, dimension):
        event = (
            L2LaplaceDpEvent(noise_multiplier, dimension)
            if dimension
            else LaplaceDpEvent(noise_multiplier)
        )
        return epsilon(PoissonSampledDpEvent(prob, event), 1e-4, count)

    floor = pld_lower_bound(noise, sampling_prob=prob, count=count, delta=1e-4)
    for dimension in (None, 1):
        assert floor <= ours(noise, dimension) <= floor * 1.01
        assert ours(1.02 * noise, dimension) < floor


@pytest.mark.parametrize("noise", [1.0, 4.0])
@pytest.mark.parametrize("dimension", [2, 9, 100])
def test_every_dimension_covers_the_gradient_that_moves_all_coordinates_alike(dimension, noise):
    # Its release is one of each coordinate on its own, which moves by C / sqrt(dimension).
    floor = pld_lower_bound(
        noise * math.sqrt(dimension), sampling_prob=1.0, count=dimension, delta=1e-6
    )
    assert epsilon(L2LaplaceDpEvent(noise, dimension), 1e-6) >= floor
    assert epsilon(L2LaplaceDpEvent(1.15 * noise, dimension), 1e-6) < floor
    # Neither is a smaller dimension enough (unless both are so large that it does not matter).
    if dimension < 100:
        assert epsilon(L2LaplaceDpEvent(noise, 1), 1e-6) < floor
