"""Arguments that several commands share, and how bad ones are refused."""

import math
from collections.abc import Callable
from typing import Annotated, Any, TypeVar

import typer

T = TypeVar("T")


def _parse_dimension(text: str) -> int | float:
    """An integer (also as 1e9), or inf."""
    try:
        number = float(text)
        if number == math.inf:
            return math.inf
        return int(text) if text.strip().lstrip("+-").isdigit() else _whole(number)
    except (ValueError, OverflowError):
        raise typer.BadParameter(f"must be an integer at least 1, or inf; got {text!r}") from None


def _whole(number: float) -> int:
    if not number.is_integer():
        raise ValueError
    return int(number)


def _parse_integer(text: str) -> int:
    """An integer, also as 1e6."""
    try:
        return int(text)  # exact, also where a float would not be
    except ValueError:
        pass
    try:
        return _whole(float(text))
    except (ValueError, OverflowError):
        raise typer.BadParameter(f"must be an integer, got {text!r}") from None


def _parse_number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise typer.BadParameter(f"must be a number, got {text!r}") from None


def number(about: str) -> Any:
    """An option that takes a number and, unlike the default one, repeats a bad value."""
    return typer.Option(parser=_parse_number, metavar="NUMBER", help=about)


def integer(about: str) -> Any:
    """An option that takes an integer, and repeats a bad value."""
    return typer.Option(parser=_parse_integer, metavar="INTEGER", help=about)


NoiseMultiplier = Annotated[
    float, number("b / C: Laplace scale (or Gaussian sigma) over the clip.")
]
Dimension = Annotated[
    float,
    typer.Option(
        parser=_parse_dimension,
        metavar="INTEGER|inf",
        help="Number of coordinates; inf holds for every model. Not used by laplace-l1, gaussian.",
    ),
]
SamplingProb = Annotated[float, number("Poisson sampling probability of a record.")]
Steps = Annotated[int, integer("Number of steps.")]
OptionalProb = Annotated[float | None, number("Poisson sampling probability of a record.")]
OptionalSteps = Annotated[int | None, integer("Number of steps.")]
OptionalSize = Annotated[int | None, integer("Number of records.")]
OptionalBatch = Annotated[int | None, integer("Expected number of records in a step.")]
OptionalEpochs = Annotated[float | None, number("Passes over the data.")]
Delta = Annotated[float, number("Target delta, strictly between 0 and 1.")]
Epsilon = Annotated[float, number("Target epsilon.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


def input_checked(make: Callable[[], T]) -> T:
    """Turn the library's own refusals into usage errors (exit code 2)."""
    try:
        return make()
    except (TypeError, ValueError, OSError) as error:
        raise typer.BadParameter(str(error)) from None
