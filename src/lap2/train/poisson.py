"""Poisson sampling: the loader whose batches are what the accountant believes they are."""

# pyright: basic

import contextlib
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from torch.utils.data import DataLoader, Dataset, TensorDataset

from lap2 import _validate
from lap2.noise import new_key

__all__ = ["PoissonLoader"]


class _Piece(NamedTuple):
    index: np.ndarray
    begins: bool
    ends: bool


class PoissonLoader:
    """Batches in which every record is included independently with probability ``sampling_prob``.

    Inclusion is decided by AES-256 in counter mode under a key from the operating system, with
    probability ``sampling_prob`` rounded down to a multiple of 2^-64. Batches vary in size and may
    be empty: an empty batch is yielded too, with tensors of length zero.

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
        self.dataset = dataset
        self.sampling_prob = _validate.probability("sampling_prob", sampling_prob)
        self.steps = _validate.integer("steps", steps, least=1)
        if max_physical_batch_size is not None:
            _validate.integer("max_physical_batch_size", max_physical_batch_size, least=1)
        self.max_physical_batch_size = max_physical_batch_size
        self.ends_batch = True
        self.batches_begun = self.pieces_begun = 0
        self.before_piece: Callable[[bool], None] = lambda begins: None  # noqa: ARG005
        """Called before each piece is handed out, with whether it begins a batch."""
        self.piece_size = 0
        self.passes = self.position = 0
        """Whole passes done, and steps taken in the current one."""
        self._records = np.arange(shard[0], len(dataset), shard[1])  # type: ignore[arg-type]
        self._threshold = min(int(self.sampling_prob * 2**64), 2**64 - 1)
        self._loader = loader
        self._resumes = False

    def __len__(self) -> int:
        """The number of batches in one pass."""
        return self.steps

    def sample(self) -> np.ndarray:
        """The indices of one Poisson sample."""
        if self.sampling_prob == 1:
            return self._records
        stream = Cipher(algorithms.AES(new_key()), modes.CTR(bytes(16))).encryptor()
        words = np.frombuffer(stream.update(bytes(8 * self._records.size)), dtype="<u8")
        return self._records[np.flatnonzero(words < np.uint64(self._threshold))]

    def state_dict(self) -> dict[str, int]:
        """How far the passes have come. Nothing about what was or will be sampled."""
        over = self.position >= self.steps
        return {"passes": self.passes + over, "position": 0 if over else self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue there: the next pass has only the batches that were left."""
        self.passes = _validate.integer("passes", state["passes"], least=0)
        self.position = _validate.integer("position", state["position"], least=0)
        self._resumes = True

    def __iter__(self) -> Iterator[Any]:
        """Yield the batches of one pass, or what is left of one that was resumed."""
        self.position = self.position if self._resumes else 0
        self._resumes = False
        yield from self._batches(self.steps - self.position)
        self.passes, self.position = self.passes + 1, 0

    def _batches(self, count: int) -> Iterator[Any]:
        if isinstance(self.dataset, TensorDataset) and not (
            self._loader and self._loader.num_workers
        ):
            yield from self._from_tensors(self.dataset, count)
        else:
            yield from self._from_loader(count)

    def _pieces(self, count: int) -> Iterator[_Piece]:
        """The pieces of the next ``count`` batches."""
        for _ in range(count):
            index = self.sample()
            step = self.max_physical_batch_size or max(1, index.size)
            starts = range(0, max(1, index.size), step)
            for start in starts:
                yield _Piece(index[start : start + step], start == 0, start == starts[-1])

    def _hand_out(self, piece: _Piece) -> None:
        """Let the step know what is being yielded."""
        self.before_piece(piece.begins)
        self.batches_begun += piece.begins
        self.pieces_begun += 1
        self.ends_batch, self.piece_size = piece.ends, piece.index.size

    def _from_tensors(self, dataset: TensorDataset, count: int) -> Iterator[Any]:
        for piece in self._pieces(count):
            self._hand_out(piece)
            yield [_rows(tensor, piece.index) for tensor in dataset.tensors]

    def _from_loader(self, count: int) -> Iterator[Any]:
        ahead: deque[_Piece] = deque()  # workers fetch before the batch is handed out

        def remembered() -> Iterator[list[int]]:
            for piece in self._pieces(count):
                ahead.append(piece)
                yield piece.index.tolist() or [0]  # a stand-in, cut to length zero below

        source = self._loader
        settings = (
            {
                "num_workers": source.num_workers,
                "collate_fn": source.collate_fn,
                "pin_memory": source.pin_memory,
                "timeout": source.timeout,
                "worker_init_fn": source.worker_init_fn,
                "multiprocessing_context": source.multiprocessing_context,
            }
            if source is not None
            else {}
        )
        inner = DataLoader(self.dataset, batch_sampler=_Batches(remembered), **settings)
        for batch in inner:
            piece = ahead.popleft()
            self._hand_out(piece)
            yield batch if piece.index.size else _cut(batch)


def _rows(tensor: torch.Tensor, index: np.ndarray) -> torch.Tensor:
    """Some rows of a tensor."""
    ordinary = type(tensor) is torch.Tensor and tensor.is_contiguous()
    if ordinary and tensor.device.type == "cpu" and not tensor.requires_grad:
        with contextlib.suppress(RuntimeError, TypeError):  # NumPy has not all of torch's types
            # With one thread: it may take longer to wake another.
            return torch.from_numpy(tensor.numpy().take(index, axis=0))
    return tensor.index_select(0, torch.from_numpy(index).to(tensor.device))


class _Batches:
    """A batch sampler from a generator function."""

    def __init__(self, make: Any) -> None:
        self._make = make

    def __iter__(self) -> Iterator[list[int]]:
        return self._make()


def _cut(batch: Any) -> Any:
    """The batch with every tensor cut to length zero."""
    if isinstance(batch, torch.Tensor):
        return batch[:0]
    if isinstance(batch, dict):
        return type(batch)({key: _cut(value) for key, value in batch.items()})
    if isinstance(batch, (list, tuple)):
        parts = [_cut(value) for value in batch]
        return type(batch)(*parts) if hasattr(batch, "_fields") else type(batch)(parts)
    return batch
