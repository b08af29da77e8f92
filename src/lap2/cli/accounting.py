"""What a run costs, and the noise it needs: ``epsilon``, ``delta``, ``calibrate``."""

import math
from dataclasses import asdict
from typing import Annotated, Any, NamedTuple, cast

import typer
from rich.console import Console
from rich.table import Table

from lap2._digits import as_given, rounded_down, rounded_up
from lap2.accountant import Accountant, Answer
from lap2.bracket import Bracket
from lap2.bracket import bracket as enclose
from lap2.calibration import calibrate_noise
from lap2.cli.mechanisms import MechanismName, describe, published_is_labelled
from lap2.cli.options import (
    AsJson,
    Delta,
    Dimension,
    Epsilon,
    NoiseMultiplier,
    OptionalBatch,
    OptionalEpochs,
    OptionalProb,
    OptionalSize,
    OptionalSteps,
    SamplingProb,
    Steps,
    input_checked,
)
from lap2.cli.show import add_warnings, print_json, warn_unless
from lap2.mechanism import SingleGroup
from lap2.planner import steps_for
from lap2.sense import caveats_of_target


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
    answer = input_checked(lambda: accountant.answer(delta=delta))
    enclosure = enclose(accountant, delta) if bracket else None
    _show(step, answer, as_json, enclosure=enclosure, given="delta")


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
    answer = input_checked(lambda: accountant.answer(epsilon=epsilon))
    _show(step, answer, as_json, given="epsilon")


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
    template = input_checked(lambda: describe(mechanism, 1.0, dimension))
    with published_is_labelled():
        step = input_checked(
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
        print_json(
            {
                "noise_multiplier": step.noise_multiplier,
                "sampling_prob": schedule.sampling_prob,
                "mechanism": repr(step),
                "bound": step.bound,
                **asdict(answer),
                "warnings": caveats_of_target(answer.epsilon, delta, records=dataset_size),
            }
        )
        return
    console = Console()
    console.print(f"[bold]noise multiplier  {rounded_up(step.noise_multiplier)}[/] (b / C)")
    _show(step, answer, as_json=False, given="delta", records=dataset_size)


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
    prob, count = input_checked(
        lambda: steps_for(
            dataset_size=cast("int", dataset_size),
            batch_size=cast("int", batch_size),
            epochs=1.0 if epochs is None else epochs,
        )
    )
    return _Schedule(prob, count if steps is None else steps)


def _compose(
    name: str, noise_multiplier: float, dimension: int | float, sampling_prob: float, steps: int
) -> tuple[SingleGroup, Accountant]:
    step = input_checked(lambda: describe(name, noise_multiplier, dimension))
    accountant = input_checked(
        lambda: Accountant().compose(step, sampling_prob=sampling_prob, steps=steps)
    )
    return step, accountant


def _show(
    step: SingleGroup,
    answer: Answer,
    as_json: bool,
    *,
    given: str,
    enclosure: Bracket | None = None,
    records: int | None = None,
) -> None:
    """Print an answer, of which epsilon or delta was given."""
    warnings = caveats_of_target(answer.epsilon, answer.delta, records=records)
    facts: dict[str, Any] = {
        "mechanism": repr(step),
        "bound": step.bound,
        **asdict(answer),
        "warnings": warnings,
    }
    if enclosure:
        facts["bracket"] = [enclosure.lower, enclosure.upper]
    if as_json:
        print_json(facts)
        return
    rows = Table.grid(padding=(0, 2))
    epsilon, delta = (
        (as_given if name == given else rounded_up)(value)
        for name, value in (("epsilon", answer.epsilon), ("delta", answer.delta))
    )
    rows.add_row("[bold]epsilon[/]", f"[bold]{epsilon}[/]")
    if enclosure:
        rows.add_row(
            "bracket",
            f"{rounded_down(enclosure.lower)} to {rounded_up(enclosure.upper)}: "
            "the truth lies between",
        )
    rows.add_row("[bold]delta[/]", f"[bold]{delta}[/]")
    rows.add_row("mechanism", repr(step))
    rows.add_row("bound", step.bound)
    rows.add_row("order", _order(answer))
    rows.add_row("adjacency", answer.adjacency)
    rows.add_row("sampling", f"{answer.sampling}, {answer.steps} steps")
    add_warnings(rows, warnings)
    console = Console()
    console.print(rows)
    warn_unless(answer.is_guarantee, console)


def _order(answer: Answer) -> str:
    if answer.method == "pure":
        return "none needed: pure differential privacy"
    if answer.method == "none":
        return "none: nothing is spent" if answer.epsilon == 0 else "none: there is no noise"
    return f"lambda = {answer.order:.6g} ({answer.method} conversion of log-moments)"
