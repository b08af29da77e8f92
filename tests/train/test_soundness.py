"""The ways private training has gone wrong elsewhere: each check passes here and fails when broken.

Every check is a function that raises AssertionError. It is run on the real engine, and again with
one part replaced by a mistake that a real library has made.
"""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lap2.noise import SecureLaplace
from lap2.train import BookkeepingError, PoissonLoader, PrivacyEngine
from lap2.train.arena import Arena
from lap2.train.gradients import Dense, Outer, Rows, Size, Tied
from lap2.train.rounding import SHRINK
from lap2.train.step import PrivateStep

from ..helpers import NoNoise, norms, weighted_sum

CLIP = 0.5


def make(*, records=400, batch_size=40, width=60, noise=2.0, sampler=None, **kwargs):
    """A model of two layers, and a data set of ones."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(width, width), nn.Linear(width, 3))
    engine = PrivacyEngine(sampler=sampler)
    loader = DataLoader(TensorDataset(torch.ones(records, width)), batch_size=batch_size)
    model, optimizer, loader = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.0),
        data_loader=loader,
        noise_multiplier=noise,
        max_grad_norm=CLIP,
        release="values",
        **{"rehearse": False, **kwargs},
    )
    return engine, model, optimizer, loader


def steps(*, weight=0.0, limit=None, **kwargs):
    """Released sums (the gradient times the divisor), one by one, with the size of their batch."""
    engine, model, optimizer, loader = make(**kwargs)
    for count, (x,) in enumerate(loader):
        if count == limit:
            break
        (weight * model(x).flatten(1).sum(1)).sum().backward()
        optimizer.step()
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
        yield engine, [40 * grad for grad in grads], loader.piece.size


def check_scale():
    """Failure 1: the mean absolute value of the noise is b = C times the multiplier."""
    values = [torch.cat([g.flatten() for g in grads]) for _, grads, _ in steps()]
    seen = torch.cat(values).abs()
    assert abs(seen.mean() / (CLIP * 2.0) - 1) < 6 / math.sqrt(seen.numel())


def check_every_coordinate_is_noised_once():
    """Failure 2: no parameter is without noise, none shares it, and the ledger knows how many."""
    for engine, grads, _ in steps(limit=2):
        flat = torch.cat([g.flatten() for g in grads])
        (entry,) = engine.accountant.ledger
        assert entry.mechanism.dimension == flat.numel()
        assert (flat != 0).all()
        assert len(flat.unique()) > 0.99 * flat.numel()
        for grad in grads:
            if grad.numel() > 100:
                assert abs(grad.abs().mean() - 1.0) < 6 / math.sqrt(grad.numel())


def check_noise_is_fresh():
    """Failure 13: two steps, and two engines with the same torch seed, never share noise."""
    drawn = [grads[0] for _ in range(2) for _, grads, _ in steps(limit=2)]
    for i, one in enumerate(drawn):
        for other in drawn[:i]:
            assert (one == other).double().mean() < 0.01


def check_divisor():
    """Failure 10: the divisor is the public expected batch size, whatever the batch."""
    sizes = set()
    for _, grads, size in steps(weight=1.0, sampler=NoNoise()):
        total = torch.cat([g.flatten() for g in grads]).norm()
        assert total == pytest.approx(CLIP * size, rel=1e-3)
        sizes.add(size)
    assert len(sizes) > 3


def check_sampling():
    """Failure 11: each record is in independently, with the probability in the ledger."""
    engine, _, _, loader = make(records=50, batch_size=15)
    draws = 4000
    seen = np.zeros((draws, 50))
    for row in seen:
        row[loader.sample()] = 1
    assert loader.sampling_prob == engine._step.run.step.sampling_prob == 0.3
    noise = math.sqrt(0.3 * 0.7 / draws)
    assert abs(seen.mean(axis=0) - 0.3).max() < 5 * noise
    assert seen.sum(axis=1).var() == pytest.approx(50 * 0.3 * 0.7, rel=0.15)
    pairs = np.corrcoef(seen.T)[np.triu_indices(50, 1)]
    assert abs(pairs).max() < 6 / math.sqrt(draws)


def check_ledger_length():
    """Failures 9 and 14: every batch counts, also the empty ones."""
    empty = 0
    for count, (engine, grads, size) in enumerate(steps(records=400, batch_size=1, limit=60)):
        empty += size == 0
        assert engine.accountant.steps == count + 1
        assert all((grad != 0).any() for grad in grads)
    assert empty > 5


def check_stand_in_contributes_nothing():
    """The record that stands in for an empty sample was not sampled, so it must not count."""
    empty = 0
    for _, grads, size in steps(weight=1.0, batch_size=1, sampler=NoNoise(), limit=60):
        empty += size == 0
        total = torch.cat([g.flatten() for g in grads]).norm()
        assert total / 40 == pytest.approx(CLIP * size, rel=1e-3)
    assert empty > 5


def check_bounded_contribution():
    """Failure 8 and the clip itself: one record, however huge, moves the sum by at most C."""
    for value in (1.0, 1e18, math.inf, math.nan):
        for _, grads, size in steps(weight=value, sampler=NoNoise(), limit=3):
            total = torch.cat([g.flatten() for g in grads]).double().norm()
            assert total <= CLIP * size
            assert total == 0 or value < 1e30


CHECKS = {f.__name__: f for f in (
    check_scale, check_every_coordinate_is_noised_once, check_noise_is_fresh, check_divisor,
    check_sampling, check_ledger_length, check_stand_in_contributes_nothing,
    check_bounded_contribution,
)}  # fmt: skip


@pytest.mark.parametrize("name", CHECKS)
def test_the_engine_is_sound(name):
    CHECKS[name]()


def scaled(factor):
    add = SecureLaplace.add
    return lambda self, array, scale: add(self, array, scale * factor)


def all_but_one(self, array, scale, add=SecureLaplace.add):
    return add(self, array[:-1], scale)


def shared(self, array, scale, add=SecureLaplace.add):
    noise = [torch.zeros(60, 60)]
    add(self, noise, scale)
    for tensor in array:
        tensor.add_(noise[0].flatten()[: tensor.numel()].reshape(tensor.shape))
    return 0.0


def seeded(self, array, scale):
    return self._add_with_key(array, scale, bytes(32))


def by_realised_batch(release):
    def broken(self):
        self.divisor = max(1, self.loader.piece.size)
        release(self)

    return broken


def fixed_batch(self):
    return np.random.default_rng().choice(50, 15, replace=False)


def other_probability(self):
    return np.flatnonzero(np.random.default_rng().random(50) < 0.33)


def one_mask(self):
    return np.flatnonzero(np.random.default_rng(0).random(50) < 0.3)


def skip_empty(advance):
    return lambda self: self.loader.piece.size > 0 and advance(self)


def counted(take):
    def broken(self):
        piece = take(self)
        return replace(piece, size=max(1, piece.size), total=max(1, piece.total))

    return broken


def unclipped(values, _power, dtype):
    return Size(*torch.zeros(2, values._g.shape[0], dtype=dtype))


MISTAKES = [
    ("check_scale", SecureLaplace, "add", scaled(1 / math.sqrt(2))),
    ("check_scale", SecureLaplace, "add", scaled(CLIP)),
    ("check_scale", SecureLaplace, "add", scaled(1 / 40)),
    ("check_scale", SecureLaplace, "add", scaled(0.95)),
    ("check_every_coordinate_is_noised_once", SecureLaplace, "add", all_but_one),
    ("check_every_coordinate_is_noised_once", SecureLaplace, "add", shared),
    ("check_noise_is_fresh", SecureLaplace, "add", seeded),
    ("check_divisor", PrivateStep, "_release", by_realised_batch(PrivateStep._release)),
    ("check_sampling", PoissonLoader, "sample", fixed_batch),
    ("check_sampling", PoissonLoader, "sample", other_probability),
    ("check_sampling", PoissonLoader, "sample", one_mask),
    ("check_ledger_length", PrivateStep, "advance", skip_empty(PrivateStep.advance)),
    ("check_stand_in_contributes_nothing", PoissonLoader, "take", counted(PoissonLoader.take)),
    ("check_bounded_contribution", Outer, "size", unclipped),
]


@pytest.mark.parametrize(("name", "owner", "attribute", "mistake"), MISTAKES)
def test_the_check_fails_on_the_mistake(name, owner, attribute, mistake, monkeypatch):
    monkeypatch.setattr(owner, attribute, mistake)
    with pytest.raises(AssertionError):
        CHECKS[name]()


SIZE = 125_000_000
EXACT = 2.0**-22
"""By which share of itself a norm may be too small: clipping aims four times as far below."""


@pytest.mark.parametrize("kind", ["constant", "random"])
def test_norms_are_right_at_125_million_coordinates(kind):
    """Failure 5: torch's own float32 norm is 1 to 8% too small there."""
    torch.manual_seed(0)
    values = torch.full((1, SIZE), 0.01) if kind == "constant" else torch.randn(1, SIZE)
    truth = math.sqrt(sum(float(part.double().square().sum()) for part in values[0].split(1 << 22)))
    found = float(norms(Dense(torch.empty(SIZE), values)))
    assert found == pytest.approx(truth, rel=EXACT)


@pytest.mark.parametrize(
    ("positions", "rows", "columns", "formed"),
    [(1, 2, 4_000_000, False), (3, 2, 4_000_000, True), (3, 4000, 4000, False), (2000, 2, 4, True)],
)
def test_norms_of_long_rows_are_right(positions, rows, columns, formed):
    """Failures 5 and 6: rank-one, ghost and direct norms of constants, where rounding is worst."""
    inputs = torch.full((1, positions, columns), 0.01)
    grads = torch.full((1, positions, rows), 0.01)
    constant = float(inputs[0, 0, 0])
    truth = constant * constant * positions * math.sqrt(rows * columns)
    outer = Outer(torch.empty(rows, columns), inputs, grads, arena=Arena())
    assert outer._formed == formed
    assert truth * (1 - EXACT) <= float(norms(outer)) <= truth * (1 + 1e-3)


@pytest.mark.parametrize("layout", ["contiguous", "every second", "transposed"])
@pytest.mark.parametrize("positions", [1, 2])
@pytest.mark.parametrize("width", [512, 2048, 8192])
def test_norms_lose_no_small_numbers(width, positions, layout):
    """Each square is half a unit of the sum so far: added one by one, all of them vanish."""
    vector = torch.full((2, 1, width), 2.0**-12)
    vector[..., : 8 if layout == "contiguous" else 1] = 1.0  # one in each of eight lanes
    vector = vector.repeat(1, positions, 1)
    if layout == "every second":
        vector = torch.stack([vector, vector], dim=3)[..., 0]
    elif layout == "transposed":
        vector = vector.mT.contiguous().mT
    outer = Outer(torch.empty(width, width), vector, vector, arena=Arena())
    dense = Dense(torch.empty(width), vector[:, 0])
    truth = vector[0, 0].double().square().sum()
    assert not outer._formed
    assert (norms(outer) >= positions * truth * (1 - EXACT)).all()
    assert (norms(dense) >= truth.sqrt() * (1 - EXACT)).all()


def test_sums_that_overflow_downwards_are_not_small():
    """In float32, minus infinity on the way: the example must be skipped, not taken for small."""
    terms = torch.tensor([-2.5836368e18, 1.9145362e18, 8.8524364e18, 1.7014939e19, 1.1642629e19])
    terms = torch.cat([terms, torch.tensor([-1.0146131e19])])
    inputs, grads = torch.zeros(1, 6, 64), torch.zeros(1, 6, 48)
    inputs[0, :, 0], grads[0, :, 0] = terms / 2**30, 2.0**30
    outer = Outer(torch.empty(48, 64), inputs, grads, arena=Arena())
    looked = torch.zeros(1, 6, 8)
    looked[0, :, 0] = terms
    rows = Rows(torch.empty(3, 8), torch.zeros(1, 6, dtype=torch.long), looked)
    truth = abs(float(terms.double().sum()))
    for found in (outer, rows):
        assert float(norms(found)) >= truth


@pytest.mark.parametrize("kind", ["outer", "rows", "tied"])
def test_what_cancels_stays_within_its_l1_clip(kind):
    """Rounding leaves more of large terms that cancel than their l1 norm shows."""
    torch.manual_seed(0)
    inputs = 1e8 * torch.randn(1, 4, 64)
    inputs[:, 2], inputs[:, 3] = -(inputs[:, 0] + inputs[:, 1]), 0.7
    index = torch.zeros(1, 4, dtype=torch.long)
    outer = Outer(torch.empty(48, 64), inputs, torch.ones(1, 4, 48), arena=Arena())
    rows = Rows(outer.param, index, inputs)
    found = {"outer": outer, "rows": rows, "tied": Tied(rows, outer)}[kind]
    weight = (SHRINK / norms(found, 1)).clamp(max=1.0)
    assert float(weighted_sum(found, weight).abs().sum()) <= 1.0


def test_norms_of_repeated_rows_are_right():
    grads = torch.full((1, 512, 768), 0.01)
    found = norms(Rows(torch.empty(5, 768), torch.zeros(1, 512, dtype=torch.long), grads))
    truth = float(grads[0, 0, 0]) * 512 * math.sqrt(768)
    assert truth * (1 - EXACT) <= float(found) <= truth * (1 + 1e-6)


@pytest.mark.parametrize("step_too", [False, True])
def test_sums_under_autocast_are_not_in_low_precision(step_too):
    """Failure 7: sums in bfloat16 stop growing at 256 equal terms, or grow too far."""
    engine, model, optimizer, loader = make(records=2048, batch_size=2048, sampler=NoNoise())
    for (x,) in loader:
        with torch.autocast("cpu", torch.bfloat16):
            losses = model(x).flatten(1).sum(1)
        engine.backward(losses)
        with torch.autocast("cpu", torch.bfloat16, enabled=step_too):
            optimizer.step()
    total = 2048 * torch.cat([p.grad.double().flatten() for p in model.parameters()]).norm()
    assert 0.999 * CLIP * 2048 <= total <= CLIP * 2048
    assert engine.accountant.steps == 1


def test_channels_last_inputs_give_the_same_sum():
    """Norms 30% to 100 times too small have been seen elsewhere."""
    torch.manual_seed(1)
    images = torch.randn(12, 3, 9, 9)
    released = []
    for form in (torch.contiguous_format, torch.channels_last):
        torch.manual_seed(2)
        model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 3), nn.Flatten())
        engine = PrivacyEngine(sampler=NoNoise())
        model, optimizer, loader = engine.make_private(
            module=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.0),
            data_loader=DataLoader(TensorDataset(images), batch_size=12),
            noise_multiplier=1.0,
            max_grad_norm=CLIP,
            release="values",
            loss_reduction="sum",
            channels_last=form is torch.channels_last,
        )
        for (x,) in loader:
            model(x.to(memory_format=form)).square().sum().backward()
            optimizer.step()
        released.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    torch.testing.assert_close(released[0], released[1], rtol=1e-4, atol=1e-6)
    assert 12 * released[0].norm() > CLIP


def test_small_inputs_with_large_gradients_do_not_hide_from_the_norm():
    """The square of 4.5e-23 vanishes in float32; times a gradient of 5e21 it must not."""
    torch.manual_seed(3)
    for positions in (1, 4):
        model = nn.Linear(3, 2, bias=False)
        x = 4.5e-23 * torch.rand(1, positions, 3)
        x[:, 1:] = 1.0
        engine = PrivacyEngine(sampler=NoNoise())
        model, optimizer, loader = engine.make_private(
            module=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.0),
            data_loader=DataLoader(TensorDataset(x), batch_size=1),
            noise_multiplier=1.0,
            max_grad_norm=CLIP,
            release="values",
            loss_reduction="sum",
        )
        for (batch,) in loader:
            large = torch.tensor([3e22, 1.0, 1.0, 1.0])[:positions]
            (model(batch) * large[:, None]).sum().backward()
            optimizer.step()
        assert 0.99 * CLIP < model.weight.grad.double().norm() <= CLIP


@pytest.mark.parametrize("before", [True, False])
def test_a_scheduler_does_not_hide_the_private_step(before):
    """Schedulers put a step of their own on the optimizer, made before or after the engine."""
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    if before:
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    engine = PrivacyEngine()
    model, optimizer, loader = engine.make_private(
        module=model,
        optimizer=optimizer,
        data_loader=DataLoader(TensorDataset(torch.ones(12, 4)), batch_size=4),
        noise_multiplier=1.0,
        max_grad_norm=CLIP,
    )
    if not before:
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    count = rehearsed = 0
    for (x,) in loader:
        weights = model.weight.detach().clone()
        (0 * model(x)).sum().backward()
        optimizer.step()
        scheduler.step()
        count, rehearsed = count + loader.ends_batch, rehearsed + (not loader.ends_batch)
        assert engine.accountant.steps == count
        assert torch.equal(weights, model.weight) != loader.ends_batch  # moved by noise alone
    assert (count, rehearsed > 3) == (3, True)
    assert scheduler.get_last_lr() == [0.0625]


def test_a_replaced_step_and_new_parameters_are_refused():
    model, extra = nn.Linear(4, 2), nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    setup = {
        "module": model,
        "data_loader": DataLoader(TensorDataset(torch.ones(12, 4)), batch_size=4),
        "noise_multiplier": 1.0,
        "max_grad_norm": CLIP,
    }
    optimizer.step = lambda: None
    with pytest.raises(ValueError, match="its class's own step"):
        PrivacyEngine().make_private(optimizer=optimizer, **setup)
    del optimizer.step
    engine = PrivacyEngine()
    model, optimizer, loader = engine.make_private(optimizer=optimizer, **setup)
    with pytest.raises(ValueError, match="trained without noise"):
        optimizer.add_param_group({"params": extra.parameters()})
    optimizer.param_groups[0]["params"].extend(extra.parameters())
    before = extra.weight.detach().clone()
    for (x,) in loader:
        extra(model(x)).sum().backward()
        with pytest.raises(BookkeepingError, match="trained without noise"):
            optimizer.step()
        break
    assert torch.equal(before, extra.weight)
    assert engine.accountant.steps == 0


def test_tiny_times_huge_stays_within_its_clip():
    """A weighted factor of a few units in the last place of all would round up by a third."""
    inputs = torch.full((1, 1, 2), 2e38)
    grads = torch.full((1, 1, 2), 3 * 2.0**-149)
    outer = Outer(torch.empty(2, 2), inputs, grads, arena=Arena())
    norm = norms(outer)
    truth = 2 * float(inputs[0, 0, 0]) * 3 * 2.0**-149
    torch.testing.assert_close(norm, torch.tensor([truth], dtype=torch.float64))
    clipped = weighted_sum(outer, torch.tensor([0.25]))
    assert torch.linalg.vector_norm(clipped) <= 0.25 * norm * (1 + EXACT)


@pytest.mark.parametrize(
    "records",
    [
        torch.randn(50, 3),
        torch.randn(3, 50).T,
        torch.randn(50, 2, 4, 4).to(memory_format=torch.channels_last),
        torch.randn(50, 3, dtype=torch.bfloat16),
        torch.randn(50, 3, requires_grad=True),
        torch.arange(50),
    ],
    ids=["rows", "columns", "images", "bfloat16", "leaf", "labels"],
)
def test_a_batch_has_the_rows_that_were_sampled(records, monkeypatch):
    loader = PoissonLoader(TensorDataset(records), sampling_prob=0.2, steps=5)
    sampled = [np.array([3, 7, 20]), np.array([49]), np.array([], dtype=np.int64)]
    monkeypatch.setattr(loader, "sample", iter([*sampled, *sampled]).__next__)
    for (batch,), index in zip(loader, [*sampled, *sampled[:2]], strict=True):
        shown = index if index.size else np.array([0])  # a record stands in
        assert torch.equal(batch, records[torch.from_numpy(shown)])
        assert loader.piece.size == index.size
        assert batch.dtype == records.dtype
