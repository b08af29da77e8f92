"""The ledger: what was released, and its file format."""

import hashlib
import json
import math
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass
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

__all__ = ["Entry", "LedgerError", "dumps", "loads", "write_text"]

_FORMAT = "lap2-ledger"
_VERSION = 1
_HEADER = {
    "format": _FORMAT,
    "version": _VERSION,
    "adjacency": "add/remove one record",
    "sampling": "Poisson",
}
_TYPES: dict[str, type[Mechanism]] = {
    kind.__name__: kind
    for kind in (Laplace, LaplaceL1, Gaussian, MajorizedLaplace, PublishedLaplace, Joint)
}


class LedgerError(ValueError):
    """A ledger file is corrupt, was edited, or is of an unknown format or version."""


@dataclass(frozen=True)
class Entry:
    """``steps`` releases of one mechanism, each from a fresh Poisson sample.

    Attributes:
        mechanism: what one step releases.
        sampling_prob: the probability with which each record enters a step's sample,
            independently of all others.
        steps: how often.
    """

    mechanism: Mechanism
    sampling_prob: float
    steps: int

    def __post_init__(self) -> None:
        if not isinstance(self.mechanism, Mechanism):
            raise TypeError(
                f"mechanism must be a lap2 mechanism such as lap2.Laplace, got {self.mechanism!r} "
                f"of type {type(self.mechanism).__name__}"
            )
        prob = _validate.probability("sampling_prob", self.sampling_prob)
        object.__setattr__(self, "sampling_prob", prob)
        object.__setattr__(self, "steps", _validate.integer("steps", self.steps, least=0))


def dumps(entries: Iterable[Entry]) -> str:
    """The entries as JSON text with a format version and a SHA-256 of the content.

    The hash finds corruption and edits; it is no signature, and does not stop a forger who
    recomputes it.
    """
    content = {
        **_HEADER,
        "entries": [
            {
                "mechanism": _mechanism_to_json(entry.mechanism),
                "sampling_prob": entry.sampling_prob,
                "steps": entry.steps,
            }
            for entry in entries
        ],
    }
    return json.dumps({**content, "sha256": _digest(content)}, indent=2) + "\n"


def loads(text: str) -> list[Entry]:
    """The entries of a text made by :func:`dumps`.

    Raises:
        LedgerError: the text is not a ledger, is of an unknown version, fails its integrity
            check, or holds values that no ledger can hold.
    """
    try:
        parsed: Any = json.loads(text)
    except json.JSONDecodeError as error:
        raise LedgerError(f"ledger must be JSON text: {error}") from None
    content = cast("dict[str, Any]", parsed) if isinstance(parsed, dict) else {}
    if content.get("format") != _FORMAT:
        raise LedgerError(f'ledger must have "format": "{_FORMAT}"; this file has not')
    if content.get("version") != _VERSION:
        raise LedgerError(
            f"ledger version must be {_VERSION}, got {content.get('version')!r}: "
            "was it written by a newer lap2?"
        )
    for key in ("adjacency", "sampling"):
        if content.get(key) != _HEADER[key]:
            raise LedgerError(f"ledger {key} must be {_HEADER[key]!r}, got {content.get(key)!r}")
    digest = content.pop("sha256", None)
    if digest != _digest(content):
        raise LedgerError(
            f"ledger fails its integrity check: the file says sha256 {digest!r}, its content has "
            f"{_digest(content)!r}. It was corrupted or edited"
        )
    try:
        return [
            Entry(_mechanism_from_json(item["mechanism"]), item["sampling_prob"], item["steps"])
            for item in content["entries"]
        ]
    except (KeyError, TypeError, ValueError) as error:
        raise LedgerError(f"ledger holds an entry that is not valid: {error!r}") from error


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
    fields = asdict(mechanism)
    if fields.get("dimension") == math.inf:
        fields["dimension"] = "inf"
    return {"type": name, **fields}


def _mechanism_from_json(data: dict[str, Any]) -> Mechanism:
    fields = dict(data)
    kind = _TYPES[fields.pop("type")]
    if kind is Joint:
        return Joint([_mechanism_from_json(group) for group in fields["groups"]])
    if fields.get("dimension") == "inf":
        fields["dimension"] = math.inf
    return kind(**fields)
