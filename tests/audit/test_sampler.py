"""The sampler audit passes the secure sampler and fails everything that is wrong with another."""

import numpy as np
import pytest
from scipy import stats

from lap2.audit import audit_sampler
from lap2.audit.controls import FAULTS, Fault, NumpyLaplace, TorchLaplace
from lap2.audit.sampler import _checks, _evenness
from lap2.audit.support import last_bit, possible_numpy, possible_torch
from lap2.noise import ReproducibleLaplace, SecureLaplace

SMALL = {"size": 500, "steps": 400, "releases": 600}


class Changed:
    """Ordinary noise in float64, cast to float32, changed by a function of noise and scale."""

    is_secure = False

    def __init__(self, change, seed=0):
        self._honest, self._change = ReproducibleLaplace(seed), change

    def add(self, array, scale):
        noise = np.zeros(array.shape)
        self._honest.add(noise, scale)
        array += self._change(noise, scale).astype(array.dtype)
        return 0.0


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("scale", [1.0, 0.37])
def test_secure_noise_passes(dtype, scale):
    result = audit_sampler(SecureLaplace(), scale=scale, dtype=dtype, confidence=0.99999, **SMALL)
    assert result.verdict == "consistent", result.evidence
    assert len(result.checks) == 14


@pytest.mark.parametrize(
    ("evidence", "change"),
    [
        ("scale", lambda x, _: 0.98 * x),
        ("shape", lambda x, b: np.sign(x) * np.sqrt(2 * np.abs(x) * b) * 0.798),
        ("sign", lambda x, b: np.where(np.abs(x) < 0.02 * b, np.abs(x), x)),
        ("symmetry", lambda x, _: np.where(x > 0, 1.01 * x, 0.99 * x)),
        ("largest", lambda x, b: np.clip(x, -7 * b, 7 * b)),
        ("neighbouring", lambda x, _: np.repeat(x[..., ::2], 2, axis=-1)),
        ("distant", lambda x, _: np.concatenate([x[..., : x.shape[-1] // 2]] * 2, axis=-1)),
        ("finite", lambda x, b: np.where(x > 8 * b, np.inf, x)),
    ],
)
def test_each_kind_of_wrong_noise_is_named(evidence, change):
    result = audit_sampler(Changed(change), **SMALL)
    assert result.violated
    assert any(evidence in line for line in result.evidence), result.evidence


def test_reused_noise_is_found_even_far_apart():
    calls = []

    class Periodic(Changed):
        def add(self, array, scale):
            calls.append(1)
            ReproducibleLaplace(len(calls) % 150).add(array, scale)
            return 0.0

    result = audit_sampler(Periodic(None), **SMALL)
    assert any(line.startswith("reuse") for line in result.evidence)


def p_values(steps, size, repeats, seed=0):
    """Of every check, for correct noise: (repeats, checks)."""
    rng = np.random.default_rng(seed)
    checks = [_checks(rng.laplace(size=(steps, size)), 0) for _ in range(repeats)]
    return np.array([[check.p_value for check in row] for row in checks])


@pytest.mark.parametrize(("steps", "size", "repeats"), [(4, 4, 1500), (5, 7, 500), (30, 40, 500)])
def test_p_values_are_exact_or_conservative_at_small_sizes(steps, size, repeats):
    found = p_values(steps, size, repeats)
    for level in (0.3, 0.05, 0.01, 0.001):
        allowed = stats.binom.isf(1e-6, len(found), level)
        assert ((found <= level).sum(axis=0) <= allowed).all()


def test_evenness_is_exact_and_sees_what_no_distance_shows():
    rng = np.random.default_rng(1)
    for count in (8, 16, 999):
        found = [_evenness(np.sort(rng.random(count)))[1] for _ in range(600)]
        assert stats.kstest(found, "uniform").pvalue > 1e-4
    uniform = np.sort(rng.random(200_000))
    assert _evenness(uniform)[0] == 1024
    rippled = np.sort(uniform + 2e-4 * np.sin(2 * np.pi * 200 * uniform))
    assert stats.kstest(rippled, "uniform").pvalue > 1e-3
    assert _evenness(rippled)[1] < 1e-6
    assert _evenness((np.arange(2000) + 0.5) / 2000)[1] < 1e-6  # too even
    assert _evenness(np.repeat(np.arange(0.0, 1.0, 0.1), 100))[1] == 0


def test_noise_of_one_sign_is_the_signs_business():
    found = {
        c.name: c.p_value for c in _checks(np.random.default_rng(2).exponential(size=(4, 4)), 0)
    }
    assert found["symmetry"] == 1
    assert found["sign"] == pytest.approx(2 * 2.0**-16)


def test_noise_that_breaks_on_a_secret_only_is_found():
    class Breaking(Changed):
        def add(self, array, scale):
            has_secret = array.any()
            super().add(array, scale)
            if has_secret:
                array[0, 0] = np.nan

    result = audit_sampler(Breaking(lambda x, _: x), **SMALL)
    assert any(line.startswith("finite") for line in result.evidence)


def test_naive_noise_gives_the_secret_away():
    torch_noise = audit_sampler(TorchLaplace(), **SMALL)
    assert torch_noise.violated
    assert torch_noise.epsilon_lower > torch_noise.claimed_epsilon
    numpy_noise = audit_sampler(
        NumpyLaplace(np.random.default_rng(0)), dtype="float64", **(SMALL | {"releases": 2000})
    )
    assert numpy_noise.epsilon_lower > numpy_noise.claimed_epsilon


def test_most_outputs_of_float32_noise_are_impossible_for_another_secret():
    import torch

    torch.manual_seed(3)
    noise = torch.distributions.Laplace(torch.tensor(0.0), torch.tensor(1.0)).sample((20_000,))
    outputs = noise.numpy().astype(np.float64)
    assert possible_torch(outputs, 0.0, 1.0).mean() > 0.98
    assert possible_torch(outputs, 0.0, 1.0, ulps=1).all()
    assert 0.7 < 1 - possible_torch(outputs, 1.0, 1.0).mean() < 0.9


def test_numpy_noise_is_recognised():
    outputs = np.random.default_rng(4).laplace(scale=2.0, size=20_000)
    assert possible_numpy(outputs, 0.0, 2.0, ulps=1).all()
    assert possible_numpy(outputs, 0.5, 2.0).mean() < 0.7


def test_last_bit():
    assert last_bit(np.array([1.0, 0.75, 3 * 2.0**-40, -6.0])).tolist() == [0, -2, -40, 1]
    assert last_bit(np.zeros(1))[0] > 1000


def test_controls_do_what_they_say():
    array = np.zeros(200_000)
    FAULTS["noise"].sampler().add(array, 1.0)
    assert np.abs(array).mean() == pytest.approx(0.7, rel=0.02)
    parts = [np.zeros(10), np.zeros(10)]
    FAULTS["layer"].sampler().add(parts, 1.0)
    assert (parts[0] != 0).all()
    assert (parts[1] == 0).all()
    assert Fault() == FAULTS["none"]


def test_bad_arguments_are_named():
    with pytest.raises(ValueError, match="dtype must be one of"):
        audit_sampler(SecureLaplace(), dtype="float16")
    with pytest.raises(ValueError, match="confidence"):
        audit_sampler(SecureLaplace(), confidence=1.0)
