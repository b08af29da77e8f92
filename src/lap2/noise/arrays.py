"""NumPy arrays and torch tensors as flat, writable pieces, without copies of more than a chunk."""

import os
import sys
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import Any, NamedTuple, Protocol, cast

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "Flat",
    "Floats",
    "Segment",
    "TorchRun",
    "finite_range",
    "flat_parts",
    "for_each",
    "segments",
]

Floats = NDArray[np.float64] | NDArray[np.float32]
_DIRECT = (np.dtype(np.float32), np.dtype(np.float64))


class Flat(Protocol):
    """A one-dimensional run of coordinates."""

    @property
    def size(self) -> int:
        """Number of coordinates."""
        ...

    @property
    def is_elsewhere(self) -> bool:
        """Whether it is outside the CPU's memory: then it is a :class:`TorchRun`."""
        ...

    def chunks(self, length: int, start: int, stop: int, *, write: bool) -> Generator[Floats]:
        """A range of coordinates as contiguous float32 or float64 arrays of at most ``length``.

        With ``write``, what the caller changes in a chunk is in the original when the next begins.
        """
        ...


class Segment(NamedTuple):
    """A run of coordinates that one thread works on.

    Attributes:
        part: of which it is.
        start: where in the part.
        stop: where in the part it ends.
        position: of its first coordinate, among those of all parts.
    """

    part: Flat
    start: int
    stop: int
    position: int

    def chunks(self, length: int, *, write: bool) -> Generator[Floats]:
        """See :meth:`Flat.chunks`."""
        return self.part.chunks(length, self.start, self.stop, write=write)


def segments(parts: Sequence[Flat], length: int) -> list[Segment]:
    """The parts in segments of at most ``length``."""
    found: list[Segment] = []
    position = 0
    for part in parts:
        starts = range(0, part.size, length)
        found += [Segment(part, at, min(part.size, at + length), position + at) for at in starts]
        position += part.size
    return found


def for_each(task: Callable[[Segment], None], found: Sequence[Segment], *, share: bool) -> None:
    """Do a task for all segments, shared by all cores or not."""
    if share:
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(task, found))
    else:
        for segment in found:
            task(segment)


@lru_cache
def finite_range(dtype: Any) -> tuple[float, float]:
    """The least and the largest finite number of a NumPy float type."""
    limits = np.finfo(dtype)
    return float(limits.min), float(limits.max)


def flat_parts(array: Any) -> list[Flat]:
    """The coordinates of an array or tensor, or of a list of them, in order.

    Raises:
        TypeError: something is neither a NumPy array nor a torch tensor of a float type.
        ValueError: something cannot be written, or has coordinates that share memory.
    """
    if isinstance(array, (list, tuple)):
        members = cast("list[Any]", array)
        return [part for member in members for part in flat_parts(member)]
    if isinstance(array, np.ndarray):
        return [_numpy_run(cast("NDArray[Any]", array))]
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(array, torch.Tensor):
        return [_torch_run(array, torch)]
    raise TypeError(f"array must be a NumPy array or a torch tensor, got {type(array).__name__}")


def _refuse_overlap(strides: Sequence[int], shape: Sequence[int]) -> None:
    if any(stride == 0 and length > 1 for stride, length in zip(strides, shape, strict=True)):
        raise ValueError(f"array must not repeat memory, got strides {tuple(strides)}")


def _outermost_first(strides: Sequence[int]) -> list[int]:
    """The axes in an order that makes every dense layout a contiguous one (channels_last, say)."""
    return sorted(range(len(strides)), key=lambda axis: -strides[axis])


def _numpy_run(array: NDArray[Any]) -> Flat:
    if array.dtype.kind != "f" or array.dtype.itemsize > 8:
        raise TypeError(f"array must be of type float16, float32 or float64, got {array.dtype}")
    if not array.flags.writeable:
        raise ValueError("array must be writable, got a read-only one")
    array = np.asarray(array)  # a matrix, say, has a reshape of its own
    if array.flags.c_contiguous:
        return _NumpyRun(array.reshape(-1))
    _refuse_overlap(array.strides, array.shape)
    ordered = array.transpose(_outermost_first(array.strides))
    return _NumpyRun(ordered.reshape(-1) if ordered.flags.c_contiguous else array)


class _NumpyRun:
    is_elsewhere = False

    def __init__(self, array: NDArray[Any]) -> None:
        self._array = array
        # Native 32 and 64-bit numbers are changed where they are; others go through a copy.
        self._direct = array.flags.carray and array.dtype in _DIRECT

    @property
    def size(self) -> int:
        return self._array.size

    def chunks(self, length: int, start: int, stop: int, *, write: bool) -> Generator[Floats]:
        run: Any = self._array if self._array.ndim == 1 else self._array.flat
        for first in range(start, stop, length):
            place = slice(first, min(stop, first + length))
            if self._direct:
                yield run[place]
                continue
            copy = run[place].astype(np.float64)
            yield copy
            if write:
                run[place] = np.clip(copy, *finite_range(self._array.dtype))


def _torch_run(tensor: Any, torch: Any) -> Flat:
    tensor = tensor.detach() if tensor.requires_grad else tensor
    strided = tensor.layout == torch.strided
    if strided and tensor.is_cpu and tensor.dtype in (torch.float16, torch.float32, torch.float64):
        return _numpy_run(tensor.numpy())
    if not (strided and tensor.is_floating_point()):
        raise TypeError(
            f"array must be dense and of a floating-point type, got {tensor.dtype} "
            f"in layout {tensor.layout}"
        )
    _refuse_overlap(tensor.stride(), tensor.shape)
    ordered = tensor.permute(_outermost_first(tensor.stride()))
    return TorchRun(ordered.view(-1) if ordered.is_contiguous() else tensor, torch)


class TorchRun:
    """A tensor whose numbers NumPy does not have, or cannot reach."""

    def __init__(self, tensor: Any, torch: Any) -> None:
        """Keep the tensor, whose coordinates are in order in memory if it has one dimension."""
        self._tensor, self._torch = tensor, torch
        self.dtype, self.device = tensor.dtype, tensor.device

    @property
    def size(self) -> int:
        """See :class:`Flat`."""
        return self._tensor.numel()

    @property
    def is_elsewhere(self) -> bool:
        """See :class:`Flat`."""
        return not self._tensor.is_cpu

    def chunks(self, length: int, start: int, stop: int, *, write: bool) -> Generator[Floats]:
        """See :class:`Flat`."""
        limits = self._torch.finfo(self.dtype)
        for first in range(start, stop, length):
            last = min(stop, first + length)
            copy: Any = self.read(first, last).cpu().to(self._torch.float64).numpy()
            yield copy
            if write:
                clipped = self._torch.from_numpy(np.clip(copy, limits.min, limits.max))
                self.write(first, last, clipped.to(self.dtype).to(self.device))

    def read(self, start: int, stop: int) -> Any:
        """A range of coordinates, where they are; not to be written to."""
        if self._tensor.dim() == 1:
            return self._tensor[start:stop]
        return self._tensor.take(self._indices(start, stop))

    def write(self, start: int, stop: int, piece: Any) -> None:
        """Replace a range of coordinates by others of their type."""
        if self._tensor.dim() == 1:
            self._tensor[start:stop] = piece
        else:
            self._tensor.put_(self._indices(start, stop), piece)

    def _indices(self, start: int, stop: int) -> Any:
        return self._torch.arange(start, stop, device=self.device)
