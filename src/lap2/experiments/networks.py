"""Pretrained networks for images, cut before their last trained piece.

A network is three modules in a row: ``prepare`` (resize and normalise), ``body``, and ``tail``, the
last piece with weights before the classifier. A private run trains the tail on what the body makes
of the images, which never changes and can be computed once.

The layers are torch's own, which all have rules for per-example gradients. BatchNorm has none: it
is part of the convolution before it.
"""

# pyright: basic

import re
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own custom
from torch import Tensor, nn

__all__ = [
    "LITE0",
    "Backbone",
    "Prepare",
    "efficientnet_lite",
    "load_convolutions",
    "load_tokens",
    "transformer",
]


class Backbone(nn.Module):
    """From images to one feature vector for each, in three pieces."""

    def __init__(
        self, prepare: "Prepare", body: nn.Sequential, tail: nn.Sequential, *, width: int
    ) -> None:
        """Args are the pieces, and the length of the vector."""
        super().__init__()
        self.prepare, self.body, self.tail, self.width = prepare, body, tail, width

    def forward(self, images: Tensor) -> Tensor:
        """The features of images in [0, 1], of any size, grey or in colour."""
        return self.tail(self.body(self.prepare(images)))


class Prepare(nn.Module):
    """Images in [0, 1] as a network was trained on them."""

    mean: Tensor
    std: Tensor

    def __init__(self, size: int, *, mean: Sequence[float], std: Sequence[float]) -> None:
        """Args are the pixels of a side, and what was subtracted and divided by."""
        super().__init__()
        self.size = size
        self.register_buffer("mean", torch.tensor(mean)[:, None, None], persistent=False)
        self.register_buffer("std", torch.tensor(std)[:, None, None], persistent=False)

    def forward(self, images: Tensor) -> Tensor:
        """Resized, grey ones with three equal channels, and normalised."""
        images = images.expand(-1, 3, -1, -1)
        if images.shape[2:] != (self.size, self.size):
            images = F.interpolate(images, (self.size, self.size), mode="bicubic").clamp(0, 1)
        return (images - self.mean) / self.std


# Vision transformers.


class _Embed(nn.Module):
    """Patches and the class token, with their positions."""

    def __init__(self, *, size: int, patch: int, width: int) -> None:
        super().__init__()
        self.proj = nn.Conv2d(3, width, patch, stride=patch)
        self.cls_token = nn.Parameter(torch.randn(1, 1, width) * 0.02)
        self.pos_embed = nn.Parameter(torch.randn(1, 1 + (size // patch) ** 2, width) * 0.02)

    def forward(self, images: Tensor) -> Tensor:
        patches = self.proj(images).flatten(2).mT
        return torch.cat([self.cls_token.expand(len(patches), -1, -1), patches], 1) + self.pos_embed


class _Half(nn.Module):
    """Half a layer of a transformer: its input, and something added to it.

    The gain of what is added, where a network has one, has a leading dimension of 1: that is how
    a private run sees that it is given to every example.
    """

    gain: Tensor | None

    def __init__(self, width: int, *, gain: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width, eps=1e-6)
        self.gain = nn.Parameter(torch.ones(1, width)) if gain else None

    def added(self, x: Tensor, change: Tensor) -> Tensor:
        if self.gain is None:
            return x + change
        return x + change * (self.gain if x.dim() == 2 else self.gain[:, None])


class _Attend(_Half):
    """Every token looks at all tokens."""

    def __init__(self, width: int, *, heads: int, gain: bool) -> None:
        super().__init__(width, gain=gain)
        self.heads = heads
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        split = self.qkv(self.norm(x)).unflatten(2, (3, self.heads, x.shape[2] // self.heads))
        query, key, value = split.permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(query, key, value)
        return self.added(x, self.proj(seen.transpose(1, 2).flatten(2)))


class _Feed(_Half):
    """Every token by itself."""

    def __init__(self, width: int, *, gain: bool) -> None:
        super().__init__(width, gain=gain)
        self.fc1, self.fc2 = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.added(x, self.fc2(F.gelu(self.fc1(self.norm(x)))))


class _ClassToken(nn.Module):
    """The first token."""

    def forward(self, x: Tensor) -> Tensor:
        return x[:, 0]


def transformer(
    prepare: Prepare, *, patch: int, width: int, depth: int, heads: int, gain: bool = False
) -> Backbone:
    """A vision transformer whose feature is its class token.

    The tail is the second half of the last layer: after the last attention, the other tokens
    matter no more.

    Args:
        prepare: the first piece.
        patch: pixels of a patch's side.
        width: of a token.
        depth: layers.
        heads: of the attention.
        gain: whether what a half layer adds is scaled, as in DINOv2.
    """
    body = OrderedDict[str, nn.Module](embed=_Embed(size=prepare.size, patch=patch, width=width))
    for i in range(depth):
        body[f"attend{i}"] = _Attend(width, heads=heads, gain=gain)
        body[f"feed{i}"] = _Feed(width, gain=gain)
    tail = OrderedDict[str, nn.Module](feed=body.popitem()[1], norm=nn.LayerNorm(width, eps=1e-6))
    body["token"] = _ClassToken()
    return Backbone(prepare, nn.Sequential(body), nn.Sequential(tail), width=width)


def load_tokens(network: Backbone, state: Mapping[str, Tensor]) -> None:
    """Give a :func:`transformer` weights that have timm's names; positions are resampled."""
    last = max(int(name.split(".")[1]) for name in state if name.startswith("blocks."))
    named: dict[str, Tensor] = {}
    for name, value in state.items():
        place = _place(name, last)
        if place is not None:
            named[place] = value[None] if place.endswith("gain") else value
    table: Tensor = network.body.embed.pos_embed  # pyright: ignore
    named["body.embed.pos_embed"] = _resampled(named["body.embed.pos_embed"], table.shape[1])
    network.load_state_dict(named)


_INSIDE = {
    "norm1": "attend{}.norm",
    "attn.qkv": "attend{}.qkv",
    "attn.proj": "attend{}.proj",
    "ls1.gamma": "attend{}.gain",
    "norm2": "feed{}.norm",
    "mlp.fc1": "feed{}.fc1",
    "mlp.fc2": "feed{}.fc2",
    "ls2.gamma": "feed{}.gain",
}
"""What timm calls the parts of a layer."""


def _place(name: str, last: int) -> str | None:
    """Where a tensor of timm's belongs here; None for its classifier."""
    if name.startswith("head."):
        return None
    inside = re.fullmatch(r"blocks\.(\d+)\.(.+?)(\.weight|\.bias|)", name)
    if inside is None:
        piece = "tail" if name.startswith("norm.") else "body.embed"
        return f"{piece}.{name.removeprefix('patch_embed.')}"
    layer, part, kind = inside.groups()
    place = _INSIDE.get(part, part)
    if int(layer) == last and place.startswith("feed"):
        return "tail." + place.format("") + kind
    return "body." + place.format(layer) + kind


def _resampled(table: Tensor, count: int) -> Tensor:
    """The positions of a square of patches, for a square of another size."""
    if table.shape[1] == count:
        return table
    old, new = (round((n - 1) ** 0.5) for n in (table.shape[1], count))
    grid = table[:, 1:].mT.unflatten(2, (old, old))
    grid = F.interpolate(grid, (new, new), mode="bicubic")
    return torch.cat([table[:, :1], grid.flatten(2).mT], 1)


# EfficientNet-lite.


class _Convolve(nn.Module):
    """A convolution whose output has the input's size over the stride, rounded up.

    What is missing at the edges is zero, the larger half of it on the right and below.
    """

    def __init__(
        self, inputs: int, outputs: int, kernel: int, *, stride: int = 1, groups: int = 1
    ) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, kernel, stride=stride, groups=groups)
        self.kernel, self.stride = kernel, stride

    def forward(self, x: Tensor) -> Tensor:
        if self.kernel == 1:
            return self.conv(x)
        missing = [
            max(-(-n // self.stride) * self.stride + self.kernel - self.stride - n, 0)
            for n in (x.shape[3], x.shape[2])
        ]
        return self.conv(F.pad(x, [edge for n in missing for edge in (n // 2, n - n // 2)]))


class _Inverted(nn.Module):
    """Widen, look around, narrow; added to the input where the shapes allow it."""

    def __init__(
        self, inputs: int, outputs: int, kernel: int, *, stride: int, expansion: int
    ) -> None:
        super().__init__()
        inner = inputs * expansion
        widen = [_Convolve(inputs, inner, 1), nn.ReLU6()] if expansion > 1 else []
        self.layers = nn.Sequential(
            *widen,
            _Convolve(inner, inner, kernel, stride=stride, groups=inner),
            nn.ReLU6(),
            _Convolve(inner, outputs, 1),
        )
        self.residual = stride == 1 and inputs == outputs

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layers(x) if self.residual else self.layers(x)


LITE0 = (
    (3, 1, 1, 16, 1),
    (3, 2, 6, 24, 2),
    (5, 2, 6, 40, 2),
    (3, 2, 6, 80, 3),
    (5, 1, 6, 112, 3),
    (5, 2, 6, 192, 4),
    (3, 1, 6, 320, 1),
)
"""Kernel, stride, expansion, channels and repeats of each stage of EfficientNet-lite0."""


def efficientnet_lite(
    prepare: Prepare,
    *,
    stages: Sequence[tuple[int, int, int, int, int]] = LITE0,
    stem: int = 32,
    width: int = 1280,
) -> Backbone:
    """An EfficientNet-lite without BatchNorm; the tail is its last convolution, and the mean.

    Args:
        prepare: the first piece.
        stages: as in :data:`LITE0`.
        stem: channels of the first convolution.
        width: channels of the last one.
    """
    layers: list[nn.Module] = [_Convolve(3, stem, 3, stride=2), nn.ReLU6()]
    channels = stem
    for kernel, stride, expansion, outputs, repeats in stages:
        for i in range(repeats):
            layers.append(
                _Inverted(channels, outputs, kernel, stride=1 if i else stride, expansion=expansion)
            )
            channels = outputs
    tail = nn.Sequential(
        nn.Conv2d(channels, width, 1), nn.ReLU6(), nn.AdaptiveAvgPool2d(1), nn.Flatten()
    )
    return Backbone(prepare, nn.Sequential(*layers), tail, width=width)


def load_convolutions(network: Backbone, state: Mapping[str, Tensor], *, eps: float = 1e-3) -> None:
    """Give an :func:`efficientnet_lite` the weights of one with BatchNorm, in the order they have.

    Args:
        network: whose convolutions take in the BatchNorm after each.
        state: each convolution, followed by its BatchNorm, under any names.
        eps: of the BatchNorm.
    """
    layers = [layer for layer in network.modules() if isinstance(layer, nn.Conv2d)]
    for layer, (weight, bias) in zip(layers, _folded(state, eps), strict=True):
        layer.load_state_dict({"weight": weight, "bias": bias})


def _folded(state: Mapping[str, Tensor], eps: float) -> Iterator[tuple[Tensor, Tensor]]:
    """Weight and bias of each convolution with the BatchNorm after it, as used after training."""
    tensors = [value.double() for value in state.values() if value.dim()]  # without the counters
    for i, weight in enumerate(tensors):
        if weight.dim() == 4:
            gain, offset, mean, variance = tensors[i + 1 : i + 5]
            scale = gain / (variance + eps).sqrt()
            yield (weight * scale[:, None, None, None]).float(), (offset - mean * scale).float()
