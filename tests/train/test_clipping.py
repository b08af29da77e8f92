"""The clipped sum against per-example gradients computed one by one with torch.func."""

import copy
import math

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lap2
from lap2.train import (
    BookkeepingError,
    PrivacyEngine,
    Recorder,
    UnsupportedModuleError,
    convolution,
    gradients,
)
from lap2.train.gradients import Dense, best_formed

from ..helpers import NoNoise, clipped


def oracle(model, x, loss_of, clip):
    """Sum of clipped per-example gradients, the readable way."""
    params = {k: p.detach() for k, p in model.named_parameters() if p.requires_grad}
    rest = {k: p.detach() for k, p in model.named_parameters() if not p.requires_grad}

    def loss(params, example):
        output = torch.func.functional_call(model, {**params, **rest}, (example.unsqueeze(0),))
        return loss_of(output).sum()

    grads = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(params, x)
    norms = torch.sqrt(sum((g.flatten(1) ** 2).sum(1) for g in grads.values()))
    factors = (clip / norms).clamp(max=1.0)
    return {k: torch.einsum("b,b...->...", factors, g) for k, g in grads.items()}


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("size", [7, 2048, 2049])
@pytest.mark.parametrize("layout", ["rows", "columns", "apart"])
def test_sums_of_large_gradients_are_sums(size, layout, compiled, monkeypatch):
    """In float64, by a kernel or in pieces; and added to what is there."""
    if compiled:
        pytest.importorskip("numba")
    else:
        monkeypatch.setattr(gradients, "kernel", lambda _: None)
    values = torch.randn(size, 303).T if layout == "columns" else torch.randn(303, size)
    weights, before = torch.rand(303, dtype=torch.float64), torch.randn(size, dtype=torch.float64)
    total = torch.stack([before, before], dim=1)[:, 0] if layout == "apart" else before.clone()
    Dense(torch.empty(size), values).add_to(total, weights)
    torch.testing.assert_close(total, before + weights @ values.double(), rtol=1e-12, atol=1e-12)


def recorded(model, x, loss_of, clip, reduction="sum"):
    """The same by book-keeping."""
    recorder = Recorder(model)
    total = loss_of(model(x)).flatten(1).sum(1)
    (total.mean() if reduction == "mean" else total.sum()).backward()
    sums = clipped(recorder, clip, reduction=reduction)
    recorder.remove()
    return sums


def square(output):
    return (output**2).flatten(1)


class TwoUses(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x):
        return self.layer(torch.tanh(self.layer(x)))


class Scale(nn.Module):
    """A layer lap2 has never seen."""

    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.randn(6))

    def forward(self, x):
        return x * torch.sin(self.gain)


def image(*shape):
    return lambda: torch.randn(5, *shape)


def tokens():
    return torch.tensor([[1, 2, 2, 0], [3, 3, 3, 3], [0, 1, 2, 3], [4, 4, 0, 0], [5, 1, 5, 1]])


CASES = {
    "linear": (lambda: nn.Linear(6, 3), image(6)),
    "linear without bias": (lambda: nn.Linear(6, 3, bias=False), image(6)),
    "linear on few positions": (lambda: nn.Linear(40, 30), image(3, 40)),
    "linear on many positions": (lambda: nn.Linear(4, 3), image(50, 4)),
    "linear on a grid": (lambda: nn.Linear(4, 3), image(3, 2, 4)),
    "conv2d": (lambda: nn.Conv2d(3, 4, 3), image(3, 8, 8)),
    "conv2d with outputs for the kernel": (lambda: nn.Conv2d(3, 8, 3), image(3, 8, 8)),
    "conv2d with all options": (
        lambda: nn.Conv2d(4, 6, (3, 2), stride=(2, 1), padding=(1, 2), dilation=(1, 2), groups=2),
        image(4, 9, 9),
    ),
    "conv2d same padding": (lambda: nn.Conv2d(2, 3, 3, padding="same"), image(2, 6, 6)),
    "conv2d reflected": (
        lambda: nn.Conv2d(2, 3, 3, padding=1, padding_mode="reflect"),
        image(2, 6, 6),
    ),
    "conv2d depthwise": (lambda: nn.Conv2d(4, 4, 3, groups=4, bias=False), image(4, 7, 7)),
    "conv1d": (lambda: nn.Conv1d(3, 4, 3, stride=2, padding=1, dilation=2), image(3, 12)),
    "embedding": (lambda: nn.Embedding(6, 4, padding_idx=0), tokens),
    "layer norm": (lambda: nn.LayerNorm(6), image(4, 6)),
    "layer norm on two": (lambda: nn.LayerNorm((4, 6)), image(4, 6)),
    "group norm": (lambda: nn.GroupNorm(2, 6), image(6, 4, 4)),
    "rms norm": (lambda: nn.RMSNorm(6), image(4, 6)),
    "used twice": (TwoUses, image(6)),
    "by vmap": (Scale, image(4, 6)),
    "deep": (
        lambda: nn.Sequential(
            nn.Conv2d(1, 4, 3),
            nn.ReLU(inplace=True),
            nn.GroupNorm(2, 4),
            nn.Flatten(),
            nn.Linear(36, 5),
        ),
        image(1, 5, 5),
    ),
}  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", CASES)
def test_clipped_sum_equals_the_oracle(name, dtype):
    torch.manual_seed(1)
    make, data = CASES[name]
    model, x = make().to(dtype), data()
    x = x.to(dtype) if x.is_floating_point() else x
    reference = copy.deepcopy(model)
    expected = oracle(reference, x, square, clip=0.7)
    found = recorded(model, x, square, clip=0.7)
    tolerance = 1e-10 if dtype == torch.float64 else 1e-5
    if name == "linear on few positions" and dtype == torch.float32:
        tolerance = 3e-5  # norms from inner products in float32 are rounded up
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert (found[key] - value).norm() <= tolerance * value.norm() + 1e-12


def test_mean_and_sum_reduction_are_the_same():
    torch.manual_seed(2)
    model, x = nn.Linear(6, 3).double(), torch.randn(5, 6).double()
    one = recorded(copy.deepcopy(model), x, square, 0.7, "sum")
    two = recorded(copy.deepcopy(model), x, square, 0.7, "mean")
    for key in one:
        torch.testing.assert_close(one[key], two[key])


@pytest.mark.parametrize("rehearses", [True, False])
def test_a_hidden_use_is_found(rehearses):
    """In a rehearsal autograd has all gradients; in a step it should have none."""

    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(6, 6)

        def forward(self, x):
            return nn.functional.linear(self.inner(x), self.inner.weight)

    tied = Tied()
    recorder = Recorder(tied, rehearses=lambda: rehearses)
    tied(torch.randn(5, 6)).pow(2).sum().backward()
    message = "differs from autograd's" if rehearses else "outside a module's forward"
    with pytest.raises(BookkeepingError, match=message):
        recorder.collect(loss_reduction="sum")
    assert tied.inner.weight.grad is None


def test_changed_activations_are_found():
    class Spoils(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(6, 6, bias=False)

        def forward(self, x):
            x = x * 1.0
            y = self.layer(x)
            x.detach().mul_(2.0)
            return y

    model = Spoils()
    recorder = Recorder(model)
    with torch.autograd.graph.allow_mutation_on_saved_tensors():
        model(torch.randn(5, 6)).pow(2).sum().backward()
        with pytest.raises(BookkeepingError, match="changed in place"):
            recorder.collect(loss_reduction="sum")


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (nn.BatchNorm1d(6), "Use nn.GroupNorm"),
        (nn.InstanceNorm1d(6, track_running_stats=True, affine=True), "running statistics"),
        (nn.LSTM(6, 6), "nn.Linear"),
        (nn.Linear(6, 6).requires_grad_(False), "requires_grad=True"),
    ],
)
def test_what_cannot_be_private_is_refused(module, message):
    with pytest.raises(UnsupportedModuleError, match=message):
        Recorder(nn.Sequential(nn.Identity(), module))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # within torch.compile
def test_compiled_models_are_refused():
    with pytest.raises(UnsupportedModuleError, match=r"before torch\.compile"):
        Recorder(torch.compile(nn.Linear(6, 6)))
    model = nn.Sequential(nn.Linear(6, 6))
    model[0].compile()
    with pytest.raises(UnsupportedModuleError, match=r"before torch\.compile"):
        Recorder(model)


def test_frozen_parameters_and_eval_mode_record_nothing():
    model = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 2))
    model[0].requires_grad_(False)
    recorder = Recorder(model)
    with torch.no_grad():
        model(torch.randn(3, 6))
    model.eval()(torch.randn(3, 6)).sum().backward()
    assert not recorder._records
    model.zero_grad()
    model.train()
    model(torch.randn(3, 6)).sum().backward()
    found = recorder.collect(loss_reduction="sum")
    assert found.batch == 3
    assert {g.param for g in found.gradients} == set(model[1].parameters())
    assert list(model.state_dict()) == ["0.weight", "0.bias", "1.weight", "1.bias"]


def private(model, x, y, *, batch_size, **kwargs):
    engine = PrivacyEngine(sampler=NoNoise())
    settings = {"noise_multiplier": 1.0, "max_grad_norm": 0.5, "release": "values", **kwargs}
    loader = DataLoader(TensorDataset(x, y), batch_size=batch_size)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    return engine, *engine.make_private(
        module=model, optimizer=optimizer, data_loader=loader, **settings
    )


def test_pieces_of_a_batch_give_the_same_step_as_the_whole():
    torch.manual_seed(3)
    x, y = torch.randn(40, 6).double(), torch.randint(0, 3, (40,))
    whole, pieces = nn.Linear(6, 3).double(), nn.Linear(6, 3).double()
    pieces.load_state_dict(whole.state_dict())
    for model, size in ((whole, None), (pieces, 7)):
        engine, model, optimizer, loader = private(  # noqa: PLW2901 - the same object
            model, x, y, batch_size=40, max_physical_batch_size=size
        )
        for a, b in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(a), b).backward()
            optimizer.step()
        assert engine.accountant.steps == 1
    torch.testing.assert_close(whole.weight, pieces.weight)


def test_neighbours_differ_by_at_most_the_clip_whatever_the_record():
    torch.manual_seed(4)
    x, y = torch.randn(8, 6), torch.randint(0, 3, (8,))
    released = []
    for value in (0.0, 1e6, math.nan, math.inf, 1e30):
        data = x.clone()
        data[0] = value
        for drop in (0, 1):
            torch.manual_seed(5)
            model = nn.Linear(6, 3)
            start = {k: v.clone() for k, v in model.state_dict().items()}
            engine, model, optimizer, loader = private(
                model, data[drop:], y[drop:], batch_size=8 - drop
            )
            for a, b in loader:
                nn.functional.cross_entropy(model(a), b).backward()
                optimizer.step()
            moved = [(start[k] - v) * (8 - drop) for k, v in model.state_dict().items()]
            released.append(torch.cat([m.flatten() for m in moved]))
            assert torch.isfinite(released[-1]).all()
        assert (released[-1] - released[-2]).norm() <= 0.5
        assert engine.skipped_examples == 0
    assert (released[2] - released[3]).norm() > 0.4  # a huge gradient does reach the clip


def test_empty_batches_release_noise_and_count():
    model = nn.Linear(4, 2)
    engine = PrivacyEngine()
    loader = DataLoader(TensorDataset(torch.randn(50, 4), torch.randn(50, 2)), batch_size=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = engine.make_private(
        module=model,
        optimizer=optimizer,
        data_loader=loader,
        noise_multiplier=1.0,
        max_grad_norm=1.0,
    )
    empty = 0
    for x, y in loader:
        before = model.weight.detach().clone()
        optimizer.zero_grad()
        (model(x) - y).pow(2).flatten(1).sum(1).mean().backward()
        optimizer.step()
        empty += loader.piece.size == 0
        assert torch.equal(before, model.weight) != loader.ends_batch
    assert empty > 3
    assert engine.accountant.steps == 50


def test_accounting_is_for_what_was_done():
    model = nn.Linear(4, 2)
    engine = PrivacyEngine()
    loader = DataLoader(TensorDataset(torch.randn(64, 4), torch.randn(64, 2)), batch_size=16)
    optimizer = torch.optim.Adam(model.parameters())
    model, optimizer, private_loader = engine.make_private_with_epsilon(
        module=model,
        optimizer=optimizer,
        data_loader=loader,
        target_epsilon=2.0,
        target_delta=1e-5,
        epochs=5,
        max_grad_norm=0.3,
    )
    for _ in range(5):
        for x, y in private_loader:
            optimizer.zero_grad()
            (model(x) - y).pow(2).mean(dim=1).mean().backward()
            optimizer.step()
    (entry,) = engine.accountant.ledger
    assert (entry.sampling_prob, entry.steps) == (0.25, 20)
    assert entry.mechanism.dimension == 640  # 64 copies of each
    scale = engine._step.scale
    statement = engine.statement(1e-5)
    assert statement.is_guarantee
    assert 0 < statement.rounding <= 1e-3
    sensitivity = 0.3 * (1 + statement.rounding)
    assert entry.mechanism.noise_multiplier < scale / sensitivity
    assert entry.mechanism.noise_multiplier == pytest.approx(scale / sensitivity, rel=1e-6)
    assert 1.9998 <= engine.get_epsilon(1e-5) <= 2
    assert isinstance(optimizer, torch.optim.Adam)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)


@pytest.mark.parametrize("by", ["group", "layer"])
def test_several_clips_are_a_joint_release(by):
    torch.manual_seed(6)
    model = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 3))
    engine = PrivacyEngine(sampler=NoNoise())
    groups = [{"params": model[0].parameters()}, {"params": model[1].parameters()}]
    optimizer = torch.optim.SGD(groups if by == "group" else model.parameters(), lr=1.0)
    loader = DataLoader(TensorDataset(torch.randn(1, 6), torch.tensor([1])), batch_size=1)
    model, optimizer, loader = engine.make_private(
        module=model, optimizer=optimizer, data_loader=loader, noise_multiplier=1.0,
        max_grad_norm=[0.3, 0.4], release="values",
    )  # fmt: skip
    for x, y in loader:
        nn.functional.cross_entropy(model(x), y).mul(1e6).backward()
        optimizer.step()
    for clip, layer in ((0.3, model[0]), (0.4, model[1])):
        moved = torch.cat([p.grad.flatten() for p in layer.parameters()])
        assert 0.999 * clip < moved.norm() <= clip
    mechanism = engine.accountant.ledger[0].mechanism
    assert isinstance(mechanism, lap2.Joint)
    assert [g.dimension for g in mechanism.groups] == [28, 15]
    # With the accounted sensitivity, each clip is larger by what rounding may add.
    more = 1 + engine.statement(1e-5).rounding
    expected = [0.5 / 0.3 / more, 0.5 / 0.4 / more]
    assert [g.noise_multiplier for g in mechanism.groups] == pytest.approx(expected)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"noise_multiplier": math.nan}, "noise_multiplier must be"),
        ({"max_grad_norm": 0.0}, "max_grad_norm must be"),
        ({"max_grad_norm": [1.0, 2.0]}, "1 layers with trainable parameters, got 2"),
        ({"mechanism": "cauchy"}, "mechanism must be one of"),
        ({"release": "magic"}, "release must be one of"),
        ({"loss_reduction": "max"}, "loss_reduction must be one of"),
    ],
)
def test_bad_settings_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        private(nn.Linear(2, 1), torch.randn(4, 2), torch.randn(4), batch_size=2, **change)


def test_wrong_loaders_and_optimizers_are_refused():
    model = nn.Linear(2, 1)
    x, y = torch.randn(4, 2), torch.randn(4)
    good = {"module": model, "noise_multiplier": 1.0, "max_grad_norm": 1.0}
    loader = DataLoader(TensorDataset(x, y), batch_size=2)
    partial = torch.optim.SGD([model.weight], lr=1.0)
    with pytest.raises(ValueError, match=r"lacks \['bias'\]"):
        PrivacyEngine().make_private(**good, optimizer=partial, data_loader=loader)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with pytest.raises(TypeError, match="data_loader must be a torch DataLoader"):
        PrivacyEngine().make_private(**good, optimizer=optimizer, data_loader=[(x, y)])
    with pytest.raises(ValueError, match="batch_size, got None"):
        PrivacyEngine().make_private(
            **good,
            optimizer=optimizer,
            data_loader=DataLoader(TensorDataset(x, y), batch_size=None),
        )
    engine = PrivacyEngine()
    _, optimizer, kept = engine.make_private(
        **good, optimizer=optimizer, data_loader=loader, poisson_sampling=False
    )
    assert kept is loader
    with pytest.raises(RuntimeError, match="no epsilon can be claimed"):
        engine.get_epsilon(1e-5)


@pytest.mark.parametrize("mechanism", ["laplace", "gaussian", "laplace-l1"])
def test_every_mechanism_takes_the_same_path(mechanism):
    model = nn.Linear(4, 2)
    engine = PrivacyEngine()
    loader = DataLoader(TensorDataset(torch.randn(64, 4), torch.randn(64, 2)), batch_size=16)
    model, optimizer, loader = engine.make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), data_loader=loader,
        noise_multiplier=1.5, max_grad_norm=1.0, mechanism=mechanism,
    )  # fmt: skip
    for x, y in loader:
        (model(x) - y).pow(2).mean(dim=1).mean().backward()
        optimizer.step()
    assert engine.accountant.steps == 4
    assert engine.statement(1e-5).is_guarantee


def one_pass(model, optimizer, loader, *, factor=1.0):
    for a, b in loader:
        (factor * (model(a) - b)).pow(2).mean().backward()
        optimizer.step()


def released(engine):
    """The sum that was released last."""
    return torch.cat([part.flatten() for part in engine._step._plan.readout.noise.added[-1]])


@pytest.mark.parametrize("pieces", [None, 4])
@pytest.mark.parametrize("steps", ["none", "of the first piece", "one too many"])
def test_what_was_given_up_does_not_leak_into_the_next_batch(steps, pieces):
    """Backward without a step, a piece without its end, and a step that was refused."""
    torch.manual_seed(7)
    x, y = torch.randn(10, 3), torch.randn(10, 1)
    model = nn.Linear(3, 1)
    settings = {"batch_size": 10, "max_physical_batch_size": pieces, "rehearse": False}
    engine, *made = private(copy.deepcopy(model), x, y, **settings)
    one_pass(*made)
    expected = released(engine)
    engine, model, optimizer, loader = private(model, x, y, **settings)
    optimizer.param_groups[0]["lr"] = 0.0
    for _ in range(3):
        a, b = next(iter(loader))
        (1e6 * (model(a) - b)).pow(2).mean().backward()
        if steps != "none":
            optimizer.step()
        if steps == "one too many":
            (model(a) - b).pow(2).mean().backward()
            with pytest.raises(BookkeepingError, match="one step"):
                optimizer.step()
    before = engine.accountant.steps
    assert before == (0 if pieces or steps == "none" else 3)
    one_pass(model, optimizer, loader)
    assert engine.accountant.steps == before + 1
    torch.testing.assert_close(released(engine), expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize("pieces", [None, 5])
def test_a_batch_allows_one_step_and_the_refused_one_changes_nothing(pieces):
    """Two releases of one sample would cost more than the two independent ones in the ledger."""
    x, y = torch.randn(12, 3), torch.randn(12, 1)
    engine, model, optimizer, loader = private(
        nn.Linear(3, 1), x, y, batch_size=12, max_physical_batch_size=pieces, rehearse=False
    )
    with pytest.raises(BookkeepingError, match="one step"):
        optimizer.step()  # before any batch
    a, b = next(iter(loader))
    (model(a) - b).pow(2).mean().backward()
    optimizer.step()
    assert engine.accountant.steps == int(pieces is None)
    before, weights = engine.accountant.to_json(), model.weight.detach().clone()
    (model(a) - b).pow(2).mean().backward()
    with pytest.raises(BookkeepingError, match="one step"):
        optimizer.step()
    assert engine.accountant.to_json() == before
    assert torch.equal(weights, model.weight)


@pytest.mark.parametrize("cached", [1, 3 * 36 * 18])
def test_convolutions_formed_a_few_examples_at_a_time_are_the_same(cached, monkeypatch):
    """One by one, and three by three with one left over."""
    monkeypatch.setattr(convolution, "_CACHED", cached)
    torch.manual_seed(0)
    model = nn.Conv2d(2, 3, 3).double()
    x = torch.randn(7, 2, 8, 8, dtype=torch.float64)
    assert best_formed(36, 18, 3)
    found, expected = (way(model, x, square, 0.5) for way in (recorded, oracle))
    for name, total in expected.items():
        torch.testing.assert_close(found[name], total, rtol=1e-10, atol=1e-12)
