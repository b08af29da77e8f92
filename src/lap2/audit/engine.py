"""The mechanism audit of lap2's own engine: one private step, which releases bits or values.

Where a step makes many independent trials, an event is counted. Bits of many coordinates are a
single trial; they are compared with simulated correct ones.
"""

# pyright: basic

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch.utils.data import TensorDataset

from lap2 import _validate
from lap2.accountant import Accountant
from lap2.audit.controls import Fault
from lap2.audit.mechanism import Pair, audit_mechanism, audit_releases, canary_directions
from lap2.audit.probe import OVERSIZE, EngineSetting, Probe
from lap2.audit.result import Result, combined, judged
from lap2.audit.run import CanaryScores, RunPlan
from lap2.train.readout import ReleaseName

__all__ = ["audit_engine", "releases_of_an_audit"]


@dataclass(frozen=True)
class _Sizes:
    """How much is done in one audit of the engine."""

    settings: dict[str, tuple[int, float, int]]
    """Dimension, sampling probability and copies."""
    trials: int
    steps: int
    compared: int = 40

    @classmethod
    def of(cls, release: ReleaseName, trials: int, steps: int) -> "_Sizes":
        _validate.choice("release", release, ("bits", "values"))
        sampled = "2 coordinates, sampled with probability 1/4"
        few = {"2 coordinates": (2, 1.0, 1), sampled: (2, 0.25, 1)}
        if release == "values":
            return cls(few | {"64 coordinates": (64, 1.0, 1)}, trials, steps)
        # Bits of many coordinates are turned back as a whole, so that a step makes a few trials.
        return cls(few | {"2 coordinates, 2 copies": (2, 1.0, 2)}, trials // 5, steps // 3)

    @property
    def releases(self) -> int:
        return len(self.settings) * self.trials + self.steps + self.compared


def releases_of_an_audit(*, release: ReleaseName, trials: int, steps: int) -> int:
    """How many releases :func:`audit_engine` makes."""
    return _Sizes.of(release, trials, steps).releases


def audit_engine(
    *,
    noise_multiplier: float = 1.0,
    release: ReleaseName = "bits",
    trials: int = 200_000,
    steps: int = 4000,
    delta: float = 1e-5,
    confidence: float = 0.999,
    fault: Fault | None = None,
    rng: np.random.Generator,
    progress: Callable[[int], None] | None = None,
) -> Result:
    """Audit one private step of lap2's engine in several settings.

    Few coordinates, where epsilon is closest to what an audit can reach; few, and a sampled step;
    two copies of few coordinates, if bits are released, or else many; a batch with another record
    in it, where the divisor must not tell; and many records in one release, compared with simulated
    correct ones, which is how too little noise is seen in bits of many coordinates. Canaries are
    spread, sparse and random; and spread with alternating signs, which coordinates that share a bit
    do not hide.

    Formal guarantee:
        For a correct engine the verdict is "violated" with probability at most ``1 - confidence``,
        which is shared by the settings. The claims are the accountant's, for a record whose
        gradient is confined to the setting's coordinates.

    Args:
        noise_multiplier: b / C.
        release: "bits", as the engine by default, or "values".
        trials: releases in each setting of the first three kinds; a fifth for bits, which take more
            time.
        steps: releases with another record, each a step of its own (about a millisecond); a third
            for bits.
        delta: of the claims.
        confidence: of the verdict.
        fault: what to break, for a negative control.
        rng: chooses the canaries, and simulates.
        progress: called with the number of releases made since the last call.
    """
    noise = _validate.positive("noise_multiplier", noise_multiplier)
    error = 1 - _validate.open_probability("confidence", confidence)
    _validate.open_probability("delta", delta)
    sizes = _Sizes.of(release, trials, steps)
    base = EngineSetting(noise, release=release, fault=fault or Fault())
    terms = _Terms(delta, 1 - error / (len(sizes.settings) + 2), rng, progress or (lambda _: None))
    results: dict[str, Result] = {}
    for name, (dimension, prob, copies) in sizes.settings.items():
        setting = replace(base, sampling_prob=prob, copies=copies)
        results[name] = _count(setting, dimension, sizes.trials, terms)
    # Twice the noise: few trials refute a small claim sooner.
    loud = replace(base, noise_multiplier=2 * noise)
    results["another record in the batch"] = _count_beside(loud, sizes.steps, terms)
    results["many records"] = _compare(base, sizes.compared, terms)
    return combined(
        results,
        what=f"the engine's own step, {sizes.releases} releases in {len(results)} settings",
        confidence=confidence,
    )


@dataclass(frozen=True)
class _Terms:
    delta: float
    confidence: float
    rng: np.random.Generator
    progress: Callable[[int], None]


def _count(setting: EngineSetting, dimension: int, trials: int, terms: _Terms) -> Result:
    """A record against none, in releases whose rows are apart."""

    def draw(batch: Any, count: int) -> np.ndarray:
        return setting.rows(batch, count, dimension)

    directions = canary_directions(dimension, 1.0, terms.rng)
    directions["alternating"] = directions["spread"] * (-1.0) ** np.arange(dimension)
    return audit_releases(
        draw,
        [Pair(name, None, v, v, setting.score(v)) for name, v in directions.items()],
        claimed_epsilon=setting.claim(dimension, terms.delta),
        delta=terms.delta,
        trials=trials,
        confidence=terms.confidence,
        scale=setting.scale,
        gdp_shape=dimension > 2,
        progress=terms.progress,
    )


def _count_beside(setting: EngineSetting, steps: int, terms: _Terms) -> Result:
    """One other record, and the canary: the release must move by the canary alone."""
    directions = canary_directions(64, 1.0, terms.rng)
    other = torch.from_numpy(directions["random"]).float()[None]
    both = torch.cat([other, torch.from_numpy(directions["spread"]).float()[None]])
    return audit_mechanism(
        setting.step(),
        [Pair("spread", other, both, directions["spread"])],
        claimed_epsilon=setting.claim(64, terms.delta),
        delta=terms.delta,
        trials=steps,
        confidence=terms.confidence,
        scale=setting.scale,
        progress=terms.progress,
    )


def _compare(setting: EngineSetting, steps: int, terms: _Terms) -> Result:
    """Many records in every release, half of those there might be, against correct releases."""
    setting = replace(setting, sampling_prob=0.5, copies="auto")
    rows, width = 128, 64
    plan = RunPlan(width, setting.max_grad_norm, setting.scale, setting.sampling_prob, steps)
    there = np.arange(rows) % 2 == 0
    ids = torch.from_numpy(np.flatnonzero(there))
    wanted = torch.full((len(ids), width), OVERSIZE / width**0.5)
    data = TensorDataset(ids, wanted)
    probe = Probe(setting, data, rows)
    step = Probe(replace(setting, fault=Fault()), data, rows).reference.mechanism
    claim = Accountant().compose(step, sampling_prob=plan.sampling_prob)
    observed = CanaryScores(plan, there, rng=terms.rng)
    observed.checks.append(probe.length_check(terms.rng))
    for _ in range(steps):
        correct = probe.correct(terms.rng)
        observed.add(probe.release(), correct=correct)
        terms.progress(1)
    return judged(
        level="mechanism",
        what=f"{steps} releases of {rows} rows, compared with correct ones",
        delta=terms.delta,
        confidence=terms.confidence,
        claimed_epsilon=claim.get_epsilon(terms.delta),
        bounds=(),
        checks=observed.compared(),
        check_error=1 - terms.confidence,
    )
