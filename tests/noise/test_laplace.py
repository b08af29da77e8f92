"""The noise: attacks it must survive, exactness it must show, misuse it must refuse.

Statistical tests use fixed keys, so that they do not flake; each comes with a sampler that is
slightly wrong and that it must reject.
"""

import copy
import gc
import hashlib
import io
import math
import os
import pickle
import subprocess
import sys
import threading
import tracemalloc
from fractions import Fraction

import mpmath as mp
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
    ReproducibleGaussian,
    ReproducibleLaplace,
    SecureGaussian,
    SecureLaplace,
    accounted_noise_multiplier,
    grid_compiled,
    grid_numpy,
)
from lap2.noise import grid as noise
from lap2.noise.grid_exact import laplace_floor

KERNELS = pytest.mark.parametrize("kernel", [grid_numpy, grid_compiled], ids=["numpy", "compiled"])
LAWS = pytest.mark.parametrize("secure", [SecureLaplace, SecureGaussian])
PATHS = pytest.mark.parametrize("compiled", [False, True], ids=["numpy", "compiled"])
FLOATS = pytest.mark.parametrize("dtype", [np.float32, np.float64])
KEY = bytes(range(32))
U_MASK = (1 << 63) - 1
MP = mp.MPContext()
MP.dps = 200


def key(name):
    return hashlib.sha256(name.encode()).digest()


def draws(
    name, *, secure=SecureLaplace, size=1, scale=1.0, secret=0.0, dtype=np.float64, compiled=True
):
    values = np.full(size, secret, dtype)
    secure(compiled=compiled)._add_with_key(values, scale, key(name))
    return values


def random_words(name, size):
    return np.random.default_rng(list(key(name))).integers(0, 2**64, size, dtype=np.uint64)


def mp_floor(numerator, bits, ratio):
    """``floor(-ln(numerator / 2^bits) ratio)`` for a positive numerator."""
    return int(MP.floor(-MP.log(MP.mpf(numerator) / MP.mpf(2) ** bits) * MP.mpf(ratio)))


# Attacks. A sampler loses if some output under one secret is impossible under the other.


def torch_laplace(secret, size, dtype):
    loc = torch.full((size,), secret, dtype=dtype)
    with torch.random.fork_rng():
        torch.manual_seed(4)
        return torch.distributions.Laplace(loc, 1.0).sample()


def possible_for_torch(outputs, secret):
    """Least significant bits: is there a uniform variate from which torch makes this output?"""
    dtype = outputs.dtype
    digits, eps = (24, 2.0**-23) if dtype == torch.float32 else (53, 2.0**-52)
    loc = torch.tensor(secret, dtype=dtype)
    x = outputs.double() - loc.double()
    u = x.sign() * -torch.expm1(-x.abs())
    nearest = torch.round((u - (eps - 1)) / (2 - eps) * 2.0**digits).numpy()
    found = torch.zeros(outputs.shape, dtype=torch.bool)
    for offset in range(-4, 5):
        r = (nearest + offset) * 2.0**-digits
        fused = r.astype(np.longdouble) * (2 - eps) + (eps - 1)
        twice_rounded = torch.tensor(r, dtype=dtype) * (2 - eps) + (eps - 1)
        for u in (torch.tensor(fused.astype(np.float64), dtype=dtype), twice_rounded):
            found |= loc - u.sign() * torch.log1p(-u.abs()) == outputs
    return found.numpy()


def possible_for_numpy(outputs, secret):
    """The same for NumPy, whose uniforms are multiples of 2^-53 and whose logarithm is C's."""

    def made(u):
        return secret - math.log(2.0 - u - u) if u >= 0.5 else secret + math.log(u + u)

    def any_near(y):
        half = math.exp(-abs(y - secret)) / 2
        nearest = round((half if y < secret else 1 - half) * 2.0**53)
        near = range(max(nearest - 4, 1), min(nearest + 5, 2**53))
        return any(made(k * 2.0**-53) == y for k in near)

    return np.array([any_near(y) for y in outputs.tolist()])


def possible_for_ours(outputs, secret, scale):
    """Every integer is a possible noise, so all that can be impossible is to be off the lattice."""
    grid = noise._grid(scale, outputs.size)
    steps = outputs.astype(np.float64) / grid
    if outputs.dtype == np.float64:
        return (steps - np.rint(secret / grid) - 0.5) % 1 == 0
    nearest = np.floor(steps) + 0.5  # float32 rounds the lattice
    return ((nearest * grid).astype(np.float32) == outputs) | (
        ((nearest - 1) * grid).astype(np.float32) == outputs
    )


SECRETS = pytest.mark.parametrize("pair", [(0.0, 1.0), (0.3, 0.3001), (1.0, 0.0)])


@SECRETS
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_least_significant_bits_give_torch_away(pair, dtype):
    secret, other = pair
    outputs = torch_laplace(secret, 20_000, dtype)
    assert possible_for_torch(outputs, secret).mean() > 0.99
    assert possible_for_torch(outputs, other).mean() < 0.5


@SECRETS
def test_least_significant_bits_give_numpy_away(pair):
    secret, other = pair
    outputs = np.random.default_rng(4).laplace(secret, 1.0, 5000)
    assert possible_for_numpy(outputs, secret).mean() > 0.99
    assert possible_for_numpy(outputs, other).mean() < 0.5


@SECRETS
@FLOATS
@PATHS
@LAWS
@pytest.mark.parametrize("scale", [1.0, 0.7])
def test_least_significant_bits_do_not_give_us_away(pair, dtype, compiled, secure, scale):
    secret, other = (dtype(value) for value in pair)
    outputs = draws(
        f"bits {pair}", secure=secure, size=20_000, scale=scale, secret=secret, dtype=dtype,
        compiled=compiled,
    )  # fmt: skip
    assert possible_for_ours(outputs, secret, scale).all()
    assert possible_for_ours(outputs, other, scale).all()
    assert not possible_for_ours(outputs * dtype(1.001), other, scale).all()


def finer_than_one_allows(outputs, dtype):
    """Precision: ``1 + x`` near 0 is a multiple of half an ulp of 1; the share that is not."""
    near = outputs[np.abs(outputs) < 1 / 8].astype(np.float64)
    return float(np.mean(near % (np.finfo(dtype).eps / 2) != 0))


@FLOATS
def test_precision_gives_torch_and_numpy_away(dtype):
    kind = torch.float32 if dtype == np.float32 else torch.float64
    rng = np.random.default_rng(5)
    for sample in (
        lambda secret: torch_laplace(secret, 100_000, kind).numpy(),
        lambda secret: dtype(secret) + rng.laplace(0.0, 1.0, 100_000).astype(dtype),
    ):
        assert finer_than_one_allows(sample(1.0), dtype) == 0
        assert finer_than_one_allows(sample(0.0), dtype) > 0.8


@FLOATS
@LAWS
def test_precision_does_not_give_us_away(dtype, secure):
    """Near zero both secrets make the same lattice, and use all of it."""
    for secret in (0.0, 1.0):
        near = draws(f"precision {secret}", secure=secure, size=400_000, secret=secret, dtype=dtype)
        near = near[np.abs(near) < 2.0**-8].astype(np.float64)  # float32 holds the lattice there
        halves = near * 2.0**31
        assert near.size > 400
        assert (halves % 2 == 1).all()
        # All residues of the lattice are equally frequent: trailing bits do not know the secret.
        residues = np.bincount(((halves - 1) / 2 % 8).astype(int), minlength=8)
        assert stats.chisquare(residues).pvalue > 1e-4


# Exactness.


def assert_unlike(check, *arguments, **keywords):
    """The negative control: the check must fail."""
    with pytest.raises(AssertionError):
        check(*arguments, **keywords)


def exact_bins(steps, ratio, edges):
    """Chi-square of signed grid steps K against ``P(|K + 1/2| >= m + 1/2) = exp(-m / ratio)``."""
    magnitude = np.abs(steps + 0.5) - 0.5
    bins = np.searchsorted(edges, magnitude, side="right") - 1
    observed = np.bincount(2 * bins + (steps < 0), minlength=2 * len(edges))
    upper = np.exp(-np.append(edges, np.inf) / ratio)
    expected = np.repeat((upper[:-1] - upper[1:]) / 2, 2) * steps.size
    assert stats.chisquare(observed, expected).pvalue > 1e-6


def assert_moments(values, scale):
    """E|x| = b and E x^2 = 2 b^2, whose sample means have standard errors b and sqrt(20) b^2."""
    root = math.sqrt(values.size)
    assert abs(np.abs(values).mean() / scale - 1) * root < 5
    assert abs(np.square(values).mean() / scale**2 - 2) * root < 5 * math.sqrt(20)


@PATHS
@pytest.mark.parametrize("scale", [1.0, 1.9])
def test_mass_function_is_exact(compiled, scale):
    """Chi-square on 32 bins of equal probability; their edges are grid points."""
    grid = noise._grid(scale, 1)
    edges = np.floor(-np.log1p(-np.arange(16) / 16) * scale / grid)

    def steps(scale):
        return draws("mass", size=4_000_000, scale=scale, compiled=compiled) / grid - 0.5

    exact_bins(steps(scale), scale / grid, edges)
    assert_unlike(exact_bins, steps(scale * 1.005), scale / grid, edges)
    assert_unlike(exact_bins, steps(scale * 0.995), scale / grid, edges)


@KERNELS
@pytest.mark.parametrize("ratio", [0.4, 3.0, 5.7])
def test_mass_function_of_single_integers_is_exact(kernel, ratio):
    """On a grid about as wide as the noise, every integer has its own bin."""
    words, steps = random_words("integers", 6_000_000), np.empty(6_000_000)
    edges = np.arange(int(7 * ratio) + 2)
    assert kernel.laplace(words, ratio, steps).size == 0
    exact_bins(steps - 0.5, ratio, edges)
    kernel.laplace(words, ratio * 1.005, steps)
    assert_unlike(exact_bins, steps - 0.5, ratio, edges)


@PATHS
@FLOATS
def test_moments(compiled, dtype):
    scale = 3.0
    values = draws("moments", size=4_000_000, scale=scale, dtype=dtype, compiled=compiled)
    assert_moments(values.astype(np.float64), scale)
    for wrong in (scale * 1.005, scale * 0.995):
        values = draws("moments", size=4_000_000, scale=wrong, dtype=dtype, compiled=compiled)
        assert_unlike(assert_moments, values.astype(np.float64), scale)


def test_signs_are_symmetric_and_independent_of_magnitudes():
    def check(values):
        root = math.sqrt(values.size)
        sign = np.sign(values)
        assert abs(sign.mean()) * root < 5
        assert abs((sign * np.abs(values)).mean()) * root < 5 * math.sqrt(2)
        assert abs((sign * (np.abs(values) < 1)).mean()) * root < 5

    values = draws("signs", size=4_000_000)
    check(values)
    few = np.arange(values.size) % 200 == 0
    assert_unlike(check, np.where(few, np.abs(values), values))  # 0.25% of the signs turned
    assert_unlike(check, values + 0.005)


def test_coordinates_and_calls_are_independent():
    def check(one, other):
        """Correlations of signs and of magnitudes at some distances, as standard normals."""
        for distance in (0, 1, 2, 7):
            a, b = one[: one.size - distance], other[distance:]
            root = math.sqrt(a.size)
            assert abs(np.mean(np.sign(a) * np.sign(b))) * root < 5
            assert abs(np.mean((np.abs(a) - 1) * (np.abs(b) - 1))) * root < 5

    first, second = draws("first", size=1_000_000), draws("second", size=1_000_000)
    check(first, second)
    check(first[:-1], first[1:])
    check(first[: 1 << 14], first[1 << 14 : 1 << 15])  # chunks
    assert_unlike(check, first, first)
    reused = second.copy()
    reused[::100] = first[::100]
    assert_unlike(check, first, reused)


# The same words give the same noise, however they are cut.

# Scale 1.5 on zeros, key 00 01 ... 1f: the first six coordinates.
KNOWN = {
    np.float64: [
        "-0x1.63033ee400000p-1",
        "-0x1.0d98213f40000p+3",
        "-0x1.626f1bb800000p-2",
        "0x1.1b4287a200000p+0",
        "-0x1.1964551a00000p+0",
        "-0x1.3542575300000p+1",
    ],
    np.float32: [
        "-0x1.63033e0000000p-1",
        "-0x1.0d98220000000p+3",
        "-0x1.626f1c0000000p-2",
        "0x1.1b42880000000p+0",
        "-0x1.1964560000000p+0",
        "-0x1.3542580000000p+1",
    ],
}


@PATHS
@FLOATS
def test_known_answers(compiled, dtype):
    values = np.zeros(6, dtype)
    SecureLaplace(compiled=compiled)._add_with_key(values, 1.5, KEY)
    assert [float(value).hex() for value in values] == KNOWN[dtype]


@PATHS
def test_noise_is_the_documented_function_of_the_key(compiled):
    """Recomputed from AES on single blocks and mpmath, without the code under test."""
    scale, size = 1.5, 500
    block = Cipher(algorithms.AES(KEY), modes.ECB()).encryptor()
    stream = b"".join(block.update(counter.to_bytes(16, "big")) for counter in range(size // 2))
    expected = []
    for index in range(size):
        word = int.from_bytes(stream[8 * index : 8 * index + 8], "little")
        extension = block.update(((1 << 127) + (index << 32)).to_bytes(16, "big"))
        u = ((word & U_MASK) << 128) | int.from_bytes(extension, "big")
        steps = mp_floor(u, 63 + 128, scale * 2.0**30) + 0.5
        expected.append(-steps if word >> 63 else steps)
    values = np.zeros(size)
    SecureLaplace(compiled=compiled)._add_with_key(values, scale, KEY)
    np.testing.assert_array_equal(values * 2.0**30, expected)


@FLOATS
@LAWS
@pytest.mark.parametrize("size", [1, 2, 3, 255, (1 << 14) - 1, (1 << 14) + 1, (1 << 20) + 12_347])
def test_compiled_and_numpy_paths_agree_in_every_bit(dtype, secure, size):
    results = []
    for compiled in (True, False):
        values = np.linspace(-3, 3, size).astype(dtype)
        secure(compiled=compiled)._add_with_key(values, 1.7, key(f"agree {size}"))
        results.append(values)
    np.testing.assert_array_equal(*results)


@PATHS
@LAWS
def test_result_does_not_depend_on_how_the_work_is_cut(compiled, secure, monkeypatch):
    size = 30_011

    def result(parts):
        values = np.linspace(-1, 1, size).astype(np.float32)
        cuts = np.split(values, parts)
        secure(compiled=compiled)._add_with_key(cuts, 0.7, KEY)
        return values

    whole = result([])
    for chunk, segment, processors in [(37, 1001, 1), (64, 64, 3), (1000, 999, 2), (16384, 1, 5)]:
        monkeypatch.setattr(noise, "_CHUNK", chunk)
        monkeypatch.setattr(noise, "_SEGMENT", segment if size / segment < 5000 else 100)
        monkeypatch.setattr(os, "cpu_count", lambda count=processors: count)
        np.testing.assert_array_equal(result([]), whole)
        np.testing.assert_array_equal(result([1, 8, 8, 20_000, 29_999]), whole)


# Samples that float64 cannot decide.

RATIOS = pytest.mark.parametrize("ratio", [2.0**30, 1.9 * 2.0**30, 1.37 * 2.0**32])


def boundary_words(ratio):
    """Words whose ``-ln(U) ratio`` is nearest an integer, from both sides, in all of the range."""
    rng = np.random.default_rng(11)
    targets = np.concatenate([rng.exponential(ratio, 400), rng.uniform(0, 43 * ratio, 200)])
    targets = np.concatenate([targets, [1, 2, 3, 1000], ratio * np.arange(1, 43)])
    words = []
    for k in np.rint(targets).astype(int).tolist():
        u = int(MP.floor(MP.exp(-MP.mpf(k) / MP.mpf(ratio)) * 2**63))
        # The integer is inside [u, u + 1); for large u the neighbours are too close to call, too.
        near = (u - 1, u, u + 1) if u > 2**54 else (u,)
        words += [w | sign for w in near for sign in (0, 1 << 63) if 0 < w <= U_MASK]
    return np.array(words, dtype=np.uint64)


EDGES = np.array([0, U_MASK, 1 << 63, (1 << 64) - 1, 1, 2, 3, (1 << 63) + 1], dtype=np.uint64)


@RATIOS
def test_boundary_words_are_as_adversarial_as_intended(ratio):
    words = [int(word) & U_MASK for word in boundary_words(ratio).tolist()]
    typical = [u for u in words if u > 2**58]
    for u in typical[:200]:
        y = -MP.log(MP.mpf(u) / 2**63) * MP.mpf(ratio)
        assert abs(y - MP.nint(y)) < MP.mpf(2) ** -56 * ratio
    assert len(typical) > 800


@KERNELS
@RATIOS
def test_kernels_leave_boundary_words_undecided(kernel, ratio):
    words = np.concatenate([boundary_words(ratio), EDGES])
    steps = np.empty(words.size)
    undecided = kernel.laplace(words, ratio, steps)
    assert undecided.tolist() == list(range(words.size))
    assert np.isnan(steps).all()  # what nobody settles must not look like noise


@KERNELS
@RATIOS
def test_small_words_wait_for_their_following_bits(kernel, ratio):
    """In the tail 63 bits are too few: a decision must hold for all U that begin with them."""
    exponents = np.random.default_rng(12).uniform(0, 50, 6000)
    words = np.floor(2**exponents).astype(np.uint64)
    steps = np.empty(words.size)
    undecided = kernel.laplace(words, ratio, steps)
    assert words[undecided].max() > ratio > words[undecided].min()
    assert words[np.isfinite(steps)].min() > ratio
    cut = 0
    for word, step in zip(words.tolist(), steps.tolist(), strict=True):
        low, high = mp_floor(word + 1, 63, ratio), mp_floor(word, 63, ratio)
        assert math.isnan(step) or low == high == step - 0.5
        cut += low != high and word > ratio
    assert cut > 50  # that many were at stake


def key_stream(counter, size):
    mode = modes.CTR(counter.to_bytes(16, "big"))
    return Cipher(algorithms.AES(KEY), mode).encryptor().update(bytes(size))


@KERNELS
@RATIOS
def test_undecided_words_are_settled_right(kernel, ratio):
    """Against mpmath, with the bits of U that the key stream supplies: none is wrong."""
    words = np.concatenate([boundary_words(ratio), EDGES])
    keyed = noise._KeyedNoise(kernel, "laplace", KEY, 1.0, ratio)
    wrong = 0
    for index, word in enumerate(words.tolist()):
        extension = key_stream((1 << 127) + (index << 32), 40)
        u = ((word & U_MASK) << 320) | int.from_bytes(extension, "big")
        steps = mp_floor(u, 63 + 320, ratio) + 0.5
        wrong += keyed._refined(words, index, index) != (-steps if word >> 63 else steps)
    assert wrong == 0


@RATIOS
def test_following_bits_decide_at_the_boundary_and_are_used(ratio):
    """The negative control of the last test: without more bits, some answers would be wrong."""
    keyed = noise._KeyedNoise(grid_numpy, "laplace", KEY, 1.0, ratio)
    words = boundary_words(ratio) & np.uint64(U_MASK)
    cut = [mp_floor(word, 63, ratio) + 0.5 for word in words.tolist()]
    settled = [keyed._refined(words, index, index) for index in range(words.size)]
    assert sum(a != b for a, b in zip(cut, settled, strict=True)) > 10


@RATIOS
@pytest.mark.parametrize("bits", [127, 191, 447])
def test_exact_floor_is_exact_or_declines(ratio, bits):
    rng = np.random.default_rng(13)
    one = 1 << bits
    numerators = [one - 1, one - 2, one - one // 2**60, 1, 2, 3, 2**64, one // 2, one // 3]
    numerators += [int.from_bytes(rng.bytes(bits // 8), "big") >> int(shift) for shift in range(60)]
    near = [
        int(MP.floor(MP.exp(-MP.mpf(k) / MP.mpf(ratio)) * one)) for k in (1, 7, 10**9, 2 * 10**10)
    ]
    numerators += [n + offset for n in near for offset in (-(2**50), -2, -1, 0, 1, 2, 2**50)]
    answered = 0
    for numerator in numerators:
        if numerator <= 0:
            continue
        answer = laplace_floor(numerator, bits, ratio)
        if answer is not None:
            answered += 1
            assert answer == mp_floor(numerator, bits, ratio)
            assert numerator + 1 == one or answer == mp_floor(numerator + 1, bits, ratio)
    assert answered > 60
    assert laplace_floor(0, bits, ratio) is None  # -ln U has no upper bound
    assert laplace_floor(one - 1, bits, ratio) == 0
    assert all(laplace_floor(n, bits, ratio) is None for n in near)  # U may be on either side


@KERNELS
@pytest.mark.parametrize("ratio", [2.0**30, 1.9 * 2.0**32, 2.0**46, 1.7 * 2.0**46, 2.0**47])
def test_no_decided_sample_is_wrong(kernel, ratio):
    """The error bound of the logarithm. The largest ratios leave no room beyond the margin."""
    powers = np.array([1 << k for k in range(63)], dtype=np.uint64)
    root = np.uint64(round(2**62.5))
    offsets = np.arange(-1000, 1000).astype(np.uint64)  # wraps around, as intended
    words = np.concatenate(
        [
            random_words(f"decided {ratio}", 400_000) >> np.uint64(1),
            powers,
            powers - np.uint64(1),
            powers + np.uint64(1),
            root + offsets,
            (root >> np.uint64(1)) + offsets,
            np.uint64(U_MASK) - np.arange(100_000, dtype=np.uint64) * np.uint64(997),
        ]
    )
    steps = np.empty(words.size)
    kernel.laplace(words, ratio, steps)
    decided = np.flatnonzero(~np.isnan(steps))
    assert decided.size > 0.01 * words.size
    steps, words = steps[decided], words[decided]
    # Wider floats judge all but the closest; mpmath judges those.
    y = -np.log(np.ldexp(words.astype(np.longdouble), -63)) * np.longdouble(ratio)
    unsure = np.longdouble(ratio) * 2.0**-56 * (1 + y / ratio)
    judged = np.abs(y - np.rint(y)) > unsure
    assert (np.floor(y[judged]) + 0.5 == steps[judged]).all()
    for word, step in zip(words[~judged].tolist()[:2000], steps[~judged].tolist(), strict=False):
        assert mp_floor(word, 63, ratio) + 0.5 == step


@KERNELS
def test_few_samples_are_undecided(kernel):
    words, steps = random_words("few", 4_000_000), np.empty(4_000_000)
    assert 4 <= kernel.laplace(words, 2.0**30, steps).size <= 60


# Keys: fork, threads, files.

FORK = """
import os, sys
import numpy as np
from lap2 import noise

sampler = getattr(noise, sys.argv[1])(compiled=sys.argv[2] == "True")
sampler.add(np.zeros(10), 1.0)
sampler.add(np.zeros(3_000_000, np.float32), 1.0)  # with threads
for _ in range(3):
    if os.fork() == 0:
        break
noise = np.zeros(4)
sampler.add(noise, 1.0)
os.write(1, (" ".join(x.hex() for x in noise.tolist()) + "\\n").encode())
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this platform")
@PATHS
@LAWS
def test_forked_processes_do_not_share_noise(compiled, secure):
    command = [sys.executable, "-c", FORK, secure.__name__, str(compiled)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        lines = process.stdout.read().splitlines()  # until the last child has ended
    values = [value for line in lines for value in line.split()]
    assert process.returncode == 0
    assert len(lines) == 4
    assert len(set(values)) == 16


def test_threads_do_not_share_noise():
    sampler = SecureLaplace()
    arrays = [np.zeros(100_000) for _ in range(8)]
    threads = [threading.Thread(target=sampler.add, args=(array, 1.0)) for array in arrays]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert np.unique(np.concatenate(arrays)).size > 0.999 * 800_000
    for array in arrays:
        assert_moments(array, 1.0)


@LAWS
def test_every_call_takes_a_new_key_and_keeps_nothing(secure, monkeypatch):
    keys = []

    def urandom(count, draw=os.urandom):
        keys.append(draw(count))
        return keys[-1]

    sampler = secure()
    monkeypatch.setattr(os, "urandom", urandom)
    first, second = np.zeros(100), np.zeros(100)
    sampler.add(first, 1.0)
    sampler.add(second, 1.0)
    assert [len(k) for k in keys] == [32, 32]
    assert keys[0] != keys[1]
    assert not np.isin(first, second).any()
    assert list(vars(sampler)) == ["_kernel"]
    assert not [thing for thing in gc.get_objects() if type(thing) is noise._KeyedNoise]


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
@LAWS
def test_sampler_cannot_be_saved(save, secure):
    with pytest.raises(TypeError, match=f"{secure.__name__} must not be pickled"):
        save(secure())


@pytest.mark.parametrize("error", [OSError("no device"), NotImplementedError()])
@LAWS
def test_entropy_failure_is_fatal_and_changes_nothing(error, secure, monkeypatch):
    def fail(_):
        raise error

    monkeypatch.setattr(os, "urandom", fail)
    values = np.arange(10.0)
    with pytest.raises(EntropyError, match="gave no randomness") as info:
        secure().add(values, 1.0)
    assert info.value.__cause__ is error
    np.testing.assert_array_equal(values, np.arange(10.0))


def test_numba_is_optional(monkeypatch):
    monkeypatch.delattr(lap2.noise, "grid_compiled")
    monkeypatch.setitem(sys.modules, "lap2.noise.grid_compiled", None)
    assert SecureLaplace()._kernel is grid_numpy
    with pytest.raises(ImportError, match="compiled=True needs numba"):
        SecureLaplace(compiled=True)


# What goes in and what is refused.

SAMPLERS = pytest.mark.parametrize(
    "sampler",
    [
        SecureLaplace(),
        SecureLaplace(compiled=False),
        ReproducibleLaplace(1),
        SecureGaussian(),
        SecureGaussian(compiled=False),
        ReproducibleGaussian(1),
    ],
    ids=lambda s: f"{type(s).__name__} {getattr(getattr(s, '_kernel', None), '__name__', '')}",
)


@SAMPLERS
@FLOATS
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 2.0**33, -(2.0**33)])
@pytest.mark.parametrize("place", [0, 20_000, -1])
def test_coordinates_off_the_grid_are_refused(sampler, dtype, bad, place):
    values = np.ones(40_000, dtype)
    values[place] = bad
    before = values.copy()
    with pytest.raises(ValueError, match=r"array must be finite and smaller than 4294967296\.0"):
        sampler.add([np.zeros(3), values], 1.0)
    np.testing.assert_array_equal(values, before)


def test_refusal_tells_the_value_and_covers_tensors():
    with pytest.raises(ValueError, match=r"at scale 0\.5, got a coordinate that is not"):
        SecureLaplace().add(np.array([1.0, -3e99, 5e50]), 0.5)
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        tensor = torch.tensor([1.0, math.nan], dtype=dtype)
        with pytest.raises(ValueError, match="got a coordinate that is not"):
            SecureLaplace().add(tensor, 1.0)
        assert tensor[0] == 1


@PATHS
def test_largest_accepted_values_stay_on_their_grid(compiled):
    limit = np.nextafter(2.0**32, 0)
    values = np.array([limit, -limit] * 50)
    SecureLaplace(compiled=compiled).add(values, 1.0)
    assert np.isfinite(values).all()
    assert (np.abs(np.abs(values) - 2.0**32) < 60).all()


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


@pytest.mark.parametrize("scale", [2.0**-900, 1e-200, 1e-30, 1e30, 1e200, 2.0**900])
@PATHS
def test_extreme_scales(scale, compiled):
    values = draws("extreme", size=200_000, scale=scale, compiled=compiled)
    assert_moments(values / scale, 1.0)


def test_scale_may_be_any_real_number():
    expected = draws("real", size=100, scale=2.0)
    for scale in (2, np.float32(2), np.float64(2), np.int64(2), Fraction(2)):
        np.testing.assert_array_equal(draws("real", size=100, scale=scale), expected)


def repeated():
    return np.lib.stride_tricks.as_strided(np.zeros(1), (5,), (0,))


@SAMPLERS
@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: np.zeros(3, np.int64), TypeError, "array must be of type float16.*, got int64"),
        (lambda: np.zeros(3, complex), TypeError, "array must be of type float16.*complex128"),
        (lambda: np.zeros(3, np.longdouble), TypeError, "array must be of type float16"),
        (lambda: torch.zeros(3, dtype=torch.int32), TypeError, "floating-point.*torch.int32"),
        (lambda: torch.zeros(3).to_sparse(), TypeError, "array must be dense.*torch.sparse_coo"),
        (lambda: [[1.0]], TypeError, "array must be a NumPy array or a torch tensor, got float"),
        (lambda: 1.0, TypeError, "array must be a NumPy array or a torch tensor, got float"),
        (lambda: np.broadcast_to(1.0, 3), ValueError, "array must be writable"),
        (repeated, ValueError, r"array must not repeat memory, got strides \(0,\)"),
        (lambda: torch.zeros(1).expand(5), ValueError, "array must not repeat memory"),
        (
            lambda: torch.zeros(1, dtype=torch.bfloat16).expand(5),
            ValueError,
            "array must not repeat memory",
        ),
    ],
)
def test_arrays_that_cannot_take_noise_are_refused(sampler, make, error, message):
    untouched = np.zeros(3)
    with pytest.raises(error, match=message):
        sampler.add([untouched, make()], 1.0)
    assert (untouched == 0).all()


def test_read_only_arrays_are_refused():
    values = np.zeros(3)
    values.flags.writeable = False
    with pytest.raises(ValueError, match="array must be writable, got a read-only one"):
        SecureLaplace().add(values, 1.0)


@SAMPLERS
def test_low_precision_is_clamped_never_infinite(sampler):
    half = np.zeros(5000, np.float16)
    sampler.add(half, 1e6)
    assert (np.abs(half) <= 65504).all()
    assert (np.abs(half) == 65504).mean() > 0.9
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        largest = torch.finfo(dtype).max
        tensor = torch.zeros(5000, dtype=dtype)
        sampler.add(tensor, largest * 2.0)
        assert tensor.isfinite().all()
        assert (tensor.abs() == largest).float().mean() > 0.4
    single = np.zeros(5000, np.float32)
    sampler.add(single, 1e39)
    assert (np.abs(single) == np.finfo(np.float32).max).mean() > 0.5


@SAMPLERS
def test_nothing_to_do_is_done(sampler):
    for empty in ([], (), np.zeros(0), np.zeros((3, 0)), torch.zeros(0), torch.zeros(0, 2).T):
        assert sampler.add(empty, 1.0) == 0
    bfloat = torch.zeros(2, 0, dtype=torch.bfloat16)
    assert sampler.add(bfloat, 1.0) == sampler.added_sensitivity(1.0, 0) == 0


def layouts():
    base = np.zeros((40, 30, 20))
    yield "0-d", np.zeros(())
    yield "2-d", np.zeros((300, 40), np.float32)
    yield "transposed", np.zeros((300, 40), np.float32).T
    yield "permuted", base.transpose(1, 2, 0)
    yield "every second", np.zeros(999)[::2]
    yield "reversed", np.zeros(999)[::-1]
    yield "inner slice", base[1:-1, ::3, 2:7]
    yield "transposed slice", base[1:-1, ::3, 2:7].T
    yield "columns", np.zeros((5000, 4), np.float32)[:, 1]
    yield "half", np.zeros((30, 30), np.float16)[:, ::2]
    yield "big-endian", np.zeros(100, ">f4")
    yield "unaligned", np.zeros(100, np.dtype([("a", "i1"), ("b", "f8")]))["b"]
    yield "packed", np.frombuffer(bytearray(8 * 100 + 1), dtype=np.float64, offset=1)


@pytest.mark.parametrize("name", [name for name, _ in layouts()])
@SAMPLERS
def test_every_layout_gets_noise_on_every_coordinate_and_nowhere_else(sampler, name):
    array = dict(layouts())[name]
    base = array if array.base is None else array.base
    returned = sampler.add(array, 1.0)
    assert returned == sampler.added_sensitivity(1.0, array.size)
    assert (array != 0).all()
    assert np.unique(array).size > 0.9 * array.size
    if isinstance(base, np.ndarray) and base.dtype == array.dtype:
        assert np.count_nonzero(base) == array.size


def tensors():
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        yield torch.zeros((), dtype=dtype)
        yield torch.zeros(30, 40, dtype=dtype)
        yield torch.zeros(30, 40, dtype=dtype).T
        yield torch.zeros(2, 3, 8, 9, dtype=dtype).to(memory_format=torch.channels_last)
        yield torch.zeros(30, 40, dtype=dtype)[::2, 3:-3].T
        yield torch.zeros(3000, 2, dtype=dtype)[:, 1:]
        yield torch.zeros(7, 5, dtype=dtype, requires_grad=True)
        yield torch.nn.Parameter(torch.zeros(50, dtype=dtype))


@pytest.mark.parametrize(
    "tensor", list(tensors()), ids=lambda t: f"{t.dtype}-{tuple(t.shape)}-{t.stride()}"
)
@PATHS
def test_every_tensor_gets_noise_on_every_coordinate_and_nowhere_else(tensor, compiled):
    sampler = SecureLaplace(compiled=compiled)
    with torch.no_grad():
        tensor.zero_()
    requires_grad = tensor.requires_grad
    returned = sampler.add(tensor, 1.0)
    assert returned == sampler.added_sensitivity(1.0, tensor.numel())
    assert tensor.requires_grad == requires_grad
    assert (tensor != 0).all()
    storage = torch.tensor([], dtype=tensor.dtype).set_(tensor.detach().untyped_storage())
    assert torch.count_nonzero(storage) == tensor.numel()


@LAWS
def test_tensor_types_are_casts_of_the_same_release(secure):
    exact = torch.linspace(-2, 2, 4000, dtype=torch.float64).bfloat16().double()
    released = exact.clone()
    secure()._add_with_key(released, 1.0, KEY)
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        narrow = exact.to(dtype)
        secure()._add_with_key(narrow, 1.0, KEY)
        cast = released.to(dtype)
        if dtype == torch.float16:  # torch would go through float32, and round twice
            cast = torch.from_numpy(released.numpy().astype(np.float16))
        torch.testing.assert_close(narrow, cast, rtol=0, atol=0)


@LAWS
def test_list_is_noised_like_one_array(secure):
    whole = np.zeros(3000)
    parts = [np.zeros(1000), torch.zeros(10, 50, dtype=torch.float64), np.zeros((1500, 1))]
    total = secure()._add_with_key(whole, 1.0, KEY)
    assert secure()._add_with_key(parts, 1.0, KEY) == total
    np.testing.assert_array_equal(np.concatenate([np.ravel(part) for part in parts]), whole)


def test_importing_the_sampler_imports_no_torch_and_no_numba():
    code = "import sys, lap2.noise; assert not {'torch', 'numba'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


# What the accountant is told.


@pytest.mark.parametrize("scale", [1.0, 1.5, 0.3, 7e10])
@pytest.mark.parametrize("size", [1, 2, 10**4, 10**8, 10**8 + 1, 125_000_000])
@LAWS
def test_added_sensitivity_is_root_n_grid_rounded_up(scale, size, secure):
    fineness = 30 if size <= 10**8 else 32
    grid = MP.mpf(2) ** (math.floor(math.log2(scale)) - fineness)
    ours = secure().added_sensitivity(scale, size)
    exact = MP.sqrt(size) * grid
    assert exact < ours < exact * (1 + MP.mpf(2) ** -51)


@settings(max_examples=200, deadline=None)
@given(
    st.floats(2.0**-20, 2.0**20),
    st.lists(
        st.tuples(st.floats(-(2.0**20), 2.0**20), st.floats(-3, 3), st.booleans()),
        min_size=1,
        max_size=30,
    ),
)
def test_rounding_widens_the_distance_of_two_sums_by_no_more(scale, rows):
    """Neighbouring sums, some of them a few grid steps apart, through both kernels."""
    grid = noise._grid(scale, len(rows))
    one = np.array([x if far else math.floor(x / grid) * grid for x, _, far in rows])
    other = one + np.array([d * (1.0 if far else grid) for _, d, far in rows])
    rounded = []
    for kernel in (grid_numpy, grid_compiled):
        a, b = one.copy(), other.copy()
        kernel.add(a, np.zeros(a.size), grid)
        kernel.add(b, np.zeros(b.size), grid)
        rounded.append((a, b))
    np.testing.assert_array_equal(*rounded)

    def distance(a, b):
        return MP.sqrt(sum((MP.mpf(x) - MP.mpf(y)) ** 2 for x, y in zip(a, b, strict=True)))

    added = SecureLaplace().added_sensitivity(scale, len(rows))
    assert distance(*rounded[0]) <= distance(one, other) + added


def test_added_sensitivity_is_not_more_than_needed():
    """Sums next to each other across a rounding boundary move apart by a whole grid step."""
    grid = noise._grid(1.0, 100)
    a, b = np.full(100, 0.499 * grid), np.full(100, 0.501 * grid)
    before = np.linalg.norm(b - a)
    for values in (a, b):
        grid_numpy.add(values, np.zeros(100), grid)
    added = SecureLaplace().added_sensitivity(1.0, 100)
    assert 0.99 * added < np.linalg.norm(b - a) - before <= added


@pytest.mark.parametrize("size", [1, 26_010, 10**8, 125_000_000])
def test_accounted_noise_multiplier_is_smaller_and_costs_more(size):
    scale, clip = 1.3, 0.7
    sampler = SecureLaplace()
    accounted = accounted_noise_multiplier(sampler, scale=scale, max_grad_norm=clip, size=size)
    widened = MP.mpf(clip) + MP.mpf(sampler.added_sensitivity(scale, size))
    assert MP.mpf(accounted) < MP.mpf(scale) / widened
    assert accounted > float(scale / widened) * (1 - 2.0**-50)

    def epsilon(noise_multiplier):
        step = lap2.Laplace(noise_multiplier, size)
        return lap2.Accountant().compose(step, sampling_prob=0.01, steps=1000).get_epsilon(1e-5)

    assert epsilon(accounted) > epsilon(scale / clip)


def test_accounted_noise_multiplier_validates():
    sampler = SecureLaplace()
    with pytest.raises(ValueError, match="max_grad_norm must be a finite number above 0, got 0"):
        accounted_noise_multiplier(sampler, scale=1.0, max_grad_norm=0, size=5)
    with pytest.raises(ValueError, match="scale must be a finite number above 0, got nan"):
        accounted_noise_multiplier(sampler, scale=math.nan, max_grad_norm=1.0, size=5)
    with pytest.raises(ValueError, match="size must be an integer at least 0, got -1"):
        accounted_noise_multiplier(sampler, scale=1.0, max_grad_norm=1.0, size=-1)


# Memory, and the sampler that promises nothing.


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@PATHS
@LAWS
def test_a_large_array_needs_a_few_megabytes_more(dtype, compiled, secure):
    values = np.zeros(10_000_000, dtype)
    sampler = secure(compiled=compiled)
    sampler.add(values[:10], 1.0)
    tracemalloc.start()
    try:
        sampler.add(values, 1.0)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 4e6 * max(1, (os.cpu_count() or 1) / 4)
    assert np.count_nonzero(values[-5:]) == 5


@pytest.mark.parametrize("reproducible", [ReproducibleLaplace, ReproducibleGaussian])
def test_reproducible_noise_repeats_itself_and_says_that_it_is_not_secure(reproducible):
    def sample(seed):
        values = np.zeros(100_000)
        assert reproducible(seed).add(values, 2.0) == 0
        return values

    np.testing.assert_array_equal(sample(3), sample(3))
    assert not np.isin(sample(3), sample(4)).any()
    assert reproducible.is_secure is False
    assert SecureLaplace.is_secure is SecureGaussian.is_secure is True
    assert "no guarantee" in reproducible.__doc__
    assert reproducible(1).added_sensitivity(1.0, 10**8) == 0
    with pytest.raises(ValueError, match="seed must be an integer at least 0, got -1"):
        reproducible(-1)


@FLOATS
def test_reproducible_laplace_has_the_right_moments(dtype):
    def sample(scale):
        values = np.ones(4_000_000, dtype)
        ReproducibleLaplace(17).add(values, scale)
        return values.astype(np.float64) - 1

    assert_moments(sample(3.0), 3.0)
    assert_unlike(assert_moments, sample(3.0 * 1.005), 3.0)
    assert abs(np.sign(sample(3.0)).mean()) * 2000 < 5
