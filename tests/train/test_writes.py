"""Every way to write into a model is noticed, and nothing else is."""

import pytest
import torch
from torch import nn

from lap2.train import BookkeepingError
from lap2.train.writes import Writes


class Model(nn.Module):
    """Has a tensor of each kind."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.head = nn.Linear(4, 3)
        self.head.weight = self.layer.weight
        self.table = nn.Parameter(torch.full((5, 4), 2.0), requires_grad=False)
        self.norm = nn.BatchNorm1d(4, affine=False)
        self.register_buffer("memory", torch.zeros(3), persistent=False)
        self.register_buffer("phases", torch.zeros(3, dtype=torch.complex64))
        self.register_buffer("later", None)
        self.plain = torch.zeros(3)


def replace(model):
    model.memory = 0.9 * model.memory


def remove(model):
    del model.memory


def add_layer(model):
    model.extra = nn.Linear(2, 2)


def swap(model):
    model.memory.data = torch.zeros(3)


@torch.no_grad()
def overwrite(model):
    model.layer.weight.mul_(0.5)


def through_numpy(model):
    model.memory.numpy()[0] = 1


def through_detached(model):
    model.phases.detach()[0] += 1


def normalise_rows(model):
    nn.functional.embedding(torch.tensor([1]), model.table, max_norm=1.0)


WRITES = {
    "running mean": (lambda m: m.norm(torch.randn(6, 4)), "norm.num_batches_tracked"),
    "rows that are normalised": (normalise_rows, "table"),
    "in place": (lambda m: m.memory.add_(1), "memory"),
    "of the same values": (lambda m: m.memory.copy_(m.memory.clone()), "memory"),
    "of a part": (lambda m: m.memory[:1].zero_(), "memory"),
    "of what is detached": (through_detached, "phases"),
    "replaced": (replace, "memory"),
    "removed": (remove, "memory"),
    "added": (lambda m: setattr(m, "later", torch.zeros(2)), "later"),
    "added layer": (add_layer, "extra.bias"),
    "other memory": (swap, "memory"),
    "trained": (overwrite, "layer.weight"),
}  # fmt: skip

UNCOUNTED = {
    "data": (lambda m: m.memory.data.add_(1), "memory"),
    "data of a parameter": (lambda m: m.layer.weight.data[0].mul_(2), "layer.weight"),
    "numpy": (through_numpy, "memory"),
    "complex": (lambda m: m.phases.data.add_(1j), "phases"),
}


@pytest.mark.parametrize("kind", WRITES)
def test_every_write_is_noticed(kind):
    write, name = WRITES[kind]
    model = Model()
    writes = Writes(model)
    writes.begin()
    assert writes.changed() == []
    write(model)
    assert name in writes.changed()
    with pytest.raises(BookkeepingError, match=f"writes to .*'{name}'.*public_state"):
        writes.check()
    writes.begin()
    writes.check()


@pytest.mark.parametrize("kind", UNCOUNTED)
def test_writes_that_torch_does_not_count_show_in_the_bits(kind):
    write, name = UNCOUNTED[kind]
    for bits in (False, True):
        model = Model()
        writes = Writes(model)
        writes.begin(bits=bits)
        write(model)
        assert writes.changed() == ([name] if bits else [])


@pytest.mark.parametrize("bits", [False, True])
def test_training_and_evaluation_write_nothing(bits):
    model = Model()
    model.norm.eval()
    writes = Writes(model)
    writes.begin(bits=bits)
    x = torch.randn(6, 4)
    out = model.layer(model.norm(x)) + model.head(
        nn.functional.embedding(torch.tensor([1]), model.table)
    )
    out.sum().backward()
    model.plain += 1
    model.zero_grad()
    model.requires_grad_(False)
    model.eval()
    model.state_dict()
    writes.check()


def test_tensors_with_two_names_are_named_once():
    model = Model()
    writes = Writes(model)
    writes.begin()
    overwrite(model)
    assert writes.changed() == ["layer.weight"]


def test_what_is_public_may_be_written():
    model = Model()
    writes = Writes(model, public=["memory", "table"])
    writes.begin(bits=True)
    replace(model)
    model.table.mul_(2)
    writes.check()
    model.phases.add_(1)
    assert writes.changed() == ["phases"]


def test_public_tensors_may_be_given_by_any_of_their_names():
    model = Model()
    model.register_buffer("alias", model.memory)
    writes = Writes(model, public=["alias"])
    writes.begin()
    model.memory.add_(1)
    writes.check()


@pytest.mark.parametrize("name", ["nothing", "layer.weight", "plain"])
def test_only_buffers_and_frozen_parameters_can_be_public(name):
    with pytest.raises(ValueError, match=f"public_state must hold .* got '{name}'; .*'memory'"):
        Writes(Model(), public=[name])


def test_tensors_whose_writes_are_not_counted_are_refused():
    model = Model()
    with torch.inference_mode():
        model.memory = torch.zeros(3)
    with pytest.raises(ValueError, match="'memory' of the module must be an ordinary one"):
        Writes(model)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.eye(3).to_sparse(),
        torch.zeros(3, device="meta"),
        torch.zeros(0),
        torch.tensor(1.0),
        torch.zeros(5, dtype=torch.bfloat16),
        torch.zeros(9, dtype=torch.uint8)[1:],
        torch.zeros(2, 3).t(),
        torch.zeros(3, dtype=torch.complex64).conj(),
    ],
)
def test_every_kind_of_tensor_can_be_watched(tensor):
    model = nn.Module()
    model.register_buffer("state", tensor)
    writes = Writes(model)
    writes.begin(bits=True)
    writes.check()
    model.state = tensor.clone()
    assert writes.changed() == ["state"]
