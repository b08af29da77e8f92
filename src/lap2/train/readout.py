"""In which form a noisy sum leaves, and in which basis noise is added to it.

Of Laplace noise on l2-clipped sums, only the signs are released by default: see
:mod:`lap2.noise.signs`, and :mod:`lap2.train.rotate` for the basis that makes signals small and
alike. Noisy values may be released instead, as they are or clamped, which is free post-processing.
"""

# pyright: basic

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from lap2 import _validate
from lap2.noise import Sampler, SecureGaussian, SecureLaplace, SecureSigns, check_law
from lap2.noise.signs import check_copies
from lap2.signal import copies as enough_copies
from lap2.train.distributed import World

__all__ = ["Copies", "Readout", "ReleaseName"]

ReleaseName = Literal["bits", "values"]
Copies = int | Literal["auto"]


@dataclass(frozen=True)
class Readout:
    """How a sum is made noisy and read out.

    Attributes:
        release: "bits" or "values".
        noise: where randomness comes from.
        tau: values are clamped at so many noise scales, with unit gain for small signals; infinity
            leaves them as they are.
        copies: of each coordinate, whose signs are released; "auto" is as many as are worth it.
    """

    release: ReleaseName
    noise: Sampler
    tau: float = math.inf
    copies: Copies = 1

    @classmethod
    def of(
        cls,
        mechanism: str,
        *,
        release: ReleaseName | None = None,
        copies: Copies = "auto",
        tau: float | None = None,
        noise: Sampler | None = None,
    ) -> "Readout":
        """Check that all of it goes together.

        Args:
            mechanism: "laplace", "gaussian" or "laplace-l1".
            release: by default bits of Laplace noise on l2-clipped sums, unless ``tau`` or
                ``noise`` are of values.
            copies: for bits.
            tau: for values with Laplace noise.
            noise: by default a secure source.
        """
        _validate.choice("mechanism", mechanism, ("laplace", "gaussian", "laplace-l1"))
        if noise is not None:
            check_law(noise, "gaussian" if mechanism == "gaussian" else "laplace")
        draws_bits = mechanism == "laplace" if noise is None else hasattr(noise, "times")
        if release is None:
            release = "bits" if draws_bits and tau is None else "values"
        _validate.choice("release", release, ("bits", "values"))
        if release == "values":
            return cls._of_values(mechanism, copies, tau, noise)
        if mechanism != "laplace":
            raise ValueError(
                f"release must be 'values' for mechanism {mechanism!r}, got 'bits': only Laplace "
                "noise on l2-clipped sums loses nothing where only signs are released"
            )
        if tau is not None:
            raise ValueError(f"tau must be left out where bits are released, got {tau!r}")
        if not draws_bits:
            raise ValueError(
                "sampler must be SecureSigns() for release='bits', got "
                f"{type(noise).__name__}, which adds noise to values"
            )
        if copies != "auto":
            check_copies(copies)
        return cls("bits", noise or SecureSigns(), copies=copies)

    @classmethod
    def _of_values(
        cls, mechanism: str, copies: Copies, tau: float | None, noise: Sampler | None
    ) -> "Readout":
        if hasattr(noise, "times"):
            raise ValueError(
                "sampler must add noise to values for release='values', got "
                f"{type(noise).__name__}, which draws bits"
            )
        if copies != "auto":
            raise ValueError(
                f"copies must be left out where values are released, got {copies!r}: only signs "
                "gain by copies"
            )
        if tau is not None:
            _validate.positive("tau", tau)
            if mechanism == "gaussian":
                raise ValueError(f"tau must be left out for Gaussian noise, got {tau!r}")
        secure = SecureGaussian if mechanism == "gaussian" else SecureLaplace
        return cls("values", noise or secure(), math.inf if tau is None else tau)

    @property
    def spreads(self) -> bool:
        """Whether signals are spread over coordinates: what is bounded tells small ones best."""
        return self.release == "bits" or self.tau < math.inf

    def copies_for(self, dimension: int, *, batch_size: float, noise_multiplier: float) -> int:
        """Of each coordinate of a sum; see :func:`lap2.signal.copies` for the arguments."""
        if self.release == "values":
            return 1
        if self.copies != "auto":
            return self.copies
        return enough_copies(dimension, batch_size=batch_size, noise_multiplier=noise_multiplier)

    def release_from(
        self, sums: list[Tensor], copies: Sequence[int], scale: float, world: World
    ) -> None:
        """Replace the sums of all processes by what is released of their total, in place.

        Args:
            sums: of this process.
            copies: of each coordinate of each sum.
            scale: of the noise.
            world: the processes.
        """
        if self.release == "bits":
            for total, times in zip(sums, copies, strict=True):
                world.release_bits(total, self.noise.times(times), scale)  # type: ignore[attr-defined]
            return
        world.release(sums, lambda part: self.noise.add(part, scale), sliced=self.noise.is_secure)
        if self.tau < math.inf:
            for total in sums:
                total.clamp_(-self.tau * scale, self.tau * scale).mul_(-1 / math.expm1(-self.tau))

    def describe(self, copies: Sequence[int]) -> str:
        """What is released, in words."""
        if self.release == "bits":
            return f"signs of noisy coordinates, {' and '.join(map(str, copies))} of each"
        clamped = f", clamped at {self.tau:g} noise scales" if self.tau < math.inf else ""
        return f"noisy values{clamped}"
