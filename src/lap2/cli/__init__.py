"""The command line: what a run costs, what it needs, and how to train and audit one.

Exit codes: 0 an answer, 1 an audit found a claim violated, 2 bad input (also a target that nothing
can meet).
"""

from typing import Annotated

import typer

from lap2 import __version__
from lap2.cli import accounting, auditing, ledgers, planning, reproducing, training

__all__ = ["app"]

app = typer.Typer(
    help="Differential privacy with Laplace noise and l2 clipping.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.callback(invoke_without_command=True)
def _version(
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    if version:
        typer.echo(f"lap2 {__version__}")
        raise typer.Exit


for command in (
    accounting.epsilon,
    accounting.delta,
    accounting.calibrate,
    planning.plan,
    planning.optimize,
    planning.figure,
    training.train,
    reproducing.reproduce,
):
    app.command()(command)
app.add_typer(auditing.app, name="audit")
app.add_typer(ledgers.app, name="ledger")
