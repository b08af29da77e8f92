"""Ledgers of runs: what they say, and several of them together."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from lap2._digits import as_given, rounded_up
from lap2.accountant import Accountant
from lap2.cli.options import AsJson, Delta, input_checked
from lap2.cli.show import add_warnings, print_json
from lap2.sense import caveats_of_target

__all__ = ["app"]

app = typer.Typer(help="Show the ledger of a run, or merge several.", no_args_is_help=True)

_Ledger = Annotated[
    Path, typer.Argument(exists=True, dir_okay=False, help="A ledger file, as a run leaves it.")
]


@app.command()
def show(ledger: _Ledger, *, delta: Delta, as_json: AsJson = False) -> None:
    """What a ledger has, and the epsilon of all of it together."""
    _show(input_checked(lambda: Accountant.load(ledger)), delta, as_json=as_json)


@app.command()
def merge(
    ledgers: Annotated[
        list[Path],
        typer.Argument(exists=True, dir_okay=False, help="Ledger files of one data set."),
    ],
    *,
    out: Annotated[Path, typer.Option(help="The file to write; must be a new one.")],
    delta: Delta,
    as_json: AsJson = False,
) -> None:
    """Write one ledger of several; what copies of one run have in common counts once."""
    if out.exists():
        raise typer.BadParameter(f"--out must be a new file, got {str(out)!r}")
    merged = input_checked(lambda: Accountant.merged([Accountant.load(path) for path in ledgers]))
    input_checked(lambda: merged.save(out))
    _show(merged, delta, as_json=as_json)


def _show(accountant: Accountant, delta: float, *, as_json: bool) -> None:
    answer = input_checked(lambda: accountant.answer(delta=delta))
    if as_json:
        print_json(asdict(answer))
        return
    rows = Table.grid(padding=(0, 2))
    for entry in accountant.ledger:
        noise = "" if entry.noise == "unstated" else f", {entry.noise} noise"
        rows.add_row(
            f"{entry.steps} x",
            f"{entry.mechanism!r}, sampling probability {entry.sampling_prob:.6g}{noise}",
        )
    epsilon = f"[bold]{rounded_up(answer.epsilon)}[/] at delta {as_given(delta)}"
    rows.add_row("[bold]epsilon[/]", epsilon)
    rows.add_row("guarantee", "yes" if answer.is_guarantee else "[red]no[/]")
    for caveat in answer.caveats:
        rows.add_row("", caveat)
    add_warnings(rows, caveats_of_target(answer.epsilon, delta))
    Console().print(rows)
