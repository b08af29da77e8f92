"""Files from elsewhere, read so that the worst their content can do is to be refused.

What is read has a bound on its size before it is in memory, and what it cannot mean is a
:class:`FormatError` that names the file and the rule.
"""

# pyright: basic

import gzip
import hashlib
import io
import json
import lzma
import math
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePosixPath
from typing import IO, Any

__all__ = [
    "MOST_BYTES",
    "FormatError",
    "checked",
    "content_of",
    "inflated",
    "parsed_json",
    "read_all",
    "unpacked",
]

MOST_BYTES = 1 << 29
"""Of a file, packed or not: more than any data set or network that is known here has."""
_MOST_MEMBERS = 100_000
_PIECE = 1 << 20
_MOST_DIGITS = 18

_DAMAGED = (
    OSError,
    EOFError,
    ValueError,
    KeyError,
    IndexError,
    OverflowError,
    RuntimeError,  # of zipfile, for what is encrypted; of Python, for what is nested too deep
    struct.error,
    zlib.error,
    lzma.LZMAError,
    zipfile.BadZipFile,
    tarfile.TarError,
)
"""What the standard library raises for archives that are none."""


class FormatError(ValueError):
    """A file is not what its format allows."""


def content_of(path: Path, *, most: int = MOST_BYTES) -> bytes:
    """What is in a file of at most so many bytes."""
    with path.open("rb") as stream:
        return read_all(stream, str(path), most=most)


def read_all(stream: IO[bytes] | gzip.GzipFile, where: str, *, most: int = MOST_BYTES) -> bytes:
    """What is left of a stream, piece by piece: one without an end is not read to it."""
    pieces, size = [], 0
    while piece := stream.read(_PIECE):
        size += len(piece)
        if size > most:
            raise FormatError(f"{where} must be at most {most} bytes long, and is longer")
        pieces.append(piece)
    return b"".join(pieces)


def checked(content: bytes, sha256: str | None, where: str) -> bytes:
    """The content, if it has this checksum or none is known."""
    digest = hashlib.sha256(content).hexdigest()
    if sha256 not in (None, digest):
        raise FormatError(f"{where}: checksum is {digest}, must be {sha256}")
    return content


def inflated(content: bytes, where: str, *, most: int = MOST_BYTES) -> bytes:
    """What was packed with gzip."""
    try:
        with gzip.GzipFile(fileobj=io.BytesIO(content)) as stream:
            return read_all(stream, where, most=most)
    except (OSError, EOFError, zlib.error) as error:
        raise FormatError(f"{where} must be a whole gzip file: {error!r}") from error


def unpacked(
    archive: bytes, names: Iterable[str], *, maybe: Iterable[str] = ()
) -> dict[str, bytes]:
    """Files of a zip or tar archive, in whatever folder they are; nothing is written to disk.

    Args:
        archive: its content.
        names: of files, without folders, that must be in it, each once.
        maybe: names of files that need not be.

    Raises:
        FormatError: it is no archive, or a file is missing, there twice, a link, in a folder that
            is not below the archive's own, or too large.
    """
    needed = set(names)
    wanted = needed | set(maybe)
    found: dict[str, bytes] = {}
    try:
        for path, stream in _members(archive, wanted):
            name = path.name
            if path.is_absolute() or ".." in path.parts or name in found:
                raise FormatError(f"archive must hold {name} once, in a folder of its own")
            if stream is None:
                raise FormatError(f"{name} must be a file, no folder or link")
            found[name] = read_all(stream, name)
    except FormatError:
        raise
    except _DAMAGED as error:
        raise FormatError(f"archive is damaged: {error!r:.200}") from error
    if missing := sorted(needed - found.keys()):
        raise FormatError(f"archive must hold {', '.join(missing)}")
    return found


def _members(archive: bytes, wanted: set[str]) -> Iterator[tuple[PurePosixPath, IO[bytes] | None]]:
    """The members with the wanted names; those that are no files have no content."""
    if archive.startswith(b"PK"):
        with zipfile.ZipFile(io.BytesIO(archive)) as packed:
            for info in packed.infolist():
                path = PurePosixPath(info.filename.replace("\\", "/"))
                if path.name in wanted:
                    yield path, None if info.is_dir() else packed.open(info)
        return
    if archive.startswith(b"\x1f\x8b"):
        archive = inflated(archive, "archive")
    with tarfile.open(fileobj=io.BytesIO(archive), mode="r:") as packed:
        for count, member in enumerate(packed):
            if count >= _MOST_MEMBERS:
                raise FormatError(f"archive must have at most {_MOST_MEMBERS} members")
            path = PurePosixPath(member.name)
            if path.name in wanted:
                regular = member.isreg() and not member.issparse()
                yield path, packed.extractfile(member) if regular else None


def parsed_json(text: str, where: str) -> Any:
    """The value of a JSON text: no name twice, numbers that are finite and not endless."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len(found := dict(pairs)) < len(pairs):
            raise FormatError(f"{where} must name every field once")
        return found

    def whole(digits: str) -> int:
        if len(digits) > _MOST_DIGITS:
            raise FormatError(f"{where} must hold integers of at most {_MOST_DIGITS} digits")
        return int(digits)

    def finite(digits: str) -> float:
        if not math.isfinite(number := float(digits)):
            raise FormatError(f"{where} must hold finite numbers only, got {digits:.40}")
        return number

    try:
        return json.loads(
            text,
            object_pairs_hook=unique,
            parse_int=whole,
            parse_float=finite,
            parse_constant=finite,
        )
    except json.JSONDecodeError as error:
        raise FormatError(f"{where} must be JSON: {error}") from None
    except RecursionError:
        raise FormatError(f"{where} must not be nested so deep") from None
