"""Laplace noise with l2 clipping for Google's dp_accounting: an event and an accountant.

Needs the extra ``lap2[dp-accounting]``. Every tool of that library which knows only the abstract
accountant works with this one, such as ``dp_accounting.calibrate_dp_mechanism``.
"""

import math
import reprlib
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import singledispatch
from itertools import islice

import attrs
import dp_accounting

from lap2 import _validate
from lap2.accountant import Accountant
from lap2.divergence import worst_shift
from lap2.ledger import Entry
from lap2.mechanism import Gaussian, Joint, Laplace, LaplaceL1, Mechanism

__all__ = ["L2LaplaceDpEvent", "LaplaceAccountant"]

_MOST_GROUPS = 1024
"""Most releases that may share one sample: all of them become groups of one description."""
_LEAST_PROBABILITY = 1e-100
"""What a product of sampling probabilities is rounded up to, so that none underflows to free."""
_MOST_LEVELS = 64
"""Events in events in events: the library's own comparison and repr of an event recurse too."""
_MOST_PARTS = 1_000_000
_MOST_STEPS = 2**53
"""As in :class:`lap2.Accountant`; all that an accountant ever composes stays within it."""

_ADD_OR_REMOVE_ONE = dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE


@attrs.frozen
class L2LaplaceDpEvent(dp_accounting.DpEvent):
    """Represents an application of the Laplace mechanism to vectors of bounded l2 norm.

    For vectors v_i of ``dimension`` coordinates and noise z whose coordinates are independent
    draws from the Laplace distribution of scale b, with density exp(-|x| / b) / (2 b), this
    mechanism returns sum_i v_i + z. If the **l2** norms of the vectors are bounded,
    ||v_i||_2 <= C, the noise_multiplier is defined as b / C. It is not the ratio of standard
    deviations: that of each noise coordinate is sqrt(2) b.

    (``dp_accounting.LaplaceDpEvent`` is the same release under a bound on the l1 norm.)

    Attributes:
        noise_multiplier: b / C; finite and at least 0. Zero is legal and not private.
        dimension: the number of coordinates, an integer at least 1, or ``math.inf`` when it is
            not known or does not matter: the cost then covers every dimension.
    """

    noise_multiplier: float
    dimension: int | float = math.inf

    def __attrs_post_init__(self) -> None:
        """Take over the rules, and the types, of :class:`lap2.Laplace`."""
        description = Laplace(self.noise_multiplier, self.dimension)
        object.__setattr__(self, "noise_multiplier", description.noise_multiplier)
        object.__setattr__(self, "dimension", description.dimension)


class LaplaceAccountant(dp_accounting.PrivacyAccountant):
    """A dp_accounting accountant whose numbers come from :class:`lap2.Accountant`.

    Releases it knows: :class:`L2LaplaceDpEvent`, ``GaussianDpEvent`` and ``LaplaceDpEvent``.
    ``PoissonSampledDpEvent`` may wrap one of them, or a composition of them: all parts of such a
    composition see *one* sample, so they are accounted as one :class:`lap2.Joint`, which costs
    more than steps with samples of their own. Sampling a sample multiplies the probabilities.
    ``ComposedDpEvent``, ``SelfComposedDpEvent``, ``NoOpDpEvent`` and ``NonPrivateDpEvent`` mean
    what they say. Everything else is refused with ``UnsupportedEventError``, and a refusal
    changes nothing. So are events nested more than 64 deep, of more than a million parts, or that
    bring the number of releases above 2^53.

    Formal guarantee:
        Everything composed is (epsilon, delta)-differentially private under adding or removing
        one record, with the numbers rounded up. Steps may be chosen adaptively. The parts of a
        composition *inside* one Poisson sample are taken as one release, so none of them may
        depend on the noisy answer of another.

    >>> from dp_accounting import PoissonSampledDpEvent
    >>> step = PoissonSampledDpEvent(0.0043, L2LaplaceDpEvent(1.0, dimension=26010))
    >>> round(LaplaceAccountant().compose(step, 5860).get_epsilon(1e-5), 3)
    1.966
    """

    def __init__(
        self, *, neighboring_relation: dp_accounting.NeighboringRelation = _ADD_OR_REMOVE_ONE
    ) -> None:
        """Start with nothing composed: epsilon 0.

        Args:
            neighboring_relation: ``ADD_OR_REMOVE_ONE``, the only relation lap2 accounts for.
        """
        if neighboring_relation is not _ADD_OR_REMOVE_ONE:
            raise ValueError(
                f"neighboring_relation must be {_ADD_OR_REMOVE_ONE}, got {neighboring_relation!r}"
            )
        super().__init__(neighboring_relation)
        self._accountant = Accountant()
        self._non_private = False

    @property
    def entries(self) -> tuple[Entry, ...]:
        """The releases composed so far in lap2's own words; ``ledger`` has them as events."""
        return self._accountant.ledger

    def get_epsilon(self, target_delta: float) -> float:
        """The smallest epsilon that can be proved at ``target_delta``, rounded up.

        Args:
            target_delta: in [0, 1]. At 0 the answer is the sum of the pure epsilons, infinite
                where a release has none; at 1 it is 0 for everything that costs less than infinity.
        """
        delta = _validate.probability("target_delta", target_delta)
        if self._non_private:
            return math.inf
        if delta == 0:
            return self._accountant.pure_epsilon
        if delta == 1:
            return math.inf if self._costs_infinity() else 0.0
        return self._accountant.get_epsilon(delta)

    def get_delta(self, target_epsilon: float) -> float:
        """The smallest delta that can be proved at ``target_epsilon``, rounded up; at most 1.

        Args:
            target_epsilon: at least 0. At infinity the answer is 0 for everything that costs less
                than infinity.
        """
        rule = "a number at least 0, or math.inf"
        epsilon = _validate.real("target_epsilon", target_epsilon, rule)
        if not epsilon >= 0:
            raise ValueError(f"target_epsilon must be {rule}, got {target_epsilon!r}")
        if self._non_private:
            return 1.0
        if epsilon == math.inf:
            return 1.0 if self._costs_infinity() else 0.0
        return self._accountant.get_delta(epsilon)

    def _costs_infinity(self) -> bool:
        """Whether not even a delta of almost 1 buys a finite epsilon: noise of zero."""
        return self._accountant.get_epsilon(math.nextafter(1, 0)) == math.inf

    def compose(self, event: dp_accounting.DpEvent, count: int = 1) -> "LaplaceAccountant":
        """Account for ``event``, ``count`` times in a row.

        Raises:
            UnsupportedEventError: the event cannot be accounted for; nothing was changed.
        """
        if isinstance(event, dp_accounting.DpEvent):
            refusal = self._maybe_compose(event, count, do_compose=False)
            if refusal is not None:  # without the whole event, whose text may have no end
                raise dp_accounting.UnsupportedEventError(
                    f"{refusal.error_message}, caused by subevent {_shown(refusal.invalid_event)}"
                )
        return super().compose(event, count)

    def _maybe_compose(
        self, event: dp_accounting.DpEvent, count: int, do_compose: bool
    ) -> dp_accounting.PrivacyAccountant.CompositionErrorDetails | None:
        """Compose ``event`` ``count`` times, or say why not; without ``do_compose``, only ask."""
        try:
            _check_shape(event)
            cost = _cost(event)
            self._check_steps(event, cost, count)
        except _RefusedError as refusal:
            return self.CompositionErrorDetails(refusal.event, refusal.reason)
        if do_compose:
            entries = _repeat(cost.entries, count)
            for entry in entries:
                self._accountant.compose(
                    entry.mechanism, sampling_prob=entry.sampling_prob, steps=entry.steps
                )
            self._non_private |= cost.non_private
        return None

    def _check_steps(self, event: dp_accounting.DpEvent, cost: "_Cost", count: int) -> None:
        steps = sum(entry.steps for entry in cost.entries)
        # A count that is no integer is refused by the library, after this.
        if isinstance(count, int) and self._accountant.steps + steps * max(count, 1) > _MOST_STEPS:
            raise _RefusedError(
                event, "event must bring the number of releases to at most 2^53; count is too large"
            )


@dataclass(frozen=True)
class _Cost:
    """What an event comes to: releases, each with a fresh sample, unless nothing is private."""

    entries: tuple[Entry, ...] = ()
    non_private: bool = False


class _RefusedError(Exception):
    """An event that cannot be accounted for, and why."""

    def __init__(self, event: dp_accounting.DpEvent, reason: str) -> None:
        super().__init__(event, reason)
        self.event = event
        self.reason = reason


def _shown(event: dp_accounting.DpEvent | None) -> str:
    """The event in an error: all of it if nothing is in it, and no error if it has no text."""
    return type(event).__name__ if event is None or _parts(event) else reprlib.repr(event)


def _check_shape(event: dp_accounting.DpEvent) -> None:
    """Refuse what is too deep or too large to look at, without recursing into it."""
    level, seen = [event], 0
    for _ in range(_MOST_LEVELS):
        seen += len(level)
        inner = (part for outer in level for part in _parts(outer))
        level = list(islice(inner, _MOST_PARTS + 1 - seen))
        if seen + len(level) > _MOST_PARTS:
            raise _RefusedError(event, f"event must have at most {_MOST_PARTS} parts")
        if not level:
            return
    raise _RefusedError(event, f"event must be nested at most {_MOST_LEVELS} deep")


def _parts(event: dp_accounting.DpEvent) -> Iterable[dp_accounting.DpEvent]:
    match event:
        case dp_accounting.ComposedDpEvent(events=list() | tuple()):
            return event.events
        case dp_accounting.SelfComposedDpEvent() | dp_accounting.PoissonSampledDpEvent():
            return (event.event,)
        case _:
            return ()


def _cost(event: dp_accounting.DpEvent) -> _Cost:
    """The cost of ``event``; a refusal names the innermost event that is to blame."""
    try:
        return _translate(event)
    except (TypeError, ValueError, OverflowError) as error:
        raise _RefusedError(event, str(error)) from error


@singledispatch
def _translate(event: dp_accounting.DpEvent) -> _Cost:
    """Refuses what it does not know: an event without a translation is not private."""
    raise TypeError(f"event must be one that lap2 can account for, got {type(event).__name__}")


@_translate.register
def _(_: dp_accounting.NoOpDpEvent) -> _Cost:
    return _Cost()


@_translate.register
def _(_: dp_accounting.NonPrivateDpEvent) -> _Cost:
    return _Cost(non_private=True)


@_translate.register
def _(event: L2LaplaceDpEvent) -> _Cost:
    return _release(Laplace(event.noise_multiplier, event.dimension))


@_translate.register
def _(event: dp_accounting.GaussianDpEvent) -> _Cost:
    return _release(Gaussian(event.noise_multiplier))


@_translate.register
def _(event: dp_accounting.LaplaceDpEvent) -> _Cost:
    return _release(LaplaceL1(event.noise_multiplier))


@_translate.register
def _(event: dp_accounting.SelfComposedDpEvent) -> _Cost:
    count = _validate.integer("count", event.count, least=0)
    if count > _MOST_STEPS:
        raise ValueError("count must be at most 2^53")
    inner = _cost(event.event)
    return _Cost(_repeat(inner.entries, count), inner.non_private) if count else _Cost()


@_translate.register
def _(event: dp_accounting.ComposedDpEvent) -> _Cost:
    parts = [_cost(part) for part in event.events]
    return _Cost(
        entries=tuple(entry for part in parts for entry in part.entries),
        non_private=any(part.non_private for part in parts),
    )


@_translate.register
def _(event: dp_accounting.PoissonSampledDpEvent) -> _Cost:
    """A whole sample is no sampling; an empty one releases noise only."""
    prob = _validate.probability("sampling_probability", event.sampling_probability)
    inner = _cost(event.event)
    if prob == 1 or not inner.entries:
        return inner
    return replace(inner, entries=(_one_sample(inner.entries, prob),) if prob else ())


def _release(mechanism: Mechanism) -> _Cost:
    worst_shift(mechanism)  # refuses what cannot be accounted before anything changes
    return _Cost((Entry(mechanism, 1.0, 1),))


def _repeat(entries: tuple[Entry, ...], count: int) -> tuple[Entry, ...]:
    return tuple(replace(entry, steps=entry.steps * count) for entry in entries)


def _one_sample(entries: tuple[Entry, ...], prob: float) -> Entry:
    """All releases of ``entries`` from one common Poisson sample (docs/theory.md, section 6).

    A single release keeps its own sample, drawn from the common one: a record is in both with the
    product of the probabilities, independently of all others, so that is a Poisson sample again.
    Several such releases are correlated through the common sample, and no description fits them.
    """
    first, releases = entries[0], sum(entry.steps for entry in entries)
    if releases == 1:
        return replace(first, sampling_prob=max(prob * first.sampling_prob, _LEAST_PROBABILITY))
    if any(entry.sampling_prob < 1 for entry in entries):
        raise ValueError(
            "event must not hold several releases when one of them draws a sample of its own from "
            f"the common sample, got {releases}; drop the outer or the inner sampling, which is "
            "an upper bound"
        )
    if not releases <= _MOST_GROUPS:
        raise ValueError(
            f"event must hold at most {_MOST_GROUPS} releases from one sample, got {releases}; "
            "if each step draws a sample of its own, compose the sampled event instead of "
            "sampling the composed one"
        )
    return Entry(Joint(e.mechanism for e in entries for _ in range(e.steps)), prob, 1)
