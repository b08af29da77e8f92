"""What an experiment's rows look like: its tables and its figures."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lap2.calibration import calibrate_noise
from lap2.experiments.recipe import load_recipe
from lap2.experiments.sweep import Row, select
from lap2.experiments.tables import Table, comparison, steps_to_reach
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
        rows: what it found; rows of other experiments are left out.
        path: where pictures go: their names begin with its last part.
    """
    source = "table2" if name == "figure8" else name
    final = select(rows, experiment=source, phase="final")
    if name == "table2":
        return Shown(tuple(_compared(final, d) for d in ("mnist", "fashion-mnist")), ())
    if name in {"cifar10", "cifar10-block"}:
        recipes = sorted({row["labels"]["recipe"] for row in final})
        return Shown(tuple(_compared(final, "cifar10", recipe=r) for r in recipes), ())
    from lap2.experiments import charts  # noqa: PLC0415 - matplotlib is optional

    if name == "figure5":
        return Shown((), (charts.against_epsilon(final, path),))
    if name == "figure6":
        return Shown((), (charts.grid(final, _chosen(final), path),))
    if name == "figure8":
        tables: list[Table] = []
        pictures: list[Path] = []
        for dataset, targets in _TARGETS.items():
            found = select(final, dataset=dataset, epsilon="3.42")
            tables.append(steps_to_reach(found, targets))
            place = path.with_name(f"{path.name}-{dataset}")
            pictures.append(charts.progress(found, targets, place))
        return Shown(tuple(tables), tuple(pictures))
    return Shown((), (charts.against_batch(final, path),))


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
