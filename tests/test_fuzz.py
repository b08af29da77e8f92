"""A few of the inputs of benchmarks/fuzz.py, and that it finds what is planted for it."""

import os
import re
import subprocess
import sys

import pytest

from lap2 import Accountant
from lap2.experiments.formats import FormatError
from lap2.experiments.recipe import RecipeError, load_recipe
from lap2.experiments.sweep import read_rows
from lap2.ledger import LedgerError
from lap2.train import CheckpointError
from lap2.train.journal import Journal

PLANTED = """
import os
from lap2.experiments import data, sweep
sweep.read_rows = lambda path: [][0]
data._idx = lambda content, where: os.abort()
"""


@pytest.fixture
def fuzz(request, tmp_path):
    script = request.config.rootpath / "benchmarks" / "fuzz.py"

    def run(inputs, **environment):
        command = [sys.executable, script, "--inputs", str(inputs), "--keep", tmp_path / "kept"]
        command += ["--workers", "2", "--seed", "7"]
        settings = {**os.environ, **environment}
        return subprocess.run(command, capture_output=True, text=True, check=False, env=settings)

    return run


def test_no_damaged_file_does_more_than_be_refused(fuzz, tmp_path):
    done = fuzz(1200)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith("1200 inputs, 0 failures\n")
    lines = re.findall(r"^(\w+) +(\d+) +(\d+) +0$", done.stdout, re.MULTILINE)
    assert len(lines) == 10
    assert all(int(accepted) + int(refused) == 120 for _, accepted, refused in lines)
    assert all(int(accepted) and int(refused) for _, accepted, refused in lines)
    assert list((tmp_path / "kept").iterdir()) == []


def test_a_crash_and_an_error_of_another_class_are_found_and_kept(fuzz, tmp_path):
    (tmp_path / "sitecustomize.py").write_text(PLANTED)
    done = fuzz(10, PYTHONPATH=str(tmp_path))
    assert done.returncode == 1, done.stdout + done.stderr
    assert "IndexError" in done.stdout
    assert "crash, -6" in done.stdout
    assert "10 inputs, 2 failures" in done.stdout
    assert {path.name for path in (tmp_path / "kept").iterdir()} == {"1.bin", "5.bin"}


@pytest.fixture
def endless(tmp_path):
    """A file that is far longer than memory, and takes no room on the disk."""
    path = tmp_path / f"journal-{'0' * 16}.txt"
    with path.open("wb") as stream:
        stream.truncate(1 << 42)
    return path


def test_of_a_file_without_an_end_only_the_beginning_is_read(endless, tmp_path):
    with pytest.raises(LedgerError, match="at most 67108864 characters"):
        Accountant.load(endless)
    with pytest.raises(CheckpointError, match="is corrupt"):
        Journal(tmp_path, "0" * 16).steps()
    with pytest.raises(FormatError, match="at most 67108864 bytes"):
        read_rows(endless)
    endless.rename(tmp_path / "recipe.toml")
    with pytest.raises(RecipeError, match="at most 65536 bytes"):
        load_recipe(tmp_path / "recipe.toml")
