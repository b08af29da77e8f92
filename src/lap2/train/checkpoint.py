"""Files that let a run go on after it was interrupted, without losing count of what it released.

Two files belong to a run. A *checkpoint* holds the state at some step; it replaces the one before
it in one move, and keeps that one beside it. The *journal* holds the number of steps released so
far; it is on disk before the noise of a step is drawn, whatever happens to the checkpoint.
"""

# pyright: basic

import contextlib
import hashlib
import io
import os
import pickle
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

__all__ = ["CheckpointError", "Journal", "previous", "read", "write"]

_MAGIC = b"lap2 checkpoint 1\n"
_HEADER = len(_MAGIC) + 64 + 1


class CheckpointError(ValueError):
    """A checkpoint is corrupt, incomplete, of another version, or of another run."""


def previous(path: Path) -> Path:
    """Where the checkpoint that ``path`` replaced is kept."""
    return path.with_name(path.name + ".previous")


def write(path: Path, state: Mapping[str, Any]) -> None:
    """Write a checkpoint; a crash at any point leaves a whole one at ``path`` or beside it.

    The file is a header with the SHA-256 of the rest, and the state as ``torch.save`` writes it.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with partial.open("wb") as stream:
            stream.write(bytes(_HEADER))
            hashing = _Hashing(stream)
            torch.save(dict(state), hashing)  # type: ignore[arg-type]
            stream.seek(0)
            stream.write(_MAGIC + hashing.hexdigest().encode() + b"\n")
            stream.flush()
            os.fsync(stream.fileno())
        if path.exists():
            # A link, so that there is no moment without a file at ``path``.
            spare = partial.with_suffix(".spare")
            spare.unlink(missing_ok=True)
            os.link(path, spare)
            spare.replace(previous(path))
        partial.replace(path)
        _sync_folder(path.parent)
    finally:
        partial.unlink(missing_ok=True)


def read(path: Path) -> dict[str, Any]:
    """The state in a checkpoint, loaded without running any code from it.

    Raises:
        CheckpointError: the file is not what :func:`write` wrote, down to the last bit.
    """
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        raise CheckpointError(f"there is no checkpoint at {path}") from None
    if not content.startswith(_MAGIC):
        raise CheckpointError(f"{path} is not a checkpoint of this version of lap2, or is corrupt")
    digest, payload = content[len(_MAGIC) : _HEADER], memoryview(content)[_HEADER:]
    if digest != hashlib.sha256(payload).hexdigest().encode() + b"\n":
        raise CheckpointError(f"{path} is corrupt: its content does not have the checksum it names")
    try:
        return torch.load(io.BytesIO(payload), weights_only=True, map_location="cpu")
    except (RuntimeError, pickle.UnpicklingError, zipfile.BadZipFile) as error:
        raise CheckpointError(f"{path} cannot be loaded safely: {error}") from error


class _Hashing(io.RawIOBase):
    """Passes writes on, and hashes them."""

    def __init__(self, stream: io.BufferedWriter) -> None:
        self._stream, self._hash = stream, hashlib.sha256()

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self._hash.update(data)
        self._stream.write(data)
        return len(data)

    def hexdigest(self) -> str:
        return self._hash.hexdigest()


class Journal:
    """How many steps a run has released, on disk before each of them is.

    A file of two lines, written in turn: odd numbers of steps in one, even ones in the other, each
    with a checksum. A line that a crash left half-written, or that rotted later, is taken to say
    one more than the other line does: that is what it said, or was about to say.

    Args:
        folder: of the run's checkpoints.
        run: the run's name, the same in all of its checkpoints.
    """

    def __init__(self, folder: Path, run: str) -> None:
        """Open nothing yet."""
        self.path = folder / f"journal-{run}.txt"
        self._last: int | None = None

    def steps(self) -> int:
        """The number of steps released, or at most one more.

        Raises:
            CheckpointError: there is no journal, or it is corrupt beyond one line.
        """
        try:
            content = self.path.read_bytes()
        except FileNotFoundError:
            raise CheckpointError(
                f"{self.path} is missing: without it, steps taken after the checkpoint would be "
                "forgotten. If there were none, say so with journal_lost=True"
            ) from None
        lines = [content[:_LINE], content[_LINE:]]
        valid = [int(line[:20]) for line in lines if _is_valid(line)]
        if not valid or len(content) != 2 * _LINE:
            raise CheckpointError(
                f"{self.path} is corrupt: the number of released steps is not known. If you know "
                "that none followed the checkpoint, say so with journal_lost=True"
            )
        return max(valid) if len(valid) == 2 else valid[0] + 1

    def start(self, steps: int) -> None:
        """Replace the journal by one that says ``steps``, in one move."""
        lines = {steps % 2: _line(steps), (steps + 1) % 2: _line(max(0, steps - 1))}
        partial = self.path.with_name(f".{self.path.name}.{os.getpid()}.partial")
        try:
            with partial.open("wb") as stream:
                stream.write(lines[0] + lines[1])
                stream.flush()
                os.fsync(stream.fileno())
            partial.replace(self.path)
            _sync_folder(self.path.parent)
        finally:
            partial.unlink(missing_ok=True)
        self._last = steps

    def record(self, steps: int) -> None:
        """Have ``steps`` on disk when this returns."""
        if self._last != steps - 1:
            self.start(steps)
            return
        with self.path.open("r+b", buffering=0) as stream:
            stream.seek(_LINE * (steps % 2))
            stream.write(_line(steps))
            os.fsync(stream.fileno())
        self._last = steps


_LINE = 30


def _line(steps: int) -> bytes:
    number = b"%020d" % steps
    return number + b" " + _checksum(number) + b"\n"


def _is_valid(line: bytes) -> bool:
    number = line[:20]
    return number.isdigit() and line == number + b" " + _checksum(number) + b"\n"


def _checksum(number: bytes) -> bytes:
    return b"%08x" % zlib.crc32(b"lap2 " + number)


def _sync_folder(folder: Path) -> None:
    """Make a rename last; not every system can."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
