"""The Opacus adapter: what it releases and accounts, and each trap of Opacus 1.6 closed."""

import dataclasses
import difflib
import itertools
import math
import multiprocessing
import pickle
import re
import runpy
import subprocess
import sys
from fractions import Fraction

import numpy as np
import opacus
import pytest
import torch
from opacus.accountants.utils import get_noise_multiplier
from opacus.data_loader import DPDataLoader
from opacus.distributed import DifferentiallyPrivateDistributedDataParallel
from opacus.grad_sample import GradSampleModule
from opacus.optimizers import DPOptimizer
from opacus.schedulers import ExponentialGradClip, ExponentialNoise
from opacus.utils.batch_memory_manager import BatchMemoryManager
from opacus.utils.uniform_sampler import DistributedUniformWithReplacementSampler
from scipy import stats
from torch import nn
from torch.utils.data import DataLoader, Subset, SubsetRandomSampler, TensorDataset

import lap2
import lap2.train
from lap2.experiments.models import mnist_cnn
from lap2.interop._opacus_loader import PoissonSampler
from lap2.interop._opacus_step import rounding
from lap2.interop.opacus import LaplaceAccountant, LaplaceDPOptimizer, PrivacyEngine
from lap2.ledger import LedgerError
from lap2.noise import EntropyError, SecureLaplace, SecureSigns
from lap2.signal import spread_size
from lap2.train import BookkeepingError, CheckpointError

pytestmark = pytest.mark.filterwarnings("ignore:Full backward hook is firing:UserWarning")

MODES = ("hooks", "functorch", "ew")


def data(count, *shape):
    return TensorDataset(torch.randn(count, *shape), torch.randint(0, 3, (count,)))


def private(model, dataset, *, batch_size, engine=None, workers=0, **settings):
    settings = {"noise_multiplier": 1.0, "max_grad_norm": 1.0, "release": "values", **settings}
    engine = engine or PrivacyEngine()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    loader = DataLoader(dataset, batch_size=batch_size, num_workers=workers)
    made = engine.make_private(module=model, optimizer=optimizer, data_loader=loader, **settings)
    return engine, *made


def backward(model, batch):
    nn.functional.cross_entropy(model(batch[0]), batch[1]).backward()


def train(model, optimizer, batches):
    for batch in batches:
        optimizer.zero_grad()
        backward(model, batch)
        optimizer.step()


def clipped_sum(model, dataset, clip):
    """The readable way: one example after another."""
    sums = [torch.zeros_like(p) for p in model.parameters()]
    for x, y in dataset:
        loss = nn.functional.cross_entropy(model(x.unsqueeze(0)), y.unsqueeze(0))
        grads = torch.autograd.grad(loss, list(model.parameters()))
        norm = math.sqrt(sum(float(g.double().square().sum()) for g in grads))
        for total, g in zip(sums, grads, strict=True):
            total.add_(g, alpha=min(1.0, clip / norm))
    return sums


def close(found, expected, tolerance=1e-4):
    pairs = list(zip(found, expected, strict=True))
    gap = math.sqrt(sum(float((a - b).square().sum()) for a, b in pairs))
    size = math.sqrt(sum(float(b.square().sum()) for _, b in pairs))
    return gap <= tolerance * size


def split(optimizer, loader, size):
    return BatchMemoryManager(data_loader=loader, max_physical_batch_size=size, optimizer=optimizer)


# What is released and accounted


@pytest.mark.parametrize("mode", MODES)
def test_sum_is_clipped_and_divided_by_the_batch_size(mode, monkeypatch):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))
    dataset = data(12, 5)
    expected = clipped_sum(model, dataset, 0.3)
    _, model, optimizer, loader = private(
        model, dataset, batch_size=12, max_grad_norm=0.3, grad_sample_mode=mode
    )
    monkeypatch.setattr(optimizer._readout.noise, "add", lambda *_: 0.0)
    for batch in loader:
        backward(model, batch)
        optimizer.step()
    assert isinstance(optimizer, LaplaceDPOptimizer)
    assert close([12 * p.grad for p in optimizer.params], expected)


def noise_of(optimizer, model, loader):
    for batch in itertools.islice(loader, 1):
        backward(model, batch)
        optimizer.step()
    return np.concatenate([p.grad.numpy().ravel() for p in optimizer.params])


def test_noise_is_laplace_of_scale_noise_multiplier_times_clip():
    torch.manual_seed(1)
    _, model, optimizer, loader = private(
        nn.Linear(150, 200),
        data(4, 150),
        batch_size=1,
        noise_multiplier=2.0,
        max_grad_norm=0.5,
        public_size=10**9,  # so that samples are empty, and steps nothing but noise
    )
    noise = noise_of(optimizer, model, loader)
    assert stats.kstest(noise, stats.laplace(scale=1.0).cdf).pvalue > 1e-6
    assert stats.kstest(noise, stats.laplace(scale=1.1).cdf).pvalue < 1e-6
    assert stats.kstest(noise, stats.norm(scale=math.sqrt(2)).cdf).pvalue < 1e-6
    assert not np.array_equal(noise, noise_of(optimizer, model, loader))


def test_ledger_has_the_steps_taken_with_what_rounding_adds():
    engine, model, optimizer, loader = private(
        nn.Linear(4, 3), data(40, 4), batch_size=8, noise_multiplier=1.5, max_grad_norm=0.3
    )
    assert engine.get_epsilon(1e-5) == 0
    train(model, optimizer, loader)
    (entry,) = engine.accountant.inner.ledger
    assert (entry.mechanism.dimension, entry.sampling_prob, entry.steps) == (15, 0.2, 5)
    assert 1.5 * (1 - 1e-6) < entry.mechanism.noise_multiplier < 1.5
    assert engine.accountant.history == [(entry.mechanism.noise_multiplier, 0.2, 5)]
    assert len(engine.accountant) == 5
    direct = lap2.Accountant().compose(lap2.Laplace(1.5, 15), sampling_prob=0.2, steps=5)
    assert engine.get_epsilon(1e-5) == pytest.approx(direct.get_epsilon(1e-5), rel=1e-6)
    assert engine.get_epsilon(1e-5) > direct.get_epsilon(1e-5)


@pytest.mark.parametrize("clip", [0.3, 1.0, 7.7])
def test_target_is_met_at_the_end_and_not_wasted(clip):
    torch.manual_seed(2)
    model = nn.Linear(4, 3)
    engine = PrivacyEngine()
    model, optimizer, loader = engine.make_private_with_epsilon(
        module=model,
        optimizer=torch.optim.Adam(model.parameters()),
        data_loader=DataLoader(data(49, 4), batch_size=10),
        target_epsilon=2.0,
        target_delta=1e-5,
        epochs=3,
        max_grad_norm=clip,
    )
    assert len(loader) == 5
    for _ in range(3):
        train(model, optimizer, loader)
    assert len(engine.accountant) == 15
    assert 1.9998 < engine.get_epsilon(1e-5) <= 2
    needed = lap2.calibrate_noise(
        lap2.Laplace(1.0, 15), epsilon=2.0, delta=1e-5, sampling_prob=10 / 49, steps=15
    )
    assert engine.accountant.history[0][0] >= needed.noise_multiplier
    with pytest.raises(RuntimeError, match="ledger must be empty to aim at target_epsilon, got 15"):
        engine.make_private_with_epsilon(
            module=model, optimizer=optimizer, data_loader=loader, target_epsilon=2.0,
            target_delta=1e-5, epochs=3, max_grad_norm=clip,
        )  # fmt: skip


def test_step_is_in_the_ledger_before_noise_is_drawn(monkeypatch):
    engine, model, optimizer, loader = private(nn.Linear(4, 3), data(8, 4), batch_size=8)
    before = [p.clone() for p in optimizer.params]

    def no_entropy(sums, scale):
        assert len(engine.accountant) == 1
        raise EntropyError("no randomness")

    monkeypatch.setattr(optimizer._readout.noise, "add", no_entropy)
    with pytest.raises(EntropyError):
        train(model, optimizer, loader)
    assert len(engine.accountant) == 1
    assert all(torch.equal(a, b) for a, b in zip(before, optimizer.params, strict=True))


def test_clipped_norm_cannot_exceed_the_clip_by_rounding():
    """Opacus's float32 norm of 2^24 coordinates is 1% short."""
    layer = nn.Linear(2**24, 1, bias=False)
    with torch.no_grad():
        theirs = DPOptimizer(
            torch.optim.SGD(layer.parameters(), lr=1.0),
            noise_multiplier=1.0,
            max_grad_norm=1.0,
            expected_batch_size=1,
        )
        layer.weight.grad_sample = torch.full((1, 1, 2**24), 0.1)
        theirs.clip_and_accumulate()
        assert float(layer.weight.summed_grad.double().norm()) > 1.005
        _, _, ours, _ = private(layer, TensorDataset(torch.zeros(1, 1)), batch_size=1)
        ours.begin_batch(1)
        layer.weight.grad_sample = torch.full((1, 1, 2**24), 0.1)
        ours.clip_and_accumulate()
        assert 0.9998 < float(layer.weight.summed_grad.double().norm()) <= 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("pieces", [[700], [1, 300, 399]])
def test_sums_are_as_exact_as_is_accounted(dtype, pieces):
    """Against exact arithmetic, on a batch whose terms cancel but for the last, and on ties."""
    torch.manual_seed(0)
    count, clip = 700, 1.0
    signs = torch.tensor([1.0, -1.0]).repeat(count // 2)
    grads = torch.cat(
        [torch.randn(count, 2), signs[:, None] * (1 + 2.0**-11), torch.full((count, 1), 1 / 3)], 1
    ).to(dtype)
    layer = nn.Linear(4, 1, bias=False, dtype=dtype)
    _, _, optimizer, _ = private(
        layer, TensorDataset(torch.zeros(count, 4)), batch_size=count, max_grad_norm=clip
    )

    def clipped(part):
        optimizer.begin_batch(len(part))
        for piece in part.split(pieces if len(part) == count else len(part)):
            layer.weight.grad_sample = piece[:, None, :].clone()
            optimizer.clip_and_accumulate()
        total = layer.weight.summed_grad[0]
        optimizer.give_up()
        return total

    alone = [clipped(g[None]) for g in grads]  # a sum of one is exact but for one rounding
    norms = [sum(Fraction(float(v)) ** 2 for v in row) for row in alone]
    assert max(norms) <= clip**2
    total = clipped(grads)
    assert total.dtype == torch.float64
    exact = [sum(Fraction(float(row[k])) for row in alone) for k in range(4)]

    def error(found):
        return math.sqrt(
            sum((Fraction(float(f)) - e) ** 2 for f, e in zip(found, exact, strict=True))
        )

    assert error(total) <= rounding(1024) / 2 * clip
    assert error(sum(row.float() for row in alone)) > 100 * rounding(1024) * clip
    assert rounding(1024) < 1e-8
    assert rounding(2**20) < 1e-3


@pytest.mark.parametrize("step_too", [False, True])
def test_clipping_under_autocast_is_in_full_precision(step_too, monkeypatch):
    """Gradients of examples are then in bfloat16, which errs by more than clipping leaves room."""
    torch.manual_seed(0)
    dataset = TensorDataset(10 * torch.randn(20, 300), torch.zeros(20, dtype=torch.long))
    clip = 0.1
    for record in range(len(dataset)):
        model = nn.Sequential(nn.Linear(300, 40), nn.ReLU(), nn.Linear(40, 4))
        twice = TensorDataset(*(torch.stack([t, t]) for t in dataset[record]))
        _, model, optimizer, loader = private(
            model, twice, batch_size=2, max_grad_norm=clip, loss_reduction="sum"
        )
        monkeypatch.setattr(optimizer._readout.noise, "add", lambda *_: 0.0)
        for batch in loader:
            with torch.autocast("cpu", torch.bfloat16):
                loss = nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="sum")
            loss.backward()
            with torch.autocast("cpu", torch.bfloat16, enabled=step_too):
                optimizer.step()
        norm = torch.cat([p.grad.double().flatten() for p in optimizer.params]).norm()
        assert norm <= 2 * clip


def test_a_mean_in_half_precision_is_refused():
    """There 1 / B is rounded, and with it the gradient of every example when B changes by one."""
    torch.manual_seed(0)
    x, y = torch.randn(64, 16), torch.randint(0, 2, (64,))
    start = nn.Linear(16, 2).state_dict()

    def gradients_of_the_first(count, reduction):
        model = nn.Linear(16, 2)
        model.load_state_dict(start)
        engine, model, optimizer, _ = private(
            model, TensorDataset(x, y), batch_size=64, loss_reduction=reduction
        )
        optimizer.begin_batch(count)
        with torch.autocast("cpu", torch.bfloat16):
            out = model(x[:count])
            loss = nn.functional.cross_entropy(out, y[:count], reduction=reduction)
        loss.backward()
        first = optimizer.params[0].grad_sample[:63].float()
        if reduction == "mean":
            with pytest.raises(BookkeepingError, match="loss_reduction must be 'sum'"):
                optimizer.step()
        else:
            optimizer.step()
        assert len(engine.accountant) == (reduction == "sum")
        return first

    moved = {}
    for reduction in ("mean", "sum"):
        one, more = (gradients_of_the_first(count, reduction) for count in (63, 64))
        moved[reduction] = float((one - more).norm() / one.norm())
    assert moved["mean"] > 1e-4
    assert moved["sum"] == 0


@pytest.mark.parametrize("scale", [1e-30, 1e-20, 1e-3, 1.0, 1e15, 1e30])
def test_every_example_is_clipped_whatever_its_size(scale):
    torch.manual_seed(3)
    clip = min(1.0, 30 * scale)
    _, _, optimizer, _ = private(nn.Linear(700, 3), data(1, 700), batch_size=1, max_grad_norm=clip)
    optimizer.begin_batch(1)
    for p in optimizer.params:
        p.grad_sample = scale * torch.randn(1, *p.shape)
    optimizer.clip_and_accumulate()
    norm = math.sqrt(sum(float(p.summed_grad.double().square().sum()) for p in optimizer.params))
    assert 0.999 * clip < norm <= clip


def test_clipped_sum_is_that_of_opacus_and_of_lap2_on_the_mnist_cnn():
    torch.manual_seed(4)
    dataset = TensorDataset(torch.rand(24, 1, 28, 28), torch.randint(0, 10, (24,)))
    batch = dataset.tensors
    start = mnist_cnn().state_dict()

    def fresh():
        model = mnist_cnn()
        model.load_state_dict(start)
        return model

    module = GradSampleModule(fresh())
    theirs = DPOptimizer(
        torch.optim.SGD(module.parameters(), lr=1.0),
        noise_multiplier=0.0,
        max_grad_norm=0.1,
        expected_batch_size=24,
    )
    backward(module, batch)
    theirs.clip_and_accumulate()
    expected = [p.summed_grad for p in theirs.params]

    class Off:
        is_secure = False

        def added_sensitivity(self, _scale, _size):
            return 0.0

        def add(self, _array, _scale):
            return 0.0

    model = fresh()
    ours, optimizer, loader = lap2.train.PrivacyEngine(sampler=Off()).make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.0), release="values",
        data_loader=DataLoader(dataset, batch_size=24), noise_multiplier=1.0, max_grad_norm=0.1,
    )  # fmt: skip
    for x, y in loader:
        backward(ours, (x, y))
        optimizer.step()
    assert close([24 * p.grad for p in ours.parameters()], expected, 1e-4)

    _, model, optimizer, loader = private(fresh(), dataset, batch_size=24, max_grad_norm=0.1)
    for x, y in loader:
        backward(model, (x, y))
        optimizer.clip_and_accumulate()
        assert close([p.summed_grad for p in optimizer.params], expected, 1e-5)
        assert not close([p.summed_grad * 1.001 for p in optimizer.params], expected, 1e-4)


def test_values_may_be_clamped():
    engine, model, optimizer, loader = private(
        nn.Linear(4, 3), data(8, 4), batch_size=8, noise_multiplier=100.0, release="values", tau=1.0
    )
    train(model, optimizer, loader)
    assert max(float(p.grad.abs().max()) for p in optimizer.params) <= 100 / 0.632 / 8
    assert len(engine.accountant) == 1
    with pytest.raises(ValueError, match="release must be one of"):
        private(nn.Linear(4, 3), data(8, 4), batch_size=8, release="magic")


# Trap 1


def test_the_ledger_has_the_coordinates_that_get_noise(monkeypatch):
    """More than the model has, where they are spread, and every copy."""
    seen = []
    add = SecureLaplace.add

    def watched(self, arrays, scale):
        parts = arrays if isinstance(arrays, list) else [arrays]
        seen.append(sum(part.numel() for part in parts))
        return add(self, arrays, scale)

    def watched_bits(self, arrays, scale):
        seen.append(arrays.numel() * self.copies)
        return add_bits(self, arrays, scale)

    add_bits = SecureSigns.add
    monkeypatch.setattr(SecureLaplace, "add", watched)
    monkeypatch.setattr(SecureSigns, "add", watched_bits)
    bits = {"release": "bits", "copies": 4}
    for release in (bits, {"release": None}, {"release": "values", "tau": 0.5}, {}):
        engine, model, optimizer, loader = private(
            nn.Linear(50, 3), data(8, 50), batch_size=8, **release
        )
        train(model, optimizer, loader)
        (entry,) = engine.accountant.inner.ledger
        assert entry.mechanism.dimension == seen[-1]
    assert seen == [4 * spread_size(153), 8 * spread_size(153), spread_size(153), 153]


def test_channels_last_is_refused_and_functorch_gets_it_right():
    torch.manual_seed(5)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 3), nn.Flatten())
    model.append(nn.Linear(2 * 16, 3))
    start, dataset = model.state_dict(), data(6, 3, 8, 8)
    expected = clipped_sum(model, dataset, 1.0)

    def fresh():
        model.load_state_dict(start)
        return nn.Sequential(*model)

    last = TensorDataset(
        dataset.tensors[0].to(memory_format=torch.channels_last), dataset.tensors[1]
    )
    engine, hooked, optimizer, loader = private(fresh(), dataset, batch_size=6)
    with pytest.raises(ValueError, match=r"input of Conv2d\(3, 4.*must be contiguous"):
        hooked(last.tensors[0])
    with torch.no_grad():
        hooked(last.tensors[0])  # nothing is differentiated here
    hooked.to_standard_module()(last.tensors[0])
    assert len(engine.accountant) == 0

    weights = fresh().to(memory_format=torch.channels_last)
    _, hooked, optimizer, loader = private(weights, dataset, batch_size=6)
    with pytest.raises(ValueError, match=r"input of Conv2d\(4, 2.*must be contiguous"):
        train(hooked, optimizer, loader)
    hooked.to_standard_module()

    _, vmapped, optimizer, _ = private(weights, dataset, batch_size=6, grad_sample_mode="functorch")
    optimizer.begin_batch(6)
    backward(vmapped, last.tensors)
    optimizer.clip_and_accumulate()
    assert close([p.summed_grad for p in optimizer.params], expected)


# Trap 2


class TwoWays(nn.Module):
    """Uses a weight in its layer, and once more by itself."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x):
        return self.layer(x) + 50 * nn.functional.linear(x, self.layer.weight)


@pytest.mark.filterwarnings("ignore:Secure RNG turned off:UserWarning")
def test_ghost_is_refused_because_it_sums_more_than_it_measures():
    torch.manual_seed(6)
    dataset = data(1, 4)
    model = TwoWays()
    model, _, criterion, _ = opacus.PrivacyEngine().make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=1.0),
        data_loader=DataLoader(dataset), noise_multiplier=0.0, max_grad_norm=1.0,
        grad_sample_mode="ghost",
    )  # fmt: skip
    x, y = dataset.tensors
    criterion(model(x), y).backward()
    assert float(torch.cat([p.grad.ravel() for p in model.parameters()]).norm()) > 10
    for mode in ("ghost", "ghost_fsdp", "ghost_tp", "no_op", "magic"):
        with pytest.raises(ValueError, match=f"grad_sample_mode must be one of .*got '{mode}'"):
            private(nn.Linear(4, 3), dataset, batch_size=1, grad_sample_mode=mode)


@pytest.mark.parametrize("mode", MODES)
def test_supported_modes_release_at_most_the_clip_of_such_a_weight(mode):
    torch.manual_seed(7)
    dataset = data(1, 4)
    _, model, optimizer, loader = private(
        TwoWays(), dataset, batch_size=1, grad_sample_mode=mode, max_grad_norm=0.1
    )
    for batch in loader:
        backward(model, batch)
        optimizer.clip_and_accumulate()
    assert torch.cat([p.summed_grad.ravel() for p in optimizer.params]).double().norm() <= 0.1


def test_schedulers_change_noise_and_clip_between_batches_but_not_within():
    engine, model, optimizer, loader = private(nn.Linear(4, 3), data(8, 4), batch_size=8)
    clips, noises = (
        ExponentialGradClip(optimizer, gamma=0.5),
        ExponentialNoise(optimizer, gamma=0.5),
    )
    for _ in range(2):
        train(model, optimizer, loader)
        clips.step()
        noises.step()
    assert [round(h[0], 5) for h in engine.accountant.history] == [1.0, 0.5]
    assert optimizer.max_grad_norm == 0.25

    with split(optimizer, loader, 4) as pieces:
        rest = iter(pieces)
        train(model, optimizer, [next(rest)])
        clips.step()
        with pytest.raises(ValueError, match=r"must stay 0\.25 within a batch, got 0\.125"):
            train(model, optimizer, rest)
    assert len(engine.accountant) == 2

    for attribute, value in (("noise_multiplier", math.nan), ("max_grad_norm", 0.0)):
        engine, model, optimizer, loader = private(nn.Linear(4, 3), data(8, 4), batch_size=8)
        setattr(optimizer, attribute, value)
        with pytest.raises(ValueError, match=f"{attribute} must be"):
            train(model, optimizer, loader)
        assert len(engine.accountant) == 0


# Trap 3


def test_batches_in_pieces_release_the_same_sum_once(monkeypatch):
    torch.manual_seed(8)
    model, dataset = nn.Linear(4, 3), data(10, 4)
    expected = clipped_sum(model, dataset, 1.0)
    engine, model, optimizer, loader = private(model, dataset, batch_size=10)
    monkeypatch.setattr(optimizer._readout.noise, "add", lambda *_: 0.0)
    with split(optimizer, loader, 4) as pieces:
        train(model, optimizer, pieces)
    assert len(engine.accountant) == 1
    assert close([10 * p.grad for p in optimizer.params], expected)


def test_a_batch_given_up_leaves_nothing_for_the_next(monkeypatch):
    torch.manual_seed(9)
    model, dataset = nn.Linear(4, 3), data(10, 4)
    expected = clipped_sum(model, dataset, 1.0)
    engine, model, optimizer, loader = private(model, dataset, batch_size=10)
    monkeypatch.setattr(optimizer._readout.noise, "add", lambda *_: 0.0)
    with split(optimizer, loader, 4) as pieces:
        train(model, optimizer, itertools.islice(pieces, 2))  # given up before its end
    assert len(engine.accountant) == 0
    assert any(float(p.summed_grad.norm()) > 0 for p in optimizer.params)
    for batch in loader:
        backward(model, batch)
        optimizer.step()
    assert len(engine.accountant) == 1
    assert close([10 * p.grad for p in optimizer.params], expected)


def test_a_piece_without_its_step_cannot_shift_the_others():
    engine, model, optimizer, loader = private(nn.Linear(4, 3), data(9, 4), batch_size=9)
    with split(optimizer, loader, 3) as pieces:
        rest = iter(pieces)
        train(model, optimizer, [next(rest)])
        backward(model, next(rest))  # and no step
        with pytest.raises(BookkeepingError, match="fetch one batch at a time"):
            train(model, optimizer, rest)
    assert len(engine.accountant) == 0


def test_a_piece_allows_one_step():
    engine, model, optimizer, loader = private(nn.Linear(4, 3), data(9, 4), batch_size=9)
    with split(optimizer, loader, 3) as pieces:
        for batch in itertools.islice(pieces, 1):
            backward(model, batch)
            optimizer.step()
            backward(model, batch)
            with pytest.raises(BookkeepingError, match="allows one step"):
                optimizer.step()
    assert len(engine.accountant) == 0


def test_batch_memory_manager_needs_a_loader_without_workers():
    engine, model, optimizer, loader = private(nn.Linear(4, 3), data(9, 4), batch_size=9, workers=1)
    with (
        split(optimizer, loader, 2) as pieces,
        pytest.raises(ValueError, match="num_workers must be 0 with BatchMemoryManager"),
    ):
        train(model, optimizer, pieces)
    assert len(engine.accountant) == 0


@pytest.mark.parametrize("size", [1, 2, 4, None])
def test_a_wrapper_that_reads_ahead_is_refused(size):
    """Else the pieces of two batches meet in one sum, and one record counts twice."""
    engine, model, optimizer, loader = private(nn.Linear(4, 3), data(8, 4), batch_size=2)

    def ahead(batches):
        rest = iter(batches)
        here = next(rest)
        for following in rest:
            yield here
            here = following
        yield here

    with split(optimizer, loader, size or 8) as pieces:
        batches = ahead(pieces if size else loader)
        with pytest.raises(BookkeepingError, match="fetch one batch at a time"):
            train(model, optimizer, batches)
    assert len(engine.accountant) == 0


def test_two_passes_in_pieces_do_not_meet_in_one_sum():
    engine, model, optimizer, loader = private(nn.Linear(4, 3), data(9, 4), batch_size=9)
    with split(optimizer, loader, 3) as pieces:
        first, second = iter(pieces), iter(pieces)
        train(model, optimizer, [next(first)])
        train(model, optimizer, [next(second)])
        with pytest.raises(BookkeepingError, match="ends where another one begins"):
            next(first)
        train(model, optimizer, second)
    assert len(engine.accountant) == 1


@pytest.mark.parametrize("workers", [0, 1])
def test_a_batch_that_is_skipped_is_noticed(workers):
    """A sample that is skipped for what is in it leaves others that are no Poisson samples."""
    engine, model, optimizer, loader = private(
        nn.Linear(4, 3), data(8, 4), batch_size=2, workers=workers
    )
    batches = (batch for number, batch in enumerate(loader) if number != 1)
    with pytest.raises(BookkeepingError, match="cannot be skipped for what is in it"):
        train(model, optimizer, batches)
    assert len(engine.accountant) == 1
    train(model, optimizer, loader)  # a new pass is a new beginning
    assert len(engine.accountant) == 5


def test_workers_fetch_the_batches_that_are_counted():
    torch.manual_seed(10)
    engine, model, optimizer, loader = private(
        nn.Linear(4, 3), data(40, 4), batch_size=4, workers=1
    )
    train(model, optimizer, loader)
    assert len(engine.accountant) == len(loader) == 10
    for batch in itertools.islice(loader, 1):
        backward(model, batch)
        optimizer.step()
        backward(model, batch)
        with pytest.raises(BookkeepingError, match="allows one step"):
            optimizer.step()
    assert len(engine.accountant) == 11


# Traps 4, 5 and 8: sampling


def shards(prob=0.5, steps=1):
    for rank in range(2):
        torch.manual_seed(0)
        yield list(PoissonSampler(400, prob=prob, steps=steps, shard=(rank, 2), prefetch=True))


def test_ranks_sample_their_own_records_independently_of_any_seed(monkeypatch):
    (first,), (second,) = shards()
    assert all(k % 2 == 0 for k in first)
    assert all(k % 2 == 1 for k in second)
    assert {k // 2 for k in first} != {k // 2 for k in second}
    (again,), _ = shards()
    assert first != again
    assert 120 < len(first) + len(second) < 280

    positions = []  # Opacus's own, for comparison
    for rank in range(2):
        monkeypatch.setattr(torch.distributed, "get_rank", lambda rank=rank: rank)
        monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
        theirs = DistributedUniformWithReplacementSampler(
            total_size=400, sample_rate=0.5, shuffle=False
        )
        torch.manual_seed(0)
        positions.append([int(k) // 2 for k in next(iter(theirs))])
    assert positions[0] == positions[1]


def test_empty_samples_are_yielded_so_that_ranks_stay_together():
    first, second = shards(prob=0.002, steps=50)
    assert len(first) == len(second) == 50
    assert [] in first
    assert [] in second


def test_a_pass_has_one_step_for_each_batch():
    dataset = data(186, 4)
    loader = DataLoader(dataset, batch_size=2)
    assert len(DPDataLoader.from_data_loader(loader)) == 92  # int(1 / (1 / 93))
    engine, model, optimizer, ours = private(nn.Linear(4, 3), dataset, batch_size=2)
    train(model, optimizer, ours)
    assert len(ours) == len(engine.accountant) == 93
    *_, uneven = private(nn.Linear(4, 3), dataset, batch_size=10)
    assert len(uneven) == 19


def test_two_passes_at_once_are_refused():
    for workers in (0, 1):
        _, _, _, loader = private(nn.Linear(4, 3), data(12, 4), batch_size=3, workers=workers)
        first = iter(loader)
        next(first)
        next(iter(loader))
        with pytest.raises(BookkeepingError, match="ends where another one begins"):
            next(first)


def one_rank(rank, folder):
    """Two short trainings: one that is mostly noise, one with almost none."""
    torch.set_num_threads(1)  # the pool of threads does not survive a fork
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2
    )
    torch.manual_seed(0)
    x = torch.zeros(7, 50)
    x[:, 0] = 1000.0
    results = []
    for noise_multiplier, batch_size in ((2.0, 2), (1e-3, 7)):
        engine, model, optimizer, loader = private(
            DifferentiallyPrivateDistributedDataParallel(nn.Linear(50, 200)),
            TensorDataset(x),
            batch_size=batch_size,
            noise_multiplier=noise_multiplier,
            loss_reduction="sum",
        )
        for _ in range(3):
            for (batch,) in loader:
                model(batch)[:, 0].sum().backward()
                optimizer.step()
        grads = [p.grad for p in optimizer.params]
        results.append((grads, engine.accountant.inner.to_json()))
    torch.save(results, f"{folder}/{rank}.pt")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def test_two_ranks_release_one_sum_under_one_noise_and_agree(tmp_path):
    fork = multiprocessing.get_context("fork")
    ranks = [fork.Process(target=one_rank, args=(rank, tmp_path), daemon=True) for rank in range(2)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(timeout=60)
    assert [rank.exitcode for rank in ranks] == [0, 0]
    first, second = (torch.load(tmp_path / f"{k}.pt", weights_only=True) for k in range(2))
    for (ours, ledger), (theirs, other) in zip(first, second, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
        assert ledger == other
    (noisy, ledger), (sums, _) = first
    assert lap2.Accountant.from_json(ledger).steps == 12  # samples empty on a rank are steps too
    noise = noisy[0][1:].numpy().ravel()
    assert stats.kstest(noise, stats.laplace(scale=2.0).cdf).pvalue > 1e-6
    assert stats.kstest(noise, stats.laplace(scale=2.5).cdf).pvalue < 1e-6
    twice = noise + np.random.default_rng(0).laplace(scale=2.0, size=noise.size)
    assert stats.kstest(twice, stats.laplace(scale=2.0).cdf).pvalue < 1e-6
    assert float(sums[0][0, 0]) == pytest.approx(7, abs=0.05)  # all examples of both shares


def test_other_parallel_modules_are_refused(monkeypatch):
    class Parallel(nn.parallel.DistributedDataParallel):
        def __init__(self):
            nn.Module.__init__(self)

    with pytest.raises(ValueError, match=r"module must be an ordinary one.*got Parallel"):
        PrivacyEngine().make_private(
            module=Parallel(), optimizer=None, data_loader=None, noise_multiplier=1.0,
            max_grad_norm=1.0,
        )  # fmt: skip


# Trap 6


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("mode", MODES)
def test_an_empty_batch_is_a_step_like_any_other(mode, workers):
    engine, model, optimizer, loader = private(
        nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 3)),
        data(4, 4),
        batch_size=1,
        workers=workers,
        grad_sample_mode=mode,
        public_size=10**9,
    )
    for batch in itertools.islice(loader, 3):
        assert len(batch[0]) == 0
        train(model, optimizer, [batch])
    assert len(engine.accountant) == 3
    assert all(p.isfinite().all() and p.grad.abs().min() > 0 for p in optimizer.params)


# Trap 7


@pytest.mark.parametrize("bad", [math.inf, math.nan])
@pytest.mark.parametrize("mode", MODES)
def test_an_example_that_is_not_finite_contributes_nothing(mode, bad):
    torch.manual_seed(11)
    model, dataset = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3)), data(6, 4)
    expected = clipped_sum(model, [dataset[k] for k in range(6) if k != 2], 1.0)
    dataset.tensors[0][2] = bad
    engine, model, optimizer, loader = private(model, dataset, batch_size=6, grad_sample_mode=mode)
    for batch in loader:
        backward(model, batch)
        optimizer.clip_and_accumulate()
    assert optimizer.skipped_examples == 1
    assert close([p.summed_grad for p in optimizer.params], expected)
    train(model, optimizer, loader)
    assert all(p.isfinite().all() for p in optimizer.params)
    assert len(engine.accountant) == 1


# Trap 9


def test_nothing_depends_on_the_true_size_when_a_public_one_is_given():
    made = [
        private(nn.Linear(4, 3), data(size, 4), batch_size=3, public_size=10) for size in (10, 11)
    ]
    for _, model, optimizer, loader in made:
        assert (len(loader), optimizer.expected_batch_size) == (4, 3)
        train(model, optimizer, loader)
    one, other = (
        [dataclasses.replace(entry, origin="") for entry in engine.accountant.inner.ledger]
        for engine, *_ in made
    )
    assert one == other
    assert made[0][0].accountant.history[0][1] == 0.3
    *_, optimizer, loader = private(nn.Linear(4, 3), data(10, 4), batch_size=3)
    assert (len(loader), optimizer.expected_batch_size) == (4, 3)  # Opacus: int(10 / 4) = 2
    assert loader.batch_sampler.sample_rate == 0.3


# Trap 10


@pytest.mark.filterwarnings("ignore:Secure RNG turned off:UserWarning")
def test_gaussian_noise_cannot_run_under_the_accountant():
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    loader = DataLoader(data(8, 4), batch_size=8)
    engine = opacus.PrivacyEngine(accountant="lap2")
    assert isinstance(engine.accountant, LaplaceAccountant)
    with pytest.raises(RuntimeError, match="history must not be set"):
        engine.make_private_with_epsilon(
            module=model, optimizer=optimizer, data_loader=loader, target_epsilon=1.0,
            target_delta=1e-5, epochs=1, max_grad_norm=1.0,
        )  # fmt: skip
    with pytest.raises(RuntimeError, match="history must not be set"):
        get_noise_multiplier(
            target_epsilon=1.0, target_delta=1e-5, sample_rate=0.1, epochs=1, accountant="lap2"
        )
    model, optimizer, loader = engine.make_private(
        module=model, optimizer=optimizer, data_loader=loader, noise_multiplier=1.0,
        max_grad_norm=1.0,
    )  # fmt: skip
    before = [p.clone() for p in model.parameters()]
    with pytest.raises(RuntimeError, match=r"only lap2\.interop\.opacus\.PrivacyEngine adds"):
        train(model, optimizer, loader)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert len(engine.accountant) == 0
    for name in ("rdp", "gdp", "prv"):
        with pytest.raises(ValueError, match=f"accountant must be 'lap2', got '{name}'"):
            PrivacyEngine(accountant=name)


def test_a_hook_of_another_ledger_is_refused():
    _, model, optimizer, loader = private(nn.Linear(4, 3), data(8, 4), batch_size=8)
    optimizer.attach_step_hook(LaplaceAccountant().get_optimizer_hook_fn(sample_rate=1.0))
    with pytest.raises(RuntimeError, match="cannot take a step"):
        train(model, optimizer, loader)


# Trap 11, and all else that is refused


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"clipping": "adaptive"}, "clipping must be 'flat', got 'adaptive'"),
        ({"clipping": "per_layer"}, "clipping must be 'flat', got 'per_layer'"),
        ({"poisson_sampling": False}, "poisson_sampling must be True, got False"),
        ({"rand_on_empty": True}, "rand_on_empty must be False, got True"),
        ({"noise_generator": torch.Generator()}, "noise_generator must be None"),
        ({"grad_sample_mode": "ew", "wrap_model": False}, "wrap_model must be True for 'ew'"),
        ({"noise_multiplier": math.nan}, "noise_multiplier must be"),
        ({"noise_multiplier": 0.0}, "noise_multiplier must be"),
        ({"max_grad_norm": -1.0}, "max_grad_norm must be"),
        ({"max_grad_norm": 1e-300}, r"max_grad_norm must be at least 2\^-900"),
        ({"public_size": 3}, r"batch_size in \[1, 3\], got 4"),
        ({"public_size": 0}, "public_size must be"),
    ],
)
def test_unsound_settings_are_refused(change, message):
    engine = PrivacyEngine()
    with pytest.raises(ValueError, match=message):
        private(nn.Linear(4, 3), data(8, 4), batch_size=4, engine=engine, **change)
    assert len(engine.accountant) == 0


def test_unsound_objects_are_refused():
    dataset, model = data(8, 4), nn.Linear(4, 3)
    with pytest.raises(TypeError, match="max_grad_norm must be"):
        private(model, dataset, batch_size=4, max_grad_norm=[1.0, 1.0])
    for wrong in ({"target": 1.0}, {"noise_multipler": 1.0}):
        with pytest.raises(TypeError, match="unexpected keyword argument"):
            private(model, dataset, batch_size=4, **wrong)
    with pytest.raises(ValueError, match=r"batch_size in \[1, 8\], got 9"):
        private(model, dataset, batch_size=9)
    with pytest.raises(ValueError, match="must have a batch_size, got None"):
        private(model, dataset, batch_size=None)
    with pytest.raises(TypeError, match="data_loader must be a torch DataLoader, got list"):
        PrivacyEngine().make_private(
            module=model, optimizer=torch.optim.SGD(model.parameters(), lr=1.0),
            data_loader=[dataset.tensors], noise_multiplier=1.0, max_grad_norm=1.0,
        )  # fmt: skip
    with pytest.raises(ValueError, match="must hold exactly the module's trainable parameters"):
        PrivacyEngine().make_private(
            module=model, optimizer=torch.optim.SGD([model.weight], lr=1.0),
            data_loader=DataLoader(dataset), noise_multiplier=1.0, max_grad_norm=1.0,
        )  # fmt: skip
    with pytest.raises(ValueError, match=r"float32 or float64, got \{torch.bfloat16\}"):
        private(nn.Linear(4, 3).bfloat16(), dataset, batch_size=4)
    engine, model, optimizer, _ = private(model, dataset, batch_size=4)
    with pytest.raises(ValueError, match="engine must be a new one"):
        private(nn.Linear(4, 3), dataset, batch_size=4, engine=engine)
    with pytest.raises(ValueError, match=r"module must be an ordinary one.*got GradSampleModule"):
        private(model, dataset, batch_size=4)
    with pytest.raises(ValueError, match="optimizer must not be private already"):
        PrivacyEngine().make_private(
            module=model._module, optimizer=optimizer, data_loader=DataLoader(dataset),
            noise_multiplier=1.0, max_grad_norm=1.0,
        )  # fmt: skip


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda ds: DataLoader(ds, 4, sampler=SubsetRandomSampler([0, 1])), "sampler must be"),
        (lambda ds: DataLoader(ds, 4, drop_last=True), "drop_last=False"),
        (lambda ds: DataLoader(Subset(ds, [0] * 5 + [1, 2]), 4), "record 0 .* 5 times"),
    ],
)
def test_loaders_that_choose_records_are_refused(make, message):
    model, engine = nn.Linear(4, 3), PrivacyEngine()
    common = {
        "module": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=1.0),
        "data_loader": make(data(8, 4)),
        "max_grad_norm": 1.0,
    }
    aim = {"target_epsilon": 2.0, "target_delta": 1e-5, "epochs": 1}
    with pytest.raises(ValueError, match=f"data_loader.*{message}"):
        engine.make_private(**common, noise_multiplier=1.0)
    with pytest.raises(ValueError, match=f"data_loader.*{message}"):
        engine.make_private_with_epsilon(**common, **aim)
    assert not model._forward_hooks


class Remembers(nn.Module):
    """Writes of the batch into what is saved with the model."""

    def __init__(self, how):
        super().__init__()
        self.how = how
        self.layer = nn.Linear(4, 3)
        self.table = nn.Parameter(torch.full((8, 4), 2.0), requires_grad=False)
        self.register_buffer("memory", torch.zeros(4), persistent=False)

    def forward(self, x):
        if self.how == "rows that are normalised":
            index = torch.arange(len(x))
            x = x + nn.functional.embedding(index, self.table, max_norm=1)
        elif self.how == "buffer":
            self.memory = 0.9 * self.memory + x.mean(0)
        elif self.how == "data":
            self.memory.data.add_(x.mean(0))
        elif self.how == "frozen parameter":
            with torch.no_grad():
                self.table[0].copy_(x.mean(0))
        return self.layer(x)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("how", "name"),
    [
        ("rows that are normalised", "table"),
        ("buffer", "memory"),
        ("data", "memory"),
        ("frozen parameter", "table"),
    ],
)
def test_what_is_written_into_the_model_is_refused(how, name, mode):
    engine, model, optimizer, loader = private(
        Remembers(how), data(8, 4), batch_size=8, grad_sample_mode=mode
    )
    before = model.state_dict()["_module.layer.weight"].clone()
    for batch in loader:
        backward(model, batch)
        with pytest.raises(BookkeepingError, match=f"got writes to '{name}'"):
            optimizer.step()
    assert len(engine.accountant) == 0
    assert torch.equal(model.state_dict()["_module.layer.weight"], before)


@pytest.mark.parametrize("mode", MODES)
def test_what_is_written_in_a_piece_is_refused(mode):
    engine, model, optimizer, loader = private(
        Remembers("nothing"), data(8, 4), batch_size=8, grad_sample_mode=mode
    )
    with split(optimizer, loader, 4) as pieces:
        train(model, optimizer, pieces)  # which writes nothing
        model._module.how = "buffer"
        with pytest.raises(BookkeepingError, match="got writes to 'memory'"):
            train(model, optimizer, pieces)
    assert len(engine.accountant) == 1


def test_layers_that_mix_are_refused_also_where_nothing_of_them_is_trained():
    def made(**settings):
        return nn.Sequential(nn.BatchNorm1d(4, **settings), nn.Linear(4, 3))

    for model in (made(affine=False), made(affine=False, track_running_stats=False)):
        with pytest.raises(ValueError, match="must not mix examples, got 0 of type BatchNorm1d"):
            private(model, data(8, 4), batch_size=8)
    model[0].eval()  # which changes nothing in one without running statistics
    with pytest.raises(ValueError, match="must not mix examples"):
        private(model, data(8, 4), batch_size=8)

    model = made(affine=False)
    model[0].eval()
    engine, model, optimizer, loader = private(model, data(8, 4), batch_size=8)
    train(model, optimizer, loader)
    model.train()
    with pytest.raises(BookkeepingError, match=r"got writes to '0\.running_mean'"):
        train(model, optimizer, loader)
    assert len(engine.accountant) == 1


def test_processes_must_not_appear_afterwards(monkeypatch):
    engine, model, optimizer, loader = private(nn.Linear(4, 3), data(8, 4), batch_size=8)
    for module in ("_opacus_step", "opacus"):
        monkeypatch.setattr(f"lap2.interop.{module}.world_size", lambda: 2)
    with pytest.raises(BookkeepingError, match="in make_private, with 1 processes, got 2"):
        train(model, optimizer, loader)
    assert len(engine.accountant) == 0
    with pytest.raises(ValueError, match="in DifferentiallyPrivateDistributedDataParallel where"):
        private(nn.Linear(4, 3), data(8, 4), batch_size=8)


def test_samples_longer_than_accounted_are_refused():
    engine, model, optimizer, loader = private(
        nn.Linear(4, 3), data(1200, 4), batch_size=2, public_size=2
    )
    with pytest.raises(BookkeepingError, match="may have 1024 examples on each rank, got more"):
        train(model, optimizer, loader)
    assert len(engine.accountant) == 0
    with pytest.raises(ValueError, match="batch_size up to 524288"):
        private(nn.Linear(4, 3), data(8, 4), batch_size=2**20, public_size=2**22)


def test_a_batch_allows_one_step_on_itself_only():
    engine, model, optimizer, loader = private(nn.Linear(4, 3), data(8, 4), batch_size=8)
    with pytest.raises(BookkeepingError, match="allows one step"):
        train(model, optimizer, [(torch.randn(8, 4), torch.zeros(8, dtype=torch.long))])
    for given in (0, 5):
        x, y = next(iter(loader))
        if given:
            backward(model, (x[:given], y[:given]))
        with pytest.raises(BookkeepingError, match=r"on all of the .* of another number"):
            optimizer.step()
        with pytest.raises(BookkeepingError, match="allows one step"):  # nor is it asked again
            train(model, optimizer, [(x, y)])
        assert len(engine.accountant) == 0
    batch = next(iter(loader))
    train(model, optimizer, [batch])
    before = engine.accountant.inner.to_json()
    with pytest.raises(BookkeepingError, match="allows one step"):
        train(model, optimizer, [batch])
    assert engine.accountant.inner.to_json() == before
    assert len(engine.accountant) == 1


def test_accumulated_backward_passes_are_refused():
    engine, model, optimizer, loader = private(nn.Linear(4, 3), data(8, 4), batch_size=8)
    model.allow_grad_accumulation()
    for batch in loader:
        backward(model, batch)
        backward(model, batch)
        with pytest.raises(BookkeepingError, match="one backward pass, got 2"):
            optimizer.step()
    assert len(engine.accountant) == 0


def test_other_parameters_than_planned_are_refused():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))
    engine, model, optimizer, loader = private(model, data(8, 4), batch_size=8)
    for batch in loader:
        backward(model, batch)
        model._module[0].weight.requires_grad_(False)
        with pytest.raises(ValueError, match=r"the 4 trainable parameters .* got 3"):
            optimizer.step()
    assert len(engine.accountant) == 0


def test_a_model_may_stay_unwrapped():
    model = nn.Linear(4, 3)
    engine, hooks, optimizer, loader = private(model, data(8, 4), batch_size=4, wrap_model=False)
    train(model, optimizer, loader)
    hooks.cleanup()
    assert len(engine.accountant) == 2


# Trap 12


def test_step_hooks_fire_at_each_release():
    _, model, optimizer, loader = private(nn.Linear(4, 3), data(9, 4), batch_size=9)
    fired = []
    optimizer.register_step_pre_hook(lambda *_: fired.append("before"))
    optimizer.register_step_post_hook(lambda *_: fired.append("after"))
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    with split(optimizer, loader, 3) as pieces:
        train(model, optimizer, pieces)
    assert fired == ["before", "after"]


def test_checkpoints_keep_the_ledger_and_run_no_code(tmp_path):
    path = tmp_path / "checkpoint.pt"
    engine, model, optimizer, loader = private(nn.Linear(4, 3), data(8, 4), batch_size=2)
    train(model, optimizer, loader)
    engine.save_checkpoint(path=path, module=model, optimizer=optimizer)
    engine.close()

    def resumed():
        return private(nn.Linear(4, 3), data(8, 4), batch_size=2)

    again, copy, optimizer, loader = resumed()
    again.load_checkpoint(path=path, module=copy, optimizer=optimizer)
    assert torch.equal(copy._module.weight, model._module.weight)
    assert again.accountant.inner.to_json() == engine.accountant.inner.to_json()
    train(copy, optimizer, loader)
    assert len(again.accountant) == 8
    with pytest.raises(RuntimeError, match="before the first step, got it after 8"):
        again.load_checkpoint(path=path, module=copy, optimizer=optimizer)
    again.close()

    saved = torch.load(path, weights_only=True)
    state = saved["privacy_accountant_state_dict"]
    assert state["history"] == engine.accountant.history
    for text, error, message in (
        (state["ledger"].replace('"steps": 4', '"steps": 1'), LedgerError, "integrity check"),
        (lap2.Accountant().compose(lap2.Gaussian(1.0), sampling_prob=1.0).to_json(), ValueError,
         "Laplace steps only"),
    ):  # fmt: skip
        torch.save({**saved, "privacy_accountant_state_dict": {**state, "ledger": text}}, path)
        fresh, copy, optimizer, _ = resumed()
        weight = copy._module.weight.clone()
        with pytest.raises(error, match=message):
            fresh.load_checkpoint(path=path, module=copy, optimizer=optimizer)
        assert torch.equal(copy._module.weight, weight)
        assert len(fresh.accountant) == 0
    with pytest.raises(ValueError, match="must be one of the accountant 'lap2'"):
        fresh.accountant.load_state_dict({"history": [], "mechanism": "rdp"})

    class Code:
        def __reduce__(self):
            return print, ("executed",)

    torch.save({**saved, "extra": Code()}, path)
    with pytest.raises(pickle.UnpicklingError, match="Weights only load failed"):
        fresh.load_checkpoint(path=path, module=copy)


def test_the_ledger_travels_in_the_optimizers_state_and_cannot_be_replaced(tmp_path):
    engine, model, optimizer, loader = private(nn.Linear(4, 3), data(8, 4), batch_size=2)
    train(model, optimizer, loader)
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    train(model, optimizer, loader)  # after it was saved
    again, model, optimizer, loader = private(nn.Linear(4, 3), data(8, 4), batch_size=2)
    state = torch.load(tmp_path / "optimizer.pt", weights_only=True)
    with pytest.raises(CheckpointError, match="the run is held by process"):
        optimizer.load_state_dict(state)
    engine.close()
    optimizer.load_state_dict(state)
    assert len(again.accountant) == 8
    train(model, optimizer, loader)
    assert len(again.accountant) == 12
    with pytest.raises(AttributeError, match="must not be replaced"):
        again.accountant = LaplaceAccountant()
    with pytest.raises(AttributeError):
        again.accountant.inner = lap2.Accountant()
    ordinary = torch.optim.SGD(nn.Linear(4, 3).parameters(), lr=0.1).state_dict()
    _, _, optimizer, _ = private(nn.Linear(4, 3), data(8, 4), batch_size=2)
    with pytest.raises(ValueError, match="must have the ledger of its run"):
        optimizer.load_state_dict(ordinary)


def test_a_checkpoint_is_loaded_whole_or_not_at_all(tmp_path):
    path = tmp_path / "checkpoint.pt"
    engine, model, optimizer, loader = private(nn.Linear(4, 3), data(8, 4), batch_size=2)
    train(model, optimizer, loader)
    engine.save_checkpoint(path=path, module=model, optimizer=optimizer)
    train(model, optimizer, loader)
    again, other, optimizer, _ = private(nn.Linear(4, 3), data(8, 4), batch_size=2)
    weight = other._module.weight.clone()
    with pytest.raises(ValueError, match="optimizer must be given to go on with a run"):
        again.load_checkpoint(path=path, module=other)
    with pytest.raises(CheckpointError, match="the run is held by process"):
        again.load_checkpoint(path=path, module=other, optimizer=optimizer)
    assert torch.equal(other._module.weight, weight)
    assert len(again.accountant) == 0
    engine.close()
    again.load_checkpoint(path=path, module=other, optimizer=optimizer)
    assert len(again.accountant) == 8  # with the steps that followed
    assert not torch.equal(other._module.weight, weight)

    engine.save_checkpoint(path=path, module=model)
    again, other, optimizer, _ = private(nn.Linear(4, 3), data(8, 4), batch_size=2)
    with pytest.raises(ValueError, match="must hold the state of the optimizer"):
        again.load_checkpoint(path=path, module=other, optimizer=optimizer)
    unused = PrivacyEngine()  # to look at the model, and at what it cost
    unused.load_checkpoint(path=path, module=other)
    assert len(unused.accountant) == 8


# Documents and examples


def test_examples_differ_by_an_import_and_an_argument_and_the_document_shows_it(request):
    folder = request.config.rootpath
    names = [f"examples/opacus_mnist_{kind}.py" for kind in ("before", "laplace")]
    before, after = ((folder / name).read_text().splitlines() for name in names)
    changes = list(difflib.unified_diff(before, after, *names, lineterm=""))
    shown = re.search(r"```diff\n(.*?)\n```", (folder / "docs/opacus.md").read_text(), re.DOTALL)
    assert [line.rstrip() for line in changes] == shown[1].splitlines()
    added = [line for line in changes[2:] if re.match(r"\+\s*\S", line)]
    assert len(added) == 2
    assert "import PrivacyEngine" in added[0]


@pytest.mark.filterwarnings("ignore:Secure RNG turned off:UserWarning")
@pytest.mark.filterwarnings("ignore:Optimal order is the largest alpha:UserWarning")
@pytest.mark.parametrize("kind", ["before", "laplace"])
def test_examples_train(kind, request, monkeypatch, capsys):
    script = request.config.rootpath / "examples" / f"opacus_mnist_{kind}.py"
    monkeypatch.setattr(sys, "argv", [str(script), "--epochs", "2", "--epsilon", "8"])
    runpy.run_path(str(script), run_name="__main__")
    accuracy, epsilon = re.findall(r"[\d.]+", capsys.readouterr().out.splitlines()[-1])[1:]
    assert float(accuracy) > 0.3
    assert 7.9 < float(epsilon) <= 8


def test_lap2_itself_imports_neither_torch_nor_opacus():
    check = "import sys, lap2; sys.exit(bool({'torch', 'opacus'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", check], check=False).returncode == 0
