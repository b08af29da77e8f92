"""The examples run as a newcomer would run them."""

import json
import subprocess
import sys

import lap2


def test_training_example_leaves_a_report_and_a_ledger(tmp_path, request):
    script = request.config.rootpath / "examples" / "train_digits.py"
    command = [sys.executable, "-W", "error", script, "--steps", "40", "--folder", tmp_path]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    accountant = lap2.Accountant.load(tmp_path / "ledger.json")
    last = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-1])
    assert accountant.steps == last["step"] == 40
    assert accountant.get_epsilon(1e-5) == last["epsilon"]
    assert last["test_accuracy"] > 0.5
    assert (tmp_path / "report.png").stat().st_size > 10_000
    assert "epsilon" in output
    assert "experiment" in output
