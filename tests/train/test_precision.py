"""Products in full precision, whatever the user allows."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lap2.train import PrivacyEngine, gradients, precision


@pytest.fixture
def allowed():
    """The user allows TF32 and bfloat16 for a while."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    yield [setting.fp32_precision for setting in precision._SETTINGS]
    torch.set_float32_matmul_precision(before)


def levels():
    return [setting.fp32_precision for setting in precision._SETTINGS]


def test_it_is_full_within_and_as_it_was_afterwards(allowed):
    assert "ieee" not in allowed
    with precision.full_precision():
        assert levels() == ["ieee"] * len(allowed)
    assert levels() == allowed
    with pytest.raises(ZeroDivisionError), precision.full_precision():
        _ = 1 / 0
    assert levels() == allowed


def test_autocast_is_off_within():
    x = torch.randn(4, 4)
    with torch.autocast("cpu", torch.bfloat16):
        with precision.full_precision():
            assert (x @ x).dtype == torch.float32
        assert (x @ x).dtype == torch.bfloat16


def test_the_setting_of_older_versions_too(allowed, monkeypatch):
    monkeypatch.setattr(precision, "_SETTINGS", [precision._Global()])
    with precision.full_precision():
        assert torch.get_float32_matmul_precision() == "highest"
    assert torch.get_float32_matmul_precision() == "medium"


def test_norms_and_sums_are_taken_in_it(allowed, monkeypatch):
    seen = []

    def spy(method):
        def spied(*args, **kwargs):
            seen.append((method.__name__, *levels()))
            return method(*args, **kwargs)

        return spied

    names = {"__init__", "size", "add_to", "project"}
    for name in names:
        for kind in (gradients.Outer, gradients.Dense):
            monkeypatch.setattr(kind, name, spy(getattr(kind, name)))
    model = nn.Sequential(nn.Conv2d(1, 8, 3), nn.Flatten(), nn.Linear(288, 2))
    model, optimizer, loader = PrivacyEngine().make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(TensorDataset(torch.randn(8, 1, 8, 8)), batch_size=8),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
    )
    for (x,) in loader:
        model(x).sum(dim=1).mean().backward()
        optimizer.step()
    assert {name for name, *_ in seen} == names  # projected in rehearsals
    assert all(set(found) == {"ieee"} for _, *found in seen)
    assert levels() == allowed
