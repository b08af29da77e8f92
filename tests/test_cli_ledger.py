"""``lap2 ledger``: what a ledger has, and what several have together."""

import json

import pytest
from typer.testing import CliRunner

import lap2
from lap2.cli import app

STEP = lap2.Laplace(1.0, 26010)


def invoke(*arguments):
    return CliRunner().invoke(app, ["ledger", *map(str, arguments)])


def said(result):
    """What was printed, without the frame around an error."""
    return " ".join(result.output.replace("│", " ").split())


@pytest.fixture
def copies(tmp_path):
    """Of a run of 10 steps that went on in two copies, one of them with a seeded generator."""
    common = lap2.Entry(STEP, 0.01, 10, noise="secure", origin="1" * 16)
    paths = []
    for name, noise, steps in (("home", "secure", 5), ("away", "ordinary", 7)):
        accountant = lap2.Accountant().enter(common)
        accountant.enter(lap2.Entry(STEP, 0.01, steps, noise=noise, origin=name.encode().hex() * 2))
        paths.append(tmp_path / f"{name}.json")
        accountant.save(paths[-1])
    return paths


def test_merging_counts_what_copies_share_once(copies, tmp_path):
    out = tmp_path / "both.json"
    answer = json.loads(invoke("merge", *copies, "--out", out, "--delta", "1e-5", "--json").output)
    whole = lap2.Accountant().compose(STEP, sampling_prob=0.01, steps=22)
    assert answer["epsilon"] == whole.get_epsilon(1e-5)
    assert (answer["steps"], answer["is_guarantee"]) == (22, False)
    assert lap2.Accountant.load(out).steps == 22


def test_a_ledger_is_shown_with_what_is_to_be_said_of_it(copies):
    home, away = (
        " ".join(invoke("show", path, "--delta", "0.1").output.split()) for path in copies
    )
    assert "10 x Laplace" in home
    assert "5 x Laplace" in home
    assert "secure noise" in home
    assert "guarantee yes" in home
    assert "warning delta = 0.1" in home
    assert "guarantee no" in away
    assert "ordinary generator" in away


def test_no_file_is_written_over_and_bad_ones_are_named(copies, tmp_path):
    result = invoke("merge", *copies, "--out", copies[0], "--delta", "1e-5")
    assert result.exit_code == 2
    assert "must be a new file" in said(result)
    (tmp_path / "bad.json").write_text("{}")
    result = invoke("show", tmp_path / "bad.json", "--delta", "1e-5")
    assert result.exit_code == 2
    assert "bad.json" in said(result).replace(" ", "")  # a line may end within a long path
