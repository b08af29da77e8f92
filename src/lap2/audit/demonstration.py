"""A small training run to audit: synthetic records, a linear model, and canaries."""

# pyright: basic

from collections.abc import Callable

import numpy as np
import torch
from torch import nn

from lap2 import _validate
from lap2.accountant import Accountant
from lap2.audit.canaries import step_of_a_run, train_with_canaries
from lap2.audit.controls import Fault
from lap2.audit.result import Result
from lap2.audit.run import audit_run
from lap2.train.readout import ReleaseName

__all__ = ["audit_demonstration_run"]


def audit_demonstration_run(
    *,
    noise_multiplier: float = 1.0,
    canaries: int = 1000,
    width: int = 8,
    records: int = 500,
    batch_size: int = 100,
    steps: int = 100,
    release: ReleaseName = "bits",
    delta: float = 1e-5,
    confidence: float = 0.999,
    fault: Fault | None = None,
    rng: np.random.Generator,
    progress: Callable[[int], None] | None = None,
) -> Result:
    """Train lap2's engine on made-up records with canaries, and audit the run.

    The claim is the accountant's for the steps as planned, whatever the fault; the other arguments
    are those of :func:`lap2.audit.canaries.train_with_canaries` and :func:`lap2.audit.audit_run`.
    """
    count = _validate.integer("records", records, least=10)
    features = torch.from_numpy(rng.standard_normal((count, 8))).float()
    labels = (features[:, 0] > 0).long()
    model = nn.Linear(8, 2)
    # Whatever is broken below, this is what is claimed.
    step = step_of_a_run(
        model,
        canaries=canaries,
        width=width,
        noise_multiplier=noise_multiplier,
        batch_size=batch_size,
        release=release,
    )
    observed, _ = train_with_canaries(
        model=model,
        features=features,
        labels=labels,
        canaries=canaries,
        width=width,
        batch_size=batch_size,
        steps=steps,
        noise_multiplier=noise_multiplier,
        release=release,
        fault=fault,
        rng=rng,
        progress=progress,
    )
    claim = Accountant().compose(step, sampling_prob=observed.plan.sampling_prob, steps=steps)
    return audit_run(
        observed, claimed_epsilon=claim.get_epsilon(delta), delta=delta, confidence=confidence
    )
