"""Mechanisms by their names on the command line."""

import warnings
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Annotated

import typer

from lap2.mechanism import (
    Gaussian,
    Laplace,
    LaplaceL1,
    MajorizedLaplace,
    NotAGuaranteeWarning,
    PublishedLaplace,
    SingleGroup,
)

_WITH_DIMENSION: dict[str, Callable[[float, int | float], SingleGroup]] = {
    "laplace": Laplace,
    "majorized": lambda noise, dimension: MajorizedLaplace(noise, _finite(dimension)),
    "published": lambda noise, dimension: PublishedLaplace(noise, _finite(dimension)),
}
_WITHOUT_DIMENSION: dict[str, Callable[[float], SingleGroup]] = {
    "laplace-l1": LaplaceL1,
    "gaussian": Gaussian,
}
_NAMES = [*_WITH_DIMENSION, *_WITHOUT_DIMENSION]
MechanismName = Annotated[str, typer.Option("--mechanism", help=f"One of {', '.join(_NAMES)}.")]


def _finite(dimension: int | float) -> int:
    """Only ``laplace`` has a bound for infinite dimension."""
    if not isinstance(dimension, int):
        raise ValueError("--dimension must be a finite integer for this mechanism, got inf")
    return dimension


@contextmanager
def published_is_labelled() -> Generator[None]:
    """Silence the warning of the published bound: the output says it in every form."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NotAGuaranteeWarning)
        yield


def describe(name: str, noise_multiplier: float, dimension: int | float) -> SingleGroup:
    """The mechanism of that name."""
    with published_is_labelled():
        if name in _WITH_DIMENSION:
            return _WITH_DIMENSION[name](noise_multiplier, dimension)
        if name in _WITHOUT_DIMENSION:
            return _WITHOUT_DIMENSION[name](noise_multiplier)
    raise ValueError(f"--mechanism must be one of {', '.join(_NAMES)}; got {name!r}")
