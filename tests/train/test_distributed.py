"""Two real processes under torchrun: the same result, noise once, the same ledger, clean ends."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

import lap2

SCRIPT = Path(__file__).with_name("distributed_run.py")


def torchrun(folder, *tasks):
    return subprocess.run(
        [
            sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2",
            SCRIPT, folder, *tasks,
        ],
        check=False, capture_output=True, text=True, timeout=300,
    )  # fmt: skip


def results(folder, task):
    return [json.loads((folder / f"{task}-{rank}.json").read_text()) for rank in (0, 1)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """One start of two processes for all tasks: loading torch twice takes longer than they do."""
    folder = tmp_path_factory.mktemp("world")
    done = torchrun(folder, "equal", "noise", "gaussian", "empty", "mixing", "refused")
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


def test_two_processes_do_what_one_does_on_the_same_records(folder):
    spec = importlib.util.spec_from_file_location("distributed_run", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    alone = module.equal(None)["weights"]
    for result in results(folder, "equal"):
        np.testing.assert_allclose(result["weights"], alone, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    ("task", "law"), [("noise", stats.laplace(scale=0.5)), ("gaussian", stats.norm(scale=0.5))]
)
def test_every_coordinate_is_noised_once(folder, task, law):
    """Noise shared by halves, added twice, or drawn from one seed on both ranks would show."""
    first, second = results(folder, task)
    assert first["released"] == second["released"]
    released = np.array(first["released"])
    assert released.shape[1] == 66
    assert (released != 0).all()
    assert len(np.unique(released)) > 0.99 * released.size
    assert stats.kstest(released.ravel(), law.cdf).pvalue > 1e-4
    twice = released.ravel() + law.rvs(released.size, random_state=0)
    assert stats.kstest(twice, law.cdf).pvalue < 1e-6
    halves = np.corrcoef(released[:, :33].ravel(), released[:, 33:].ravel())[0, 1]
    assert abs(halves) < 5 / np.sqrt(released.size / 2)
    ledger = lap2.Accountant.from_json(first["ledger"])
    assert ledger.steps == len(released)
    mechanism = ledger.ledger[0].mechanism
    assert type(mechanism) is (lap2.Gaussian if task == "gaussian" else lap2.Laplace)
    assert getattr(mechanism, "dimension", 66) == 66
    assert first["is_guarantee"]
    assert second["is_guarantee"]


def test_empty_local_batches_do_not_desynchronise(folder):
    first, second = results(folder, "empty")
    assert len(first["sizes"]) == len(second["sizes"]) == 50
    assert min(first["sizes"].count(0), second["sizes"].count(0)) > 5
    assert first["sizes"] != second["sizes"]
    assert first["ledger"] == second["ledger"]
    assert first["weights"] == second["weights"]
    assert first["rehearsed"] == second["rehearsed"] > 20
    assert first["is_guarantee"]
    assert second["is_guarantee"]
    accountant = lap2.Accountant.from_json(first["ledger"])
    assert accountant.steps == 50
    assert accountant.ledger[0].sampling_prob == first["prob"] == 0.02


def test_each_rank_rehearses(folder):
    for result in results(folder, "mixing"):
        assert "examples are mixed" in result["message"]
        assert result["steps"] == 0


def test_ranks_that_disagree_and_wrapped_models_are_refused(folder):
    for result in results(folder, "refused"):
        disagree, release, wrapped, sharded = result["messages"]
        assert "all processes must have the same" in disagree
        assert "all processes must have the same release" in release
        assert "pass the model inside it" in wrapped
        assert "is sharded (FSDP)" in sharded


def test_a_killed_rank_ends_the_run_and_it_resumes(tmp_path):
    done = torchrun(tmp_path, "killed")
    assert done.returncode != 0
    assert not list(tmp_path.glob("killed-*.json"))
    done = torchrun(tmp_path, "killed")
    assert done.returncode == 0, done.stderr[-3000:]
    first, second = results(tmp_path, "killed")
    assert first == second
    assert first["lost"] in (2, 3)  # the third step may have been entered, not released
    assert first["steps"] == first["lost"] + 3
