"""Audits: evidence about an epsilon that does not rest on the formula that claimed it.

Four levels, each with a lower bound on epsilon, a confidence, and a verdict on a claim:
:func:`audit_sampler` looks at the noise alone, :func:`audit_mechanism` (and its fast form
:func:`audit_releases`) at any private step, :func:`audit_run` at a training run with canaries,
:func:`audit_claim` at a formula. What needs torch is in :mod:`lap2.audit.engine` (lap2's own step),
:mod:`lap2.audit.canaries` (a training run) and :mod:`lap2.audit.reference` (what a correct release
of an engine looks like). docs/audit.md says what each can and cannot see. Needs ``lap2[audit]``,
from the moment a name is used.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lap2.audit.claims import audit_claim
    from lap2.audit.mechanism import Pair, audit_mechanism, audit_releases, canary_directions
    from lap2.audit.membership import (
        MembershipReport,
        audit_membership,
        confidences,
        lira_scores,
        report,
    )
    from lap2.audit.result import Bound, Check, Result
    from lap2.audit.run import CanaryScores, Correct, RunPlan, audit_run
    from lap2.audit.sampler import audit_sampler

__all__ = [
    "Bound",
    "CanaryScores",
    "Check",
    "Correct",
    "MembershipReport",
    "Pair",
    "Result",
    "RunPlan",
    "audit_claim",
    "audit_mechanism",
    "audit_membership",
    "audit_releases",
    "audit_run",
    "audit_sampler",
    "canary_directions",
    "confidences",
    "lira_scores",
    "report",
]

_HOMES = {
    "claims": ("audit_claim",),
    "mechanism": ("Pair", "audit_mechanism", "audit_releases", "canary_directions"),
    "membership": ("MembershipReport", "audit_membership", "confidences", "lira_scores", "report"),
    "result": ("Bound", "Check", "Result"),
    "run": ("CanaryScores", "Correct", "RunPlan", "audit_run"),
    "sampler": ("audit_sampler",),
}


def __getattr__(name: str) -> Any:
    """Import on first use, so that the command line starts without SciPy."""
    for module, names in _HOMES.items():
        if name in names:
            return getattr(importlib.import_module(f"lap2.audit.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
