"""The engine under audit: it passes, and every deliberate fault is found where it can be."""

import numpy as np
import pytest
import torch
from torch import nn

import lap2
from lap2.audit import RunPlan, audit_run
from lap2.audit.canaries import train_with_canaries
from lap2.audit.controls import FAULTS
from lap2.audit.demonstration import audit_demonstration_run
from lap2.audit.probe import EngineSetting, audit_engine
from lap2.audit.run import CanaryScores, expected_scores

torch.set_num_threads(1)


@pytest.mark.parametrize("name", ["none", "noise", "clip", "layer", "sampling"])
def test_mechanism_audit_of_the_engine(name):
    result = audit_engine(
        trials=100_000,
        steps=400,
        fault=FAULTS[name],
        confidence=0.99999 if name == "none" else 0.999,
        rng=np.random.default_rng(11),
    )
    assert result.violated == (name != "none"), (result.facts, result.evidence)
    if name == "none":
        assert result.epsilon_lower > 0.8 * result.claimed_epsilon


def test_mechanism_audit_sees_a_realised_divisor_only_with_other_records():
    results = {
        name: audit_engine(
            noise_multiplier=1.5,
            trials=1000,
            steps=800,
            fault=FAULTS[name],
            rng=np.random.default_rng(12),
        )
        for name in ("none", "divisor")
    }
    assert results["none"].verdict == "consistent"
    assert results["divisor"].violated
    assert "another record" in results["divisor"].what


def test_the_probe_releases_what_the_engine_does():
    setting = EngineSetting(1e-6, max_grad_norm=2.0)
    wanted = np.array([3.0, 4.0])  # ten times as long before clipping
    rows = setting.rows(wanted, 50, 2)
    assert rows == pytest.approx(np.tile([1.2, 1.6], (50, 1)), abs=1e-3)
    assert setting.rows(None, 50, 2) == pytest.approx(np.zeros((50, 2)), abs=1e-3)
    batch = torch.tensor([[3.0, 4.0], [3.0, 4.0]])
    assert setting.step()(batch).numpy() == pytest.approx([2.4, 3.2], abs=1e-3)
    sampled = EngineSetting(1e-6, sampling_prob=0.25).rows(np.ones(2), 4000, 2)
    assert (sampled[:, 0] > 0.5).mean() == pytest.approx(0.25, abs=0.04)


@pytest.mark.parametrize("name", ["none", "noise", "clip", "layer", "sampling", "divisor"])
def test_run_audit(name):
    torch.manual_seed(0)
    result = audit_demonstration_run(
        canaries=600,
        steps=60,
        records=200,
        fault=FAULTS[name],
        confidence=0.99999 if name == "none" else 0.999,
        rng=np.random.default_rng(13),
    )
    assert result.violated == (name != "none"), result.evidence
    assert result.epsilon_lower < result.claimed_epsilon  # seen long before epsilon is refuted
    if name in {"layer", "sampling"}:
        assert result.facts["auc_sigmas"] > 6


def test_canaries_are_in_the_ledger_and_leave_the_model_alone():
    torch.manual_seed(1)
    features = torch.randn(100, 4)
    model = nn.Linear(4, 2)
    observed, engine = train_with_canaries(
        model=model,
        features=features,
        labels=(features[:, 0] > 0).long(),
        canaries=50,
        width=4,
        batch_size=40,
        steps=5,
        noise_multiplier=1e-4,
        learning_rate=0.5,
        rng=np.random.default_rng(14),
    )
    assert engine.accountant.steps == observed.steps == 5
    coins = observed.included
    sampled = observed.linear[coins]  # without noise: how often each was sampled
    assert sampled == pytest.approx(np.rint(sampled), abs=0.01)
    assert observed.linear[~coins] == pytest.approx(np.zeros((~coins).sum()), abs=0.01)
    assert sampled.mean() == pytest.approx(5 * 40 / (100 + coins.sum()), rel=0.3)


def plan(**changes):
    settings = {
        "width": 4,
        "max_grad_norm": 1.0,
        "scale": 1.0,
        "sampling_prob": 0.5,
        "steps": 20,
    }
    return RunPlan(**(settings | changes))


def judge(claimed, simulated, seed):
    """Audit a run simulated by one plan against another that it claims."""
    rng = np.random.default_rng(seed)
    run = expected_scores(simulated, rng.random(600) < 0.5, rng)
    observed = CanaryScores.empty(claimed, run.included)
    observed.absolute, observed.linear, observed.step_noise = (
        run.absolute,
        run.linear,
        run.step_noise,
    )
    observed.scores = run.scores
    return audit_run(
        observed, claimed_epsilon=50.0, delta=1e-5, reference=4000, confidence=0.99, rng=rng
    )


def test_run_checks_hold_as_often_as_they_say():
    results = [judge(plan(), plan(), seed) for seed in range(40)]
    assert sum(result.violated for result in results) <= 3
    p_values = np.array([check.p_value for result in results for check in result.checks])
    assert np.mean(p_values < 0.1) == pytest.approx(0.1, abs=0.05)


@pytest.mark.parametrize(
    "changes", [{"scale": 0.97}, {"max_grad_norm": 1.2}, {"sampling_prob": 0.6}]
)
def test_run_checks_see_small_departures(changes):
    assert judge(plan(), plan(**changes), 3).violated


def test_one_run_bound_of_a_correct_run_is_below_the_accountant():
    rng = np.random.default_rng(15)
    settings = plan(steps=1, sampling_prob=1.0, scale=0.5)
    truth = lap2.Accountant().compose(lap2.Laplace(0.5, 4), sampling_prob=1.0).get_epsilon(1e-5)
    run = expected_scores(settings, rng.random(2000) < 0.5, rng)
    result = audit_run(run, claimed_epsilon=truth, delta=1e-5, rng=rng)
    assert 0.3 * truth < result.epsilon_lower < truth
    false = audit_run(run, claimed_epsilon=0.3 * truth, delta=1e-5, rng=rng)
    assert false.violated


def test_run_audit_refuses_what_it_cannot_judge():
    rng = np.random.default_rng(16)
    run = expected_scores(plan(steps=2), np.ones(10, dtype=bool), rng)
    with pytest.raises(ValueError, match="in and out"):
        audit_run(run, claimed_epsilon=1.0, delta=1e-5, rng=rng)
    with pytest.raises(ValueError, match="steps"):
        audit_run(
            CanaryScores.empty(plan(), np.arange(10) < 5), claimed_epsilon=1.0, delta=0.0, rng=rng
        )
    with pytest.raises(ValueError, match="shape"):
        run.add(np.zeros((3, 4)))
