"""The run audit: many canaries in one training run.

Each canary is in the data by a fair coin, has coordinates of its own, and asks for a gradient
along them. What the run released on those coordinates is compared with what a correct run releases,
which is known exactly, and a guess is made of each canary's coin (Steinke, Nasr and Jagielski
2023). The comparison sees a wrong scale, clip or sampling rate long before the guesses refute
epsilon.
"""

# pyright: basic

import math
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from lap2 import _validate
from lap2.audit.result import Bound, Check, Result, judged
from lap2.audit.statistics import one_run_bound

__all__ = ["CanaryScores", "RunPlan", "auc", "audit_run", "expected_scores"]

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]


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

    def score(self, released: Floats) -> Floats:
        """The log-likelihood ratio of one step for each canary.

        ``released`` is (canaries, width). The ratio is that of a step which samples the canary
        with the claimed probability to a step without it: the best score there is for a correct
        run.
        """
        v = self.shift
        loss = (np.abs(released) - np.abs(released - v)).sum(axis=1) / self.scale
        q = self.sampling_prob
        with np.errstate(divide="ignore"):
            return np.logaddexp(np.log1p(-q), np.log(q) + loss)


@dataclass
class CanaryScores:
    """What a run released on the coordinates of its canaries, added up over the steps.

    Attributes:
        plan: what the run claims.
        included: the coins: which canaries are in the data.
        scores: sum over steps of :meth:`RunPlan.score`.
        absolute: sum over steps of the absolute value of each coordinate, (canaries, width).
        linear: sum over steps of a canary's released coordinates, along its direction.
        step_noise: for each step, the absolute sum over canaries that are not in the data.
    """

    plan: RunPlan
    included: Bools
    scores: Floats
    absolute: Floats
    linear: Floats
    step_noise: list[float] = field(default_factory=list)

    @property
    def steps(self) -> int:
        """How many steps were added."""
        return len(self.step_noise)

    @classmethod
    def empty(cls, plan: RunPlan, included: Bools) -> "CanaryScores":
        """Before the first step."""
        count = included.size
        zeros = np.zeros(count)
        return cls(plan, included, zeros.copy(), np.zeros((count, plan.width)), zeros)

    def add(self, released: Floats) -> None:
        """Add one step's release, a sum and not a mean: (canaries, width)."""
        expected = (self.included.size, self.plan.width)
        if released.shape != expected:
            raise ValueError(f"released must have the shape {expected!r}, got {released.shape!r}")
        self.scores += self.plan.score(released)
        size = np.abs(released)
        self.absolute += size
        self.linear += released.sum(axis=1) / math.sqrt(self.plan.width)
        self.step_noise.append(float(size[~self.included].sum()))


def expected_scores(plan: RunPlan, included: Bools, rng: np.random.Generator) -> CanaryScores:
    """The scores of a correct run, by simulating one with ordinary noise."""
    outcome = CanaryScores.empty(plan, included)
    for _ in range(plan.steps):
        released = rng.laplace(scale=plan.scale, size=(included.size, plan.width))
        sampled = included & (rng.random(included.size) < plan.sampling_prob)
        released[sampled] += plan.shift
        outcome.add(released)
    return outcome


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
    reference: int = 20_000,
    rng: np.random.Generator,
) -> Result:
    """Judge one training run by its canaries.

    Formal guarantee:
        If the run does what its plan says, the verdict is "violated" with probability at most ``1 -
        confidence``: half of the error is for the guesses, half for the comparison with a correct
        run. The bound on epsilon needs no assumption but the fair and secret coins; the number of
        guesses is fixed on a simulated run, never on the audited one.

    Args:
        observed: what the run released.
        claimed_epsilon: of the whole run, to be refuted.
        delta: at which it was claimed.
        confidence: of the verdict.
        reference: simulated canaries to compare with.
        rng: for the simulation of a correct run.
    """
    claimed = _validate.non_negative("claimed_epsilon", claimed_epsilon)
    delta = _validate.probability("delta", delta)
    error = 1 - _validate.open_probability("confidence", confidence)
    size = _validate.integer("reference", reference, least=1000)
    plan, coins = observed.plan, observed.included
    if observed.steps != plan.steps:
        raise ValueError(f"the plan has {plan.steps} steps, the run made {observed.steps}")
    if not 0 < coins.sum() < coins.size:
        raise ValueError(
            "included must have canaries in and out of the data, "
            f"got {int(coins.sum())} of {coins.size}"
        )
    simulated = expected_scores(plan, np.arange(size) % 2 == 0, rng)
    bound, facts = _guess(observed, simulated, delta, error / 2)
    facts |= _auc_facts(observed, simulated)
    return judged(
        level="run",
        what=f"{coins.size} canaries, {int(coins.sum())} of them in the data, {plan.steps} steps",
        delta=delta,
        confidence=confidence,
        claimed_epsilon=claimed,
        bounds=(bound,),
        checks=_checks(observed, simulated),
        check_error=error / 2,
        facts=facts,
    )


def _guess(
    observed: CanaryScores, simulated: CanaryScores, delta: float, error: float
) -> tuple[Bound, dict[str, float]]:
    """Guess "in" for the highest scores, "out" for the lowest; how many, a simulation says."""
    m = observed.included.size
    best, guesses = -1.0, 2
    stretch = m / simulated.included.size
    for share in (0.02, 0.05, 0.1, 0.2, 0.4, 0.7, 1.0):
        r = max(2, 2 * round(share * m / 2))
        hits = _correct(simulated, max(2, 2 * round(r / stretch / 2))) * stretch
        promised = one_run_bound(
            canaries=m, guesses=r, correct=min(r, int(hits)), delta=delta, error=error
        )
        if promised > best:
            best, guesses = promised, min(r, m // 2 * 2)
    correct = _correct(observed, guesses)
    bound = one_run_bound(canaries=m, guesses=guesses, correct=correct, delta=delta, error=error)
    facts = {"guesses": guesses, "correct": correct, "bound_of_a_correct_run": max(best, 0.0)}
    return Bound("one run (Steinke, Nasr and Jagielski 2023)", bound), facts


def _correct(outcome: CanaryScores, guesses: int) -> int:
    order = np.argsort(outcome.scores, kind="stable")
    half = guesses // 2
    coins = outcome.included
    return int(coins[order[coins.size - half :]].sum() + (~coins[order[:half]]).sum())


def _auc_facts(observed: CanaryScores, simulated: CanaryScores) -> dict[str, float]:
    found, expected = (
        auc(o.scores[o.included], o.scores[~o.included]) for o in (observed, simulated)
    )
    inside = int(observed.included.sum())
    outside = observed.included.size - inside
    # Standard error of an AUC by Hanley and McNeil (1982); for the reader, not for the verdict.
    spread_in = expected / (2 - expected) - expected**2
    spread_out = 2 * expected**2 / (1 + expected) - expected**2
    variance = expected * (1 - expected) + (inside - 1) * spread_in + (outside - 1) * spread_out
    sigma = math.sqrt(max(variance, 1e-12) / (inside * outside))
    return {
        "auc": found,
        "expected_auc": expected,
        "auc_sigmas": (found - expected) / sigma,
    }


def _checks(observed: CanaryScores, simulated: CanaryScores) -> tuple[Check, ...]:
    """The run against a correct one: noise layer by layer, signal, and whole distributions."""
    plan, coins = observed.plan, observed.included
    checks = [_noise_check(observed), _steadiness(observed)]
    checks += [_noise_check(observed, column) for column in range(plan.width)]
    # The mean of canaries in the data: clip times how often they are sampled.
    count, steps, q = int(coins.sum()), plan.steps, plan.sampling_prob
    mean = float(observed.linear[coins].mean())
    expected = steps * q * plan.max_grad_norm
    variance = steps * (2 * plan.scale**2 + q * (1 - q) * plan.max_grad_norm**2)
    z = (mean - expected) / math.sqrt(variance / count)
    checks.append(
        Check(
            "signal of canaries in the data",
            # Clipping may stay below the clip, so that only a signal that is too large counts.
            float(stats.norm.sf(z)),
            f"{mean:.4g}",
            f"at most {expected:.4g} within {math.sqrt(variance / count):.2g}",
        )
    )
    for name, members in (("in", True), ("out", False)):
        mine = observed.scores[coins == members]
        theirs = simulated.scores[simulated.included == members]
        distance, p_value = stats.ks_2samp(mine, theirs, method="asymp")
        checks.append(
            Check(
                f"scores of canaries {name} the data",
                float(p_value),  # type: ignore[arg-type]
                f"mean {mine.mean():.4g}, deviation {mine.std():.4g}, distance {distance:.2g}",
                f"mean {theirs.mean():.4g}, deviation {theirs.std():.4g}",
            )
        )
    return tuple(checks)


def _noise_check(observed: CanaryScores, column: int | None = None) -> Check:
    """Canaries that are not in the data show pure noise, whose absolute sum has a known law."""
    where = slice(None) if column is None else slice(column, column + 1)
    pure = observed.absolute[~observed.included, where]
    count = pure.size * observed.steps
    total = float(pure.sum()) / observed.plan.scale
    p_value = 2 * min(stats.gamma.cdf(total, count), stats.gamma.sf(total, count))
    return Check(
        "noise scale" if column is None else f"noise scale of coordinate {column}",
        min(1.0, float(p_value)),
        f"{total / count:.5f} b",
        f"1 b within {1 / math.sqrt(count):.1e}",
    )


def _steadiness(observed: CanaryScores) -> Check:
    """Whether the noise is as large in every step: a divisor that varies shows here."""
    pure = int((~observed.included).sum()) * observed.plan.width
    totals = np.array(observed.step_noise) / observed.plan.scale
    # Normal scores of a known law: the sum of their squares is a chi-square.
    lower, upper = stats.gamma.cdf(totals, pure), stats.gamma.sf(totals, pure)
    z = stats.norm.isf(np.maximum(np.minimum(lower, upper), 1e-300))
    return Check(
        "noise scale from step to step",
        float(stats.chi2.sf(float((z * z).sum()), observed.steps)),
        f"deviation {totals.std() / pure:.4f} b",
        f"about {1 / math.sqrt(pure):.4f} b",
    )
