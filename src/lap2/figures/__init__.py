"""Figures: those of the Lap2 paper that are about privacy, with exact numbers, and two of our own.

``draw("bounds", folder)`` writes ``bounds.png``, ``bounds.svg`` and the numbers behind them,
``bounds.csv``. Drawing needs matplotlib, from the extra ``lap2[plots]``. docs/figures.md says what
each figure shows and how it differs from the paper's.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from lap2 import _validate
from lap2.figures import data
from lap2.figures.data import Scale, Sheet, write_csv

__all__ = ["FIGURES", "Spec", "draw"]


@dataclass(frozen=True)
class Spec:
    """One figure: what it shows, in one line, and the function that computes it."""

    shows: str
    compute: Callable[[Scale], Sheet]


FIGURES: dict[str, Spec] = {
    "volume": Spec("the l1 ball against the l2 ball by dimension (paper, figure 2)", data.volume),
    "noise-vs-epsilon": Spec(
        "calibrated noise and its best order against epsilon (paper, figure 3)",
        data.noise_vs_epsilon,
    ),
    "privacy-walls": Spec(
        "where noise stops buying budget, and delta against epsilon (paper, figure 4)",
        data.privacy_walls,
    ),
    "clip-vs-epsilon": Spec(
        "the largest clip for a noise scale against epsilon (paper, figure 9)",
        data.clip_vs_epsilon,
    ),
    "bounds": Spec("four bounds on epsilon and a lower bound against noise", data.bounds),
    "regimes": Spec(
        "where Laplace noise is smaller than Gaussian, by dimension and steps", data.regimes
    ),
}


def draw(name: str, folder: Path, *, scale: Scale = "full") -> list[Path]:
    """Compute a figure and write ``NAME.png``, ``NAME.svg`` and ``NAME.csv``.

    The same versions of lap2, NumPy and matplotlib write the same bytes. Neither matplotlib's
    settings nor its backend are touched.

    Args:
        name: one of :data:`FIGURES`.
        folder: where to write; made if missing.
        scale: "full" takes up to half a minute; "small" is a quick check on coarse grids, and not
            for publication.

    Returns:
        The three paths.

    Raises:
        ImportError: matplotlib is not installed.
    """
    _validate.choice("name", name, tuple(FIGURES))
    _validate.choice("scale", scale, ("full", "small"))
    try:
        from lap2.figures.drawing import render  # noqa: PLC0415 - matplotlib is optional
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "matplotlib":
            raise
        raise ImportError(
            "drawing needs matplotlib, which the extra lap2[plots] installs: "
            "python -m pip install 'lap2[plots]'"
        ) from error
    sheet = FIGURES[name].compute(scale)
    folder.mkdir(parents=True, exist_ok=True)
    table = folder / f"{name}.csv"
    write_csv(sheet.curves, table)
    return [*render(name, sheet, folder), table]
