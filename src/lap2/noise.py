"""Laplace noise that is private on a real machine.

Floating-point Laplace noise of the usual kind leaves holes in its support that tell the secret.
Here the sum is rounded to a grid of power-of-two spacing g and released as

    (Q + floor(X / g) + 1/2) g,     Q = round(S / g),  X an ideal Laplace(b) variate.

Q is a vector of integers, so this equals ``(floor((g Q + X) / g) + 1/2) g``: a post-processing of
the ideal continuous mechanism on ``g Q``, and every accountant of that mechanism holds
(docs/noise.md). Rounding moves two neighbours' sums apart by at most ``sqrt(n) g``, which the
samplers report as added sensitivity and the accountant must be told.
"""

import math
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from decimal import Context, Decimal
from typing import Any, NoReturn, Protocol, cast

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from numpy.typing import NDArray

from lap2 import _arrays, _validate

__all__ = [
    "EntropyError",
    "ReproducibleLaplace",
    "Sampler",
    "SecureLaplace",
    "accounted_noise_multiplier",
    "new_key",
]

Words = NDArray[np.uint64]
Noise = NDArray[np.float64]
Floats = NDArray[np.float64] | NDArray[np.float32]
Job = tuple[_arrays.Flat, int, int, int]
"""A part, where in it to start and to stop, and the position of the first word it takes."""

_CHUNK = 1 << 14
"""Coordinates handled at a time: their temporaries fit the cache."""
_ZEROS = memoryview(bytes(8 * _CHUNK))
_SEGMENT = 1 << 20
"""Coordinates given to one thread at a time."""
_U = np.uint64((1 << 63) - 1)
"""The bits of a word that belong to the uniform variate; the other one is the sign."""
_EXTENSION = 1 << 127
"""Where in the key stream's counter the bits for refinement begin, far behind all words."""


class EntropyError(RuntimeError):
    """The operating system gave no randomness. There is no fallback."""


class Sampler(Protocol):
    """Adds Laplace noise in place."""

    is_secure: bool
    """Whether a guarantee may rest on this noise."""

    def added_sensitivity(self, scale: float, size: int) -> float:
        """How much adding noise widens the l2 distance of two neighbouring sums; rounded up."""
        ...

    def add(self, array: Any, scale: float) -> float:
        """Add noise of the given scale to every coordinate, in place; the sensitivity it adds."""
        ...


def accounted_noise_multiplier(
    sampler: Sampler, *, scale: float, max_grad_norm: float, size: int
) -> float:
    """What to account for: ``b / C'`` with ``C' = C +`` the added sensitivity, rounded down.

    >>> accounted_noise_multiplier(SecureLaplace(), scale=2.0, max_grad_norm=1.0, size=10_000)
    1.9999996...
    """
    clip = _validate.positive("max_grad_norm", max_grad_norm)
    widened = clip + sampler.added_sensitivity(scale, size)
    return math.nextafter(scale / math.nextafter(widened, math.inf), 0.0)


class SecureLaplace:
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

    is_secure = True

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
            scale: the Laplace scale b.

        Returns:
            The added sensitivity.

        Raises:
            ValueError: a coordinate is not finite, or 2^62 grid steps large (which is at least
                2^29 scales); then nothing has been changed.
            EntropyError: the operating system gave no randomness; then nothing has been changed.
        """
        return self._add_with_key(array, scale, new_key())

    def _add_with_key(self, array: Any, scale: float, key: bytes) -> float:
        jobs, size, grid = _checked(self._kernel, array, scale)
        noise = _KeyedNoise(self._kernel, key, grid, float(scale) / grid)
        _for_each(noise.add, jobs, size)
        return _added_sensitivity(grid, size)

    def __reduce__(self) -> NoReturn:
        """Refuse pickling, so that no one believes that randomness was saved."""
        raise TypeError("SecureLaplace must not be pickled: make a new one where it is needed")


class ReproducibleLaplace:
    """Fast, seeded Laplace noise for experiments: **no guarantee** holds for what uses it.

    Args:
        seed: the same seed gives the same noise, on every machine with the same NumPy.
    """

    is_secure = False

    def __init__(self, seed: int) -> None:
        """Start the generator."""
        self._rng = np.random.default_rng(_validate.integer("seed", seed, least=0))

    def added_sensitivity(self, scale: float, size: int) -> float:
        """Zero: nothing is rounded."""
        _grid(scale, _validate.integer("size", size, least=0))
        return 0.0

    def add(self, array: Any, scale: float) -> float:
        """Add noise in place. Refuses and clamps what :class:`SecureLaplace` does."""
        jobs, _, _ = _checked(NumpyKernel, array, scale)
        for part, start, stop, _ in jobs:
            for values in part.chunks(_CHUNK, start, stop, write=True):
                noise = self._rng.standard_exponential(values.size) * float(scale)
                noise *= 1 - 2 * self._rng.integers(0, 2, values.size, dtype=np.int8)
                noise += values
                np.clip(noise, *_arrays.finite_range(values.dtype), out=noise)
                values[:] = noise
        return 0.0


class Kernel(Protocol):
    """The arithmetic of a chunk. All kernels agree in every bit once all samples are decided."""

    @staticmethod
    def fits(values: Floats, limit: float) -> bool:
        """Whether all values are between ``-limit`` and ``limit``; NaN is not."""
        ...

    @staticmethod
    def draw(words: Words, ratio: float, noise: Noise) -> NDArray[np.intp]:
        """Write ``floor(X / g) + 1/2`` for each word; the indices left undecided (NaN in noise)."""
        ...

    @staticmethod
    def add(values: Floats, noise: Noise, grid: float) -> None:
        """Round ``values`` to the grid, add ``noise`` grid steps and clamp, in place."""
        ...


class NumpyKernel:
    """The kernel that needs nothing but NumPy."""

    @staticmethod
    def fits(values: Floats, limit: float) -> bool:
        """Two passes, without a temporary array."""
        return float(values.max()) < limit and float(values.min()) > -limit

    @staticmethod
    def draw(words: Words, ratio: float, noise: Noise) -> NDArray[np.intp]:
        """The first bit of a word is the sign, the other 63 are u and begin U; X = -b ln U, signed.

        ``floor(-ln(U) b/g)`` is trusted where it is further from an integer than float64 can err
        (taking the platform's logarithm to be right to 2^-50) and than the bits of U that follow
        can matter, which is 1/u.
        """
        u = words & _U
        noise[:] = u
        margin = u.view(np.float64)  # u is done with: memory that is in the cache is faster
        with np.errstate(divide="ignore", invalid="ignore"):  # u = 0
            np.divide(ratio, noise, out=margin)
            noise *= 2.0**-63
            y = np.log(noise, out=noise)
            y *= -ratio
            middle = y * 2.0**-49
            margin += middle
            margin += ratio * 2.0**-50
            np.floor(y, out=middle)
            middle += 0.5
            y -= middle
        np.abs(y, out=y)
        np.subtract(0.5, y, out=y)
        undecided = (~(y > margin)).nonzero()[0]
        np.copysign(middle, words.view(np.float64), out=noise)
        noise[undecided] = np.nan
        return undecided

    @staticmethod
    def add(values: Floats, noise: Noise, grid: float) -> None:
        """The float64 sum is a correctly rounded function of the exact one: post-processing."""
        released = values.astype(np.float64)
        released *= 1 / grid
        np.rint(released, out=released)
        released += noise
        released *= grid
        np.clip(released, *_arrays.finite_range(values.dtype), out=released)
        values[:] = released


def _choose_kernel(compiled: bool | None) -> Kernel:
    if compiled is False:
        return NumpyKernel
    try:
        from lap2 import _noise_compiled  # noqa: PLC0415 - numba is optional
    except (ImportError, OSError, RuntimeError):  # or numba has no folder to keep its work in
        if compiled:
            raise ImportError("compiled=True needs numba: pip install 'lap2[fast]'") from None
        return NumpyKernel
    return cast("Kernel", _noise_compiled)


def new_key() -> bytes:
    """256 bits from the operating system, for one use; there is no fallback."""
    try:
        return os.urandom(32)
    except (NotImplementedError, OSError) as error:
        raise EntropyError(
            "the operating system gave no randomness: no noise can be made"
        ) from error


def _grid(scale: float, size: int) -> float:
    """The spacing: 2^-30 of the power of two below the scale, 2^-32 above 1e8 coordinates."""
    b = _validate.positive("scale", scale)
    if not 2.0**-900 <= b <= 2.0**900:
        raise ValueError(f"scale must be between 2^-900 and 2^900, got {scale!r}")
    fineness = 30 if size <= 100_000_000 else 32
    return math.ldexp(1.0, math.frexp(b)[1] - 1 - fineness)


def _added_sensitivity(grid: float, size: int) -> float:
    return math.nextafter(math.sqrt(size) * grid, math.inf) if size else 0.0


def _checked(kernel: Kernel, array: Any, scale: float) -> tuple[list[Job], int, float]:
    """What is to be done, for how many coordinates, and the grid, once all are known to fit it."""
    jobs, size = _jobs(_arrays.flat_parts(array))
    grid = _grid(scale, size)
    limit = grid * 2.0**62

    def check(job: Job) -> None:
        part, start, stop, _ = job
        for values in part.chunks(_CHUNK, start, stop, write=False):
            if not kernel.fits(values, limit):
                worst = float(values[np.argmax(np.abs(values))])
                raise ValueError(
                    f"array must be finite and smaller than {limit!r} (2^62 grid steps) at scale "
                    f"{scale!r}, got a coordinate {worst!r}"
                )

    _for_each(check, jobs, size)
    return jobs, size, grid


def _jobs(parts: list[_arrays.Flat]) -> tuple[list[Job], int]:
    """The parts in segments, and their total size."""
    jobs: list[Job] = []
    word = 0
    for part in parts:
        starts = range(0, part.size, _SEGMENT)
        jobs += [(part, start, min(part.size, start + _SEGMENT), word + start) for start in starts]
        word += part.size
    return jobs, word


def _for_each(task: Callable[[Job], None], jobs: list[Job], size: int) -> None:
    """Do all jobs, on all cores if there is enough to do."""
    if size > _SEGMENT:
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(task, jobs))
    else:
        for job in jobs:
            task(job)


class _KeyedNoise:
    """All the noise of one key: word k belongs to coordinate k, whoever asks for it."""

    def __init__(self, kernel: Kernel, key: bytes, grid: float, ratio: float) -> None:
        self._kernel, self._key, self._grid, self._ratio = kernel, key, grid, ratio

    def add(self, job: Job) -> None:
        part, start, stop, word = job
        stream = self._encryptor(word // 2)  # a block of the cipher has two words
        if word % 2:
            stream.update(bytes(8))
        for values in part.chunks(_CHUNK, start, stop, write=True):
            words = np.frombuffer(stream.update(_ZEROS[: 8 * values.size]), dtype="<u8")
            noise = np.empty(values.size)
            for index in self._kernel.draw(words, self._ratio, noise).tolist():
                noise[index] = self._refined(int(words[index]), word + index)
            self._kernel.add(values, noise, self._grid)
            word += values.size

    def _refined(self, word: int, index: int) -> float:
        """What the kernel left undecided, with as many more bits of U as it takes.

        Each index has its own range of the counter, so that the result does not depend on which
        samples a kernel leaves undecided.
        """
        stream = self._encryptor(_EXTENSION + (index << 32))
        numerator, bits, magnitude = word & int(_U), 63, None
        while magnitude is None:
            numerator = (numerator << 64) | int.from_bytes(stream.update(bytes(8)), "big")
            bits += 64
            magnitude = exact_floor(numerator, bits, self._ratio)
        return -(magnitude + 0.5) if word >> 63 else magnitude + 0.5

    def _encryptor(self, counter: int) -> Any:
        mode = modes.CTR(counter.to_bytes(16, "big"))
        return Cipher(algorithms.AES(self._key), mode).encryptor()


def exact_floor(numerator: int, bits: int, ratio: float) -> int | None:
    """``floor(-ln(U) ratio)`` for all U in ``[numerator, numerator + 1) / 2^bits``.

    None if that is not one number, or is too close to call with digits in proportion to the bits.
    """
    if numerator == 0:
        return None
    digits = bits // 4
    decimal = Context(prec=digits)
    log = decimal.ln(decimal.divide(Decimal(numerator), Decimal(1 << bits))).copy_negate()
    # The quotient, its logarithm, and the sums and products below err by less than ten units in
    # the last place of the logarithm; the bits of U that follow take away 1/numerator at most.
    unit = decimal.scaleb(Decimal(1), max(log.adjusted(), 0) + 1 - digits)
    slack = decimal.fma(unit, 100, decimal.divide(Decimal(1), Decimal(numerator)))
    low, high = (
        math.floor(decimal.multiply(bound, Decimal(ratio)))
        for bound in (decimal.subtract(log, slack), decimal.add(log, slack))
    )
    return high if high == max(low, 0) else None  # the logarithm of U < 1 is negative
