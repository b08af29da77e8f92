"""Membership inference: right on known scores, sees an overfitted model, spares a private one."""

import numpy as np
import pytest
import torch
from scipy import stats
from torch import nn

from lap2.audit import audit_membership, confidences, lira_scores, report

torch.set_num_threads(1)


def test_report_of_known_scores():
    rng = np.random.default_rng(0)
    member = np.arange(40_000) % 2 == 0
    scores = rng.normal(size=member.size) + member
    found = report(scores, member)
    assert found.auc == pytest.approx(stats.norm.cdf(1 / np.sqrt(2)), abs=0.01)
    assert found.advantage == pytest.approx(2 * stats.norm.cdf(0.5) - 1, abs=0.02)
    for fpr, tpr in found.tpr_at_fpr.items():
        assert tpr == pytest.approx(stats.norm.sf(stats.norm.isf(fpr) - 1), abs=0.02)


def test_confidence_is_the_logit_of_the_probability():
    logits = torch.tensor([[2.0, 0.5, -1.0], [0.0, 0.0, 60.0]])
    labels = torch.tensor([0, 2])
    p = torch.softmax(logits[0].double(), dim=0)[0].item()
    found = confidences(lambda x: x, logits, labels)
    assert found[0] == pytest.approx(np.log(p / (1 - p)))
    assert found[1] == pytest.approx(60 - np.log(2))  # no overflow where p rounds to 1


def fit(features, labels, seed):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(features.shape[1], 64), nn.Tanh(), nn.Linear(64, 2))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    for _ in range(150):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(features), labels).backward()
        optimizer.step()
    return model


def test_an_overfitted_model_is_seen_and_lira_sees_more():
    rng = np.random.default_rng(1)
    torch.manual_seed(1)
    features = torch.randn(600, 20)
    labels = ((features[:, 0] > 0) ^ (torch.rand(600) < 0.2)).long()
    coins = rng.random((17, 600)) < 0.5  # the audited model and 16 references
    found = [
        confidences(fit(features[c], labels[c], seed), features, labels)
        for seed, c in enumerate(torch.from_numpy(coins))
    ]
    by_loss = report(found[0], coins[0])
    scores = lira_scores(found[0], np.stack(found[1:]), coins[1:])
    by_lira = report(scores, coins[0], attack="LiRA")
    assert 0.6 < by_loss.auc < by_lira.auc
    refuted = audit_membership(scores, coins[0], claimed_epsilon=0.5, delta=1e-5)
    assert refuted.violated
    spared = audit_membership(
        rng.normal(size=600), coins[0], claimed_epsilon=0.5, delta=1e-5, attack="chance"
    )
    assert spared.verdict == "consistent"
    assert spared.epsilon_lower == 0


def test_what_cannot_be_judged_is_refused():
    scores, member = np.arange(4.0), np.array([True, False, True, False])
    with pytest.raises(ValueError, match="both kinds"):
        report(scores, np.ones(4, dtype=bool))
    with pytest.raises(ValueError, match="one length"):
        report(scores, member[:3])
    with pytest.raises(ValueError, match="finite"):
        report(scores * np.nan, member)
    with pytest.raises(ValueError, match="a model with and one without"):
        lira_scores(scores, np.zeros((2, 4)), np.ones((2, 4), dtype=bool))
