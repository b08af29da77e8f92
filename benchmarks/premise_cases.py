"""Trials for the search in premise.py: a model, a batch and a record, all made from a few numbers.

The gradients of each record are chosen, not learnt: a loss is the inner product of what comes out
with what the gradient is to be.
"""

import math
import random
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

LARGEST = 1 << 20
"""Numbers in a batch's inputs and gradients, and in a weight, at most."""

Genes = dict[str, Any]

PRECISIONS = {
    "float16": (torch.float16, 12),
    "bfloat16": (torch.bfloat16, 100),
    "autocast": (torch.float32, 100),
    "float32": (torch.float32, 100),
    "float64": (torch.float64, 400),
}
"""The type of the model, and how many powers of two its numbers may be away from 1."""

PATTERNS = (
    *("one", "alike", "random", "ladder", "bad"),
    *("pairs", "halves", "zero", "rest", "products", "edge"),  # cancel more or less
)

CHOICES: dict[str, tuple] = {
    "mechanism": ("laplace", "laplace", "laplace-l1"),
    "precision": ("float32", "float32", *PRECISIONS),
    "record": PATTERNS,
    "others": (*PATTERNS, *["as the record"] * len(PATTERNS)),
    "sign": (1, -1, 0),  # of the others' gradients; 0 alternates
    "reduction": ("records", "records", "sum", "mean"),
    "turned": (False, True),
    "clip_is": ("near", "relative", "absolute"),
    "each_its_clip": (False, False, True),
    "kernel": (1, 1, 3),
    "groups": (1, 1, 2),
    "words": ("same", "random"),
    "rows": ("opposite", "opposite", "random"),
}

RANGES: dict[str, tuple[float, float, float]] = {
    # Smallest, largest, and how often it is near the smallest (or 0, if that is inside).
    "seed": (0, 1 << 30, 1),
    "width": (3, 14, 2),  # of these five the logarithms to base 2
    "outputs": (0, 9, 1),
    "positions": (0, 6, 1),
    "records": (0, 9, 2),
    "piece": (0, 9, 1),
    "close": (-40, -1, 1),  # how close the terms of a record come to cancel
    "rough": (-60, 0, 2),  # how much is added to each number at random
    "bits": (1, 24, 0.5),  # of what inputs and gradients have in common
    "size": (-1, 1, 3),  # of terms; this and the next two in what the precision allows
    "tilt": (-1, 1, 3),  # of inputs over gradients
    "wild": (0, 1, 6),  # how different that is between positions
    "less": (-60, 20, 4),  # how much larger the others' gradients are
    "clip": (-1, 1, 1),
}


def drawn(name: str, rng: random.Random) -> Any:
    if name in CHOICES:
        return rng.choice(CHOICES[name])
    low, high, power = RANGES[name]
    if low < 0 < high:
        value = rng.choice((low, high)) * rng.random() ** power
    else:
        value = low + (high - low) * rng.random() ** power
    return value


def random_genes(rng: random.Random, **fixed: Any) -> Genes:
    return {name: drawn(name, rng) for name in (*CHOICES, *RANGES)} | fixed


def mutated(genes: Genes, rng: random.Random) -> Genes:
    """A few genes drawn anew, or numbers moved, by a little or a lot."""
    changed = dict(genes)
    names = [name for name in (*CHOICES, *RANGES) if name != "mechanism"]
    for name in rng.sample(names, rng.choice((1, 1, 1, 2, 3))):
        if name in CHOICES or name == "seed" or rng.random() < 0.2:
            changed[name] = drawn(name, rng)
            continue
        low, high, _ = RANGES[name]
        step = (high - low) * rng.gauss() * 10 ** rng.uniform(-4, -0.5)
        changed[name] = min(high, max(low, changed[name] + step))
    return changed


class Terms(NamedTuple):
    """What the gradients of a weight are made of: ``sum_t grads[t] inputs[t]^T`` for each record.

    ``products`` are the same for a table, of which an output is a row.
    """

    inputs: Tensor
    grads: Tensor
    products: Tensor


def pattern(
    name: str, count: int, close: float, edge: float, rng: np.random.Generator
) -> np.ndarray:
    """Factors of the inputs and of the gradients at each position of a record: (2, positions).

    Args:
        name: of the pattern.
        count: how many positions.
        close: how close terms come to cancel, in most patterns.
        edge: what is left of them in another, in proportion.
        rng: for the rest.
    """
    a, g = np.ones((2, count))
    half = count // 2
    if name == "one":
        g[1:] = 0
    elif name in {"random", "bad"}:
        a, g = rng.standard_normal((2, count))
    elif name == "ladder":
        g = 2.0 ** -np.arange(count)
    elif name in {"pairs", "halves", "zero"} and half:
        g[1::2] = -1
        g = np.sort(g) if name == "halves" else g
        a = 1 + close * rng.random(count)
        if name == "zero":  # in exact arithmetic
            a, g = rng.standard_normal((2, count))
            a[half : 2 * half], g[half : 2 * half], g[2 * half :] = a[:half], -g[:half], 0
    elif name == "rest" and half:
        g[half:], g[half] = -1, close
    elif name == "edge" and count > 2:
        paired = (count - 1) // 2 * 2
        g[1::2], g[paired:] = -1, 0
        g[-1] = paired * edge * (1 + 1e-5 * rng.standard_normal())
    elif name == "products" and half:
        a[: 2 * half : 2], g[: 2 * half : 2], g[1::2] = 1 + close, 1 - close, -1
    return np.stack([a, g])


def terms_of(genes: Genes, record: int, shape: Sequence[int], *, word: bool) -> Terms:
    """Inputs (records, positions, width) and gradients (records, positions, outputs).

    They are multiples of the same two vectors, so that records add up to as much as they can; the
    second one has one number only, if ``word``.
    """
    rng = np.random.default_rng(int(genes["seed"]))
    count, positions, width, outputs = shape
    _, most = PRECISIONS[genes["precision"]]
    close = 2.0 ** genes["close"]
    # Where products in float32 would be just good enough for a norm, as once was thought.
    edge = math.sqrt(64 * (width + outputs + 8) * 2.0**-23)
    edge /= max(edge, 1 - edge)
    names = {"record": genes["record"], "others": genes["others"]}
    if names["others"] == "as the record":
        names["others"] = names["record"]
    each = [
        pattern(names["record" if i == record else "others"], positions, close, edge, rng)
        for i in range(count)
    ]
    a, g = np.stack(each, axis=1)
    signs = np.full(count, float(genes["sign"])) if genes["sign"] else (-1.0) ** np.arange(count)
    signs *= 2.0 ** genes["less"]
    signs[record] = 1.0
    g *= signs[:, None]
    units = 2.0 ** int(genes["bits"])
    one, other = (1 + np.floor(rng.random(n) * units) / units for n in (width, outputs))
    if word:
        other = np.eye(outputs)[1]
    shift = np.round(rng.uniform(-1, 1, (count, positions)) * genes["wild"] * most / 2)
    size, tilt = genes["size"] * most / 2, genes["tilt"] * most / 2
    rough = 2.0 ** genes["rough"]
    with np.errstate(all="ignore"):
        made = (
            a[..., None] * np.exp2(size + tilt + shift)[..., None] * one,
            g[..., None] * np.exp2(size - tilt - shift)[..., None] * other,
            (a * g)[..., None] * np.exp2(2 * size) * one,
        )
        made = [t * (1 + rough * rng.standard_normal(t.shape)) for t in made]
    for name, i in (("record", record), ("others", (record + 1) % count)):
        if names[name] == "bad":
            part = made[rng.integers(3)][i].reshape(-1)
            part[rng.integers(part.size)] = rng.choice([np.inf, -np.inf, np.nan, 1e300, 3e38])
    return Terms(*map(torch.from_numpy, made))


class Case(NamedTuple):
    """A model, what it is called with, and the gradients of what comes out: for each record."""

    make: Callable[[], nn.Module]
    inputs: list[Tensor]
    grads: Tensor
    record: int


class Around(nn.Module):
    """A layer and what must be done to its inputs and outputs."""

    def __init__(self, run: Callable[..., Tensor], *layers: nn.Module, offset: int = 0) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.offset = nn.Parameter(torch.zeros(1, 1, offset)) if offset else None
        self._run = run

    def forward(self, *inputs: Tensor) -> Tensor:
        """Run it."""
        first = inputs[0] if self.offset is None else inputs[0] + self.offset
        return self._run(*self.layers, first, *inputs[1:])


class Gain(nn.Module):
    """A module of which nothing is known."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gain, self.offset = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        """Run it."""
        return x * self.gain + self.offset


def last(layer: nn.Module, x: Tensor) -> Tensor:
    """A layer that has its positions last."""
    return layer(x.mT).mT


def grid(layer: nn.Module, x: Tensor) -> Tensor:
    """A layer that has a grid of positions."""
    down = max(d for d in range(1, math.isqrt(x.shape[1]) + 1) if x.shape[1] % d == 0)
    return layer(x.mT.unflatten(2, (down, -1))).flatten(2).mT


def frozen(layer: nn.Linear) -> nn.Linear:
    layer.weight.requires_grad_(False)
    return layer


def tied(width: int, outputs: int) -> nn.Module:
    table, head = nn.Embedding(outputs, width), nn.Linear(width, outputs, bias=False)
    head.weight = table.weight
    return Around(lambda table, head, index, x: torch.cat([table(index), head(x)], 2), table, head)


def layers(genes: Genes, width: int, outputs: int) -> dict[str, Callable[[], nn.Module]]:
    """A model of each family."""
    groups = genes["groups"] if width % 2 == outputs % 2 == 0 else 1
    conv = {"kernel_size": genes["kernel"], "padding": genes["kernel"] // 2, "groups": groups}
    linear = partial(nn.Linear, width, outputs)
    return {
        "linear": lambda: Around(lambda layer, x: layer(x), linear()),
        "conv1d": lambda: Around(last, nn.Conv1d(width, outputs, **conv)),
        "conv2d": lambda: Around(grid, nn.Conv2d(width, outputs, **conv)),
        "embedding": lambda: Around(lambda layer, index: layer(index), nn.Embedding(8, width)),
        "tied table": lambda: tied(width, outputs),
        "layer norm": lambda: Around(lambda layer, x: layer(x), nn.LayerNorm(width)),
        "group norm": lambda: Around(last, nn.GroupNorm(groups, width)),
        "biases alone": lambda: Around(lambda layer, x: layer(x), frozen(linear())),
        "mixed types": lambda: Around(
            lambda one, two, x: two(one(x).to(two.weight.dtype)),
            linear(),
            nn.Linear(outputs, outputs),
        ),
        "lora": lambda: Around(
            lambda base, down, up, x: base(x) + up(down(x)),
            nn.Linear(width, outputs).requires_grad_(False),
            nn.Linear(width, 4, bias=False),
            nn.Linear(4, outputs, bias=False),
        ),
        "own parameters": lambda: Around(
            lambda gain, one, x: one(gain(x)), Gain(width), linear(), offset=width
        ),
    }


FAMILIES = tuple(layers({"groups": 1, "kernel": 1}, 8, 8))


def case_of(genes: Genes) -> Case:
    """What the genes stand for."""
    family, dtype = genes["family"], PRECISIONS[genes["precision"]][0]
    positions, width = (round(2 ** genes[name]) for name in ("positions", "width"))
    outputs = max(2, min(round(2 ** genes["outputs"]), LARGEST // width))
    records = min(round(2 ** genes["records"]), LARGEST // (positions * (width + outputs)))
    records = max(1, records)
    record = int(genes["seed"]) % records
    shape = (records, positions, width, outputs)
    terms = terms_of(genes, record, shape, word=family == "tied table")
    inputs, grads = [terms.inputs], terms.grads
    if family in {"embedding", "tied table"}:
        rng = torch.Generator().manual_seed(int(genes["seed"]))
        index = torch.ones(records, positions, dtype=torch.long)
        if genes["words"] == "random":
            index = torch.randint(2, (records, positions), generator=rng)
        rows = terms.products if genes["rows"] == "random" else -terms.products
        inputs = [index] if family == "embedding" else [index, terms.inputs]
        grads = rows if family == "embedding" else torch.cat([rows, terms.grads], dim=2)
    elif family in {"layer norm", "group norm"}:
        grads = terms.products
    mixed = family == "mixed types"

    def make() -> nn.Module:
        torch.manual_seed(int(genes["seed"]))
        model = layers(genes, width, outputs)[family]().to(dtype)
        if mixed:
            model.layers[1].double()  # pyright: ignore
        return model

    inputs = [t.to(dtype) if t.is_floating_point() else t for t in inputs]
    return Case(make, inputs, grads.to(torch.float64 if mixed else dtype), record)
