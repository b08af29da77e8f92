"""The paper's experiments: which runs they are made of, how they are tuned, and doing them.

An experiment is a list of cells: a recipe, a number of seeds, and how the learning rate is tuned.
Tuning runs hold training records out and are evaluated on those; the runs that count train on all
records and are evaluated on the test set, by which nothing was chosen. All columns of an experiment
are tuned alike, with the same number of runs.
"""

# pyright: basic

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from lap2 import _validate
from lap2.calibration import CalibrationError, calibrate_steps
from lap2.experiments.recipe import COLUMNS, Recipe, load_recipe
from lap2.experiments.sweep import Job, Row, finish
from lap2.mechanism import Laplace

__all__ = ["EXPERIMENTS", "Cell", "Experiment", "Scale", "Tuning", "reproduce"]

Scale = Literal["small", "full"]


@dataclass(frozen=True)
class Tuning:
    """The runs that choose a learning rate; several cells may share them.

    Attributes:
        labels: what is tuned, in words.
        recipe: of the runs, but for what follows.
        factors: of the recipe's learning rate, among which to choose.
        shortened: how many times fewer steps the runs take. Their rate is larger by that, their
            noise smaller by its root: the same process for small rates, in less time.
        holdout: training records that are left out, to evaluate on.
    """

    labels: dict[str, str]
    recipe: Recipe
    factors: tuple[float, ...] = (0.5, 1.0, 2.0)
    shortened: int = 1
    holdout: int = 5000

    def jobs(self) -> list[Job]:
        """One run for each factor."""
        k = self.shortened
        recipe = replace(self.recipe, holdout=self.holdout, evaluations=1)
        recipe = replace(recipe, steps=recipe.steps // k, shortened=k)
        return [
            Job(
                replace(recipe, learning_rate=_digits(recipe.learning_rate * factor * k)),
                {**self.labels, "phase": "tune", "factor": f"{factor:g}"},
            )
            for factor in self.factors
        ]

    def best(self, rows: Sequence[Row]) -> float:
        """The factor with the best accuracy on held-out records; the smaller one of equals."""
        pairs = zip(self.factors, rows, strict=True)
        return max(pairs, key=lambda pair: (pair[1]["accuracy"], -pair[0]))[0]


@dataclass(frozen=True)
class Cell:
    """One entry of a table or point of a figure.

    Attributes:
        labels: what it is, in words; rows carry them.
        recipe: of the runs, but for the seed and the factor that tuning chooses for the rate.
        seeds: number of runs.
        tuning: what chooses the factor; without it, it is 1.
    """

    labels: dict[str, str]
    recipe: Recipe
    seeds: int = 1
    tuning: Tuning | None = None

    def jobs(self, factor: float) -> list[Job]:
        """One run for each seed."""
        recipe = replace(self.recipe, learning_rate=_digits(self.recipe.learning_rate * factor))
        labels = {**self.labels, "phase": "final", "factor": f"{factor:g}"}
        return [Job(replace(recipe, seed=seed), labels) for seed in range(self.seeds)]


def _digits(rate: float) -> float:
    """Three significant digits, so that files and tables can say the rate exactly."""
    return float(f"{rate:.3g}")


@dataclass(frozen=True)
class Experiment:
    """What an experiment shows, in one line, its cells at a scale, and whose rows they are."""

    shows: str
    cells: Callable[[Scale], list[Cell]] = field(repr=False)
    rows_of: str | None = None
    """Another experiment, if its runs are what is shown."""


def reproduce(
    name: str,
    results: Path,
    *,
    scale: Scale,
    folder: Path,
    seeds: int | None = None,
    workers: int | None = None,
    backend: str = "loky",
    progress: bool = True,
) -> list[Row]:
    """Do what is missing of an experiment, tuning first, and return its final rows.

    Args:
        name: one of :data:`EXPERIMENTS`.
        results: the file of the rows: read first, added to.
        scale: "small" finishes in minutes, with what docs/results.md says left out.
        folder: for the runs while they last.
        seeds: other than the experiment's own number.
        workers: as in :func:`lap2.experiments.sweep.finish`.
        backend: as there.
        progress: as there.
    """
    _validate.choice("name", name, tuple(EXPERIMENTS))
    _validate.choice("scale", scale, ("small", "full"))
    cells = EXPERIMENTS[name].cells(scale)
    if seeds is not None:
        count = _validate.integer("seeds", seeds, least=1)
        cells = [replace(cell, seeds=count) for cell in cells]

    def do(jobs: Iterable[Job]) -> list[Row]:
        return finish(
            list(jobs),
            results,
            folder=folder,
            workers=workers,
            backend=backend,
            progress=progress,
        )

    tunings = [cell.tuning for cell in cells if cell.tuning]
    tuned = iter(do(job for tuning in tunings for job in tuning.jobs()))
    plans: list[list[Job]] = []
    for cell in cells:
        rows = [next(tuned) for _ in cell.tuning.factors] if cell.tuning else []
        plans.append(cell.jobs(cell.tuning.best(rows) if cell.tuning else 1.0))
    # Seed by seed, so that a sweep that is cut short has something of every cell.
    rounds = range(max(cell.seeds for cell in cells))
    return do(plan[i] for i in rounds for plan in plans if i < len(plan))


def _rate(base: Recipe, epsilon: float, steps: int, clip: float) -> float:
    """A learning rate to begin with, from that of the base recipe at epsilon 1.

    Below epsilon 1 the rate that the noise allows shrinks with epsilon, above it grows with its
    root; fewer steps must be larger; only rate times clip matters while all gradients are clipped.
    """
    noise = min(epsilon, math.sqrt(epsilon))
    factor = noise * (base.steps / steps) ** 0.3 * base.max_grad_norm / clip
    return _digits(base.learning_rate * factor)


def _cell(
    labels: dict[str, str],
    base: Recipe,
    column: str,
    *,
    epsilon: float,
    steps: int,
    clip: float | None = None,
    rate: float | None = None,
    **changes: Any,
) -> Cell:
    """The cell of a column, with the rate given or one that should fit."""
    clip = base.max_grad_norm if clip is None else clip
    recipe = replace(
        base,
        epsilon=epsilon,
        steps=steps,
        max_grad_norm=clip,
        learning_rate=_digits(rate) if rate else _rate(base, epsilon, steps, clip),
        **COLUMNS[column],
        **changes,
    )
    return Cell({**labels, "column": column, "epsilon": f"{epsilon:g}"}, recipe)


def _table2(scale: Scale) -> list[Cell]:
    """CNN on MNIST and Fashion-MNIST, five budgets, five columns (paper, Table II)."""
    small = scale == "small"
    epsilons = (0.88, 0.13, 3.42) if small else (0.88, 0.13, 3.42, 1.68, 2.53)
    cells: list[Cell] = []
    for epsilon, dataset, column in itertools.product(epsilons, _GREY, COLUMNS):
        base = load_recipe(f"table2-{dataset}")
        labels = {"experiment": "table2", "scale": scale, "dataset": dataset}
        cell = _cell(labels, base, column, epsilon=epsilon, steps=_steps(base, scale))
        if small:
            cells.append(replace(cell, seeds=2))
            continue
        near = min(_TUNED, key=lambda other: abs(math.log(other / epsilon)))
        tuned = _cell(labels, base, column, epsilon=near, steps=base.steps)
        tuning = Tuning(tuned.labels, tuned.recipe, factors=(0.25, 0.5, 1.0, 2.0), shortened=2)
        seeds = 6 if column in _COMPARED else 3
        cells.append(replace(cell, seeds=seeds, tuning=tuning))
    return cells


def _steps(base: Recipe, scale: Scale) -> int:
    return base.steps // 10 if scale == "small" else base.steps


def _clips(scale: Scale) -> list[Cell]:
    """Accuracy against epsilon for several clips (paper, figure 5)."""
    base = load_recipe("table2-mnist")
    small = scale == "small"
    epsilons = (0.13, 0.88, 3.42) if small else (0.13, 0.88, 1.68, 2.53, 3.42)
    clips = (0.1, 1.0, 10.0) if small else (0.1, 0.3, 1.0, 3.0, 10.0)
    labels = {"experiment": "figure5", "scale": scale, "dataset": "mnist"}
    return [
        replace(
            _cell(
                {**labels, "clip": f"{clip:g}"},
                base,
                "bits",
                epsilon=epsilon,
                steps=_steps(base, scale),
                clip=clip,
            ),
            seeds=1 if small else 3,
        )
        for clip, epsilon in itertools.product(clips, epsilons)
    ]


def _grid(scale: Scale) -> list[Cell]:
    """Accuracy over sampling probability, clip and noise scale (paper, figure 6).

    Each point takes as many steps as its noise allows at that epsilon, and at most the scale's.
    """
    base = load_recipe("table2-mnist")
    small = scale == "small"
    probs = (0.0043, 0.0172) if small else (0.00215, 0.0043, 0.0086, 0.0172)
    clips = (0.5, 1.0, 2.0)
    scales = (1.0, 2.0) if small else (0.5, 1.0, 2.0, 4.0)
    labels = {"experiment": "figure6", "scale": scale, "dataset": "mnist"}
    cells: list[Cell] = []
    for epsilon, prob, clip, noise in itertools.product((0.5, 1.0, 2.0), probs, clips, scales):
        steps = _affordable(noise / clip, epsilon, base.delta, prob, _steps(base, scale))
        if steps < 20:
            continue  # nothing can be learnt in so few
        names = {"prob": f"{prob:g}", "clip": f"{clip:g}", "noise": f"{noise:g}"}
        cell = _cell(
            {**labels, **names},
            base,
            "bits",
            epsilon=epsilon,
            steps=steps,
            clip=clip,
            batch_size=round(prob * _MNIST_RECORDS),
            noise_multiplier=noise / clip,
        )
        cells.append(replace(cell, seeds=1 if small else 3))
    return cells


def _affordable(noise: float, epsilon: float, delta: float, prob: float, most: int) -> int:
    """How many steps a target allows; zero if not one."""
    try:
        step = Laplace(noise * (1 - 1e-6), math.inf)  # any basis; the noise's rounding takes less
        steps = calibrate_steps(step, epsilon=epsilon, delta=delta, sampling_prob=prob)
    except CalibrationError:
        return 0
    return int(min(steps, most))


def _batches(dataset: str, number: int) -> Callable[[Scale], list[Cell]]:
    """Accuracy against batch size at equal epochs (paper, figures 10 and 11)."""

    def cells(scale: Scale) -> list[Cell]:
        base = load_recipe(f"table2-{dataset}")
        small = scale == "small"
        sizes = (129, 258, 1032) if small else (64, 129, 258, 516, 1032, 2064)
        labels = {"experiment": f"figure{number}", "scale": scale, "dataset": dataset}
        return [
            replace(
                _cell(
                    {**labels, "batch": str(size)},
                    base,
                    column,
                    epsilon=0.88,
                    steps=_steps(base, scale) * base.batch_size // size,
                    batch_size=size,
                ),
                seeds=1 if small else 3,
            )
            for size, column in itertools.product(sizes, ("gaussian", "exact", "bits"))
        ]

    return cells


def _speed(scale: Scale) -> list[Cell]:
    """Steps until a target accuracy (paper, figure 8): runs of Table II, with their curves."""
    return [cell for cell in _table2(scale) if cell.labels["epsilon"] == "3.42"]


def _cifar10(part: str) -> Callable[[Scale], list[Cell]]:
    """Fine-tuning a part of each backbone on CIFAR-10, two budgets, five columns."""

    def cells(scale: Scale) -> list[Cell]:
        small = scale == "small"
        names = [f"cifar10-{backbone}-{part}" for backbone in ("efficientnet", "dinov2")]
        experiment = "cifar10" if part == "head" else f"cifar10-{part}"
        found: list[Cell] = []
        for name, epsilon, column in itertools.product(names, (0.75, 0.5), COLUMNS):
            base = load_recipe(name)
            labels = {"experiment": experiment, "scale": scale, "dataset": "cifar10"}
            steps = base.steps // 10 if small else base.steps
            rate = base.learning_rate * math.sqrt(epsilon)
            labels["recipe"] = name
            cell = _cell(labels, base, column, epsilon=epsilon, steps=steps, rate=rate)
            # On cached features a run of the head takes seconds, one of a block many minutes.
            if part == "head":
                seeds, factors, shortened = 10, (0.125, 0.25, 0.5, 1.0, 2.0), 1
            else:
                seeds, factors, shortened = 3, (0.0625, 0.125, 0.25, 0.5), 3
            tuned = Tuning(cell.labels, cell.recipe, factors=factors, shortened=shortened)
            found.append(cell if small else replace(cell, seeds=seeds, tuning=tuned))
        return found

    return cells


_TUNED = (0.13, 0.88, 3.42)
"""Where the rate of Table II is tuned; in between, it is as at the nearest."""
_COMPARED = ("gaussian", "bits")
"""Columns of Table II that are so close that telling them apart takes more runs."""
_GREY = ("mnist", "fashion-mnist")
_MNIST_RECORDS = 60_000
EXPERIMENTS: dict[str, Experiment] = {
    "table2": Experiment("CNN on MNIST and Fashion-MNIST at five budgets (Table II)", _table2),
    "cifar10": Experiment("a classifier on pretrained backbones, CIFAR-10", _cifar10("head")),
    "cifar10-block": Experiment("their last block too, CIFAR-10", _cifar10("block")),
    "figure5": Experiment("accuracy against epsilon for several clips", _clips),
    "figure6": Experiment("accuracy over sampling probability, clip and noise scale", _grid),
    "figure8": Experiment("steps until a target accuracy", _speed, rows_of="table2"),
    "figure10": Experiment("accuracy against batch size, MNIST", _batches("mnist", 10)),
    "figure11": Experiment(
        "accuracy against batch size, Fashion-MNIST", _batches("fashion-mnist", 11)
    ),
}
