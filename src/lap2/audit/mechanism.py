"""The mechanism audit: any step, run many times on two neighbouring batches.

The audit knows nothing of accounting. It looks at releases without and with one record, finds on
half of the trials an event that tells them apart, and counts that event in the other half.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lap2 import _validate
from lap2.audit.result import Bound, Result, judged
from lap2.audit.statistics import (
    Event,
    best_event,
    best_gdp_event,
    epsilon_bound,
    gdp_bound,
)

__all__ = ["Draw", "Pair", "audit_mechanism", "audit_releases", "canary_directions", "repeated"]

Floats = NDArray[np.float64]
Step = Callable[[Any], Any]
"""One release, a vector, of a batch."""
Draw = Callable[[Any, int], Floats]
"""So many independent releases of a batch, one in each row."""
Progress = Callable[[int], None]
Score = Callable[[Floats], Floats]

_CHUNK = 1 << 21
"""Numbers held at a time."""
_PILOT = 4096
"""Releases that scores are fitted on."""


@dataclass(frozen=True)
class Pair:
    """Two neighbouring batches: whatever the step takes, without and with one record.

    Attributes:
        name: of the canary, for the report.
        without: the batch without the record.
        added: the same batch with it.
        shift: the record's clipped gradient if it is known; else the audit estimates it.
        score: the log-likelihood ratio of releases with the record to those without, if it is
            known; tried beside what the audit fits.
    """

    name: str
    without: Any
    added: Any
    shift: Floats | None = None
    score: Score | None = None


def canary_directions(
    dimension: int, norm: float, rng: np.random.Generator
) -> dict[str, NDArray[np.float64]]:
    """Gradients of the given l2 norm for a canary to have.

    Spread over all coordinates is the worst case for Laplace noise (docs/theory.md, theorem 1). A
    single coordinate and a random direction see what a spread canary averages away.
    """
    n = _validate.finite_dimension("dimension", dimension)
    norm = _validate.positive("norm", norm)
    random = rng.standard_normal(n)
    sparse = np.zeros(n)
    sparse[rng.integers(n)] = norm
    return {
        "spread": np.full(n, norm / math.sqrt(n)),
        "sparse": sparse,
        "random": random * (norm / float(np.linalg.norm(random))),
    }


def repeated(step: Step) -> Draw:
    """Many releases from a step that makes one; tensors and arrays are both understood."""

    def draw(batch: Any, count: int) -> Floats:
        return np.stack([np.asarray(step(batch), dtype=np.float64).ravel() for _ in range(count)])

    return draw


def audit_mechanism(
    step: Step,
    pairs: Sequence[Pair],
    *,
    claimed_epsilon: float,
    delta: float,
    trials: int = 20_000,
    confidence: float = 0.999,
    scale: float | None = None,
    gdp_shape: bool = False,
    progress: Progress | None = None,
) -> Result:
    """Audit any callable ``step(batch) -> released vector``; see :func:`audit_releases`.

    Each call must draw its own randomness (sampling and noise).
    """
    return audit_releases(
        repeated(step),
        pairs,
        claimed_epsilon=claimed_epsilon,
        delta=delta,
        trials=trials,
        confidence=confidence,
        scale=scale,
        gdp_shape=gdp_shape,
        progress=progress,
    )


def audit_releases(
    draw: Draw,
    pairs: Sequence[Pair],
    *,
    claimed_epsilon: float,
    delta: float,
    trials: int = 1_000_000,
    confidence: float = 0.999,
    scale: float | None = None,
    gdp_shape: bool = False,
    progress: Progress | None = None,
) -> Result:
    """Audit a mechanism of which many releases can be drawn at once.

    The first half of the trials, spread over all pairs, chooses a pair, a score, a direction and a
    threshold; the second half counts that one event. So nothing is tested twice, and the counts
    owe nothing to the choice.

    Formal guarantee:
        If releases are independent and the step is (claimed_epsilon, delta)-private for the given
        pairs, the verdict is "violated" with probability at most ``1 - confidence``
        (Clopper-Pearson). The bound under a GDP shape holds with the same confidence by itself,
        assumes what it says, and has no part in the verdict.

    Args:
        draw: ``draw(batch, count)`` makes that many independent releases, one in each row.
        pairs: neighbouring batches.
        claimed_epsilon: to be refuted.
        delta: at which it was claimed; 0 for pure privacy.
        trials: releases in all: both neighbours, both halves.
        confidence: of the verdict.
        scale: the claimed Laplace scale b; None fits it.
        gdp_shape: also give the bound that assumes a Gaussian trade-off curve. With Poisson
            sampling that assumption is false.
        progress: called with the number of trials done since the last call.
    """
    claimed = _validate.non_negative("claimed_epsilon", claimed_epsilon)
    delta = _validate.probability("delta", delta)
    error = 1 - _validate.open_probability("confidence", confidence)
    trials = _validate.integer("trials", trials, least=100 * max(1, len(pairs)))
    if not pairs:
        raise ValueError("pairs must hold at least one pair of neighbouring batches, got none")
    if scale is not None:
        _validate.positive("scale", scale)
    source = _Source(draw, progress or (lambda _: None))
    each, final = trials // (4 * len(pairs)), trials // 4
    terms = _Terms(delta, error, scale, gdp_shape)
    choices = [_choose(source, pair, each, terms) for pair in pairs]
    best = max(choices, key=lambda choice: choice.event.expected)
    return judged(
        level="mechanism",
        what=(
            f"{trials} releases; canary {best.pair.name}, score {best.score_name}, event chosen on "
            "one half and counted in the other"
        ),
        delta=delta,
        confidence=confidence,
        claimed_epsilon=claimed,
        bounds=_count(source, best, final, terms),
    )


@dataclass(frozen=True)
class _Terms:
    delta: float
    error: float
    scale: float | None
    gdp_shape: bool


@dataclass(frozen=True)
class _Choice:
    pair: Pair
    score_name: str
    score: Score
    event: Event
    gdp_event: Event | None


class _Source:
    """Draws releases in pieces that fit in memory."""

    def __init__(self, draw: Draw, progress: Progress) -> None:
        self._draw, self._progress, self._rows = draw, progress, 1024
        self._width: tuple[int, ...] = ()

    def pieces(self, batch: Any, count: int) -> Iterator[Floats]:
        while count > 0:
            asked = min(count, self._rows)
            releases = np.asarray(self._draw(batch, asked), dtype=np.float64)
            width = self._width or releases.shape[-1:]
            if releases.ndim != 2 or releases.shape != (asked, *width) or not releases.size:
                raise ValueError(
                    f"draw must give the {asked} releases that it is asked for, one in each row, "
                    f"all of one length; got shape {releases.shape!r}"
                )
            count, self._width = count - asked, width
            self._rows = max(1, _CHUNK // releases.shape[1])
            self._progress(asked)
            yield releases

    def scores(self, batch: Any, count: int, scores: Sequence[Score]) -> list[Floats]:
        parts = [[_rounded(score(p)) for score in scores] for p in self.pieces(batch, count)]
        return [np.concatenate(column) for column in zip(*parts, strict=True)]


def _choose(source: _Source, pair: Pair, count: int, terms: _Terms) -> _Choice:
    """Fit scores on a pilot, and choose the best event on the other releases of the first half."""
    pilot = min(_PILOT, count // 3)
    without, added = (
        np.concatenate(list(source.pieces(batch, pilot))) for batch in (pair.without, pair.added)
    )
    scores = _fit(without, added, pair.shift, terms.scale)
    if pair.score is not None:
        scores["likelihood ratio"] = pair.score
    functions = list(scores.values())
    of_without = source.scores(pair.without, count - pilot, functions)
    of_added = source.scores(pair.added, count - pilot, functions)
    events = [
        best_event(a, w, delta=terms.delta, error=terms.error)
        for a, w in zip(of_added, of_without, strict=True)
    ]
    at = int(np.argmax([event.expected for event in events]))
    gdp_event = (
        best_gdp_event(of_added[at], of_without[at], error=terms.error) if terms.gdp_shape else None
    )
    return _Choice(pair, list(scores)[at], functions[at], events[at], gdp_event)


def _count(source: _Source, choice: _Choice, trials: int, terms: _Terms) -> tuple[Bound, ...]:
    """Count the chosen events in new releases of both neighbours."""
    events = [choice.event] + ([choice.gdp_event] if choice.gdp_event else [])
    added, without = (
        np.sum(
            [
                [event.count(_rounded(choice.score(piece))) for event in events]
                for piece in source.pieces(batch, trials)
            ],
            axis=0,
        ).tolist()
        for batch in (choice.pair.added, choice.pair.without)
    )
    counts = [
        (a, w) if event.added else (w, a)
        for event, a, w in zip(events, added, without, strict=True)
    ]
    common, rare = counts[0]
    bound = epsilon_bound(common, trials, rare, trials, delta=terms.delta, error=terms.error)
    bounds = [Bound("Clopper-Pearson", float(bound))]
    if choice.gdp_event:
        common, rare = counts[1]
        bound = gdp_bound(common, trials, rare, trials, delta=terms.delta, error=terms.error)
        assumption = "the trade-off curve is that of a Gaussian mechanism"
        bounds.append(Bound("GDP shape", bound, assumption))
    return tuple(bounds)


def _rounded(scores: Floats) -> Floats:
    """Scores without their last digits, which would tell a different story.

    The likelihood ratio of Laplace noise has atoms, and rounding in the *mechanism* splits them:
    ordinary float64 noise gives itself away in the last digit of this very score. That is the
    sampler audit's business; here the size of noise and shift is in question. The offset keeps
    round numbers, where atoms often are, away from the edges of cells.
    """
    return np.floor(scores * 2.0**20 + 0.382) * 2.0**-20


def _fit(
    without: Floats, added: Floats, shift: Floats | None, scale: float | None
) -> dict[str, Score]:
    """Four scores: the claimed mechanism's likelihood ratio, and three of fitted mechanisms.

    The fitted ones see what the claimed one cannot: a coordinate without noise, noise whose size
    depends on the batch, or which coordinates are infinite or undefined.
    """
    unusual = _unusual(without, added)
    without, added = _numbers(without), _numbers(added)
    centre = np.median(without, axis=0)
    moved = added.mean(axis=0) - without.mean(axis=0) if shift is None else np.asarray(shift)
    spread = _spread(without, centre)
    b = spread if scale is None else np.full_like(spread, scale)
    centre_added = np.median(added, axis=0)
    spread_added = _spread(added, centre_added)
    precision = moved / _spread(without, centre, square=True)

    def laplace(y: Floats) -> Floats:
        y = _numbers(y)
        return ((np.abs(y - centre) - np.abs(y - centre - moved)) / b).sum(axis=1)

    def fitted(y: Floats) -> Floats:
        y = _numbers(y)
        score = np.abs(y - centre) / spread - np.abs(y - centre_added) / spread_added
        return score.sum(axis=1)

    def linear(y: Floats) -> Floats:
        return (_numbers(y) - centre) @ precision

    return {"laplace": laplace, "fitted laplace": fitted, "linear": linear, "unusual": unusual}


def _numbers(releases: Floats) -> Floats:
    """Releases that can be scored as numbers: what is infinite or undefined is far out."""
    if np.isfinite(releases).all():
        return releases
    return np.nan_to_num(releases, nan=1e30, posinf=1e30, neginf=-1e30)


def _unusual(without: Floats, added: Floats) -> Score:
    """How much likelier the record makes it that these coordinates are infinite or undefined.

    As numbers they could not be told from each other: undefined with the record, say, and infinite
    without it.
    """
    kinds = (np.isfinite, np.isnan, np.isposinf, np.isneginf)
    # Half a release more of each kind, so that what was never seen proves nothing.
    weights = [
        np.log((kind(added).sum(axis=0) + 0.5) / (kind(without).sum(axis=0) + 0.5))
        for kind in kinds
    ]

    def score(y: Floats) -> Floats:
        if np.isfinite(y).all():
            return np.full(len(y), weights[0].sum())
        parts = (kind(y) @ weight for kind, weight in zip(kinds, weights, strict=True))
        return np.add.reduce(list(parts))

    return score


def _spread(releases: Floats, centre: Floats, *, square: bool = False) -> Floats:
    """Mean absolute (or squared) deviation, kept from zero: a coordinate may lack noise."""
    deviation = np.abs(releases - centre)
    spread = (deviation * deviation if square else deviation).mean(axis=0)
    return np.maximum(spread, 1e-9 * max(float(spread.max()), 1e-30))
