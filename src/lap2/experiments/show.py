"""What an experiment's rows look like: its tables and its figures."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lap2.calibration import calibrate_noise
from lap2.experiments.recipe import load_recipe
from lap2.experiments.reproduce import EXPERIMENTS
from lap2.experiments.sweep import Row, select
from lap2.experiments.tables import Table, comparison, overall, steps_to_reach
from lap2.mechanism import Laplace

__all__ = ["Shown", "show"]

_NAMES = {"mnist": "MNIST", "fashion-mnist": "Fashion-MNIST", "cifar10": "CIFAR-10"}
_TARGETS = {"mnist": (95.0, 96.0), "fashion-mnist": (80.0, 82.0)}


@dataclass(frozen=True)
class Shown:
    """The tables of an experiment, and the files of its pictures."""

    tables: tuple[Table, ...]
    pictures: tuple[Path, ...]


def show(name: str, rows: Sequence[Row], path: Path) -> Shown:
    """Tables of the rows, and pictures written beside ``path``.

    Args:
        name: of the experiment.
        rows: what it found; rows of other experiments are left out. Without any, nothing is shown.
        path: where pictures go: their names begin with its last part.
    """
    source = EXPERIMENTS[name].rows_of or name
    final = select(rows, experiment=source, phase="final")
    if name == "figure8":
        final = select(final, epsilon="3.42")
    if not final:
        return Shown((), ())
    return _SHOWS.get(name, _batches)(final, path)


def _table2(rows: Sequence[Row], _path: Path) -> Shown:
    return Shown((*(_compared(rows, dataset) for dataset in _TARGETS), overall(rows)), ())


def _cifar10(rows: Sequence[Row], _path: Path) -> Shown:
    recipes = sorted({row["labels"]["recipe"] for row in rows})
    return Shown(tuple(_compared(rows, "cifar10", recipe=recipe) for recipe in recipes), ())


def _clips(rows: Sequence[Row], path: Path) -> Shown:
    return Shown((), (_charts().against_epsilon(rows, path),))


def _grid(rows: Sequence[Row], path: Path) -> Shown:
    return Shown((), (_charts().grid(rows, _chosen(rows), path),))


def _batches(rows: Sequence[Row], path: Path) -> Shown:
    return Shown((), (_charts().against_batch(rows, path),))


def _speed(rows: Sequence[Row], path: Path) -> Shown:
    tables: list[Table] = []
    pictures: list[Path] = []
    for dataset, targets in _TARGETS.items():
        found = select(rows, dataset=dataset)
        if found:
            tables.append(steps_to_reach(found, targets, title=_NAMES[dataset]))
            place = path.with_name(f"{path.name}-{dataset}")
            pictures.append(_charts().progress(found, targets, place))
    return Shown(tuple(tables), tuple(pictures))


_SHOWS: dict[str, Callable[[Sequence[Row], Path], Shown]] = {
    "table2": _table2,
    "cifar10": _cifar10,
    "cifar10-block": _cifar10,
    "figure5": _clips,
    "figure6": _grid,
    "figure8": _speed,
}


def _charts() -> Any:
    from lap2.experiments import charts  # noqa: PLC0415 - matplotlib is optional

    return charts


def _compared(rows: Sequence[Row], dataset: str, **labels: str) -> Table:
    words = " ".join([_NAMES[dataset], *labels.values()])
    title = f"{words}: test accuracy in percent, mean (standard error)"
    return comparison(rows, title=title, dataset=dataset, **labels)


def _chosen(rows: Sequence[Row]) -> dict[str, float]:
    """The least noise multiplier for each epsilon and sampling probability of the grid.

    Algorithm 1 of the paper takes the largest clip with a feasible noise scale; as only their ratio
    matters, that is the largest scale allowed over this multiplier.
    """
    delta = load_recipe("table2-mnist").delta
    points = {(row["labels"]["epsilon"], row["labels"]["prob"]) for row in rows}
    chosen: dict[str, float] = {}
    for epsilon, prob in points:
        steps = max(r["recipe"]["steps"] for r in select(rows, epsilon=epsilon, prob=prob))
        step = calibrate_noise(
            Laplace(1.0, 26_010),
            epsilon=float(epsilon),
            delta=delta,
            sampling_prob=float(prob),
            steps=steps,
        )
        chosen[f"{epsilon} {prob}"] = step.noise_multiplier
    return chosen
