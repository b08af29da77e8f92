"""How far one record moves a release, and loops as users write them."""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from lap2.train import BookkeepingError, PrivacyEngine

DELTA = 1e-5


class NoNoise:
    """Noise that is none; keeps the sums it was to be added to, one vector for each release."""

    is_secure = False

    def __init__(self):
        self.sums: list[Tensor] = []

    def added_sensitivity(self, _scale, _size):
        return 0.0

    def add(self, array, _scale):
        self.sums.append(torch.cat([t.detach().double().flatten() for t in array]))
        return 0.0


@dataclass
class Run:
    """A model made private, and what it has released so far."""

    engine: PrivacyEngine
    model: nn.Module
    optimizer: torch.optim.Optimizer
    loader: Any
    clip: float
    noise: NoNoise = field(repr=False)

    @property
    def sums(self):
        return self.noise.sums

    @property
    def steps(self):
        """Steps in the ledger."""
        return self.engine.accountant.steps

    @property
    def rounding(self):
        """The share of the clip that the statement allows rounding, where it allows any."""
        return self.engine.statement(DELTA).rounding

    def train(self, loss_of, *, passes=1):
        train(self.engine, self.model, self.optimizer, self.loader, loss_of, passes=passes)
        return self


def private(
    model: nn.Module,
    data: Dataset | DataLoader,
    *,
    clip: float = 1.0,
    lr: float = 0.0,
    batch_size: int | None = None,
    collate_fn: Callable | None = None,
    num_workers: int = 0,
    optimizer: torch.optim.Optimizer | None = None,
    **options: Any,
) -> Run:
    """Make a model private, without noise and, unless told otherwise, with every record in.

    Args:
        model: as the user has it.
        data: a data set, or the user's own loader.
        clip: C.
        lr: zero keeps the weights, so that two runs can be compared in every step.
        batch_size: all records, if it is not given.
        collate_fn: the user's own.
        num_workers: of the user's own loader.
        optimizer: the user's own.
        options: of ``make_private``.
    """
    if not isinstance(data, DataLoader):
        size = batch_size or len(data)  # pyright: ignore[reportArgumentType]
        data = DataLoader(data, size, collate_fn=collate_fn, num_workers=num_workers)
    noise = NoNoise()
    engine = PrivacyEngine(sampler=noise)
    model, optimizer, loader = engine.make_private(
        module=model,
        optimizer=optimizer or torch.optim.SGD(trained(model), lr=lr),
        data_loader=data,
        noise_multiplier=1.0,
        max_grad_norm=clip,
        **{"release": "values", **options},
    )
    return Run(engine, model, optimizer, loader, clip, noise)


def trained(model):
    return [p for p in model.parameters() if p.requires_grad]


def train(engine, model, optimizer, loader, loss_of, *, passes=1):
    """The loop of a user who has not heard of rehearsals.

    Args:
        engine: whose ``backward`` takes the losses of single records.
        model: private.
        optimizer: private.
        loader: private.
        loss_of: from the model and a batch to a loss, or to the losses of its records.
        passes: over the loader.
    """
    for _ in range(passes):
        for batch in loader:
            optimizer.zero_grad()
            loss = loss_of(model, batch)
            if loss.dim():
                engine.backward(loss)
            else:
                loss.backward()
            optimizer.step()


def moved(one: Run, other: Run) -> float:
    """How far one record moved a release, in clips: the farthest of all steps.

    Args:
        one: after training.
        other: of the same model, after training on a data set with one record more or less.
    """
    assert len(one.sums) == len(other.sums) > 0, "nothing was released"
    pairs = zip(one.sums, other.sums, strict=True)
    return max(float((a - b).norm()) for a, b in pairs) / one.clip


def assert_bounded(make_run: Callable[[Any], Run], with_record: Any, without_record: Any) -> float:
    """One record moves no release by more than is accounted for, and rounding has a small part."""
    one, other = make_run(with_record), make_run(without_record)
    found = moved(one, other)
    assert 0 <= one.rounding <= 1e-3, one.rounding
    assert found <= 1 + one.rounding, f"one record moved a release by {found} clips"
    return found


def assert_refused(
    run: Run, loss_of: Callable, words: str, *, steps: int | None = 0, passes: int = 1
) -> None:
    """Training stops with an error that has these words, and what is released is in the ledger.

    Args:
        run: before training.
        loss_of: see :func:`train`.
        words: a regular expression; its case does not matter.
        steps: how many were released before; None allows any number.
        passes: over the loader.
    """
    with refusal(run, words, steps=steps):
        run.train(loss_of, passes=passes)


class refusal:  # noqa: N801 - reads as pytest's own
    """A block that must end with a :class:`BookkeepingError`; see :func:`assert_refused`."""

    def __init__(self, run, words, *, steps=0):
        self._run, self._words, self._steps = run, re.compile(words, re.IGNORECASE), steps

    def __enter__(self):
        self._raises = pytest.raises(BookkeepingError, match=self._words)
        return self._raises.__enter__()

    def __exit__(self, *error):
        handled = self._raises.__exit__(*error)
        taken = (self._run.steps, len(self._run.sums))
        allowed = taken[1] if self._steps is None else self._steps
        assert taken == (allowed, allowed), f"in the ledger, and released: {taken}"
        return handled


def rows(*tensors: Tensor, drop: Iterable[int] = ()) -> torch.utils.data.TensorDataset:
    """A data set of these rows, without some."""
    keep = [i for i in range(len(tensors[0])) if i not in set(drop)]
    return torch.utils.data.TensorDataset(*(t[keep] for t in tensors))
