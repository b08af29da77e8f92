"""The ledger's file: round trip, corruption, tampering."""

import copy
import dataclasses
import itertools
import json
import math
import pickle
import random
import sys
import threading
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
        (lambda d: d.update(version=3), r"version must be one of \(1, 2\), got 3"),
        (lambda d: d.update(version=True), "got True"),
        (lambda d: d.update(format="other"), '"format": "lap2-ledger"'),
        (lambda d: d.update(adjacency="replace one record"), "integrity check"),
    ],
)
def test_tampering_is_refused(accountant, edit, message):
    data = json.loads(accountant.to_json())
    edit(data)
    with pytest.raises(lap2.LedgerError, match=message):
        lap2.Accountant.from_json(json.dumps(data))


ENTRY = {
    "mechanism": {"type": "Laplace", "noise_multiplier": 1.0, "dimension": 3},
    "sampling_prob": 0.5,
    "steps": 1,
    "sampling": "Poisson",
    "noise": "secure",
    "caveats": [],
    "origin": "0123456789abcdef",
}
HEADER = {"format": "lap2-ledger", "version": 2, "adjacency": "add/remove one record"}


def forged(entries, **header):
    """What a forger would write who knows how the hash is made."""
    content = HEADER | {"entries": entries} | header
    return json.dumps(content | {"sha256": ledger._digest(content)})


def laplace(**changes):
    return {"mechanism": ENTRY["mechanism"] | changes}


def test_what_a_forger_changes_is_all_that_is_wrong():
    (entry,) = ledger.loads(forged([ENTRY]))
    assert entry == lap2.Entry(
        lap2.Laplace(1.0, 3), 0.5, 1, noise="secure", origin="0123456789abcdef"
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (laplace(noise_multiplier=-1.0), "noise_multiplier must be"),
        (laplace(noise_multiplier=True), "noise_multiplier must be"),
        (laplace(noise_multiplier="1"), "noise_multiplier must be"),
        (laplace(noise_multiplier=10**390), "entry 0"),
        (laplace(dimension=3.0), "dimension must be"),
        (laplace(dimension=None), "dimension must be"),
        (laplace(dimension=[3]), "dimension must be"),
        (laplace(extra=1), "no other field, got 'extra'"),
        (laplace(type="Unknown"), "type must be a mechanism of lap2, got 'Unknown'"),
        (laplace(type=["Laplace"]), "type must be a mechanism"),
        ({"mechanism": None}, "must be a JSON object, got None"),
        ({"mechanism": {"type": "Gaussian"}}, "must have noise_multiplier"),
        ({"mechanism": {"type": "Joint", "groups": None}}, "groups must be a list"),
        ({"mechanism": {"type": "Joint", "groups": []}}, "at least one"),
        ({"mechanism": {"type": "Joint", "groups": [{"type": "Joint", "groups": []}]}}, "Joint"),
        ({"steps": 1.5}, "steps must be"),
        ({"steps": -5}, "steps must be"),
        ({"steps": True}, "steps must be"),
        ({"steps": 2**53 + 1}, "at most 2\\^53"),
        ({"steps": 10**399}, "at most 2\\^53"),
        ({"sampling_prob": 1.5}, "sampling_prob must be"),
        ({"sampling_prob": None}, "sampling_prob must be"),
        ({"sampling": "shuffled"}, "sampling must be one of Poisson, unknown"),
        ({"sampling": []}, "sampling must be"),
        ({"noise": "quiet"}, "noise must be one of"),
        ({"caveats": "none"}, "caveats must be a list"),
        ({"caveats": [3]}, "caveats must be sentences"),
        ({"caveats": ["x" * 1001]}, "caveats must be sentences"),
        ({"caveats": [str(n) for n in range(101)]}, "at most 100"),
        ({"origin": "../../victim"}, "origin must be"),
        ({"origin": 7}, "origin must be"),
        ({"remark": "fine"}, "no other field, got 'remark'"),
    ],
)
def test_a_valid_checksum_does_not_excuse_bad_values(change, message):
    with pytest.raises(lap2.LedgerError, match=message):
        ledger.loads(forged([ENTRY | change]))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (forged([ENTRY]).replace("0.5", "1e400"), "finite"),
        (forged([ENTRY]).replace('"dimension": 3', '"dimension": 1e400'), "finite"),
        (forged([ENTRY]).replace("0.5", "NaN"), "finite"),
        (forged([ENTRY]).replace('"steps": 1', '"steps": 1, "steps": 0'), "'steps' twice"),
        (forged([ENTRY]).replace('"steps": 1', f'"steps": {"9" * 5000}'), "at most 400 digits"),
        (forged([ENTRY]).replace("{", '{"a": ' * 100_000, 1), "nested"),
        ("[" * 1_000_000, "nested"),
        (" " * (2**26 + 1), "at most"),
        (forged([ENTRY], note="kept"), "no other field, got 'note'"),
        (forged({}), "entries must be a list"),
        (forged([[]]), "entry 0 must be a JSON object"),
        (forged([ENTRY], version=1), "must have sampling"),
        (forged([ENTRY], adjacency="replace one record"), "adjacency must be 'add/remove"),
        (forged([ENTRY], version=1, sampling="shuffled"), "sampling must be 'Poisson'"),
    ],
)
def test_texts_that_no_lap2_wrote_are_refused(text, message):
    with pytest.raises(lap2.LedgerError, match=message):
        ledger.loads(text)


def test_ledgers_of_the_first_version_are_read():
    old = {"format": "lap2-ledger", "version": 1, "adjacency": "add/remove one record"}
    old |= {"sampling": "Poisson"}
    old["entries"] = [{key: ENTRY[key] for key in ("mechanism", "sampling_prob", "steps")}]
    text = json.dumps(old | {"sha256": ledger._digest(old)})
    assert ledger.loads(text) == [lap2.Entry(lap2.Laplace(1.0, 3), 0.5, 1)]


PROVENANCE = [
    {"sampling": "unknown"},
    {"noise": "ordinary"},
    {"caveats": ("held-out records were evaluated without noise",)},
]


@pytest.mark.parametrize("provenance", PROVENANCE)
def test_no_answer_says_more_than_its_entries(provenance):
    entry = lap2.Entry(lap2.Laplace(1.0, 3), 0.1, 5, **provenance)
    accountant = lap2.Accountant().compose(lap2.Laplace(1.0, 3), sampling_prob=0.1, steps=5)
    assert accountant.answer(delta=1e-5).is_guarantee
    accountant.enter(entry)
    for held in (
        accountant,
        lap2.Accountant.from_json(accountant.to_json()),
        lap2.Accountant.merged([accountant]),
        copy.deepcopy(accountant),
        pickle.loads(pickle.dumps(accountant)),
    ):
        answer = held.answer(delta=1e-5)
        assert held.steps == 10
        assert not held.is_guarantee
        assert not answer.is_guarantee
        assert answer.caveats == entry.reasons
        assert answer.sampling == entry.sampling


def test_a_caveat_without_a_step_is_kept():
    entry = lap2.Entry(lap2.Laplace(1.0, 3), 0.1, 0, caveats=("the journal was lost",))
    accountant = lap2.Accountant().enter(entry)
    assert not lap2.Accountant.from_json(accountant.to_json()).is_guarantee
    assert accountant.steps == 0


def test_threads_lose_no_step():
    accountant = lap2.Accountant()
    step = lap2.Laplace(1.0, 3)
    others = [lap2.Laplace(2.0 + i, 3) for i in range(3)]

    def work():
        for i in range(4000):
            accountant.compose(step if i % 4 else others[i % 3], sampling_prob=0.5)

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=work) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(before)
    assert accountant.steps == 32_000


ONE, OTHER, THIRD = "1" * 16, "2" * 16, "3" * 16


def run_of(origin, *parts):
    return [lap2.Entry(lap2.Laplace(noise, 3), 0.5, n, origin=origin) for noise, n in parts]


def ledger_of(*entries):
    accountant = lap2.Accountant()
    for entry in entries:
        accountant.enter(entry)
    return accountant


def test_two_copies_of_one_run_count_what_they_share_once():
    """The first process went on to 15 steps; its checkpoint of 10 was resumed by two others."""
    first = ledger_of(*run_of(ONE, (1.0, 10), (2.0, 5)))
    copy_a = ledger_of(*run_of(ONE, (1.0, 10)), *run_of(OTHER, (2.0, 7)))
    copy_b = ledger_of(*run_of(ONE, (1.0, 9)), *run_of(THIRD, (2.0, 3)))
    for order in itertools.permutations([first, copy_a, copy_b]):
        merged = lap2.Accountant.merged(order)
        assert merged.steps == 15 + 7 + 3
        assert lap2.Accountant.merged([merged, *order]).steps == 25
    assert lap2.Accountant.merged([first, first]).steps == 15


def test_what_has_no_origin_always_counts():
    by_hand = lap2.Accountant().compose(lap2.Laplace(1.0, 3), sampling_prob=0.5, steps=4)
    assert lap2.Accountant.merged([by_hand, by_hand]).steps == 8


def test_ledgers_that_contradict_each_other_both_count():
    one = ledger_of(*run_of(ONE, (1.0, 4), (2.0, 4)))
    other = ledger_of(*run_of(ONE, (1.0, 3), (3.0, 4)))
    assert lap2.Accountant.merged([one, other]).steps == 15


def test_merging_keeps_the_caveats_of_both():
    (entry,) = run_of(ONE, (1.0, 4))
    one = ledger_of(dataclasses.replace(entry, caveats=("a",)))
    other = ledger_of(dataclasses.replace(entry, caveats=("b",), steps=2))
    merged = lap2.Accountant.merged([one, other])
    assert (merged.steps, merged.caveats) == (4, ("a", "b"))


def test_caveats_of_one_origin_can_be_restated():
    accountant = ledger_of(*run_of(ONE, (1.0, 4)), *run_of(OTHER, (1.0, 4)))
    accountant.restate(ONE, ("unchecked",))
    assert [entry.caveats for entry in accountant.ledger] == [("unchecked",), ()]
    accountant.restate(ONE, ())
    assert accountant.is_guarantee


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
