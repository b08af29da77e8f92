"""The journal of a run: how many steps it has released, on disk before each of them is.

It is a file in a folder of the run's own choosing, beside a lock that only one process can hold.
"""

# pyright: basic

import contextlib
import gc
import os
import socket
import time
import zlib
from pathlib import Path

from filelock import FileLock, Timeout

__all__ = ["CheckpointError", "Journal", "sync_folder"]

_PATIENCE = 10.0
"""Seconds in which what a process that was killed has left behind (its workers) ends too."""


class CheckpointError(ValueError):
    """What was saved of a run is corrupt, incomplete, of another version, or of another run."""


class Journal:
    """How many steps a run has released, on disk before each of them is.

    A file of two lines, written in turn: odd numbers of steps in one, even ones in the other, each
    with a checksum. A line that a crash left half-written, or that rotted later, is taken to say
    one more than the other line does: that is what it said, or was about to say.

    Args:
        folder: where it is.
        run: the run's id.
    """

    def __init__(self, folder: Path, run: str) -> None:
        """Open nothing yet."""
        self.folder = folder
        self.path = folder / f"journal-{run}.txt"
        self._holder = folder / f"journal-{run}.holder"
        self._lock = FileLock(folder / f"journal-{run}.lock", thread_local=False)
        self._last: int | None = None

    def lock(self) -> None:
        """Hold the run, until :meth:`unlock` or the end of the process.

        Raises:
            CheckpointError: another process holds it, or another engine of this one.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        for patience in (0.0, 0.0 if self._holder_lives() else _PATIENCE):
            try:
                self._lock.acquire(timeout=patience, poll_interval=0.1)
            except Timeout:
                gc.collect()  # an engine that nobody refers to any more may hold it
            else:
                since = time.strftime("%Y-%m-%d %H:%M:%S")
                self._holder.write_text(f"{os.getpid()} {socket.gethostname()} {since}\n")
                return
        raise CheckpointError(
            f"the run is held by {self._described_holder()}: only one process at a time may go on "
            "with a run, or its steps would be counted once for several. End the other one, or "
            "call engine.close() there. A run that shall go on twice needs a copy of its folder "
            "(and lap2 ledger merge for what both released)"
        )

    def unlock(self) -> None:
        """Let others hold the run."""
        self._lock.release()

    def _described_holder(self) -> str:
        number, host, since = (*self._held_by(), "?", "?", "?")[:3]
        return f"process {number} on {host} since {since}"

    def _held_by(self) -> list[str]:
        with contextlib.suppress(OSError, UnicodeDecodeError), self._holder.open() as stream:
            return stream.read(200).split(maxsplit=2)
        return []

    def _holder_lives(self) -> bool:
        """Whether the holder may still be there, as far as this machine knows."""
        match self._held_by():
            case [number, host, _] if host == socket.gethostname() and number.isdecimal():
                with contextlib.suppress(PermissionError):
                    try:
                        os.kill(int(number), 0)
                    except (ProcessLookupError, OverflowError):
                        return False
        return True

    def steps(self) -> int:
        """The number of steps released, or at most one more.

        Raises:
            CheckpointError: there is no journal, or it is corrupt beyond one line.
        """
        try:
            with self.path.open("rb") as stream:
                content = stream.read(2 * _LINE + 1)
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
            sync_folder(self.path.parent)
        finally:
            partial.unlink(missing_ok=True)
        self._last = steps

    def write(self, steps: int) -> None:
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


def sync_folder(folder: Path) -> None:
    """Make a rename last; not every system can."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
