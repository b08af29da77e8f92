"""Laplace and Gaussian noise that is private on a real machine.

Floating-point noise of the usual kind leaves holes in its support that tell the secret.
Here the sum is rounded to a grid of power-of-two spacing g and released as

    (Q + floor(X / g) + 1/2) g,     Q = round(S / g),  X an ideal Laplace(b) or N(0, b^2) variate.

Q is a vector of integers, so this equals ``(floor((g Q + X) / g) + 1/2) g``: a post-processing of
the ideal continuous mechanism on ``g Q``, and every accountant of that mechanism holds
(docs/noise.md). Rounding moves two neighbours' sums apart by at most ``sqrt(n) g``, which the
samplers report as added sensitivity and the accountant must be told.
"""

import math
from collections.abc import Callable
from typing import Any, ClassVar, NoReturn, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from lap2 import _validate
from lap2.noise import grid_exact, grid_numpy
from lap2.noise.arrays import Floats, Segment, flat_parts, for_each, segments
from lap2.noise.grid_numpy import Noise, Words
from lap2.noise.keystream import AesStream, new_key

__all__ = ["SecureGaussian", "SecureLaplace", "check_scale", "checked", "refuse_pickling"]

Draw = Callable[[Words, float, Noise], NDArray[np.intp]]

_CHUNK = 1 << 14
"""Coordinates handled at a time: their temporaries fit the cache."""
_ZEROS = memoryview(bytes(8 * (_CHUNK + 2)))
_SEGMENT = 1 << 20
"""Coordinates given to one thread at a time."""


class Kernel(Protocol):
    """The arithmetic of a chunk, as in :mod:`lap2.noise.grid_numpy`.

    All kernels agree in every bit once all samples are decided.
    """

    fits: Callable[[Floats, float], bool]
    laplace: Draw
    gaussian: Draw
    add: Callable[[Floats, Noise, float], None]


_LAWS = {"laplace": (1, grid_exact.laplace_steps), "gaussian": (2, grid_exact.gaussian_steps)}
"""How many coordinates are made of as many words; and one of them, of all the bits it takes."""


class _SecureNoise:
    """What the secure samplers have in common."""

    is_secure = True
    law: ClassVar[str]

    def __init__(self, *, compiled: bool | None = None) -> None:
        """Choose the kernel; draws no randomness yet."""
        self._kernel = _choose_kernel(compiled)

    def added_sensitivity(self, scale: float, size: int) -> float:
        """``sqrt(n) g``, rounded up: rounding moves each coordinate of a sum by at most g/2."""
        size = _validate.integer("size", size, least=0)
        return _added_sensitivity(_grid(scale, size), size)

    def add(self, array: Any, scale: float) -> float:
        """Add noise to a NumPy array or torch tensor of any float type, in place.

        A result beyond the largest finite number of the array's type is clamped to that number.

        Args:
            array: changed in place; on a device other than the CPU the noise is made on the CPU.
                A list of arrays is noised as if it were one array.
            scale: b of Laplace noise, or the standard deviation of Gaussian noise.

        Returns:
            The added sensitivity.

        Raises:
            ValueError: a coordinate is not finite, or 2^62 grid steps large (which is at least
                2^29 scales); then nothing has been changed.
            EntropyError: the operating system gave no randomness; then nothing has been changed.
        """
        return self._add_with_key(array, scale, new_key())

    def _add_with_key(self, array: Any, scale: float, key: bytes) -> float:
        found, size, grid = checked(self._kernel, array, scale)
        noise = _KeyedNoise(self._kernel, self.law, key, grid, float(scale) / grid)
        for_each(noise.add, found, share=size > _SEGMENT)
        return _added_sensitivity(grid, size)

    def __reduce__(self) -> NoReturn:
        refuse_pickling(self)


class SecureLaplace(_SecureNoise):
    """Exact Laplace noise on a grid, from the operating system's entropy.

    Every call draws a new 256-bit key, expands it with AES in counter mode, and forgets it: there
    is no seed, no state to fork, and nothing to save. Rounding of each variate is certified; the
    few that float64 cannot decide are settled with more random bits in arbitrary precision.

    Formal guarantee:
        The released vector is a post-processing of ``g Q + Laplace(scale)`` with ideal noise,
        where Q is the rounded sum. Accounting for noise multiplier ``scale / (C +
        added_sensitivity)`` covers the release exactly, as far as AES-256 output cannot be told
        from uniform bits.

    Args:
        compiled: True needs numba, False forbids it, None uses it if it is installed. Both ways
            give bit-identical results for the same key.
    """

    law = "laplace"


class SecureGaussian(_SecureNoise):
    """Exact Gaussian noise on a grid: as :class:`SecureLaplace`, and as certified.

    Formal guarantee:
        The released vector is a post-processing of ``g Q + N(0, scale^2)`` with ideal noise, where
        Q is the rounded sum. Accounting for noise multiplier ``scale / (C + added_sensitivity)``
        covers the release exactly, as far as AES-256 output cannot be told from uniform bits.

    Args:
        compiled: as for :class:`SecureLaplace`.
    """

    law = "gaussian"


def refuse_pickling(sampler: object) -> NoReturn:
    """Refuse it, so that no one believes that randomness was saved."""
    name = type(sampler).__name__
    raise TypeError(f"{name} must not be pickled: make a new one where it is needed")


def _choose_kernel(compiled: bool | None) -> Kernel:
    if compiled is False:
        return grid_numpy
    try:
        from lap2.noise import grid_compiled  # noqa: PLC0415 - numba is optional
    except (ImportError, OSError, RuntimeError):  # or numba has no folder to keep its work in
        if compiled:
            raise ImportError("compiled=True needs numba: pip install 'lap2[fast]'") from None
        return grid_numpy
    return cast("Kernel", grid_compiled)


def check_scale(scale: float) -> float:
    """A scale with which float64 neither overflows nor loses precision."""
    b = _validate.positive("scale", scale)
    if not 2.0**-900 <= b <= 2.0**900:
        raise ValueError(f"scale must be between 2^-900 and 2^900, got {scale!r}")
    return b


def _grid(scale: float, size: int) -> float:
    """The spacing: 2^-30 of the power of two below the scale, 2^-32 above 1e8 coordinates."""
    fineness = 30 if size <= 100_000_000 else 32
    return math.ldexp(1.0, math.frexp(check_scale(scale))[1] - 1 - fineness)


def _added_sensitivity(grid: float, size: int) -> float:
    return math.nextafter(math.sqrt(size) * grid, math.inf) if size else 0.0


def checked(kernel: Kernel, array: Any, scale: float) -> tuple[list[Segment], int, float]:
    """Where noise is to be added, to how many coordinates, and the grid, once all fit it."""
    parts = flat_parts(array)
    found, size = segments(parts, _SEGMENT), sum(part.size for part in parts)
    grid = _grid(scale, size)
    limit = grid * 2.0**62

    def check(segment: Segment) -> None:
        for values in segment.chunks(_CHUNK, write=False):
            if not kernel.fits(values, limit):
                raise ValueError(
                    f"array must be finite and smaller than {limit!r} (2^62 grid steps) at scale "
                    f"{scale!r}, got a coordinate that is not"
                )

    for_each(check, found, share=size > _SEGMENT)
    return found, size, grid


class _KeyedNoise:
    """All the noise of one key: word k belongs to coordinate k, or both of a pair to both."""

    def __init__(self, kernel: Kernel, law: str, key: bytes, grid: float, ratio: float) -> None:
        self._kernel, self._stream, self._grid, self._ratio = kernel, AesStream(key), grid, ratio
        self._draw: Draw = getattr(kernel, law)
        self._together, self._steps = _LAWS[law]

    def add(self, segment: Segment) -> None:
        position = segment.position
        together = self._together
        stream, rest = self._stream.reader(8 * (position - position % together)), b""
        for values in segment.chunks(_CHUNK, write=True):
            skipped = (
                position % together
            )  # words of the first pair that belong to coordinates before
            count = skipped + values.size
            count += count % together
            block = rest + stream.update(_ZEROS[: 8 * count - len(rest)])
            rest = block[-8 * together :] if (position + values.size) % together else b""
            words, noise = np.frombuffer(block, dtype="<u8"), np.empty(count)
            for index in self._draw(words, self._ratio, noise).tolist():
                noise[index] = self._refined(words, index, position - skipped + index)
            self._kernel.add(values, noise[skipped : skipped + values.size], self._grid)
            position += values.size

    def _refined(self, words: Words, index: int, position: int) -> float:
        """What the kernel left undecided, of its words and as many more bits as it takes.

        Each draw has bits of its own, so that the result does not depend on which samples a kernel
        leaves undecided.
        """
        which = position % self._together
        own = words[index - which : index - which + self._together].tolist()
        return self._steps(own, which, self._stream.endless(position - which), self._ratio)
