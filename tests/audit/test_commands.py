"""The audits as a user of the command line meets them: verdicts are exit codes."""

import json
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from lap2.cli.auditing import app


def invoke(*arguments):
    return CliRunner().invoke(app, list(arguments), env={"COLUMNS": "120", "NO_COLOR": "1"})


SMALL = {
    "sampler": ["--size", "500", "--steps", "200"],
    "mechanism": ["--trials", "4000", "--steps", "300"],
    "run": ["--canaries", "400", "--records", "100", "--steps", "30"],
    "claim": ["--trials", "1e5", "--seed", "1"],
}


@pytest.mark.parametrize(
    ("command", "extra", "code"),
    [
        ("sampler", [], 0),
        ("sampler", ["--noise", "torch"], 1),
        ("sampler", ["--control", "noise"], 1),
        ("mechanism", [], 0),
        ("mechanism", ["--control", "copies", "--release", "bits"], 1),
        ("run", [], 0),
        ("run", ["--control", "twins", "--release", "bits"], 1),
        ("claim", ["--bound", "published"], 1),
        ("claim", ["--bound", "exact"], 0),
    ],
)
def test_exit_code_is_the_verdict(command, extra, code):
    result = invoke(command, *SMALL[command], *extra, "--confidence", "0.99999", "--json")
    answer = json.loads(result.output)
    assert result.exit_code == code, answer
    assert answer["verdict"] == ("violated" if code else "consistent")
    assert answer["level"] == command
    assert bool(answer["evidence"]) == bool(code)
    if command in {"mechanism", "run"} and not extra:
        names = {check["name"].split(":")[0] for check in answer["checks"]}
        assert names == {"bits", "values"}


def test_words_for_people():
    result = invoke("claim", *SMALL["claim"])
    assert result.exit_code == 1
    for words in ("violated", "epsilon", "0.319777 at delta 1e-05", "99.9%", "Clopper-Pearson"):
        assert words in result.output
    checks = invoke("run", *SMALL["run"], "--control", "noise", "--release", "values")
    assert "noise scale of coordinate 3" in checks.output


@pytest.mark.parametrize(
    "arguments",
    [
        ["sampler", "--noise", "white"],
        ["sampler", "--steps", "many"],
        ["mechanism", "--control", "everything"],
        ["mechanism", "--confidence", "1"],
        ["mechanism", "--release", "some"],
        ["mechanism", "--control", "copies"],
        ["run", "--control", "twins", "--release", "values"],
        ["sampler", "--control", "ledger"],
        ["run", "--confidence", "2"],
        ["run", "--width", "1"],
        ["claim", "--bound", "imagined"],
        ["claim", "--trials", "0.5"],
    ],
)
def test_bad_input_is_code_2(arguments):
    result = invoke(*arguments)
    assert result.exit_code == 2
    assert "must be" in result.output


def test_help_needs_neither_torch_nor_scipy():
    code = (
        "import sys, lap2.cli.auditing; "
        "sys.exit(bool({'torch', 'scipy', 'numpy'} & set(sys.modules) - {'numpy'}))"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
