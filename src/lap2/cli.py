"""The command line: ``lap2 epsilon`` and ``lap2 delta``.

Exit codes: 0 an answer, 2 bad input.
"""

import json
import math
import warnings
from collections.abc import Callable
from dataclasses import asdict
from typing import Annotated, Any, TypeVar

import typer
from rich.console import Console
from rich.table import Table

from lap2.accountant import Accountant, Answer
from lap2.mechanism import (
    Gaussian,
    Laplace,
    LaplaceL1,
    MajorizedLaplace,
    Mechanism,
    NotAGuaranteeWarning,
    PublishedLaplace,
)

T = TypeVar("T")

app = typer.Typer(
    help="Differential privacy with Laplace noise and l2 clipping.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

_WITH_DIMENSION: dict[str, Callable[[float, int | float], Mechanism]] = {
    "laplace": Laplace,
    "majorized": lambda noise, dimension: MajorizedLaplace(noise, _finite(dimension)),
    "published": lambda noise, dimension: PublishedLaplace(noise, _finite(dimension)),
}
_WITHOUT_DIMENSION: dict[str, Callable[[float], Mechanism]] = {
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


def _number(about: str) -> Any:
    """An option that takes a number and, unlike the default one, repeats a bad value."""
    return typer.Option(parser=_parse_number, metavar="NUMBER", help=about)


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
Steps = Annotated[
    int, typer.Option(parser=_parse_integer, metavar="INTEGER", help="Number of steps.")
]
Delta = Annotated[float, _number("Target delta, strictly between 0 and 1.")]
Epsilon = Annotated[float, _number("Target epsilon, at least 0.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


@app.command()
def epsilon(
    *,
    noise_multiplier: NoiseMultiplier,
    sampling_prob: SamplingProb,
    steps: Steps,
    delta: Delta,
    dimension: Dimension = math.inf,
    mechanism: MechanismName = "laplace",
    as_json: AsJson = False,
) -> None:
    """The epsilon of a run at a given delta, rounded up."""
    step, accountant = _compose(mechanism, noise_multiplier, dimension, sampling_prob, steps)
    _show(step, _input_checked(lambda: accountant.answer(delta=delta)), as_json)


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


def _input_checked(make: Callable[[], T]) -> T:
    """Turn the library's own refusals into usage errors (exit code 2)."""
    try:
        return make()
    except (TypeError, ValueError) as error:
        raise typer.BadParameter(str(error)) from None


def _describe(name: str, noise_multiplier: float, dimension: int | float) -> Mechanism:
    with warnings.catch_warnings():
        # The output says so itself, in every form.
        warnings.simplefilter("ignore", NotAGuaranteeWarning)
        if name in _WITH_DIMENSION:
            return _WITH_DIMENSION[name](noise_multiplier, dimension)
        if name in _WITHOUT_DIMENSION:
            return _WITHOUT_DIMENSION[name](noise_multiplier)
    raise ValueError(f"--mechanism must be one of {', '.join(_NAMES)}; got {name!r}")


def _compose(
    name: str, noise_multiplier: float, dimension: int | float, sampling_prob: float, steps: int
) -> tuple[Mechanism, Accountant]:
    step = _input_checked(lambda: _describe(name, noise_multiplier, dimension))
    accountant = _input_checked(
        lambda: Accountant().compose(step, sampling_prob=sampling_prob, steps=steps)
    )
    return step, accountant


def _show(step: Mechanism, answer: Answer, as_json: bool) -> None:
    facts = {"mechanism": repr(step), "bound": step.bound, **asdict(answer)}
    if as_json:
        # JSON has no infinity: it is written as the string "inf".
        plain = {key: "inf" if value == math.inf else value for key, value in facts.items()}
        typer.echo(json.dumps(plain))
        return
    rows = Table.grid(padding=(0, 2))
    rows.add_row("[bold]epsilon[/]", f"[bold]{_up(answer.epsilon)}[/]")
    rows.add_row("[bold]delta[/]", f"[bold]{_up(answer.delta)}[/]")
    rows.add_row("mechanism", repr(step))
    rows.add_row("bound", step.bound)
    rows.add_row("order", _order(answer))
    rows.add_row("adjacency", answer.adjacency)
    rows.add_row("sampling", f"{answer.sampling}, {answer.steps} steps")
    console = Console()
    console.print(rows)
    if not answer.is_guarantee:
        console.print(
            "[bold red]NOT A GUARANTEE:[/] the published bound can under-report epsilon "
            "(docs/theory.md, section 4). Use --mechanism laplace."
        )


def _order(answer: Answer) -> str:
    if answer.method == "pure":
        return "none needed: pure differential privacy"
    if answer.method == "none":
        return "none: nothing is spent, or everything"
    return f"lambda = {answer.order:.6g} ({answer.method} conversion of log-moments)"


def _up(value: float) -> str:
    """Six significant digits, rounded up, so that what is printed is still a bound."""
    if value in {0.0, math.inf}:
        return f"{value:g}"
    unit = 10.0 ** (math.floor(math.log10(value)) - 5)
    text = f"{value:.6g}"
    return text if float(text) >= value else f"{(math.floor(value / unit) + 1) * unit:.6g}"
