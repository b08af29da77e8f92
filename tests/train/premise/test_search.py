"""A few trials of the search in benchmarks/premise.py, and whether it finds what it should."""

import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from lap2.train.arena import Arena
from lap2.train.clip import Clipping
from lap2.train.gradients import Outer

from .helpers import assert_bounded, private, rows

sys.path.append(str(Path(__file__).parents[3] / "benchmarks"))
premise = pytest.importorskip("premise")


def searched(trials, seed=0):
    found = premise.search(premise.FAMILIES, trials=trials, seconds=0, seed=seed)
    return [f.trial for tried in found.values() for f in tried]


def test_no_record_moves_a_release_too_far():
    trials = searched(44)
    assert not [t for t in trials if t.is_violation]
    assert sum(bool(t.refused) for t in trials) < 7
    assert sum(t.moved > 0.9 for t in trials) > 12  # the clip was reached


def test_the_search_finds_a_clip_that_is_a_little_too_large(monkeypatch):
    monkeypatch.setattr("lap2.train.clip.SHRINK", 1.001)
    assert sum(t.moved > 1 + t.rho for t in searched(22)) > 3


def test_the_search_finds_weights_that_depend_on_how_many_records_there_are(monkeypatch):
    clipped = Clipping._clipped

    def depends(*args):
        found = clipped(*args)
        return found._replace(weights=found.weights * (1 - 0.1 / len(found.weights)))

    monkeypatch.setattr(Clipping, "_clipped", depends)
    assert sum(t.rest > 1e-3 for t in searched(22)) > 2


@pytest.mark.parametrize("clip", [1e-8, 1e-20])
@pytest.mark.parametrize(("positions", "width"), [(64, 13), (100, 13), (16, 13)])
def test_where_a_record_lies_in_memory_does_not_matter(positions, width, clip):
    """Without the first record, which gives nothing, the others lie elsewhere.

    What their terms leave when they cancel is made of rounding errors, which depend on that.
    """
    half, generator = positions // 2, torch.Generator().manual_seed(1)
    x = 1 + torch.rand(64, half, width, generator=generator).repeat(1, 2, 1)
    grads = torch.randn(64, half, 3, generator=generator)
    grads = torch.cat([grads, -grads], dim=1)
    x[0] = grads[0] = 0

    def run(data):
        torch.manual_seed(0)
        made = private(nn.Linear(width, 3, bias=False), data, clip=clip, rehearse=False)
        return made.train(lambda model, batch: (model(batch[0]) * batch[1]).flatten(1).sum(1))

    assert assert_bounded(run, rows(x, grads), rows(x, grads, drop=[0])) < 1e-3


def test_nor_does_it_for_a_norm():
    """Of terms that cancel so far that products in float32 are just good enough, or not."""
    positions, width, outputs = 7, 123, 61
    generator = torch.Generator().manual_seed(0)
    left = (64 * (width + outputs + 8) * torch.finfo(torch.float32).eps) ** 0.5
    left = 6 * left / (1 - left) + 1e-5 * torch.randn(4096, 1, generator=generator)
    factors = torch.tensor([1.0, -1, 1, -1, 1, -1, 0]).repeat(4096, 1)
    factors[:, -1:] = left
    a = 1 + torch.rand(4096, 1, width, generator=generator).repeat(1, positions, 1)
    g = factors[:, :, None] * (1 + torch.rand(4096, 1, outputs, generator=generator))
    param = torch.zeros(outputs, width)

    def norms(a, g):
        outer = Outer(param, a.clone(), g.clone(), arena=Arena())
        return outer.size(2, torch.float64).norms

    torch.testing.assert_close(norms(a, g)[1:], norms(a[1:], g[1:]), rtol=1e-9, atol=0)
