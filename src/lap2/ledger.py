"""The ledger: what was released, how far each entry can be trusted, and the file format."""

import hashlib
import json
import math
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

from lap2 import _validate
from lap2.mechanism import (
    Gaussian,
    Joint,
    Laplace,
    LaplaceL1,
    MajorizedLaplace,
    Mechanism,
    PublishedLaplace,
)

__all__ = ["Entry", "LedgerError", "dumps", "joined", "loads", "read_text", "write_text"]

_FORMAT = "lap2-ledger"
_VERSIONS = (1, 2)
"""Those that can be read; the last is written. Version 1 knew no provenance."""
_ADJACENCY = "add/remove one record"
_TYPES: dict[str, type[Mechanism]] = {
    kind.__name__: kind
    for kind in (Laplace, LaplaceL1, Gaussian, MajorizedLaplace, PublishedLaplace, Joint)
}
_SAMPLINGS = ("Poisson", "unknown")
_NOISES = ("unstated", "secure", "ordinary")
_ORIGIN = re.compile(r"[0-9a-f]{16}\Z")

_MOST_STEPS = 2**53
_MOST_TEXT = 2**26
_MOST_DIGITS = 400
_MOST_CAVEATS, _MOST_CAVEAT = 100, 1000

_UNKNOWN_SAMPLING = "batches were not Poisson samples: no bound is known for them"
_ORDINARY_NOISE = "the noise comes from an ordinary generator: an experiment, not a release"


class LedgerError(ValueError):
    """A ledger file is corrupt, was edited, or is of an unknown format or version."""


@dataclass(frozen=True)
class Entry:
    """``steps`` releases of one mechanism, each from a fresh sample.

    Attributes:
        mechanism: what one step releases.
        sampling_prob: the probability with which each record enters a step's sample,
            independently of all others.
        steps: how often; at most 2^53.
        sampling: "Poisson", or "unknown" for batches that were drawn in another way.
        noise: "secure", "ordinary" (a seeded generator: an experiment), or "unstated" where the
            steps were composed by hand, and the noise is taken to be as described.
        caveats: why else no guarantee rests on it.
        origin: 16 hexadecimal digits of the process that released it, or empty. Entries of one
            origin in two ledgers are the same releases (see :func:`joined`).
    """

    mechanism: Mechanism
    sampling_prob: float
    steps: int
    sampling: str = "Poisson"
    noise: str = "unstated"
    caveats: tuple[str, ...] = ()
    origin: str = ""

    def __post_init__(self) -> None:
        if not isinstance(self.mechanism, Mechanism):
            raise TypeError(
                f"mechanism must be a lap2 mechanism such as lap2.Laplace, got {self.mechanism!r} "
                f"of type {type(self.mechanism).__name__}"
            )
        prob = _validate.probability("sampling_prob", self.sampling_prob)
        object.__setattr__(self, "sampling_prob", prob)
        steps = _validate.integer("steps", self.steps, least=0)
        if not steps <= _MOST_STEPS:
            raise ValueError(
                f"steps must be at most 2^53, got a number of {steps.bit_length()} bits"
            )
        object.__setattr__(self, "steps", steps)
        _validate.choice("sampling", self.sampling, _SAMPLINGS)
        _validate.choice("noise", self.noise, _NOISES)
        object.__setattr__(self, "caveats", _checked_caveats(self.caveats))
        origin: Any = self.origin
        if not (isinstance(origin, str) and (not origin or _ORIGIN.match(origin))):
            raise ValueError(f"origin must be 16 hexadecimal digits or empty, got {self.origin!r}")

    @property
    def reasons(self) -> tuple[str, ...]:
        """Why the entry is no guarantee; empty if it is one."""
        return (
            *([] if self.mechanism.is_guarantee else [f"the bound is {self.mechanism.bound}"]),
            *([] if self.sampling == "Poisson" else [_UNKNOWN_SAMPLING]),
            *([] if self.noise != "ordinary" else [_ORDINARY_NOISE]),
            *self.caveats,
        )

    def continues(self, other: "Entry") -> bool:
        """Whether both say the same of their steps, so that one entry with all steps will do."""
        return replace(self, steps=0) == replace(other, steps=0)


def joined(one: Sequence[Entry], other: Sequence[Entry]) -> list[Entry]:
    """Everything that is in either of two ledgers, once.

    Ledgers of a run that went on in two copies begin alike: entries of one origin are the same
    releases in both, of which the longer list counts, with the caveats of both. Should neither list
    be the beginning of the other, both count. So do all entries without an origin.
    """
    found = list(one)
    for origin in dict.fromkeys(entry.origin for entry in other):
        new = [entry for entry in other if entry.origin == origin]
        places = [place for place, entry in enumerate(found) if entry.origin == origin]
        old = [found[place] for place in places]
        longer = next((b for a, b in ((old, new), (new, old)) if _begins(a, b)), None)
        if longer is None or not origin or not old:
            found += new
            continue
        caveats = [caveat for entry in (*old, *new) for caveat in entry.caveats]
        both = [replace(e, caveats=_once((*e.caveats, *caveats))) for e in longer]
        found = [entry for entry in found if entry.origin != origin]
        found[places[0] : places[0]] = both
    return _neighbours_as_one(found)


def _begins(shorter: list[Entry], longer: list[Entry]) -> bool:
    """Whether one list of releases is the beginning of the other, whatever the caveats."""
    one, other = _without_caveats(shorter), _without_caveats(longer)
    if not one or len(one) > len(other):
        return not one
    *before, last = one
    there = other[len(before)]
    return before == other[: len(before)] and last.continues(there) and last.steps <= there.steps


def _without_caveats(entries: list[Entry]) -> list[Entry]:
    """The releases alone."""
    return _neighbours_as_one(replace(e, caveats=()) for e in entries if e.steps)


def _neighbours_as_one(entries: Iterable[Entry]) -> list[Entry]:
    """Neighbours that are alike as one entry, as long as it can hold their steps."""
    found: list[Entry] = []
    for entry in entries:
        steps = found[-1].steps + entry.steps if found else 0
        if found and found[-1].continues(entry) and steps <= _MOST_STEPS:
            found[-1] = replace(entry, steps=steps)
        else:
            found.append(entry)
    return found


def _once(texts: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(texts))


def _checked_caveats(caveats: Iterable[Any]) -> tuple[str, ...]:
    texts = tuple(caveats)
    if len(texts) > _MOST_CAVEATS:
        raise ValueError(f"caveats must be at most {_MOST_CAVEATS} sentences, got {len(texts)}")
    for text in texts:
        if not isinstance(text, str) or not 0 < len(text) <= _MOST_CAVEAT:
            raise ValueError(
                f"caveats must be sentences of 1 to {_MOST_CAVEAT} characters, got one of type "
                f"{type(text).__name__}"
            )
    return _once(texts)


def dumps(entries: Iterable[Entry]) -> str:
    """The entries as JSON text with a format version and a SHA-256 of the content.

    The hash finds corruption and edits; it is no signature, and does not stop a forger who
    recomputes it.
    """
    content = {
        "format": _FORMAT,
        "version": _VERSIONS[-1],
        "adjacency": _ADJACENCY,
        "entries": [
            {
                "mechanism": _mechanism_to_json(entry.mechanism),
                **{
                    field.name: getattr(entry, field.name)
                    for field in fields(entry)
                    if field.name != "mechanism"
                },
            }
            for entry in entries
        ],
    }
    return json.dumps({**content, "sha256": _digest(content)}, indent=2) + "\n"


def loads(text: str) -> list[Entry]:
    """The entries of a text made by :func:`dumps`.

    Raises:
        LedgerError: the text is not a ledger, is of an unknown version, fails its integrity
            check, or holds anything that no ledger holds.
    """
    try:
        return _entries_of(_object("ledger", _parsed(text)))
    except RecursionError:
        raise LedgerError("ledger must not be nested as deeply as this one is") from None


def read_text(path: str | os.PathLike[str]) -> str:
    """What is in a file, but no more than :func:`loads` takes, however long the file is."""
    with Path(path).open(encoding="utf-8") as stream:
        return stream.read(_MOST_TEXT + 1)


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Write a file so that a reader, or a crash, sees the old content or the new, never a part."""
    target = Path(path)
    partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
    try:
        with partial.open("w", encoding="utf-8") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)


def _digest(content: dict[str, Any]) -> str:
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()


def _mechanism_to_json(mechanism: Mechanism) -> dict[str, Any]:
    name = type(mechanism).__name__
    if _TYPES.get(name) is not type(mechanism):
        raise TypeError(f"mechanism must be one that lap2 defines to be saved, got {mechanism!r}")
    if isinstance(mechanism, Joint):
        return {"type": name, "groups": [_mechanism_to_json(group) for group in mechanism.groups]}
    content = asdict(mechanism)
    if content.get("dimension") == math.inf:
        content["dimension"] = "inf"
    return {"type": name, **content}


# Reading, which trusts nothing: the hash is no signature.


def _entries_of(content: dict[str, Any]) -> list[Entry]:
    if content.get("format") != _FORMAT:
        raise LedgerError(f'ledger must have "format": "{_FORMAT}"; this file has not')
    version: Any = content.get("version")
    if type(version) is not int or version not in _VERSIONS:
        raise LedgerError(
            f"ledger version must be one of {_VERSIONS}, got {_shown(version)}: was it written by "
            "a newer lap2?"
        )
    digest = content.pop("sha256", None)
    if digest != _digest(content):
        raise LedgerError(
            f"ledger fails its integrity check: the file says sha256 {_shown(digest)}, its content "
            f"has {_digest(content)!r}. It was corrupted or edited"
        )
    header = {"format": _FORMAT, "version": version, "adjacency": _ADJACENCY}
    header |= {"sampling": "Poisson"} if version == 1 else {}
    _known_keys("ledger", content, {*header, "entries"})
    for key, value in header.items():
        if content[key] != value:
            raise LedgerError(f"ledger {key} must be {value!r}, got {_shown(content[key])}")
    if not isinstance(content["entries"], list):
        raise LedgerError(f"ledger entries must be a list, got {_shown(content['entries'])}")
    items = cast("list[Any]", content["entries"])
    return [_entry_from_json(f"entry {n}", item, version) for n, item in enumerate(items)]


def _parsed(text: str) -> Any:
    if len(text) > _MOST_TEXT:
        raise LedgerError(f"ledger must be at most {_MOST_TEXT} characters, got more")
    try:
        return json.loads(
            text,
            object_pairs_hook=_unique,
            parse_int=_bounded,
            parse_float=_finite,
            parse_constant=_finite,
        )
    except json.JSONDecodeError as error:
        raise LedgerError(f"ledger must be JSON text: {error}") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = sorted(name for name, _ in pairs)
        twice = next(one for one, other in pairwise(names) if one == other)
        raise LedgerError(f"ledger must name every field once, got {_shown(twice)} twice")
    return found


def _bounded(digits: str) -> int:
    if len(digits) > _MOST_DIGITS:
        raise LedgerError(f"ledger must hold numbers of at most {_MOST_DIGITS} digits")
    return int(digits)


def _finite(text: str) -> float:
    if not math.isfinite(number := float(text)):
        raise LedgerError(f"ledger must hold finite numbers, got {_shown(text)}")
    return number


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _object(where: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise LedgerError(f"{where} must be a JSON object, got {_shown(value)}")
    return cast("dict[str, Any]", value)


def _known_keys(where: str, value: dict[str, Any], known: set[str]) -> None:
    if missing := sorted(known - value.keys()):
        raise LedgerError(f"{where} must have {', '.join(missing)}, got none")
    if unknown := sorted(value.keys() - known):
        raise LedgerError(f"{where} must have no other field, got {_shown(unknown[0])}")


def _entry_from_json(where: str, item: Any, version: int) -> Entry:
    data = _object(where, item)
    names = {field.name for field in fields(Entry)}
    if version == 1:
        names = {"mechanism", "sampling_prob", "steps"}
    _known_keys(where, data, names)
    mechanism = _mechanism_from_json(where, data["mechanism"])
    if not isinstance(data.get("caveats", []), list):
        raise LedgerError(f"{where}: caveats must be a list, got {_shown(data['caveats'])}")
    try:
        data["mechanism"] = mechanism
        return Entry(**data)
    except (TypeError, ValueError, OverflowError) as error:
        raise LedgerError(f"{where}: {error}") from None


def _mechanism_from_json(where: str, item: Any, *, alone: bool = True) -> Mechanism:
    data = _object(f"{where}: mechanism", item)
    name = data.get("type")
    kind = _TYPES.get(name) if isinstance(name, str) else None
    if kind is None or (kind is Joint and not alone):
        raise LedgerError(f"{where}: type must be a mechanism of lap2, got {_shown(name)}")
    _known_keys(f"{where}: {name}", data, {"type", *(field.name for field in fields(kind))})
    content = {key: value for key, value in data.items() if key != "type"}
    try:
        if kind is Joint:
            return Joint(_groups_from_json(where, content["groups"]))
        if content.get("dimension") == "inf":
            content["dimension"] = math.inf
        return kind(**content)
    except LedgerError:
        raise
    except (TypeError, ValueError, OverflowError) as error:
        raise LedgerError(f"{where}: {error}") from None


def _groups_from_json(where: str, groups: Any) -> Iterator[Mechanism]:
    if not isinstance(groups, list):
        raise LedgerError(f"{where}: groups must be a list, got {_shown(groups)}")
    for group in cast("list[Any]", groups):
        yield _mechanism_from_json(where, group, alone=False)
