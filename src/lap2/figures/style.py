"""How figures look: one palette, one set of fonts, every curve told apart without colour too."""

from collections.abc import Mapping
from typing import Any

from lap2.figures.data import EXACT, GAUSSIAN, L1, LOWER, MAJORIZED, PUBLISHED

# Okabe and Ito (2008): told apart in all common forms of colour blindness.
BLACK = "#000000"
ORANGE = "#E69F00"
SKY = "#56B4E9"
GREEN = "#009E73"
BLUE = "#0072B2"
VERMILLION = "#D55E00"
PURPLE = "#CC79A7"
GREY = "#555555"

Style = Mapping[str, Any]

RC: Style = {
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.labelsize": 10,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlelocation": "left",
    "axes.titlesize": 10,
    "figure.titlesize": 11,
    "figure.titleweight": "bold",
    "font.size": 10,
    "grid.color": "#DDDDDD",
    "grid.linewidth": 0.6,
    "legend.fontsize": 9,
    "legend.frameon": False,
    "lines.linewidth": 1.6,
    "lines.markersize": 5,
    "savefig.dpi": 130,
    "svg.hashsalt": "lap2",
    "xtick.labelsize": 9,
    "ytick.labelsize": 9,
}

# Gaussian and exact Laplace nearly coincide: the first is wide and pale, the second thin, on top.
LINES: Mapping[str, Style] = {
    EXACT: {"color": BLUE, "linestyle": "-", "marker": "o", "markersize": 4, "zorder": 3},
    GAUSSIAN: {"color": ORANGE, "linestyle": "-", "linewidth": 5, "alpha": 0.55, "zorder": 2},
    MAJORIZED: {"color": GREEN, "linestyle": "-.", "marker": "^", "zorder": 2},
    PUBLISHED: {"color": VERMILLION, "linestyle": "--", "marker": "X", "zorder": 4},
    L1: {"color": PURPLE, "linestyle": ":", "marker": "D", "markersize": 4, "zorder": 2},
    LOWER: {"color": BLACK, "linestyle": ":", "marker": "v", "markersize": 4, "zorder": 4},
}

# Where colour stands for something else.
COLOURLESS: Mapping[str, Style] = {
    GAUSSIAN: {"linewidth": 5.0, "alpha": 0.3},
    EXACT: {"linewidth": 1.4},
    PUBLISHED: {"linewidth": 1.4, "linestyle": (0, (4, 2))},
}
POINTS: Mapping[str, Style] = {
    GAUSSIAN: {"marker": "o", "markersize": 9.5, "fillstyle": "none", "markeredgewidth": 1.6},
    EXACT: {"marker": "D", "markersize": 4.5, "markeredgewidth": 0},
}
SAMPLING: Mapping[float, Style] = {
    1e-3: {"color": GREEN, "marker": "^", "markersize": 4.5},
    1e-2: {"color": BLUE, "marker": "o", "markersize": 4.5},
    1e-1: {"color": VERMILLION, "marker": "s", "markersize": 4.5},
}
BALLS: Mapping[str, Style] = {
    "l2 ball": {"color": BLUE, "linestyle": "-"},
    "l1 ball": {"color": PURPLE, "linestyle": "--"},
    "l2 clip": {"color": BLUE, "linestyle": "-", "label": r"after $\ell_2$ clipping"},
    "l1 clip": {
        "color": PURPLE,
        "linestyle": "-",
        "linewidth": 5,
        "alpha": 0.6,
        "label": r"after $\ell_1$ clipping",
    },
    "radius at equal volume": {
        "color": BLACK,
        "linestyle": ":",
        "label": r"radius of $\ell_2$ ball of $\ell_1$'s volume",
    },
}
