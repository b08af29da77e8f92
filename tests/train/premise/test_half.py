"""Half precision: the size of a batch reaches the release through no rounded number."""

import contextlib

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own custom
from torch import nn

from .helpers import assert_bounded, assert_refused, private, rows

WIDTH, CLASSES, CLIP = 16, 2, 1.5

PRECISIONS = {
    "float32": (torch.float32, None),
    "bfloat16": (torch.bfloat16, None),
    "float16": (torch.float16, None),
    "bfloat16 by autocast": (torch.float32, torch.bfloat16),
    "float16 by autocast": (torch.float32, torch.float16),
}
HALF = [name for name in PRECISIONS if name != "float32"]


def data(records, kind, *, alike, drop=()):
    maker = torch.Generator().manual_seed(1)
    x = 0.45 * torch.randn(records, WIDTH, generator=maker)  # their gradients are hardly clipped
    y = torch.randint(0, CLASSES, (records,), generator=maker)
    if alike:
        x, y = x[:1].expand(records, -1), y[:1].expand(records)
    return rows(x.to(PRECISIONS[kind][0]), y, drop=drop)


def classifier(kind):
    torch.manual_seed(0)
    return nn.Linear(WIDTH, CLASSES).to(PRECISIONS[kind][0])


def losses_in(kind, reduction):
    lower = PRECISIONS[kind][1]

    def losses(model, batch):
        x, y = batch
        casting = torch.autocast("cpu", lower) if lower else contextlib.nullcontext()
        with casting:
            return F.cross_entropy(model(x), y, reduction=reduction)

    return losses


@pytest.mark.parametrize("alike", [True, False])
@pytest.mark.parametrize("records", [8, 251, 3000])
@pytest.mark.parametrize("kind", HALF)
def test_a_mean_in_half_precision_is_refused(kind, records, alike):
    """One over the size of the batch, rounded, moves the gradients of all records."""
    made = private(classifier(kind), data(records, kind, alike=alike), clip=CLIP)
    assert_refused(made, losses_in(kind, "mean"), r"engine\.backward")


@pytest.mark.parametrize("records", [8, 251])
@pytest.mark.parametrize("lower", [torch.bfloat16, torch.float16])
def test_so_it_is_where_only_the_loss_is_in_half_precision(lower, records):
    def loss(model, batch):
        return F.cross_entropy(model(batch[0]).to(lower), batch[1])

    made = private(classifier("float32"), data(records, "float32", alike=True), clip=CLIP)
    assert_refused(made, loss, r"engine\.backward")


@pytest.mark.parametrize("lower", [torch.bfloat16, torch.float16])
def test_what_is_in_half_precision_between_layers_that_are_not_is_no_reason_to_refuse(lower):
    """Its rounding is not taken for other records."""

    class Between(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(WIDTH, 64), nn.Linear(64, CLASSES)

        def forward(self, x):
            h = torch.tanh(self.first(x)).to(lower)
            return self.last(((h[:, None] @ h[:, :, None])[:, 0] * h).float())

    torch.manual_seed(0)
    made = private(Between(), data(251, "float32", alike=False), clip=CLIP)
    assert made.train(losses_in("float32", "none"), passes=3).steps == 3


@pytest.mark.parametrize("alike", [True, False])
@pytest.mark.parametrize("records", [8, 3000])
@pytest.mark.parametrize("kind", PRECISIONS)
def test_losses_of_single_records_are_bounded_in_every_precision(kind, records, alike):
    def run(drop):
        chosen = data(records, kind, alike=alike, drop=drop)
        return private(classifier(kind), chosen, clip=CLIP).train(losses_in(kind, "none"))

    assert assert_bounded(run, [], [3]) > 0.1


@pytest.mark.parametrize("alike", [True, False])
@pytest.mark.parametrize("records", [251, 3000])
def test_a_mean_in_float32_moves_the_others_by_less_than_is_accounted_for(records, alike):
    def run(drop):
        chosen = data(records, "float32", alike=alike, drop=drop)
        return private(classifier("float32"), chosen, clip=CLIP).train(losses_in("float32", "mean"))

    assert_bounded(run, [], [3])


@pytest.mark.parametrize("kind", HALF)
@pytest.mark.parametrize("pieces", [1, 7, 64])
def test_pieces_of_half_precision_are_bounded(kind, pieces):
    def run(drop):
        chosen = data(100, kind, alike=False, drop=drop)
        made = private(classifier(kind), chosen, clip=CLIP, max_physical_batch_size=pieces)
        return made.train(losses_in(kind, "none"))

    assert_bounded(run, [], [3])
