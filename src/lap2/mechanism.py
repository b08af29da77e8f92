"""Descriptions of what one step releases: frozen, inert, validated when made.

A description says nothing about sampling or about how often the step is taken: those are
arguments of :meth:`lap2.Accountant.compose`. In all of them ``noise_multiplier`` is the noise
parameter divided by the clip: ``b / C`` for Laplace noise of scale ``b`` (whose standard
deviation is ``sqrt(2) b``), ``sigma / C`` for Gaussian noise. Zero is a legal value and costs
an infinite epsilon.
"""

import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

from lap2 import _validate

__all__ = [
    "Gaussian",
    "Joint",
    "Laplace",
    "LaplaceL1",
    "MajorizedLaplace",
    "Mechanism",
    "NotAGuaranteeWarning",
    "PublishedLaplace",
    "SingleGroup",
]


class NotAGuaranteeWarning(UserWarning):
    """What was asked for yields numbers that are not differential-privacy guarantees."""


@dataclass(frozen=True)
class Mechanism:
    """Base of all descriptions.

    Being one is not enough to be accounted: :func:`lap2.divergence.worst_shift` must know the
    type, and refuses the ones it does not.
    """

    bound: ClassVar[str]
    """In a few words, which bound the accountant computes for this description."""

    is_guarantee: ClassVar[bool] = True
    """Whether that bound is a proven upper bound for the mechanism described."""


@dataclass(frozen=True)
class _Scaled(Mechanism):
    noise_multiplier: float

    def __post_init__(self) -> None:
        value = _validate.non_negative("noise_multiplier", self.noise_multiplier)
        object.__setattr__(self, "noise_multiplier", value)


@dataclass(frozen=True)
class Laplace(_Scaled):
    """A vector of l2 norm at most C plus independent Laplace(b) noise on each coordinate.

    Attributes:
        noise_multiplier: b / C.
        dimension: number of coordinates, below 2^63, or ``math.inf`` for the bound that holds in
            every dimension (it equals the Gaussian mechanism with sigma = b).

    Formal guarantee:
        The moments are exact for the worst pair of neighbours (docs/theory.md, theorem 1).
    """

    dimension: int | float
    bound: ClassVar[str] = "exact worst case over the l2 ball"

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "dimension", _validate.dimension("dimension", self.dimension))


@dataclass(frozen=True)
class LaplaceL1(_Scaled):
    """A vector of **l1** norm at most C plus independent Laplace(b) noise: the classical baseline.

    Formal guarantee:
        The moments are exact; the worst case moves a single coordinate by C.
    """

    bound: ClassVar[str] = "exact worst case over the l1 ball"


@dataclass(frozen=True)
class Gaussian(_Scaled):
    """A vector of l2 norm at most C plus independent normal noise of standard deviation sigma.

    Formal guarantee:
        The moments are those of Mironov, Talwar and Zhang (2019) at integer orders, exact.
    """

    bound: ClassVar[str] = "exact Gaussian moments"


@dataclass(frozen=True)
class _Majorized(_Scaled):
    dimension: int

    def __post_init__(self) -> None:
        super().__post_init__()
        value = _validate.finite_dimension("dimension", self.dimension)
        object.__setattr__(self, "dimension", value)


@dataclass(frozen=True)
class MajorizedLaplace(_Majorized):
    """The same release as :class:`Laplace`, bounded through the paper's majorization set.

    Formal guarantee:
        A valid upper bound, looser than :class:`Laplace` (docs/theory.md, section 5). The
        dimension must be finite: the bound grows without limit with it.
    """

    bound: ClassVar[str] = "majorization set, one shared sample (upper bound)"


@dataclass(frozen=True)
class PublishedLaplace(_Majorized):
    """The same release as :class:`Laplace`, by Theorem III.7 of the Lap2 paper as printed.

    Formal guarantee:
        **None.** The expression lets every coordinate draw its own sample and can under-report
        epsilon by a factor of 28 and more (docs/theory.md, section 4). It is here to reproduce the
        paper; making one warns, and every answer built on it says ``is_guarantee = False``.
    """

    bound: ClassVar[str] = "published Theorem III.7, NOT a guarantee"
    is_guarantee: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        warnings.warn(
            "PublishedLaplace reproduces the published multivariate bound, which is not a "
            "privacy guarantee: see docs/theory.md, section 4 (the published bound)",
            NotAGuaranteeWarning,
            stacklevel=3,
        )


SingleGroup = Laplace | LaplaceL1 | Gaussian | MajorizedLaplace | PublishedLaplace
"""The descriptions with one noise multiplier."""


@dataclass(frozen=True)
class Joint(Mechanism):
    """Several groups of coordinates released from the *same* sample.

    Per-layer clipping, an extra noisy count, a second gradient-like vector: each group has its
    own clip, noise and dimension, and one record may move all of them at once.

    Attributes:
        groups: the descriptions of the groups, in any mixture of Laplace and Gaussian.

    Formal guarantee:
        Exact when every group's own bound is exact (docs/theory.md, section 6). Under sampling
        it costs *more* than the groups as separate steps would, each with a sample of its own:
        accounting one sample's groups as separate steps is the error of the published bound.
        What a group releases must not depend on another group's noisy answer of the same step.
    """

    groups: tuple[Mechanism, ...]
    bound: ClassVar[str] = "joint worst case of all groups"

    def __init__(self, groups: Iterable[Mechanism]) -> None:
        """Describe a joint release of ``groups``."""
        members = tuple(groups)
        if not members:
            raise ValueError("groups must hold at least one mechanism, got none")
        for position, group in enumerate(members):
            if not isinstance(group, (Laplace, LaplaceL1, Gaussian, MajorizedLaplace)):
                raise TypeError(
                    f"groups[{position}] must be Laplace, LaplaceL1, Gaussian or "
                    f"MajorizedLaplace, got {group!r}"
                )
        object.__setattr__(self, "groups", members)
