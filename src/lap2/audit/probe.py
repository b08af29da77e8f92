"""lap2's own engine under the mechanism audit: real loader, clipping, noise, readout and ledger.

Records are given any gradient one likes through an embedding: the loss of a record is the inner
product of its row with the wanted gradient. If every record has a row of its own, one step of the
engine makes many trials at once, because each record is sampled and clipped by itself and each
coordinate has its own noise. They are independent if the basis of the noise leaves rows apart.
"""

# pyright: basic

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lap2.accountant import Accountant
from lap2.audit.bits import likelihood_ratio
from lap2.audit.controls import FAULTS, Fault
from lap2.audit.reference import Reference, size_of_sample
from lap2.audit.result import Check
from lap2.audit.run import Correct
from lap2.mechanism import Laplace, Mechanism
from lap2.train.engine import PrivacyEngine
from lap2.train.readout import Copies, ReleaseName

__all__ = ["EngineSetting", "Probe"]

OVERSIZE = 10.0
"""Records ask for a gradient this many clips long, so that clipping has something to do."""
_UNMIXED = 31
"""Coordinates of a release of bits in one step that are not mixed with each other."""


class _Layers(nn.Module):
    """Two embeddings side by side: two layers, so that noise can be missing on one."""

    def __init__(self, rows: int, width: int) -> None:
        super().__init__()
        self.shape = rows, width
        first = (width + 1) // 2
        self.parts = nn.ModuleList(
            nn.Embedding.from_pretrained(torch.zeros(rows, part), freeze=False)
            for part in (first, width - first)
            if part
        )

    @property
    def _weights(self) -> list[Tensor]:
        return [part.weight for part in self.parts]  # pyright: ignore[reportReturnType]

    def forward(self, rows: Tensor) -> Tensor:
        return torch.cat([part(rows) for part in self.parts], dim=-1)

    def sums(self, rows: np.ndarray) -> dict[Tensor, Tensor]:
        """By parameter: sums on the coordinates of each row."""
        parts = torch.from_numpy(rows).split([w.shape[1] for w in self._weights], dim=1)
        return dict(zip(self._weights, parts, strict=True))

    def rows(self, values: Mapping[Tensor, Any]) -> Tensor:
        """The opposite of :meth:`sums`."""
        return torch.cat([values[weight] for weight in self._weights], dim=1)


@dataclass(frozen=True)
class EngineSetting:
    """What the engine is asked to do, and what is wrong with it.

    Attributes:
        noise_multiplier: b / C as claimed.
        max_grad_norm: the clip C as claimed.
        sampling_prob: as claimed.
        release: "bits" or "values".
        copies: of each coordinate, whose signs are released; "auto" as in the engine.
        fault: what is deliberately broken; nothing by default.
    """

    noise_multiplier: float
    max_grad_norm: float = 1.0
    sampling_prob: float = 1.0
    release: ReleaseName = "values"
    copies: Copies = 1
    fault: Fault = FAULTS["none"]

    @property
    def scale(self) -> float:
        """The claimed Laplace scale."""
        return self.noise_multiplier * self.max_grad_norm

    def claim(self, dimension: int, delta: float) -> float:
        """What the accountant says of a record whose gradient has ``dimension`` coordinates."""
        honest = replace(self, fault=Fault())
        step: Mechanism = Laplace(self.noise_multiplier, dimension * self._times)
        if not honest.are_apart(dimension):  # it has all coordinates there are
            step = Probe(honest, _records(None, 1, dimension), 1).reference.mechanism
        return Accountant().compose(step, sampling_prob=self.sampling_prob).get_epsilon(delta)

    def rows(self, batch: np.ndarray | None, count: int, dimension: int) -> np.ndarray:
        """Independent releases, ``count`` rows, of no record or of one with gradient ``batch``.

        In truth steps on many records, each with a row of its own, or without a gradient; of bits
        on a few, or on one if their coordinates would be mixed.
        """
        together = self._together(count, dimension)
        # One record alone could not be sampled with a small probability.
        blank = max(0, math.ceil(1 / self.sampling_prob) - together)
        probe = Probe(self, _records(batch, together, dimension, blank), together)
        parts = [probe.release() for _ in range(0, count, together)]
        return np.concatenate(parts)[:count]

    def score(self, shift: np.ndarray) -> Callable[[np.ndarray], np.ndarray] | None:
        """The log-likelihood ratio of released rows, if these are what bits tell."""
        if self.release == "values" or not self.are_apart(shift.size):
            return None
        return likelihood_ratio(shift, copies=self._times, scale=self.scale)

    def are_apart(self, dimension: int) -> bool:
        """Whether rows of so many coordinates are released apart from each other."""
        together = self._together(2, dimension)
        return Probe(self, _records(None, together, dimension), together).keeps_apart()

    def _together(self, count: int, dimension: int) -> int:
        """How many rows one step may release."""
        return count if self.release == "values" else max(1, _UNMIXED // dimension)

    @property
    def _times(self) -> int:
        if self.release == "values":
            return 1
        if self.copies == "auto":
            raise ValueError("copies must be a number where rows are counted, got 'auto'")
        return self.copies

    def step(self) -> Callable[[Tensor], np.ndarray]:
        """The engine as a callable: from the records' gradients, (records, n), to one release.

        Each batch, known by its identity, has an engine of its own.
        """
        engines: dict[int, tuple[Tensor, Probe]] = {}

        def release(batch: Tensor) -> np.ndarray:
            if id(batch) not in engines:
                data = TensorDataset(torch.zeros(len(batch), dtype=torch.int64), batch * OVERSIZE)
                engines[id(batch)] = batch, Probe(self, data, 1, nominal=1)
            return engines[id(batch)][1].release()[0]

        return release


class Probe:
    """An engine, and its release of a step as a sum for each row.

    Args:
        setting: what is claimed, and what is wrong.
        data: numbers of rows, and the gradients wanted on them.
        rows: how many there are.
        nominal: a release with a realised divisor is this times a mean, instead of the expected
            number of records.
    """

    def __init__(
        self, setting: EngineSetting, data: TensorDataset, rows: int, *, nominal: int | None = None
    ) -> None:
        fault, records = setting.fault, len(data)
        # Rounded down: a record is sampled no more often than is claimed.
        expected = max(1, math.floor(setting.sampling_prob * records))
        batch_size = records if fault.ignores_sampling else expected
        self._nominal = (nominal or expected) if fault.realised_divisor else None
        self.module = _Layers(rows, data.tensors[1].shape[1])
        engine = PrivacyEngine(sampler=fault.sampler(setting.release))
        _, self._optimizer, self._loader = engine.make_private(
            module=self.module,
            optimizer=torch.optim.SGD(self.module.parameters(), lr=0.0),
            data_loader=DataLoader(data, batch_size=batch_size),
            noise_multiplier=setting.noise_multiplier / fault.clip_factor,
            max_grad_norm=setting.max_grad_norm * fault.clip_factor,
            release=setting.release,
            copies=setting.copies if setting.release == "bits" else "auto",
            rehearse=False,  # what each fetched batch releases is looked at
        )
        self.reference = Reference(engine, scale=setting.scale)

    def release(self) -> np.ndarray:
        """One step."""
        ids, wanted = next(iter(self._loader))
        factor = 1.0
        if self._nominal is not None:
            factor = self._nominal / max(1, size_of_sample(self._loader))
        self._optimizer.zero_grad()
        (self.module(ids) * wanted).sum(dim=1).mean().backward()
        self._optimizer.step()
        noisy = self.module.rows({p: p.grad for p in self.module.parameters()})
        return noisy.double().numpy() * (self.reference.divisor * factor)

    def correct(self, rng: np.random.Generator) -> Correct:
        """What a correct step would do next."""
        made = self.reference.now(rng)

        def release(sums: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
            return self.module.rows(made(self.module.sums(sums))).numpy(), np.zeros(0)

        def numbers(rows: np.ndarray, _model: np.ndarray) -> dict[str, float]:
            return self.reference.numbers(self.module.sums(rows))

        return Correct(release, numbers=numbers)

    def length_check(self, rng: np.random.Generator) -> Check:
        """Whether noise is added to sums that are as long as what was clipped."""
        one = np.zeros(self.module.shape)
        one[rng.integers(len(one))] = 1.0
        sums = {"a record": one, "a random direction": rng.standard_normal(self.module.shape)}
        return self.reference.length_check({k: self.module.sums(v) for k, v in sums.items()})

    def keeps_apart(self) -> bool:
        """Whether rows are made noisy as so many coordinates each, apart from each other."""
        one, others = np.zeros(self.module.shape), np.ones(self.module.shape)
        one[0], others[0] = 1.0, 0.0
        first, second = (self.reference.footprint(self.module.sums(part)) for part in (one, others))
        return not first & second and len(first) == self.module.shape[1]


def _records(batch: np.ndarray | None, count: int, dimension: int, blank: int = 0) -> TensorDataset:
    """So many records with this gradient or none, each with a row of its own; and blank ones."""
    wanted = np.zeros((count + blank, dimension))
    wanted[:count] = 0.0 if batch is None else batch * OVERSIZE
    rows = torch.arange(count + blank) * (torch.arange(count + blank) < count)
    return TensorDataset(rows, torch.from_numpy(wanted).float())
