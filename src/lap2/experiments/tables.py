"""Tables made from rows of results, never by hand."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table as RichTable

from lap2.experiments.recipe import COLUMNS
from lap2.experiments.sweep import Row, select

__all__ = ["Table", "comparison", "steps_to_reach", "summary"]

HEADINGS = {
    "gaussian": "Gaussian",
    "laplace-l1": "l1 Laplace",
    "published": "Lap2, published accountant (no guarantee)",
    "exact": "Lap2, exact",
    "denoised": "Lap2, exact + denoising",
}
PAPER = {("mnist", "0.88"): 96.1, ("mnist", "0.13"): 87.5, ("fashion-mnist", "0.88"): 80.4}
"""Test accuracy of Lap2 in the paper's Table II, where it is known to us."""


@dataclass(frozen=True)
class Table:
    """A title, a heading for each column, and lines of text."""

    title: str
    header: tuple[str, ...]
    lines: tuple[tuple[str, ...], ...]

    def markdown(self) -> str:
        """As a Markdown table, without the title."""
        rows = [self.header, tuple("---" for _ in self.header), *self.lines]
        return "".join("| " + " | ".join(row) + " |\n" for row in rows)

    def rich(self) -> RichTable:
        """For the terminal."""
        table = RichTable(*self.header, title=self.title)
        for line in self.lines:
            table.add_row(*line)
        return table


def summary(rows: Sequence[Row]) -> tuple[float, float]:
    """Mean accuracy in percent, and its standard error (NaN for one run)."""
    values = [100 * row["accuracy"] for row in rows]
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan
    return statistics.mean(values), error


def entry(rows: Sequence[Row]) -> str:
    """Mean, standard error and number of runs."""
    if not rows:
        return "not run"
    mean, error = summary(rows)
    runs = f"{len(rows)} run" + "s" * (len(rows) > 1)
    return f"{mean:.2f} ({error:.2f}; {runs})" if len(rows) > 1 else f"{mean:.2f} ({runs})"


def comparison(rows: Sequence[Row], *, title: str, **labels: str) -> Table:
    """The mechanisms beside each other, a line for each epsilon, from the final rows so labelled.

    The exact epsilon of the runs whose noise the published accountant set is beside their accuracy.
    """
    final = select(rows, phase="final", **labels)
    epsilons = sorted({row["labels"]["epsilon"] for row in final}, key=float, reverse=True)
    paper = {e: PAPER.get((labels.get("dataset", ""), e)) for e in epsilons}
    known = any(value is not None for value in paper.values())
    lines: list[tuple[str, ...]] = []
    for epsilon in epsilons:
        line = [epsilon]
        if known:
            line.append("" if paper[epsilon] is None else f"{paper[epsilon]:.1f}")
        for column in COLUMNS:
            found = select(final, epsilon=epsilon, column=column)
            text = entry(found)
            if column == "published" and found:
                text += f"; exact epsilon {_up(max(r['exact_epsilon'] for r in found))}"
            line.append(text)
        lines.append(tuple(line))
    header = ["epsilon", *(["Lap2 in the paper"] if known else []), *(HEADINGS[c] for c in COLUMNS)]
    return Table(title, tuple(header), tuple(lines))


def steps_to_reach(
    rows: Sequence[Row], targets: Sequence[float], *, title: str, **labels: str
) -> Table:
    """The first evaluated step at which each mechanism's mean accuracy reaches each target."""
    final = select(rows, phase="final", **labels)
    lines: list[tuple[str, ...]] = []
    for column in COLUMNS:
        curve = mean_curve(select(final, column=column))
        firsts = [next((s for s, a in curve if 100 * a >= target), None) for target in targets]
        texts = ["never" if first is None else str(first) for first in firsts]
        lines.append((HEADINGS[column], *(texts if curve else ["not run"] * len(targets))))
    header = ("", *(f"steps to {target:g}%" for target in targets))
    return Table(f"{title}: steps until the mean test accuracy is reached", header, tuple(lines))


def mean_curve(rows: Sequence[Row]) -> list[tuple[int, float]]:
    """Mean accuracy over runs, at the steps that all of them evaluated."""
    if not rows:
        return []
    curves: list[dict[int, float]] = [{step: a for step, a in row["curve"]} for row in rows]  # noqa: C416
    common = sorted(step for step in curves[0] if all(step in curve for curve in curves))
    return [(step, statistics.mean(curve[step] for curve in curves)) for step in common]


def _up(value: Any) -> str:
    """Three decimals, rounded up."""
    return f"{math.ceil(1000 * value) / 1000:.3f}"
