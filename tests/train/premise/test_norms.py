"""A clipped gradient is no longer than the clip, however its norm was computed."""

import pytest
import torch
import transformers
from torch import nn

from .helpers import assert_bounded, private, rows

OUTPUTS, STEEP = 64, 1e5


class Once(nn.Module):
    """One layer on both positions of a record."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return self.layer(x)


class Twice(Once):
    """The layer is used once for each position."""

    def forward(self, x):
        return torch.stack([self.layer(x[:, 0]), self.layer(x[:, 1])], dim=1)


class Channels(Once):
    """The layer has its positions last."""

    def forward(self, x):
        return self.layer(x.mT).mT


class Pixels(Once):
    """The layer has a grid of positions."""

    def forward(self, x):
        return self.layer(x.mT[:, :, None]).flatten(2).mT


LAYERS = {
    "linear": lambda width: Once(nn.Linear(width, OUTPUTS)),
    "linear, used twice": lambda width: Twice(nn.Linear(width, OUTPUTS)),
    "linear, stored the other way": lambda width: Once(
        transformers.pytorch_utils.Conv1D(OUTPUTS, width)
    ),
    "conv1d": lambda width: Channels(nn.Conv1d(width, OUTPUTS, 1)),
    "conv2d": lambda width: Pixels(nn.Conv2d(width, OUTPUTS, 1)),
}


NEARLY = torch.tensor([
    [1.3627522, 0.0024822], [1.0021412, 0.0040126], [1.9169920, 0.0046239], [1.8378620, 0.0025773],
    [1.4163895, 0.0039744], [1.3455274, 0.0050397], [1.6332917, 0.0030623], [1.8302519, 0.0074448],
])  # fmt: skip
"""A number, and how much more another one is: found by search, for the float32 products."""


def nearly_cancelling(width):
    """Records of two positions whose gradients have opposite signs and are nearly the same."""
    first = NEARLY[:, :1].expand(-1, width)
    return torch.stack([first, first * (1 + NEARLY[:, 1:])], dim=1)


def difference(model, batch):
    output = model(batch[0])
    return ((output[:, :1] - output[:, 1:]) * STEEP).sum()


def assert_all_bounded(run, *tensors):
    """Each record in turn is the one that the other data set lacks."""
    for record in range(len(NEARLY)):
        assert assert_bounded(run, rows(*tensors), rows(*tensors, drop=[record])) > 0.1


@pytest.mark.parametrize("width", [1024, 3072, 4096])
@pytest.mark.parametrize("layer", LAYERS)
def test_positions_that_nearly_cancel_do_not_hide_a_norm(layer, width):
    def run(data):
        torch.manual_seed(0)
        return private(LAYERS[layer](width), data, loss_reduction="sum", rehearse=False).train(
            difference
        )

    assert_all_bounded(run, nearly_cancelling(width))


def test_nor_do_they_in_a_wide_layer():
    def run(data):
        torch.manual_seed(0)
        return private(nn.Linear(16384, OUTPUTS), data, loss_reduction="sum", rehearse=False).train(
            difference
        )

    x = nearly_cancelling(16384)[-2:]
    assert assert_bounded(run, rows(x), rows(x, drop=[1])) > 0.1


class Words(nn.Module):
    """A table that is looked up, and may also be applied as a weight."""

    def __init__(self, width, *, tied):
        super().__init__()
        self.table = nn.Embedding(3, width)
        self.head = nn.Linear(width, 3, bias=False) if tied else None
        if self.head is not None:
            self.head.weight = self.table.weight

    def forward(self, index, x):
        found = self.table(index)
        if self.head is None:
            return found
        return found, self.head(x)


def looked_up(model, batch):
    """Both lookups are of the same word, with gradients of opposite signs."""
    index, x = batch
    found = model(index, x)
    return (STEEP * (found[:, 0] * x[:, 0] - found[:, 1] * x[:, 1])).sum()


def looked_up_and_applied(model, batch):
    """What the lookup adds to the gradient of the table, its use as a weight takes away."""
    index, x = batch
    found, scores = model(index[:, 0], x[:, 1])
    return (STEEP * ((found * x[:, 0]).sum(1) - scores[:, 1])).sum()


@pytest.mark.parametrize("width", [1024, 3072, 4096])
@pytest.mark.parametrize("loss", [looked_up, looked_up_and_applied])
def test_uses_of_a_table_that_nearly_cancel_do_not_hide_a_norm(loss, width):
    def run(data):
        torch.manual_seed(0)
        model = Words(width, tied=loss is looked_up_and_applied)
        return private(model, data, loss_reduction="sum", rehearse=False).train(loss)

    assert_all_bounded(run, torch.ones(len(NEARLY), 2, dtype=torch.long), nearly_cancelling(width))


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize(("size", "steep"), [(1.0, 1.0), (1.0, 1e18), (1e18, 1.0), (1e5, 1e14)])
@pytest.mark.parametrize("clip", [1e-30, 1e-26, 1e-22, 1e-8, 1e8])
def test_clips_of_any_size_hold(clip, size, steep, reduction):
    """Divided by a large gradient, a small clip has few digits left in float32."""

    def run(data):
        torch.manual_seed(0)
        return private(nn.Linear(5, 3), data, clip=clip, loss_reduction=reduction, rehearse=False)

    def loss(model, batch):
        losses = (model(batch[0]) * steep).sum(1)
        return losses.mean() if reduction == "mean" else losses.sum()

    x = size * torch.randn(8, 5, generator=torch.Generator().manual_seed(0))
    for record in range(8):
        lacking = rows(x, drop=[record])
        assert_bounded(lambda data: run(data).train(loss), rows(x), lacking)


class Mixed(nn.Module):
    """Layers of different precisions."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(5, 4), nn.Linear(4, 3).double()

    def forward(self, x):
        return self.second(torch.tanh(self.first(x)).double())


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("tau", [None, 10.0])
def test_layers_of_float32_and_float64_train_together(tau, groups):
    def run(data):
        torch.manual_seed(0)
        model = Mixed()
        parts = [model] if groups == 1 else [model.first, model.second]
        held = [{"params": list(part.parameters())} for part in parts]
        optimizer = torch.optim.SGD(held, lr=0.1)
        return private(model, data, optimizer=optimizer, tau=tau).train(
            lambda model, batch: model(batch[0]).square().sum(1) * 100
        )

    x = torch.randn(6, 5, generator=torch.Generator().manual_seed(0))
    change = assert_bounded(run, rows(x), rows(x, drop=[2]))
    assert change > (0.9 if groups == 1 else 0.1)
    assert all(
        p.grad.isfinite().all() and p.grad.dtype == p.dtype for p in run(rows(x)).model.parameters()
    )


class Complex(nn.Module):
    """Its parameter is complex, what it returns is not."""

    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.randn(5, dtype=torch.complex64))

    def forward(self, x):
        return (x * self.gain).abs()


@pytest.mark.parametrize("make", [Complex, lambda: nn.Linear(5, 3, dtype=torch.complex64)])
def test_complex_parameters_are_refused(make):
    """Their gradients would lose the imaginary part."""
    with pytest.raises((TypeError, ValueError), match="complex"):
        private(make(), rows(torch.randn(4, 5)))
