"""Signs: every bit is exact, nothing can be told from rounding, misuse is refused.

Statistical tests use fixed keys, so that they do not flake; each comes with a sampler that is
slightly wrong and that it must reject.
"""

import copy
import gc
import hashlib
import io
import itertools
import math
import os
import pickle
import subprocess
import sys
import threading
import tracemalloc
from functools import lru_cache

import mpmath as mp
import numba
import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

import lap2
from lap2.noise import (
    EntropyError,
    ReproducibleSigns,
    SecureSigns,
    accounted_noise_multiplier,
    check_law,
    estimates,
    signs,
    signs_compiled,
    signs_numpy,
)
from lap2.noise.keystream import AesStream, ChaChaStream

from .test_laplace import SECRETS, layouts, possible_for_torch, tensors, torch_laplace

KERNELS = pytest.mark.parametrize(
    "kernel", [signs_numpy, signs_compiled], ids=["numpy", "compiled"]
)
PATHS = pytest.mark.parametrize("compiled", [False, True], ids=["numpy", "compiled"])
FLOATS = pytest.mark.parametrize("dtype", [np.float32, np.float64])
STREAMS = pytest.mark.parametrize("stream", [AesStream, ChaChaStream])
KEY = bytes(range(32))
SCALES = (1.0, 0.37, 2.0**-900, 2.0**900)
MP = mp.MPContext()
MP.prec = 2500


def key(name):
    return hashlib.sha256(name.encode()).digest()


def counts(name, values, *, scale=1.0, copies=1, compiled=True, stream=AesStream):
    sampler = SecureSigns(copies, compiled=compiled)
    return sampler._counts_with_key(values, scale, stream(key(name)))


def added(name, values, *, scale=1.0, copies=1, compiled=True, stream=AesStream):
    SecureSigns(copies, compiled=compiled)._add_with_key(values, scale, stream(key(name)))
    return values


def positive(u):
    """The probability of a copy."""
    return np.where(np.asarray(u) >= 0, 1 - np.exp(-np.abs(u)) / 2, np.exp(-np.abs(u)) / 2)


def assert_unlike(check, *arguments, **keywords):
    """The negative control: the check must fail."""
    with pytest.raises(AssertionError):
        check(*arguments, **keywords)


# Exactness: words at the decision boundary of every stage, against mpmath.

BITS = 16 + 64 * 6
"""Of each U: a word, what follows it, and five times what a bit may still ask for."""
ALL = (1 << BITS) - 1


def probability(value, scale, copies):
    """``2^BITS exp(-u)/2``, rounded down."""
    u = MP.fabs(MP.mpf(float(value))) / (MP.mpf(scale) * MP.sqrt(copies))
    return int(MP.floor(MP.ldexp(MP.exp(-u), BITS - 1))) if u < BITS else 0


class Chosen:
    """A key stream of bits that are given, BITS of them for each position."""

    def __init__(self, bits):
        self._bits = bits
        self._words = np.array([u >> (BITS - 16) for u in bits], dtype="<u2").tobytes()

    def reader(self, byte):
        self._place = byte
        return self

    def update_into(self, zeros, room):
        room[: len(zeros)] = self._words[self._place : self._place + len(zeros)]
        self._place += len(zeros)

    def further(self, positions):
        return np.array([self._bits[p] >> (BITS - 80) & (1 << 64) - 1 for p in positions], "<u8")

    def endless(self, position):
        following = iter(range(BITS - 144, -1, -64))
        return lambda: self._bits[position] >> next(following) & (1 << 64) - 1


def adversarial_values(scale, copies, dtype):
    """Of all sizes, and such as make the threshold of 16 bits nearly an integer."""
    rng = np.random.default_rng(3)
    sizes = [*rng.exponential(1, 20), *rng.uniform(0, 12, 10), *10 ** rng.uniform(-12, 0, 10)]
    sizes += [math.log(2) * octave for octave in range(1, 15)]
    sizes += [20, 40, 59.99, 60, 60.01, 100, 276, 278, 399, 401, 800]
    whole = [-math.log(m / 2**15) for m in (1, 2, 3, 100, 16383, 16385, 20_000, 32_766, 32_767)]
    limits = np.finfo(dtype)
    with np.errstate(over="ignore"):
        found = (np.array(sizes) * scale * math.sqrt(copies)).astype(dtype)
        near = (np.array(whole) * scale * math.sqrt(copies)).astype(dtype)
        found = [*found, *near, *np.nextafter(near, limits.max), *np.nextafter(near, -limits.max)]
    found += [dtype(0), limits.smallest_subnormal, limits.tiny, limits.max]
    found = np.array([value for value in found if np.isfinite(value)], dtype)
    return np.concatenate([found, -found])


def adversarial_bits(value, scale, copies, rng):
    """U next to P, as near and as far as each stage of the decision can see."""
    p = probability(value, scale, copies)
    steps = [0, 1, 64, 100, 128, 192, 256, 300, 319, 320, 321, 340, 358, 360, 361, 362, 370]
    steps += [383, 384, 385, 386]
    found = [p + sign * 2**step for step in steps for sign in (1, -1)]
    word = p >> (BITS - 16)
    edges = [(word + offset) << (BITS - 16) for offset in (-2, -1, 0, 1, 2, 3)]
    found += [edge - below for edge in edges for below in (0, 1)]
    found += [int.from_bytes(rng.bytes(BITS // 8), "big") for _ in range(4)] + [1, ALL]
    if abs(float(value)) / scale < 2.0**-100:  # of a P next to 1/2 all bits that follow are alike
        found = [u for u in found if abs(u - p) > 2**100]
    found = [u for u in found if 0 <= u <= ALL and u != p]
    while len(found) % copies:
        found.append(int.from_bytes(rng.bytes(BITS // 8), "big"))
    return found, [u < p for u in found]


@lru_cache
def boundary(scale, copies, dtype):
    """Values, the bits of all their copies, and the counts that are right."""
    rng = np.random.default_rng(4)
    values, bits, expected = [], [], []
    for value in adversarial_values(scale, copies, dtype):
        chosen, flipped = adversarial_bits(value, scale, copies, rng)
        down = np.reshape(flipped, (-1, copies)).sum(axis=1)
        values += [value] * len(down)
        bits += chosen
        expected += (copies - down if value >= 0 else down).tolist()
    return np.array(values, dtype), bits, np.array(expected)


CASES = pytest.mark.parametrize(
    ("scale", "copies", "dtype"),
    [
        *itertools.product(SCALES, (1,), (np.float32, np.float64)),
        (1.0, 1, np.float16),
        (0.37, 2, np.float64),
        (1.0, 3, np.float32),
        (0.37, 33, np.float32),
        (2.0**-900, 64, np.float64),
        (2.0**900, 300, np.float32),
    ],
)


@CASES
@PATHS
def test_no_bit_is_wrong_at_the_boundary(scale, copies, dtype, compiled):
    values, bits, expected = boundary(scale, copies, dtype)
    assert len(bits) > 2000
    found = SecureSigns(copies, compiled=compiled)._counts_with_key(values, scale, Chosen(bits))
    wrong = (found != expected).nonzero()[0]
    assert wrong.size == 0, [(values[i], found[i], expected[i]) for i in wrong[:5]]


@PATHS
@pytest.mark.parametrize("known", [16, 80, 144])
def test_with_fewer_bits_some_would_be_wrong(compiled, known):
    """The negative control of the last test: what follows matters, and is used."""
    values, bits, expected = boundary(0.37, 1, np.float64)
    cut = [u >> (BITS - known) << (BITS - known) | (ALL >> known) // 3 for u in bits]
    found = SecureSigns(compiled=compiled)._counts_with_key(values, 0.37, Chosen(cut))
    assert np.count_nonzero(found != expected) > 50


def test_without_margins_some_would_be_wrong(monkeypatch):
    """And so do the margins of the first two stages."""
    values, bits, expected = boundary(0.37, 1, np.float64)

    def wrong():
        found = SecureSigns(compiled=False)._counts_with_key(values, 0.37, Chosen(bits))
        return np.count_nonzero(found != expected)

    assert wrong() == 0
    with monkeypatch.context() as patch:
        patch.setattr(signs, "_ERROR", 0.0)
        assert wrong() > 50
    monkeypatch.setattr(signs_numpy, "MARGIN", 0.0)
    assert wrong() > 5


@settings(max_examples=300, deadline=None)
@given(
    st.floats(allow_nan=False, allow_infinity=False),
    st.floats(-900, 900),
    st.integers(1, 2**24),
    st.integers(-400, 400),
    st.booleans(),
)
def test_arbitrary_precision_is_exact(value, octave, copies, step, above):
    """The last stage by itself, from the words that come before it."""
    scale = 2.0**octave
    p = probability(value, scale, copies)
    u = p + (1 if above else -1) * 2 ** abs(step)
    if 0 <= u <= ALL and abs(value) / scale > 2.0**-100:
        following = iter(range(BITS - 144, -1, -64))
        more = [u >> (BITS - 80), lambda: u >> next(following) & (1 << 64) - 1]
        assert signs.flips(abs(value), scale, copies, *more) == (u < p)


@pytest.mark.parametrize("bits", [80, 144, 1104])
def test_enclosures_of_a_half_are_as_narrow_as_digits_allow(bits):
    low, high = signs._half_exp(0.0, 1.0, 1, bits)
    assert low <= 2 ** (bits - 1) <= high
    assert high - low <= 2
    low, high = signs._half_exp(1.5, 0.37, 7, bits)
    exact = MP.ldexp(MP.exp(-MP.mpf(1.5) / (MP.mpf(0.37) * MP.sqrt(7))), bits - 1)
    assert low < exact < high
    assert high - low == 1
    assert signs._half_exp(1e6, 1.0, 1, bits) == (0, 1)


# The kernels' thresholds.


@numba.njit
def _thresholds(values, inverse, found):
    for i in range(values.size):
        found[i] = signs_compiled._threshold(values[i], inverse)


def compiled_thresholds(values, inverse=1.0):
    found = np.empty(values.size, np.float32)
    _thresholds(values, inverse, found)
    return found.astype(np.float64)


def allowed(sizes):
    """What docs/noise.md, section 9, allows the compiled threshold to err by."""
    return 2.0**-9 * np.exp(-sizes) * (2.3 * sizes + 4.2) + 1e-21


@FLOATS
def test_compiled_threshold_is_within_its_bound(dtype):
    """Densely, and about the ends of all octaves, against float64."""
    octaves = math.log(2) * np.arange(87)
    near = octaves[:, None] + np.linspace(-1e-5, 1e-5, 2001)
    sizes = np.concatenate([np.linspace(0, 60.5, 3_000_000), near.ravel().clip(0, 60.5)])
    values = sizes.astype(dtype)
    values[::2] *= -1
    sizes = np.abs(values.astype(np.float64))
    error = np.abs(compiled_thresholds(values) - 2.0**15 * np.exp(-sizes))
    assert (error <= allowed(sizes)).all()
    assert 0.002 < error.max() < 0.0083 < signs_numpy.MARGIN / 3
    assert not (error <= allowed(sizes) / 3).all()


@pytest.mark.parametrize("scale", SCALES)
def test_compiled_threshold_is_within_its_bound_of_mpmath(scale):
    values = np.concatenate([adversarial_values(scale, 1, kind) for kind in (np.float32, float)])
    found = compiled_thresholds(values, 1 / scale)
    for value, ours in zip(values.tolist(), found.tolist(), strict=True):
        u = min(MP.fabs(MP.mpf(value)) / MP.mpf(scale), MP.mpf(10_000))
        assert abs(ours - MP.ldexp(MP.exp(-u), 15)) <= allowed(min(float(u), 60))


def test_platform_exponential_is_as_good_as_the_numpy_kernel_assumes():
    """Four units in the last place, which is 2^-21 at most."""
    sizes = np.linspace(-60, 0, 4_000_001).astype(np.float32)
    exact = np.exp(sizes.astype(np.float64))
    error = np.abs(np.exp(sizes) / exact - 1)
    assert error.max() < 2.0**-21
    assert 2.0**15 * (error * exact).max() + 2.0**-9 * math.exp(-1) < signs_numpy.MARGIN / 2


@KERNELS
@FLOATS
@pytest.mark.parametrize("copies", [1, 7, 40])
def test_few_bits_are_undecided_and_no_others_are_wrong(kernel, dtype, copies):
    """A bit in 2^16, about: more would cost time, fewer would be wrong."""
    rng = np.random.default_rng(5)
    values = rng.laplace(0, math.sqrt(copies), 2_000_000 // copies).astype(dtype)
    words = rng.integers(0, 2**16, values.size * copies, dtype=np.uint16)
    found = np.empty(values.size, np.uint32)
    undecided = kernel.count(values, words, 1 / math.sqrt(copies), copies, found)
    assert 15 < undecided.size < 60
    threshold = 2.0**15 * np.exp(-np.abs(values.astype(np.float64)) / math.sqrt(copies))
    down = np.count_nonzero(words.reshape(-1, copies) < np.floor(threshold)[:, None], axis=1)
    decided = np.delete(np.arange(values.size), undecided)
    expected = np.where(values >= 0, copies - down, down)
    np.testing.assert_array_equal(found[decided], expected[decided])


# The same words give the same bits, however they are cut, in both forms.

# Scale 1.5, key 00 01 ... 1f: how many copies are positive of the values in the test.
KNOWN = {
    (AesStream, 1): [0, 0, 1, 0, 1, 0, 0, 1, 1, 1, 0, 0, 0, 1, 1, 0, 1, 1, 1],
    (ChaChaStream, 1): [0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0, 1, 1, 1, 0, 1, 1],
    (AesStream, 64): [24, 28, 30, 30, 38, 42, 40, 30, 39, 64, 31, 27, 35, 32, 38, 34, 32, 34, 39],
    (ChaChaStream, 64): [
        27,
        16,
        31,
        33,
        32,
        35,
        36,
        34,
        45,
        64,
        26,
        30,
        32,
        36,
        33,
        25,
        31,
        33,
        39,
    ],
}


@pytest.mark.parametrize(("stream", "copies"), KNOWN)
@PATHS
@FLOATS
def test_known_answers(stream, copies, compiled, dtype):
    values = np.array([-3, -1, -0.5, -0.25, 0, 0.25, 0.5, 1, 3, 1e9] * 2, dtype)[:19]
    sampler = SecureSigns(copies, compiled=compiled)
    found = sampler._counts_with_key(values, 1.5, stream(KEY))
    assert found.tolist() == KNOWN[stream, copies]
    sampler._add_with_key(values, 1.5, stream(KEY))
    gain = 1.5 * math.sqrt(copies) / copies
    expected = [gain * (2 * x - copies) for x in KNOWN[stream, copies]]
    np.testing.assert_array_equal(values, np.array(expected, dtype))


@PATHS
@pytest.mark.parametrize("copies", [1, 3])
def test_bits_are_the_documented_function_of_the_key(compiled, copies):
    """Recomputed from AES on single blocks and mpmath, without the code under test."""
    scale, size = 1.5, 3000
    values = np.linspace(-4, 4, size)
    block = Cipher(algorithms.AES(KEY), modes.ECB()).encryptor()
    blocks = range(size * copies // 8 + 1)
    stream = b"".join(block.update(number.to_bytes(16, "big")) for number in blocks)
    expected = []
    for index, value in enumerate(values.tolist()):
        threshold = probability(value, scale, copies) >> (BITS - 16 - 64)
        down = 0
        for number in range(copies * index, copies * (index + 1)):
            word = int.from_bytes(stream[2 * number : 2 * number + 2], "little")
            further = block.update(((1 << 126) + number).to_bytes(16, "big"))[:8]
            u = word << 64 | int.from_bytes(further, "big")
            assert u != threshold
            down += u < threshold
        expected.append(copies - down if value >= 0 else down)
    sampler = SecureSigns(copies, compiled=compiled)
    found = sampler._counts_with_key(values, scale, AesStream(KEY))
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("copies", [1, 2, 5, 31, 32, 33, 64, 255, 256, 1000, 70_000])
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_compiled_and_numpy_paths_agree_in_every_bit(copies, dtype):
    size = max(37, 200_003 // copies)
    values = np.random.default_rng(copies).normal(0, math.sqrt(copies), size).astype(dtype)
    values[:3] = 0, -0.0, np.finfo(dtype).max
    for scale in (1.7, 2.0**-900, 2.0**900):
        name = f"agree {copies}"
        fast, slow = (
            counts(name, values, scale=scale, copies=copies, compiled=compiled)
            for compiled in (True, False)
        )
        np.testing.assert_array_equal(fast, slow)
    fast, slow = (
        added(name, values.copy(), scale=1.7, copies=copies, compiled=compiled)
        for compiled in (True, False)
    )
    np.testing.assert_array_equal(fast, slow)
    found = counts(name, values, scale=1.7, copies=copies)
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(
            fast, estimates(found, copies=copies, scale=1.7).astype(dtype)
        )


@pytest.mark.parametrize("size", [1, 2, 3, 255, (1 << 16) - 1, (1 << 16) + 1, (1 << 20) + 12_347])
@STREAMS
def test_compiled_and_numpy_paths_agree_at_all_sizes(size, stream):
    values = np.linspace(-3, 3, size).astype(np.float32)
    fast, slow = (
        counts(f"agree {size}", values, stream=stream, compiled=compiled)
        for compiled in (True, False)
    )
    np.testing.assert_array_equal(fast, slow)


@PATHS
@STREAMS
@pytest.mark.parametrize("copies", [1, 3, 300])
def test_result_does_not_depend_on_how_the_work_is_cut(compiled, stream, copies, monkeypatch):
    size = 60_011 // copies
    values = np.linspace(-3, 3, size).astype(np.float32) * np.float32(math.sqrt(copies))

    def result(parts):
        cuts = np.split(values.copy(), [size * part // 1000 for part in parts])
        keywords = {"copies": copies, "compiled": compiled, "stream": stream}
        found = counts("cut", cuts, **keywords)
        replaced = np.concatenate(added("cut", cuts, **keywords))
        exact = estimates(found, copies=copies, scale=1.0).astype(np.float32)
        np.testing.assert_array_equal(replaced, exact)
        return found

    whole = result([])
    assert whole.size == size
    for bits, segment, processors in [(37, 1001, 1), (64, 640, 3), (1000, 999, 2), (1, 3000, 5)]:
        monkeypatch.setattr(signs, "_BITS", bits)
        monkeypatch.setattr(signs, "_SEGMENT", segment)
        monkeypatch.setattr(os, "cpu_count", lambda count=processors: count)
        np.testing.assert_array_equal(result([]), whole)
        np.testing.assert_array_equal(result([1, 8, 8, 700, 999]), whole)


def test_undecided_coordinates_are_replaced_at_their_own_places():
    """Whatever holds them; in parts of a list, in segments of a part, in pieces of a segment."""
    values, bits, expected = boundary(1.0, 1, np.float32)
    exact = estimates(expected, copies=1, scale=1.0).astype(np.float32)
    size = values.size
    matrix = np.asfortranarray(values[: size - size % 7].reshape(-1, 7))
    for make in (
        values.copy,
        lambda: np.repeat(values, 2)[::2],
        lambda: torch.tensor(values),
        lambda: [values[:1001].copy(), values[1001:1002].copy(), values[1002:].copy()],
    ):
        array = make()
        SecureSigns()._add_with_key(array, 1.0, Chosen(bits))
        found = np.concatenate(array) if isinstance(array, list) else np.asarray(array)
        np.testing.assert_array_equal(found, exact)
    # Non-contiguous in two dimensions: coordinates are taken in the order of memory.
    rows = np.ones((matrix.shape[0], 9), np.float32)[:, 1:8]
    rows[:] = values[: matrix.size].reshape(-1, 7)
    SecureSigns()._add_with_key(rows, 1.0, Chosen(bits))
    np.testing.assert_array_equal(rows.ravel(), exact[: matrix.size])


@pytest.mark.parametrize("copies", [1, 64])
@pytest.mark.parametrize("name", [name for name, _ in layouts()])
def test_every_layout_has_all_of_its_coordinates_replaced_and_nothing_else(name, copies):
    array = dict(layouts())[name]
    base = array if array.base is None else array.base
    gain = 0.5 / math.sqrt(copies)
    compiled, numpy = copy.deepcopy(array), copy.deepcopy(array)
    assert SecureSigns(copies).add(array, 0.5) == 0
    if copies == 1:
        assert (np.abs(array) == 0.5).all()
        if isinstance(base, np.ndarray) and base.dtype == array.dtype:
            assert np.count_nonzero(base) == array.size
    else:
        assert (array.astype(float) / gain % 2 == 0).all()
        assert array.size < 99 or array.astype(float).std() > 0.4
    added(name, compiled, copies=copies)
    added(name, numpy, copies=copies, compiled=False)
    np.testing.assert_array_equal(compiled, numpy)


@pytest.mark.parametrize(
    "tensor", list(tensors()), ids=lambda t: f"{t.dtype}-{tuple(t.shape)}-{t.stride()}"
)
@PATHS
def test_every_tensor_has_all_of_its_coordinates_replaced_and_nothing_else(tensor, compiled):
    with torch.no_grad():
        tensor.zero_()
    requires_grad = tensor.requires_grad
    assert SecureSigns(compiled=compiled).add(tensor, 0.5) == 0
    assert tensor.requires_grad == requires_grad
    assert (tensor.abs() == 0.5).all()
    storage = torch.tensor([], dtype=tensor.dtype).set_(tensor.detach().untyped_storage())
    assert torch.count_nonzero(storage) == tensor.numel()


@pytest.mark.parametrize("copies", [1, 7, 300])
def test_tensor_types_are_casts_of_the_same_release(copies):
    exact = torch.linspace(-2, 2, 4000, dtype=torch.float64).bfloat16().double()
    released = added("types", exact.clone(), scale=0.7, copies=copies)
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        narrow = added("types", exact.to(dtype), scale=0.7, copies=copies)
        cast = released.to(dtype)
        if dtype == torch.float16:  # torch would go through float32, and round twice
            cast = torch.from_numpy(released.numpy().astype(np.float16))
        torch.testing.assert_close(narrow, cast, rtol=0, atol=0)


def test_counts_change_nothing_and_pack_into_bits():
    values = np.linspace(-3, 3, 1001).astype(np.float32)
    before = values.copy()
    found = SecureSigns().counts([values, torch.ones(8)], 1.0)
    np.testing.assert_array_equal(values, before)
    assert found.dtype == np.uint32
    assert found.shape == (1009,)
    packed = np.packbits(found.astype(bool))
    assert packed.nbytes == 127
    np.testing.assert_array_equal(np.unpackbits(packed, count=1009), found)
    many = SecureSigns(70_000).counts(values, 1.0)
    assert many.max() <= 70_000
    assert many.min() > 34_000


# Attacks. There are k + 1 outputs, all possible under all secrets.


@SECRETS
@FLOATS
@PATHS
@pytest.mark.parametrize("copies", [1, 3])
def test_least_significant_bits_have_nothing_to_give_away(pair, dtype, compiled, copies):
    keywords = {"scale": 0.7, "copies": copies, "compiled": compiled}
    outputs = [
        added(f"secret {pair} {secret}", np.full(20_000, secret, dtype), **keywords)
        for secret in pair
    ]
    expected = estimates(np.arange(copies + 1), copies=copies, scale=0.7).astype(dtype)
    for released in outputs:
        np.testing.assert_array_equal(np.unique(released), expected)
    # The control: the same question, of torch's noise.
    kind = torch.float32 if dtype == np.float32 else torch.float64
    one, other = (set(torch_laplace(secret, 20_000, kind).tolist()) for secret in pair)
    assert len(one & other) < 0.9 * len(one)
    sample = torch_laplace(pair[0], 20_000, kind)
    assert possible_for_torch(sample, pair[0]).mean() > 0.99
    assert possible_for_torch(sample, pair[1]).mean() < 0.5


# Statistics.


def assert_binomial(found, copies, u):
    """Chi-square of counts against the exact binomial, rare ones together."""
    expected = stats.binom.pmf(np.arange(copies + 1), copies, float(positive(u))) * found.size
    observed = np.bincount(found, minlength=copies + 1)
    often = expected >= 10
    rare = found.size - expected[often].sum(), found.size - observed[often].sum()
    if rare[0] >= 10:
        expected, observed = (
            np.append(all_[often], few)
            for all_, few in zip((expected, observed), rare, strict=True)
        )
    else:
        assert rare[1] < 40
        expected, observed = expected[often] + rare[0] / often.sum(), observed[often]
        expected *= observed.sum() / expected.sum()
    assert stats.chisquare(observed, expected).pvalue > 1e-6


@PATHS
@pytest.mark.parametrize("copies", [1, 5, 64, 300])
@pytest.mark.parametrize("u", [0.0, 0.05, 0.5, 1.7, -0.5, -1.2])
@FLOATS
def test_counts_are_binomial(compiled, copies, u, dtype):
    scale, size = 0.9, 1_000_000 // copies

    def found(u):
        values = np.full(size, u * scale * math.sqrt(copies), dtype)
        return counts(f"law {copies}", values, scale=scale, copies=copies, compiled=compiled)

    assert_binomial(found(u), copies, u)
    for off in (0.02 + 0.05 * abs(u), -0.02 - 0.05 * abs(u)):
        assert_unlike(assert_binomial, found(u + off), copies, u)


def test_bits_are_independent():
    """Of other coordinates, other copies, other pieces and other calls."""

    def check(one, other):
        for distance in (0, 1, 2, 7, 8, 31, 32, 64):
            a, b = one[: one.size - distance], other[distance:]
            assert abs(np.mean(a * b)) * math.sqrt(a.size) < 5

    def bits(name):
        return 2.0 * counts(name, np.zeros(1_000_000, np.float32)) - 1

    first, second = bits("first"), bits("second")
    check(first, second)
    check(first[:-1], first[1:])
    check(first[: 1 << 16], first[1 << 16 : 1 << 17])
    assert_unlike(check, first, first)
    reused = second.copy()
    reused[::50] = first[::50]
    assert_unlike(check, first, reused)


def test_copies_are_independent():
    """Variance of the counts: a bit that two copies share would double its part of it."""

    def check(found, copies):
        ratio = found.var() / (copies / 4)
        assert abs(ratio - 1) * math.sqrt(found.size / 2) < 5

    for copies in (2, 33, 64, 128):
        found = counts(f"copies {copies}", np.zeros(40_000), copies=copies)
        check(found, copies)
        half = counts(f"copies {copies}", np.zeros(40_000), copies=copies // 2)
        assert_unlike(check, 2 * half, copies)


# Estimates.


def moments(u, copies):
    """Exact mean and variance of the estimate of ``u sqrt(k)``, at scale 1."""
    x = np.arange(copies + 1)
    weights = stats.binom.pmf(x, copies, float(positive(u)))
    found = estimates(x, copies=copies, scale=1.0)
    mean = float((weights * found).sum())
    return mean, float((weights * (found - mean) ** 2).sum())


@pytest.mark.parametrize("copies", [1, 2, 7, 64, 255])
@pytest.mark.parametrize("u", [0.0, 1e-3, 0.1, 0.5, 2.0, -0.3, -3.0])
def test_estimates_have_the_documented_mean_and_variance(copies, u):
    mean, variance = moments(u, copies)
    e = math.exp(-abs(u))
    assert mean == pytest.approx(math.copysign(math.sqrt(copies) * (1 - e), u), abs=1e-9)
    assert variance == pytest.approx(e * (2 - e), abs=1e-9)
    assert variance <= 1 + 1e-9


@pytest.mark.parametrize("copies", [256, 1000, 1024, 70_000])
def test_inverse_has_unit_gain_for_small_signals_and_nearly_so_for_others(copies):
    root = math.sqrt(copies)

    def gain(u):
        return moments(u, copies)[0] / (root * u)

    assert gain(1e-4 / root) == pytest.approx(1, abs=1e-5)
    assert moments(0.0, copies)[1] == pytest.approx(1, abs=1e-3)
    gains = [gain(u) for u in (0.1, 0.2, 0.5, 1.0, 1.5, 2.0, -0.5, -2.0)]
    # The noise bends the inverse at zero, by sqrt(2 / (pi k)) of gain, which is divided out there.
    # So it is missing elsewhere: in proportion, which is as good as a smaller rate.
    lost = math.sqrt(2 / (math.pi * copies))
    assert max(gains) / min(gains) < 1.015
    assert all(1 - 1.1 * lost < one < 1 + 0.1 * lost for one in gains)
    if copies >= 1024:
        assert all(abs(one - 1) < 0.025 for one in gains)
    # Without the inverse 57% were lost at u = 2.
    assert (1 - math.exp(-2)) / 2 < 0.44


@pytest.mark.parametrize("copies", [1, 2, 255, 256, 1024, 70_000])
def test_estimates_are_odd_and_monotone_and_finite(copies):
    x = np.arange(copies + 1)
    found = estimates(x, copies=copies, scale=0.7)
    assert np.isfinite(found).all()
    assert (np.diff(found) > 0).all() or copies >= 256
    assert (np.diff(found) >= 0).all()
    np.testing.assert_allclose(found, -found[::-1], rtol=1e-12, atol=1e-12)
    assert (np.sign(found) == np.sign(2 * x - copies)).all()


@given(st.integers(1, 2000), st.floats(1e-3, 1e3))
@settings(max_examples=50, deadline=None)
def test_estimates_scale_with_the_noise(copies, scale):
    x = np.arange(copies + 1)
    one = estimates(x, copies=copies, scale=1.0)
    np.testing.assert_allclose(estimates(x, copies=copies, scale=scale), one * scale, rtol=1e-12)


def test_estimates_take_what_counts_give():
    sampler = SecureSigns(5)
    found = sampler.counts(np.zeros((3, 4)), 2.0)
    assert estimates(found, copies=5, scale=2.0).shape == (12,)
    assert estimates(found.reshape(3, 4), copies=5, scale=2.0).shape == (3, 4)
    with pytest.raises(ValueError, match="copies must be an integer at least 1, got 0"):
        estimates(found, copies=0, scale=1.0)
    with pytest.raises(ValueError, match="scale must be a finite number above 0, got nan"):
        estimates(found, copies=1, scale=math.nan)


@pytest.mark.parametrize("wrong", [[6], [3, -1], [math.nan]])
def test_counts_that_cannot_be_are_refused(wrong):
    with pytest.raises(ValueError, match="counts must be from 0 to copies, which are 5"):
        estimates(wrong, copies=5, scale=1.0)


# Keys: fork, threads, files.

FORK = """
import os, sys
import numpy as np
from lap2.noise import SecureSigns

sampler = SecureSigns(int(sys.argv[1]), compiled=sys.argv[2] == "True")
sampler.counts(np.zeros(10), 1.0)
sampler.counts(np.zeros(3_000_000 // sampler.copies, np.float32), 1.0)  # with threads
for _ in range(3):
    if os.fork() == 0:
        break
os.write(1, np.packbits(sampler.counts(np.zeros(256), 1.0) % 2 == 1).tobytes())
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this platform")
@PATHS
@pytest.mark.parametrize("copies", [1, 65])
def test_forked_processes_do_not_share_bits(compiled, copies):
    command = [sys.executable, "-c", FORK, str(copies), str(compiled)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        found = process.stdout.read()  # until the last child has ended
    assert process.returncode == 0
    assert len(found) == 4 * 32
    assert len({found[at : at + 4] for at in range(0, 128, 4)}) == 32


def test_threads_do_not_share_bits():
    sampler = SecureSigns()
    arrays = [np.zeros(100_000, np.float32) for _ in range(8)]
    threads = [threading.Thread(target=sampler.add, args=(array, 1.0)) for array in arrays]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for one, other in itertools.combinations(arrays, 2):
        assert abs(float(np.mean(one * other))) * math.sqrt(one.size) < 6
    assert all((np.abs(array) == 1).all() for array in arrays)


@pytest.mark.parametrize("use", ["add", "counts"])
def test_every_call_takes_a_new_key_and_keeps_nothing(use, monkeypatch):
    keys = []

    def urandom(size, draw=os.urandom):
        keys.append(draw(size))
        return keys[-1]

    sampler = SecureSigns(65)
    monkeypatch.setattr(os, "urandom", urandom)
    first, second = np.zeros(200), np.zeros(200)
    one, other = getattr(sampler, use)(first, 1.0), getattr(sampler, use)(second, 1.0)
    assert [len(k) for k in keys] == [32, 32]
    assert keys[0] != keys[1]
    if use == "add":
        assert one == other == 0
        one, other = first, second
    assert not np.array_equal(one, other)
    assert sorted(vars(sampler)) == ["_kernel", "copies"]
    assert not [thing for thing in gc.get_objects() if type(thing) in (signs._Drawing, AesStream)]


@pytest.mark.parametrize(
    "save",
    [
        pickle.dumps,
        copy.copy,
        copy.deepcopy,
        lambda sampler: torch.save({"noise": sampler}, io.BytesIO()),
    ],
    ids=["pickle", "copy", "deepcopy", "torch.save"],
)
def test_sampler_cannot_be_saved(save):
    with pytest.raises(TypeError, match="SecureSigns must not be pickled"):
        save(SecureSigns())


@pytest.mark.parametrize("error", [OSError("no device"), NotImplementedError()])
@pytest.mark.parametrize("use", ["add", "counts"])
def test_entropy_failure_is_fatal_and_changes_nothing(error, use, monkeypatch):
    def fail(_):
        raise error

    monkeypatch.setattr(os, "urandom", fail)
    values = np.arange(10.0)
    with pytest.raises(EntropyError, match="gave no randomness") as info:
        getattr(SecureSigns(), use)(values, 1.0)
    assert info.value.__cause__ is error
    np.testing.assert_array_equal(values, np.arange(10.0))


def test_numba_is_optional(monkeypatch):
    monkeypatch.delattr(lap2.noise, "signs_compiled")
    monkeypatch.setitem(sys.modules, "lap2.noise.signs_compiled", None)
    assert SecureSigns()._kernel is signs_numpy
    assert SecureSigns().times(3)._kernel is signs_numpy
    with pytest.raises(ImportError, match="compiled=True needs numba"):
        SecureSigns(compiled=True)


@PATHS
def test_times_changes_the_copies_alone(compiled):
    sampler = SecureSigns(3, compiled=compiled)
    other = sampler.times(70)
    assert (sampler.copies, other.copies) == (3, 70)
    assert other._kernel is sampler._kernel is (signs_compiled if compiled else signs_numpy)


# What goes in and what is refused.

SAMPLERS = pytest.mark.parametrize(
    "sampler",
    [
        SecureSigns(),
        SecureSigns(compiled=False),
        SecureSigns(64),
        SecureSigns(300, compiled=False),
        ReproducibleSigns(1),
        ReproducibleSigns(1, 300),
    ],
    ids=lambda s: f"{type(s).__name__} {s.copies} {getattr(s, '_kernel', signs_numpy).__name__}",
)


@SAMPLERS
@FLOATS
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [0, 70_000, -1])
def test_coordinates_that_are_not_finite_are_refused(sampler, dtype, bad, place):
    values = np.ones(140_000, dtype)
    values[place] = bad
    before = values.copy()
    for use in ("add", "counts") if sampler.is_secure else ("add",):
        with pytest.raises(ValueError, match="array must be finite, got a coordinate that is not"):
            getattr(sampler, use)([np.zeros(3), values], 1.0)
    np.testing.assert_array_equal(values, before)


@SAMPLERS
@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_refusal_covers_tensors(sampler, kind):
    tensor = torch.tensor([1.0, math.nan], dtype=kind)
    with pytest.raises(ValueError, match="got a coordinate that is not"):
        sampler.add(tensor, 1.0)
    assert tensor[0] == 1


@SAMPLERS
@FLOATS
def test_largest_values_and_extreme_scales_are_taken(sampler, dtype):
    """Coordinates that a scale makes huge or nothing; both at once in one array."""
    limits = np.finfo(dtype)
    for scale in SCALES:
        values = np.array([limits.max, limits.min, 0.0, -0.0] * 500, dtype)
        sampler.add(values, scale)
        assert np.isfinite(values).all()
        if scale < 1:
            assert (values[::4] == values[0]).all()
            assert (values[1::4] == -values[0]).all()
        zeros = values.reshape(-1, 4)[:, 2:].astype(float) / scale
        if 2.0**-120 < scale < 2.0**120 or dtype == np.float64:
            assert abs(np.sign(zeros).mean()) < 0.2  # 6 standard errors
            assert zeros.std() == pytest.approx(1, rel=0.2)


@SAMPLERS
@pytest.mark.parametrize(
    ("scale", "error", "message"),
    [
        (0.0, ValueError, r"scale must be a finite number above 0, got 0\.0"),
        (-1.0, ValueError, r"scale must be a finite number above 0, got -1\.0"),
        (math.nan, ValueError, "scale must be a finite number above 0, got nan"),
        (math.inf, ValueError, "scale must be a finite number above 0, got inf"),
        (5e-324, ValueError, r"scale must be between 2\^-900 and 2\^900, got 5e-324"),
        (1e300, ValueError, r"scale must be between 2\^-900 and 2\^900, got 1e\+300"),
        (True, TypeError, "scale must be a finite number above 0, got True of type bool"),
        ("1", TypeError, "scale must be a finite number above 0, got '1' of type str"),
    ],
)
def test_scales_that_make_no_noise_are_refused(sampler, scale, error, message):
    values = np.ones(5)
    with pytest.raises(error, match=message):
        sampler.add(values, scale)
    with pytest.raises(error, match=message):
        sampler.added_sensitivity(scale, 5)
    assert (values == 1).all()


def test_scale_may_be_any_real_number():
    expected = counts("real", np.ones(1000), scale=2.0)
    for scale in (2, np.float32(2), np.float64(2), np.int64(2)):
        np.testing.assert_array_equal(counts("real", np.ones(1000), scale=scale), expected)


def repeated():
    return np.lib.stride_tricks.as_strided(np.zeros(1), (5,), (0,))


def read_only():
    values = np.zeros(3)
    values.flags.writeable = False
    return values


@SAMPLERS
@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: np.zeros(3, np.int64), TypeError, "array must be of type float16.*, got int64"),
        (lambda: np.zeros(3, complex), TypeError, "array must be of type float16.*complex128"),
        (lambda: torch.zeros(3, dtype=torch.int32), TypeError, "floating-point.*torch.int32"),
        (lambda: torch.zeros(3).to_sparse(), TypeError, "array must be dense.*torch.sparse_coo"),
        (lambda: [[1.0]], TypeError, "array must be a NumPy array or a torch tensor, got float"),
        (read_only, ValueError, "array must be writable, got a read-only one"),
        (repeated, ValueError, r"array must not repeat memory, got strides \(0,\)"),
        (lambda: torch.zeros(1).expand(5), ValueError, "array must not repeat memory"),
    ],
)
def test_arrays_that_cannot_be_replaced_are_refused(sampler, make, error, message):
    untouched = np.zeros(3)
    with pytest.raises(error, match=message):
        sampler.add([untouched, make()], 1.0)
    assert (untouched == 0).all()


@pytest.mark.parametrize("make", [SecureSigns, lambda copies: ReproducibleSigns(1, copies)])
def test_copies_that_cannot_be_are_refused(make):
    for copies, error, message in [
        (0, ValueError, "copies must be an integer at least 1, got 0"),
        (-1, ValueError, "copies must be an integer at least 1, got -1"),
        (2**24 + 1, ValueError, "copies must be at most 16777216, got 16777217"),
        (1.5, TypeError, "copies must be an integer at least 1, got 1.5"),
        (True, TypeError, "copies must be an integer at least 1, got True"),
    ]:
        with pytest.raises(error, match=message):
            make(copies)
        with pytest.raises(error, match=message):
            make(1).times(copies)


@pytest.mark.parametrize("compiled", [False, True])
def test_the_most_copies_are_possible(compiled):
    found = counts("most", np.array([0.0, 2.0**12, -(2.0**12)]), copies=2**24, compiled=compiled)
    deviations = (found / 2**24 - positive([0, 1, -1])) * 2**12
    assert (np.abs(deviations) < 3).all()


@SAMPLERS
def test_low_precision_is_clamped_never_infinite(sampler):
    half = np.ones(5000, np.float16)
    sampler.add(half, 1e9)
    assert (np.abs(half) <= 65504).all()
    assert (np.abs(half) == 65504).mean() > 0.85
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        largest = torch.finfo(dtype).max
        tensor = torch.ones(5000, dtype=dtype)
        sampler.add(tensor, largest * 1e4)
        assert tensor.isfinite().all()
        assert (tensor.abs() == largest).float().mean() > 0.85


@SAMPLERS
def test_nothing_to_do_is_done(sampler):
    for empty in ([], (), np.zeros(0), np.zeros((3, 0)), torch.zeros(0), torch.zeros(0, 2).T):
        assert sampler.add(empty, 1.0) == 0
        if sampler.is_secure:
            assert sampler.counts(empty, 1.0).size == 0


def test_importing_signs_imports_no_torch_and_no_numba():
    code = "import sys, lap2.noise.signs; assert not {'torch', 'numba'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("copies", [1, 64])
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@PATHS
def test_a_large_array_needs_a_few_megabytes_more(dtype, compiled, copies):
    values = np.zeros(10_000_000 // copies, dtype)
    sampler = SecureSigns(copies, compiled=compiled)
    sampler.add(values[:10], 1.0)
    tracemalloc.start()
    try:
        sampler.add(values, 1.0)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 4e6 * (os.cpu_count() or 1)


# What the accountant is told.


@SAMPLERS
def test_nothing_is_added_to_the_sensitivity(sampler):
    assert sampler.added_sensitivity(1.0, 125_000_000) == 0
    assert sampler.add(np.zeros(10), 1.0) == 0
    accounted = accounted_noise_multiplier(sampler, scale=2.0, max_grad_norm=1.0, size=10**8)
    assert 2 * (1 - 2.0**-50) < accounted < 2
    check_law(sampler, "laplace")
    with pytest.raises(ValueError, match="must draw gaussian noise"):
        check_law(sampler, "gaussian")
    with pytest.raises(ValueError, match="size must be an integer at least 0, got -1"):
        sampler.added_sensitivity(1.0, -1)


def test_a_neighbour_changes_the_odds_by_no_more_than_laplace_noise_does():
    """The likelihood ratio of a bit is at most ``exp(|distance| / b)``, and reaches it."""
    u = np.linspace(-3, 3, 601)
    p = positive(u)
    ratios = np.concatenate([p[1:] / p[:-1], (1 - p[:-1]) / (1 - p[1:])])
    assert ratios.max() <= math.exp(0.01) * (1 + 1e-12)
    assert ratios.max() >= math.exp(0.01) * (1 - 1e-9)


# The sampler that promises nothing.


def test_reproducible_signs_repeat_themselves_and_say_that_they_are_not_secure():
    def sample(seed, copies=1):
        values = np.zeros(1000)
        assert ReproducibleSigns(seed, copies).add(values, 2.0) == 0
        return values

    np.testing.assert_array_equal(sample(3), sample(3))
    assert 0.4 < (sample(3) == sample(4)).mean() < 0.6
    assert not np.array_equal(sample(3, 64), sample(4, 64))
    assert ReproducibleSigns.is_secure is False
    assert SecureSigns.is_secure is True
    assert "no guarantee" in ReproducibleSigns.__doc__
    with pytest.raises(ValueError, match="seed must be an integer at least 0, got -1"):
        ReproducibleSigns(-1)


def test_other_numbers_of_copies_go_on_with_the_same_generator():
    def sample(*uses):
        values = np.zeros((len(uses), 1000))
        for row, use in zip(values, uses, strict=True):
            use.add(row, 1.0)
        return values

    first, second = ReproducibleSigns(7), ReproducibleSigns(7)
    one = sample(first, first.times(5), first)
    other = sample(second, second.times(5), second.times(1))
    np.testing.assert_array_equal(one, other)
    assert not np.array_equal(one[0], one[2])
    again = ReproducibleSigns(7)
    assert not np.array_equal(sample(again, again)[1], one[2])
    assert first.times(5).copies == 5


@pytest.mark.parametrize("copies", [1, 5, 64, 300])
@pytest.mark.parametrize("u", [0.0, 0.5, -1.2])
@FLOATS
def test_reproducible_signs_have_the_same_law(copies, u, dtype):
    scale, size = 0.9, 1_000_000 // copies
    table = estimates(np.arange(copies + 1), copies=copies, scale=scale).astype(dtype)

    def found(u):
        values = np.full(size, u * scale * math.sqrt(copies), dtype)
        ReproducibleSigns(11, copies).add(values, scale)
        where = np.searchsorted(table, values)
        np.testing.assert_array_equal(table[where], values)
        return where

    assert_binomial(found(u), copies, u)
    for off in (0.02 + 0.05 * abs(u), -0.02 - 0.05 * abs(u)):
        assert_unlike(assert_binomial, found(u + off), copies, u)
