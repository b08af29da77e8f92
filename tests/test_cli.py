"""The command line as a user meets it."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

import lap2
from lap2.cli import app

RUN = ["--noise-multiplier", "1", "--sampling-prob", "0.0043", "--steps", "5860"]


def invoke(*arguments):
    return CliRunner().invoke(app, list(arguments), env={"COLUMNS": "120", "NO_COLOR": "1"})


def test_epsilon_says_what_it_holds_for():
    result = invoke("epsilon", *RUN, "--dimension", "26010", "--delta", "1e-5")
    assert result.exit_code == 0
    for words in (
        "1.96646",
        "exact worst case",
        "lambda = 8",
        "add/remove",
        "Poisson",
        "5860 steps",
    ):
        assert words in result.output
    assert "NOT A GUARANTEE" not in result.output


def test_delta_and_json():
    result = invoke("delta", *RUN, "--dimension", "inf", "--epsilon", "1.97", "--json")
    answer = json.loads(result.output)
    assert result.exit_code == 0
    assert 0.9e-5 < answer["delta"] < 1.1e-5
    assert answer["is_guarantee"] is True
    assert "dimension=inf" in answer["mechanism"]


@pytest.mark.parametrize("as_json", [[], ["--json"]])
def test_published_is_labelled_in_every_output(as_json):
    run = ["epsilon", *RUN, "--mechanism", "published", "--dimension", "26010", "--delta", "1e-5"]
    result = invoke(*run, *as_json)
    assert result.exit_code == 0
    assert "NOT a guarantee" in result.output
    if as_json:
        assert json.loads(result.output)["is_guarantee"] is False
    else:
        assert "NOT A GUARANTEE" in result.output


@pytest.mark.parametrize("name", ["laplace", "laplace-l1", "gaussian", "majorized", "published"])
def test_every_mechanism_answers(name):
    result = invoke("epsilon", *RUN, "--mechanism", name, "--dimension", "1e3", "--delta", "1e-5")
    assert result.exit_code == 0, result.output


def test_zero_noise_is_infinite_in_json():
    run = ["--noise-multiplier", "0", "--sampling-prob", "0.1", "--steps", "1"]
    assert (
        json.loads(invoke("epsilon", *run, "--delta", "1e-5", "--json").output)["epsilon"] == "inf"
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--noise-multiplier", "nan"], "noise_multiplier must be a finite number"),
        (["--sampling-prob", "1.5"], "sampling_prob must be a probability in [0, 1], got 1.5"),
        (["--steps", "-3"], "steps must be an integer at least 0, got -3"),
        (["--steps", "2.5"], "2.5"),
        (["--delta", "0"], "delta must be strictly between 0 and 1"),
        (["--dimension", "0"], "dimension must be an integer at least 1"),
        (["--dimension", "2.5"], "2.5"),
        (["--dimension", "many"], "many"),
        (["--mechanism", "cauchy"], "must be one of laplace"),
        (["--mechanism", "majorized", "--dimension", "inf"], "finite integer"),
    ],
)
def test_bad_input_exits_with_two_and_names_it(arguments, message):
    result = invoke("epsilon", *RUN, "--dimension", "10", "--delta", "1e-5", *arguments)
    assert result.exit_code == 2
    assert message in " ".join(result.output.replace("│", " ").split())


RUN_OF = ["--sampling-prob", "0.0043", "--steps", "5860"]
TARGET = ["--epsilon", "1", "--delta", "1e-5"]


def test_calibrate_answers_on_the_private_side():
    result = invoke("calibrate", *TARGET, *RUN_OF, "--dimension", "125000000", "--json")
    answer = json.loads(result.output)
    assert answer["noise_multiplier"] == pytest.approx(1.5228, rel=5e-4)
    assert 0.9999 <= answer["epsilon"] <= 1


def test_calibrate_takes_a_data_set_or_a_schedule_but_not_half_of_each():
    data = ["--dataset-size", "60000", "--batch-size", "258", "--epochs", "25"]
    assert "5814 steps" in invoke("calibrate", *TARGET, *data).output
    for bad in (data[:2], data[:4], data + RUN_OF, RUN_OF[:2], data[4:] + RUN_OF[:2]):
        assert invoke("calibrate", *TARGET, *bad).exit_code == 2


def test_bracket_is_printed_and_encloses():
    arguments = ["epsilon", *RUN, "--dimension", "26010", "--delta", "1e-5", "--bracket"]
    low, high = json.loads(invoke(*arguments, "--json").output)["bracket"]
    assert 1.76 <= low <= 1.78
    assert high == pytest.approx(1.96646, rel=1e-4)
    assert "the truth lies between" in invoke(*arguments).output


def test_plan_recommends_with_a_reason():
    arguments = ["plan", "--dataset-size", "1000", "--batch-size", "1000", "--epochs", "1"]
    result = invoke(*arguments, "--dimension", "1", "--epsilon", "1", "--delta", "1e-10")
    assert result.exit_code == 0
    assert "recommendation: laplace" in result.output
    assert "no guarantee" in result.output
    as_json = invoke(*arguments, "--dimension", "1", *TARGET, "--json")
    assert json.loads(as_json.output)["steps"] == 1


@pytest.mark.parametrize("name", ["laplace", "published"])
def test_optimize_shows_both_answers(name):
    arguments = [*TARGET, *RUN_OF, "--dimension", "300", "--mechanism", name]
    found = json.loads(invoke("optimize", *arguments, "--json").output)
    assert found["clip"] == found["direct_clip"]
    assert found["is_guarantee"] == (name == "laplace")
    assert "first-order" in invoke("optimize", *arguments).output


def test_impossible_target_exits_with_two():
    result = invoke("optimize", *TARGET, *RUN_OF, "--scale-max", "0.02")
    assert result.exit_code == 2
    assert "clip_min must be at most" in " ".join(result.output.replace("│", " ").split())


def test_version_and_unwritable_folder():
    assert invoke("--version").output.strip() == f"lap2 {lap2.__version__}"
    assert invoke("figure", "volume", "--folder", "/dev/null/x", "--scale", "small").exit_code == 2
    bad = invoke("train", "--release", "magic")
    assert bad.exit_code == 2
    assert "release must be one of" in " ".join(bad.output.split())


def test_plan_prints_noise_that_meets_the_target():
    """Rounded up: what is printed can be used."""
    data = ["--dataset-size", "1000", "--batch-size", "1000", "--epochs", "1", "--dimension", "1"]
    output = invoke("plan", *data, "--epsilon", "1", "--delta", "1e-10").output
    lines = [line.split("│") for line in output.splitlines() if line.startswith("│ laplace ")]
    for (_, _, release, noise, *_), copies in zip(lines, (2**21, 1), strict=True):
        assert release.strip() == (f"{copies:,} bits" if copies > 1 else "values")
        run = lap2.Accountant().compose(lap2.Laplace(float(noise), copies), sampling_prob=1.0)
        assert run.get_epsilon(1e-10) <= 1


def test_plan_fits_a_terminal(monkeypatch):
    """Nothing but the label of what is no guarantee takes a second line."""
    monkeypatch.setenv("COLUMNS", "80")
    data = ["--dataset-size", "60000", "--batch-size", "258", "--epochs", "25"]
    arguments = ["plan", *data, "--dimension", "125000000", *TARGET]
    output = CliRunner().invoke(app, arguments, env={"NO_COLOR": "1"}).output
    assert max(map(len, output.splitlines())) <= 80
    assert sum(line.startswith("│") for line in output.splitlines()) == 6


def test_figure_writes_three_files(tmp_path):
    result = invoke("figure", "volume", "--folder", str(tmp_path), "--scale", "small")
    assert result.exit_code == 0
    assert sorted(p.name for p in tmp_path.iterdir()) == ["volume.csv", "volume.png", "volume.svg"]
    assert invoke("figure", "nonsense").exit_code == 2


def test_readme_shows_the_real_output(request):
    readme = (request.config.rootpath / "README.md").read_text()
    command = next(line for line in readme.splitlines() if "$ lap2 epsilon" in line)
    result = invoke(*command.split("$ lap2 ")[1].split())
    for line in result.output.splitlines():
        assert line.strip() in readme


def test_import_is_light():
    """Importing lap2 brings NumPy and nothing heavier; checked in a fresh interpreter."""
    import subprocess
    import sys

    code = (
        "import sys, lap2; print([m for m in ('torch','scipy','typer','rich') if m in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"
    assert lap2.__version__


def test_targets_that_promise_little_are_warned_of():
    run = ["epsilon", *RUN, "--dimension", "26010"]
    assert "warning" not in invoke(*run, "--delta", "1e-5").output
    assert "delta = 0.01 is large" in invoke(*run, "--delta", "0.01").output
    (said,) = json.loads(invoke(*run, "--delta", "0.01", "--json").output)["warnings"]
    assert said.startswith("delta = 0.01 is large")
    data = ["--dataset-size", "60000", "--batch-size", "258", "--epochs", "1"]
    target = ["--epsilon", "12", "--delta", "2e-5"]
    for command in (["calibrate", *data], ["plan", *data, "--dimension", "10"]):
        output = " ".join(invoke(*command, *target).output.split())
        assert "warning delta = 2e-05 is at or above 1/60000" in output
        assert "warning epsilon = 12 is large" in output
        assert len(json.loads(invoke(*command, *target, "--json").output)["warnings"]) == 2
        assert "warning" not in invoke(*command, *TARGET).output


def test_delta_is_printed_as_given_and_what_is_found_is_rounded_up():
    given = repr(1 / 60_000)
    assert given in invoke("epsilon", *RUN, "--delta", given).output
    output = invoke("delta", *RUN, "--epsilon", "1.9702").output
    exact = json.loads(invoke("delta", *RUN, "--epsilon", "1.9702", "--json").output)["delta"]
    assert float(output.split("delta")[1].split()[0]) >= exact
    assert "1.9702 " in output


def test_train_prints_delta_as_given_and_the_warnings_of_its_statement(capsys):
    from lap2.cli.training import _show
    from lap2.experiments.run import Result
    from lap2.train.engine import Statement

    statement = Statement(
        epsilon=1.0000001,
        delta=1 / 60_000,
        steps=1,
        bound="exact",
        is_guarantee=True,
        assumptions=(),
        caveats=(),
        rounding=0.0,
        warnings=("little is promised",),
    )
    _show(Result("digits", 0.9, "test", statement, 1.0, 1.0, Path("runs"), 1, 1, 0, ()))
    printed = " ".join(capsys.readouterr().out.split())
    assert f"epsilon 1.00001 at delta {1 / 60_000!r}" in printed
    assert "warning little is promised" in printed
