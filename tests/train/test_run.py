"""The main job, small, and the data it needs."""

import dataclasses
import gzip
import json
import struct

import numpy as np
import pytest
import torch
from torch import nn

import lap2
from lap2.experiments import data, run
from lap2.experiments.models import mnist_cnn


def test_the_papers_cnn_has_its_number_of_parameters():
    assert sum(p.numel() for p in mnist_cnn().parameters()) == 26010


def test_a_run_leaves_everything_about_itself(tmp_path):
    settings = run.Settings(dataset="digits", epochs=6, batch_size=200, epsilon=8.0)
    result = run.train(settings, tmp_path, progress=False)
    assert {p.name for p in tmp_path.iterdir() if not p.name.startswith("journal-")} == {
        "checkpoint.pt",
        "checkpoint.pt.previous",
        "config.json",
        "ledger.json",
        "metrics.jsonl",
        "report.png",
        "result.json",
        "weights.pt",
    }
    accountant = lap2.Accountant.load(tmp_path / "ledger.json")
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert accountant.steps == rows[-1]["step"] == result.statement.steps
    assert accountant.get_epsilon(1e-5) == result.statement.epsilon <= 8
    assert result.statement.is_guarantee
    assert result.test_accuracy > 0.3
    weights = torch.load(tmp_path / "weights.pt", weights_only=True)
    assert list(weights) == list(mnist_cnn().state_dict())


def test_a_folder_with_a_ledger_is_not_overwritten(tmp_path):
    lap2.Accountant().save(tmp_path / "ledger.json")
    before = (tmp_path / "ledger.json").read_text()
    with pytest.raises(ValueError, match="folder must be a new one"):
        run.train(run.Settings(dataset="digits"), tmp_path, progress=False)
    assert (tmp_path / "ledger.json").read_text() == before


SMALL = run.Settings(dataset="digits", epochs=4, batch_size=200, epsilon=8.0)


def stop_at(monkeypatch, step, error):
    """Make the run fail at its n-th step."""
    counted = iter(range(10**6))
    forward = nn.CrossEntropyLoss.forward

    def failing(self, *args):
        if next(counted) == step:
            raise error
        return forward(self, *args)

    monkeypatch.setattr(nn.CrossEntropyLoss, "forward", failing)


def test_an_interrupted_run_goes_on_where_it_was(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        stop_at(patch, 13, KeyboardInterrupt)
        with pytest.raises(KeyboardInterrupt):
            run.train(SMALL, tmp_path, progress=False)
    with pytest.raises(ValueError, match="continue it with --resume"):
        run.train(SMALL, tmp_path, progress=False)
    result = run.resume(tmp_path, progress=False)
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, 33))
    assert result.statement.steps == 32
    assert 7.99 < result.statement.epsilon <= 8
    with pytest.raises(ValueError, match="is finished"):
        run.resume(tmp_path)


def test_a_crash_costs_steps_and_never_the_budget(tmp_path, monkeypatch):
    monkeypatch.setattr(run._Run, "_report", report_rarely(run._Run._report))
    with monkeypatch.context() as patch:
        stop_at(patch, 13, RuntimeError("power"))
        with pytest.raises(RuntimeError, match="power"):
            run.train(SMALL, tmp_path, progress=False)
    result = run.resume(tmp_path, progress=False)
    assert (result.steps, result.planned_steps, result.lost_steps) == (29, 32, 3)
    assert result.statement.steps == 32
    assert 7.99 < result.statement.epsilon <= 8


def report_rarely(report):
    return lambda self: self.step in {1, 10, 29} and report(self)


def test_a_corrupt_checkpoint_is_said_and_the_one_before_used(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        stop_at(patch, 5, KeyboardInterrupt)
        with pytest.raises(KeyboardInterrupt):
            run.train(SMALL, tmp_path, progress=False)
    path = tmp_path / "checkpoint.pt"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.warns(UserWarning, match="is corrupt.*Going on from the one before it"):
        result = run.resume(tmp_path, progress=False)
    assert result.statement.epsilon <= 8


def test_settings_that_were_damaged_are_refused(tmp_path):
    (tmp_path / "checkpoint.pt").touch()
    (tmp_path / "config.json").write_text("nonsense")
    with pytest.raises(ValueError, match=r"config\.json must hold the settings"):
        run.resume(tmp_path)
    with pytest.raises(ValueError, match="batch_size must be at most 1437"):
        run.train(run.Settings(dataset="digits", batch_size=5000), tmp_path / "new")
    with pytest.raises(ValueError, match="got the file"):
        run.train(SMALL, tmp_path / "config.json")


def test_nothing_to_resume_is_refused(tmp_path):
    with pytest.raises(ValueError, match="must hold an interrupted run"):
        run.resume(tmp_path)


@pytest.mark.parametrize("change", [{"dataset": "cifar"}, {"epochs": 0}, {"learning_rate": -1.0}])
def test_bad_settings_are_refused(change):
    with pytest.raises(ValueError, match=next(iter(change))):
        run.Settings(**change)


def idx(array):
    header = struct.pack(">HBB", 0, 8, array.ndim) + struct.pack(f">{array.ndim}i", *array.shape)
    return header + array.tobytes()


@pytest.fixture
def tiny(monkeypatch, tmp_path):
    """Files of the same format, whose checksum is made the expected one."""
    rng = np.random.default_rng(0)
    shapes = [(6, 28, 28), (6,), (4, 28, 28), (4,)]
    arrays = [rng.integers(0, 10, shape).astype(np.uint8) for shape in shapes]
    folder = tmp_path / "local"
    folder.mkdir()
    for name, array in zip(data._FILES, arrays, strict=True):
        (folder / f"{name}.gz").write_bytes(gzip.compress(idx(array)))
    digest = data.hashlib.sha256(b"".join(a.tobytes() for a in arrays)).hexdigest()
    local = dataclasses.replace(data._MNIST, sha256=digest, fetch=no_source)
    monkeypatch.setattr(data, "_MNIST", local)
    monkeypatch.setattr(data, "_from_mirror", no_source)
    monkeypatch.setenv("LAP2_CACHE", str(tmp_path / "cache"))
    return folder


def no_source(*_):
    raise OSError("not here")


def test_a_local_folder_is_read_checked_and_cached(tiny):
    images = data.load_mnist(tiny)
    assert images.train_images.shape == (6, 1, 28, 28)
    assert images.test_labels.dtype == np.int64
    again = data.load_mnist()
    np.testing.assert_array_equal(again.train_images, images.train_images)


def test_corrupt_data_is_refused_and_every_source_named(tiny):
    path = tiny / f"{data._FILES[1]}.gz"
    content = bytearray(gzip.decompress(path.read_bytes()))
    content[-1] ^= 1
    path.write_bytes(gzip.compress(bytes(content)))
    with pytest.raises(data.DataError) as error:
        data.load_mnist(tiny)
    for words in ("checksum", "cache", "npm package", "https://"):
        assert words in str(error.value)


def test_digits_stand_in_when_nothing_answers(monkeypatch):
    def fail():
        raise data.DataError("nothing answers")

    monkeypatch.setattr(run, "load_mnist", fail)
    with pytest.warns(UserWarning, match="digits instead"):
        assert run._load("mnist").name == "digits"
