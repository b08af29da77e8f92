"""Data leaves a step through the release alone, and the step is the one that was planned."""

import copy
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 - torch's own custom
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from lap2.interop.opacus import PrivacyEngine as OpacusEngine
from lap2.train import PrivacyEngine, UnsupportedModuleError, coverage

from .helpers import assert_refused, private, refusal, rows

WIDTH, RECORDS, WORDS = 5, 12, 9


def records():
    maker = torch.Generator().manual_seed(0)
    x = torch.randn(RECORDS, WIDTH, generator=maker)
    return rows(x, torch.randint(WORDS, (RECORDS, 3), generator=maker))


def of_squares(model, batch):
    return 10 * model(batch[0]).square().sum(1)


def of_words(model, batch):
    return 10 * model(batch[1]).square().flatten(1).sum(1)


# What is written into the model


class Writes(nn.Module):
    """A trained layer, and something that is written to in each forward."""

    def __init__(self, write):
        super().__init__()
        self.layer, self.write = nn.Linear(WIDTH, 2), write
        self.frozen = nn.Parameter(torch.zeros(WIDTH), requires_grad=False)
        self.register_buffer("kept", torch.zeros(WIDTH))
        self.register_buffer("passing", torch.zeros(WIDTH), persistent=False)

    def forward(self, x):
        output = self.layer(x - 0 * (self.frozen + self.kept + self.passing))
        with torch.no_grad():
            self.write(self, x)
        return output


def nothing(_model, _x):
    pass


def replace_buffer(model, x):
    model.kept = x.mean(0)


def replace_parameter(model, x):
    model.frozen = nn.Parameter(x.mean(0), requires_grad=False)


def new_buffer(model, x):
    model.register_buffer("fresh", x.mean(0))


WRITES = {
    "a buffer": ("kept", lambda model, x: model.kept.lerp_(x.mean(0), 0.1)),
    "a buffer's data": ("kept", lambda model, x: model.kept.data.lerp_(x.mean(0), 0.1)),
    "a part of a buffer": ("kept", lambda model, x: model.kept[:1].copy_(x[0, :1])),
    "a buffer that is not saved": ("passing", lambda model, x: model.passing.copy_(x.mean(0))),
    "another tensor as buffer": ("kept", replace_buffer),
    "a buffer's storage": ("kept", lambda model, x: setattr(model.kept, "data", x[0])),
    "a new buffer": ("fresh", new_buffer),
    "a frozen parameter": ("frozen", lambda model, x: model.frozen.lerp_(x.mean(0), 0.1)),
    "a frozen parameter's data": ("frozen", lambda model, x: model.frozen.data.copy_(x[0])),
    "another frozen parameter": ("frozen", replace_parameter),
    "a trained parameter": ("layer.weight", lambda model, x: model.layer.weight.add_(x[:2])),
    "a trained parameter's data": (
        "layer.weight",
        lambda model, x: model.layer.weight.data.add_(x[:2]),
    ),
    "a trained parameter, by numpy": (
        "layer.bias",
        lambda model, x: model.layer.bias.data.numpy().__setitem__(0, float(x[0, 0])),
    ),
    "the largest that were seen": (
        "kept",
        lambda model, x: torch.maximum(model.kept, x.abs().amax(0), out=model.kept),
    ),
}


UNCOUNTED = ("data", "numpy", "storage")
"""Ways that torch does not count as writing: rehearsals compare what is stored."""

WATCHED = [(name, True) for name in WRITES]
WATCHED += [(name, False) for name in WRITES if not name.endswith(UNCOUNTED)]


@pytest.mark.parametrize(("name", "rehearse"), WATCHED)
def test_what_a_forward_writes_into_the_model_is_refused(name, rehearse):
    written, write = WRITES[name]
    torch.manual_seed(0)
    run = private(Writes(write), records(), rehearse=rehearse)
    assert_refused(run, of_squares, rf"\b{written}\b")


@pytest.mark.parametrize("later", [1, 3, 6])
def test_so_it_is_where_it_begins_later(later):
    def write(model, x):
        if run.steps >= later:
            model.kept.copy_(x[0])

    torch.manual_seed(0)
    run = private(Writes(write), records())
    assert_refused(run, of_squares, r"\bkept\b", steps=later, passes=10)


@pytest.mark.parametrize(("later", "found"), [(1, 1), (3, 4), (6, 8)])
def test_what_torch_does_not_count_is_found_by_the_next_rehearsal(later, found):
    def write(model, x):
        if run.steps >= later:
            model.kept.data.add_(x[0])

    torch.manual_seed(0)
    run = private(Writes(write), records())
    assert_refused(run, of_squares, r"\bkept\b", steps=found, passes=10)


@pytest.mark.parametrize("name", ["a buffer", "a frozen parameter", "a trained parameter"])
def test_what_a_loop_writes_before_the_step_is_refused(name):
    written, write = WRITES[name]
    torch.manual_seed(0)
    run = private(Writes(nothing), records())

    def loss(model, batch):
        losses = of_squares(model, batch)
        with torch.no_grad():
            write(model, batch[0])
        return losses

    assert_refused(run, loss, rf"\b{written}\b")


def test_what_a_loop_writes_after_the_step_is_what_was_released():
    """Averages of weights, and weights that are kept in bounds, are made of released values."""
    torch.manual_seed(0)
    run = private(Writes(nothing), records(), lr=0.1)
    for _ in range(4):
        for batch in run.loader:
            run.optimizer.zero_grad()
            run.engine.backward(of_squares(run.model, batch))
            run.optimizer.step()
            with torch.no_grad():
                run.model.layer.weight.clamp_(-0.3, 0.3)
                run.model.kept.lerp_(run.model.layer.weight[0], 0.1)
                run.model.frozen.copy_(run.model.layer.weight[1])
    assert run.steps == len(run.sums) == 4
    assert run.model.kept.any()


class Counts(nn.Module):
    """Knows how often it was called."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(WIDTH, 2)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x):
        self.calls += 1
        return self.layer(x)


def test_what_is_named_as_public_may_be_written():
    run = private(Counts(), records(), public_state=("calls",)).train(of_squares, passes=3)
    assert run.steps == 3
    assert int(run.model.calls) >= 3
    assert_refused(private(Counts(), records()), of_squares, r"\bcalls\b.*public_state")


def test_public_state_must_be_there_and_not_trained():
    for name in ("nothing", "layer.weight"):
        with pytest.raises(ValueError, match="public_state"):
            private(Counts(), records(), public_state=(name,))


class Renormalises(nn.Module):
    """A frozen table whose rows are shortened where they are used."""

    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(3 * torch.randn(WORDS, WIDTH), requires_grad=False)
        self.layer = nn.Linear(WIDTH, 2)

    def forward(self, index):
        return self.layer(F.embedding(index, self.table, max_norm=1.0))


def test_rows_that_are_shortened_where_they_are_used_are_refused():
    torch.manual_seed(0)
    assert_refused(private(Renormalises(), records()), of_words, r"\btable\b")


@pytest.mark.filterwarnings("ignore:Full backward hook is firing:UserWarning")
@pytest.mark.parametrize("kind", ["buffer", "table"])
def test_so_they_are_on_opacus(kind):
    torch.manual_seed(0)
    model = Renormalises() if kind == "table" else Writes(WRITES["a buffer"][1])
    loader = torch.utils.data.DataLoader(records(), RECORDS)
    trained = [p for p in model.parameters() if p.requires_grad]
    engine = OpacusEngine()
    model, optimizer, loader = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(trained, lr=0.0),
        data_loader=loader,
        noise_multiplier=1.0,
        max_grad_norm=1.0,
    )

    def one_pass():
        for x, index in loader:
            model(index if kind == "table" else x).square().flatten(1).sum(1).mean().backward()
            optimizer.step()

    with pytest.raises((RuntimeError, ValueError), match="table" if kind == "table" else "kept"):
        one_pass()
    assert len(engine.accountant) == 0


class Gain(nn.Module):
    """Has a parameter of its own, and another module inside."""

    def __init__(self, inner):
        super().__init__()
        self.gain, self.inner = nn.Parameter(torch.ones(WIDTH)), inner

    def forward(self, x):
        return self.inner(x) * self.gain


def batch_norm(**options):
    return nn.BatchNorm1d(WIDTH, **options)


STATISTICS = {
    "a batch norm": batch_norm,
    "one without parameters": lambda: batch_norm(affine=False),
    "a frozen one": lambda: batch_norm().requires_grad_(False),
    "one that keeps nothing": lambda: batch_norm(affine=False, track_running_stats=False),
    "a table of bounded rows": lambda: nn.Embedding(WORDS, WIDTH, max_norm=1.0),
    "a frozen one of those": lambda: nn.Embedding(WORDS, WIDTH, max_norm=1.0).requires_grad_(False),
}


@pytest.mark.parametrize("frozen", [True, False])
@pytest.mark.parametrize("deep", [True, False])
@pytest.mark.parametrize("name", STATISTICS)
def test_what_is_no_records_own_is_refused_wherever_it_is(name, deep, frozen):
    """Inside a unit that is run again for each record, too."""
    inner = STATISTICS[name]()
    inner = nn.Sequential(nn.Identity(), inner) if deep else inner
    model = nn.Sequential(Gain(inner), nn.Linear(WIDTH, 2))
    model[0].gain.requires_grad_(not frozen)
    assert coverage(model).refused
    with pytest.raises(UnsupportedModuleError):
        private(model, records())
    assert not any(module._forward_hooks for module in model.modules())


# What was planned


@pytest.fixture
def processes():
    """Lets the process believe that it is one of some."""

    def begin(size):
        kind, store = ("fake", FakeStore()) if size > 1 else ("gloo", dist.HashStore())
        dist.init_process_group(kind, store=store, rank=0, world_size=size)

    yield begin
    if dist.is_initialized():
        dist.destroy_process_group()


def linear(**options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, 4), nn.Tanh(), nn.Linear(4, 2))
    return private(model, records(), lr=0.1, **options)


@pytest.mark.parametrize("steps", [0, 2])
def test_processes_that_appear_later_are_refused(processes, steps):
    run = linear().train(of_squares, passes=steps)
    processes(2)
    assert_refused(run, of_squares, r"process", steps=steps)


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module:UserWarning")
@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("wrap", [fully_shard, nn.parallel.DistributedDataParallel])
def test_wrappers_that_are_put_on_later_are_refused(processes, wrap, steps):
    processes(1)
    run = linear().train(of_squares, passes=steps)
    before = [p.detach().clone() for p in run.model.parameters()]
    if wrap is fully_shard:
        wrapped = fully_shard(run.model, mesh=init_device_mesh("cpu", (1,)))
    else:
        wrapped = wrap(run.model)
    with refusal(run, "shard|wrap|Distributed|replaced|parameter", steps=steps):
        for batch in run.loader:
            run.engine.backward(of_squares(wrapped, batch))
            run.optimizer.step()
    after = [getattr(p, "full_tensor", lambda p=p: p)() for p in wrapped.parameters()]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def freeze(model):
    model[0].weight.requires_grad_(False)


def freeze_all(model):
    model.requires_grad_(False)


def swap(model):
    model[0].weight = nn.Parameter(model[0].weight.detach().clone())


def swap_layer(model):
    model[2] = nn.Linear(4, 2)


def add(model):
    model.append(nn.Linear(2, 2))


def resize(model):
    model[2].weight.data = torch.randn(3, 4)
    model[2].bias.data = torch.randn(3)


def tie(model):
    model.append(nn.Linear(2, 4))
    model[3].weight = nn.Parameter(model[2].weight.T)


def remove(model):
    del model[2]


@pytest.mark.parametrize("steps", [0, 1, 3])
@pytest.mark.parametrize("change", [freeze, freeze_all, swap, swap_layer, add, resize, tie, remove])
def test_parameters_that_change_later_are_refused(change, steps):
    run = linear().train(of_squares, passes=steps)
    change(run.model)
    frozen = [name for name, p in run.model.named_parameters() if not p.requires_grad]
    assert_refused(run, of_squares, r"parameter|\b[02]\.weight\b|make_private", steps=steps)
    assert frozen == [name for name, p in run.model.named_parameters() if not p.requires_grad]


def test_what_froze_for_a_while_may_be_trained_again():
    run = linear().train(of_squares)
    freeze(run.model)
    assert_refused(run, of_squares, "0.weight", steps=1)
    run.model[0].weight.requires_grad_(True)
    run.train(of_squares)
    assert run.steps == len(run.sums) == 2


def test_two_processes_must_have_the_same_kind_of_noise_and_know_each_other(tmp_path):
    script = Path(__file__).with_name("two_ranks.py")
    done = subprocess.run(
        [sys.executable, script, tmp_path], check=False, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr[-2000:]
    for rank in (0, 1):
        found = json.loads((tmp_path / f"found-{rank}.json").read_text())
        assert found["afterwards"].startswith("BookkeepingError")
        assert "process" in found["afterwards"]
        assert found["steps afterwards"] == 0
        assert found["one of them secure"].startswith(
            "ValueError: all processes must have the same"
        )
        assert found["alike"] is None


# What was silent


def test_a_model_in_evaluation_mode_is_refused():
    run = linear()
    run.model.eval()
    assert_refused(run, of_squares, r"model\.train\(\)")


@pytest.mark.parametrize("rehearse", [True, False])
def test_so_it_is_after_an_evaluation_that_forgot_to_end(rehearse):
    run = linear(rehearse=rehearse).train(of_squares)
    run.model.eval()
    assert_refused(run, of_squares, r"model\.train\(\)", steps=1)
    run.model.train()
    run.train(of_squares)
    assert run.steps == len(run.sums) == 2


def without_graph(model, batch):
    with torch.no_grad():
        model(batch[0])
    return torch.zeros(len(batch[0]), requires_grad=True) * 1


def past_the_hooks(model, batch):
    return 10 * model.forward(batch[0]).square().sum(1)


def another_model(model, batch):
    other = nn.Linear(WIDTH, 2)
    return 10 * other(batch[0]).square().sum(1)


@pytest.mark.parametrize("rehearse", [True, False])
@pytest.mark.parametrize("loss", [without_graph, past_the_hooks, another_model])
def test_a_step_without_anything_recorded_is_refused(loss, rehearse):
    assert_refused(linear(rehearse=rehearse), loss, r"model\.train\(\)|recorded")


def test_a_copy_of_the_model_does_not_train_it():
    run = linear()
    other = copy.deepcopy(run.model)
    with refusal(run, "."):
        run.train(lambda _, batch: of_squares(other, batch))


def test_a_part_in_evaluation_mode_is_the_users_affair():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, 4), nn.Dropout(0.5), nn.Linear(4, 2))
    run = private(model, records())
    model[1].eval()
    assert run.train(of_squares, passes=2).steps == 2


class Penalised(nn.Module):
    """Its parameters are also used where no layer sees them."""

    def __init__(self, use):
        super().__init__()
        self.first, self.second, self.use = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2), use

    def forward(self, x):
        h = self.first(x)
        return self.second(self.use(self, h))


def functional(model, h):
    return F.linear(h, model.first.weight)


def unused(_model, h):
    return h


def scaled(model, h):
    return h * model.first.bias


def of_square_weights(model, batch):
    penalty = sum(p.square().sum() for p in model.parameters())
    return of_squares(model, batch) + 0.01 * penalty


def of_square_weights_in_mean(model, batch):
    return of_squares(model, batch).mean() + 0.01 * model.second.weight.square().sum()


@pytest.mark.parametrize("rehearse", [True, False])
@pytest.mark.parametrize("later", [0, 1, 2, 3, 5])
@pytest.mark.parametrize("use", [functional, scaled])
def test_a_parameter_used_past_its_layer_is_refused_in_every_step(use, later, rehearse):
    torch.manual_seed(0)
    model = Penalised(lambda model, h: use(model, h) if run.steps >= later else h)
    run = private(model, records(), rehearse=rehearse)
    assert_refused(run, of_squares, r"\bfirst\.\w+", steps=later, passes=later + 2)


@pytest.mark.parametrize("rehearse", [True, False])
@pytest.mark.parametrize("later", [0, 1, 3])
@pytest.mark.parametrize("penalised", [of_square_weights, of_square_weights_in_mean])
def test_a_penalty_of_weights_in_the_loss_is_refused_with_the_fix(penalised, later, rehearse):
    """It is no record's, so that each record would be charged for all of it."""

    def loss(model, batch):
        return (penalised if run.steps >= later else of_squares)(model, batch)

    torch.manual_seed(0)
    run = private(Penalised(unused), records(), rehearse=rehearse)
    assert_refused(run, loss, "weight_decay", steps=later, passes=later + 2)


@pytest.mark.parametrize("rehearse", [True, False])
def test_a_run_without_rehearsals_has_no_guarantee(rehearse):
    engine, model = PrivacyEngine(), nn.Linear(WIDTH, 2)
    model, optimizer, loader = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=torch.utils.data.DataLoader(records(), 4),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        rehearse=rehearse,
    )
    for batch in loader:
        engine.backward(of_squares(model, batch))
        optimizer.step()
    found = engine.statement(1e-5)
    assert found.is_guarantee == rehearse
    assert any("rehears" in caveat for caveat in found.caveats) == (not rehearse)
