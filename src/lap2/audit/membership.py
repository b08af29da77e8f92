"""Membership inference against a trained model: the report practitioners ask for.

Two attacks: the loss of a record against a threshold (Yeom et al. 2018), and the likelihood ratio
of its loss under models trained with and without it (LiRA, Carlini et al. 2022). Neither can prove
a run private, and both see far less than the mechanism and run audits: a black-box attacker on
ordinary records is far from the worst case that epsilon is about.
"""

# pyright: basic

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lap2 import _validate
from lap2.audit.result import Bound, Result, judged
from lap2.audit.run import auc
from lap2.audit.statistics import at_least, one_run_bound

__all__ = ["MembershipReport", "audit_membership", "confidences", "lira_scores", "report"]

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]


@dataclass(frozen=True)
class MembershipReport:
    """How well scores tell members from others.

    Attributes:
        attack: which score.
        auc: probability that a member scores above another record.
        advantage: largest difference of true and false positive rate.
        tpr_at_fpr: true positive rates at false positive rates of 10%, 1% and 0.1%.
        members: how many records were trained on.
        others: how many were not.
    """

    attack: str
    auc: float
    advantage: float
    tpr_at_fpr: dict[float, float]
    members: int
    others: int


def report(scores: Floats, member: Bools, *, attack: str = "loss threshold") -> MembershipReport:
    """Summarise an attack; larger scores say "member".

    >>> report(np.array([3.0, 2.0, 1.0, 0.0]), np.array([True, True, False, False])).auc
    1.0
    """
    scores, member = _checked(scores, member)
    inside, outside = scores[member], np.sort(scores[~member])
    thresholds = np.unique(scores)
    true = 1 - np.searchsorted(np.sort(inside), thresholds, "left") / inside.size
    false = 1 - np.searchsorted(outside, thresholds, "left") / outside.size
    rates = {fpr: float(np.max(true[false <= fpr], initial=0.0)) for fpr in (0.1, 0.01, 0.001)}
    advantage = float(np.max(true - false, initial=0.0))
    return MembershipReport(
        attack, auc(inside, outside), advantage, rates, inside.size, outside.size
    )


def lira_scores(target: Floats, references: Floats, trained_on: Bools) -> Floats:
    """Log-likelihood ratio of each record's confidence, "in" against "out" (LiRA, online).

    For each record, the confidences of the reference models that were trained on it and of those
    that were not are taken to be normal, with variances shared by all records: with few reference
    models, single ones are not reliable.

    Args:
        target: confidence of the audited model in each record, see :func:`confidences`.
        references: the same for each reference model, (models, records).
        trained_on: which reference models were trained on which records, (models, records).
    """
    references, trained_on = np.asarray(references), np.asarray(trained_on, dtype=bool)
    if references.shape != trained_on.shape or references.shape[1:] != np.shape(target):
        raise ValueError(
            "references and trained_on must be (models, records) for the target's records, got "
            f"{references.shape}, {trained_on.shape} and {np.shape(target)}"
        )
    counts = trained_on.sum(axis=0)
    if not ((counts > 0) & (counts < len(trained_on))).all():
        raise ValueError("trained_on must have a model with and one without each record")
    laws = []
    for members in (trained_on, ~trained_on):
        mean = np.where(members, references, 0.0).sum(axis=0) / members.sum(axis=0)
        residual = np.where(members, references - mean, 0.0)
        freedom = max(1, int(members.sum()) - references.shape[1])
        laws.append((mean, max(float((residual**2).sum()) / freedom, 1e-12)))
    (mean_in, var_in), (mean_out, var_out) = laws
    ratio = (target - mean_out) ** 2 / (2 * var_out) - (target - mean_in) ** 2 / (2 * var_in)
    return ratio + 0.5 * math.log(var_out / var_in)


def audit_membership(
    scores: Floats,
    member: Bools,
    *,
    claimed_epsilon: float,
    delta: float,
    confidence: float = 0.999,
    guesses: int | None = None,
    attack: str = "loss threshold",
) -> Result:
    """A verdict on a claim from membership scores, by one-run auditing.

    Formal guarantee:
        If every record was put into the training set by its own fair coin, and the scores use
        nothing but the trained model and other models, the verdict is "violated" with probability
        at most ``1 - confidence`` for a true claim. A split that was not random proves nothing.

    Args:
        scores: larger says "member".
        member: the coins.
        claimed_epsilon: of the training, to be refuted.
        delta: at which it was claimed.
        confidence: of the verdict.
        guesses: how many records to guess, half of them "in"; a fifth by default. Must not be
            chosen by looking at the outcome.
        attack: the name of the score.
    """
    scores, member = _checked(scores, member)
    count = scores.size
    fixed = max(2, count // 5) if guesses is None else guesses
    fixed = min(_validate.integer("guesses", fixed, least=2), count) // 2 * 2
    error = 1 - _validate.open_probability("confidence", confidence)
    order = np.argsort(scores, kind="stable")
    top, bottom = order[count - fixed // 2 :], order[: fixed // 2]
    correct = int(member[top].sum() + (~member[bottom]).sum())
    mixed = error * (1 - 2.0 ** (1 - count))  # fair coins that all fell alike were refused
    bound = one_run_bound(canaries=count, guesses=fixed, correct=correct, delta=delta, error=mixed)
    summary = report(scores, member, attack=attack)
    facts = {f"tpr_at_fpr_{fpr:g}": tpr for fpr, tpr in summary.tpr_at_fpr.items()}
    right = float(at_least(correct, fixed, error=error))
    facts |= {"auc": summary.auc, "advantage": summary.advantage, "accuracy_at_least": right}
    return judged(
        level="run",
        what=f"membership inference by {attack}: {correct} of {fixed} guesses correct",
        delta=_validate.probability("delta", delta),
        confidence=confidence,
        claimed_epsilon=_validate.non_negative("claimed_epsilon", claimed_epsilon),
        bounds=(Bound(f"one run, {attack}", bound),),
        facts=facts,
    )


def confidences(
    model: Callable[[Any], Any], features: Any, labels: Any, *, batch_size: int = 1024
) -> Floats:
    """Logit-scaled confidence ``log(p / (1 - p))`` of a torch model in each record's label.

    As a score it orders records as their cross-entropy does, and it is close to normal, which LiRA
    wants. The model is evaluated as it is: put it into evaluation mode before.
    """
    import torch  # noqa: PLC0415 - the rest of this module works without it

    found: list[Floats] = []
    with torch.no_grad():
        for start in range(0, len(labels), batch_size):
            part = slice(start, start + batch_size)
            log_p = torch.log_softmax(model(features[part]).double(), dim=-1)
            right = log_p.gather(1, labels[part, None])[:, 0]
            others = log_p.scatter(1, labels[part, None], -math.inf).logsumexp(dim=-1)
            found.append((right - others).numpy())
    return np.concatenate(found)


def _checked(scores: Floats, member: Bools) -> tuple[Floats, Bools]:
    scores, member = np.asarray(scores, dtype=np.float64), np.asarray(member, dtype=bool)
    if scores.ndim != 1 or scores.shape != member.shape:
        raise ValueError(
            f"scores and member must be vectors of one length, got {scores.shape}, {member.shape}"
        )
    if not np.isfinite(scores).all():
        raise ValueError("scores must be finite")
    if not 0 < member.sum() < member.size:
        raise ValueError(f"member must have both kinds, got {int(member.sum())} of {member.size}")
    return scores, member
