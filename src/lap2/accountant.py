"""The accountant: composition of steps, and conversion of their moments to (epsilon, delta)."""

import math
import os
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, Self

import numpy as np
from numpy.typing import NDArray

from lap2 import _validate, ledger
from lap2.conversion import Conversion, smallest_delta, smallest_epsilon
from lap2.divergence import Shift, worst_shift
from lap2.ledger import Entry
from lap2.mechanism import Mechanism
from lap2.sampling import SampledMoments

__all__ = ["Accountant", "Answer"]

Method = Literal["tight", "tail", "pure", "none"]
_Solution = tuple[float, float, Method]


@dataclass(frozen=True)
class Answer:
    """One (epsilon, delta) statement about everything an accountant has composed.

    Formal guarantee:
        If ``is_guarantee``, all releases together are (epsilon, delta)-differentially private
        under adding or removing one record, provided every step drew a fresh Poisson sample. Both
        numbers are rounded up. It says no more than the entries of the ledger do: ``caveats`` has
        every reason why it is none.
    """

    epsilon: float
    delta: float
    order: float
    """The order lambda of the moment used (lambda + 1 in Renyi terms); infinite for pure DP."""
    method: Method
    """Which conversion gave it: two of moments, the sum of pure epsilons, or nothing to convert."""
    is_guarantee: bool
    steps: int
    caveats: tuple[str, ...] = ()
    adjacency: str = "add/remove one record"
    sampling: str = "Poisson"


class Accountant:
    """Adds up the privacy cost of steps that may differ in everything.

    Formal guarantee:
        Every answer is an upper bound, rounded up, for all composed steps together, as long as
        :attr:`is_guarantee` is true. Moments add exactly under adaptive composition, any order
        gives a valid bound, and the search over orders is over a function with a single minimum
        (docs/theory.md, section 8).

    >>> import lap2
    >>> accountant = lap2.Accountant()
    >>> step = lap2.Laplace(noise_multiplier=1.0, dimension=26010)
    >>> round(accountant.compose(step, sampling_prob=0.0043, steps=5860).get_epsilon(1e-5), 3)
    1.966
    """

    def __init__(self) -> None:
        """Start with nothing composed: epsilon 0."""
        self._entries: list[Entry] = []
        self._lock = threading.Lock()

    def compose(self, mechanism: Mechanism, *, sampling_prob: float, steps: int = 1) -> Self:
        """Add ``steps`` releases of ``mechanism``, each from a fresh Poisson sample.

        Refused arguments leave the ledger as it was.

        Args:
            mechanism: what one step releases.
            sampling_prob: probability of each record to be in a step's sample; 1 for no sampling.
            steps: how often.

        Returns:
            This accountant.
        """
        return self.enter(Entry(mechanism, sampling_prob, steps))

    def enter(self, entry: Entry) -> Self:
        """Add an entry, with all it says of sampling, noise and caveats.

        Threads may do so at once. A refused entry leaves the ledger as it was.

        Returns:
            This accountant.
        """
        worst_shift(entry.mechanism)  # refuses what cannot be accounted before anything changes
        with self._lock:
            last = self._entries[-1] if self._entries else None
            if last and last.continues(entry):
                self._entries[-1] = replace(last, steps=last.steps + entry.steps)
            elif entry.steps or entry.caveats:
                self._entries.append(entry)
        return self

    def restate(self, origin: str, caveats: Iterable[str]) -> None:
        """Replace the caveats of all entries of one origin, whose process knows more now."""
        with self._lock:
            self._entries = [
                replace(entry, caveats=tuple(caveats)) if entry.origin == origin else entry
                for entry in self._entries
            ]

    def include(self, entries: Sequence[Entry]) -> Self:
        """Add what is in another ledger, and not yet in this one.

        What two ledgers of one run have in common, because the run was resumed from two copies of
        one checkpoint, counts once; everything else adds up.

        Returns:
            This accountant.
        """
        for entry in entries:
            worst_shift(entry.mechanism)
        with self._lock:
            self._entries = ledger.joined(self._entries, entries)
        return self

    @classmethod
    def merged(cls, accountants: Iterable["Accountant"]) -> Self:
        """One accountant of what is in several, each release once: see :meth:`include`."""
        whole = cls()
        for accountant in accountants:
            whole.include(accountant.ledger)
        return whole

    @property
    def ledger(self) -> tuple[Entry, ...]:
        """What was composed, in order; equal neighbours are merged."""
        return tuple(self._entries)

    @property
    def steps(self) -> int:
        """The number of composed steps (not of ledger entries)."""
        return sum(entry.steps for entry in self.ledger)

    @property
    def is_guarantee(self) -> bool:
        """Whether the answers are proven upper bounds: false once an entry has a caveat."""
        return not self.caveats

    @property
    def caveats(self) -> tuple[str, ...]:
        """Why the answers are no guarantee; empty if they are."""
        return tuple(dict.fromkeys(reason for e in self.ledger for reason in e.reasons))

    @property
    def pure_epsilon(self) -> float:
        """The epsilon at delta = 0 by plain addition, infinite where there is none; rounded up."""
        if not all(entry.mechanism.is_guarantee for entry in self.ledger):
            return math.inf
        total = math.fsum(
            steps * _pure_epsilon(shift, prob) for shift, prob, steps in self._releases()
        )
        return total * (1 + 1e-12)

    def get_epsilon(self, delta: float, *, conversion: Conversion = "tight") -> float:
        """The smallest epsilon this accountant can prove at ``delta``, rounded up.

        Args:
            delta: strictly between 0 and 1.
            conversion: "tight" (Balle et al. 2020) or "tail", the paper's weaker tail bound.
        """
        return self.answer(delta=delta, conversion=conversion).epsilon

    def get_delta(self, epsilon: float, *, conversion: Conversion = "tight") -> float:
        """The smallest delta this accountant can prove at ``epsilon``, rounded up; at most 1."""
        return self.answer(epsilon=epsilon, conversion=conversion).delta

    def answer(
        self,
        *,
        delta: float | None = None,
        epsilon: float | None = None,
        conversion: Conversion = "tight",
    ) -> Answer:
        """The whole statement for a given delta, or for a given epsilon (exactly one of them)."""
        if (delta is None) == (epsilon is None):
            raise ValueError(
                "exactly one of delta and epsilon must be given, "
                f"got delta={delta!r} and epsilon={epsilon!r}"
            )
        _validate.choice("conversion", conversion, ("tight", "tail"))
        if delta is not None:
            delta = _validate.open_probability("delta", delta)
            epsilon, order, method = self._solve_epsilon(delta, conversion)
        else:
            epsilon = _validate.non_negative("epsilon", epsilon)
            delta, order, method = self._solve_delta(epsilon, conversion)
        is_poisson = all(entry.sampling == "Poisson" for entry in self.ledger)
        return Answer(
            epsilon,
            delta,
            order,
            method,
            self.is_guarantee,
            self.steps,
            self.caveats,
            sampling="Poisson" if is_poisson else "unknown",
        )

    def log_moments(self, orders: Iterable[int]) -> NDArray[np.float64]:
        """The curve of total log-moments alpha(lambda) at integer orders lambda, rounded up.

        In Renyi terms, ``alpha(lambda) / lambda`` is the divergence of order ``lambda + 1``.
        """
        moments = SampledMoments(self._releases())
        return np.array([moments(_validate.integer("orders", k, least=0)) for k in orders])

    def to_json(self) -> str:
        """The ledger as text, with a version and an integrity check."""
        return ledger.dumps(self._entries)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """An accountant from :meth:`to_json`'s text; text that fails its checksum is refused."""
        accountant = cls()
        for entry in ledger.loads(text):
            accountant.enter(entry)
        return accountant

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the ledger to ``path`` atomically."""
        ledger.write_text(path, self.to_json())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Read a ledger written by :meth:`save`.

        Raises:
            LedgerError: the file is corrupt, was edited, or is not a ledger; it names the file.
        """
        try:
            return cls.from_json(ledger.read_text(path))
        except (ledger.LedgerError, UnicodeDecodeError) as error:
            raise ledger.LedgerError(f"{os.fspath(path)}: {error}") from error

    def __repr__(self) -> str:
        """Steps, entries and whether the answers are guarantees."""
        return (
            f"<Accountant: {self.steps} steps in {len(self._entries)} entries, "
            f"is_guarantee={self.is_guarantee}>"
        )

    def __getstate__(self) -> dict[str, object]:
        return {"_entries": list(self.ledger)}

    def __setstate__(self, state: dict[str, list[Entry]]) -> None:
        self._entries = state["_entries"]
        self._lock = threading.Lock()

    def _releases(self) -> list[tuple[Shift, float, float]]:
        """Distinct releases that cost something, with how often each was made."""
        steps: dict[tuple[Mechanism, float], int] = {}
        for entry in self.ledger:
            if entry.sampling_prob > 0:
                key = (entry.mechanism, entry.sampling_prob)
                steps[key] = steps.get(key, 0) + entry.steps
        return [(worst_shift(key[0]), key[1], float(count)) for key, count in steps.items()]

    def _solve_epsilon(self, delta: float, conversion: Conversion) -> _Solution:
        releases, pure = self._releases(), self.pure_epsilon
        if pure == 0:
            return 0.0, math.inf, "none"
        moments = SampledMoments(releases)
        if moments.curvature == math.inf:
            return pure, math.inf, "pure" if pure < math.inf else "none"
        epsilon, order = smallest_epsilon(moments, delta, conversion=conversion, pure=pure)
        return (epsilon, order, conversion) if epsilon < pure else (pure, math.inf, "pure")

    def _solve_delta(self, epsilon: float, conversion: Conversion) -> _Solution:
        releases, pure = self._releases(), self.pure_epsilon
        if pure <= epsilon:
            return 0.0, math.inf, "pure" if pure else "none"
        moments = SampledMoments(releases)
        if moments.curvature == math.inf:
            return 1.0, math.inf, "none"
        return (*smallest_delta(moments, epsilon, conversion=conversion), conversion)


def _pure_epsilon(shift: Shift, sampling_prob: float) -> float:
    """``log(1 + zeta (exp(l1) - 1))``: amplification by sampling of a pure-DP release.

    At least 1e-300, so that a product that underflows is not taken for a release that is free.
    """
    if shift.l1 < 700:
        return max(math.log1p(sampling_prob * math.expm1(shift.l1)), 1e-300)
    return float(np.logaddexp(0.0, shift.l1 + math.log(sampling_prob)))
