"""Key streams: the ciphers they say they are, and bits that are used once."""

import itertools
import os

import numpy as np
import pytest
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

from lap2.noise.keystream import AesStream, ChaChaStream, EntropyError, new_key

STREAMS = pytest.mark.parametrize("stream", [AesStream, ChaChaStream])
KEY = bytes(range(32))
FAR = 2**54
"""More positions than 2^24 copies of a trillion coordinates have."""
POSITIONS = [*range(100), 2**16, 2**32 - 1, 2**32, 2**32 + 1, 2**40, FAR - 1, FAR]


def aes_block(number):
    return Cipher(algorithms.AES(KEY), modes.ECB()).encryptor().update(number.to_bytes(16, "big"))


def chacha_block(key, state_12_to_15):
    """One block of RFC 8439, section 2.3, from the text."""
    words = np.frombuffer(b"expand 32-byte k" + key, dtype="<u4").tolist() + list(state_12_to_15)
    state = list(words)

    def quarter(a, b, c, d):
        for to, by, other, shift in ((a, b, d, 16), (c, d, b, 12), (a, b, d, 8), (c, d, b, 7)):
            state[to] = (state[to] + state[by]) % 2**32
            turned = state[other] ^ state[to]
            state[other] = (turned << shift | turned >> (32 - shift)) % 2**32

    for _ in range(10):
        for i in range(4):
            quarter(i, 4 + i, 8 + i, 12 + i)
        for i in range(4):
            quarter(i, 4 + (i + 1) % 4, 8 + (i + 2) % 4, 12 + (i + 3) % 4)
    sums = [(a + b) % 2**32 for a, b in zip(words, state, strict=True)]
    return np.array(sums, dtype="<u4").tobytes()


def our_chacha_block(number, use):
    """A block, where its documentation says it is."""
    return chacha_block(KEY, (number % 2**32, number >> 32, use % 2**32, use >> 32))


def block(stream, number):
    return aes_block(number) if stream is AesStream else our_chacha_block(number, 0)


def read(reader, size):
    room = bytearray(size + 63)
    reader.update_into(memoryview(bytes(size)), room)
    return bytes(room[:size])


# RFC 8439: the key, the counter, the nonce, and what follows.
RFC_2_3_2 = (
    "10f1e7e4d13b5915500fdd1fa32071c4c7d1f4c733c068030422aa9ac3d46c4e"
    "d2826446079faa0914c2d705d98b02a2b5129cd1de164eb9cbd083e8a2503c4e"
)
RFC_2_4_2 = (
    "6e2e359a2568f98041ba0728dd0d6981e97e7aec1d4360c20a27afccfd9fae0b"
    "f91b65c5524733ab8f593dabcd62b3571639d624e65152ab8f530c359f0861d8"
    "07ca0dbf500d6a6156a38e088a22b65e52bc514d16ccf806818ce91ab7793736"
    "5af90bbf74a35be6b40b8eedf2785e42874d"
)
SUNSCREEN = (
    b"Ladies and Gentlemen of the class of '99: If I could offer you only one tip for the future, "
    b"sunscreen would be it."
)


def test_chacha_is_that_of_rfc_8439():
    nonce = (0x09000000, 0x4A000000, 0)
    assert chacha_block(KEY, (1, *nonce)).hex() == RFC_2_3_2
    ours = ChaChaStream(KEY)._from_block(1 | nonce[0] << 32, use=nonce[1] | nonce[2] << 32)
    assert ours.update(bytes(64)).hex() == RFC_2_3_2
    ours = ChaChaStream(KEY)._from_block(1, use=0x4A000000)
    assert ours.update(SUNSCREEN).hex() == RFC_2_4_2


@STREAMS
@pytest.mark.parametrize("byte", [0, 1, 15, 16, 17, 63, 64, 65, 1000, 2**20 + 2, 2 * FAR + 6])
def test_reader_gives_the_blocks_of_the_cipher_from_any_byte_on(stream, byte):
    size = len(block(stream, 0))
    first = byte // size
    blocks = b"".join(block(stream, number) for number in range(first, first + 300 // size + 2))
    start = byte - first * size
    assert read(stream(KEY).reader(byte), 300) == blocks[start : start + 300]


@STREAMS
@pytest.mark.parametrize("ahead", [1, 2, 5])
@pytest.mark.parametrize("together", [1, 3, 64, 1000])
def test_counters_carry_into_their_upper_half(stream, ahead, together):
    """Ciphers may keep 32 bits of the counter to themselves, and begin again after 2^32 blocks."""
    size = len(block(stream, 0))
    first = 2**32 - ahead
    reader = stream(KEY).reader(first * size)
    found = b"".join(read(reader, together) for _ in range(10 * size // together + 1))
    expected = b"".join(block(stream, first + i) for i in range(len(found) // size + 1))
    assert found == expected[: len(found)]


def test_more_bits_of_aes_are_where_they_are_documented_to_be():
    stream = AesStream(KEY)
    for position, bits in zip(POSITIONS, stream.further(POSITIONS).tolist(), strict=True):
        assert bits == int.from_bytes(aes_block(2**126 + position)[:8], "big")
        more = stream.endless(position)
        halves = b"".join(aes_block(2**127 + (position << 32) + i) for i in range(3))
        for i in range(6):
            assert more() == int.from_bytes(halves[8 * i : 8 * i + 8], "big")


def test_more_bits_of_chacha_are_where_they_are_documented_to_be():
    stream = ChaChaStream(KEY)
    for position, bits in zip(POSITIONS, stream.further(POSITIONS).tolist(), strict=True):
        assert bits == int.from_bytes(our_chacha_block(position, 1)[:8], "little")
        more = stream.endless(position)
        for i in range(5):
            assert more() == int.from_bytes(our_chacha_block(position, 2 + i)[:8], "little")


@STREAMS
def test_no_bits_are_used_twice(stream):
    """64 bits each, as collected from all uses; by chance, two agree with probability 2^-42."""
    keyed = stream(KEY)
    readers = [read(keyed.reader(8 * position), 8) for position in POSITIONS]
    found = [int.from_bytes(bits, "little") for bits in readers]
    found += keyed.further(POSITIONS).tolist()
    for position in POSITIONS:
        more = keyed.endless(position)
        found += [more() for _ in range(9)]
    swapped = {int.from_bytes(bits.to_bytes(8, "big"), "little") for bits in found}
    assert len(set(found)) == len(found) == len(POSITIONS) * 11
    assert len(swapped | set(found)) == 2 * len(found)


def test_places_of_aes_cannot_meet():
    """The numbers of its blocks, at the largest positions there are."""
    main = range(2 * FAR // 16 + 1)
    further = range(2**126, 2**126 + FAR + 1)
    endless = range(2**127, 2**127 + ((FAR + 1) << 32))
    for one, other in itertools.combinations((main, further, endless), 2):
        assert max(one.start, other.start) >= min(one.stop, other.stop)
    assert endless.stop < 2**128


@STREAMS
def test_no_positions_no_bits(stream):
    assert stream(KEY).further([]).size == 0


@STREAMS
def test_keys_are_all_that_streams_differ_by(stream):
    other = bytes(31) + b"\1"
    assert read(stream(KEY).reader(0), 64) == read(stream(KEY).reader(0), 64)
    assert read(stream(KEY).reader(0), 64) != read(stream(other).reader(0), 64)
    assert stream(KEY).further([3]) != stream(other).further([3])
    assert stream(KEY).endless(3)() != stream(other).endless(3)()


def test_new_keys_are_256_bits_of_the_operating_system(monkeypatch):
    assert len({new_key() for _ in range(100)}) == 100
    asked = []
    monkeypatch.setattr(os, "urandom", lambda count: asked.append(count) or KEY)
    assert new_key() == KEY
    assert asked == [32]


@pytest.mark.parametrize("error", [OSError("no device"), NotImplementedError()])
def test_without_entropy_there_is_no_key(error, monkeypatch):
    def fail(_):
        raise error

    monkeypatch.setattr(os, "urandom", fail)
    with pytest.raises(EntropyError, match="gave no randomness") as info:
        new_key()
    assert info.value.__cause__ is error
