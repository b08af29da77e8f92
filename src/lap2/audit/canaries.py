"""Canaries in a training run of lap2's engine: a side-car that leaves the model alone.

A canary record asks for a gradient on an embedding row of its own and none on the model; a real
record does the opposite. So canaries and real records share sampling, clipping, noise, readout
and ledger, and what a canary adds to the sum is known exactly for a correct run. What real records
add to it is computed a second time, from each record by itself.
"""

# pyright: basic

import copy
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lap2 import _validate
from lap2.audit.controls import Fault
from lap2.audit.reference import Reference, size_of_sample
from lap2.audit.result import Check
from lap2.audit.run import CanaryScores, Correct, RunPlan
from lap2.mechanism import Mechanism
from lap2.train.engine import PrivacyEngine
from lap2.train.readout import ReleaseName

__all__ = ["CanaryModel", "step_of_a_run", "train_with_canaries"]


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

    @property
    def _own(self) -> list[Tensor]:
        return [p for p in self.model.parameters() if p.requires_grad]

    def sums(self, canaries: np.ndarray, model: np.ndarray) -> dict[Tensor, Tensor]:
        """By parameter: sums on the canaries' coordinates, a row each, and on the model's."""
        blank = np.zeros((1, canaries.shape[1]))  # of the row that real records have
        rows, width = torch.from_numpy(np.vstack([blank, canaries])), self.first.embedding_dim
        parts = torch.from_numpy(model).split([p.numel() for p in self._own])
        found = {p: part.view_as(p) for p, part in zip(self._own, parts, strict=True)}
        return {**found, self.first.weight: rows[:, :width], self.second.weight: rows[:, width:]}

    def coordinates(self, values: Mapping[Tensor, Any]) -> tuple[np.ndarray, np.ndarray]:
        """The opposite of :meth:`sums`."""
        rows = torch.cat([values[self.first.weight], values[self.second.weight]], dim=1)[1:]
        model = [values[p].double().flatten().numpy() for p in self._own]
        return rows.double().numpy(), np.concatenate([np.zeros(0), *model])


class _OneByOne:
    """Clipped gradients of real records on the model's parameters, each record by itself.

    Computed by torch's own functions on a copy of the model, from which an engine has not yet
    taken anything over.
    """

    def __init__(self, model: nn.Module, features: Tensor, labels: Tensor, clip: float) -> None:
        self._model, self._data, self._clip = copy.deepcopy(model), (features, labels), clip

    def gradients(self, model: nn.Module) -> np.ndarray:
        """With the parameters that ``model`` has now: (records, coordinates)."""
        trained = {n: p.detach() for n, p in model.named_parameters() if p.requires_grad}
        fresh = copy.deepcopy(self._model)  # that remembers no other record

        def loss(params: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
            output = torch.func.functional_call(fresh, params, (x[None],))
            return nn.functional.cross_entropy(output, y[None])

        each = torch.func.vmap(
            torch.func.grad(loss), in_dims=(None, 0, 0), randomness="different", chunk_size=1024
        )
        parts = [part.double().flatten(1) for part in each(trained, *self._data).values()]
        found = torch.cat(parts, dim=1).numpy() if parts else np.zeros((len(self._data[0]), 0))
        found[~np.isfinite(found).all(axis=1)] = 0.0
        norms = np.linalg.norm(found, axis=1, keepdims=True)
        return found * (self._clip / np.maximum(norms, self._clip))


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
    release: ReleaseName = "bits",
    learning_rate: float = 0.1,
    fault: Fault | None = None,
    rng: np.random.Generator,
    progress: Callable[[int], None] | None = None,
) -> tuple[CanaryScores, PrivacyEngine]:
    """Train privately on real records and the canaries whose coin came up.

    Args:
        model: a classifier; trained in place. Gradients of its records are also computed one by
            one, all of them in every step, so it should be small, and torch.func must be able to.
        features: of the real records.
        labels: of the real records.
        canaries: how many coins are thrown.
        width: coordinates of each canary.
        batch_size: expected, canaries included.
        steps: how many.
        noise_multiplier: b / C.
        max_grad_norm: the clip C.
        release: "bits", as the engine by default, or "values".
        learning_rate: of plain SGD.
        fault: what to break, for a negative control. The claim stays that of a correct run.
        rng: throws the coins and simulates correct releases.
        progress: called with 1 after each step.

    Returns:
        What was released, compared with correct releases, and the engine with its ledger. Under a
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
    observed = CanaryScores(plan, coins, rng=rng)
    real = _OneByOne(model, features, labels, max_grad_norm)
    module = CanaryModel(model, canaries=coins.size, width=width)
    engine = PrivacyEngine(sampler=fault.sampler(release))
    realised_size = records if fault.ignores_sampling else batch_size
    _, optimizer, loader = engine.make_private(
        module=module,
        optimizer=torch.optim.SGD(module.parameters(), lr=learning_rate),
        data_loader=DataLoader(data, batch_size=realised_size),
        noise_multiplier=noise_multiplier / fault.clip_factor,
        max_grad_norm=max_grad_norm * fault.clip_factor,
        release=release,
        rehearse=False,  # what each fetched batch releases is looked at
    )
    reference = Reference(engine, scale=plan.scale)
    observed.checks.append(_length_check(reference, module, plan, coins.size, rng))
    pull = 10 * max_grad_norm / math.sqrt(width)
    while observed.steps < steps:
        for x, y, canary in loader:
            divisor = reference.divisor
            if fault.realised_divisor:
                divisor *= batch_size / max(1, size_of_sample(loader))
            optimizer.zero_grad()
            module.loss(x, y, canary, pull=pull).backward()
            correct = _correct(reference, module, real, plan, rng)
            optimizer.step()
            released, own = module.coordinates({p: p.grad for p in module.parameters()})
            observed.add(released * divisor, own * divisor, correct=correct)
            if progress:
                progress(1)
            if observed.steps == steps:
                break
    return observed, engine


def step_of_a_run(
    model: nn.Module,
    *,
    canaries: int,
    width: int,
    noise_multiplier: float,
    batch_size: int,
    release: ReleaseName,
) -> Mechanism:
    """What a correct run of :func:`train_with_canaries` enters in its ledger for each step."""
    module = CanaryModel(copy.deepcopy(model), canaries=canaries, width=width)
    engine = PrivacyEngine()
    engine.make_private(
        module=module,
        optimizer=torch.optim.SGD(module.parameters(), lr=0.0),
        data_loader=DataLoader(TensorDataset(torch.zeros(batch_size)), batch_size=batch_size),
        noise_multiplier=noise_multiplier,
        max_grad_norm=1.0,
        release=release,
        rehearse=False,
    )
    return Reference(engine, scale=noise_multiplier).mechanism


def _correct(
    reference: Reference,
    module: CanaryModel,
    real: _OneByOne,
    plan: RunPlan,
    rng: np.random.Generator,
) -> Correct:
    """What a correct step would do next."""
    made, gradients = reference.now(rng), real.gradients(module.model)

    def release(canaries: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        sampled = rng.random(len(gradients)) < plan.sampling_prob
        return module.coordinates(made(module.sums(canaries, sampled @ gradients)))

    def numbers(canaries: np.ndarray, model: np.ndarray) -> dict[str, float]:
        return reference.numbers(module.sums(canaries, model))

    return Correct(release, plan.sampling_prob * gradients.sum(axis=0), numbers)


def _length_check(
    reference: Reference,
    module: CanaryModel,
    plan: RunPlan,
    canaries: int,
    rng: np.random.Generator,
) -> Check:
    """Whether records are as long where noise is added as where they are clipped."""
    model = sum(p.numel() for p in module.model.parameters() if p.requires_grad)
    one = np.zeros((canaries, plan.width))
    one[rng.integers(canaries)] = plan.shift
    dense = rng.standard_normal((canaries, plan.width)), rng.standard_normal(model)
    return reference.length_check(
        {
            "a canary": module.sums(one, np.zeros(model)),
            "a random direction": module.sums(*dense),
        }
    )


def _data(features: Tensor, labels: Tensor, coins: np.ndarray) -> TensorDataset:
    """Real records with canary 0, then the canaries that are in, each with its own number."""
    inside = torch.from_numpy(np.flatnonzero(coins) + 1)
    blank = features.new_zeros((len(inside), *features.shape[1:]))
    return TensorDataset(
        torch.cat([features, blank]),
        torch.cat([labels, labels.new_zeros(len(inside))]),
        torch.cat([torch.zeros(len(features), dtype=torch.int64), inside]),
    )
