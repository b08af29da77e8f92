"""The mechanism audit of lap2's own engine: one private step, denoised or as it is.

Where a step makes many independent trials, an event is counted. A denoised release of many
coordinates is a single trial; it is compared with simulated correct ones.
"""

# pyright: basic

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch.utils.data import TensorDataset

from lap2 import _validate
from lap2.audit.controls import Fault
from lap2.audit.mechanism import Pair, audit_mechanism, audit_releases, canary_directions
from lap2.audit.probe import OVERSIZE, EngineSetting, Probe
from lap2.audit.result import Result, combined, judged
from lap2.audit.run import CanaryScores, RunPlan

__all__ = ["audit_engine", "releases_of_an_audit"]


@dataclass(frozen=True)
class _Sizes:
    """How much is done in one audit of the engine."""

    settings: dict[str, tuple[int, float]]
    """Dimension and sampling probability."""
    trials: int
    steps: int
    compared: int = 40

    @classmethod
    def of(cls, denoise: str | float, trials: int, steps: int) -> "_Sizes":
        few = {"2 coordinates": (2, 1.0), "2 coordinates, sampled with probability 1/4": (2, 0.25)}
        if denoise == "none":
            return cls(few | {"64 coordinates": (64, 1.0)}, trials, steps)
        # A release of many is read out as a whole, so that a step makes one trial or a few.
        return cls(few, trials // 5, steps // 3)

    @property
    def releases(self) -> int:
        return len(self.settings) * self.trials + self.steps + self.compared


def releases_of_an_audit(*, denoise: str | float, trials: int, steps: int) -> int:
    """How many releases :func:`audit_engine` makes."""
    return _Sizes.of(denoise, trials, steps).releases


def audit_engine(
    *,
    noise_multiplier: float = 1.0,
    denoise: str | float = "auto",
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
    many coordinates, if they are released as they are; a batch with another record in it, where the
    divisor must not tell; and many records in one release, compared with simulated correct ones,
    which is how too little noise is seen in a denoised release of many coordinates. Canaries are
    spread, sparse and random.

    Formal guarantee:
        For a correct engine the verdict is "violated" with probability at most ``1 - confidence``,
        which is shared by the settings. The claims are the accountant's, for a record whose
        gradient is confined to the setting's coordinates.

    Args:
        noise_multiplier: b / C.
        denoise: as the engine takes it; "auto" is its default release.
        trials: releases in each setting of the first three kinds; a fifth if they are denoised,
            which takes more time.
        steps: releases with another record, each a step of its own (about a millisecond); a third
            if they are denoised.
        delta: of the claims.
        confidence: of the verdict.
        fault: what to break, for a negative control.
        rng: chooses the canaries, and simulates.
        progress: called with the number of releases made since the last call.
    """
    noise = _validate.positive("noise_multiplier", noise_multiplier)
    error = 1 - _validate.open_probability("confidence", confidence)
    _validate.open_probability("delta", delta)
    sizes = _Sizes.of(denoise, trials, steps)
    base = EngineSetting(noise, denoise=denoise, fault=fault or Fault())
    terms = _Terms(delta, 1 - error / (len(sizes.settings) + 2), rng, progress or (lambda _: None))
    results: dict[str, Result] = {}
    for name, (dimension, prob) in sizes.settings.items():
        setting = replace(base, sampling_prob=prob)
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
    """A record against none, in releases of few coordinates or plain ones."""

    def draw(batch: Any, count: int) -> np.ndarray:
        return setting.rows(batch, count, dimension)

    directions = canary_directions(dimension, 1.0, terms.rng)
    return audit_releases(
        draw,
        [Pair(canary, None, direction, direction) for canary, direction in directions.items()],
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
    setting = replace(setting, sampling_prob=0.5)
    rows, width = 128, 64
    plan = RunPlan(width, setting.max_grad_norm, setting.scale, setting.sampling_prob, steps)
    there = np.arange(rows) % 2 == 0
    ids = torch.from_numpy(np.flatnonzero(there))
    wanted = torch.full((len(ids), width), OVERSIZE / width**0.5)
    probe = Probe(setting, TensorDataset(ids, wanted), rows)
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
        claimed_epsilon=setting.claim(width, terms.delta),
        bounds=(),
        checks=observed.compared(),
        check_error=1 - terms.confidence,
    )
