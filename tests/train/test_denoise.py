"""Denoising: what "auto" estimates, and that it chooses well without seeing the signal."""

import math

import numpy as np
import pytest
import torch

from lap2.train import Denoiser
from lap2.train.denoise import _TAUS, _moments

SIGNALS = {
    "none": lambda _, n: np.zeros(n),
    "small": lambda rng, n: rng.normal(scale=0.1, size=n),
    "sparse": lambda rng, n: rng.normal(scale=0.3, size=n) * (rng.random(n) < 0.1) * 3,
    "heavy": lambda rng, n: rng.standard_t(3, size=n) * 0.5,
    "huge": lambda rng, n: rng.normal(scale=100.0, size=n),
}


def released(kind, size, steps=20):
    rng = np.random.default_rng(0)
    s = SIGNALS[kind](rng, size)
    return s, [s + rng.laplace(size=size) for _ in range(steps)]


@pytest.mark.parametrize("kind", SIGNALS)
def test_the_signal_in_a_clamp_is_estimated_without_bias(kind):
    s, (y,) = released(kind, 1_000_000, steps=1)
    estimate, _, _, power = _moments(
        torch.from_numpy(y).abs().float(), torch.tensor(_TAUS, dtype=torch.float32)
    )
    for tau, value, square in zip(_TAUS, estimate, power, strict=True):
        clamped = np.clip(y, -tau, tau)
        assert square == pytest.approx((clamped**2).mean(), rel=1e-4)
        # The estimate and the truth differ by the mean of what has expectation zero.
        spread = 5 * np.std(clamped * (y - s)) / 1000 + 1e-12
        assert abs(float(value) - (s * clamped).mean()) < spread + 5 * 2 / 1000


@pytest.mark.parametrize("kind", SIGNALS)
def test_auto_is_nearly_as_good_as_the_best_clamp(kind):
    """Judged by the share of signal, with the signal in hand; a wrong clamp loses far more."""
    s, steps = released(kind, 20_000, steps=100)
    denoiser = Denoiser("auto")
    for y in steps:
        (tau,) = denoiser([torch.from_numpy(y.copy())], 1.0)
    clamps = [[np.clip(y, -t, t) for y in steps] for t in _TAUS]
    shares = [sum((s * f).sum() for f in fs) ** 2 / sum((f**2).sum() for f in fs) for fs in clamps]
    chosen = shares[_TAUS.index(tau)]
    assert kind == "none" or chosen >= 0.8 * max(shares)
    assert kind in {"none", "small"} or min(shares) < 0.7 * max(shares)
    assert tau == _TAUS[0] or kind != "none"
    assert tau == math.inf or kind != "huge"


def test_small_signals_keep_their_size():
    rng = np.random.default_rng(2)
    signal = torch.full((400_000,), 0.05, dtype=torch.float64)
    for tau in (0.1, 1.0):
        y = signal + torch.from_numpy(rng.laplace(size=signal.numel()))
        Denoiser(tau)([y], 1.0)
        assert float(y.mean()) == pytest.approx(0.05, abs=0.01)


def test_the_scale_is_only_a_unit():
    _, (y,) = released("heavy", 5000, steps=1)
    one, two = torch.from_numpy(y), torch.from_numpy(8.0 * y)
    assert Denoiser("auto")([one], 1.0) == Denoiser("auto")([two], 8.0)
    torch.testing.assert_close(8 * one, two)


def test_state_goes_on_where_it_was():
    _, steps = released("heavy", 3000, steps=30)
    whole, first, second = Denoiser("auto"), Denoiser("auto"), Denoiser("auto")
    for index, y in enumerate(steps):
        expected = whole([torch.from_numpy(y.copy())], 1.0)
        if index == 15:
            second.load_state_dict(first.state_dict())
            first = second
        assert first([torch.from_numpy(y.copy())], 1.0) == expected
    assert first.state_dict() == whole.state_dict()


def test_bad_arguments_are_refused():
    with pytest.raises(ValueError, match="denoise must be one of"):
        Denoiser("magic")
    with pytest.raises(ValueError, match="denoise must be"):
        Denoiser(0.0)


def test_what_was_learnt_with_other_clamps_is_learnt_anew():
    _, steps = released("small", 1000, steps=30)
    old = Denoiser("auto")
    for y in steps[:20]:
        old([torch.from_numpy(y.copy())], 1.0)
    state = old.state_dict()
    state["moments"] = [[values[1:] for values in moments] for moments in state["moments"]]
    new = Denoiser("auto")
    new.load_state_dict(state)
    (tau,) = new([torch.from_numpy(steps[20].copy())], 1.0)
    assert tau in _TAUS
