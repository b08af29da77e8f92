"""How answers are printed: as a table with warnings, or as JSON."""

import json
import math
from collections.abc import Iterable
from typing import Any, cast

import typer
from rich.console import Console
from rich.table import Table


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


def add_warnings(rows: Table, warnings: Iterable[str]) -> None:
    """A row for each thing that the numbers above, though proven, do not protect from."""
    for warning in warnings:
        rows.add_row("[yellow]warning[/]", warning)
