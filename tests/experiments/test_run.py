"""The main job, small."""

import json
import warnings
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader
from typer.testing import CliRunner

import lap2
from lap2.cli import app
from lap2.experiments import data, run, sweep, tasks
from lap2.experiments.models import mnist_cnn
from lap2.experiments.recipe import load_recipe
from lap2.signal import copies, spread_size
from lap2.train import PrivacyEngine
from lap2.train.step import PrivateStep


def test_the_papers_cnn_has_its_number_of_parameters():
    assert sum(p.numel() for p in mnist_cnn().parameters()) == 26010


def test_a_run_leaves_everything_about_itself(tmp_path):
    recipe = load_recipe("digits", steps=48, batch_size=200, epsilon=8.0)
    result = run.train(recipe, tmp_path, progress=False)
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
    assert result.accuracy > 0.3
    weights = torch.load(tmp_path / "weights.pt", weights_only=True)
    assert list(weights) == list(mnist_cnn().state_dict())


def test_no_record_is_in_the_folder_of_a_run(tmp_path):
    recipe = load_recipe("digits", steps=4, batch_size=200, epsilon=8.0)
    run.train(recipe, tmp_path, progress=False)
    images = tasks.load_task(recipe).records.tensors[0]
    middle = [image.flatten()[20:44].numpy() for image in images]  # which no other image has
    held = b"".join(path.read_bytes() for path in tmp_path.iterdir())
    for kind in (np.float32, np.float64):
        assert not any(part.astype(kind).tobytes() in held for part in middle)
    torch.save(images[7:8].clone(), tmp_path / "batch.pt")
    assert middle[7].tobytes() in (tmp_path / "batch.pt").read_bytes()


def test_a_run_that_is_judged_by_private_records_says_so(tmp_path):
    recipe = load_recipe("digits", steps=2, batch_size=200, epsilon=8.0, holdout=300)
    result = run.train(recipe, tmp_path, progress=False)
    assert not result.statement.is_guarantee
    (caveat,) = lap2.Accountant.load(tmp_path / "ledger.json").caveats
    assert "held-out records were written as they are" in caveat


def test_a_folder_with_a_ledger_is_not_overwritten(tmp_path):
    lap2.Accountant().save(tmp_path / "ledger.json")
    before = (tmp_path / "ledger.json").read_text()
    with pytest.raises(ValueError, match="folder must be a new one"):
        run.train(load_recipe("digits"), tmp_path, progress=False)
    assert (tmp_path / "ledger.json").read_text() == before


SMALL = load_recipe("digits", steps=32, batch_size=200, epsilon=8.0)


def stop_at(monkeypatch, step, error):
    """Make the run fail at its n-th step, or piece of one; rehearsals do not count."""
    counted, pieces = iter(range(10**6)), []
    forward, before_piece = nn.CrossEntropyLoss.forward, PrivateStep.before_piece

    def noticing(self, piece):
        pieces.append(piece)
        before_piece(self, piece)

    def failing(self, *args):
        if pieces[-1].rehearsal is None and next(counted) == step:
            raise error
        return forward(self, *args)

    monkeypatch.setattr(PrivateStep, "before_piece", noticing)
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


def test_a_damaged_recipe_or_a_bad_folder_is_refused(tmp_path):
    (tmp_path / "checkpoint.pt").touch()
    (tmp_path / "config.json").write_text("nonsense")
    with pytest.raises(ValueError, match=r"config\.json must hold the recipe"):
        run.resume(tmp_path)
    with pytest.raises(ValueError, match="batch_size must be at most 1437"):
        run.train(load_recipe("digits", batch_size=5000), tmp_path / "new")
    with pytest.raises(ValueError, match="got the file"):
        run.train(SMALL, tmp_path / "config.json")


def test_nothing_to_resume_is_refused(tmp_path):
    with pytest.raises(ValueError, match="must hold an interrupted run"):
        run.resume(tmp_path)


@pytest.fixture
def offline(monkeypatch):
    """No data but the embedded ones can be had."""

    def fail():
        raise data.DataError("nothing answers")

    tasks._inputs.cache_clear()
    for name in ("mnist", "fashion-mnist"):
        monkeypatch.setitem(tasks._LOADERS, name, fail)


def command(*words):
    return CliRunner().invoke(app, ["train", *words])


@pytest.mark.usefixtures("offline")
def test_digits_stand_in_when_the_default_cannot_be_had(tmp_path):
    """With what was given on the command line."""
    folder = tmp_path / "run"
    given = ("--steps", "3", "--batch-size", "100", "--mechanism", "gaussian", "--epsilon", "3")
    result = command("--folder", str(folder), *given)
    assert result.exit_code == 0, result.output
    assert "digits instead" in result.output
    config = json.loads((folder / "config.json").read_text())
    assert {name: config[name] for name in ("dataset", "steps", "batch_size", "mechanism")} == {
        "dataset": "digits",
        "steps": 3,
        "batch_size": 100,
        "mechanism": "gaussian",
    }


@pytest.mark.usefixtures("offline")
@pytest.mark.parametrize("words", [("fashion-mnist",), ("--dataset", "fashion-mnist")])
def test_nothing_else_has_a_stand_in(words, tmp_path):
    result = command(*words, "--folder", str(tmp_path / "run"))
    assert result.exit_code == 2
    assert "nothing answers" in result.output
    assert "instead" not in result.output
    assert not (tmp_path / "run").exists()


@pytest.mark.usefixtures("offline")
def test_a_sweep_never_trains_on_anything_else(tmp_path):
    """Its rows would say MNIST."""
    job = sweep.Job(load_recipe("mnist", steps=3), {"dataset": "mnist"})
    with pytest.raises(data.DataError, match="nothing answers"):
        sweep.do(job, tmp_path, 1)


def test_files_of_something_else_are_not_called_a_run(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match=r"which holds a config\.json already: choose another"):
        run.train(SMALL, tmp_path)


def test_held_out_records_are_what_is_evaluated_and_never_trained_on():
    whole = tasks.load_task(load_recipe("digits"))
    task = tasks.load_task(load_recipe("digits", holdout=300))
    assert (whole.evaluated_on, task.evaluated_on) == ("test", "holdout")
    assert len(task.records) == 1437 - 300
    assert len(task.labels) == 300
    everything = torch.cat([task.records.tensors[0], task.inputs]).flatten(1).double()
    original = whole.records.tensors[0].flatten(1).double()
    weights = torch.rand(everything.shape[1], dtype=torch.float64)
    torch.testing.assert_close((everything @ weights).sort()[0], (original @ weights).sort()[0])
    with pytest.raises(ValueError, match="holdout must be below 1437"):
        tasks.load_task(load_recipe("digits", holdout=1437))


def test_a_run_takes_exactly_its_steps_also_within_a_pass(tmp_path):
    result = run.train(load_recipe("digits", steps=7, evaluations=1), tmp_path, progress=False)
    assert result.steps == result.statement.steps == 7
    assert 0.9999 < result.statement.epsilon <= 1


def test_a_step_in_pieces_is_one_step(tmp_path):
    pieces = replace(SMALL, max_physical_batch_size=100)
    whole = run.train(SMALL, tmp_path / "whole", progress=False)
    result = run.train(pieces, tmp_path / "pieces", progress=False)
    assert (result.steps, result.statement) == (whole.steps, whole.statement)
    assert [step for step, _ in result.curve] == [step for step, _ in whole.curve]


def test_an_interruption_between_two_pieces_gives_up_the_batch(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        stop_at(patch, 13, KeyboardInterrupt)  # in the middle of some step
        with pytest.raises(KeyboardInterrupt):
            run.train(replace(SMALL, max_physical_batch_size=100), tmp_path, progress=False)
    result = run.resume(tmp_path, progress=False)
    assert result.steps == result.statement.steps == 32
    assert 7.99 < result.statement.epsilon <= 8


def test_noise_of_the_published_accountant_is_labelled_and_its_cost_exact(tmp_path):
    recipe = load_recipe("digits", steps=3, evaluations=1, accounting="published", epsilon=0.5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        result = run.train(recipe, tmp_path, progress=False)
    with pytest.warns(lap2.NotAGuaranteeWarning):
        step = lap2.PublishedLaplace(result.noise_multiplier, 26010)
    claimed = lap2.Accountant().compose(step, sampling_prob=256 / 1437, steps=3)
    assert claimed.get_epsilon(1e-5) == pytest.approx(0.5, rel=1e-5)
    rounded = result.noise_multiplier / (1 + result.statement.rounding)
    size = spread_size(26010)
    size *= copies(size, batch_size=256, noise_multiplier=result.noise_multiplier)
    released = lap2.Laplace(rounded, size)
    exact = lap2.Accountant().compose(released, sampling_prob=256 / 1437, steps=3)
    assert result.statement.epsilon == pytest.approx(exact.get_epsilon(1e-5), rel=1e-5)
    assert result.statement.epsilon != pytest.approx(0.5, rel=0.1)  # not what was claimed


@pytest.mark.parametrize(
    ("changes", "dimension"),
    [
        ({"copies": 3}, 3 * spread_size(26010)),
        ({"release": "bits", "copies": 1}, spread_size(26010)),
        ({"release": "values"}, 26010),
        ({"tau": 1.0}, spread_size(26010)),
    ],
)
def test_what_a_recipe_releases_is_what_its_ledger_has(tmp_path, changes, dimension):
    run.train(load_recipe("digits", steps=1, evaluations=1, **changes), tmp_path, progress=False)
    (entry,) = lap2.Accountant.load(tmp_path / "ledger.json").ledger
    assert entry.mechanism.dimension == dimension


def test_schedules_end_where_they_say():
    linear = run._factor(load_recipe("digits", learning_rate_schedule="linear", steps=100))
    hold = run._factor(load_recipe("digits", learning_rate_schedule="hold", steps=100))
    constant = run._factor(load_recipe("digits", learning_rate_schedule="constant", steps=100))
    assert [linear(0), linear(50), linear(100)] == [1, 0.5, 0]
    assert [hold(0), hold(50), hold(75), hold(100)] == [1, 1, 0.5, 0]
    assert constant(99) == 1


def test_fine_tuning_runs_end_to_end_on_a_tiny_transformer(tmp_path, monkeypatch):
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 10, 240)
    images = rng.random((240, 3, 32, 32), dtype=np.float32)
    few = data.Images("cifar10", images[:200], labels[:200], images[200:], labels[200:])
    tasks._inputs.cache_clear()
    monkeypatch.setitem(tasks._LOADERS, "cifar10", lambda: few)
    recipe = load_recipe("cifar10-tiny-vit", batch_size=40, steps=4, evaluations=2)
    before = tasks.load_task(recipe).model.state_dict()
    result = run.train(recipe, tmp_path, progress=False)
    tasks._inputs.cache_clear()
    after = torch.load(tmp_path / "weights.pt", weights_only=True)
    assert result.statement.epsilon <= recipe.epsilon
    assert all(
        not torch.equal(before[name], after[name]) for name in before if "prepare" not in name
    )


@pytest.mark.parametrize("given", [{}, {"epochs": 1, "steps": 5}, {"steps": 0}, {"epochs": 0}])
def test_the_engine_wants_epochs_or_steps_and_at_least_one(given):
    task = tasks.load_task(load_recipe("digits"))
    with pytest.raises(ValueError, match=r"epochs|steps"):
        PrivacyEngine().make_private_with_epsilon(
            module=task.model,
            optimizer=torch.optim.SGD(task.model.parameters(), lr=1.0),
            data_loader=DataLoader(task.records, batch_size=100),
            target_epsilon=1.0,
            target_delta=1e-5,
            max_grad_norm=1.0,
            **given,
        )
