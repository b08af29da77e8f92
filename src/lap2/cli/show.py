"""How answers are printed: rounded so that they stay bounds, as a table or as JSON."""

import json
import math
from typing import Any, cast

import typer
from rich.console import Console


def print_json(facts: dict[str, Any]) -> None:
    """One JSON object on one line; infinity, which JSON lacks, is the string "inf"."""
    typer.echo(json.dumps(_jsonable(facts)))


def _jsonable(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _jsonable(item) for key, item in cast("dict[str, Any]", value).items()}
    if isinstance(value, (list, tuple)):
        return [_jsonable(item) for item in cast("list[Any]", value)]
    return "inf" if value == math.inf else value


def warn_unless(is_guarantee: bool, console: Console) -> None:
    """Say in red when a number is no guarantee."""
    if not is_guarantee:
        console.print(
            "[bold red]NOT A GUARANTEE:[/] the published bound can under-report epsilon "
            "(docs/theory.md, section 4). Use --mechanism laplace."
        )


def rounded_up(value: float) -> str:
    """Six significant digits, rounded up, so that what is printed is still a bound."""
    if value in {0.0, math.inf}:
        return f"{value:g}"
    unit = 10.0 ** (math.floor(math.log10(value)) - 5)
    text = f"{value:.6g}"
    return text if float(text) >= value else f"{(math.floor(value / unit) + 1) * unit:.6g}"


def rounded_down(value: float) -> str:
    """Six significant digits, rounded down."""
    if value in {0.0, math.inf}:
        return f"{value:g}"
    unit = 10.0 ** (math.floor(math.log10(value)) - 5)
    text = f"{value:.6g}"
    return text if float(text) <= value else f"{math.floor(value / unit) * unit:.6g}"
