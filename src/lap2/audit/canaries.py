"""Canaries in a training run of lap2's engine: a side-car that leaves the model alone.

A canary record asks for a gradient on an embedding row of its own and none on the model; a real
record does the opposite. So canaries and real records share sampling, clipping, noise and ledger,
and what is released on a canary's row is known exactly for a correct run.
"""

# pyright: basic

import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lap2 import _validate
from lap2.audit.controls import Fault
from lap2.audit.run import CanaryScores, RunPlan
from lap2.train.engine import PrivacyEngine
from lap2.train.poisson import PoissonLoader

__all__ = ["CanaryModel", "train_with_canaries"]


class CanaryModel(nn.Module):
    """A model with room for canaries beside it.

    Args:
        model: any model; it sees every record, and its loss is taken of real ones only.
        canaries: how many.
        width: coordinates of each, split between two layers.
    """

    def __init__(self, model: nn.Module, *, canaries: int, width: int) -> None:
        """Make two embeddings, of the first half of the coordinates and of the second."""
        super().__init__()
        width = _validate.integer("width", width, least=2)
        rows = 1 + _validate.integer("canaries", canaries, least=2)
        self.model = model
        first = (width + 1) // 2
        self.first = nn.Embedding(rows, first, padding_idx=0)
        self.second = nn.Embedding(rows, width - first, padding_idx=0)

    def forward(self, x: Tensor, canary: Tensor) -> tuple[Tensor, Tensor]:
        """The model's output, and for each record the sum of its canary's coordinates."""
        pull = self.first(canary).sum(dim=-1) + self.second(canary).sum(dim=-1)
        return self.model(x), pull

    def loss(self, x: Tensor, y: Tensor, canary: Tensor, *, pull: float) -> Tensor:
        """Mean cross-entropy of real records; canaries pull along their own coordinates."""
        output, along = self(x, canary)
        task = nn.functional.cross_entropy(output, y, reduction="none")
        return torch.where(canary == 0, task, pull * along).mean()

    def released(self, divisor: float) -> np.ndarray:
        """What the last step released on every canary's coordinates, as a sum."""
        parts = [self.first.weight.grad, self.second.weight.grad]
        joined = torch.cat(parts, dim=1)[1:]  # type: ignore[arg-type]
        return joined.numpy().astype(np.float64) * divisor


def train_with_canaries(
    *,
    model: nn.Module,
    features: Tensor,
    labels: Tensor,
    canaries: int = 1000,
    width: int = 8,
    batch_size: int = 100,
    steps: int = 50,
    noise_multiplier: float = 1.0,
    max_grad_norm: float = 1.0,
    learning_rate: float = 0.1,
    fault: Fault | None = None,
    rng: np.random.Generator,
    progress: Callable[[int], None] | None = None,
) -> tuple[CanaryScores, PrivacyEngine]:
    """Train privately on real records and the canaries whose coin came up.

    Args:
        model: a classifier; trained in place.
        features: of the real records.
        labels: of the real records.
        canaries: how many coins are thrown.
        width: coordinates of each canary.
        batch_size: expected, canaries included.
        steps: how many.
        noise_multiplier: b / C.
        max_grad_norm: the clip C.
        learning_rate: of plain SGD.
        fault: what to break, for a negative control. The claim stays that of a correct run.
        rng: throws the coins.
        progress: called with 1 after each step.

    Returns:
        What was released on the canaries' coordinates, and the engine with its ledger. Under a
        fault that changes clip or sampling, the ledger is not the claim.
    """
    fault = fault or Fault()
    steps = _validate.integer("steps", steps, least=1)
    coins = rng.random(_validate.integer("canaries", canaries, least=2)) < 0.5
    data = _data(features, labels, coins)
    records = len(data)
    plan = RunPlan(
        width=width,
        max_grad_norm=max_grad_norm,
        scale=noise_multiplier * max_grad_norm,
        sampling_prob=batch_size / records,
        steps=steps,
    )
    module = CanaryModel(model, canaries=coins.size, width=width)
    engine = PrivacyEngine(sampler=fault.sampler())
    realised_size = records if fault.ignores_sampling else batch_size
    _, optimizer, loader = engine.make_private(
        module=module,
        optimizer=torch.optim.SGD(module.parameters(), lr=learning_rate),
        data_loader=DataLoader(data, batch_size=realised_size),
        noise_multiplier=noise_multiplier / fault.clip_factor,
        max_grad_norm=max_grad_norm * fault.clip_factor,
        denoise="none",
    )
    observed = CanaryScores.empty(plan, coins)
    pull = 10 * max_grad_norm / math.sqrt(width)
    while observed.steps < steps:
        for x, y, canary in loader:
            optimizer.zero_grad()
            module.loss(x, y, canary, pull=pull).backward()
            optimizer.step()
            divisor = float(realised_size)
            if fault.realised_divisor and isinstance(loader, PoissonLoader):
                divisor *= batch_size / max(1, loader.piece_size)
            observed.add(module.released(divisor))
            if progress:
                progress(1)
            if observed.steps == steps:
                break
    return observed, engine


def _data(features: Tensor, labels: Tensor, coins: np.ndarray) -> TensorDataset:
    """Real records with canary 0, then the canaries that are in, each with its own number."""
    inside = torch.from_numpy(np.flatnonzero(coins) + 1)
    blank = features.new_zeros((len(inside), *features.shape[1:]))
    return TensorDataset(
        torch.cat([features, blank]),
        torch.cat([labels, labels.new_zeros(len(inside))]),
        torch.cat([torch.zeros(len(features), dtype=torch.int64), inside]),
    )
