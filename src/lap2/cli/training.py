"""Private training from the command line: ``train``."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from lap2.cli.options import Delta, Epsilon, input_checked, integer, number
from lap2.cli.show import rounded_up

if TYPE_CHECKING:
    from lap2.experiments.run import Result


def train(
    *,
    dataset: Annotated[str, typer.Option(help="mnist, fashion-mnist or digits.")] = "mnist",
    epsilon: Epsilon = 1.0,
    delta: Delta = 1e-5,
    epochs: Annotated[int, integer("Passes over the data.")] = 10,
    batch_size: Annotated[
        int, integer("Expected number of records in a step; 0 suits the data.")
    ] = 0,
    learning_rate: Annotated[
        float, number("Of SGD with momentum 0.9; decays; 0 suits the data.")
    ] = 0.0,
    max_grad_norm: Annotated[float, number("The clip C.")] = 0.1,
    label_smoothing: Annotated[float, number("Of the cross-entropy.")] = 0.15,
    mechanism: Annotated[str, typer.Option(help="laplace, gaussian or laplace-l1.")] = "laplace",
    denoise: Annotated[str, typer.Option(help="auto, none or a number tau.")] = "auto",
    seed: Annotated[int, integer("Of the initial weights.")] = 0,
    folder: Annotated[Path, typer.Option(help="Where to leave the run.")] = Path("runs/mnist"),
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue the run in --folder, as it was set up.")
    ] = False,
) -> None:
    """Train the paper's CNN privately and leave a report."""
    from lap2.experiments import run  # noqa: PLC0415 - torch is optional

    if resume:
        _show(_interruptible(lambda: run.resume(folder), folder))
        return

    settings = input_checked(
        lambda: run.Settings(
            dataset=dataset,
            epsilon=epsilon,
            delta=delta,
            epochs=epochs,
            batch_size=batch_size,
            learning_rate=learning_rate,
            max_grad_norm=max_grad_norm,
            label_smoothing=label_smoothing,
            mechanism=mechanism,
            denoise=_parse_denoise(denoise),
            seed=seed,
        )
    )
    _show(_interruptible(lambda: run.train(settings, folder), folder))


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
        "[bold]test accuracy[/]", f"[bold]{result.test_accuracy:.2%}[/] ({result.dataset})"
    )
    rows.add_row(
        "[bold]epsilon[/]", f"[bold]{rounded_up(statement.epsilon)}[/] at delta {statement.delta:g}"
    )
    rows.add_row("bound", f"{statement.bound}; add/remove one record; Poisson sampling")
    rows.add_row("guarantee", "yes" if statement.is_guarantee else "[red]no[/]")
    for assumption in statement.assumptions:
        rows.add_row("", f"provided that {assumption}")
    for caveat in statement.caveats:
        rows.add_row("", caveat)
    if result.lost_steps:
        rows.add_row(
            "interrupted",
            f"{result.lost_steps} steps were released before a crash and lost to the model; they "
            f"are in epsilon, and the model has {result.steps} of {result.planned_steps} steps",
        )
    rows.add_row("folder", str(result.folder))
    Console().print(rows)


def _parse_denoise(text: str) -> str | float:
    try:
        return text if text in {"auto", "none"} else float(text)
    except ValueError:
        raise typer.BadParameter(
            f"--denoise must be auto, none or a number, got {text!r}"
        ) from None
