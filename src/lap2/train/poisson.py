"""Poisson sampling: the loader whose batches are what the accountant believes they are."""

# pyright: basic

import contextlib
from collections import deque
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from torch.utils.data import DataLoader, Dataset

from lap2 import _validate
from lap2.noise import new_key
from lap2.train import randomness
from lap2.train.errors import BookkeepingError
from lap2.train.rehearsal import SMALL, Rehearsed, chosen_records, rehearsed_batches
from lap2.train.secrecy import StaysHere, forget_locals
from lap2.train.source import is_plain_tensors

__all__ = ["Consumer", "Piece", "PoissonLoader"]


@dataclass(frozen=True, slots=True, repr=False)
class Piece(StaysHere):
    """What the loader handed out: a batch, a piece of one, or a rehearsal.

    Attributes:
        serial: how many were handed out before.
        size: records of the sample in it; none, if a record stands in for an empty sample.
        total: records of the sample in its whole batch.
        is_first: whether its batch begins with it.
        is_last: whether its batch ends with it, so that its step releases something.
        rehearsal: for a small batch that only checks the model, what is checked with it; such a
            batch has nothing to do with the sample.
    """

    serial: int
    size: int
    total: int
    is_first: bool = True
    is_last: bool = True
    rehearsal: Rehearsed | None = None


class Consumer(Protocol):
    """Who takes steps on the batches of a loader."""

    def before_piece(self, piece: Piece) -> None:
        """Called before a piece is handed out."""
        ...

    @property
    def wants_rehearsal(self) -> bool:
        """Whether the model is to be checked before the next batch."""
        ...

    def give_up(self) -> None:
        """Called when a pass ends with an error: nothing is released of the batch at hand."""
        ...

    def end_pass(self) -> None:
        """Called when a pass ends, in whatever way."""
        ...


@dataclass(frozen=True, slots=True, repr=False)
class _Drawn(StaysHere):
    """A part of a sample that is still to be handed out."""

    index: np.ndarray
    total: int
    is_first: bool
    is_last: bool


class PoissonLoader(StaysHere, DataLoader):
    """Batches in which every record is included independently with probability ``sampling_prob``.

    Inclusion is decided by AES-256 in counter mode under a key from the operating system, with
    probability ``sampling_prob`` rounded down to a multiple of 2^-64. Batches vary in size. For an
    empty one, a batch of one record is handed out, so that every model can be called as always;
    whatever is computed of it is thrown away.

    To anything that wants a ``DataLoader`` it is one, with the settings of the user's own.

    Args:
        dataset: map-style; a TensorDataset is indexed at once, others by ``loader``'s workers.
        sampling_prob: of each record, in each batch.
        steps: number of batches in one pass, the ``len`` of this loader.
        max_physical_batch_size: larger batches are yielded in pieces; :attr:`ends_batch` says
            whether the piece last yielded was the last of its batch.
        loader: the user's own loader, whose collate function, workers and pinned memory are kept.
        shard: (rank, size): samples from every size-th record only, beginning with the rank-th.
            The samples of all ranks together are one Poisson sample.
    """

    _instead = "pickle its data set, and its state_dict(), which tells how far the passes have come"

    def __init__(
        self,
        dataset: Dataset,
        *,
        sampling_prob: float,
        steps: int,
        max_physical_batch_size: int | None = None,
        loader: DataLoader | None = None,
        shard: tuple[int, int] = (0, 1),
    ) -> None:
        """Check the arguments; draws nothing yet."""
        self.sampling_prob = _validate.probability("sampling_prob", sampling_prob)
        self.steps = _validate.integer("steps", steps, least=1)
        if max_physical_batch_size is not None:
            _validate.integer("max_physical_batch_size", max_physical_batch_size, least=1)
        self.max_physical_batch_size = max_physical_batch_size
        self.piece: Piece | None = None
        """What was handed out last."""
        self.passes = self.position = 0
        """Whole passes done, and steps taken in the current one."""
        self._records = np.arange(shard[0], len(dataset), shard[1])  # type: ignore[arg-type]
        self._threshold = min(int(self.sampling_prob * 2**64), 2**64 - 1)
        self._plain = is_plain_tensors(dataset, loader)
        self._resumes = self._postponed = False
        self._consumer: Consumer | None = None
        self._open = object()
        self._unused = False
        self._rehearsing: Generator[tuple[Rehearsed, Any]] | None = None
        self._has_rehearsed = False
        self._fixed = randomness.FixedDraws()
        self._ahead: deque[_Drawn] = deque()  # workers fetch before the batch is handed out
        super().__init__(
            dataset, batch_sampler=_Batches(self._indices, self.steps), **_settings(loader)
        )

    def __len__(self) -> int:
        """The number of batches in one pass."""
        return self.steps

    @property
    def ends_batch(self) -> bool:
        """Whether the step on what was handed out last releases something."""
        return self.piece is None or (self.piece.is_last and self.piece.rehearsal is None)

    def sample(self) -> np.ndarray:
        """The indices of one Poisson sample."""
        if self.sampling_prob == 1:
            return self._records
        stream = Cipher(algorithms.AES(new_key()), modes.CTR(bytes(16))).encryptor()
        words = np.frombuffer(stream.update(bytes(8 * self._records.size)), dtype="<u8")
        return self._records[np.flatnonzero(words < np.uint64(self._threshold))]

    def attach(self, consumer: Consumer) -> None:
        """From now on every batch is for one step of ``consumer``."""
        self._consumer = consumer

    def take(self) -> Piece:
        """What was handed out last, for the one step that may be taken on it.

        Raises:
            BookkeepingError: there is nothing, or a step was taken on it.
        """
        if self.piece is None or not self._unused:
            raise BookkeepingError(
                "each batch that the loader yields allows one step: a second one would release the "
                "same sample again, while the ledger counts on a fresh one. A wrapper that makes a "
                "loader of its own (as Accelerate's prepare does) has batches that are not counted"
            )
        self._unused = False
        self._fixed.end()
        return self.piece

    @property
    def backward_precision(self) -> float:
        """The largest relative rounding error in the last rehearsal's backward passes."""
        return self._fixed.precision

    def end_rehearsal(self) -> None:
        """Let the next rehearsal begin anew."""
        if self._rehearsing is not None:
            self._rehearsing.close()
            self._rehearsing, self._has_rehearsed = None, False

    def postpone(self) -> None:
        """Hand out once more what was taken, after a rehearsal: nothing was released of it."""
        self._postponed = True

    def finish_batch(self) -> None:
        """Count a step that was released."""
        self.position += 1

    def state_dict(self) -> dict[str, int]:
        """How far the passes have come. Nothing about what was or will be sampled."""
        over = self.position >= self.steps
        return {"passes": self.passes + over, "position": 0 if over else self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue there: the next pass has only the batches that were left."""
        passes = _validate.integer("passes", state["passes"], least=0)
        position = _validate.integer("position", state["position"], least=0)
        if not position < self.steps:
            raise ValueError(f"position must be below the {self.steps} steps of a pass")
        self.passes, self.position = passes, position
        self._resumes = True

    def __iter__(self) -> Iterator[Any]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Yield the batches of one pass, or what is left of one that was resumed."""
        self.position = self.position if self._resumes else 0
        if self._unused and self.piece is not None and self.piece.rehearsal is not None:
            self.end_rehearsal()  # it was given up
        self._resumes = self._postponed = self._unused = False
        self._open = this = object()
        return self._guarded(this)

    def _guarded(self, this: object) -> Iterator[Any]:
        """One pass, of whose batches nothing is left behind, nor shown by its errors."""
        try:
            yield from self._pass(this)
        except Exception as error:
            if self._consumer is not None and this is self._open:
                self._consumer.give_up()
            forget_locals(error)
            raise
        finally:
            if self._consumer is not None:
                self._consumer.end_pass()

    def _pass(self, this: object) -> Iterator[Any]:
        source = self._from_tensors() if self._plain else self._from_workers()
        for drawn, data in source:
            if drawn.is_first and self._must_rehearse:
                yield from self._rehearse(this)
            self._hand_out(this, drawn)
            yield data
            while self._postponed:
                self._postponed = False
                yield from self._rehearse(this)
                self._hand_out(this, drawn)
                yield data
        self._refuse_unused(this)
        self.passes, self.position = self.passes + 1, 0

    @property
    def _must_rehearse(self) -> bool:
        consumer = self._consumer
        return consumer is not None and (self._rehearsing is not None or consumer.wants_rehearsal)

    def _hand_out(self, this: object, drawn: _Drawn, rehearsal: Rehearsed | None = None) -> None:
        """Make known what is about to be yielded."""
        self._refuse_unused(this)
        serial = 0 if self.piece is None else self.piece.serial + 1
        piece = Piece(
            serial, drawn.index.size, drawn.total, drawn.is_first, drawn.is_last, rehearsal
        )
        if self._consumer is not None:
            self._consumer.before_piece(piece)
        self.piece = piece
        self._unused = True

    def _refuse_unused(self, this: object) -> None:
        """Whoever takes no step on a batch must give up the pass, so that nothing is mixed up."""
        if self._consumer is None:
            return
        if this is not self._open:
            raise BookkeepingError(
                "the loader was iterated anew, so that this pass over it is over: finish one pass "
                "before another begins"
            )
        if self._unused:
            raise BookkeepingError(
                "fetch one batch at a time: the batch before was fetched, but no optimizer step "
                "was taken on it. A wrapper that reads ahead (Accelerate's prepared loaders do) "
                "cannot be used, nor can several batches be accumulated into one step: choose the "
                "batch_size of the step, and max_physical_batch_size for what fits into memory. A "
                "batch that is skipped for what is in it would no longer be a random sample"
            )

    def _rehearse(self, this: object) -> Iterator[Any]:
        """A few small batches that only check the model; goes on where a pass was given up."""
        if self._rehearsing is None:
            self._rehearsing = self._rehearsal()
        try:
            while self._rehearsing is not None:
                rehearsal, data = next(self._rehearsing, (None, None))
                if rehearsal is None:
                    self._rehearsing = None
                    break
                count = np.arange(len(rehearsal.records))
                drawn = _Drawn(count, count.size, is_first=True, is_last=True)
                self._hand_out(this, drawn, rehearsal)
                if rehearsal.numbers:
                    self._fixed.begin(rehearsal.numbers, rehearsal.common)
                yield data
        finally:
            self._fixed.end()

    def _rehearsal(self) -> Generator[tuple[Rehearsed, Any]]:
        """The first is longer, because nothing is known of the model."""
        count = len(self.dataset)  # type: ignore[arg-type]
        most = max(2, self.max_physical_batch_size or count)
        share = round(self.sampling_prob * self._records.size)
        rounds, large = (1, 0) if self._has_rehearsed else (3, min(share, most))
        self._has_rehearsed = True
        before = randomness.state()
        held = self._held(chosen_records(count, min(most, max(large, SMALL)), rounds))
        randomness.restore(before)
        return rehearsed_batches(held, self.collate_fn, most=most, rounds=rounds, large=large)

    def _held(self, chosen: list[int]) -> list[Any]:
        """Records as the data set has them, read where it is read."""
        if self.num_workers:
            settings = _settings(self) | {"num_workers": 1, "collate_fn": _as_they_are}
            settings |= {"pin_memory": False, "persistent_workers": False, "prefetch_factor": None}
            inner: Any = DataLoader(self.dataset, batch_sampler=[chosen], **settings)
            return next(iter(inner))
        if callable(together := getattr(self.dataset, "__getitems__", None)):
            held: Any = together(chosen)
            return list(held)
        return [self.dataset[i] for i in chosen]

    def _draw(self, count: int) -> Iterator[_Drawn]:
        """The pieces of the next ``count`` samples."""
        for _ in range(count):
            index = self.sample()
            step = self.max_physical_batch_size or max(1, index.size)
            starts = range(0, max(1, index.size), step)
            for start in starts:
                part = index[start : start + step]
                yield _Drawn(part, index.size, start == 0, start == starts[-1])

    def _from_tensors(self) -> Iterator[tuple[_Drawn, Any]]:
        for drawn in self._draw(self.steps - self.position):
            index = self._or_stand_in(drawn.index)
            yield drawn, [_rows(tensor, index) for tensor in self.dataset.tensors]  # type: ignore[attr-defined]

    def _from_workers(self) -> Iterator[tuple[_Drawn, Any]]:
        self._ahead.clear()
        for data in super().__iter__():
            yield self._ahead.popleft(), data

    def _indices(self) -> Iterator[list[int]]:
        for drawn in self._draw(self.steps - self.position):
            self._ahead.append(drawn)
            yield self._or_stand_in(drawn.index).tolist()

    def _or_stand_in(self, index: np.ndarray) -> np.ndarray:
        """One record where there is none, so that the batch has the form of all others."""
        return (
            index if index.size else self._records[:1] if self._records.size else np.zeros(1, int)
        )


def _settings(loader: DataLoader | None) -> dict[str, Any]:
    if loader is None:
        return {}
    kept = (
        "num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn",
        "multiprocessing_context", "generator", "prefetch_factor", "persistent_workers",
    )  # fmt: skip
    return {name: getattr(loader, name) for name in kept}


def _rows(tensor: torch.Tensor, index: np.ndarray) -> torch.Tensor:
    """Some rows of a tensor."""
    ordinary = type(tensor) is torch.Tensor and tensor.is_contiguous()
    if ordinary and tensor.device.type == "cpu" and not tensor.requires_grad:
        with contextlib.suppress(RuntimeError, TypeError):  # NumPy has not all of torch's types
            # With one thread: it may take longer to wake another.
            return torch.from_numpy(tensor.numpy().take(index, axis=0))
    return tensor.index_select(0, torch.from_numpy(index).to(tensor.device))


def _as_they_are(items: list[Any]) -> list[Any]:
    return items


class _Batches:
    """A batch sampler from a generator function."""

    def __init__(self, make: Any, count: int) -> None:
        self._make, self._count = make, count

    def __iter__(self) -> Iterator[list[int]]:
        return self._make()

    def __len__(self) -> int:
        return self._count
