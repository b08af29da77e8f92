"""What a source of noise is, and what its rounding does to the noise multiplier."""

import math
from typing import Any, Protocol

from lap2 import _validate

__all__ = ["Sampler", "accounted_noise_multiplier", "check_law"]


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

    >>> from lap2.noise import SecureLaplace
    >>> accounted_noise_multiplier(SecureLaplace(), scale=2.0, max_grad_norm=1.0, size=10_000)
    1.9999996...
    """
    clip = _validate.positive("max_grad_norm", max_grad_norm)
    widened = clip + sampler.added_sensitivity(scale, size)
    return math.nextafter(scale / math.nextafter(widened, math.inf), 0.0)


def check_law(sampler: Sampler, law: str) -> None:
    """Refuse a sampler of this package whose noise is of another law than is accounted.

    Raises:
        ValueError: it is.
    """
    drawn = getattr(sampler, "law", law)
    if drawn != law:
        raise ValueError(
            f"sampler must draw {law} noise, which is what is accounted here, got "
            f"{type(sampler).__name__}, which draws {drawn} noise"
        )
