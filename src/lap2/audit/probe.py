"""lap2's own engine under the mechanism audit: the real loader, clipping, noise and ledger.

Records are given any gradient one likes through an embedding: the loss of a record is the inner
product of its row with the wanted gradient. If every record has a row of its own, one step of the
engine makes thousands of independent trials, because each record is sampled and clipped by itself
and each coordinate has its own noise.
"""

# pyright: basic

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lap2 import _validate
from lap2.accountant import Accountant
from lap2.audit.controls import FAULTS, Fault
from lap2.audit.mechanism import Pair, audit_mechanism, audit_releases, canary_directions
from lap2.audit.result import Bound, Result, judged
from lap2.mechanism import Laplace
from lap2.train.engine import PrivacyEngine
from lap2.train.poisson import PoissonLoader

__all__ = ["EngineSetting", "audit_engine"]

_OVERSIZE = 10.0
"""Records ask for a gradient this many clips long, so that clipping has something to do."""


class _Layers(nn.Module):
    """Two embeddings side by side: two layers, so that noise can be missing on one."""

    def __init__(self, rows: int, width: int) -> None:
        super().__init__()
        first = (width + 1) // 2
        self.parts = nn.ModuleList(
            nn.Embedding.from_pretrained(torch.zeros(rows, part), freeze=False)
            for part in (first, width - first)
            if part
        )

    def forward(self, rows: Tensor) -> Tensor:
        return torch.cat([part(rows) for part in self.parts], dim=-1)


@dataclass(frozen=True)
class EngineSetting:
    """What the engine is asked to do, and what is wrong with it.

    Attributes:
        noise_multiplier: b / C as claimed.
        max_grad_norm: the clip C as claimed.
        sampling_prob: as claimed.
        fault: what is deliberately broken; nothing by default.
    """

    noise_multiplier: float
    max_grad_norm: float = 1.0
    sampling_prob: float = 1.0
    fault: Fault = FAULTS["none"]

    @property
    def scale(self) -> float:
        """The claimed Laplace scale."""
        return self.noise_multiplier * self.max_grad_norm

    def claim(self, dimension: int, delta: float) -> float:
        """What the accountant says of a record whose gradient has ``dimension`` coordinates."""
        step = Laplace(self.noise_multiplier, dimension)
        return Accountant().compose(step, sampling_prob=self.sampling_prob).get_epsilon(delta)

    def rows(self, batch: np.ndarray | None, count: int, dimension: int) -> np.ndarray:
        """Independent releases, ``count`` rows, of no record or of one with gradient ``batch``.

        In truth one step on ``count`` records, each with a row of its own, or all with row 0,
        which is left out.
        """
        ids = torch.zeros(count, dtype=torch.int64)
        if batch is not None:
            ids = torch.arange(1, count + 1)
        wanted = np.zeros(dimension) if batch is None else batch
        grads = torch.from_numpy(wanted * _OVERSIZE).float().expand(count, -1)
        module = _Layers(count + 1, dimension)
        step = self._private(module, TensorDataset(ids, grads), nominal=None)
        return step()[1:].numpy().astype(np.float64)

    def step(self) -> Callable[[Tensor], Tensor]:
        """The engine as a callable: from the records' gradients, (records, n), to one release.

        Each batch, known by its identity, has an engine of its own that goes on from step to step.
        """
        engines: dict[int, tuple[Tensor, Callable[[], Tensor]]] = {}

        def release(batch: Tensor) -> Tensor:
            if id(batch) not in engines:
                data = TensorDataset(torch.zeros(len(batch), dtype=torch.int64), batch * _OVERSIZE)
                module = _Layers(1, batch.shape[1])
                engines[id(batch)] = batch, self._private(module, data, nominal=1)
            return engines[id(batch)][1]()[0]

        return release

    def _private(
        self, module: _Layers, data: TensorDataset, *, nominal: int | None
    ) -> Callable[[], Tensor]:
        """One noisy sum; a faulty one is ``nominal`` (or the expected size) times a mean."""
        fault, records = self.fault, len(data)
        # Rounded down: a record is sampled no more often than is claimed.
        expected = max(1, math.floor(self.sampling_prob * records))
        batch_size = records if fault.ignores_sampling else expected
        _, optimizer, loader = PrivacyEngine(sampler=fault.sampler()).make_private(
            module=module,
            optimizer=torch.optim.SGD(module.parameters(), lr=0.0),
            data_loader=DataLoader(data, batch_size=batch_size),
            noise_multiplier=self.noise_multiplier / fault.clip_factor,
            max_grad_norm=self.max_grad_norm * fault.clip_factor,
            denoise="none",
        )

        def release() -> Tensor:
            ids, wanted = next(iter(loader))
            optimizer.zero_grad()
            (module(ids) * wanted).sum(dim=1).mean().backward()
            optimizer.step()
            grads: list[Any] = [part.weight.grad for part in module.parts]
            noisy = torch.cat(grads, dim=1) * batch_size
            if fault.realised_divisor and isinstance(loader, PoissonLoader):
                noisy = noisy * ((nominal or expected) / max(1, loader.piece_size))
            return noisy

        return release


def audit_engine(
    *,
    noise_multiplier: float = 1.0,
    trials: int = 200_000,
    steps: int = 4000,
    delta: float = 1e-5,
    confidence: float = 0.999,
    fault: Fault | None = None,
    rng: np.random.Generator,
    progress: Callable[[int], None] | None = None,
) -> Result:
    """Audit one private step of lap2's engine in four settings.

    Few coordinates, where epsilon is closest to what an audit can reach; many coordinates; a
    sampled step; and a batch with another record in it, where the divisor must not tell. Canaries
    are spread, sparse and random.

    Formal guarantee:
        For a correct engine the verdict is "violated" with probability at most ``1 - confidence``,
        which is shared by the four settings. The claims are the accountant's, for a record whose
        gradient is confined to the setting's coordinates.

    Args:
        noise_multiplier: b / C.
        trials: releases in each of the first three settings.
        steps: releases in the fourth, each a step of its own (about a millisecond).
        delta: of the claims.
        confidence: of the verdict.
        fault: what to break, for a negative control.
        rng: chooses the canaries.
        progress: called with the number of releases made since the last call.
    """
    noise = _validate.positive("noise_multiplier", noise_multiplier)
    error = 1 - _validate.open_probability("confidence", confidence)
    _validate.open_probability("delta", delta)
    fault = fault or Fault()
    settings = {
        "2 coordinates": (2, EngineSetting(noise, fault=fault)),
        "64 coordinates": (64, EngineSetting(noise, fault=fault)),
        "sampled with probability 1/4": (2, EngineSetting(noise, sampling_prob=0.25, fault=fault)),
    }
    results: dict[str, Result] = {}
    for name, (dimension, setting) in settings.items():
        pairs = [
            Pair(canary, None, direction, direction)
            for canary, direction in canary_directions(dimension, 1.0, rng).items()
        ]

        def draw(
            batch: Any, count: int, setting: EngineSetting = setting, dimension: int = dimension
        ) -> np.ndarray:
            return setting.rows(batch, count, dimension)

        results[name] = audit_releases(
            draw,
            pairs,
            claimed_epsilon=setting.claim(dimension, delta),
            delta=delta,
            trials=trials,
            confidence=1 - error / 4,
            scale=setting.scale,
            gdp_shape=dimension > 2,
            progress=progress,
        )
    # Twice the noise: few trials refute a small claim sooner.
    alone = EngineSetting(2 * noise, fault=fault)
    results["another record in the batch"] = _audit_batch(
        alone, steps=steps, delta=delta, confidence=1 - error / 4, rng=rng, progress=progress
    )
    return _together(results, trials, steps, delta, confidence)


def _audit_batch(
    setting: EngineSetting,
    *,
    steps: int,
    delta: float,
    confidence: float,
    rng: np.random.Generator,
    progress: Callable[[int], None] | None,
) -> Result:
    """One other record, and the canary: the release must move by the canary alone."""
    directions = canary_directions(64, 1.0, rng)
    other = torch.from_numpy(directions["random"]).float()[None]
    both = torch.cat([other, torch.from_numpy(directions["spread"]).float()[None]])
    return audit_mechanism(
        setting.step(),
        [Pair("spread", other, both, directions["spread"])],
        claimed_epsilon=setting.claim(64, delta),
        delta=delta,
        trials=steps,
        confidence=confidence,
        scale=setting.scale,
        progress=progress,
    )


def _together(
    results: dict[str, Result], trials: int, steps: int, delta: float, confidence: float
) -> Result:
    """One verdict: that of the setting that exceeds its claim by the largest factor."""
    worst = max(
        results, key=lambda name: results[name].epsilon_lower / results[name].claimed_epsilon
    )
    facts: dict[str, float] = {}
    for name, result in results.items():
        facts[f"{name}: claimed"] = result.claimed_epsilon
        facts[f"{name}: at least"] = result.epsilon_lower
    return judged(
        level="mechanism",
        what=(
            f"the engine's own step, {trials} releases in each of three settings and {steps} in a "
            f"fourth; shown is the worst, {worst}: {results[worst].what}"
        ),
        delta=delta,
        confidence=confidence,
        claimed_epsilon=results[worst].claimed_epsilon,
        bounds=tuple(
            Bound(f"{bound.method}, {worst}", bound.epsilon_lower, bound.assumption)
            for bound in results[worst].bounds
        ),
        facts=facts,
    )
