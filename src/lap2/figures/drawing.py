"""Drawing: needs matplotlib, so nothing imports this module before a figure is drawn."""
# pyright: basic
# (matplotlib leaves its keyword arguments untyped)

import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Circle, Patch, Polygon
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullFormatter
from matplotlib.transforms import ScaledTranslation

from lap2.figures.data import EXACT, GAUSSIAN, LOWER, PUBLISHED, Curve, Sheet
from lap2.figures.style import (
    BALLS,
    BLACK,
    BLUE,
    COLOURLESS,
    GREY,
    LINES,
    POINTS,
    PURPLE,
    RC,
    SAMPLING,
    SKY,
    VERMILLION,
)

_EPSILON = r"privacy budget $\varepsilon$"
_NOISE = "noise multiplier ($b/C$, or $\\sigma/C$ for Gaussian)"


def render(name: str, sheet: Sheet, folder: Path) -> list[Path]:
    """Draw a figure's data into ``NAME.png`` and ``NAME.svg``, the same bytes every time."""
    png, svg = folder / f"{name}.png", folder / f"{name}.svg"
    style: Any = RC
    with mpl.rc_context():
        mpl.rcdefaults()  # whatever the user's own style is
        mpl.rcParams.update(style)
        figure = Figure(layout="constrained")
        DRAWINGS[name](figure, sheet)
        figure.savefig(png, metadata={"Software": None})
        figure.savefig(svg, metadata={"Date": None, "Creator": None})
    return [png, svg]


def _volume(figure: Figure, sheet: Sheet) -> None:
    figure.set_size_inches(9.5, 3.7)
    _title(figure, r"In high dimension $\ell_1$ clipping leaves almost nothing", sheet)
    plane, volume, length = figure.subplots(1, 3, width_ratios=[1, 1.25, 1.5])

    plane.add_patch(Circle((0, 0), 1, facecolor=SKY, edgecolor=BLUE, alpha=0.6, linewidth=1.6))
    corners = [(1, 0), (0, 1), (-1, 0), (0, -1)]
    plane.add_patch(Polygon(corners, facecolor=PURPLE, edgecolor=BLACK, hatch="//", alpha=0.7))
    plane.set(xlim=(-1.15, 1.15), ylim=(-1.15, 1.15), xticks=[-1, 0, 1], yticks=[-1, 0, 1])
    plane.set(xlabel="coordinate 1", ylabel="coordinate 2", aspect="equal", anchor="N")
    plane.set_title(r"$n = 2$: $\ell_1$ fills 64% of $\ell_2$")
    box = {"facecolor": "white", "edgecolor": "none", "pad": 1.5}
    plane.text(0, 0, r"$\ell_1$", ha="center", va="center", bbox=box)
    plane.text(0.62, 0.62, r"$\ell_2$", ha="center", va="center")

    for axes, panel in ((volume, "volume"), (length, "length")):
        for curve in sheet.panel(panel):
            axes.plot(curve.x, curve.y, **{"label": _shown(curve.name), **BALLS[curve.name]})
        axes.legend(loc="lower left")
    l2, l1 = sheet.panel("volume")
    share, largest = round(l1.y[-1] - l2.y[-1]), round(l1.x[-1])
    volume.set_title(rf"$n = {largest}$: $\ell_1$ fills $10^{{{share}}}$ of $\ell_2$")
    volume.set(xlabel="dimension $n$", ylabel=r"$\log_{10}$ of the volume")
    length.set(xscale="log", yscale="log", xlabel="dimension $n$", ylim=(3e-4, 3))
    length.set(ylabel=r"$\ell_2$ norm", title="What is left of a random unit gradient")


def _noise_vs_epsilon(figure: Figure, sheet: Sheet) -> None:
    figure.set_size_inches(9.5, 4.6)
    _title(
        figure,
        r"Laplace needs $b$ = Gaussian's $\sigma$; published asks for twice that, then too little",
        sheet,
    )
    both = figure.subplots(1, 2)
    orders = [curve.more["order"] for curve in sheet.curves if curve.name != PUBLISHED]
    norm = LogNorm(min(o.min() for o in orders), max(o.max() for o in orders))
    for axes, panel in zip(both, ("tight", "moderate"), strict=True):
        for curve in sheet.panel(panel):
            if curve.name == PUBLISHED:
                axes.plot(curve.x, curve.y, color=GREY, **COLOURLESS[PUBLISHED])
                continue
            colours = mpl.colormaps["viridis"](norm(curve.more["order"]))
            for x, y, colour in zip(curve.x, curve.y, colours, strict=True):
                axes.plot(x, y, color=colour, **POINTS[curve.name])
        axes.set(xlabel=_EPSILON, title=f"{panel.capitalize()} privacy")
        _log(axes)
    both[0].set(ylabel=_NOISE)
    bar = figure.colorbar(ScalarMappable(norm, "viridis"), ax=list(both), pad=0.01)
    bar.set_label(r"best order $\lambda$")
    _log(bar.ax, "y")
    handles = [
        Line2D([], [], color=GREY, linestyle="", label=name, **POINTS[name]) for name in POINTS
    ]
    handles.append(Line2D([], [], color=GREY, label=PUBLISHED, **COLOURLESS[PUBLISHED]))
    figure.legend(handles=handles, loc="outside lower center", ncols=3)


def _privacy_walls(figure: Figure, sheet: Sheet) -> None:
    figure.set_size_inches(9.5, 4.8)
    _title(
        figure,
        r"Two walls: a larger budget stops saving noise; below a budget $\delta$ explodes",
        sheet,
    )
    slope, delta = figure.subplots(1, 2)
    for axes, panel in ((slope, "slope"), (delta, "delta")):
        for curve in sheet.panel(panel):
            style = {**SAMPLING[float(curve.more["sampling_prob"][0])], **COLOURLESS[curve.name]}
            style |= {"marker": ""} if curve.name == GAUSSIAN else {}
            style |= {"fillstyle": "none"} if curve.name == PUBLISHED else {}
            axes.plot(curve.x, curve.y, markevery=3, **style)
        axes.set(xlabel=_EPSILON)
    slope.set(ylabel=r"$|\Delta\log\sigma\,/\,\Delta\log\varepsilon|$ over a doubling", ylim=(0, 1))
    slope.set(title="Right wall: the noise calibrated for a budget stops falling")
    delta.set(ylabel=r"$\delta(\varepsilon)$", title="Left wall, at noise multiplier 4")
    _log(slope, "x")
    _log(delta, "x")
    delta.set(yscale="log")
    handles = [
        Line2D([], [], label=f"sampling probability {prob:g}", **style)
        for prob, style in SAMPLING.items()
    ]
    handles += [Line2D([], [], color=GREY, label=key, **COLOURLESS[key]) for key in COLOURLESS]
    figure.legend(handles=handles, loc="outside lower center", ncols=2)


def _clip_vs_epsilon(figure: Figure, sheet: Sheet) -> None:
    figure.set_size_inches(9.5, 4.6)
    _title(
        figure,
        r"Exact accounting allows up to twice the published clip; an $\ell_1$ clip passes far less",
        sheet,
    )
    both = figure.subplots(1, 2)
    for axes, panel in zip(both, ("clip", "dense gradient"), strict=True):
        _curves(axes, sheet.panel(panel), markevery=2)
        axes.set(xlabel=_EPSILON)
        _log(axes)
    both[0].set(ylabel="largest clip $C$, in noise scales", title="The clip, in its own norm")
    both[1].set(ylabel=r"largest $\ell_2$ norm, in noise scales", title="Dense gradients it passes")
    handles, labels = both[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=2)


def _bounds(figure: Figure, sheet: Sheet) -> None:
    figure.set_size_inches(7.2, 5.7)
    _title(figure, "The published bound is violated at little noise, and loose at much", sheet)
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=[1.8, 1])
    broken = {"color": VERMILLION, "alpha": 0.25, "linewidth": 0}
    loose = {"color": SKY, "alpha": 0.35, "linewidth": 0}
    for axes, panel in ((above, "epsilon"), (below, "ratio")):
        curves = sheet.panel(panel)
        x, y = curves[0].x, {curve.name: curve.y for curve in curves}
        low, mid, high = y[LOWER], y[EXACT], y[PUBLISHED]
        axes.fill_between(x, high, low, where=high < low, interpolate=True, **broken)
        axes.fill_between(x, mid, high, where=high > mid, interpolate=True, **loose)
        _curves(axes, curves, markevery=3)
    above.set(ylabel=r"reported $\varepsilon$", ylim=(0.04, 300))
    below.set(ylabel="reported / lower bound", ylim=(0.1, 10), xlabel=_NOISE)
    _log(above)
    _log(below)
    below.xaxis.set_major_locator(FixedLocator([0.3, 0.5, 1, 2, 4, 8, 16]))
    handles, labels = above.get_legend_handles_labels()
    labels[labels.index(GAUSSIAN)] = r"Gaussian, $\sigma = b$"
    handles += [Patch(**broken), Patch(**loose)]
    labels += ["published: below the lower bound, violated", "published: above exact, loose"]
    above.legend(handles, labels, loc="upper right")


def _regimes(figure: Figure, sheet: Sheet) -> None:
    figure.set_size_inches(9, 7)
    _title(
        figure,
        "Laplace noise is the smaller for few coordinates and few steps; elsewhere it is "
        r"$\mathbf{\sqrt{2}}$ times Gaussian's",
        sheet,
    )
    grid = figure.subplots(2, 2, sharex=True, sharey=True)
    # Symmetric about 1, so that equal factors look equal.
    norm, top = LogNorm(0.2, 5.0), math.sqrt(2)
    levels = [*np.geomspace(0.2, 1, 15), *np.geomspace(1, top, 6)[1:-1], top * (1 + 1e-6)]
    lines: Any = (
        (1.0, "-", "inside: smaller outright"),
        (0.9 * top, "--", "inside: signs are worth 10% less noise"),
        (0.99 * top, ":", "inside: signs are worth 1% less noise"),
    )
    filled: Any = None
    panels = dict.fromkeys(curve.panel for curve in sheet.curves)
    for axes, panel in zip(grid.ravel(), panels, strict=True):
        curves = sheet.panel(panel)
        steps = np.array([curve.more["steps"][0] for curve in curves])
        surface = (curves[0].x, steps, np.array([curve.y for curve in curves]))
        epsilon, prob = (curves[0].more[key][0] for key in ("epsilon", "sampling_prob"))
        axes.set(xscale="log", yscale="log")
        axes.set_title(rf"$\varepsilon = {epsilon:g}$, sampling probability {prob:g}")
        filled = axes.contourf(*surface, levels, norm=norm, cmap="PuOr_r")
        for level, style, _ in lines:
            axes.contour(*surface, [level], colors=BLACK, linestyles=[style])
        axes.grid(visible=False)
    for axes in grid[1]:
        axes.set(xlabel="dimension $n$")
    for axes in grid[:, 0]:
        axes.set(ylabel="steps $T$")
    bar = figure.colorbar(filled, ax=grid, ticks=FixedLocator([0.2, 0.4, 0.6, 0.8, 1, top]))
    bar.ax.set_yticklabels(["0.2", "0.4", "0.6", "0.8", "1", r"$\sqrt{2}$"])
    bar.set_label(r"standard deviation of Laplace / Gaussian noise, $\sqrt{2}\,b\,/\,\sigma$")
    handles = [Line2D([], [], color=BLACK, linestyle=s, label=text) for _, s, text in lines]
    figure.legend(handles=handles, loc="outside lower center", ncols=3)


DRAWINGS: Mapping[str, Callable[[Figure, Sheet], None]] = {
    "volume": _volume,
    "noise-vs-epsilon": _noise_vs_epsilon,
    "privacy-walls": _privacy_walls,
    "clip-vs-epsilon": _clip_vs_epsilon,
    "bounds": _bounds,
    "regimes": _regimes,
}


def _title(figure: Figure, message: str, sheet: Sheet) -> None:
    """The message, and below it, smaller, the settings: the layout leaves room for both."""
    figure.suptitle(f"{message}\n ", x=0.012, ha="left", linespacing=1.7)
    down = ScaledTranslation(0, -21.5 / 72, figure.dpi_scale_trans)
    figure.text(
        0.012, 1, sheet.settings, va="top", color=GREY, transform=figure.transFigure + down
    ).set_in_layout(False)


def _curves(axes: Axes, curves: Iterable[Curve], *, markevery: int) -> None:
    for curve in curves:
        label = _shown(curve.name)
        axes.plot(curve.x, curve.y, label=label, markevery=markevery, **LINES[curve.name])


def _shown(name: str) -> str:
    return name.replace("l1", r"$\ell_1$").replace("l2", r"$\ell_2$")


def _log(axes: Axes, which: str = "xy") -> None:
    """Logarithmic axes with plain numbers, at 1, 2 and 5 where there is room for them."""
    axes.set(**{f"{letter}scale": "log" for letter in which})
    for axis in (axes.xaxis if letter == "x" else axes.yaxis for letter in which):
        low, high = axis.get_view_interval()
        axis.set_major_locator(LogLocator(subs=(1, 2, 5) if high / low < 300 else (1,)))
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axis.set_minor_formatter(NullFormatter())
