"""Tables made from rows of results, never by hand."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table as RichTable

from lap2.experiments.recipe import COLUMNS
from lap2.experiments.sweep import Row, select

__all__ = ["Table", "comparison", "costs", "overall", "steps_to_reach", "summary", "verdict"]

HEADINGS = {
    "gaussian": "Gaussian",
    "laplace-l1": "l1 Laplace",
    "published": "Lap2, published accountant (no guarantee)",
    "exact": "Lap2, values",
    "bits": "Lap2, bits",
}
PAPER = {
    ("mnist", "3.42"): 96.82,
    ("mnist", "2.53"): 96.90,
    ("mnist", "1.68"): 95.39,
    ("mnist", "0.88"): 93.29,
    ("mnist", "0.13"): 78.96,
    ("fashion-mnist", "3.42"): 82.60,
    ("fashion-mnist", "2.53"): 81.45,
    ("fashion-mnist", "1.68"): 81.45,
    ("fashion-mnist", "0.88"): 77.03,
    ("fashion-mnist", "0.13"): 70.03,
}
"""Test accuracy of Lap2 in the paper's Table II, in percent, by data set and epsilon."""
_CLAIMED = ("bits", "gaussian")


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
    The last column is what this project claims, or where it fails: see :func:`verdict`.
    """
    final = select(rows, phase="final", **labels)
    epsilons = sorted({row["labels"]["epsilon"] for row in final}, key=float, reverse=True)
    paper = {e: PAPER.get((labels.get("dataset", ""), e)) for e in epsilons}
    known = any(value is not None for value in paper.values())
    lines: list[tuple[str, ...]] = []
    for epsilon in epsilons:
        line = [epsilon]
        if known:
            line.append("" if paper[epsilon] is None else f"{paper[epsilon]:.2f}")
        for column in COLUMNS:
            found = select(final, epsilon=epsilon, column=column)
            text = entry(found)
            if column == "published" and found:
                text += f"; exact epsilon {_up(max(r['exact_epsilon'] for r in found))}"
            line.append(text)
        ours, gaussian = (select(final, epsilon=epsilon, column=c) for c in _CLAIMED)
        lines.append((*line, verdict(ours, gaussian, paper[epsilon])))
    first = ("epsilon", "Lap2 in the paper") if known else ("epsilon",)
    header = (*first, *(HEADINGS[column] for column in COLUMNS), "bits minus Gaussian")
    return Table(title, header, tuple(lines))


def verdict(ours: Sequence[Row], gaussian: Sequence[Row], paper: float | None = None) -> str:
    """Difference of the means, with its standard error, and in words where it falls short.

    "behind" is below the other by more than the other's standard error, "below the paper" is below
    the paper's number. One run has no standard error, and is not judged against the other.
    """
    if not ours:
        return ""
    mean, error = summary(ours)
    parts: list[str] = []
    if gaussian:
        other, spread = summary(gaussian)
        judged = not math.isnan(error + spread)
        parts.append(f"{mean - other:+.2f}" + f" ({math.hypot(error, spread):.2f})" * judged)
        parts += ["behind"] * (judged and mean < other - spread)
    parts += ["below the paper"] * (paper is not None and mean < paper)
    return ", ".join(parts)


def overall(rows: Sequence[Row]) -> Table:
    """The mean over all lines of what bits are above Gaussian, and its standard error."""
    final = select(rows, phase="final")
    places = {(row["labels"]["dataset"], row["labels"]["epsilon"]) for row in final}
    differences: list[float] = []
    for dataset, epsilon in sorted(places):
        pair = [select(final, dataset=dataset, epsilon=epsilon, column=c) for c in _CLAIMED]
        if all(pair):
            ours, gaussian = (summary(found)[0] for found in pair)
            differences.append(ours - gaussian)
    line = (str(len(differences)), "", "")
    if len(differences) > 1:
        error = statistics.stdev(differences) / math.sqrt(len(differences))
        line = (line[0], f"{statistics.mean(differences):+.2f}", f"{error:.2f}")
    header = ("lines", "mean difference", "standard error")
    return Table("Bits minus Gaussian, over all lines", header, (line,))


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


def costs(rows: Sequence[Row]) -> Table:
    """Runs of each experiment and the time they took, each on a core of its own."""
    names = list(dict.fromkeys(row["labels"]["experiment"] for row in rows))
    lines: list[tuple[str, ...]] = []
    for name in names:
        found = select(rows, experiment=name)
        seconds = [row["seconds"] for row in found]
        scale = ", ".join(sorted({row["labels"]["scale"] for row in found}))
        counts = (str(len(select(found, phase=phase))) for phase in ("tune", "final"))
        lines.append((f"{name} ({scale})", *counts, f"{sum(seconds) / 60:.0f}"))
    header = ("experiment", "tuning runs", "final runs", "core minutes")
    return Table("What the runs took", header, tuple(lines))


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
