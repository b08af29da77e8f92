"""Random bits from the operating system, expanded by a cipher: as many as are needed, by position.

Every bit belongs to a place in the stream of one key, so that it does not matter in which order, in
how many threads or on which device bits are read. Nothing can be seeded, saved or continued.
"""

import os
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from numpy.typing import NDArray

__all__ = ["AesStream", "ChaChaStream", "EntropyError", "KeyStream", "new_key"]

_FURTHER, _ENDLESS = 1 << 126, 1 << 127
"""Where in AES's counter the bits that a position may need besides begin, far behind all others."""
_SPAN = 64 << 32
"""Bytes of ChaCha20 until the lower half of its counter begins again."""


class EntropyError(RuntimeError):
    """The operating system gave no randomness. There is no fallback."""


def new_key() -> bytes:
    """256 bits from the operating system, for one use; there is no fallback."""
    try:
        return os.urandom(32)
    except (NotImplementedError, OSError) as error:
        raise EntropyError(
            "the operating system gave no randomness: no noise can be made"
        ) from error


class KeyStream(Protocol):
    """The bits of one key."""

    def reader(self, byte: int) -> Any:
        """What turns zeros into the stream from this byte on, with ``update_into(zeros, room)``.

        The room has 63 bytes more than the zeros.
        """
        ...

    def further(self, positions: Iterable[int]) -> NDArray[np.uint64]:
        """64 more bits for each position, which are its own."""
        ...

    def endless(self, position: int) -> Callable[[], int]:
        """What gives 64 more bits for a position each time it is called, which are its own."""
        ...


class AesStream:
    """AES-256 in counter mode.

    Args:
        key: 256 bits, for this stream alone.
    """

    def __init__(self, key: bytes) -> None:
        """Keep the key."""
        self._cipher = algorithms.AES(key)

    def reader(self, byte: int) -> Any:
        """See :class:`KeyStream`."""
        stream = self._from_block(byte // 16)
        stream.update(bytes(byte % 16))
        return stream

    def further(self, positions: Iterable[int]) -> NDArray[np.uint64]:
        """See :class:`KeyStream`."""
        blocks = b"".join((_FURTHER + position).to_bytes(16, "big") for position in positions)
        # A block of the stream is its encrypted number, which is all that this mode computes.
        encryptor = Cipher(self._cipher, modes.ECB()).encryptor()  # noqa: S305
        return np.frombuffer(encryptor.update(blocks), dtype=">u8")[::2].astype(np.uint64)

    def endless(self, position: int) -> Callable[[], int]:
        """See :class:`KeyStream`."""
        stream = self._from_block(_ENDLESS + (position << 32))
        return lambda: int.from_bytes(stream.update(bytes(8)), "big")

    def _from_block(self, number: int) -> Any:
        return Cipher(self._cipher, modes.CTR(number.to_bytes(16, "big"))).encryptor()


class ChaChaStream:
    """ChaCha20 (RFC 8439), for devices without instructions for AES: it is made of 32-bit sums.

    The 64-bit number of a block is in the counter and the first word of the nonce, the use of the
    block in the second word.

    Args:
        key: 256 bits, for this stream alone.
    """

    def __init__(self, key: bytes) -> None:
        """Keep the key."""
        self.key = key

    def reader(self, byte: int) -> Any:
        """See :class:`KeyStream`."""
        return _ChaChaReader(self._from_block, byte)

    def further(self, positions: Iterable[int]) -> NDArray[np.uint64]:
        """See :class:`KeyStream`."""
        found = [self._from_block(position, use=1).update(bytes(8)) for position in positions]
        return np.frombuffer(b"".join(found), dtype="<u8")

    def endless(self, position: int) -> Callable[[], int]:
        """See :class:`KeyStream`."""
        block = 0

        def more() -> int:
            nonlocal block
            block += 1
            stream = self._from_block(position, use=1 + block)
            return int.from_bytes(stream.update(bytes(8)), "little")

        return more

    def _from_block(self, number: int, *, use: int) -> Any:
        nonce = number.to_bytes(8, "little") + use.to_bytes(8, "little")
        return Cipher(algorithms.ChaCha20(self.key, nonce), mode=None).encryptor()


class _ChaChaReader:
    """Carries into the upper half of the blocks' numbers, where `cryptography` would refuse to."""

    def __init__(self, from_block: Callable[..., Any], byte: int) -> None:
        self._from_block, self._place = from_block, byte
        self._cipher = self._begin()

    def update_into(self, data: memoryview, room: bytearray) -> None:
        """Data as many bytes on, written to the beginning of the room."""
        done, space = 0, memoryview(room)
        while done < len(data):
            size = min(len(data) - done, _SPAN - self._place % _SPAN)
            self._cipher.update_into(data[done : done + size], space[done:])
            done, self._place = done + size, self._place + size
            if self._place % _SPAN == 0:
                self._cipher = self._begin()

    def _begin(self) -> Any:
        cipher = self._from_block(self._place // 64, use=0)
        cipher.update(bytes(self._place % 64))
        return cipher
