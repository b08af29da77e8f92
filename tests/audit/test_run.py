"""The run audit: exact in simulation, and what it sees in runs of the engine."""

import numpy as np
import pytest
import torch
from torch import nn

import lap2
from lap2.audit import CanaryScores, RunPlan, audit_run
from lap2.audit.canaries import train_with_canaries
from lap2.audit.controls import FAULTS
from lap2.audit.demonstration import audit_demonstration_run

torch.set_num_threads(1)


VALUES = ["none", "noise", "clip", "layer", "sampling", "divisor", "repeat", "shared"]
BITS = [name for name in FAULTS if name != "float32"]


@pytest.mark.parametrize(
    ("release", "name"), [("values", n) for n in VALUES] + [("bits", n) for n in BITS]
)
def test_run_audit(release, name):
    torch.manual_seed(0)
    result = audit_demonstration_run(
        canaries=600,
        # A realised divisor is seen by its changes alone: small batches, more steps.
        batch_size=25 if name == "divisor" else 100,
        steps=120 if name == "divisor" else 40,
        records=200,
        release=release,
        fault=FAULTS[name],
        confidence=0.99999 if name == "none" else 0.999,
        rng=np.random.default_rng(13),
    )
    assert result.violated == (name != "none"), (result.evidence, result.checks)
    assert result.epsilon_lower < result.claimed_epsilon  # seen long before epsilon is refuted
    if name == "sampling" or (name, release) == ("layer", "values"):
        assert result.facts["auc_sigmas"] > 6


class Mixing(nn.Module):
    """One record's input moves what another's gradient is, where no gradient flows."""

    def __init__(self, kind):
        super().__init__()
        self.linear, self.kind, self.last = nn.Linear(8, 2), kind, None

    def forward(self, x):
        if self.kind == "in the batch":
            x = x - x.detach().mean(dim=0)
        elif self.kind == "over time":
            last, self.last = self.last, x.detach().mean(dim=0)
            x = x if last is None else x - 3 * last
        return self.linear(x)


@pytest.mark.parametrize("kind", ["in the batch", "over time"])
def test_records_that_mix_are_seen_in_the_gradients_of_the_model(kind):
    torch.manual_seed(2)
    features = torch.randn(200, 8) + 1
    observed, engine = train_with_canaries(
        model=Mixing(kind),
        features=features,
        labels=(features[:, 0] > 1).long(),
        canaries=100,
        batch_size=50,
        steps=30,
        rng=np.random.default_rng(17),
    )
    result = audit_run(observed, claimed_epsilon=engine.get_epsilon(1e-5), delta=1e-5)
    assert result.violated
    assert any("real records" in found for found in result.evidence)
    assert all("canaries" not in found and "noise" not in found for found in result.evidence)


def test_canaries_are_in_the_ledger_and_leave_the_model_alone():
    torch.manual_seed(1)
    features = torch.randn(100, 4)
    model = nn.Linear(4, 2)
    observed, engine = train_with_canaries(
        model=model,
        features=features,
        labels=(features[:, 0] > 0).long(),
        canaries=300,
        width=4,
        batch_size=80,
        steps=10,
        noise_multiplier=1e-4,
        release="values",
        learning_rate=0.5,
        rng=np.random.default_rng(14),
    )
    assert engine.accountant.steps == observed.steps == 10
    coins = observed.included
    sampled = observed.linear[coins]  # without noise: how often each was sampled
    assert sampled == pytest.approx(np.rint(sampled), abs=0.01)
    assert observed.linear[~coins] == pytest.approx(np.zeros((~coins).sum()), abs=0.01)
    assert sampled.mean() == pytest.approx(10 * 80 / (100 + coins.sum()), rel=0.2)


def plan(**changes):
    settings = {
        "width": 4,
        "max_grad_norm": 1.0,
        "scale": 1.0,
        "sampling_prob": 0.5,
        "steps": 20,
    }
    return RunPlan(**(settings | changes))


def simulated(claimed, truth, rng, *, canaries=600, same_sample=False, same_noise=False):
    """A run that does what ``truth`` says and claims to do something else."""
    run = CanaryScores(claimed, rng.random(canaries) < 0.5, rng=rng)
    for step in range(claimed.steps):
        if step == 0 or not same_sample:
            sums = truth.sums(run.included, rng)
        if step == 0 or not same_noise:
            noise = rng.laplace(scale=truth.scale, size=sums.shape)
        run.add(sums + noise)
    return run


def judge(claimed, truth, seed, **how):
    rng = np.random.default_rng(seed)
    run = simulated(claimed, truth, rng, **how)
    return audit_run(run, claimed_epsilon=50.0, delta=1e-5, confidence=0.99)


def test_run_checks_hold_as_often_as_they_say():
    results = [judge(plan(), plan(), seed, canaries=60) for seed in range(30)]
    assert sum(result.violated for result in results) <= 2
    p_values = np.array([check.p_value for result in results for check in result.checks])
    assert np.mean(p_values < 0.1) == pytest.approx(0.1, abs=0.05)


@pytest.mark.parametrize(
    "changes", [{"scale": 0.96}, {"max_grad_norm": 1.2}, {"sampling_prob": 0.6}]
)
def test_run_checks_see_small_departures(changes):
    assert judge(plan(steps=40), plan(**changes), 3).violated


@pytest.mark.parametrize("what", ["sample", "noise"])
def test_run_checks_see_what_is_used_again(what):
    result = judge(plan(), plan(), 4, **{f"same_{what}": True})
    assert any("of earlier steps" in found for found in result.evidence)


def test_one_run_bound_of_a_correct_run_is_below_the_accountant():
    rng = np.random.default_rng(15)
    settings = plan(steps=1, sampling_prob=1.0, scale=0.5)
    truth = lap2.Accountant().compose(lap2.Laplace(0.5, 4), sampling_prob=1.0).get_epsilon(1e-5)
    run = simulated(settings, settings, rng, canaries=2000)
    result = audit_run(run, claimed_epsilon=truth, delta=1e-5)
    assert 0.3 * truth < result.epsilon_lower < truth
    false = audit_run(run, claimed_epsilon=0.3 * truth, delta=1e-5)
    assert false.violated


def test_run_audit_refuses_what_it_cannot_judge():
    rng = np.random.default_rng(16)
    with pytest.raises(ValueError, match="in and out"):
        CanaryScores(plan(), np.ones(10, dtype=bool), rng=rng)
    run = CanaryScores(plan(), np.arange(10) < 5, rng=rng)
    with pytest.raises(ValueError, match="steps"):
        audit_run(run, claimed_epsilon=1.0, delta=0.0)
    with pytest.raises(ValueError, match="shape"):
        run.add(np.zeros((3, 4)))
