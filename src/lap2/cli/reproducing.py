"""The paper's experiments from the command line: ``reproduce``."""

from pathlib import Path
from typing import Annotated, Any, cast

import typer
from rich.console import Console

from lap2.cli.options import input_checked, integer
from lap2.experiments import reproduce as experiments
from lap2.experiments.show import show

_NAMES = "; ".join(f"{name}: {spec.shows}" for name, spec in experiments.EXPERIMENTS.items())


def reproduce(
    name: Annotated[str, typer.Argument(help=_NAMES)],
    *,
    scale: Annotated[
        str, typer.Option(help="small finishes in minutes; full is the paper's size.")
    ] = "small",
    seeds: Annotated[int | None, integer("Runs of each cell, other than its own number.")] = None,
    workers: Annotated[int | None, integer("Runs at a time; else one for each core.")] = None,
    backend: Annotated[
        str, typer.Option(help="Of joblib: loky, or ray or dask for several machines.")
    ] = "loky",
    results: Annotated[
        Path | None,
        typer.Option(
            help="JSON lines to go on with; else runs/reproduce/NAME-SCALE.jsonl (table2's for "
            "figure8)."
        ),
    ] = None,
) -> None:
    """Do an experiment of the paper and print its table; started again, it goes on."""
    place = Path("runs") / "reproduce"
    known = experiments.EXPERIMENTS.get(name)
    path = results or place / f"{(known and known.rows_of) or name}-{scale}.jsonl"
    try:
        rows = input_checked(
            lambda: experiments.reproduce(
                name,
                path,
                scale=cast("Any", scale),
                folder=place / "unfinished",
                seeds=seeds,
                workers=workers,
                backend=backend,
            )
        )
    except ImportError as error:
        raise typer.BadParameter(str(error)) from None
    except KeyboardInterrupt:
        typer.echo("\ninterrupted; the same command goes on where it stopped", err=True)
        raise typer.Exit(130) from None
    console = Console()
    shown = show(name, rows, path.with_name(f"{name}-{scale}"))
    for table in shown.tables:
        console.print(table.rich())
    for picture in shown.pictures:
        console.print(f"figure   {picture}")
    console.print(f"results  {path}")
