"""The file of a checkpoint: replaced in one move, checked to the last bit, read without trust."""

# pyright: basic

import hashlib
import io
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from lap2.train.journal import CheckpointError, sync_folder

__all__ = ["CheckpointError", "previous", "read", "write"]

_MAGIC = b"lap2 checkpoint 1\n"
_HEADER = len(_MAGIC) + 64 + 1


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
        sync_folder(path.parent)
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
        state = torch.load(io.BytesIO(payload), weights_only=True, map_location="cpu")
    except Exception as error:  # whatever torch's reader raises
        kind = type(error).__name__
        raise CheckpointError(f"{path} cannot be loaded safely: {kind}: {error}") from error
    if not isinstance(state, dict):
        raise CheckpointError(f"{path} must hold the state of a run, got {type(state).__name__}")
    return state


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
