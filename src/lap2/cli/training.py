"""Private training from the command line: ``train``."""

import inspect
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from lap2._digits import as_given, rounded_up
from lap2.cli.options import input_checked, integer, number
from lap2.cli.show import add_warnings
from lap2.experiments.recipe import Recipe, load_recipe, recipe_names

if TYPE_CHECKING:
    from lap2.experiments.run import Result

_FOLDER = Path("runs")
_DEFAULT = "mnist"


def with_recipe_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command an option for every field of a recipe: what is not given is None."""
    own = [p for p in inspect.signature(command).parameters.values() if p.kind is not p.VAR_KEYWORD]
    options = [
        inspect.Parameter(
            f.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=_option(f)
        )
        for f in fields(Recipe)
    ]
    command.__signature__ = inspect.Signature([*own, *options])  # type: ignore[attr-defined]
    command.__annotations__ = {p.name: p.annotation for p in [*own, *options]}
    return command


def _option(field: Any) -> Any:
    about = f"{field.metadata['about']} Else as in the recipe."
    if isinstance(field.default, int):
        return Annotated[int | None, integer(about)]
    if isinstance(field.default, float):
        return Annotated[float | None, number(about)]
    return Annotated[str | None, typer.Option(help=about, metavar="TEXT")]


def given(options: dict[str, Any]) -> dict[str, Any]:
    """The fields of a recipe that were given on the command line."""
    return {name: value for name, value in options.items() if value is not None}


@with_recipe_options
def train(
    recipe: Annotated[
        str,
        typer.Argument(help=f"{', '.join(recipe_names())}, or the path of a .toml file."),
    ] = _DEFAULT,
    *,
    folder: Annotated[
        Path | None, typer.Option(help="Where to leave the run; runs/RECIPE if not given.")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue the run in --folder, as it was set up.")
    ] = False,
    **options: Any,
) -> None:
    """Train a model privately, as a recipe says, and leave a report."""
    from lap2.experiments import run  # noqa: PLC0415 - torch is optional
    from lap2.experiments.sources import DataError  # noqa: PLC0415

    place = folder or _FOLDER / Path(recipe).stem
    changes = given(options)
    if resume:
        if changes:
            raise typer.BadParameter(
                f"--resume must go without changes of the recipe, got {', '.join(changes)}"
            )
        _show(_interruptible(lambda: run.resume(place), place))
        return
    chosen = input_checked(lambda: load_recipe(recipe, **changes))

    def start() -> "Result":
        """The default recipe has a stand-in that needs no download; no other one has."""
        try:
            return run.train(chosen, place)
        except DataError as error:
            if recipe != _DEFAULT or "dataset" in changes:
                raise
            typer.echo(f"{error}\nTraining on scikit-learn's digits instead.", err=True)
            return run.train(load_recipe("digits", **changes), place)

    _show(_interruptible(start, place))


def _interruptible(make: Callable[[], "Result"], folder: Path) -> "Result":
    try:
        return input_checked(make)
    except KeyboardInterrupt:
        typer.echo(f"\ninterrupted; continue with: lap2 train --resume --folder {folder}", err=True)
        raise typer.Exit(130) from None


def _show(result: "Result") -> None:
    statement = result.statement
    rows = Table.grid(padding=(0, 2))
    rows.add_row(
        f"[bold]{result.evaluated_on} accuracy[/]",
        f"[bold]{result.accuracy:.2%}[/] ({result.dataset})",
    )
    rows.add_row(
        "[bold]epsilon[/]",
        f"[bold]{rounded_up(statement.epsilon)}[/] at delta {as_given(statement.delta)}",
    )
    rows.add_row("bound", f"{statement.bound}; add/remove one record; Poisson sampling")
    rows.add_row("guarantee", "yes" if statement.is_guarantee else "[red]no[/]")
    for assumption in statement.assumptions:
        rows.add_row("", f"provided that {assumption}")
    for caveat in statement.caveats:
        rows.add_row("", caveat)
    add_warnings(rows, statement.warnings)
    if result.lost_steps:
        rows.add_row(
            "interrupted",
            f"{result.lost_steps} steps were released before a crash and lost to the model; they "
            f"are in epsilon, and the model has {result.steps} of {result.planned_steps} steps",
        )
    rows.add_row("folder", str(result.folder))
    Console().print(rows)
