"""What every audit returns: a lower bound on epsilon, p-values, and a verdict on a claim."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from lap2._digits import rounded_down

__all__ = ["Bound", "Check", "Result", "combined", "judged"]

Verdict = Literal["consistent", "violated"]


@dataclass(frozen=True)
class Bound:
    """A lower bound on epsilon from one method.

    Attributes:
        method: how it was found.
        epsilon_lower: with the result's confidence, the true epsilon is not below it.
        assumption: what it rests on besides the independence of trials; empty if nothing. Only
            bounds that assume nothing decide the verdict.
    """

    method: str
    epsilon_lower: float
    assumption: str = ""


@dataclass(frozen=True)
class Check:
    """One test of something a correct mechanism does.

    Attributes:
        name: what is tested.
        p_value: for a correct mechanism, at most x with probability at most x (not corrected).
        observed: what was seen, in words.
        expected: what a correct mechanism shows.
    """

    name: str
    p_value: float
    observed: str
    expected: str


@dataclass(frozen=True)
class Result:
    """The outcome of an audit.

    Formal guarantee:
        If what was audited is correct and the claim is true, ``verdict`` is "violated" with
        probability at most ``1 - confidence``, over the randomness of mechanism and auditor. A
        verdict "consistent" proves nothing: it says that this audit found no evidence.

    Attributes:
        level: "sampler", "mechanism", "run" or "claim".
        what: what was done, in a sentence.
        epsilon_lower: the largest lower bound that assumes nothing.
        delta: at which epsilon is meant.
        confidence: of the verdict, everything that was tried together.
        claimed_epsilon: what was to be refuted.
        verdict: "violated" if a bound exceeds the claim or a check fails, else "consistent".
        evidence: what decided a verdict "violated"; empty otherwise.
        bounds: every lower bound, also those that rest on an assumption.
        checks: every test with a p-value.
        facts: further numbers to report, by name.
    """

    level: str
    what: str
    epsilon_lower: float
    delta: float
    confidence: float
    claimed_epsilon: float
    verdict: Verdict
    evidence: tuple[str, ...] = ()
    bounds: tuple[Bound, ...] = ()
    checks: tuple[Check, ...] = ()
    facts: dict[str, float] = field(default_factory=dict[str, float])

    @property
    def violated(self) -> bool:
        """Whether the claim was refuted."""
        return self.verdict == "violated"

    @property
    def violated_if(self) -> tuple[str, ...]:
        """The assumptions under which the claim would be refuted too."""
        found = (b for b in self.bounds if b.assumption and b.epsilon_lower > self.claimed_epsilon)
        return tuple(bound.assumption for bound in found)


def judged(
    *,
    level: str,
    what: str,
    delta: float,
    confidence: float,
    claimed_epsilon: float,
    bounds: tuple[Bound, ...],
    checks: tuple[Check, ...] = (),
    check_error: float = 0.0,
    facts: dict[str, float] | None = None,
) -> Result:
    """Reach the verdict.

    Args:
        level: see :class:`Result`.
        what: see :class:`Result`.
        delta: see :class:`Result`.
        confidence: of the whole; the caller has divided its error between bounds and checks.
        claimed_epsilon: see :class:`Result`.
        bounds: lower bounds on epsilon; those that assume nothing count.
        checks: p-values, which share ``check_error`` equally (Bonferroni).
        check_error: the probability with which any check may fail on a correct mechanism.
        facts: further numbers to report.
    """
    lower = max([0.0, *(bound.epsilon_lower for bound in bounds if not bound.assumption)])
    level_of_each = check_error / max(1, len(checks))
    evidence = [f"epsilon is above {rounded_down(lower)}"] if lower > claimed_epsilon else []
    evidence += [
        f"{check.name}: {check.observed}, expected {check.expected} (p = {check.p_value:.1e})"
        for check in checks
        # A p-value that is not a number is a failure of the mechanism, not a pass.
        if not check.p_value > level_of_each
    ]
    return Result(
        level=level,
        what=what,
        epsilon_lower=lower,
        delta=delta,
        confidence=confidence,
        claimed_epsilon=claimed_epsilon,
        verdict="violated" if evidence else "consistent",
        evidence=tuple(evidence),
        bounds=bounds,
        checks=checks,
        facts={k: v for k, v in (facts or {}).items() if not math.isnan(v)},
    )


def combined(results: Mapping[str, Result], *, what: str, confidence: float) -> Result:
    """One verdict from several audits of one level, "violated" if any of them is.

    Epsilon, claim and bounds are those of the audit whose bound is the largest multiple of its
    claim; the facts have those of all.

    Args:
        results: by name. Their errors must add up to at most ``1 - confidence``.
        what: see :class:`Result`.
        confidence: of the whole.
    """
    worst = max(results, key=lambda name: _excess(results[name]))
    facts: dict[str, float] = {}
    for name, result in results.items():
        if result.bounds:
            facts[f"{name}: claimed"] = result.claimed_epsilon
            facts[f"{name}: at least"] = result.epsilon_lower
        facts |= {f"{name}: {fact}": value for fact, value in result.facts.items()}
    shown = results[worst]
    return replace(
        shown,
        what=f"{what}; shown is the worst, {worst}: {shown.what}",
        confidence=confidence,
        verdict="violated" if any(result.violated for result in results.values()) else "consistent",
        evidence=tuple(f"{name}: {e}" for name, r in results.items() for e in r.evidence),
        bounds=tuple(replace(b, method=f"{b.method}, {worst}") for b in shown.bounds),
        checks=tuple(
            replace(check, name=f"{name}: {check.name}")
            for name, result in results.items()
            for check in result.checks
        ),
        facts=facts,
    )


def _excess(result: Result) -> float:
    if not result.bounds:
        return -1.0
    return result.epsilon_lower / max(result.claimed_epsilon, 1e-300)
