"""The engine's step under audit: it passes, and every deliberate fault is found where it can be."""

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from lap2.audit.canaries import CanaryModel
from lap2.audit.controls import FAULTS
from lap2.audit.engine import audit_engine
from lap2.audit.probe import EngineSetting
from lap2.audit.reference import Reference
from lap2.audit.result import Bound, Check, combined, judged
from lap2.train import PrivacyEngine

torch.set_num_threads(1)


VALUES = ["none", "noise", "clip", "layer", "sampling", "shared"]
BITS = [name for name in FAULTS if name not in {"float32", "divisor"}]


@pytest.mark.parametrize(
    ("release", "name"), [("values", n) for n in VALUES] + [("bits", n) for n in BITS]
)
def test_mechanism_audit_of_the_engine(release, name):
    result = audit_engine(
        release=release,
        trials=100_000 if (release, name) == ("bits", "none") else 20_000,
        steps=100 if release == "values" else 300,
        fault=FAULTS[name],
        confidence=0.99999 if name == "none" else 0.999,
        rng=np.random.default_rng(11),
    )
    assert result.violated == (name != "none"), (result.facts, result.evidence)
    if name == "none":
        assert result.epsilon_lower > 0.4 * result.claimed_epsilon
    if name == "shared":  # no epsilon holds
        assert result.epsilon_lower > 2 * result.claimed_epsilon


@pytest.mark.parametrize(("release", "steps"), [("values", 400), ("bits", 900)])
def test_mechanism_audit_sees_a_realised_divisor_with_other_records(release, steps):
    result = audit_engine(
        noise_multiplier=1.5,
        release=release,
        trials=2000,
        steps=steps,
        fault=FAULTS["divisor"],
        rng=np.random.default_rng(12),
    )
    assert any("another record" in found for found in result.evidence), result.facts


def test_the_probe_releases_what_the_engine_does():
    setting = EngineSetting(1e-6, max_grad_norm=2.0)
    wanted = np.array([3.0, 4.0])  # ten times as long before clipping
    rows = setting.rows(wanted, 50, 2)
    assert rows == pytest.approx(np.tile([1.2, 1.6], (50, 1)), abs=1e-3)
    assert setting.rows(None, 50, 2) == pytest.approx(np.zeros((50, 2)), abs=1e-3)
    batch = torch.tensor([[3.0, 4.0], [3.0, 4.0]])
    assert setting.step()(batch) == pytest.approx([2.4, 3.2], abs=1e-3)
    sampled = EngineSetting(1e-6, sampling_prob=0.25).rows(np.ones(2), 4000, 2)
    assert (sampled[:, 0] > 0.5).mean() == pytest.approx(0.25, abs=0.04)


def test_bits_of_rows_are_released_together_only_if_they_stay_apart():
    few = EngineSetting(1.0, sampling_prob=0.25, release="bits", copies=2)
    assert few.are_apart(2)
    assert few.claim(2, 1e-5) == EngineSetting(1.0, sampling_prob=0.25).claim(4, 1e-5)
    rows = few.rows(np.array([1.0, 0.0]), 600, 2)
    assert rows.shape == (600, 2)
    counts = np.array([-1, 0, 1]) * np.sqrt(2)
    assert np.abs(rows[..., None] - counts).min(axis=-1).max() < 1e-6
    # More are spread over a vector of their own, one row at a time, which the claim knows.
    many = EngineSetting(1.0, release="bits")
    assert not many.are_apart(40)
    assert many.claim(40, 1e-5) == pytest.approx(EngineSetting(1.0).claim(40, 1e-5), rel=1e-3)
    assert many.rows(np.ones(40), 3, 40).shape == (3, 40)
    assert many.score(np.ones(40)) is None
    with pytest.raises(ValueError, match="copies must be a number"):
        EngineSetting(1.0, release="bits", copies="auto").claim(2, 1e-5)


def attached(release):
    module = CanaryModel(torch.nn.Linear(3, 2), canaries=20, width=6)
    engine = PrivacyEngine()
    engine.make_private(
        module=module,
        optimizer=torch.optim.SGD(module.parameters()),
        data_loader=DataLoader(torch.utils.data.TensorDataset(torch.zeros(4)), batch_size=2),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        release=release,
        rehearse=False,
    )
    return module, Reference(engine, scale=1.0)


@pytest.mark.parametrize("release", ["values", "bits"])
def test_a_correct_release_is_the_sum_on_average(release):
    rng = np.random.default_rng(3)
    module, reference = attached(release)
    canaries, model = rng.normal(size=(20, 6)) / 20, rng.normal(size=8) / 20
    made = reference.now(rng)
    found = [module.coordinates(made(module.sums(canaries, model))) for _ in range(150)]
    mean = np.concatenate(
        [np.mean([part.ravel() for part in side], 0) for side in zip(*found, strict=True)]
    )
    expected = np.concatenate([canaries.ravel(), model])
    assert np.abs(mean - expected).max() < 4.5 * np.sqrt(2 / 150)
    assert 0 < mean @ expected / (expected @ expected) < 2


def test_a_basis_that_stretches_is_seen(monkeypatch):
    module, reference = attached("bits")
    sums = {"a record": module.sums(np.ones((20, 6)), np.ones(8))}
    assert reference.length_check(sums).p_value == 1
    laid_out = reference._laid_out
    monkeypatch.setattr(reference, "_laid_out", lambda s: [1.01 * part for part in laid_out(s)])
    assert reference.length_check(sums).p_value == 0


def test_combined_verdicts():
    def result(lower, claimed, *checks):
        return judged(
            level="test",
            what="one",
            delta=0.0,
            confidence=0.999,
            claimed_epsilon=claimed,
            bounds=(Bound("count", lower),) if lower is not None else (),
            checks=checks,
            check_error=1e-3,
        )

    fine = {"a": result(1.0, 2.0), "b": result(1.0, 1.5), "c": result(None, 1.0)}
    good = combined(fine, what="three", confidence=0.99)
    assert good.verdict == "consistent"
    assert (good.epsilon_lower, good.claimed_epsilon, good.confidence) == (1.0, 1.5, 0.99)
    assert good.facts["a: claimed"] == 2
    assert "c: claimed" not in good.facts
    failed = {**fine, "c": result(None, 1.0, Check("noise", 0.0, "small", "large"))}
    bad = combined(failed, what="three", confidence=0.99)
    assert bad.violated
    assert bad.evidence[0].startswith("c: noise")
    assert combined({**fine, "a": result(3.0, 2.0)}, what="", confidence=0.99).claimed_epsilon == 2
