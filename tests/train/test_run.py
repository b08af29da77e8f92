"""One run, one ledger: what travels in the optimizer's state, who may go on, what is refused."""

import copy
import os
import shutil
import subprocess
import sys
import textwrap
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lap2
from lap2 import Accountant, Entry, Laplace
from lap2.ledger import dumps
from lap2.noise import ReproducibleSigns
from lap2.train import CheckpointError, PrivacyEngine
from lap2.train.checkpoint import read, write
from lap2.train.run import RunState, default_folder


def make(*, momentum=0.9, **engine_options):
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    data = TensorDataset(torch.randn(40, 4), torch.randint(0, 2, (40,)))
    engine = PrivacyEngine(**engine_options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum)
    model, optimizer, loader = engine.make_private(
        module=model,
        optimizer=optimizer,
        data_loader=DataLoader(data, batch_size=8),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
    )
    return engine, model, optimizer, loader


def train(made, steps):
    engine, model, optimizer, loader = made
    while steps:
        for x, y in loader:
            optimizer.zero_grad()
            engine.backward(nn.functional.cross_entropy(model(x), y, reduction="none"))
            optimizer.step()
            steps -= loader.ends_batch
            if not steps:
                break


# What travels


def test_the_ledger_travels_in_the_optimizers_state(tmp_path):
    first = make()
    train(first, 3)
    torch.save(first[2].state_dict(), tmp_path / "optimizer.pt")
    train(first, 2)  # after it was saved
    first[0].close()
    again = make()
    again[2].load_state_dict(torch.load(tmp_path / "optimizer.pt", weights_only=True))
    assert again[0].accountant.steps == 5
    assert again[0].accountant.answer(delta=1e-5) == first[0].accountant.answer(delta=1e-5)
    train(again, 2)
    assert again[0].accountant.steps == 7
    buffer = again[2].state[again[1].weight]["momentum_buffer"]
    assert buffer.abs().sum() > 0


def test_a_state_without_a_ledger_is_refused():
    ordinary = torch.optim.SGD(nn.Linear(4, 2).parameters(), lr=7.0).state_dict()
    _, _, optimizer, _ = make()
    with pytest.raises(ValueError, match="state_dict must have the ledger of its run"):
        optimizer.load_state_dict(ordinary)
    assert optimizer.param_groups[0]["lr"] == 0.1


def test_a_refused_state_changes_nothing():
    first, again = make(), make()
    train(first, 2)
    state = first[2].state_dict()
    first[0].close()
    state["param_groups"] = []
    with pytest.raises(ValueError, match="parameter group"):
        again[2].load_state_dict(state)
    assert again[0].accountant.steps == 0
    third = make()
    third[2].load_state_dict(first[2].state_dict())  # the lock was given back
    assert third[0].accountant.steps == 2


def test_its_own_earlier_state_forgets_nothing():
    made = make()
    train(made, 2)
    state = copy.deepcopy(made[2].state_dict())
    train(made, 3)
    made[2].load_state_dict(state)
    assert made[0].accountant.steps == 5
    train(made, 1)
    assert made[0].accountant.steps == 6
    last = made[2].state_dict()["lap2"]
    assert (last["released"], last["lost"]) == (6, 3)


def test_a_run_is_loaded_before_the_first_step():
    first, again = make(), make()
    train(first, 2)
    train(again, 1)
    with pytest.raises(RuntimeError, match="must be loaded before the first step"):
        again[2].load_state_dict(first[2].state_dict())
    assert again[0].accountant.steps == 1


def test_earlier_releases_count_once():
    earlier = Accountant().compose(Laplace(1.0, 10), sampling_prob=0.5, steps=4)
    first = make(accountant=earlier)
    assert first[0].accountant is earlier
    train(first, 2)
    state = first[2].state_dict()
    first[0].close()
    again = make(accountant=Accountant().compose(Laplace(1.0, 10), sampling_prob=0.5, steps=4))
    again[2].load_state_dict(state)
    assert again[0].accountant.steps == 6
    third = make(accountant=Accountant().compose(Laplace(2.0, 10), sampling_prob=0.5, steps=4))
    again[0].close()
    third[2].load_state_dict(state)
    assert third[0].accountant.steps == 10  # another ledger than the run began with


def test_the_ledger_cannot_be_replaced():
    engine, *_ = make()
    with pytest.raises(AttributeError):
        engine.accountant = Accountant()


# Who may go on

SECOND = """
    import sys
    import torch
    sys.path.insert(0, sys.argv[2])
    from test_run import make
    engine, _, optimizer, _ = make()
    try:
        if sys.argv[1].endswith("run.pt"):
            engine.load(sys.argv[1])
        else:
            optimizer.load_state_dict(torch.load(sys.argv[1], weights_only=True))
    except ValueError as error:
        print(type(error).__name__, error)
    else:
        print(engine.accountant.steps)
"""


@pytest.mark.parametrize("name", ["run.pt", "optimizer.pt"])
def test_a_second_resume_is_refused_and_names_the_holder(tmp_path, name):
    engine, _, optimizer, _ = made = make()
    train(made, 1)
    engine.save(tmp_path / "run.pt")
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    train(made, 2)
    script = [sys.executable, "-c", textwrap.dedent(SECOND), tmp_path / name]
    script.append(os.path.dirname(__file__))

    def second():
        return subprocess.run(script, check=True, capture_output=True, text=True).stdout.strip()

    found = second()
    assert found.startswith(f"CheckpointError the run is held by process {os.getpid()} on ")
    again = make()
    with pytest.raises(CheckpointError, match=f"process {os.getpid()}"):
        again[0].load(tmp_path / "run.pt")
    assert again[0].accountant.steps == 0
    engine.close()
    assert second() == "3"


def test_no_step_follows_a_close():
    made = make()
    train(made, 2)
    made[0].close()
    with pytest.raises(RuntimeError, match=r"after engine\.close"):
        train(made, 1)
    assert made[0].accountant.steps == 2


def test_both_copies_of_a_run_can_be_merged(tmp_path):
    """The run went on at home and in a copy of its folder; what both began with counts once."""
    home, away = tmp_path / "home", tmp_path / "away"
    home.mkdir()
    first = make()
    train(first, 3)
    first[0].save(home / "run.pt")
    train(first, 2)
    shutil.copytree(home, away)
    train(first, 1)
    copied = make()
    assert copied[0].load(away / "run.pt").lost_steps == 3  # it finds the journal at home, too
    train(copied, 4)
    for one, other in ((first, copied), (copied, first)):
        merged = Accountant.merged([one[0].accountant, other[0].accountant])
        assert merged.steps == 6 + 4
    first[0].close()
    again = make()
    assert again[0].load(home / "run.pt").lost_steps == 3
    assert Accountant.merged([again[0].accountant, copied[0].accountant]).steps == 10


def test_a_lost_journal_must_be_stated_and_is_told(tmp_path):
    first = make(journal=tmp_path / "journals")
    train(first, 2)
    state = first[2].state_dict()
    first[0].close()
    shutil.rmtree(tmp_path / "journals")
    with pytest.raises(CheckpointError, match="journal_lost=True"):
        make()[2].load_state_dict(state)
    again = make(journal_lost=True)
    again[2].load_state_dict(state)
    assert not again[0].accountant.is_guarantee
    train(again, 1)
    assert "journal was lost" in again[0].statement(1e-5).caveats[0]


def test_journals_have_a_folder(tmp_path, monkeypatch):
    made = make(journal=tmp_path / "own")
    made[2].state_dict()
    assert len(list((tmp_path / "own").glob("journal-*.txt"))) == 1
    monkeypatch.delenv("LAP2_STATE")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "xdg"))
    assert default_folder() == tmp_path / "xdg" / "lap2"
    monkeypatch.delenv("XDG_STATE_HOME")
    assert default_folder().parts[-3:] == (".local", "state", "lap2")


# What is saved is refused if it cannot be


def saved_state():
    made = make()
    train(made, 3)
    state = made[2].state_dict()["lap2"]
    made[0].close()
    return state


STATE = saved_state()
EMPTY = dumps([])


def two_steps(state):
    (entry,) = RunState.of(state).entries("step")
    return dumps([replace(entry, steps=2)])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"released": -5}, "released must be a number of steps"),
        ({"released": True}, "released must be"),
        ({"released": 4}, "has 3 steps, though the run has released 4"),
        ({"released": 10**400}, "released must be"),
        ({"released": 3.0}, "released must be"),
        ({"lost": 4}, "the model has lost 4"),
        ({"ledger": EMPTY}, "has 0 steps, though the run has released 3"),
        ({"ledger": STATE["ledger"].replace('"steps": 3', '"steps": 4')}, "integrity check"),
        ({"ledger": None}, "ledger must be a text"),
        ({"step": EMPTY}, "step must be a ledger of one step"),
        ({"step": two_steps(STATE)}, "step must be a ledger of one step"),
        ({"id": "x/../../victim"}, "id must be 16 hexadecimal digits"),
        ({"id": STATE["id"] + "\n"}, "id must be 16 hexadecimal digits"),
        ({"folder": 3}, "folder must be a text"),
        ({"more": 3}, "must be made of"),
    ],
)
def test_a_state_that_no_run_can_have_is_refused(change, message):
    with pytest.raises(CheckpointError, match=message):
        RunState.of(STATE | change)
    engine, _, optimizer, _ = make()
    state = optimizer.state_dict()
    with pytest.raises(CheckpointError, match=message):
        optimizer.load_state_dict(state | {"lap2": STATE | change})
    assert engine.accountant.steps == 0


def test_what_is_missing_or_no_state_is_refused():
    for state in (None, [], {}, {name: STATE[name] for name in list(STATE)[1:]}):
        with pytest.raises(CheckpointError, match="must be made of"):
            RunState.of(state)
    assert RunState.of(STATE).released == 3


FORGERIES = {
    "no model": lambda s: s.pop("model"),
    "more": lambda s: s.update(more=1),
    "model of lists": lambda s: s.update(model=[1]),
    "another shape": lambda s: s["model"].update(weight=torch.zeros(3, 4)),
    "another type": lambda s: s["model"].update(weight=torch.zeros(2, 4, dtype=torch.float64)),
    "sparse": lambda s: s["model"].update(weight=torch.zeros(2, 4).to_sparse()),
    "no tensor": lambda s: s["model"].update(weight="heavy"),
    "no weight": lambda s: s["model"].pop("weight"),
    "more weights": lambda s: s["model"].update(other=torch.zeros(2)),
    "optimizer of nothing": lambda s: s.update(optimizer={}),
    "optimizer's groups": lambda s: s["optimizer"].update(param_groups=[]),
    "position": lambda s: s["loader"].update(position=10**6),
    "passes": lambda s: s["loader"].update(passes=-1),
    "loader": lambda s: s.update(loader=None),
    "no fingerprint": lambda s: s.update(fingerprint={}),
    "empty ledger": lambda s: s["lap2"].update(ledger=EMPTY),
    "path": lambda s: s["lap2"].update(id="x/../../victim"),
}


@pytest.mark.parametrize("name", FORGERIES)
def test_a_forged_checkpoint_is_refused_and_changes_nothing(tmp_path, name):
    made = make()
    train(made, 2)
    made[0].save(tmp_path / "run.pt")
    made[0].close()
    state = read(tmp_path / "run.pt")
    FORGERIES[name](state)
    write(tmp_path / "run.pt", state)
    files = {path: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()}
    engine, model, optimizer, loader = make()
    before = copy.deepcopy((model.state_dict(), loader.state_dict(), optimizer.param_groups))
    with pytest.raises(CheckpointError, match=r"run\.pt"):
        engine.load(tmp_path / "run.pt")
    assert engine.accountant.steps == 0
    after = (model.state_dict(), loader.state_dict(), optimizer.param_groups)
    for one, other in zip(before, after, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)
    assert not optimizer.state
    for path, content in files.items():
        if not path.name.endswith(".holder"):
            assert path.read_bytes() == content
    train((engine, model, optimizer, loader), 1)  # the engine is as good as new


@pytest.mark.parametrize(
    "change",
    [
        {"more": 1, "denoiser": {}},
        {"last_epoch": 7, "denoiser": {}},
        {"step": 1},
        {"optimizer": "none"},
        {3: 1},
    ],
)
def test_a_forged_scheduler_is_refused_and_changes_nothing(tmp_path, change):
    def scheduled():
        made = make()
        return made, torch.optim.lr_scheduler.StepLR(made[2], 3)

    made, scheduler = scheduled()
    made[0].save(tmp_path / "run.pt", scheduler=scheduler)
    made[0].close()
    state, change = read(tmp_path / "run.pt"), dict(change)
    if "denoiser" in change:  # which is loaded after the scheduler
        state["denoiser"] = change.pop("denoiser")
    state["scheduler"].update(change)
    write(tmp_path / "run.pt", state)
    (engine, *_), scheduler = scheduled()
    before = {**vars(scheduler)}
    with pytest.raises(CheckpointError, match=r"run\.pt"):
        engine.load(tmp_path / "run.pt", scheduler=scheduler)
    assert vars(scheduler) == before
    assert callable(scheduler.step)


# Answers say no more than their entries


def test_a_seeded_run_says_so_wherever_its_ledger_goes(tmp_path):
    made = make(sampler=ReproducibleSigns(3))
    train(made, 1)
    made[0].save(tmp_path / "run.pt")
    made[0].close()
    with pytest.raises(CheckpointError, match="its noise is ordinary, not secure"):
        make()[0].load(tmp_path / "run.pt")
    made[0].accountant.save(tmp_path / "ledger.json")
    answer = Accountant.load(tmp_path / "ledger.json").answer(delta=1e-5)
    assert not answer.is_guarantee
    assert "ordinary generator" in answer.caveats[0]


def test_a_run_without_poisson_sampling_says_so_and_does_not_fit_another(tmp_path):
    model = nn.Linear(4, 2)
    engine = PrivacyEngine()
    data = TensorDataset(torch.randn(40, 4), torch.randint(0, 2, (40,)))
    made = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        data_loader=DataLoader(data, batch_size=8),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        poisson_sampling=False,
    )
    for x, y in made[2]:
        engine.backward(nn.functional.cross_entropy(model(x), y, reduction="none"))
        made[1].step()
    answer = engine.accountant.answer(delta=1e-5)
    assert not answer.is_guarantee
    assert answer.sampling == "unknown"
    assert any("not Poisson" in caveat for caveat in answer.caveats)
    engine.save(tmp_path / "run.pt")
    engine.close()
    again = make()
    with pytest.raises(CheckpointError, match="its sampling is unknown, not Poisson"):
        again[0].load(tmp_path / "run.pt")


def test_what_the_user_states_is_in_the_ledger():
    made = make(caveats=["somebody looked at the data"])
    assert made[0].statement(1e-5).caveats == ("somebody looked at the data",)
    train(made, 1)
    assert made[0].accountant.answer(delta=1e-5).caveats == ("somebody looked at the data",)


def test_rehearsals_that_check_what_was_unchecked_lift_the_caveat():
    accountant = Accountant()
    origin = "0" * 16
    step = Entry(Laplace(1.0, 3), 0.5, 1, origin=origin, caveats=("unchecked",))
    accountant.enter(step)
    accountant.restate(origin, ())
    accountant.enter(replace(step, caveats=()))
    assert (accountant.steps, len(accountant.ledger)) == (2, 1)


def test_numbers_that_promise_little_come_with_a_warning():
    made = make()
    train(made, 1)
    assert made[0].statement(1e-5).warnings == ()
    statement = made[0].statement(0.5)
    assert statement.is_guarantee
    assert any("1/40" in warning for warning in statement.warnings)


def test_a_closure_is_called_once():
    engine, model, optimizer, loader = make()
    calls = []
    for x, y in loader:

        def closure(x=x, y=y):
            calls.append(1)
            optimizer.zero_grad()
            losses = nn.functional.cross_entropy(model(x), y, reduction="none")
            engine.backward(losses)
            return losses.sum()

        before = len(calls)
        assert optimizer.step(closure).dim() == 0
        assert len(calls) == before + 1
    assert engine.accountant.steps == 5
    assert isinstance(lap2.Accountant.from_json(engine.accountant.to_json()), lap2.Accountant)
