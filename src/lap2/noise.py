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
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar, NoReturn, Protocol, cast

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from numpy.typing import NDArray

from lap2 import _arrays, _noise_exact, _noise_numpy, _validate
from lap2._noise_numpy import Floats, Noise, Words

__all__ = [
    "EntropyError",
    "ReproducibleGaussian",
    "ReproducibleLaplace",
    "Sampler",
    "SecureGaussian",
    "SecureLaplace",
    "accounted_noise_multiplier",
    "check_law",
    "new_key",
]

Job = tuple[_arrays.Flat, int, int, int]
"""A part, where in it to start and to stop, and the position of its first coordinate in all."""
Draw = Callable[[Words, float, Noise], NDArray[np.intp]]

_CHUNK = 1 << 14
"""Coordinates handled at a time: their temporaries fit the cache."""
_ZEROS = memoryview(bytes(8 * (_CHUNK + 2)))
_SEGMENT = 1 << 20
"""Coordinates given to one thread at a time."""
_EXTENSION = 1 << 127
"""Where in the key stream's counter the bits for refinement begin, far behind all words."""


class EntropyError(RuntimeError):
    """The operating system gave no randomness. There is no fallback."""


class Sampler(Protocol):
    """Adds noise in place."""

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


def check_law(sampler: Sampler, law: str) -> None:
    """Refuse a sampler of this module whose noise is of another law than is accounted.

    Raises:
        ValueError: it is.
    """
    drawn = getattr(sampler, "law", law)
    if drawn != law:
        raise ValueError(
            f"sampler must draw {law} noise, which is what is accounted here, got "
            f"{type(sampler).__name__}, which draws {drawn} noise"
        )


class Kernel(Protocol):
    """The arithmetic of a chunk, as in :mod:`lap2._noise_numpy`.

    All kernels agree in every bit once all samples are decided.
    """

    fits: Callable[[Floats, float], bool]
    laplace: Draw
    gaussian: Draw
    add: Callable[[Floats, Noise, float], None]


_LAWS = {"laplace": (1, _noise_exact.laplace_steps), "gaussian": (2, _noise_exact.gaussian_steps)}
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
        jobs, size, grid = _checked(self._kernel, array, scale)
        noise = _KeyedNoise(self._kernel, self.law, key, grid, float(scale) / grid)
        _for_each(noise.add, jobs, size)
        return _added_sensitivity(grid, size)

    def __reduce__(self) -> NoReturn:
        """Refuse pickling, so that no one believes that randomness was saved."""
        name = type(self).__name__
        raise TypeError(f"{name} must not be pickled: make a new one where it is needed")


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


class _ReproducibleNoise:
    """What the seeded samplers have in common."""

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
        jobs, _, _ = _checked(_noise_numpy, array, scale)
        for part, start, stop, _ in jobs:
            for values in part.chunks(_CHUNK, start, stop, write=True):
                noise = self._standard(values.size)
                noise *= float(scale)
                noise += values
                np.clip(noise, *_arrays.finite_range(values.dtype), out=noise)
                values[:] = noise
        return 0.0

    def _standard(self, size: int) -> Noise:
        raise NotImplementedError


class ReproducibleLaplace(_ReproducibleNoise):
    """Fast, seeded Laplace noise for experiments: **no guarantee** holds for what uses it.

    Args:
        seed: the same seed gives the same noise, on every machine with the same NumPy.
    """

    law = "laplace"

    def _standard(self, size: int) -> Noise:
        magnitudes = self._rng.standard_exponential(size)
        return magnitudes * (1 - 2 * self._rng.integers(0, 2, size, dtype=np.int8))


class ReproducibleGaussian(_ReproducibleNoise):
    """Fast, seeded Gaussian noise for experiments: **no guarantee** holds for what uses it.

    Args:
        seed: as for :class:`ReproducibleLaplace`.
    """

    law = "gaussian"

    def _standard(self, size: int) -> Noise:
        return self._rng.standard_normal(size)


def _choose_kernel(compiled: bool | None) -> Kernel:
    if compiled is False:
        return _noise_numpy
    try:
        from lap2 import _noise_compiled  # noqa: PLC0415 - numba is optional
    except (ImportError, OSError, RuntimeError):  # or numba has no folder to keep its work in
        if compiled:
            raise ImportError("compiled=True needs numba: pip install 'lap2[fast]'") from None
        return _noise_numpy
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
                raise ValueError(
                    f"array must be finite and smaller than {limit!r} (2^62 grid steps) at scale "
                    f"{scale!r}, got a coordinate that is not"
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
    """All the noise of one key: word k belongs to coordinate k, or both of a pair to both."""

    def __init__(self, kernel: Kernel, law: str, key: bytes, grid: float, ratio: float) -> None:
        self._kernel, self._key, self._grid, self._ratio = kernel, key, grid, ratio
        self._draw: Draw = getattr(kernel, law)
        self._together, self._steps = _LAWS[law]

    def add(self, job: Job) -> None:
        part, start, stop, position = job
        stream, rest = self._encryptor(position // 2), b""
        for values in part.chunks(_CHUNK, start, stop, write=True):
            skipped = position % 2  # a block of the cipher has two words
            count = skipped + values.size
            count += count % 2
            block = rest + stream.update(_ZEROS[: 8 * count - len(rest)])
            rest = block[-16:] if (position + values.size) % 2 else b""
            words, noise = np.frombuffer(block, dtype="<u8"), np.empty(count)
            for index in self._draw(words, self._ratio, noise).tolist():
                noise[index] = self._refined(words, index, position - skipped + index)
            self._kernel.add(values, noise[skipped : skipped + values.size], self._grid)
            position += values.size

    def _refined(self, words: Words, index: int, position: int) -> float:
        """What the kernel left undecided, of its words and as many more bits as it takes.

        Each draw has its own range of the counter, so that the result does not depend on which
        samples a kernel leaves undecided.
        """
        which = position % self._together
        own = words[index - which : index - which + self._together].tolist()
        stream = self._encryptor(_EXTENSION + ((position - which) << 32))

        def more() -> int:
            return int.from_bytes(stream.update(bytes(8)), "big")

        return self._steps(own, which, more, self._ratio)

    def _encryptor(self, counter: int) -> Any:
        mode = modes.CTR(counter.to_bytes(16, "big"))
        return Cipher(algorithms.AES(self._key), mode).encryptor()
