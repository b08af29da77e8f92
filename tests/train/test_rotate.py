"""The basis of the noise: orthonormal for every size, and good at spreading."""

import math

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lap2.mechanism import Joint, Laplace
from lap2.noise import SecureLaplace
from lap2.signal import block_size, spread_size
from lap2.train import PrivacyEngine
from lap2.train import rotate as module
from lap2.train.rotate import gather, spread
from lap2.train.rounding import _TURN, UNIT

from ..fakegpu import DEVICE, FakeGpu
from ..helpers import mp, real, whole

SIZES = [1, 10, 31, 32, 100, 1000, 16_384, 26_010, 70_001, 600_000]


def without_numba(monkeypatch):
    monkeypatch.setattr(module, "kernel", lambda _: None)


@pytest.mark.parametrize("size", SIZES)
def test_distances_stay_and_the_way_back_is_exact(size):
    torch.manual_seed(size)
    one, other = torch.randn(2, size, dtype=torch.float64)
    turned = spread([one]), spread([other])
    assert turned[0].dtype == torch.float64
    distance = float((turned[0] - turned[1]).norm())
    assert distance == pytest.approx(float((one - other).norm()), rel=1e-13)
    back = torch.empty_like(one)
    gather(turned[0], [back])
    torch.testing.assert_close(back, one, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("size", SIZES)
def test_little_is_added_and_few_coordinates_are_left_alone(size):
    assert size <= spread_size(size) <= size * 17 / 16
    vector = torch.randn(size)
    assert len(spread([vector])) == spread_size(size)
    assert torch.equal(spread([vector])[:size], vector.double()) == (size < 32)


@pytest.mark.parametrize("size", SIZES)
def test_what_comes_back_is_multiplied(size, monkeypatch):
    vector, back = torch.randn(size, dtype=torch.float64), torch.empty(size, dtype=torch.float64)
    for _ in range(2):
        gather(spread([vector]), [back], 1 / 37)
        torch.testing.assert_close(back, vector / 37, rtol=1e-12, atol=1e-12)
        without_numba(monkeypatch)


def test_it_is_an_orthonormal_matrix():
    rows = torch.stack([spread([row]) for row in torch.eye(300)])
    torch.testing.assert_close(rows @ rows.T, torch.eye(300, dtype=torch.float64))


def exact_turn(flat, block):
    """Exactly, in whole numbers, but for the factor that makes it orthonormal."""
    _, signs = module._basis(block, torch.device("cpu"))
    rows = whole(flat).reshape(block, -1) * signs.int().numpy().astype(object)
    half = 1
    while half < block:
        pairs = rows.reshape(-1, 2, half, rows.shape[1])
        rows = np.stack([pairs[:, 0] + pairs[:, 1], pairs[:, 0] - pairs[:, 1]], axis=1)
        rows, half = rows.reshape(block, -1), 2 * half
    return rows.flatten()


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize(("size", "block"), [(1000, 32), (1500, 64), (16_384, 1024)])
def test_what_it_rounds_is_within_the_constant_of_the_proof(size, block, compiled, monkeypatch):
    if not compiled:
        without_numba(monkeypatch)
    assert block_size(size) == block
    torch.manual_seed(size)
    same, ordinary = torch.ones(size, dtype=torch.float64) / 3, torch.randn(size).double()
    for flat in (same, ordinary, ordinary.exp() ** 9):
        flat = torch.cat([flat, torch.zeros(-size % block)])  # noqa: PLW2901 - filled up
        exact = [real(value) / mp.sqrt(block) for value in exact_turn(flat, block)]
        found = map(real, whole(spread([flat[:size]])))
        error = sum((one - other) ** 2 for one, other in zip(found, exact, strict=True))
        length = sum(value**2 for value in exact)
        assert mp.sqrt(error) <= _TURN * UNIT * mp.sqrt(length)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("size", [32, *SIZES[4:], 1_500_003])
def test_compiled_it_is_the_same(size, threads, monkeypatch):
    pytest.importorskip("numba")
    assert module._turn_compiled(torch.zeros(4, 3, dtype=torch.float64), 1.0, False)
    vector, ways, back = torch.randn(size), [], []
    monkeypatch.setattr(module, "_WORTH_THREADS", 0)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    for _ in range(2):
        ways.append(spread([vector]))
        back.append(torch.empty(size, dtype=torch.float64))
        gather(torch.arange(float(len(ways[0])), dtype=torch.float64) / size, back[-1:])
        without_numba(monkeypatch)
    torch.testing.assert_close(*ways, rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(*back, rtol=1e-13, atol=1e-11)


def test_a_vector_with_gaps_is_turned_back_too():
    vector, back = torch.randn(1000), torch.empty(1000)
    turned = torch.empty(2 * spread_size(1000), dtype=torch.float64)[::2]
    gather(turned.copy_(spread([vector])), [back])
    torch.testing.assert_close(back, vector)


def test_in_pieces_it_is_the_same(monkeypatch):
    without_numba(monkeypatch)
    vector = torch.randn(70_001)
    whole = spread([vector])
    monkeypatch.setattr(module, "_CHUNK", 5000)
    assert torch.allclose(spread([vector]), whole, rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("scale", [1.0, 1e-42, 1e42])
def test_on_a_device_it_is_the_same_and_only_the_way_back_is_in_float32(dtype, scale, monkeypatch):
    vector, back = torch.randn(70_001, dtype=torch.float64), torch.empty(70_001, dtype=dtype)
    turned, seen, mixed = spread([vector]), [], module._mixed

    def remember(part, matrices):
        seen.append((part.dtype, matrices[0].dtype))
        return mixed(part, matrices)

    monkeypatch.setattr(module, "_mixed", remember)
    with FakeGpu() as gpu:
        released, there = spread([(vector * scale).to(DEVICE)]), back.to(DEVICE)
        torch.testing.assert_close(released.cpu() / scale, turned, rtol=1e-12, atol=1e-12)
        gpu.reads.clear()
        gather(released, [there], factor=1 / scale)
        assert not gpu.reads
        torch.testing.assert_close(there.cpu(), vector.to(dtype), rtol=1e-5, atol=1e-5)
    assert set(seen[: len(seen) // 2]) == {(torch.float64, torch.float64)}
    assert set(seen[len(seen) // 2 :]) == {(dtype, dtype)}


def test_tensors_of_any_layout_and_type_come_back_where_they_were():
    images = torch.randn(40, 3, 5, 5).to(memory_format=torch.channels_last)
    tensors = [images, torch.randn(7, dtype=torch.float64), torch.randn(64, 100).T]
    copies = [torch.zeros_like(t) for t in tensors]
    gather(spread(tensors), copies)
    for tensor, copy in zip(tensors, copies, strict=True):
        assert copy.dtype == tensor.dtype
        torch.testing.assert_close(copy, tensor)


@pytest.mark.parametrize("size", [1000, 26_010, 1_000_000])
def test_what_is_in_few_coordinates_is_spread_over_all(size):
    """A gradient whose last layer holds nearly everything, and one that is the same everywhere."""
    layer = torch.zeros(size)
    layer[-min(size // 80, 400) :] = 5.0
    for vector in (layer, torch.ones(size)):
        turned = spread([vector])
        level = math.sqrt(float((turned**2).mean()))
        assert float(turned.abs().max()) < 6 * level
        kurtosis = float((turned**4).mean()) / level**4
        assert kurtosis == pytest.approx(3, abs=1.0)


class Blind:
    """Adds nothing, and remembers what it was given."""

    is_secure = True

    def __init__(self):
        self.seen = []

    def added_sensitivity(self, *_):
        return 0.0

    def add(self, arrays, _):
        self.seen.append([array.clone() for array in arrays])
        return 0.0


def one_step(features, *, clip=1.0, mechanism="laplace", sampler=None, **release):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(40, 30), nn.ReLU(), nn.Linear(30, 4))
    labels = torch.arange(len(features)) % 4
    engine = PrivacyEngine(sampler=sampler or Blind())
    model, optimizer, loader = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(TensorDataset(features, labels), batch_size=len(features)),
        noise_multiplier=1.0,
        max_grad_norm=clip,
        mechanism=mechanism,
        **release,
    )
    for x, y in loader:
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    return engine, model


def test_neighbours_differ_by_at_most_the_clip_in_the_released_basis():
    torch.manual_seed(1)
    features, distances = torch.randn(30, 40), []
    for size in (1.0, -100.0, -100.0):
        features[-1] *= size
        sums = []
        for records in (features, features[:-1]):
            sampler = Blind()
            one_step(records, tau=1000.0, sampler=sampler)
            (released,) = sampler.seen
            (flat,) = released
            sums.append(flat)
        assert len(sums[0]) == spread_size(30 * 41 + 4 * 31)
        distances.append(float((sums[0] - sums[1]).norm()))
    assert 0.99 < max(distances) <= 1.0


def test_without_noise_a_wide_clamp_leaves_the_gradient_as_it_is():
    features = torch.randn(30, 40)
    _, plain = one_step(features, release="values")
    _, turned = one_step(features, tau=1000.0)
    for one, other in zip(plain.parameters(), turned.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)


def test_every_coordinate_of_the_gradient_gets_the_noise_that_is_accounted():
    features = torch.randn(30, 40)
    _, bare = one_step(features, tau=1000.0)
    _, noisy = one_step(features, tau=1000.0, sampler=SecureLaplace())
    pairs = zip(bare.parameters(), noisy.parameters(), strict=True)
    noise = 30 * torch.cat([(other.grad - one.grad).flatten() for one, other in pairs])
    assert (noise != 0).all()
    assert float(noise.var()) == pytest.approx(2, rel=0.3)
    quarters = [float(quarter.var()) for quarter in noise.chunk(4)]
    assert quarters == pytest.approx([2] * 4, rel=0.5)


def test_the_ledger_has_the_coordinates_that_get_noise():
    features = torch.randn(30, 40)
    engine, _ = one_step(features, tau=1000.0)
    (entry,) = engine.accountant.ledger
    assert entry.mechanism == Laplace(entry.mechanism.noise_multiplier, spread_size(1354))
    engine, _ = one_step(features, release="values")
    (entry,) = engine.accountant.ledger
    assert entry.mechanism.dimension == 1354


def test_layers_that_are_clipped_apart_are_rotated_apart():
    sampler = Blind()
    features = torch.randn(30, 40)
    engine, model = one_step(features, tau=1000.0, clip=[1.0, 0.5], sampler=sampler)
    (entry,) = engine.accountant.ledger
    sizes = [spread_size(30 * 41), spread_size(4 * 31)]
    assert isinstance(entry.mechanism, Joint)
    assert [group.dimension for group in entry.mechanism.groups] == sizes
    assert [len(flat) for flat in sampler.seen[0]] == sizes
    layers = [[model[0].weight, model[0].bias], [model[2].weight, model[2].bias]]
    bounds = (30 * 1.0, 30 * 0.5)
    for flat, layer, bound in zip(sampler.seen[0], layers, bounds, strict=True):
        assert 0 < float(flat.norm()) <= bound
        assert len(flat) == spread_size(sum(p.numel() for p in layer))


@pytest.mark.parametrize("mechanism", ["laplace-l1", "gaussian"])
def test_only_laplace_noise_on_l2_clipped_sums_is_rotated(mechanism):
    sampler = Blind()
    one_step(torch.randn(30, 40), mechanism=mechanism, sampler=sampler)
    assert [tuple(t.shape) for t in sampler.seen[0]] == [(30, 40), (30,), (4, 30), (4,)]
