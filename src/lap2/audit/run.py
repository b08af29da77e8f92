"""The run audit: many canaries in one training run.

Each canary is in the data by a fair coin, has coordinates of its own, and asks for a gradient
along them. What each step released on those coordinates is compared with simulated correct releases
of the same step, and a guess is made of each canary's coin (Steinke, Nasr and Jagielski 2023). The
comparison sees a wrong scale, clip or sampling rate long before the guesses refute epsilon.
"""

# pyright: basic

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from lap2 import _validate
from lap2.audit.comparison import Comparison, simulations_for
from lap2.audit.result import Bound, Check, Result, judged
from lap2.audit.statistics import one_run_bound

__all__ = ["CanaryScores", "Correct", "RunPlan", "auc", "audit_run"]

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

_BLOCKS = 8
"""Parts of the canaries' coordinates whose noise is looked at by itself."""


@dataclass(frozen=True)
class RunPlan:
    """What a run claims to do to each canary.

    Attributes:
        width: coordinates that belong to each canary, over which its gradient is spread evenly.
        max_grad_norm: the clip C.
        scale: the Laplace scale b.
        sampling_prob: of a record, in each step.
        steps: of the run.
    """

    width: int
    max_grad_norm: float
    scale: float
    sampling_prob: float
    steps: int

    def __post_init__(self) -> None:
        _validate.finite_dimension("width", self.width)
        _validate.positive("max_grad_norm", self.max_grad_norm)
        _validate.positive("scale", self.scale)
        _validate.probability("sampling_prob", self.sampling_prob)
        _validate.integer("steps", self.steps, least=1)

    @property
    def shift(self) -> float:
        """What a canary in the sample adds to each of its coordinates."""
        return self.max_grad_norm / math.sqrt(self.width)

    def sums(self, included: Bools, rng: np.random.Generator) -> Floats:
        """The sums of a fresh sample of the canaries that are in the data, (canaries, width)."""
        sampled = included & (rng.random(included.size) < self.sampling_prob)
        return np.outer(sampled * self.shift, np.ones(self.width))

    def scores(self, released: Floats, variance: float) -> dict[str, Floats]:
        """Scores of each canary in one step, larger where it seems to be in the sample.

        Both are log-likelihood ratios of a step that samples the canary with the claimed
        probability to a step without it: of Laplace noise, the best there is for values, and of
        normal noise with the given variance. For bits that is the best there is: many have a share
        in each coordinate, each counts its log-odds, and these are as small as a record's share in
        a bit, and so linear.

        Args:
            released: (canaries, width).
            variance: of a coordinate.
        """
        v, q = self.shift, self.sampling_prob
        laplace = (np.abs(released) - np.abs(released - v)).sum(axis=1) / self.scale
        normal = v * (released.sum(axis=1) - self.width * v / 2) / variance
        with np.errstate(divide="ignore"):
            out, within = np.log1p(-q), np.log(q)
        return {
            "laplace": np.logaddexp(out, within + laplace),
            "normal": np.logaddexp(out, within + normal),
        }


@dataclass(frozen=True)
class Correct:
    """What a correct step would do next, given everything that is public so far.

    Attributes:
        release: from exact sums on the canaries' coordinates, (canaries, width), to one release of
            them, and of the model's own coordinates, if there are any. Each call is a new release,
            with its own sample of real records and its own noise.
        expected: the mean sum on the model's own coordinates.
        numbers: from one release to further numbers that releases are to be compared by.
    """

    release: Callable[[Floats], tuple[Floats, Floats]]
    expected: Floats = field(default_factory=lambda: np.zeros(0))
    numbers: Callable[[Floats, Floats], Mapping[str, float]] = lambda _canaries, _model: {}

    @classmethod
    def plain(cls, plan: RunPlan, rng: np.random.Generator) -> "Correct":
        """Laplace noise, released as it is, of canaries alone."""
        return cls(
            lambda sums: (sums + rng.laplace(scale=plan.scale, size=sums.shape), np.zeros(0))
        )


class _Totals:
    """Scores of one sequence of releases, added up over its steps."""

    def __init__(self, plan: RunPlan, included: Bools) -> None:
        self.included = included
        self._plan = plan
        self.by_name: dict[str, Floats] = {}

    def add(self, released: Floats, variance: float) -> None:
        for name, scores in self._plan.scores(released, variance).items():
            self.by_name[name] = self.by_name.get(name, 0.0) + scores

    def correct(self, name: str, guesses: int) -> int:
        """Guess "in" for the highest scores, "out" for the lowest."""
        order, half = np.argsort(self.by_name[name], kind="stable"), guesses // 2
        lowest, highest = order[:half], order[order.size - half :]
        return int(self.included[highest].sum() + (~self.included[lowest]).sum())

    def auc(self, name: str) -> float:
        scores = self.by_name[name]
        return auc(scores[self.included], scores[~self.included])


class CanaryScores:
    """What a run released on the coordinates of its canaries, and what correct runs release.

    Args:
        plan: what the run claims.
        included: the coins: which canaries are in the data.
        rng: of the simulation of correct releases.

    Attributes:
        total: sum over steps of what was released, (canaries, width).
        steps: how many were added.
        checks: what else is known of the run; :func:`audit_run` counts them among its own.
    """

    def __init__(self, plan: RunPlan, included: Bools, *, rng: np.random.Generator) -> None:
        """Before the first step."""
        if not 0 < included.sum() < included.size:
            raise ValueError(
                "included must have canaries in and out of the data, "
                f"got {int(included.sum())} of {included.size}"
            )
        self.plan, self.included, self.steps = plan, included, 0
        self.total = np.zeros((included.size, plan.width))
        self.checks: list[Check] = []
        self._rng, self._comparison = rng, Comparison(rng)
        self._observed = _Totals(plan, included)
        self._correct = [_Totals(plan, included) for _ in range(simulations_for(plan.steps))]
        # With coins of its own, so that nothing chosen by it knows the coins of the run.
        self._practice = _Totals(plan, rng.random(included.size) < 0.5)

    @property
    def linear(self) -> Floats:
        """Sum over steps of a canary's released coordinates, along its direction."""
        return _along(self.total)

    def add(
        self, released: Floats, model: Floats | None = None, *, correct: Correct | None = None
    ) -> None:
        """Add one step's release, sums and not means.

        Args:
            released: on the canaries' coordinates, (canaries, width).
            model: on the model's own coordinates, if ``correct`` says what to expect there.
            correct: made before the step was taken; by default, Laplace noise that is left as it
                is.
        """
        expected = self.total.shape
        if released.shape != expected:
            raise ValueError(f"released must have the shape {expected!r}, got {released.shape!r}")
        correct = correct or Correct.plain(self.plan, self._rng)
        model = np.zeros(0) if model is None else model
        sums = self.plan.sums(self._practice.included, self._rng)
        practised, _ = correct.release(sums)
        variance = float(((practised - sums) ** 2).mean())
        self._practice.add(practised, variance)
        self._observed.add(released, variance)
        simulated: list[dict[str, float]] = []
        for totals in self._correct:
            canaries, beside = correct.release(self.plan.sums(self.included, self._rng))
            totals.add(canaries, variance)
            simulated.append(self._numbers(canaries, beside, correct))
        self._comparison.add(self._numbers(released, model, correct), simulated)
        self.total += released
        self.steps += 1

    def _numbers(self, released: Floats, model: Floats, correct: Correct) -> dict[str, float]:
        """What a step's release is compared by."""
        coins, size, along = self.included, np.abs(released), _along(released)
        numbers = {
            "noise scale": size[~coins].mean(),
            "noise of earlier steps": (released[~coins] * self.total[~coins]).sum(),
            "signal of canaries in the data": along[coins].mean(),
            "spread of canaries in the data": (along[coins] ** 2).mean(),
            "samples of earlier steps": (along[coins] * self.linear[coins]).sum(),
        }
        numbers |= {
            _columns("noise scale of", columns): size[~coins][:, columns].mean()
            for columns in np.array_split(np.arange(self.plan.width), _BLOCKS)
            if columns.size
        }
        if correct.expected.size:
            numbers |= {
                "real records, along their mean": float(model @ correct.expected),
                "real records, size": float(model @ model),
            }
        numbers |= correct.numbers(released, model)
        return {name: float(value) for name, value in numbers.items()}

    def compared(self) -> tuple[Check, ...]:
        """The run against correct ones."""
        names = [*self._comparison.names]
        signal = "signal of canaries in the data"
        # Clipping may stay below the clip, so that only a signal that is too large counts.
        levels = [self._comparison.level(name, only_above=name == signal) for name in names]
        steady = [self._comparison.steadiness(name) for name in ("noise scale", signal)]
        return (*self.checks, *levels, *steady)

    def guess(self, delta: float, error: float) -> tuple[Bound, dict[str, float]]:
        """Guess coins; which score and how many guesses, practice says."""
        m = self.included.size
        promised, name, guesses = -1.0, "laplace", 2
        for candidate in self._practice.by_name:
            for share in (0.02, 0.05, 0.1, 0.2, 0.4, 0.7, 1.0):
                r = min(max(2, 2 * round(share * m / 2)), m // 2 * 2)
                found = one_run_bound(
                    canaries=m,
                    guesses=r,
                    correct=self._practice.correct(candidate, r),
                    delta=delta,
                    error=error,
                )
                if found > promised:
                    promised, name, guesses = found, candidate, r
        correct = self._observed.correct(name, guesses)
        bound = one_run_bound(
            canaries=m, guesses=guesses, correct=correct, delta=delta, error=error
        )
        facts = {"guesses": guesses, "correct": correct, "bound_of_a_correct_run": promised}
        facts |= self._auc_facts(name)
        return Bound("one run (Steinke, Nasr and Jagielski 2023)", bound), facts

    def _auc_facts(self, name: str) -> dict[str, float]:
        found = self._observed.auc(name)
        expected = float(np.mean([totals.auc(name) for totals in self._correct]))
        inside = int(self.included.sum())
        outside = self.included.size - inside
        # Standard error of an AUC by Hanley and McNeil (1982); for the reader, not for the verdict.
        spread_in = expected / (2 - expected) - expected**2
        spread_out = 2 * expected**2 / (1 + expected) - expected**2
        variance = expected * (1 - expected) + (inside - 1) * spread_in + (outside - 1) * spread_out
        sigma = math.sqrt(max(variance, 1e-12) / (inside * outside) * (1 + 1 / len(self._correct)))
        return {"auc": found, "expected_auc": expected, "auc_sigmas": (found - expected) / sigma}


def auc(with_record: Floats, without: Floats) -> float:
    """The probability that a score with the record exceeds one without (ties count half)."""
    ranks = stats.rankdata(np.concatenate([with_record, without]))[: with_record.size]
    first = ranks.sum() - with_record.size * (with_record.size + 1) / 2
    return float(first / (with_record.size * without.size))


def audit_run(
    observed: CanaryScores,
    *,
    claimed_epsilon: float,
    delta: float,
    confidence: float = 0.999,
) -> Result:
    """Judge one training run by its canaries.

    Formal guarantee:
        If the run does what its plan says, the verdict is "violated" with probability at most ``1 -
        confidence``: half of the error is for the guesses, half for the comparison with correct
        releases, which is exact (:class:`lap2.audit.comparison.Comparison`). The bound on epsilon
        needs no assumption but the fair and secret coins; the score and the number of guesses are
        fixed on simulated releases with coins of their own, never on the audited run.

    Args:
        observed: what the run released.
        claimed_epsilon: of the whole run, to be refuted.
        delta: at which it was claimed.
        confidence: of the verdict.
    """
    claimed = _validate.non_negative("claimed_epsilon", claimed_epsilon)
    delta = _validate.probability("delta", delta)
    error = 1 - _validate.open_probability("confidence", confidence)
    plan, coins = observed.plan, observed.included
    if observed.steps != plan.steps:
        raise ValueError(f"the plan has {plan.steps} steps, the run made {observed.steps}")
    # Fair coins that all fell alike were refused.
    bound, facts = observed.guess(delta, error / 2 * (1 - 2.0 ** (1 - coins.size)))
    return judged(
        level="run",
        what=f"{coins.size} canaries, {int(coins.sum())} of them in the data, {plan.steps} steps",
        delta=delta,
        confidence=confidence,
        claimed_epsilon=claimed,
        bounds=(bound,),
        checks=observed.compared(),
        check_error=error / 2,
        facts=facts,
    )


def _along(released: Floats) -> Floats:
    return released.sum(axis=1) / math.sqrt(released.shape[1])


def _columns(what: str, columns: NDArray[np.int64]) -> str:
    first, last = int(columns[0]), int(columns[-1])
    where = f"coordinate {first}" if first == last else f"coordinates {first} to {last}"
    return f"{what} {where}"
