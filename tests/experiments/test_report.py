"""The page of results says what the result files say."""

from pathlib import Path

import pytest

from lap2.experiments.recipe import Recipe
from lap2.experiments.report import filled, write
from lap2.experiments.reproduce import EXPERIMENTS
from lap2.experiments.sweep import Job, read_rows

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "results").glob("*.jsonl"))


def test_the_page_is_made_from_the_result_files(tmp_path):
    page = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
    assert filled(page, ROOT / "results", tmp_path / "images") == page
    for picture in (tmp_path / "images").iterdir():
        assert (ROOT / "docs" / "images" / picture.name).exists()


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_committed_row_is_a_run_of_its_experiment(path):
    rows = read_rows(path)
    assert len({row["key"] for row in rows}) == len(rows)
    for row in rows:
        assert Job(Recipe.of(row["recipe"]), row["labels"]).key == row["key"]
        assert row["labels"]["experiment"] == path.stem
        tuning = row["labels"]["phase"] == "tune"
        assert row["evaluated_on"] == ("holdout" if tuning else "test")
        rates = {r["labels"]["factor"] for r in rows if cell_of(r) == cell_of(row)}
        assert tuning or len(rates) == 1  # one rate, the one that tuning chose
        if not tuning and row["recipe"]["accounting"] == "exact":
            assert row["exact_epsilon"] <= row["recipe"]["epsilon"]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_the_command_that_is_documented_takes_every_committed_row_as_done(path):
    rows = read_rows(path)
    (scale,) = {row["labels"]["scale"] for row in rows}
    jobs: set[str] = set()
    for cell in EXPERIMENTS[path.stem].cells(scale):
        factors = cell.tuning.factors if cell.tuning else (1.0,)
        jobs |= {job.key for factor in factors for job in cell.jobs(factor)}
    assert {row["key"] for row in rows if row["labels"]["phase"] == "final"} <= jobs


def cell_of(row):
    return {name: text for name, text in row["labels"].items() if name != "factor"}


def test_every_experiment_has_a_place_on_the_page_or_says_how_to_make_it(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("".join(f"a\n<!-- {name} -->\nold\n<!-- end -->\nb\n" for name in EXPERIMENTS))
    write(page, tmp_path / "nothing")
    text = page.read_text()
    assert "old" not in text
    assert text.count("No results yet") == len(EXPERIMENTS)
    assert text.count("a\n") >= len(EXPERIMENTS) <= text.count("b\n")


def test_a_place_for_an_experiment_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"places for table2.*got 'table9'"):
        filled("<!-- table9 -->\n<!-- end -->\n", tmp_path, tmp_path)
