"""Signs of tensors outside the CPU's memory, drawn where these are (docs/noise.md, section 9).

The same bits as :class:`lap2.noise.keystream.ChaChaStream` and :mod:`lap2.noise.signs` make of the
same key, in whole chunks of tensor operations of which none waits for the host. What they cannot
decide, which is next to nothing, is left for the arithmetic of the host.

It is assumed of a device that its integers are those of two's complement, that it rounds sums and
products as IEEE 754 does (numbers below ``2^-126`` may be zero), and that its exponential of a
float32 errs by at most 28 units in the last place, and of a float64 by at most 4096: CUDA documents
2 and 1.
"""

# pyright: basic

import math
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from subprocess import SubprocessError
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lap2.noise.arrays import Segment, flat_parts

__all__ = ["blocks", "count", "finite", "key_words", "replace"]

_WORDS = 1 << 23
"""Bits decided at a time; about 25 bytes of memory for each."""
_MARGIN = 2.0**-3
"""How far a threshold for a word of 16 bits may be from the exact one. Nearly all of it is for the
exponential, times ``2^15``: 28 units in the last place are at most ``28 2^-8``. Its argument, wrong
by ``2^-23`` of itself, adds ``2^-9``."""
_ERROR = 2.0**-24
"""The same in float64, of which 4096 units in the last place are half; and for 32 further bits, not
64."""
_SAFE = 2.0**100
"""Within this and its inverse, a factor takes float32 to float32 without loss that matters."""
_COMPILED = ("cuda",)
"""Kinds of devices on which the cipher is compiled if that works."""
_NO_DOUBLES = ("mps",)
"""Kinds of devices without float64: what takes it, the CPU does for them."""


def finite(found: Sequence[Segment]) -> bool:
    """Whether all coordinates are; one answer from each device."""
    flags: dict[torch.device, list[Tensor]] = {}
    for segment in found:
        values = _wide(_read(segment))
        flags.setdefault(values.device, []).append(values.isfinite().all())
    return all(torch.stack(answers).all().item() for answers in flags.values())


def replace(
    found: Sequence[Segment],
    *,
    key: bytes,
    copies: int,
    scale: float,
    write: Callable[[Any, Any], None],
) -> list[Segment]:
    """Replace coordinates by their estimates, but for those of the segments that are returned.

    Args:
        found: the segments, in order of their positions, each of at most as many bits as are
            decided at a time, or of one coordinate.
        key: of the ChaCha20 stream.
        copies: k.
        scale: b.
        write: writes the estimates of given counts to a NumPy array of as many.
    """
    tables: dict[Any, Tensor] = {}

    def use(segment: Segment, values: Tensor, positive: Tensor, unsure: Tensor) -> None:
        part: Any = segment.part
        kind = part.dtype, part.device
        if kind not in tables:
            tables[kind] = _estimates(*kind, copies, write)
        new = tables[kind].index_select(0, positive)
        part.write(segment.start, segment.stop, torch.where(unsure, values, new).to(part.dtype))

    return _Drawing(key, copies, scale).each(found, use)


def count(
    found: Sequence[Segment], *, key: bytes, copies: int, scale: float, counts: Any
) -> list[Segment]:
    """Write counts to their places in a NumPy array, but for those of segments returned."""
    narrow = torch.uint8 if copies < 256 else torch.int32

    def use(segment: Segment, _values: Tensor, positive: Tensor, _unsure: Tensor) -> None:
        place = slice(segment.position, segment.position + len(positive))
        counts[place] = positive.to(narrow).cpu().numpy()

    return _Drawing(key, copies, scale).each(found, use)


class _Drawing:
    """All the bits of one key: word k j + i belongs to copy i of coordinate j."""

    def __init__(self, key: bytes, copies: int, scale: float) -> None:
        self._copies, self._scale = copies, scale
        self._root = math.sqrt(copies)
        self._inverse = 1 / (self._root * scale)
        self._key = key_words(key)
        self._keys: dict[torch.device, Tensor] = {}

    def each(
        self, found: Sequence[Segment], use: Callable[[Segment, Tensor, Tensor, Tensor], None]
    ) -> list[Segment]:
        """Use each segment's values, counts and whether these are unsure; the segments that are."""
        flags: dict[torch.device, list[tuple[list[Segment], Tensor]]] = {}
        for together in _chunks(found, max(1, _WORDS // self._copies)):
            values, positive, unsure = self._count(together)
            flags.setdefault(values.device, []).append((together, unsure))
            sizes = [segment.stop - segment.start for segment in together]
            pieces = zip(together, values.split(sizes), positive.split(sizes), strict=True)
            for segment, own, counts in pieces:
                use(segment, own, counts, unsure)
        left: list[Segment] = []
        for answers in flags.values():  # one answer from each device
            unsure = torch.stack([flag for _, flag in answers]).cpu().tolist()
            left += [
                segment
                for (together, _), is_left in zip(answers, unsure, strict=True)
                for segment in together
                if is_left
            ]
        return left

    def _count(self, together: Sequence[Segment]) -> tuple[Tensor, Tensor, Tensor]:
        """The values of segments, as wide as it takes, their counts, and whether one is unsure."""
        position, copies = together[0].position, self._copies
        values = torch.cat([_wide(_read(segment)) for segment in together])
        threshold = self._threshold(values).unsqueeze(1)
        down = torch.zeros(len(values), dtype=torch.int32, device=values.device)
        unsure = torch.zeros((), dtype=torch.bool, device=values.device)
        # More than one piece only of a single coordinate.
        for start in range(0, len(values) * copies, _WORDS):
            size = min(_WORDS, len(values) * copies - start)
            words = self._words(position * copies + start, size, values.device)
            rest = threshold - words.view(len(values), -1)
            flips = rest >= 1 + _MARGIN
            down += flips.sum(dim=1, dtype=torch.int32)
            is_open = (rest > -_MARGIN).logical_xor_(flips).view(-1)
            # Places of the first that are open, without asking how many there are.
            number = is_open.cumsum(0, dtype=torch.int32)
            ranks = torch.arange(1, _room(size) + 1, dtype=torch.int32, device=values.device)
            places = torch.searchsorted(number, ranks)
            real = places < size
            places.clamp_(max=size - 1)
            rows = places // (size // len(values))
            flipped, is_sure = self._settle(
                values[rows], words[places], places + (position * copies + start)
            )
            down.index_add_(0, rows, (flipped & real).int())
            unsure |= (real & ~is_sure).any() | (number[-1] > len(ranks))
        return values, torch.where(values >= 0, copies - down, down), unsure

    def _threshold(self, values: Tensor) -> Tensor:
        """``2^15 exp(-|u|)``, a word of 16 bits below which is a flip; in float32."""
        if not 1 / _SAFE < self._inverse < _SAFE:
            values = values.double()
        size = (values * self._inverse).float().abs_().clamp_(max=60)
        return size.neg_().exp_().mul_(2.0**15)

    def _words(self, first: int, size: int, device: torch.device) -> Tensor:
        """Words of the stream, from one on."""
        start, stop = first // 32, -(-(first + size) // 32)
        numbers = torch.arange(start, stop, device=device)
        words = self._blocks(numbers, use=0).view(torch.int16).view(-1)
        return words[first - 32 * start :][:size].int().bitwise_and_(2**16 - 1)

    def _settle(self, values: Tensor, words: Tensor, numbers: Tensor) -> tuple[Tensor, Tensor]:
        """Whether bits are flips, with 32 bits more for each, and whether that is sure."""
        device = values.device
        if device.type in _NO_DOUBLES:
            values, words, numbers = values.cpu(), words.cpu(), numbers.cpu()
        further = self._blocks(numbers, use=1)[:, 1]  # the upper half of 64 bits
        size = (values.double() / self._scale / self._root).abs_()
        rest = size.neg_().exp_().mul_(2.0**15).sub_(words)
        rest -= (further.long() & (2**32 - 1)).double() * 2.0**-32
        return (rest > _ERROR).to(device), (rest.abs() > _ERROR).to(device)

    def _blocks(self, numbers: Tensor, *, use: int) -> Tensor:
        device = numbers.device
        if device not in self._keys:
            self._keys[device] = self._key.to(device)
        return blocks(self._keys[device], numbers, use=use)


def key_words(key: bytes) -> Tensor:
    """ChaCha20's constants and a key, as words of 32 bits."""
    return torch.tensor(np.frombuffer(b"expand 32-byte k" + key, dtype="<i4").tolist()).int()


def blocks(key: Tensor, numbers: Tensor, *, use: int) -> Tensor:
    """Blocks of :class:`lap2.noise.keystream.ChaChaStream`, of 16 words of 32 bits each.

    Args:
        key: its :func:`key_words`, where the blocks shall be.
        numbers: of the blocks.
        use: of the blocks.
    """
    place = [_low(numbers), _low(numbers >> 32)]
    place += [torch.full_like(place[0], use), torch.zeros_like(place[0])]
    first = torch.cat([key.unsqueeze(1).expand(12, len(numbers)), torch.stack(place)])
    double_round = _compiled(key.device) or _double_round
    state = first.clone()
    for _ in range(10):
        state = double_round(state)
    return (state + first).T.contiguous()


def _double_round(state: Tensor) -> Tensor:
    """Two of ChaCha20's rounds; overwrites what it is given."""
    a, b, c, d = state.split(4)
    for turn in (1, -1):  # columns; then diagonals, which are columns of turned rows
        _quarter_rounds(a, b, c, d)
        b, c, d = b.roll(-turn, 0), c.roll(2, 0), d.roll(turn, 0)
    return torch.cat([a, b, c, d])


def _double_round_apart(state: Tensor) -> Tensor:
    """The same of a tensor for each word, of which a compiler makes one pass through memory."""
    words = [word.clone() for word in state.unbind()]
    for turn in range(2):
        for column in range(4):
            _quarter_rounds(*(words[4 * row + (column + turn * row) % 4] for row in range(4)))
    return torch.stack(words)


@lru_cache(maxsize=8)
def _compiled(device: torch.device) -> Callable[[Tensor], Tensor] | None:
    """A compiled double round, where there is a compiler whose work is right; None elsewhere."""
    if device.type not in _COMPILED:
        return None
    example = torch.arange(16 * 67, device=device).mul_(0x9E3779B97F4A7C15 - 2**64)
    example = _low(example >> 16).view(16, 67)
    try:
        compiled = torch.compile(_double_round_apart, dynamic=True)
        is_right = torch.equal(compiled(example), _double_round(example.clone()))
    except (ImportError, OSError, RuntimeError, SubprocessError):  # nothing to compile with
        return None
    return compiled if is_right else None


def _low(numbers: Tensor) -> Tensor:
    """The lower half of integers of 64 bits, as signed ones of 32."""
    return (((numbers & (2**32 - 1)) ^ 2**31) - 2**31).int()


def _quarter_rounds(a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> None:
    """One in each column, in place."""
    for one, other, third, bits in ((a, b, d, 16), (c, d, b, 12), (a, b, d, 8), (c, d, b, 7)):
        one.add_(other)
        third.bitwise_xor_(one)
        out = (third >> (32 - bits)).bitwise_and_(2**bits - 1)
        third.bitwise_left_shift_(bits).bitwise_or_(out)


def _room(size: int) -> int:
    """More than the places that as many words may leave open, but for one time in ``2^200``.

    One in ``2^16`` is open for each word in a range of ``1 + 2 margins``.
    """
    return min(size, 64 + (size >> 13))


def _chunks(found: Sequence[Segment], most: int) -> Iterator[list[Segment]]:
    """Segments that follow one another on one device, of at most so many coordinates together."""
    together: list[Segment] = []
    start = stop = 0
    for segment in found:
        last = segment.position + segment.stop - segment.start
        if together and (
            segment.position != stop
            or last - start > most
            or _device(segment) != _device(together[0])
        ):
            yield together
            together = []
        start = segment.position if not together else start
        stop = last
        together.append(segment)
    if together:
        yield together


def _device(segment: Segment) -> torch.device:
    part: Any = segment.part
    return part.device


def _read(segment: Segment) -> Tensor:
    part: Any = segment.part
    return part.read(segment.start, segment.stop)


def _wide(values: Tensor) -> Tensor:
    """In a type that devices can calculate with."""
    return values if values.dtype == torch.float64 else values.float()


def _estimates(
    dtype: torch.dtype, device: torch.device, copies: int, write: Callable[[Any, Any], None]
) -> Tensor:
    """What each count is replaced by, rounded to a type as on the CPU."""
    own = torch.empty(copies + 1, dtype=dtype)
    for values in flat_parts(own)[0].chunks(copies + 1, 0, copies + 1, write=True):
        write(values, np.arange(copies + 1, dtype=np.uint32))
    return _wide(own).to(device)
