"""Which mechanism, which clip, and pictures of the theory: ``plan``, ``optimize``, ``figure``."""

import math
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal, cast

import typer
from rich.console import Console
from rich.table import Table

from lap2._digits import as_given, rounded_down, rounded_up
from lap2.cli.mechanisms import MechanismName, describe, published_is_labelled
from lap2.cli.options import (
    AsJson,
    Delta,
    Dimension,
    Epsilon,
    SamplingProb,
    Steps,
    input_checked,
    integer,
    number,
)
from lap2.cli.show import add_warnings, print_json, warn_unless
from lap2.clip_search import first_order, search_clip
from lap2.planner import plan as compare
from lap2.sense import caveats_of_target

_FIGURES = "volume, noise-vs-epsilon, privacy-walls, clip-vs-epsilon, bounds, regimes, or all."


def plan(
    *,
    dataset_size: Annotated[int, integer("Number of records.")],
    batch_size: Annotated[int, integer("Expected number of records in a step.")],
    epochs: Annotated[float, number("Passes over the data.")],
    dimension: Annotated[int, integer("Number of trained parameters.")],
    epsilon: Epsilon,
    delta: Delta,
    signal: Annotated[
        float, number("Norm of the mean clipped gradient over the clip, assumed.")
    ] = 0.1,
    as_json: AsJson = False,
) -> None:
    """Compare the mechanisms at the same target and recommend one, with the reason."""
    result = input_checked(
        lambda: compare(
            dataset_size=dataset_size,
            batch_size=batch_size,
            epochs=epochs,
            dimension=dimension,
            epsilon=epsilon,
            delta=delta,
            signal=signal,
        )
    )
    warnings = caveats_of_target(result.epsilon, result.delta, records=dataset_size)
    if as_json:
        print_json({**asdict(result), "warnings": warnings})
        return
    console = Console()
    console.print(
        f"{result.steps} steps, sampling probability {rounded_up(result.sampling_prob)}, "
        f"{result.dimension:,} coordinates, "
        f"target ({as_given(result.epsilon)}, {as_given(result.delta)})"
    )
    table = Table("", "release", "noise\nmultiplier", "noise /\nsignal", "variance", "order")
    for option in result.options:
        table.add_row(
            option.name if option.is_guarantee else f"{option.name}\n[red](no guarantee)[/]",
            f"{option.copies:,} bit{'s' * (option.copies > 1)}" if option.copies else "values",
            rounded_up(option.noise_multiplier),
            f"{option.noise_to_signal:.4g}",
            f"{option.effective_variance:.4g}",
            "pure" if option.order == math.inf else f"{option.order:.4g}",
        )
    console.print(table)
    console.print(
        "release: of each noisy coordinate, so many signs or the value; noise / signal: "
        "standard deviation of the noise on a coordinate over the size of the "
        f"mean gradient's, if that has {result.signal:g} of the clip's norm; variance: of that "
        "noise on a coordinate of the sum, in clips squared."
    )
    console.print(f"[bold]recommendation: {result.recommendation}[/], because {result.reason}")
    rows = Table.grid(padding=(0, 2))
    add_warnings(rows, warnings)
    console.print(rows)


def optimize(
    *,
    epsilon: Epsilon,
    delta: Delta,
    sampling_prob: SamplingProb,
    steps: Steps,
    clip_min: Annotated[float, number("Smallest clip.")] = 0.1,
    clip_max: Annotated[float, number("Largest clip.")] = 10.0,
    clip_step: Annotated[float, number("Step of a linear grid, factor of a log grid.")] = 0.1,
    scale_min: Annotated[float, number("Smallest noise scale b.")] = 0.01,
    scale_max: Annotated[float, number("Largest noise scale b.")] = 10.0,
    tolerance: Annotated[float, number("Where the binary search for b stops.")] = 1e-4,
    grid: Annotated[str, typer.Option(help="linear or log.")] = "linear",
    dimension: Dimension = math.inf,
    mechanism: MechanismName = "laplace",
    as_json: AsJson = False,
) -> None:
    """Algorithm 1 of the paper: the largest clip with a feasible scale, and the direct answer."""
    template = input_checked(lambda: describe(mechanism, 1.0, dimension))
    with published_is_labelled():
        result = input_checked(
            lambda: search_clip(
                template,
                epsilon=epsilon,
                delta=delta,
                sampling_prob=sampling_prob,
                steps=steps,
                clip_min=clip_min,
                clip_max=clip_max,
                clip_step=clip_step,
                scale_min=scale_min,
                scale_max=scale_max,
                tolerance=tolerance,
                grid=cast("Literal['linear', 'log']", grid),
            )
        )
        start = first_order(
            template, epsilon=epsilon, delta=delta, sampling_prob=sampling_prob, steps=steps
        )
    if as_json:
        print_json({**asdict(result), "first_order": asdict(start)})
        return
    console = Console()
    rows = Table.grid(padding=(0, 2))
    rows.add_row("[bold]clip C*[/]", f"[bold]{rounded_down(result.clip)}[/]")
    rows.add_row("[bold]scale b*[/]", f"[bold]{rounded_up(result.scale)}[/]")
    rows.add_row(
        "direct answer",
        f"C = {rounded_down(result.direct_clip)}, b = {rounded_up(result.direct_scale)}",
    )
    rows.add_row("b / C, least", rounded_up(result.noise_multiplier))
    rows.add_row("first-order b0", f"{start.scale:.6g} for C = 1, off by {start.scale_error:+.1%}")
    rows.add_row("first-order C / b", f"{start.ratio:.6g}, off by {start.ratio_error:+.1%}")
    rows.add_row(
        "  as printed", f"{start.ratio_as_printed:.6g}, off by {start.ratio_as_printed_error:+.1%}"
    )
    rows.add_row("tried", f"{len(result.trace)} clips")
    console.print(rows)
    warn_unless(result.is_guarantee, console)


def figure(
    name: Annotated[
        str,
        typer.Argument(help=_FIGURES),
    ],
    folder: Annotated[Path, typer.Option(help="Where to write PNG, SVG and CSV.")] = Path(
        "figures"
    ),
    scale: Annotated[str, typer.Option(help="full, or small for a coarse grid.")] = "full",
) -> None:
    """Draw a figure of the theory, with its data beside it."""
    from lap2 import figures  # noqa: PLC0415 - matplotlib is optional

    names = list(figures.FIGURES) if name == "all" else [name]
    for each in names:
        for path in input_checked(
            lambda each=each: figures.draw(each, folder, scale=cast("Any", scale))
        ):
            typer.echo(str(path))
