"""Figures made from rows of results. Needs matplotlib, from ``lap2[plots]``."""

# pyright: basic

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure

from lap2.experiments.sweep import Row, select
from lap2.experiments.tables import HEADINGS, mean_curve, summary
from lap2.figures.style import BLACK, BLUE, GREEN, ORANGE, PURPLE, RC, SKY, VERMILLION

__all__ = ["against_batch", "against_epsilon", "grid", "progress"]

STYLES: dict[str, dict[str, Any]] = {
    "gaussian": {"color": ORANGE, "marker": "o"},
    "laplace-l1": {"color": PURPLE, "marker": "D", "linestyle": ":"},
    "published": {"color": VERMILLION, "marker": "X", "linestyle": "--"},
    "exact": {"color": SKY, "marker": "^", "linestyle": "-."},
    "bits": {"color": BLUE, "marker": "s"},
}
_SHADES = (GREEN, BLUE, VERMILLION, PURPLE, BLACK)
_MARKERS = "os^Dv"


def against_epsilon(rows: Sequence[Row], path: Path) -> Path:
    """Accuracy against epsilon, a curve for each clip (paper, figure 5)."""
    clips = sorted({row["labels"]["clip"] for row in rows}, key=float)
    with mpl.rc_context(_rc()):
        figure, axes = _panel("epsilon", "test accuracy (%)")
        for index, clip in enumerate(clips):
            style = {"color": _SHADES[index % 5], "marker": _MARKERS[index % 5]}
            _curve(axes, select(rows, clip=clip), "epsilon", label=f"C = {clip}", **style)
        _ticks(axes, rows, "epsilon")
        return _save(figure, axes, path)


def against_batch(rows: Sequence[Row], path: Path) -> Path:
    """Accuracy against batch size, a curve for each mechanism (paper, figures 10 and 11)."""
    with mpl.rc_context(_rc()):
        figure, axes = _panel("expected batch size", "test accuracy (%)")
        for column, style in STYLES.items():
            _curve(axes, select(rows, column=column), "batch", label=HEADINGS[column], **style)
        _ticks(axes, rows, "batch")
        return _save(figure, axes, path)


def progress(rows: Sequence[Row], targets: Sequence[float], path: Path) -> Path:
    """Accuracy against steps, a curve for each mechanism, and targets (paper, figure 8)."""
    with mpl.rc_context(_rc()):
        figure, axes = _panel("step", "test accuracy (%)")
        for column, style in STYLES.items():
            curve = mean_curve(select(rows, column=column))
            if curve:
                steps, values = zip(*curve, strict=True)
                plain = {key: value for key, value in style.items() if key != "marker"}
                axes.plot(steps, [100 * v for v in values], label=HEADINGS[column], **plain)
        for target in targets:
            axes.axhline(target, color=BLACK, linewidth=0.8, linestyle=":")
        axes.set_ylim(bottom=max(0.0, min(targets) - 20))
        return _save(figure, axes, path)


def grid(rows: Sequence[Row], chosen: dict[str, float], path: Path) -> Path:
    """Accuracy over clip and noise scale, for each epsilon and sampling probability (figure 6).

    Args:
        rows: with the labels epsilon, prob, clip and noise.
        chosen: the noise multiplier of the optimizer's choice, by ``"epsilon prob"``.
        path: of the picture, without its ending.
    """
    axis = {k: sorted({r["labels"][k] for r in rows}, key=float) for k in _GRID}
    with mpl.rc_context(_rc(**{"axes.grid": False})):
        shape = (len(axis["epsilon"]), len(axis["prob"]))
        figure = Figure(figsize=(3.1 * shape[1] + 0.8, 2.4 * shape[0] + 0.4), layout="constrained")
        panels = figure.subplots(*shape, squeeze=False)
        span = [100 * row["accuracy"] for row in rows]
        image: Any = None
        for i, epsilon in enumerate(axis["epsilon"]):
            for j, prob in enumerate(axis["prob"]):
                axes = panels[i][j]
                values = np.full((len(axis["noise"]), len(axis["clip"])), np.nan)
                for (a, noise), (c, clip) in _pairs(axis["noise"], axis["clip"]):
                    found = select(rows, epsilon=epsilon, prob=prob, noise=noise, clip=clip)
                    if found:
                        values[a, c] = summary(found)[0]
                        axes.text(c, a, f"{values[a, c]:.1f}", ha="center", va="center", fontsize=8)
                image = axes.imshow(
                    values,
                    vmin=min(span),
                    vmax=max(span),
                    cmap="cividis",
                    origin="lower",
                    aspect="auto",
                    alpha=0.8,
                )
                axes.set_xticks(range(len(axis["clip"])), axis["clip"])
                axes.set_yticks(range(len(axis["noise"])), axis["noise"])
                axes.set_title(f"epsilon {epsilon}, q = {prob}")
                _star(axes, axis, chosen.get(f"{epsilon} {prob}"))
        figure.supxlabel("clip C")
        figure.supylabel("noise scale b")
        figure.colorbar(image, ax=panels, label="test accuracy (%)")
        return _write(figure, path)


_GRID = ("epsilon", "prob", "clip", "noise")


def _pairs(rows: Sequence[str], columns: Sequence[str]):
    return ((r, c) for r in enumerate(rows) for c in enumerate(columns))


def _star(axes: Any, axis: dict[str, list[str]], multiplier: float | None) -> None:
    """Mark the largest clip that is feasible with the largest noise scale, on the grid."""
    if multiplier is None:
        return
    noise = float(axis["noise"][-1])
    feasible = [c for c, clip in enumerate(axis["clip"]) if noise / float(clip) >= multiplier]
    if feasible:
        place = (feasible[-1] + 0.32, len(axis["noise"]) - 1 + 0.28)
        axes.plot(*place, marker="*", markersize=13, color=VERMILLION, clip_on=False)


def _ticks(axes: Any, rows: Sequence[Row], label: str) -> None:
    """A logarithmic axis that names the points that were measured."""
    points = sorted({row["labels"][label] for row in rows}, key=float)
    axes.set_xscale("log")
    axes.set_xticks([float(point) for point in points], points)
    axes.minorticks_off()


def _curve(axes: Any, rows: Sequence[Row], label_of_x: str, **style: Any) -> None:
    """Means with standard errors against one label."""
    points = sorted({row["labels"][label_of_x] for row in rows}, key=float)
    if not points:
        return
    means, errors = zip(
        *(summary(select(rows, **{label_of_x: point})) for point in points), strict=True
    )
    bars = None if np.isnan(errors).all() else np.nan_to_num(errors)
    axes.errorbar([float(p) for p in points], means, yerr=bars, capsize=2, **style)


def _rc(**changes: Any) -> Any:
    return {**RC, **changes}


def _panel(x: str, y: str) -> tuple[Figure, Any]:
    figure = Figure(figsize=(6.4, 4.0), layout="constrained")
    axes = figure.subplots()
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    return figure, axes


def _save(figure: Figure, axes: Any, path: Path) -> Path:
    axes.legend()
    return _write(figure, path)


def _write(figure: Figure, path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    target = path.with_name(path.name + ".png")
    figure.savefig(target, metadata={"Software": None})
    return target
