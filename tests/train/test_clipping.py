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
)
from lap2.train.gradients import Dense, best_formed


class Off:
    """Noise that is none, to look at the clipped sum."""

    is_secure = False

    def added_sensitivity(self, _scale, _size):
        return 0.0

    def add(self, _array, _scale):
        return 0.0


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


@pytest.mark.parametrize("size", [2048, 2049])
@pytest.mark.parametrize("layout", ["rows", "columns"])
def test_sums_of_large_gradients_are_sums(size, layout):
    """Large ones are added up in slices, if they can be cut."""
    values = torch.randn(size, 300).T if layout == "columns" else torch.randn(300, size)
    weights = torch.rand(300)
    found = Dense(torch.empty(size), values).weighted_sum(weights)
    expected = weights.double() @ values.double()
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-4)


def recorded(model, x, loss_of, clip, reduction="sum"):
    """The same by book-keeping, through the engine's own step."""
    recorder = Recorder(model)
    total = loss_of(model(x)).flatten(1).sum(1)
    (total.mean() if reduction == "mean" else total.sum()).backward()
    _, scale, gradients = recorder.collect(loss_reduction=reduction)
    norms = scale * torch.stack([g.square_norms() for g in gradients]).sum(0).sqrt()
    factors = (clip / norms).clamp(max=1.0) * scale
    names = {id(p): k for k, p in model.named_parameters()}
    sums = {names[id(g.param)]: g.weighted_sum(factors) for g in gradients}
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
    slack = 3e-6 if name in {"embedding", "linear on few positions"} else 0.0  # norms rounded up
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert (found[key] - value).norm() <= (tolerance + slack) * value.norm() + 1e-12


def test_mean_and_sum_reduction_are_the_same():
    torch.manual_seed(2)
    model, x = nn.Linear(6, 3).double(), torch.randn(5, 6).double()
    one = recorded(copy.deepcopy(model), x, square, 0.7, "sum")
    two = recorded(copy.deepcopy(model), x, square, 0.7, "mean")
    for key in one:
        torch.testing.assert_close(one[key], two[key])


def test_a_hidden_use_is_found_on_the_first_batch():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(6, 6)

        def forward(self, x):
            return nn.functional.linear(self.inner(x), self.inner.weight)

    tied = Tied()
    recorder = Recorder(tied)
    tied(torch.randn(5, 6)).pow(2).sum().backward()
    with pytest.raises(BookkeepingError, match="differs from autograd's"):
        recorder.collect(loss_reduction="sum")


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
    model.train()
    model(torch.randn(3, 6)).sum().backward()
    batch, _, gradients = recorder.collect(loss_reduction="sum")
    assert batch == 3
    assert {id(g.param) for g in gradients} == {id(p) for p in model[1].parameters()}
    assert list(model.state_dict()) == ["0.weight", "0.bias", "1.weight", "1.bias"]


def private(model, x, y, *, batch_size, **kwargs):
    engine = PrivacyEngine(sampler=Off())
    settings = {"noise_multiplier": 1.0, "max_grad_norm": 0.5, "denoise": "none", **kwargs}
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
        empty += len(x) == 0
        assert not torch.equal(before, model.weight)
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
    assert entry.mechanism.dimension == 10
    scale = engine._step.scale
    assert entry.mechanism.noise_multiplier < scale / 0.3
    assert entry.mechanism.noise_multiplier == pytest.approx(scale / 0.3, rel=1e-6)
    assert 1.9998 <= engine.get_epsilon(1e-5) <= 2
    statement = engine.statement(1e-5)
    assert statement.is_guarantee
    assert isinstance(optimizer, torch.optim.Adam)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)


@pytest.mark.parametrize("by", ["group", "layer"])
def test_several_clips_are_a_joint_release(by):
    torch.manual_seed(6)
    model = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 3))
    engine = PrivacyEngine(sampler=Off())
    groups = [{"params": model[0].parameters()}, {"params": model[1].parameters()}]
    optimizer = torch.optim.SGD(groups if by == "group" else model.parameters(), lr=1.0)
    loader = DataLoader(TensorDataset(torch.randn(1, 6), torch.tensor([1])), batch_size=1)
    model, optimizer, loader = engine.make_private(
        module=model, optimizer=optimizer, data_loader=loader, noise_multiplier=1.0,
        max_grad_norm=[0.3, 0.4], denoise="none",
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
    assert [g.noise_multiplier for g in mechanism.groups] == pytest.approx([0.5 / 0.3, 0.5 / 0.4])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"noise_multiplier": math.nan}, "noise_multiplier must be"),
        ({"max_grad_norm": 0.0}, "max_grad_norm must be"),
        ({"max_grad_norm": [1.0, 2.0]}, "1 layers with trainable parameters, got 2"),
        ({"mechanism": "cauchy"}, "mechanism must be one of"),
        ({"denoise": "magic"}, "denoise must be one of"),
        ({"loss_reduction": "max"}, "loss_reduction must be one of"),
    ],
)
def test_bad_settings_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        private(nn.Linear(2, 1), torch.randn(4, 2), torch.randn(4), batch_size=2, **change)


def test_wrong_loaders_optimizers_and_closures_are_refused():
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
    with pytest.raises(ValueError, match="closure must be None"):
        optimizer.step(lambda: 0)
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
    assert engine.statement(1e-5).is_guarantee == (mechanism != "gaussian")


def test_an_abandoned_batch_does_not_leak_into_the_next():
    """A piece without its end, then a new pass: the sums of the first are gone."""
    torch.manual_seed(7)
    x, y = torch.randn(10, 3), torch.randn(10, 1)
    engine, model, optimizer, loader = private(
        nn.Linear(3, 1), x, y, batch_size=10, max_physical_batch_size=4
    )
    for _ in range(2):
        for a, b in loader:
            (model(a) - b).pow(2).mean().backward()
            optimizer.step()
            break
    assert engine.accountant.steps == 0
    assert sum(float(s.abs().sum() > 0) for s in engine._step._sums.values()) == 2
    before = {k: v.clone() for k, v in engine._step._sums.items()}
    for a, b in loader:
        (model(a) - b).pow(2).mean().backward()
        optimizer.step()
        break
    for key, value in engine._step._sums.items():
        torch.testing.assert_close(value, before[key])


def test_a_batch_allows_one_step_and_the_refused_one_changes_nothing():
    """Two releases of one sample would cost more than the two independent ones in the ledger."""
    x, y = torch.randn(12, 3), torch.randn(12, 1)
    for pieces in (None, 5):
        engine, model, optimizer, loader = private(
            nn.Linear(3, 1), x, y, batch_size=12, max_physical_batch_size=pieces
        )
        with pytest.raises(BookkeepingError, match="one step"):
            optimizer.step()  # before any batch
        for a, b in loader:
            (model(a) - b).pow(2).mean().backward()
            optimizer.step()
            before = engine.accountant.to_json(), copy.deepcopy(engine._step._sums)
            weights = model.weight.detach().clone()
            (model(a) - b).pow(2).mean().backward()
            with pytest.raises(BookkeepingError, match="one step"):
                optimizer.step()
            assert engine.accountant.to_json() == before[0]
            torch.testing.assert_close(engine._step._sums, before[1])
            assert torch.equal(weights, model.weight)
        assert engine.accountant.steps == 1


def test_what_was_recorded_on_a_batch_without_a_step_is_forgotten():
    torch.manual_seed(8)
    x, y = torch.randn(12, 3), torch.randn(12, 1)
    _, model, optimizer, loader = private(nn.Linear(3, 1), x, y, batch_size=12)
    start = {k: v.clone() for k, v in model.state_dict().items()}
    for _ in range(3):  # backward, but no step
        for a, b in loader:
            (1e6 * (model(a) - b)).pow(2).mean().backward()
    for a, b in loader:
        (model(a) - b).pow(2).mean().backward()
        optimizer.step()
    moved = {k: v - start[k] for k, v in model.state_dict().items()}
    model.load_state_dict(start)
    for a, b in loader:
        (model(a) - b).pow(2).mean().backward()
        optimizer.step()
    for key, value in model.state_dict().items():
        torch.testing.assert_close(value - start[key], moved[key])


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
