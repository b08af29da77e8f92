"""The example audits other people's steps and finds the broken ones."""

import runpy

import pytest


def test_broken_steps_are_told_from_right_ones(request, capsys):
    pytest.importorskip("opacus", exc_type=ImportError)
    path = request.config.rootpath / "examples" / "audit_a_step.py"
    results = runpy.run_path(str(path))["main"]()
    verdicts = {name: result.verdict for name, result in results.items()}
    assert verdicts == {
        "numpy": "consistent",
        "numpy, broken": "violated",
        "opacus": "consistent",
        "opacus, broken": "violated",
    }
    assert capsys.readouterr().out.count("claims") == 4
