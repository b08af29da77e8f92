"""Gaussian noise: exact floors, the normal distribution, and a guarantee in training.

What it has in common with Laplace noise is in test_noise.py. Statistical tests use fixed keys, so
that they do not flake; each comes with a sampler that is slightly wrong and that it must reject.
"""

import hashlib
import math

import mpmath as mp
import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from scipy import special, stats
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lap2
from lap2.noise import (
    ReproducibleGaussian,
    ReproducibleLaplace,
    SecureGaussian,
    SecureLaplace,
    grid_compiled,
    grid_numpy,
)
from lap2.noise import grid as noise
from lap2.noise.grid_exact import gaussian_floor
from lap2.train import PrivacyEngine

KERNELS = pytest.mark.parametrize("kernel", [grid_numpy, grid_compiled], ids=["numpy", "compiled"])
PATHS = pytest.mark.parametrize("compiled", [False, True], ids=["numpy", "compiled"])
RATIOS = pytest.mark.parametrize("ratio", [2.0**30, 1.9 * 2.0**30, 1.37 * 2.0**32])
KEY = bytes(range(32))
U_MASK = (1 << 63) - 1
SIGN = 1 << 63
MP = mp.MPContext()
MP.dps = 400


def key(name):
    return hashlib.sha256(name.encode()).digest()


def draws(name, *, size, scale=1.0, dtype=np.float64, compiled=True):
    values = np.zeros(size, dtype)
    SecureGaussian(compiled=compiled)._add_with_key(values, scale, key(name))
    return values


def random_words(name, size):
    return np.random.default_rng(list(key(name))).integers(0, 2**64, size, dtype=np.uint64)


def mp_magnitude(u, v, bits, ratio, which):
    """Box and Muller as they wrote it: the turn of V/4 leaves a quarter of the circle."""
    radius = MP.sqrt(-2 * MP.log(MP.mpf(u) / MP.mpf(2) ** bits))
    angle = MP.pi / 2 * (MP.mpf(v) / MP.mpf(2) ** bits)
    return radius * (MP.sin(angle) if which else MP.cos(angle)) * MP.mpf(ratio)


def mp_steps(words, extension, ratio, which):
    """The noise of two words and all the bits that follow, in turns of 64."""
    u, v = (word & U_MASK for word in words)
    for first in range(0, len(extension), 16):
        u = (u << 64) | int.from_bytes(extension[first : first + 8], "big")
        v = (v << 64) | int.from_bytes(extension[first + 8 : first + 16], "big")
    steps = int(MP.floor(mp_magnitude(u, v, 63 + 4 * len(extension), ratio, which))) + 0.5
    return -steps if words[which] & SIGN else steps


def wide(words):
    """``-ln U`` of pairs of words, and root 2 times the cosine and the sine, to 63 bits or so."""
    pairs = (words & np.uint64(U_MASK)).reshape(-1, 2).astype(np.longdouble)
    u, v = np.ldexp(pairs, -63).T
    angle = np.longdouble("1.57079632679489661923132169163975144") * v
    root = np.sqrt(np.longdouble(2))
    return -np.log(u), root * np.column_stack([np.cos(angle), np.sin(angle)])


# Exactness.


def assert_unlike(check, *arguments, **keywords):
    """The negative control: the check must fail."""
    with pytest.raises(AssertionError):
        check(*arguments, **keywords)


def exact_bins(steps, ratio, edges):
    """Chi-square of signed grid steps against ``P(floor|X/g| >= m) = erfc(m g / sqrt 2)``."""
    magnitude = np.abs(steps) - 0.5
    bins = np.searchsorted(edges, magnitude, side="right") - 1
    observed = np.bincount(2 * bins + (steps < 0), minlength=2 * len(edges))
    upper = special.erfc(np.append(edges, np.inf) / ratio / math.sqrt(2))
    expected = np.repeat((upper[:-1] - upper[1:]) / 2, 2) * steps.size
    assert stats.chisquare(observed, expected).pvalue > 1e-6


def assert_moments(values, scale):
    """E x = 0, E|x|, E x^2 and E x^4, within five of their standard errors."""
    root = math.sqrt(values.size)
    x = values / scale
    assert abs(x.mean()) * root < 5
    assert abs(np.abs(x).mean() - math.sqrt(2 / math.pi)) * root < 5 * math.sqrt(1 - 2 / math.pi)
    assert abs(np.square(x).mean() - 1) * root < 5 * math.sqrt(2)
    assert abs((x**4).mean() - 3) * root < 5 * math.sqrt(96)


@PATHS
@pytest.mark.parametrize("scale", [1.0, 1.9])
def test_mass_function_is_exact(compiled, scale):
    """Chi-square on 32 bins of equal probability; their edges are grid points."""
    grid = noise._grid(scale, 1)
    edges = np.floor(special.ndtri(0.5 + np.arange(16) / 32) * scale / grid)

    def steps(scale):
        return draws("mass", size=4_000_000, scale=scale, compiled=compiled) / grid

    exact_bins(steps(scale), scale / grid, edges)
    assert_unlike(exact_bins, steps(scale * 1.005), scale / grid, edges)
    assert_unlike(exact_bins, steps(scale * 0.995), scale / grid, edges)


@KERNELS
@pytest.mark.parametrize("ratio", [0.4, 3.0, 5.7])
def test_mass_function_of_single_integers_is_exact(kernel, ratio):
    """On a grid about as wide as the noise, every integer has its own bin."""
    words, steps = random_words("integers", 6_000_000), np.empty(6_000_000)
    edges = np.arange(int(3.5 * ratio) + 2)
    assert kernel.gaussian(words, ratio, steps).size == 0
    exact_bins(steps, ratio, edges)
    kernel.gaussian(words, ratio * 1.005, steps)
    assert_unlike(exact_bins, steps, ratio, edges)


@PATHS
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_moments_and_distribution(compiled, dtype):
    def check(values, scale):
        assert_moments(values, scale)
        assert stats.kstest(values, stats.norm(scale=scale).cdf).pvalue > 1e-4

    def sample(scale):
        values = draws("moments", size=4_000_000, scale=scale, dtype=dtype, compiled=compiled)
        return values.astype(np.float64)

    check(sample(3.0), 3.0)
    for wrong in (3.0 * 1.005, 3.0 * 0.995):
        assert_unlike(check, sample(wrong), 3.0)


def test_tail_is_that_of_a_normal_distribution():
    """Beyond 4.9 sigma, one of a million draws; a tail cut at 5 would show."""
    total = np.concatenate([draws(f"tail {k}", size=4_000_000) for k in range(4)])

    def check(values):
        for tail in (3.0, 4.0, 4.5, 4.9):
            expected = total.size * special.erfc(tail / math.sqrt(2))
            count = np.count_nonzero(np.abs(values) > tail)
            assert stats.poisson.cdf(count, expected) > 1e-5
            assert stats.poisson.sf(count - 1, expected) > 1e-5

    check(total)
    assert_unlike(check, np.clip(total, -4.9, 4.9))
    assert_unlike(check, total * 1.01)
    assert 5.0 < np.abs(total).max() < 6.5  # 1% and 10^-3 of all samples are outside


def test_coordinates_of_a_pair_and_others_are_independent():
    def check(one, other):
        """Signs, magnitudes and squares; those of a pair share their radius."""
        for distance in (0, 1, 2, 7):
            a, b = one[: one.size - distance], other[distance:]
            root = math.sqrt(a.size)
            assert abs(np.mean(np.sign(a) * np.sign(b))) * root < 5
            assert abs(np.mean(a * b)) * root < 5
            assert abs(np.mean((a * a - 1) * (b * b - 1))) * root < 5 * 2
            assert abs(np.mean((np.abs(a) < 0.5) * 1.0 * (b * b - 1))) * root < 5

    first, second = draws("first", size=1_000_000), draws("second", size=1_000_000)
    check(first, second)
    check(first[::2], first[1::2])
    check(first[: 1 << 14], first[1 << 14 : 1 << 15])  # chunks
    assert_unlike(check, first, first)
    reused = second.copy()
    reused[::100] = first[::100]
    assert_unlike(check, first, reused)
    same_radius = np.sign(second) * np.sqrt(np.maximum(0, 2 - first * first))
    assert_unlike(check, first, same_radius)


def test_pairs_are_uniform_on_their_circle():
    """Chi-square of the angle in 64 sectors, and of the squared radius in 64 parts, jointly."""
    pairs = draws("circle", size=8_000_000).reshape(-1, 2)

    def check(x, y):
        angle = np.floor((np.arctan2(y, x) / (2 * math.pi) + 0.5) * 64).clip(0, 63)
        radius = np.floor(np.exp(-(x * x + y * y) / 2) * 64).clip(0, 63)
        counts = np.bincount((64 * angle + radius).astype(int), minlength=64 * 64)
        assert stats.chisquare(counts).pvalue > 1e-5

    check(*pairs.T)
    assert_unlike(check, *(pairs * [1.02, 1]).T)
    few = np.arange(len(pairs)) % 50 == 0
    assert_unlike(check, np.where(few, np.abs(pairs[:, 0]), pairs[:, 0]), pairs[:, 1])


@pytest.mark.parametrize("ratio", [3.0, 40.0])
def test_support_has_no_holes(ratio):
    """Every step that is not too rare is made, and the refined tail goes on beyond 63 bits."""
    words, steps = random_words("support", 2_000_000), np.empty(2_000_000)
    grid_compiled.gaussian(words, ratio, steps)
    near = steps[np.abs(steps) < 3.5 * ratio]
    assert np.unique(near).size == 2 * math.ceil(3.5 * ratio - 0.5)
    keyed = noise._KeyedNoise(grid_compiled, "gaussian", KEY, 1.0, 2.0**30)
    far = [
        abs(keyed._refined(np.array([0, low << 53], np.uint64), 0, position)) / 2.0**30
        for position in range(0, 100, 2)
        for low in (0, 1)
    ]
    assert len(set(far)) == 100
    assert max(far) > 9.4  # 63 bits of U end at sqrt(2 * 63 * ln 2) = 9.35


# The same words give the same noise.

# Scale 1.5 on zeros, key 00 01 ... 1f: the first six coordinates.
KNOWN = {
    np.float64: [
        "-0x1.7137489600000p+0",
        "-0x1.0e02870000000p-7",
        "-0x1.7d51057400000p-1",
        "0x1.64181bac00000p-1",
        "-0x1.ba2e3e1e00000p+0",
        "-0x1.1ef391ec00000p-1",
    ],
    np.float32: [
        "-0x1.7137480000000p+0",
        "-0x1.0e02880000000p-7",
        "-0x1.7d51060000000p-1",
        "0x1.64181c0000000p-1",
        "-0x1.ba2e3e0000000p+0",
        "-0x1.1ef3920000000p-1",
    ],
}


@PATHS
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_known_answers(compiled, dtype):
    values = np.zeros(6, dtype)
    SecureGaussian(compiled=compiled)._add_with_key(values, 1.5, KEY)
    assert [float(value).hex() for value in values] == KNOWN[dtype]


@PATHS
@pytest.mark.parametrize("size", [500, 501])
def test_noise_is_the_documented_function_of_the_key(compiled, size):
    """Recomputed from AES on single blocks and mpmath, without the code under test."""
    block = Cipher(algorithms.AES(KEY), modes.ECB()).encryptor()
    expected = []
    for index in range(size):
        first = index // 2 * 2
        pair = block.update((first // 2).to_bytes(16, "big"))
        words = [int.from_bytes(pair[at : at + 8], "little") for at in (0, 8)]
        counter = (1 << 127) + (first << 32)
        extension = b"".join(block.update((counter + k).to_bytes(16, "big")) for k in range(3))
        expected.append(mp_steps(words, extension, 1.5 * 2.0**30, index % 2))
    values = np.zeros(size)
    SecureGaussian(compiled=compiled)._add_with_key(values, 1.5, KEY)
    np.testing.assert_array_equal(values * 2.0**30, expected)


# Samples that float64 cannot decide.


def boundary_pairs(ratio):
    """Words of which one magnitude is as near an integer as 63 bits of V, then of U, allow."""
    rng = np.random.default_rng(11)
    pairs = []
    for v in rng.integers(0, 2**63, 300).tolist():
        goal = float(rng.normal()) * ratio
        cosine = MP.cos(MP.pi / 2 * MP.mpf(v) / 2**63)
        k = max(1, round(abs(goal)))
        u = int(MP.floor(MP.exp(-((MP.mpf(k) / MP.mpf(ratio) / cosine) ** 2) / 2) * 2**63))
        pairs += [(u + near, v, 0) for near in (-1, 0, 1)]
    for u in (2**62, 3**39, U_MASK // 3, 2**45, 2**63 - 2**50):
        radius = MP.sqrt(-2 * MP.log(MP.mpf(u) / 2**63)) * MP.mpf(ratio)
        for share in (1e-9, 1e-3, 0.2, 0.7, 0.99, 0.99999):
            k = max(1, round(share * float(radius)))
            if k < radius:
                v = int(MP.floor(MP.asin(k / radius) / (MP.pi / 2) * 2**63))
                pairs += [(u, v + near, 1) for near in (-1, 0, 1)]
    return [(u, v, which) for u, v, which in pairs if 0 < u <= U_MASK and 0 <= v <= U_MASK]


def words_of(pairs):
    return np.array([[u, v | SIGN] for u, v, *_ in pairs], dtype=np.uint64).ravel()


EDGES = [0, 1, 2, 3, U_MASK - 1, U_MASK, 1 << 62, SIGN, SIGN | U_MASK]


@KERNELS
@RATIOS
def test_kernels_leave_boundary_words_undecided(kernel, ratio):
    pairs = boundary_pairs(ratio)
    steps = np.empty(2 * len(pairs))
    undecided = set(kernel.gaussian(words_of(pairs), ratio, steps).tolist())
    assert len(pairs) > 900
    assert all(2 * i + which in undecided for i, (_, _, which) in enumerate(pairs))
    assert np.isnan(steps[list(undecided)]).all()  # what nobody settles must not look like noise


@KERNELS
@RATIOS
def test_edges_of_the_words_are_left_undecided_or_right(kernel, ratio):
    words = np.array([[u, v] for u in EDGES for v in EDGES], dtype=np.uint64).ravel()
    steps = np.empty(words.size)
    undecided = kernel.gaussian(words, ratio, steps)
    pairs = words.reshape(-1, 2)
    assert np.isnan(steps[0::2][(pairs[:, 0] & np.uint64(U_MASK)) < 4]).all()
    assert np.isnan(steps[1::2][(pairs[:, 0] & np.uint64(U_MASK)) >= U_MASK - 1]).all()
    assert np.isnan(steps[undecided]).all()
    for index in np.flatnonzero(~np.isnan(steps)).tolist():
        assert steps[index] == mp_steps(pairs[index // 2].tolist(), bytes(16), ratio, index % 2)


def key_stream(counter, size):
    mode = modes.CTR(counter.to_bytes(16, "big"))
    return Cipher(algorithms.AES(KEY), mode).encryptor().update(bytes(size))


@KERNELS
@RATIOS
def test_undecided_words_are_settled_right(kernel, ratio):
    """Against mpmath, with the bits of U and V that the key stream supplies: none is wrong."""
    words = np.concatenate(
        [words_of(boundary_pairs(ratio)), words_of([(u & U_MASK, v) for u in EDGES for v in EDGES])]
    )
    keyed = noise._KeyedNoise(kernel, "gaussian", KEY, 1.0, ratio)
    wrong = 0
    for index in range(words.size):
        first = index // 2 * 2
        extension = key_stream((1 << 127) + (first << 32), 64)
        expected = mp_steps(words[first : first + 2].tolist(), extension, ratio, index % 2)
        wrong += keyed._refined(words, index, index) != expected
    assert wrong == 0


@RATIOS
def test_following_bits_decide_at_the_boundary_and_are_used(ratio):
    """The negative control of the last test: without more bits, some answers would be wrong."""
    pairs = boundary_pairs(ratio)
    words = words_of(pairs)
    keyed = noise._KeyedNoise(grid_numpy, "gaussian", KEY, 1.0, ratio)
    differ = 0
    for i, (u, v, which) in enumerate(pairs):
        cut = mp_steps((u, v | SIGN), b"", ratio, which)
        differ += cut != keyed._refined(words, 2 * i + which, 2 * i + which)
    assert differ > 10


@KERNELS
@RATIOS
def test_small_words_wait_for_their_following_bits(kernel, ratio):
    """In the tail 63 bits are too few: a decision must hold for all U that begin with them."""
    rng = np.random.default_rng(12)
    us = np.floor(2 ** rng.uniform(30, 45, 2000)).astype(np.uint64)
    words = np.column_stack([us, rng.integers(0, 2**63, us.size, dtype=np.uint64)]).ravel()
    steps = np.empty(words.size)
    kernel.gaussian(words, ratio, steps)
    cut = 0
    for index, step in enumerate(steps.tolist()):
        u, v = words[index // 2 * 2 : index // 2 * 2 + 2].tolist()
        low, high = (
            int(MP.floor(mp_magnitude(end, v, 63, ratio, index % 2))) for end in (u + 1, u)
        )
        assert math.isnan(step) or low == high == abs(step) - 0.5
        cut += low != high and u > ratio
    assert cut > 20  # so many were at stake


@KERNELS
@pytest.mark.parametrize("ratio", [2.0**30, 1.9 * 2.0**32, 2.0**44, 1.7 * 2.0**45])
def test_no_decided_sample_is_wrong(kernel, ratio):
    """The error bound. The largest ratios leave no room beyond the margin."""
    rng = np.random.default_rng(14)
    special_u = [1 << k for k in range(30, 63)] + [U_MASK, U_MASK - 2**11, round(2**62.5)]
    special_v = [0, 1, 2**10, 2**61, 2**62 - 1, 2**62, 2**62 + 1, 3 * 2**61, U_MASK - 1, U_MASK]
    near = np.uint64(U_MASK) - rng.integers(0, 2**58, 50_000, dtype=np.uint64)
    pairs = [
        random_words(f"decided {ratio}", 600_000).reshape(-1, 2),
        np.column_stack([near, random_words("near", near.size)]),
        np.array([[u, v] for u in special_u for v in special_v], dtype=np.uint64),
    ]
    words = np.concatenate(pairs).ravel()
    steps = np.empty(words.size)
    kernel.gaussian(words, ratio, steps)
    pairs, steps = words.reshape(-1, 2) & np.uint64(U_MASK), np.abs(steps.reshape(-1, 2))
    log, turned = wide(words)
    for which in (0, 1):
        decided = ~np.isnan(steps[:, which])
        assert decided.mean() > 0.01
        y = (np.sqrt(log) * turned[:, which] * np.longdouble(ratio))[decided]
        # Wider floats judge all but the closest; mpmath judges those.
        unsure = ratio * 2.0**-57 * (1 + y / ratio + 1 / np.sqrt(log[decided]))
        judged = np.abs(y - np.rint(y)) > unsure
        step = steps[decided, which]
        assert (np.floor(y[judged]) + 0.5 == step[judged]).all()
        rest = pairs[decided][~judged][:500].tolist()
        for (a, b), found in zip(rest, step[~judged].tolist(), strict=False):
            assert math.floor(mp_magnitude(a, b, 63, ratio, which)) + 0.5 == found


@KERNELS
def test_error_is_at_most_half_the_margin(kernel):
    """At so large a ratio decisions are refused a good way from the integers, and show the error.

    A decided sample is computed to be a margin away from all integers. If the error is at most half
    a margin, then it is half a margin away in truth.
    """
    ratio, words = 2.0**45, random_words("margin", 2_000_000)
    steps = np.empty(words.size)
    kernel.gaussian(words, ratio, steps)
    log, turned = wide(words)
    y = np.sqrt(log)[:, None] * turned * ratio
    grows = 48 if kernel is grid_numpy else 32
    margin = ratio / np.sqrt(log) * (8 + grows * log) * 2.0**-53
    distance = np.abs(y - np.rint(y)) / margin[:, None]
    decided = ~np.isnan(steps.reshape(-1, 2))
    assert 0.3 < decided.mean() < 0.9
    assert 0.5 < distance[decided].min() < 1  # below 1: there is an error
    assert distance[~decided].max() < 1.5


@KERNELS
def test_few_samples_are_undecided(kernel):
    words, steps = random_words("few", 4_000_000), np.empty(4_000_000)
    assert 4 <= kernel.gaussian(words, 2.0**30, steps).size <= 120


@RATIOS
@pytest.mark.parametrize("bits", [127, 191, 447, 1023])
@pytest.mark.parametrize("which", [0, 1])
def test_gaussian_floor_is_exact_or_declines(ratio, bits, which):
    rng = np.random.default_rng(13)
    one = 1 << bits
    ends = [one - 1, one - 2, one - one // 2**60, 1, 2**64, one // 2, one // 3]
    us = ends + [int.from_bytes(rng.bytes(bits // 8), "big") >> int(shift) for shift in range(60)]
    vs = [0, one // 2, *ends] + [int.from_bytes(rng.bytes(bits // 8), "big") for _ in us]
    answered = 0
    for u, v in zip([*us, *us], [*vs[: len(us)], *reversed(vs[-len(us) :])], strict=True):
        answer = gaussian_floor(u, v, bits, ratio, which)
        if answer is not None:
            answered += 1
            for a, b in ((u, v), (u + 1, v), (u, v + 1), (u + 1, v + 1)):
                if a < one:
                    magnitude = max(MP.floor(mp_magnitude(a, b, bits, ratio, which)), 0)
                    assert answer == magnitude
    assert answered > 60
    assert gaussian_floor(0, one // 3, bits, ratio, which) is None  # -ln U has no upper bound
    half = MP.mpf(1) / 2
    for k in (1, 7, 10**9):
        u = int(MP.floor(MP.exp(-((k / MP.mpf(ratio)) ** 2)) * one))
        assert gaussian_floor(u, int(half * one), bits, ratio, which) is None  # either side


# What it means for training.


def trained(mechanism="gaussian", *, sampler=None, **kwargs):
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    data = TensorDataset(torch.randn(64, 4), torch.randn(64, 2))
    engine = PrivacyEngine(sampler=sampler)
    model, optimizer, loader = engine.make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(data, batch_size=16), noise_multiplier=1.5, max_grad_norm=1.0,
        mechanism=mechanism, **kwargs,
    )  # fmt: skip
    for x, y in loader:
        (model(x) - y).pow(2).mean(dim=1).mean().backward()
        optimizer.step()
    return engine


def test_training_with_gaussian_noise_is_a_guarantee_that_counts_rounding_to_the_grid():
    engine = trained()
    statement = engine.statement(1e-5)
    assert statement.is_guarantee
    (entry,) = engine.accountant.ledger
    accounted = lap2.Gaussian(entry.mechanism.noise_multiplier)
    assert entry.mechanism == accounted
    added = SecureGaussian().added_sensitivity(1.5, 10)
    most = 1.5 / (1 + statement.rounding + added)
    assert most * (1 - 1e-15) < accounted.noise_multiplier <= most
    assert accounted.noise_multiplier < 1.5 / (1 + statement.rounding)
    ordinary = trained(sampler=ReproducibleGaussian(1)).statement(1e-5)
    assert not ordinary.is_guarantee
    assert "ordinary generator" in ordinary.caveats[0]


@pytest.mark.parametrize(
    ("mechanism", "sampler", "message"),
    [
        ("laplace", SecureGaussian(), "sampler must draw laplace noise.*draws gaussian noise"),
        ("laplace-l1", ReproducibleGaussian(1), "sampler must draw laplace noise"),
        ("gaussian", SecureLaplace(), "sampler must draw gaussian noise.*got SecureLaplace"),
        ("gaussian", ReproducibleLaplace(1), "sampler must draw gaussian noise"),
    ],
)
def test_noise_of_another_law_than_is_accounted_is_refused(mechanism, sampler, message):
    with pytest.raises(ValueError, match=message):
        trained(mechanism, sampler=sampler)


def test_gaussian_noise_is_refused_where_laplace_noise_is_accounted():
    accountant = lap2.Accountant()
    with pytest.raises(ValueError, match="sampler must draw laplace noise"):
        lap2.clip_from_private_norms(
            [1.0, 2.0], quantile=0.5, low=0.1, high=10.0, noise_multiplier=1.0, rounds=2,
            accountant=accountant, sampler=SecureGaussian(),
        )  # fmt: skip
    assert accountant.steps == 0
