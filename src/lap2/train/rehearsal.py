"""Rehearsals: that examples do not depend on each other is checked by value, in the user's loop.

The loader hands out a small batch of records, the same again, the same with some of them replaced,
and what is left, collated anew, when some are taken out. The loop treats them like any batch;
its optimizer steps release nothing but compare what every record would have contributed. Whatever
makes a record's contribution depend on others shows, wherever it happens: in the collate function,
in the model or its buffers, in the loss, or in something remembered from the batch before.
"""

# pyright: basic

import math
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NoReturn

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import default_collate

from lap2.train import randomness
from lap2.train.clip import ClippedGroup
from lap2.train.errors import BookkeepingError
from lap2.train.gradients import Probes
from lap2.train.nested import tensors
from lap2.train.rounding import HALF
from lap2.train.secrecy import StaysHere

__all__ = ["CHANGED", "SMALL", "Rehearsal", "Rehearsed", "chosen_records", "rehearsed_batches"]

SMALL = 8
"""Records in a small batch, at most."""

_SIZES = (SMALL, 6, 4, 2)
"""Of the small batch: the first that no other dimension of it could be taken for."""

_PROBES = 4
"""Random numbers by which the gradients of a parameter are told apart."""

_NEGLIGIBLE = 2.0**-10
"""Of the clip: contributions below it need not agree in all their digits."""

CHANGED = (
    "the model must be in the same mode, have the same layers and be called in the same way for "
    "every batch: in its rehearsals it was called differently"
)

_COMMON = (1 / 32, 31 / 32)
"""What is drawn for all records at once is made of this in a run's first rounds."""

Kind = Literal["first", "again", "replaced", "without"]


@dataclass(frozen=True, slots=True)
class Rehearsed:
    """What one small batch is for.

    Attributes:
        kind: how it differs from the first.
        records: for each of its rows, which row of the first batch it is; -1 for a replaced one.
        numbers: of the records, each with random numbers of its own; empty if they are drawn.
        is_still: whether collating drew no random numbers that could not be fixed.
        is_last: whether the rehearsal ends with it.
        common: what is drawn once for all of its records is made of.
    """

    kind: Kind
    records: tuple[int, ...]
    numbers: tuple[int, ...]
    is_still: bool = True
    is_last: bool = False
    common: float = 0.5


def chosen_records(count: int, most: int, rounds: int) -> list[int]:
    """Which of ``count`` records to rehearse with: for a batch, and others for each round."""
    size = min(count, most)
    wanted = size + rounds * (size // 2)
    return np.random.default_rng().permutation(count)[:wanted].tolist()


class _Maker:
    """Makes batches of held records, each in the same random state."""

    def __init__(self, held: Sequence[Any], collate: Callable[[list[Any]], Any]) -> None:
        self._held, self._collate = held, collate
        self._before, self._fixed = randomness.state(), randomness.FixedDraws()
        self._now = self._before
        self.common, self.is_still = 0.5, True

    def draw_anew(self, common: float) -> None:
        """From here on begin each batch in another random state than before."""
        self._now, self.common = randomness.another_state(), common

    def make(self, numbers: Sequence[int]) -> Any:
        """Of the records with these numbers."""
        randomness.restore(self._now)
        self._fixed.begin(tuple(numbers), self.common)
        try:
            batch = self._collate([self._held[i] for i in numbers])
        finally:
            self._fixed.end()
        self.is_still = self.is_still and randomness.same(self._now, randomness.state())
        randomness.restore(self._now)
        return batch

    def restore(self) -> None:
        """Go back to the random state there was."""
        randomness.restore(self._before)

    def unmistakable_size(self, sizes: Sequence[int], most: int) -> int:
        """A batch size that is not the length of a text, or another dimension."""
        for size in (s for s in sizes if s <= most):
            dims = {dim for shape in self.shapes(range(size)) for dim in shape}
            if not dims & {size, size - _left_out(size)}:
                return size
        return most

    def shapes(self, numbers: Sequence[int]) -> list[torch.Size]:
        """Of the tensors in a batch, without its size."""
        return [tensor.shape[1:] for tensor in tensors(self.make(numbers))]


def _left_out(size: int) -> int:
    """About half, so that an odd number stays, which no loss can divide evenly into parts."""
    return size // 2 if (size - size // 2) % 2 else max(1, size // 2 - 1)


def rehearsed_batches(
    held: Sequence[Any],
    collate: Callable[[list[Any]], Any],
    *,
    most: int,
    rounds: int,
    large: int = 0,
) -> Generator[tuple[Rehearsed, Any]]:
    """The batches of one rehearsal.

    Those that are compared begin in one random state. It is another one in each round, because a
    loop may do to the whole batch what random numbers tell it to: in the first two rounds what is
    drawn once for all records is small and large, and later it is anything.

    Args:
        held: records, as the data set has them. Of one record nothing can be learnt.
        collate: makes a batch of records.
        most: records in a small batch.
        rounds: how often records are replaced and left out. With several, the loop has a batch to
            settle first, after which what it does after a step has been done.
        large: records in the batch of one more round, for what shows in larger batches only; none
            if it is not larger.
    """
    if len(held) < 2:
        return
    maker, rng = _Maker(held, collate), np.random.default_rng()
    try:
        small = maker.unmistakable_size(_SIZES, min(most, len(held), SMALL))
        sizes = [small] * rounds
        large = min(large, len(held) - 1)
        if large > SMALL:
            sizes.append(maker.unmistakable_size(range(large, SMALL, -1), large))
        if rounds > 1:  # who only fetches a batch to look at it shall see no fixed draws
            yield Rehearsed("first", tuple(range(small)), ()), maker.make(range(small))
        for turn, size in enumerate(sizes):
            whole, spares = tuple(range(size)), list(range(size, len(held))) or [0]
            common = _COMMON[turn] if turn < len(_COMMON) < rounds else float(rng.uniform())
            maker.draw_anew(common)
            yield Rehearsed("first", whole, whole, common=common), maker.make(whole)
            if turn == 0 and rounds > 1:  # later, the next batch would show a memory as well
                yield Rehearsed("again", whole, whole, common=common), maker.make(whole)
            count = _left_out(size)
            some = rng.permutation(size)[:count].tolist() if spares != [0] else [size - 1]
            news = dict(zip(some, rng.permutation(spares).tolist(), strict=False))
            numbers = tuple(news.get(i, i) for i in whole)
            same = tuple(-1 if i in news else i for i in whole)
            if turn < rounds:  # records that are left out show as much, and cost less
                yield Rehearsed("replaced", same, numbers, common=common), maker.make(numbers)
            left = tuple(i for i in whole if i not in some)
            if collate is not default_collate and maker.shapes(left) == maker.shapes(whole):
                left = tuple(some)  # perhaps these are padded to the others
            last = maker.make(left)
            is_last = turn == len(sizes) - 1
            yield Rehearsed("without", left, left, maker.is_still, is_last, common), last
    finally:
        maker.restore()


class Rehearsal(StaysHere):
    """Compares what records contribute from one small batch to the next.

    Args:
        params: the trained parameters, and what they are called.
    """

    def __init__(self, params: dict[Tensor, str]) -> None:
        """Nothing has been checked."""
        self._names = params
        self._first: tuple[Tensor, Tensor] | None = None
        self._form: object = None
        self._random: randomness.State | None = None
        self._draws = False
        self._passed: set[object] = set()
        self._open = dict(params)
        self._next = 0
        self.has_compared_sizes = False
        """Whether batches of different sizes could be compared."""
        self.failure = ""
        """Why the last one was refused; empty once one has passed."""
        self.was_moved = 0.0
        """The most by which any record's gradient differed, as a share of it; it is private."""

    def is_due(self, step: int) -> bool:
        """Whether it is time for one: before steps 0, 1, 2, 4, 8, and so on."""
        return step >= self._next or bool(self.failure)

    def has_passed(self, form: object) -> bool:
        """Whether the model has been checked in this form."""
        return form in self._passed

    @property
    def has_passed_once(self) -> bool:
        """Whether the model has been checked in any form."""
        return bool(self._passed)

    @property
    def open_names(self) -> set[str]:
        """Parameters of which no gradient was seen in a rehearsal."""
        return set(self._open.values())

    def unchecked(self, groups: Sequence[ClippedGroup]) -> list[str]:
        """Parameters that contribute something and have not been checked yet."""
        if not self._open:
            return []
        members = (m for group in groups for m in group.members if m.param in self._open)
        return [self._open[m.param] for m in members if bool(m.size(2, torch.float64).norms.any())]

    def begin(self) -> None:
        """A small batch is about to be handed out."""
        self._random = randomness.state()

    def compare(
        self,
        rehearsed: Rehearsed,
        groups: Sequence[ClippedGroup],
        *,
        form: object,
        precision: float,
        step: int,
    ) -> None:
        """Compare the small batch at hand with the first one.

        Args:
            rehearsed: which one it is.
            groups: what its records would contribute.
            form: of the model and how it was called; whatever may change it.
            precision: the largest relative rounding error of what the model computed.
            step: how many real steps were taken.

        Raises:
            BookkeepingError: a record's contribution depends on the others.
        """
        values, finite = self._contributions(groups, len(rehearsed.records))
        if rehearsed.kind == "first":
            self._first, self._form = (values, finite), form
            # In the loop itself: then only batches of the same shape draw the same numbers.
            self._draws = self._random is not None and not randomness.same(
                self._random, randomness.state()
            )
            return
        if self._first is None:
            raise BookkeepingError(self.failure or CHANGED)
        if form != self._form:
            self._fail(CHANGED)
        if rehearsed.kind == "without" and (self._draws or not rehearsed.is_still):
            self._settle(rehearsed, step)
            return
        rows = torch.tensor([i for i in rehearsed.records if i >= 0])
        kept = torch.tensor([i >= 0 for i in rehearsed.records])
        theirs, ours = self._first[0][rows], values[kept]
        usable = self._first[1][rows]
        if not torch.equal(usable, finite[kept]):  # one that is not finite may spoil all others
            self._fail(_REASONS[rehearsed.kind])
        size = _length(theirs) + _NEGLIGIBLE
        moved = torch.where(usable, _length(ours - theirs) / size, 0.0)
        worst = float(moved.max()) if len(moved) else 0.0
        self.was_moved = max(self.was_moved, worst)
        if worst > _tolerance(precision):
            self._fail(_REASONS[rehearsed.kind])
        self.has_compared_sizes = self.has_compared_sizes or rehearsed.kind == "without"
        if rehearsed.kind == "replaced":
            self._note_seen(theirs[usable])
        if rehearsed.kind == "without":
            self._settle(rehearsed, step)

    def forget(self) -> None:
        """Hold nothing of the batches that were compared so far."""
        self._first = None

    def _fail(self, reason: str) -> NoReturn:
        """Nothing is released any more before a rehearsal has passed."""
        self.failure, self._first = reason, None
        self._passed.clear()
        raise BookkeepingError(reason)

    def _note_seen(self, values: Tensor) -> None:
        """Parameters are checked of which a gradient was compared, next to other records."""
        seen = (values != 0).any(dim=2).any(dim=0)
        for param, found in zip(self._names, seen.tolist(), strict=True):
            if found:
                self._open.pop(param, None)

    def _settle(self, rehearsed: Rehearsed, step: int) -> None:
        """A round has passed, and perhaps the whole rehearsal."""
        self._passed.add(self._form)
        self._first = None
        if rehearsed.is_last:
            self.failure = ""
            self._next = max(1, 2 * step) if step >= self._next else self._next

    def _contributions(
        self, groups: Sequence[ClippedGroup], examples: int
    ) -> tuple[Tensor, Tensor]:
        """Every record's gradients, by probes and in clips; and which are finite."""
        values = torch.zeros(examples, len(self._names), _PROBES, dtype=torch.float64)
        finite = torch.ones(examples, dtype=torch.bool)
        places = {param: i for i, param in enumerate(self._names)}
        for group in groups:
            finite &= group.finite.cpu()
            for member in group.members:
                found = member.project(Probes.of(member.param, _PROBES))
                # As they are before clipping, which would hide that all of them changed alike.
                share = group.scale / (group.clip * math.sqrt(_PROBES))
                values[:, places[member.param]] = found.cpu() * share
        return values, finite


def _length(values: Tensor) -> Tensor:
    return values.flatten(1).norm(dim=1)


def _tolerance(precision: float) -> float:
    """How much of a contribution may be rounding, in units of the model's own precision.

    Batches of other shapes add up in another order. Measured, on transformers of eight layers: at
    most 5 units in float32 (121 in one of two layers) and 0.4 in bfloat16.
    """
    return (8 if precision > HALF else 2048) * precision


_REASONS: dict[Kind, str] = {
    "first": "",
    "again": (
        "the same batch gave other gradients the second time: something is "
        "remembered from batch to batch, in the model, the loss or the data set, or random numbers "
        "come from a generator of its own. One record then moves more than its own contribution: "
        "remember nothing of private batches"
    ),
    "replaced": (
        "examples are mixed: with some records of a batch replaced, what another one contributes "
        "changed. The model, the loss or the collate function computes something "
        "over the whole batch, also if no gradient flows through it, or remembers something of the "
        "batch before: normalise, attend and average within each example, and give engine.backward "
        "one loss for each record"
    ),
    "without": (
        "with some records of a batch left out, what another one contributes changed. "
        "The loss does not reduce over the batch as loss_reduction says (a mean over "
        "tokens, a weighted mean, or a sum declared as mean), or what a record is padded to "
        "depends on the others and is counted: give engine.backward one loss for each record, and "
        "mask padding"
    ),
}
