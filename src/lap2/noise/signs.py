"""Only the signs of noisy values are released: bits, which cannot leak through floating point.

Each coordinate s of a sum is given k times at ``s / sqrt(k)``, which leaves l2 norms as they are;
Laplace noise of scale b is added to each copy, and X, the number of positive ones, is released.
No noise is drawn for it: with ``u = s / (sqrt(k) b)``, a copy is positive with probability
``1 - exp(-u)/2`` for ``u >= 0`` and ``exp(u)/2`` below, which uniform bits decide exactly. All of
it is a post-processing of the Laplace mechanism in k times as many coordinates (docs/noise.md).
"""

import math
from collections.abc import Callable, Generator, Sequence
from decimal import ROUND_CEILING, ROUND_FLOOR, Context, Decimal, localcontext
from functools import lru_cache
from typing import Any, NamedTuple, NoReturn, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from lap2 import _validate
from lap2.noise import signs_numpy
from lap2.noise.arrays import Floats, Segment, finite_range, flat_parts, for_each, segments
from lap2.noise.grid import check_scale, refuse_pickling
from lap2.noise.keystream import AesStream, ChaChaStream, KeyStream, new_key
from lap2.noise.signs_numpy import Counts, Words

__all__ = ["SecureSigns", "check_copies", "check_finite", "estimates", "flips", "pack", "unpack"]

_BITS = 1 << 16
"""Bits decided at a time: their temporaries fit the cache."""
_SEGMENT = 1 << 20
"""Bits decided by one thread at a time."""
_WORTH_THREADS = 4
"""Segments that take much longer than to start threads."""
_MOST_COPIES = 1 << 24
_INFINITE = "array must be finite, got a coordinate that is not"
_ERROR = 2.0**-24
"""More than thresholds in float64, of at most 2^15, err by."""
_MANY = 256
"""Copies from which on the exact inverse of the mean is as good for small signals, and better for
others."""


class Kernel(Protocol):
    """The arithmetic of a chunk, as in :mod:`lap2.noise.signs_numpy`.

    All kernels agree in every bit once all bits are decided.
    """

    fits: Callable[[Floats, float], bool]
    count: Callable[[Floats, Words, float, int, Counts], NDArray[np.intp]]
    write: Callable[[Floats, Counts, float, int], None]


class SecureSigns:
    """Signs of Laplace-noised coordinates, each exact, from the operating system's entropy.

    Every call draws a new 256-bit key, expands it with AES in counter mode, or with ChaCha20 where
    a tensor is on another device than the CPU, whose bits are drawn there, and forgets it. A bit
    is decided by the first 16 bits of its uniform variate where a certified enclosure of its
    probability allows, which is nearly always; else by 64 more, and else in arbitrary precision.

    Formal guarantee:
        What is released is a function of ``S + Laplace(scale)`` with ideal noise, where S holds
        each coordinate, as it stands in float64, ``copies`` times over ``sqrt(copies)``. Accounting
        for noise multiplier ``scale / C`` in ``copies`` times as many coordinates covers the
        release exactly, as far as their output cannot be told from uniform bits. Nothing is
        rounded on the way, so that :meth:`added_sensitivity` is zero.

    Args:
        copies: k, how often each coordinate is given.
        compiled: True needs numba, False forbids it, None uses it if it is installed. Both ways
            give the same bits for the same key.
    """

    is_secure = True
    law = "laplace"

    def __init__(self, copies: int = 1, *, compiled: bool | None = None) -> None:
        """Choose the kernel; draws no randomness yet."""
        self.copies = check_copies(copies)
        self._kernel = _choose_kernel(compiled)

    def times(self, copies: int) -> "SecureSigns":
        """The same with another number of copies."""
        return SecureSigns(copies, compiled=self._kernel is not signs_numpy)

    def added_sensitivity(self, scale: float, size: int) -> float:
        """Zero: probabilities are those of the sum as it stands, which is not rounded."""
        check_scale(scale)
        _validate.integer("size", size, least=0)
        return 0.0

    def add(self, array: Any, scale: float) -> float:
        """Replace every coordinate by its estimate from bits, in place: see :func:`estimates`.

        Args:
            array: a NumPy array or torch tensor of any float type, or a list of them.
            scale: b of the Laplace noise.

        Returns:
            The added sensitivity: zero.

        Raises:
            ValueError: a coordinate is not finite; then nothing has been changed.
            EntropyError: the operating system gave no randomness; then nothing has been changed.
        """
        self._add_with_key(array, scale, _new_stream(array))
        return 0.0

    def counts(self, array: Any, scale: float) -> Counts:
        """What is released: how many copies of each coordinate are positive; changes nothing.

        :func:`pack` makes eight coordinates a byte of it, where there is one copy.
        """
        return self._counts_with_key(array, scale, _new_stream(array))

    def _add_with_key(self, array: Any, scale: float, stream: KeyStream) -> None:
        drawing = _Drawing(self._kernel, stream, self.copies, scale)
        near, elsewhere = _apart(check_finite(array, self._length, self._kernel), stream)
        if elsewhere:
            near += drawing.replace_elsewhere(elsewhere)
        for_each(drawing.replace, near, share=len(near) > _WORTH_THREADS)

    def _counts_with_key(self, array: Any, scale: float, stream: KeyStream) -> Counts:
        drawing = _Drawing(self._kernel, stream, self.copies, scale)
        found = check_finite(array, self._length, self._kernel)
        last = found[-1] if found else None
        counts = np.empty(last.position + last.stop - last.start if last else 0, dtype=np.uint32)
        near, elsewhere = _apart(found, stream)
        if elsewhere:
            near += drawing.count_elsewhere(elsewhere, counts)
        share = len(near) > _WORTH_THREADS
        for_each(lambda segment: drawing.count(segment, counts), near, share=share)
        return counts

    @property
    def _length(self) -> int:
        """Coordinates of a segment."""
        return max(1, _SEGMENT // self.copies)

    def __reduce__(self) -> NoReturn:
        refuse_pickling(self)


def check_finite(array: Any, length: int, kernel: Kernel) -> list[Segment]:
    """Where all coordinates are, in segments of a length; they are finite."""
    parts = flat_parts(array)
    found, share = segments(parts, length), sum(part.size for part in parts) > _SEGMENT

    def check(segment: Segment) -> None:
        for values in segment.chunks(_BITS, write=False):
            if not kernel.fits(values, math.inf):
                raise ValueError(_INFINITE)

    for_each(check, [segment for segment in found if not segment.part.is_elsewhere], share=share)
    elsewhere = [segment for segment in found if segment.part.is_elsewhere]
    if elsewhere and not _on_devices().finite(elsewhere):
        raise ValueError(_INFINITE)
    return found


def _new_stream(array: Any) -> KeyStream:
    """AES, for which CPUs have instructions, or what any device can do."""
    is_elsewhere = any(part.is_elsewhere for part in flat_parts(array))
    return (ChaChaStream if is_elsewhere else AesStream)(new_key())


def _apart(found: list[Segment], stream: KeyStream) -> tuple[list[Segment], list[Segment]]:
    """Segments to be drawn on the CPU, and those to be drawn where they are."""
    if not isinstance(stream, ChaChaStream):
        return found, []
    near = [segment for segment in found if not segment.part.is_elsewhere]
    return near, [segment for segment in found if segment.part.is_elsewhere]


def _on_devices() -> Any:
    from lap2.noise import signs_torch  # noqa: PLC0415 - only where there are tensors is there torch

    return signs_torch


def estimates(counts: Any, *, copies: int, scale: float) -> NDArray[np.float64]:
    """What :meth:`SecureSigns.counts` tells of the coordinates; a post-processing, which is free.

    With X of k copies positive and ``m = 2 X / k - 1``, the estimate is ``sqrt(k) b m``. Its mean
    is ``sqrt(k) b (1 - exp(-abs(u)))`` with the sign of u, and its variance at most that of
    Gaussian noise, ``b^2``. From 256 copies on it is ``-sqrt(k) b log(1 - abs(m))`` with the sign
    of m, the inverse of that mean, over its gain for small signals, ``1 + sqrt(2 / (pi k))``.
    Its variance is about ``b^2 (2 exp(abs(u)) - 1)``.

    Raises:
        ValueError: a count is not between 0 and k.

    >>> estimates([0, 1], copies=1, scale=2.0)
    array([-2.,  2.])
    """
    k, b = check_copies(copies), check_scale(scale)
    found = np.asarray(counts, dtype=np.float64)
    if not ((found >= 0) & (found <= k)).all():
        raise ValueError(f"counts must be from 0 to copies, which are {k}, got one that is not")
    if k < _MANY:
        return (2 * found - k) * (math.sqrt(k) * b / k)
    return _inverse(2 * found / k - 1, k) * (math.sqrt(k) * b / _gain(k))


def pack(counts: Counts, copies: int) -> NDArray[np.uint8]:
    """Counts in few bytes: of one copy a bit each, of up to 255 a byte, of more two or four."""
    if copies == 1:
        return np.packbits(counts.astype(np.uint8))
    return counts.astype(_narrow(copies)).view(np.uint8)


def unpack(packed: NDArray[np.uint8], copies: int) -> Counts:
    """The opposite of :func:`pack`; of one copy, zeros fill up the last byte."""
    if copies == 1:
        return np.unpackbits(packed).astype(np.uint32)
    return packed.view(_narrow(copies)).astype(np.uint32)


def _narrow(copies: int) -> type:
    return next(kind for kind in (np.uint8, np.uint16, np.uint32) if copies <= np.iinfo(kind).max)


def flips(size: float, scale: float, copies: int, bits: int, more: Callable[[], int]) -> bool:
    """Whether ``U < exp(-u)/2``, in arbitrary precision, where U begins with given bits.

    Args:
        size: u is this over ``scale sqrt(copies)``.
        scale: b.
        copies: k.
        bits: the first 80 bits of U.
        more: the next 64, as often as it is called.
    """
    known = 80
    while True:
        low, high = _half_exp(size, scale, copies, known)
        if bits + 1 <= low:
            return True
        if bits >= high:
            return False
        bits, known = bits << 64 | more(), known + 64


def _half_exp(size: float, scale: float, copies: int, bits: int) -> tuple[int, int]:
    """Integers around ``2^bits exp(-u) / 2``."""
    digits = bits // 3 + 20
    with localcontext(Context(prec=digits)) as context:
        unit = Decimal(10) ** (1 - digits)
        u = Decimal(size) / (Decimal(scale) * Decimal(copies).sqrt())  # errs by two units of itself
        if u > bits:
            return 0, 1
        middle, error = (-u).exp() * 2 ** (bits - 1), (4 * u + 4) * unit
        context.rounding = ROUND_FLOOR
        low = (middle * (1 - error)).to_integral_value()
        context.rounding = ROUND_CEILING
        return int(low), int((middle * (1 + error)).to_integral_value())


class _Undecided(NamedTuple):
    """A coordinate some of whose bits the kernel could not decide."""

    place: int
    value: float
    words: Words


class _Drawing:
    """All the bits of one key: word k j + i belongs to copy i of coordinate j."""

    def __init__(self, kernel: Kernel, stream: KeyStream, copies: int, scale: float) -> None:
        self._kernel, self._stream = kernel, stream
        self._copies, self._scale = copies, check_scale(scale)
        self._root = math.sqrt(copies)

    def count(self, segment: Segment, counts: Counts) -> None:
        """Write the counts of a segment to their place among all."""
        place = counts[segment.position : segment.position + segment.stop - segment.start]
        undecided: list[_Undecided] = []
        for start, values, found in self._chunks(segment, undecided, write=False):
            place[start : start + len(values)] = found
        if undecided:
            place[[item.place for item in undecided]] = self._decide(undecided, segment.position)

    def replace(self, segment: Segment) -> None:
        """Replace the coordinates of a segment by their estimates."""
        undecided: list[_Undecided] = []
        for _, values, found in self._chunks(segment, undecided, write=True):
            self._write(values, found)
        if not undecided:
            return
        exact: NDArray[np.float64] = np.empty(len(undecided))
        self._write(exact, self._decide(undecided, segment.position))
        for item, estimate in zip(undecided, exact.tolist(), strict=True):
            start = segment.start + item.place
            for values in segment.part.chunks(1, start, start + 1, write=True):
                lowest, highest = finite_range(values.dtype)
                values[0] = min(max(estimate, lowest), highest)

    def replace_elsewhere(self, found: Sequence[Segment]) -> list[Segment]:
        """:meth:`replace` on devices; the segments with a bit that takes more to decide."""
        return _on_devices().replace(found, **self._law, write=self._write)

    def count_elsewhere(self, found: Sequence[Segment], counts: Counts) -> list[Segment]:
        """:meth:`count` on devices; the segments with a bit that takes more to decide."""
        return _on_devices().count(found, **self._law, counts=counts)

    @property
    def _law(self) -> dict[str, Any]:
        key = cast("ChaChaStream", self._stream).key
        return {"key": key, "copies": self._copies, "scale": self._scale}

    def _write(self, values: Floats, found: Counts) -> None:
        if self._copies < _MANY:
            self._kernel.write(values, found, self._root * self._scale / self._copies, self._copies)
        else:
            exact = estimates(found, copies=self._copies, scale=self._scale)
            values[:] = exact.clip(*finite_range(values.dtype))

    def _chunks(
        self, segment: Segment, undecided: list[_Undecided], *, write: bool
    ) -> Generator[tuple[int, Floats, Counts]]:
        """The segment's values in pieces, where in it each begins, and its counts."""
        copies, start = self._copies, 0
        stream = self._stream.reader(2 * copies * segment.position)
        together = max(1, _BITS // copies)
        zeros = memoryview(bytes(2 * copies * together))
        room, counts = bytearray(len(zeros) + 63), np.empty(together, dtype=np.uint32)
        for values in segment.chunks(together, write=write):
            size = len(values)
            stream.update_into(zeros[: 2 * copies * size], room)
            words = np.frombuffer(room, dtype="<u2", count=copies * size)
            found = counts[:size]
            inverse = 1 / (self._root * self._scale)
            for i in self._kernel.count(values, words, inverse, copies, found).tolist():
                own = words[i * copies : (i + 1) * copies].copy()
                undecided.append(_Undecided(start + i, float(values[i]), own))
                found[i] = 0
            yield start, values, found
            start += size

    def _decide(self, undecided: Sequence[_Undecided], position: int) -> Counts:
        """The counts of coordinates that a kernel left undecided, with more bits.

        Each bit has bits of its own to go on with, so that the result does not depend on which a
        kernel leaves undecided, nor on what it made of the others of a coordinate.
        """
        k = self._copies
        values: NDArray[np.float64] = np.array([item.value for item in undecided])
        words: Words = np.array([item.words for item in undecided])
        with np.errstate(over="ignore"):
            threshold = 2.0**15 * np.exp(-np.abs(values / self._scale / self._root))
        first = np.floor(threshold - _ERROR).clip(min=0).astype(np.uint16)[:, None]
        second = np.ceil(threshold + _ERROR).astype(np.uint16)[:, None]
        down: NDArray[np.intp] = np.count_nonzero(words < first, axis=1)
        rows, columns = ((words >= first) & (words < second)).nonzero()
        numbers = [
            k * (position + undecided[row].place) + column
            for row, column in zip(rows.tolist(), columns.tolist(), strict=True)
        ]
        further = self._stream.further(numbers)
        left = threshold[rows] - words[rows, columns] - further * 2.0**-64
        flipped = left > _ERROR
        for i in (np.abs(left) <= _ERROR).nonzero()[0].tolist():
            item = undecided[int(rows[i])]
            bits = int(item.words[columns[i]]) << 64 | int(further[i])
            more = self._stream.endless(numbers[i])
            flipped[i] = flips(abs(item.value), self._scale, k, bits, more)
        np.add.at(down, rows, flipped)
        return np.where(values >= 0, k - down, down).astype(np.uint32)


def check_copies(copies: int) -> int:
    """A number of copies whose bits fit into memory."""
    k = _validate.integer("copies", copies, least=1)
    if k > _MOST_COPIES:
        raise ValueError(f"copies must be at most {_MOST_COPIES}, got {copies!r}")
    return k


def _inverse(mean: NDArray[np.float64], copies: int) -> NDArray[np.float64]:
    """u, from the mean of its copies' signs; as if half a copy had another sign where none has."""
    return np.copysign(np.log1p(-np.minimum(np.abs(mean), 1 - 0.5 / copies)), mean)


@lru_cache(maxsize=64)
def _gain(copies: int) -> float:
    """How fast the mean of :func:`_inverse` grows with u, at zero."""
    x = np.arange(copies + 1)
    logs = np.concatenate([[0.0], np.cumsum(np.log(np.arange(1, copies + 1)))])
    weights = np.exp(logs[-1] - logs - logs[::-1] - copies * math.log(2))
    mean = 2 * x / copies - 1
    return copies * float((weights * mean * _inverse(mean, copies)).sum())


def _choose_kernel(compiled: bool | None) -> Kernel:
    if compiled is False:
        return cast("Kernel", signs_numpy)
    try:
        from lap2.noise import signs_compiled  # noqa: PLC0415 - numba is optional
    except (ImportError, OSError, RuntimeError):  # or numba has no folder to keep its work in
        if compiled:
            raise ImportError("compiled=True needs numba: pip install 'lap2[fast]'") from None
        return cast("Kernel", signs_numpy)
    return cast("Kernel", signs_compiled)
