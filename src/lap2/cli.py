"""The command line: what a run costs, what it needs, and which mechanism to choose.

Exit codes: 0 an answer, 2 bad input (also a target that nothing can meet).
"""

import json
import math
import warnings
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, cast

import typer
from rich.console import Console
from rich.table import Table

from lap2 import __version__
from lap2.accountant import Accountant, Answer
from lap2.bracket import Bracket
from lap2.bracket import bracket as enclose
from lap2.calibration import calibrate_noise
from lap2.clip_search import first_order, search_clip
from lap2.mechanism import (
    Gaussian,
    Laplace,
    LaplaceL1,
    MajorizedLaplace,
    NotAGuaranteeWarning,
    PublishedLaplace,
    SingleGroup,
)
from lap2.planner import plan, steps_for

T = TypeVar("T")

_FIGURES = "volume, noise-vs-epsilon, privacy-walls, clip-vs-epsilon, bounds, regimes, or all."

app = typer.Typer(
    help="Differential privacy with Laplace noise and l2 clipping.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
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


def _finite(dimension: int | float) -> int:
    """Only ``laplace`` has a bound for infinite dimension."""
    if not isinstance(dimension, int):
        raise ValueError("--dimension must be a finite integer for this mechanism, got inf")
    return dimension


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
    try:
        return int(text)
    except ValueError:
        raise typer.BadParameter(f"must be an integer, got {text!r}") from None


def _parse_number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise typer.BadParameter(f"must be a number, got {text!r}") from None


def _parse_denoise(text: str) -> str | float:
    try:
        return text if text in {"auto", "none"} else float(text)
    except ValueError:
        raise typer.BadParameter(
            f"--denoise must be auto, none or a number, got {text!r}"
        ) from None


def _number(about: str) -> Any:
    """An option that takes a number and, unlike the default one, repeats a bad value."""
    return typer.Option(parser=_parse_number, metavar="NUMBER", help=about)


def _integer(about: str) -> Any:
    """An option that takes an integer, and repeats a bad value."""
    return typer.Option(parser=_parse_integer, metavar="INTEGER", help=about)


MechanismName = Annotated[str, typer.Option("--mechanism", help=f"One of {', '.join(_NAMES)}.")]
NoiseMultiplier = Annotated[
    float, _number("b / C: Laplace scale (or Gaussian sigma) over the clip.")
]
Dimension = Annotated[
    float,
    typer.Option(
        parser=_parse_dimension,
        metavar="INTEGER|inf",
        help="Number of coordinates; inf holds for every model. Not used by laplace-l1, gaussian.",
    ),
]
SamplingProb = Annotated[float, _number("Poisson sampling probability of a record.")]
Steps = Annotated[int, _integer("Number of steps.")]
OptionalProb = Annotated[float | None, _number("Poisson sampling probability of a record.")]
OptionalSteps = Annotated[int | None, _integer("Number of steps.")]
OptionalSize = Annotated[int | None, _integer("Number of records.")]
OptionalBatch = Annotated[int | None, _integer("Expected number of records in a step.")]
OptionalEpochs = Annotated[float | None, _number("Passes over the data.")]
Delta = Annotated[float, _number("Target delta, strictly between 0 and 1.")]
Epsilon = Annotated[float, _number("Target epsilon.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


@app.callback(invoke_without_command=True)
def _version(
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    if version:
        typer.echo(f"lap2 {__version__}")
        raise typer.Exit


@app.command()
def epsilon(
    *,
    noise_multiplier: NoiseMultiplier,
    sampling_prob: SamplingProb,
    steps: Steps,
    delta: Delta,
    dimension: Dimension = math.inf,
    mechanism: MechanismName = "laplace",
    bracket: Annotated[bool, typer.Option("--bracket", help="Also print a lower bound.")] = False,
    as_json: AsJson = False,
) -> None:
    """The epsilon of a run at a given delta, rounded up."""
    step, accountant = _compose(mechanism, noise_multiplier, dimension, sampling_prob, steps)
    answer = _input_checked(lambda: accountant.answer(delta=delta))
    _show(step, answer, as_json, enclose(accountant, delta) if bracket else None)


@app.command()
def delta(
    *,
    noise_multiplier: NoiseMultiplier,
    sampling_prob: SamplingProb,
    steps: Steps,
    epsilon: Epsilon,
    dimension: Dimension = math.inf,
    mechanism: MechanismName = "laplace",
    as_json: AsJson = False,
) -> None:
    """The delta of a run at a given epsilon, rounded up."""
    step, accountant = _compose(mechanism, noise_multiplier, dimension, sampling_prob, steps)
    _show(step, _input_checked(lambda: accountant.answer(epsilon=epsilon)), as_json)


@app.command()
def calibrate(
    *,
    epsilon: Epsilon,
    delta: Delta,
    sampling_prob: OptionalProb = None,
    steps: OptionalSteps = None,
    dataset_size: OptionalSize = None,
    batch_size: OptionalBatch = None,
    epochs: OptionalEpochs = None,
    dimension: Dimension = math.inf,
    mechanism: MechanismName = "laplace",
    as_json: AsJson = False,
) -> None:
    """The least noise multiplier that meets a target, given the sampling and the steps."""
    schedule = _schedule(sampling_prob, steps, dataset_size, batch_size, epochs)
    template = _input_checked(lambda: _describe(mechanism, 1.0, dimension))
    with _published_is_labelled():
        step = _input_checked(
            lambda: calibrate_noise(
                template,
                epsilon=epsilon,
                delta=delta,
                sampling_prob=schedule.sampling_prob,
                steps=schedule.steps,
            )
        )
    accountant = Accountant().compose(
        step, sampling_prob=schedule.sampling_prob, steps=schedule.steps
    )
    answer = accountant.answer(delta=delta)
    if as_json:
        _print_json(
            {
                "noise_multiplier": step.noise_multiplier,
                "sampling_prob": schedule.sampling_prob,
                "mechanism": repr(step),
                "bound": step.bound,
                **asdict(answer),
            }
        )
        return
    console = Console()
    console.print(f"[bold]noise multiplier  {_up(step.noise_multiplier)}[/] (b / C)")
    _show(step, answer, as_json=False)


@app.command("plan")
def plan_command(
    *,
    dataset_size: Annotated[int, _integer("Number of records.")],
    batch_size: Annotated[int, _integer("Expected number of records in a step.")],
    epochs: Annotated[float, _number("Passes over the data.")],
    dimension: Annotated[int, _integer("Number of trained parameters.")],
    epsilon: Epsilon,
    delta: Delta,
    signal: Annotated[
        float, _number("Norm of the mean clipped gradient over the clip, assumed.")
    ] = 0.1,
    as_json: AsJson = False,
) -> None:
    """Compare the mechanisms at the same target and recommend one, with the reason."""
    result = _input_checked(
        lambda: plan(
            dataset_size=dataset_size,
            batch_size=batch_size,
            epochs=epochs,
            dimension=dimension,
            epsilon=epsilon,
            delta=delta,
            signal=signal,
        )
    )
    if as_json:
        _print_json(asdict(result))
        return
    console = Console()
    console.print(
        f"{result.steps} steps, sampling probability {result.sampling_prob:.6g}, "
        f"{result.dimension:,} coordinates, target ({result.epsilon:g}, {result.delta:g})"
    )
    table = Table("", "noise multiplier", "noise / signal", "denoised", "variance", "order")
    for option in result.options:
        table.add_row(
            option.name if option.is_guarantee else f"{option.name} [red](no guarantee)[/]",
            _up(option.noise_multiplier),
            f"{option.noise_to_signal:.4g}",
            f"{option.denoised_noise_to_signal:.4g}",
            f"{option.effective_variance:.4g}",
            "pure" if option.order == math.inf else f"{option.order:.4g}",
        )
    console.print(table)
    console.print(
        "noise / signal: standard deviation of the noise on a coordinate over the size of the "
        f"mean gradient's, if that has {result.signal:g} of the clip's norm; denoised: after the "
        "best free clamp; variance: of the denoised noise on a coordinate of the sum, in clips "
        "squared."
    )
    console.print(f"[bold]recommendation: {result.recommendation}[/], because {result.reason}")


@app.command()
def optimize(
    *,
    epsilon: Epsilon,
    delta: Delta,
    sampling_prob: SamplingProb,
    steps: Steps,
    clip_min: Annotated[float, _number("Smallest clip.")] = 0.1,
    clip_max: Annotated[float, _number("Largest clip.")] = 10.0,
    clip_step: Annotated[float, _number("Step of a linear grid, factor of a log grid.")] = 0.1,
    scale_min: Annotated[float, _number("Smallest noise scale b.")] = 0.01,
    scale_max: Annotated[float, _number("Largest noise scale b.")] = 10.0,
    tolerance: Annotated[float, _number("Where the binary search for b stops.")] = 1e-4,
    grid: Annotated[str, typer.Option(help="linear or log.")] = "linear",
    dimension: Dimension = math.inf,
    mechanism: MechanismName = "laplace",
    as_json: AsJson = False,
) -> None:
    """Algorithm 1 of the paper: the largest clip with a feasible scale, and the direct answer."""
    template = _input_checked(lambda: _describe(mechanism, 1.0, dimension))
    with _published_is_labelled():
        result = _input_checked(
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
        _print_json({**asdict(result), "first_order": asdict(start)})
        return
    console = Console()
    rows = Table.grid(padding=(0, 2))
    rows.add_row("[bold]clip C*[/]", f"[bold]{result.clip:.6g}[/]")
    rows.add_row("[bold]scale b*[/]", f"[bold]{_up(result.scale)}[/]")
    rows.add_row("direct answer", f"C = {result.direct_clip:.6g}, b = {_up(result.direct_scale)}")
    rows.add_row("b / C, least", _up(result.noise_multiplier))
    rows.add_row("first-order b0", f"{start.scale:.6g} for C = 1, off by {start.scale_error:+.1%}")
    rows.add_row("first-order C / b", f"{start.ratio:.6g}, off by {start.ratio_error:+.1%}")
    rows.add_row(
        "  as printed", f"{start.ratio_as_printed:.6g}, off by {start.ratio_as_printed_error:+.1%}"
    )
    rows.add_row("tried", f"{len(result.trace)} clips")
    console.print(rows)
    _warn_unless(result.is_guarantee, console)


@app.command()
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
        for path in _input_checked(
            lambda each=each: figures.draw(each, folder, scale=cast("Any", scale))
        ):
            typer.echo(str(path))


@app.command()
def train(
    *,
    dataset: Annotated[str, typer.Option(help="mnist or digits.")] = "mnist",
    epsilon: Epsilon = 1.0,
    delta: Delta = 1e-5,
    epochs: Annotated[int, _integer("Passes over the data.")] = 20,
    batch_size: Annotated[int, _integer("Expected number of records in a step.")] = 1024,
    learning_rate: Annotated[float, _number("Of SGD with momentum 0.9; decays.")] = 2.0,
    max_grad_norm: Annotated[float, _number("The clip C.")] = 0.1,
    mechanism: Annotated[str, typer.Option(help="laplace, gaussian or laplace-l1.")] = "laplace",
    denoise: Annotated[str, typer.Option(help="auto, none or a number tau.")] = "auto",
    seed: Annotated[int, _integer("Of the initial weights.")] = 0,
    folder: Annotated[Path, typer.Option(help="Where to leave the run.")] = Path("runs/mnist"),
) -> None:
    """Train the paper's CNN privately and leave a report."""
    from lap2.experiments.run import Settings  # noqa: PLC0415 - torch is optional
    from lap2.experiments.run import train as run  # noqa: PLC0415

    settings = _input_checked(
        lambda: Settings(
            dataset=dataset,
            epsilon=epsilon,
            delta=delta,
            epochs=epochs,
            batch_size=batch_size,
            learning_rate=learning_rate,
            max_grad_norm=max_grad_norm,
            mechanism=mechanism,
            denoise=_parse_denoise(denoise),
            seed=seed,
        )
    )
    result = _input_checked(lambda: run(settings, folder))
    statement = result.statement
    rows = Table.grid(padding=(0, 2))
    rows.add_row(
        "[bold]test accuracy[/]", f"[bold]{result.test_accuracy:.2%}[/] ({result.dataset})"
    )
    rows.add_row(
        "[bold]epsilon[/]", f"[bold]{_up(statement.epsilon)}[/] at delta {statement.delta:g}"
    )
    rows.add_row("bound", f"{statement.bound}; add/remove one record; Poisson sampling")
    rows.add_row("guarantee", "yes" if statement.is_guarantee else "[red]no[/]")
    for assumption in statement.assumptions:
        rows.add_row("", f"provided that {assumption}")
    for caveat in statement.caveats:
        rows.add_row("", caveat)
    rows.add_row("folder", str(result.folder))
    Console().print(rows)


class _Schedule(NamedTuple):
    sampling_prob: float
    steps: int


def _schedule(
    sampling_prob: float | None,
    steps: int | None,
    dataset_size: int | None,
    batch_size: int | None,
    epochs: float | None,
) -> _Schedule:
    """Sampling and steps, each given outright or through the data set."""
    whole = dataset_size is not None and batch_size is not None
    if (sampling_prob is None) != whole or (dataset_size is None) != (batch_size is None):
        raise typer.BadParameter(
            "give either --sampling-prob, or both --dataset-size and --batch-size"
        )
    if (steps is None) == (epochs is None) or (epochs is not None and not whole):
        raise typer.BadParameter(
            "give either --steps, or --epochs together with --dataset-size and --batch-size"
        )
    if sampling_prob is not None and steps is not None:
        return _Schedule(sampling_prob, steps)
    prob, count = _input_checked(
        lambda: steps_for(
            dataset_size=cast("int", dataset_size),
            batch_size=cast("int", batch_size),
            epochs=1.0 if epochs is None else epochs,
        )
    )
    return _Schedule(prob, count if steps is None else steps)


@contextmanager
def _published_is_labelled() -> Generator[None]:
    """Silence the warning of the published bound: the output says it in every form."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NotAGuaranteeWarning)
        yield


def _input_checked(make: Callable[[], T]) -> T:
    """Turn the library's own refusals into usage errors (exit code 2)."""
    try:
        return make()
    except (TypeError, ValueError, OSError) as error:
        raise typer.BadParameter(str(error)) from None


def _describe(name: str, noise_multiplier: float, dimension: int | float) -> SingleGroup:
    with _published_is_labelled():
        if name in _WITH_DIMENSION:
            return _WITH_DIMENSION[name](noise_multiplier, dimension)
        if name in _WITHOUT_DIMENSION:
            return _WITHOUT_DIMENSION[name](noise_multiplier)
    raise ValueError(f"--mechanism must be one of {', '.join(_NAMES)}; got {name!r}")


def _compose(
    name: str, noise_multiplier: float, dimension: int | float, sampling_prob: float, steps: int
) -> tuple[SingleGroup, Accountant]:
    step = _input_checked(lambda: _describe(name, noise_multiplier, dimension))
    accountant = _input_checked(
        lambda: Accountant().compose(step, sampling_prob=sampling_prob, steps=steps)
    )
    return step, accountant


def _show(
    step: SingleGroup, answer: Answer, as_json: bool, enclosure: Bracket | None = None
) -> None:
    facts: dict[str, Any] = {"mechanism": repr(step), "bound": step.bound, **asdict(answer)}
    if enclosure:
        facts["bracket"] = [enclosure.lower, enclosure.upper]
    if as_json:
        _print_json(facts)
        return
    rows = Table.grid(padding=(0, 2))
    rows.add_row("[bold]epsilon[/]", f"[bold]{_up(answer.epsilon)}[/]")
    if enclosure:
        rows.add_row(
            "bracket", f"{_down(enclosure.lower)} to {_up(enclosure.upper)}: the truth lies between"
        )
    rows.add_row("[bold]delta[/]", f"[bold]{_up(answer.delta)}[/]")
    rows.add_row("mechanism", repr(step))
    rows.add_row("bound", step.bound)
    rows.add_row("order", _order(answer))
    rows.add_row("adjacency", answer.adjacency)
    rows.add_row("sampling", f"{answer.sampling}, {answer.steps} steps")
    console = Console()
    console.print(rows)
    _warn_unless(answer.is_guarantee, console)


def _print_json(facts: dict[str, Any]) -> None:
    """One JSON object on one line; infinity, which JSON lacks, is the string "inf"."""
    typer.echo(json.dumps(_jsonable(facts)))


def _jsonable(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _jsonable(item) for key, item in cast("dict[str, Any]", value).items()}
    if isinstance(value, (list, tuple)):
        return [_jsonable(item) for item in cast("list[Any]", value)]
    return "inf" if value == math.inf else value


def _warn_unless(is_guarantee: bool, console: Console) -> None:
    if not is_guarantee:
        console.print(
            "[bold red]NOT A GUARANTEE:[/] the published bound can under-report epsilon "
            "(docs/theory.md, section 4). Use --mechanism laplace."
        )


def _order(answer: Answer) -> str:
    if answer.method == "pure":
        return "none needed: pure differential privacy"
    if answer.method == "none":
        return "none: nothing is spent" if answer.epsilon == 0 else "none: there is no noise"
    return f"lambda = {answer.order:.6g} ({answer.method} conversion of log-moments)"


def _up(value: float) -> str:
    """Six significant digits, rounded up, so that what is printed is still a bound."""
    if value in {0.0, math.inf}:
        return f"{value:g}"
    unit = 10.0 ** (math.floor(math.log10(value)) - 5)
    text = f"{value:.6g}"
    return text if float(text) >= value else f"{(math.floor(value / unit) + 1) * unit:.6g}"


def _down(value: float) -> str:
    """Six significant digits, rounded down."""
    if value in {0.0, math.inf}:
        return f"{value:g}"
    unit = 10.0 ** (math.floor(math.log10(value)) - 5)
    text = f"{value:.6g}"
    return text if float(text) <= value else f"{math.floor(value / unit) * unit:.6g}"
