"""The ledger's file: round trip, corruption, tampering."""

import json
import math
import random
import warnings

import pytest

import lap2
from lap2 import ledger

with warnings.catch_warnings():
    warnings.simplefilter("ignore", lap2.NotAGuaranteeWarning)
    PUBLISHED = lap2.PublishedLaplace(2.0, 7)

MECHANISMS = [
    lap2.Laplace(1.0, 26010),
    lap2.Laplace(0.1 + 0.2, math.inf),
    lap2.LaplaceL1(3.0),
    lap2.Gaussian(1e-3),
    lap2.MajorizedLaplace(2.0, 7),
    lap2.Joint([lap2.Laplace(1.0, 1), lap2.Gaussian(4.0)]),
]


@pytest.fixture
def accountant():
    accountant = lap2.Accountant()
    for steps, mechanism in enumerate(MECHANISMS, start=1):
        accountant.compose(mechanism, sampling_prob=1 / 3, steps=steps)
    return accountant


def test_round_trip_is_exact(accountant, tmp_path):
    path = tmp_path / "ledger.json"
    accountant.save(path)
    loaded = lap2.Accountant.load(path)
    assert loaded.ledger == accountant.ledger
    assert loaded.get_epsilon(1e-5) == accountant.get_epsilon(1e-5)
    assert [p.name for p in tmp_path.iterdir()] == ["ledger.json"]


def test_published_bound_stays_labelled_after_a_round_trip():
    accountant = lap2.Accountant().compose(PUBLISHED, sampling_prob=0.1)
    with pytest.warns(lap2.NotAGuaranteeWarning):
        loaded = lap2.Accountant.from_json(accountant.to_json())
    assert not loaded.is_guarantee


def test_every_flipped_character_is_detected(accountant, tmp_path):
    """Any change of content is refused; a change of white space alone is no change."""
    text = accountant.to_json()
    rng = random.Random(3)
    for _ in range(300):
        position = rng.randrange(len(text))
        character = rng.choice('0123456789abcdefxyz{}[]",:.- ')
        broken = text[:position] + character + text[position + 1 :]
        try:
            same = json.loads(broken) == json.loads(text)
        except json.JSONDecodeError:
            same = False
        if not same:
            with pytest.raises(lap2.LedgerError):
                ledger.loads(broken)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda d: d["entries"][0].update(steps=0), "integrity check"),
        (lambda d: d["entries"].pop(), "integrity check"),
        (lambda d: d.pop("sha256"), "integrity check"),
        (lambda d: d.update(version=2), "version must be 1, got 2"),
        (lambda d: d.update(format="other"), '"format": "lap2-ledger"'),
        (lambda d: d.update(adjacency="replace one record"), "adjacency must be 'add/remove"),
        (lambda d: d.update(sampling="shuffled"), "sampling must be 'Poisson'"),
    ],
)
def test_tampering_is_refused(accountant, edit, message):
    data = json.loads(accountant.to_json())
    edit(data)
    with pytest.raises(lap2.LedgerError, match=message):
        lap2.Accountant.from_json(json.dumps(data))


@pytest.mark.parametrize(
    "entry",
    [
        {"mechanism": {"type": "Laplace", "noise_multiplier": -1.0, "dimension": 3}},
        {"mechanism": {"type": "Unknown", "noise_multiplier": 1.0}},
        {"mechanism": {"type": "Gaussian", "noise_multiplier": 1.0, "extra": 1}},
        {"mechanism": {"type": "Gaussian", "noise_multiplier": 1.0}, "steps": 1.5},
        {"mechanism": None},
    ],
)
def test_a_valid_checksum_does_not_excuse_bad_values(entry):
    content = json.loads(lap2.Accountant().to_json())
    content.pop("sha256")
    content["entries"] = [{"sampling_prob": 0.5, "steps": 1, **entry}]
    content["sha256"] = ledger._digest(content)
    with pytest.raises(lap2.LedgerError, match="not valid"):
        ledger.loads(json.dumps(content))


@pytest.mark.parametrize("content", [b"", b"[]", b"{", b"\xff\xfe\x00", b"null"])
def test_files_that_are_no_ledger_are_refused_by_name(content, tmp_path):
    path = tmp_path / "ledger.json"
    path.write_bytes(content)
    with pytest.raises(lap2.LedgerError, match=r"ledger\.json"):
        lap2.Accountant.load(path)


def test_a_failed_write_keeps_the_old_file(accountant, tmp_path, monkeypatch):
    path = tmp_path / "ledger.json"
    accountant.save(path)
    before = path.read_text()

    def fail(_):
        raise OSError("disk full")

    monkeypatch.setattr(ledger.os, "fsync", fail)
    accountant.compose(lap2.Gaussian(1.0), sampling_prob=1.0)
    with pytest.raises(OSError, match="disk full"):
        accountant.save(path)
    assert path.read_text() == before
    assert [p.name for p in tmp_path.iterdir()] == ["ledger.json"]


def test_foreign_mechanisms_cannot_be_saved():
    with pytest.raises(TypeError, match="must be one that lap2 defines"):
        ledger.dumps([lap2.Entry(lap2.Mechanism(), 0.5, 1)])
