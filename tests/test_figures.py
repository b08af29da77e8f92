"""Figures: what they show is right, and they are drawn legibly, the same every time."""

import csv
import math
import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

from lap2 import figures
from lap2.figures import data
from lap2.figures.data import EXACT, GAUSSIAN, L1, LOWER, MAJORIZED, PUBLISHED, Run

mpl = pytest.importorskip("matplotlib")

ROOT = Path(__file__).parent.parent
NAMES = list(figures.FIGURES)


@cache
def sheet(name):
    return figures.FIGURES[name].compute("small")


def by_name(name, panel):
    return {curve.name: curve for curve in sheet(name).panel(panel)}


@pytest.mark.parametrize("name", NAMES)
def test_draw_writes_a_picture_a_drawing_and_all_numbers(name, tmp_path):
    folder = tmp_path / "made" / "here"
    paths = figures.draw(name, folder, scale="small")
    assert paths == [folder / f"{name}.{ending}" for ending in ("png", "svg", "csv")]
    assert sorted(folder.iterdir()) == sorted(paths)
    assert paths[0].read_bytes().startswith(b"\x89PNG")
    assert ElementTree.parse(paths[1]).getroot().tag.endswith("svg")
    with paths[2].open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    written = [(row["panel"], row["curve"], float(row["x"]), float(row["y"])) for row in rows]
    assert all(math.isfinite(x) and math.isfinite(y) for _, _, x, y in written)
    expected = [
        (c.panel, c.name, x, y) for c in sheet(name).curves for x, y in zip(c.x, c.y, strict=True)
    ]
    assert [row[:2] for row in written] == [row[:2] for row in expected]
    np.testing.assert_allclose(
        [row[2:] for row in written], [row[2:] for row in expected], rtol=1e-8
    )


def test_same_bytes_whatever_the_users_style_which_is_left_alone(tmp_path):
    first = figures.draw("volume", tmp_path / "1", scale="small")
    with mpl.rc_context({"font.size": 30, "axes.facecolor": "red", "savefig.dpi": 20}):
        style = dict(mpl.rcParams.items())
        second = figures.draw("volume", tmp_path / "2", scale="small")
        assert dict(mpl.rcParams.items()) == style
    for one, other in zip(first, second, strict=True):
        assert one.read_bytes() == other.read_bytes()


@cache
def made(name):
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    from lap2.figures.drawing import DRAWINGS
    from lap2.figures.style import RC

    with mpl.rc_context(dict(RC)):
        figure = Figure(layout="constrained")
        canvas = FigureCanvasAgg(figure)
        DRAWINGS[name](figure, sheet(name))
        canvas.draw()
    return figure


@pytest.mark.parametrize("name", NAMES)
def test_text_is_legible_inside_the_picture_and_legends_cover_no_curve(name):
    from matplotlib.text import Text

    figure = made(name)
    for text in figure.findobj(Text):
        if text.get_visible() and text.get_text().strip():
            assert text.get_fontsize() >= 9, text
    tight = figure.get_tightbbox()
    assert tight.xmin >= 0
    assert tight.ymin >= 0
    assert tight.xmax <= figure.get_figwidth()
    assert tight.ymax <= figure.get_figheight()
    legends = [axes.get_legend() for axes in figure.axes] + figure.legends
    boxes = [legend.get_window_extent() for legend in legends if legend]
    for axes in figure.axes:
        for line in axes.lines:
            points = axes.transData.transform(np.column_stack(line.get_data()))
            for box in boxes:
                assert not any(box.contains(*point) for point in points), line
        assert not any(box.overlaps(axes.xaxis.label.get_window_extent()) for box in boxes)


@pytest.mark.parametrize("name", NAMES)
def test_axes_are_labelled_and_the_figure_says_its_message(name):
    figure = made(name)
    assert len(figure.get_suptitle().strip()) > 20
    assert sheet(name).settings in [text.get_text() for text in figure.texts]
    grid = [axes.get_subplotspec() for axes in figure.axes]
    for axes, place in zip(figure.axes, grid, strict=True):
        colour_bar = place is None or axes.get_label() == "<colorbar>"
        if colour_bar or place.is_last_row():
            assert axes.get_xlabel() or colour_bar
        if colour_bar or place.is_first_col():
            assert axes.get_ylabel()


def test_curves_of_a_panel_differ_in_more_than_colour():
    from lap2.figures.style import LINES

    looks = [(style["linestyle"], style.get("marker")) for style in LINES.values()]
    assert len(set(looks)) == len(looks)


def test_every_figure_has_its_drawing_and_its_section():
    from lap2.figures.drawing import DRAWINGS

    text = (ROOT / "docs" / "figures.md").read_text(encoding="utf-8")
    assert list(DRAWINGS) == NAMES
    assert re.findall(r"^## `(.+)`", text, re.MULTILINE) == NAMES
    assert all(f"lap2 figure {name}\n" in text for name in NAMES)
    for image in re.findall(r"!\[.*?\]\((.+?)\)", text):
        assert (ROOT / "docs" / image).stat().st_size < 150_000


def test_unknown_names_are_refused_and_nothing_is_written(tmp_path):
    with pytest.raises(ValueError, match=r"name must be one of volume, .*; got 'bound'"):
        figures.draw("bound", tmp_path / "none")
    with pytest.raises(ValueError, match=r"scale must be one of full, small; got 'big'"):
        figures.draw("bounds", tmp_path / "none", scale="big")
    assert not (tmp_path / "none").exists()


def test_without_matplotlib_the_error_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.delitem(sys.modules, "lap2.figures.drawing", raising=False)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r"lap2\[plots\]"):
        figures.draw("volume", tmp_path / "none", scale="small")
    assert not (tmp_path / "none").exists()


def test_importing_the_figures_imports_no_matplotlib():
    code = "import sys, lap2.figures; sys.exit('matplotlib' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_volumes_are_those_of_geometry():
    for n, l1, l2 in [(1, 2, 2), (2, 2, math.pi), (3, 4 / 3, 4 * math.pi / 3)]:
        assert data.log_volumes(n) == pytest.approx((math.log(l1), math.log(l2)))
    assert data.kept_by_l1_clipping(1) == pytest.approx(1)
    assert data.kept_by_l1_clipping(2) == pytest.approx(math.pi / 4)
    vectors = np.random.default_rng(0).normal(size=(20_000, 50))
    norms = np.abs(vectors).sum(axis=1) / np.linalg.norm(vectors, axis=1)
    assert data.kept_by_l1_clipping(50) == pytest.approx(1 / norms.mean(), rel=2e-3)
    radius = by_name("volume", "length")["radius at equal volume"]
    assert radius.y[-1] == pytest.approx(math.sqrt(2 * math.e / math.pi / radius.x[-1]), rel=1e-4)


def test_noise_curves_are_the_calibrated_noise():
    run = Run.of("small")
    for panel, low, high in (("tight", 0.01, 0.5), ("moderate", 0.5, 10.0)):
        curves = by_name("noise-vs-epsilon", panel)
        for name in (EXACT, GAUSSIAN, PUBLISHED):
            assert curves[name].x[[-1, 0]] == pytest.approx([low, high], rel=1e-5)
            middle = curves[name].x.size // 2
            calibrated = run.noise(name, float(curves[name].x[middle]))
            assert curves[name].y[middle] == pytest.approx(calibrated, rel=1e-5)
    assert by_name("noise-vs-epsilon", "tight")[EXACT].more["order"][-1] > 100


def test_clips_are_the_inverse_of_the_noise_and_l1_holds_shorter_gradients():
    run = Run.of("small")
    clip, dense = by_name("clip-vs-epsilon", "clip"), by_name("clip-vs-epsilon", "dense gradient")
    for name in (EXACT, L1):
        assert clip[name].y[0] * run.noise(name, 10.0) == pytest.approx(1, rel=1e-5)
    for end in (0, -1):  # the only points at which the curves have the same epsilon
        assert clip[L1].y[end] > clip[EXACT].y[end]
        assert dense[L1].y[end] < dense[EXACT].y[end] / 2
    np.testing.assert_array_equal(dense[EXACT].y, clip[EXACT].y)


def test_walls_slope_starts_near_one_and_falls_and_delta_agrees_with_epsilon():
    for curve in sheet("privacy-walls").panel("slope"):
        assert 0 < curve.y[-1] < curve.y[0] < 1
    for curve in sheet("privacy-walls").panel("delta"):
        assert np.all(np.diff(curve.y) < 0)
        run = Run(dimension=100, sampling_prob=float(curve.more["sampling_prob"][0]))
        epsilon = run.accountant(curve.name, 4.0).get_epsilon(float(curve.y[-1]))
        assert epsilon == pytest.approx(float(curve.x[-1]), rel=1e-4)


def test_bounds_are_in_order_and_the_published_one_is_on_both_sides():
    curves = {name: curve.y for name, curve in by_name("bounds", "epsilon").items()}
    assert np.all(curves[LOWER] < curves[EXACT])
    assert np.all(curves[EXACT] < curves[GAUSSIAN])
    assert np.all(curves[EXACT] < curves[MAJORIZED])
    assert curves[PUBLISHED][0] < curves[LOWER][0]
    assert curves[PUBLISHED][-1] > curves[EXACT][-1]
    ratio = by_name("bounds", "ratio")
    np.testing.assert_allclose(ratio[PUBLISHED].y * curves[LOWER], curves[PUBLISHED])


def test_regimes_go_from_a_quarter_to_the_square_root_of_two():
    for curve in sheet("regimes").curves:
        assert np.all(np.diff(curve.y) > 0)
        assert curve.y[-1] < math.sqrt(2)
        assert curve.y[-1] == pytest.approx(math.sqrt(2), rel=1e-3)
    few = [curve.y[0] for curve in sheet("regimes").curves if curve.name == "T = 1"]
    assert 0.2 < min(few) < max(few) < 0.5


def test_full_scale_is_the_run_of_the_theory():
    assert Run.of("full") == Run(26_010, 0.0043, 5860, 1e-5)
    assert Run().answer(EXACT, 1.0).epsilon == pytest.approx(1.96646, rel=1e-4)
    assert not Run().answer(PUBLISHED, 1.0).is_guarantee
