"""What is said before training is what happens in training."""

import pytest
import torch
import transformers
from torch import nn

from lap2.train import Recorder, UnsupportedModuleError
from lap2.train.coverage import coverage

WIDTH = 8


class Gain(nn.Module):
    """A layer without a rule."""

    def __init__(self, *shape):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(*shape))

    def forward(self, x):
        return x * self.gain


class Block(nn.Module):
    """Holds a parameter itself, and other modules."""

    def __init__(self, *shape, inner=None):
        super().__init__()
        self.token = nn.Parameter(torch.ones(*shape))
        self.inner = inner or nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.inner(x) + self.token


def ways(model):
    return {entry.name: entry.how for entry in coverage(model).entries}


def test_every_trained_parameter_has_a_way_and_none_is_counted_twice():
    model = nn.Sequential(
        nn.Linear(WIDTH, WIDTH),
        Gain(WIDTH),
        Block(1, WIDTH),
        Block(WIDTH),
        nn.TransformerEncoderLayer(WIDTH, 2, 8, 0.0, batch_first=True),
    )
    model[0].bias.requires_grad_(False)
    before = {name: p.requires_grad for name, p in model.named_parameters()}
    found = coverage(model)
    assert not found.refused
    assert {e.name for e in found.entries} == {n for n, trained in before.items() if trained}
    assert ways(model) | {
        "0.weight": "book-keeping",
        "1.gain": "vmap",
        "2.token": "copies",
    } == ways(model)
    assert ways(model)["2.inner.weight"] == "book-keeping"
    assert ways(model)["3.token"] == ways(model)["3.inner.weight"] == "vmap"
    assert ways(model)["4.self_attn.in_proj_weight"] == "book-keeping"
    assert before == {name: p.requires_grad for name, p in model.named_parameters()}
    total = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert sum(entry.size for entry in found.entries) == total
    Recorder(model)


def test_tied_parameters_count_once_and_where_they_have_a_rule():
    config = transformers.BertConfig(
        vocab_size=20, hidden_size=WIDTH, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=8,
    )  # fmt: skip
    model = transformers.BertForMaskedLM(config)
    entries = coverage(model).entries
    assert {entry.how for entry in entries} == {"book-keeping"}
    assert sum(e.size for e in entries) == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: nn.BatchNorm1d(WIDTH), "Use nn.GroupNorm"),
        (lambda: nn.LSTM(WIDTH, WIDTH), "nn.Linear"),
        (lambda: nn.Embedding(5, WIDTH, max_norm=1.0), "max_norm=None"),
        (lambda: nn.MultiheadAttention(WIDTH, 2), "batch_first=True"),
        (lambda: nn.TransformerEncoderLayer(WIDTH, 2), "batch_first=True"),
        (lambda: nn.MultiheadAttention(WIDTH, 2, add_zero_attn=True, batch_first=True), "add_zero"),
        (lambda: Block(WIDTH, inner=nn.Dropout(0.1)), "set its p to 0"),
        (
            lambda: Block(WIDTH, inner=nn.BatchNorm1d(WIDTH)),
            "its inner is a BatchNorm1d, which mixes",
        ),
        (lambda: Block(WIDTH, inner=nn.Embedding(5, WIDTH, max_norm=1.0)), "max_norm=None"),
        (lambda: Block(WIDTH, inner=nn.Linear(3000, 3000)), "leading dimension of 1"),
        (lambda: Gain(3000, 3000), "small module of its own"),
    ],
)
def test_what_is_refused_is_named_with_its_fix_and_the_recorder_agrees(make, message):
    model = nn.Sequential(nn.Identity(), make())
    (refused, *_) = coverage(model).refused
    assert refused.name.startswith("1")
    assert message in refused.reason
    assert f"{refused.name} {refused.reason}" in str(coverage(model))
    with pytest.raises(UnsupportedModuleError, match=message):
        Recorder(model)


def test_the_table_has_a_line_for_each_kind():
    table = str(coverage(nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 6), Gain(6))))
    assert [line.split() for line in table.splitlines()] == [
        ["how", "module", "parameters", "numbers"],
        ["book-keeping", "Linear", "4", "61"],
        ["vmap", "Gain", "1", "6"],
    ]


def test_dropout_that_is_frozen_out_or_off_is_no_obstacle():
    assert not coverage(Block(1, WIDTH, inner=nn.Dropout(0.5))).refused
    assert not coverage(Block(WIDTH, inner=nn.Dropout(0.0))).refused
    attention = nn.MultiheadAttention(WIDTH, 2).requires_grad_(False)
    assert not coverage(nn.Sequential(attention, nn.Linear(WIDTH, 2))).refused
