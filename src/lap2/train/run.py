"""One run: a training from its first step to its last, whatever interrupts it.

A run has a ledger, and perhaps a budget. Once anything of it is saved it also has a journal on
disk, which has every step before it is released, and a lock that only one process can hold. Where
the run stands travels in the optimizer's state and in checkpoints.
"""

# pyright: basic

import os
import re
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

from lap2.accountant import Accountant
from lap2.ledger import Entry, LedgerError, dumps, loads
from lap2.train.budget import Budget
from lap2.train.distributed import World
from lap2.train.errors import BookkeepingError
from lap2.train.journal import CheckpointError, Journal

__all__ = ["RUN", "Run", "RunState", "default_folder", "load_with_run"]

RUN = "lap2"
"""Where in a checkpoint, and in an optimizer's state, the run is."""

_ID = re.compile(r"[0-9a-f]{16}\Z")
_MOST = 2**53
_LOST_JOURNAL = (
    "the run's journal was lost, and somebody said that no step followed what was saved: steps may "
    "be missing from the ledger"
)


def default_folder() -> Path:
    """Where journals are that were given no folder.

    ``$LAP2_STATE``, or else ``lap2`` in ``$XDG_STATE_HOME`` or ``~/.local/state``.
    """
    if chosen := os.environ.get("LAP2_STATE"):
        return Path(chosen)
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(state) / "lap2"


@dataclass(frozen=True)
class RunState:
    """Where a run stood when something of it was saved; only what is possible can be made.

    Attributes:
        id: of the run, the same in all that is saved of it: 16 hexadecimal digits.
        ledger: as :func:`lap2.ledger.dumps` writes it.
        step: in the same form, what each further step adds.
        released: steps of this run.
        lost: those of them that the saved model knows nothing of.
        folder: of the journal.
    """

    id: str
    ledger: str
    step: str
    released: int
    lost: int
    folder: str

    def __post_init__(self) -> None:
        for name in ("id", "ledger", "step", "folder"):
            if not isinstance(getattr(self, name), str):
                raise CheckpointError(f"the run's {name} must be a text")
        for name in ("released", "lost"):
            value = getattr(self, name)
            if type(value) is not int or not 0 <= value <= _MOST:
                raise CheckpointError(f"the run's {name} must be a number of steps")
        if not _ID.match(self.id):
            raise CheckpointError("the run's id must be 16 hexadecimal digits")
        if len(self.entries("step")) != 1 or self.entries("step")[0].steps != 1:
            raise CheckpointError("the run's step must be a ledger of one step")
        counted = sum(entry.steps for entry in self.entries("ledger"))
        if not self.lost <= self.released <= counted:
            raise CheckpointError(
                f"the run's ledger has {counted} steps, though the run has released "
                f"{self.released} and the model has lost {self.lost} of them: it was edited"
            )

    def entries(self, name: str) -> list[Entry]:
        """Those of its ledger, or of its step."""
        try:
            return loads(getattr(self, name))
        except LedgerError as error:
            raise CheckpointError(f"the run's {name} cannot be read: {error}") from error

    @classmethod
    def of(cls, saved: Any) -> "RunState":
        """From plain values, as ``asdict`` makes them.

        Raises:
            CheckpointError: no run can have stood there.
        """
        names = [field.name for field in fields(cls)]
        if not isinstance(saved, dict) or set(saved) != set(names):
            raise CheckpointError(f"the run's state must be made of {', '.join(names)}")
        return cls(**saved)


class Taken(NamedTuple):
    """A saved run that this process may go on with, because it holds its lock.

    Attributes:
        state: where the run stood.
        journal: where it goes on.
        released: steps, with those that followed.
        caveats: what must be said of the ledger from now on.
    """

    state: RunState
    journal: Journal
    released: int
    caveats: tuple[str, ...]


class Run:
    """The one object through which a step is accounted before it is released.

    Args:
        accountant: the ledger; what is in it was released earlier, and counts.
        step: what each step adds to it.
        world: the processes that take each step together.
        folder: of the journal; None for :func:`default_folder`.
        journal_lost: whether a run may be gone on with whose journal is not to be found.
    """

    def __init__(
        self,
        accountant: Accountant,
        step: Entry,
        world: World,
        *,
        folder: Path | None = None,
        journal_lost: bool = False,
    ) -> None:
        """Begin a run that has released nothing."""
        self.accountant, self._world = accountant, world
        self._earlier = accountant.ledger
        self._given_folder, self._journal_lost = folder, journal_lost
        self.id, origin = world.from_first(lambda: (secrets.token_hex(8), secrets.token_hex(8)))
        self.step = replace(step, origin=origin)
        self.released = self.lost = 0
        """Steps released, and those of them that the model knows nothing of."""
        self.budget: Budget | None = None
        self._journal: Journal | None = None
        self._is_closed = False

    @property
    def folder(self) -> Path:
        """Where the journal is, or would be."""
        return self._journal.folder if self._journal else self._given_folder or default_folder()

    def check(self) -> None:
        """Refuse to begin a step that may not be released.

        Raises:
            BookkeepingError: the run was closed.
            BudgetExhaustedError: the budget does not allow another step.
        """
        if self._is_closed:
            raise BookkeepingError(
                "no step may be taken after engine.close(): another process may have gone on with "
                "the run"
            )
        if self.budget is not None:
            self.budget.check()

    def enter(self, caveats: Sequence[str] = ()) -> None:
        """Have a step on disk and in the ledger, before it is released.

        Args:
            caveats: of all steps of this process, as far as is known now.
        """
        self.check()
        self.restate(caveats)
        if self._journal is not None and self._world.rank == 0:
            self._journal.write(self.released + 1)
        self.accountant.enter(self.step)
        self.released += 1

    def describe(self, step: Entry) -> None:
        """Have each further step add this to the ledger."""
        self.step = replace(step, origin=self.step.origin, caveats=self.step.caveats)

    def restate(self, caveats: Sequence[str]) -> None:
        """Have these caveats in all entries of this process, instead of earlier ones."""
        if self.step.caveats != tuple(caveats):
            self.step = replace(self.step, caveats=tuple(caveats))
            self.accountant.restate(self.step.origin, self.step.caveats)

    def start_journal(self, folder: Path | None = None) -> None:
        """From here on have every step on disk before it is released.

        Args:
            folder: where, unless there is a journal already.

        Raises:
            CheckpointError: another process holds the run.
        """
        if self._journal is None:
            journal = Journal((folder or self.folder).absolute(), self.id)
            if self._world.rank == 0:
                journal.lock()
                journal.start(self.released)
            self._journal = journal
            if self._is_closed:
                self._unlock()

    def state(self) -> RunState:
        """Where the run stands. It may be saved, so that from here on there is a journal."""
        self.start_journal()
        return RunState(
            self.id,
            self.accountant.to_json(),
            dumps([self.step]),
            self.released,
            self.lost,
            os.fspath(self.folder),
        )

    def take(
        self, state: RunState, folder: Path | None = None, *, journal_lost: bool = False
    ) -> Taken:
        """Get hold of a saved run, to :meth:`adopt` it. Changes nothing of this one.

        Args:
            state: what was saved.
            folder: where to look for the journal first, and to go on with it.
            journal_lost: as at the start.

        Raises:
            CheckpointError: there is no journal, or another process holds the run.
            RuntimeError: this run has released steps of its own.
        """
        if state.id == self.id:  # this run, at an earlier step
            return Taken(state, Journal(self.folder, self.id), self.released, ())
        if self.released:
            raise RuntimeError(
                "a saved run must be loaded before the first step: this one has released "
                f"{self.released}, which would be forgotten"
            )
        folders = [folder or self._given_folder or default_folder(), Path(state.folder)]
        found = [Journal(place.absolute(), state.id) for place in folders]
        journal = next((j for j in found if j.path.exists()), found[0])
        is_lost = journal_lost or self._journal_lost

        def hold() -> tuple[int, tuple[str, ...]]:
            journal.lock()
            try:
                return _steps_of(found, state, is_lost=is_lost)
            except BaseException:
                journal.unlock()
                raise

        return Taken(state, journal, *self._world.from_first(hold))

    def adopt(self, taken: Taken) -> int:
        """Be the run that was taken; the number of its steps that the saved model has lost.

        Raises:
            OSError: the journal cannot be written; nothing was changed.
        """
        state = taken.state
        if state.id != self.id:
            if self._world.rank == 0:
                taken.journal.start(taken.released)
            self._unlock()  # of what this was, nothing was released
            self.id, self._journal = state.id, taken.journal
            self.accountant.include(self._not_counted(taken))
            self.released = taken.released
        self.lost = self.released - (state.released - state.lost)
        return self.lost - state.lost

    def give_back(self, taken: Taken) -> None:
        """Let go of a run that could not be adopted."""
        if taken.state.id != self.id and self._world.rank == 0:
            taken.journal.unlock()

    def _not_counted(self, taken: Taken) -> list[Entry]:
        """What a saved run released, without what was in the ledger when it began."""
        saved, earlier = taken.state.entries("ledger"), list(self._earlier)
        (step,) = taken.state.entries("step")
        caveats = (*step.caveats, *taken.caveats)
        after = replace(step, steps=taken.released - taken.state.released, caveats=caveats)
        begins = len(earlier) if saved[: len(earlier)] == earlier else 0
        return [*saved[begins:], *([after] if after.steps or taken.caveats else [])]

    def close(self) -> None:
        """Take no more steps, so that another process may go on with the run."""
        self._unlock()
        self._is_closed = True

    def _unlock(self) -> None:
        if self._journal is not None and self._world.rank == 0:
            self._journal.unlock()


def load_with_run(run: Run, state: dict[str, Any], load: Callable[[dict], None]) -> None:
    """Load an optimizer's state, and go on with the run in it; both, or neither.

    Args:
        run: of the optimizer.
        state: as the private optimizer has it.
        load: of the optimizer itself.

    Raises:
        ValueError: the state has no run.
        CheckpointError: another process holds the run, or its journal is not there.
    """
    if RUN not in state:
        raise ValueError(
            "state_dict must have the ledger of its run, got one without: its optimizer was not "
            "private. Load such a state before make_private"
        )
    taken = run.take(RunState.of(state[RUN]))
    try:
        load({name: value for name, value in state.items() if name != RUN})
        run.adopt(taken)
    except BaseException:
        run.give_back(taken)
        raise


def _steps_of(
    journals: Sequence[Journal], state: RunState, *, is_lost: bool
) -> tuple[int, tuple[str, ...]]:
    """How many steps were released, as far as can be known, and what must be said of that."""
    counts, fault = [state.released], None
    for journal in [j for j in journals if j.path.exists()] or journals[:1]:
        try:
            counts.append(journal.steps())
        except CheckpointError as error:
            fault = error
    if fault and not is_lost:
        raise fault
    return max(counts), (_LOST_JOURNAL,) if fault else ()
