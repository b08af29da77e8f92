"""Audit a formula instead of code: simulate the mechanism and try to refute the bound.

The simulation knows the mechanism's definition (docs/theory.md, section 1) and nothing of moments:
Poisson sampling, one record whose clipped gradient has equal coordinates, Laplace noise.
"""

import math
import warnings
from collections.abc import Callable
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from lap2 import _validate
from lap2.accountant import Accountant
from lap2.audit.mechanism import Pair, audit_releases
from lap2.audit.result import Result
from lap2.mechanism import Laplace, MajorizedLaplace, NotAGuaranteeWarning, PublishedLaplace

__all__ = ["BOUNDS", "audit_claim"]

BOUNDS = ("exact", "majorized", "published")
"""The bounds for l2-clipped Laplace noise that can be audited."""


def audit_claim(
    bound: str,
    *,
    dimension: int = 100,
    noise_multiplier: float = 0.3,
    sampling_prob: float = 0.01,
    steps: int = 1,
    delta: float = 1e-5,
    trials: int = 1_000_000,
    confidence: float = 0.999,
    rng: np.random.Generator,
    progress: Callable[[int], None] | None = None,
) -> Result:
    """Try to refute what a bound says of a setting, by simulation alone.

    The defaults are the first counterexample of docs/theory.md, section 4: the published bound says
    0.32 and is refuted in seconds, the exact one is not.

    Formal guarantee:
        A true claim is called "violated" with probability at most ``1 - confidence``.

    Args:
        bound: "exact", "majorized" or "published".
        dimension: number of coordinates.
        noise_multiplier: b / C.
        sampling_prob: of a record, in each step.
        steps: composed; the simulation's work grows with it.
        delta: at which epsilon is claimed.
        trials: simulated runs, without and with the record together.
        confidence: of the verdict.
        rng: of the simulation.
        progress: called with the number of runs simulated since the last call.
    """
    n = _validate.finite_dimension("dimension", dimension)
    b = _validate.positive("noise_multiplier", noise_multiplier)
    q = _validate.probability("sampling_prob", sampling_prob)
    count = _validate.integer("steps", steps, least=1)
    claimed = _claim(bound, (b, n), q, count, delta)
    v = 1 / math.sqrt(n)

    def losses(present: bool, runs: int) -> NDArray[np.float64]:
        """The whole run as one number, its log-likelihood ratio: post-processing of it."""
        total = np.zeros(runs)
        for _ in range(count):
            released = rng.laplace(scale=b, size=(runs, n))
            if present:
                released[rng.random(runs) < q] += v
            loss = (np.abs(released) - np.abs(released - v)).sum(axis=1) / b
            total += np.logaddexp(math.log1p(-q) if q < 1 else -math.inf, math.log(q) + loss)
        return total

    def draw(present: bool, runs: int) -> NDArray[np.float64]:
        rows = max(1, (1 << 20) // n)
        parts = [losses(present, min(rows, runs - start)) for start in range(0, runs, rows)]
        return np.concatenate(parts)[:, None]

    result = audit_releases(
        draw,
        [Pair("spread", False, True, np.ones(1))],
        claimed_epsilon=claimed,
        delta=delta,
        trials=trials,
        confidence=confidence,
        progress=progress,
    )
    what = f"{bound} bound, {n} coordinates, {count} steps, {trials} simulated runs"
    return replace(result, level="claim", what=what)


def _claim(bound: str, step: tuple[float, int], q: float, steps: int, delta: float) -> float:
    _validate.choice("bound", bound, BOUNDS)
    kinds = {"exact": Laplace, "majorized": MajorizedLaplace, "published": PublishedLaplace}
    with warnings.catch_warnings():
        # The warning is the subject of this audit.
        warnings.simplefilter("ignore", NotAGuaranteeWarning)
        mechanism = kinds[bound](*step)
    return Accountant().compose(mechanism, sampling_prob=q, steps=steps).get_epsilon(delta)
