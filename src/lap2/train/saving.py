"""Saving and resuming a run: what is kept, what must fit, and how no released step is forgotten."""

# pyright: basic

import os
import secrets
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lap2 import ledger
from lap2.accountant import Accountant
from lap2.train import checkpoint
from lap2.train.checkpoint import CheckpointError, Journal
from lap2.train.distributed import World
from lap2.train.plan import ReleasePlan
from lap2.train.step import PrivateStep

__all__ = ["Resumed", "Saver"]


@dataclass(frozen=True)
class Resumed:
    """Where a run goes on.

    Attributes:
        steps: taken by the model that was loaded.
        lost_steps: released after the checkpoint was written, or about to be: they are in the
            ledger, but not in the model.
        passes: over the data, that were finished.
        extra: what was given to :meth:`lap2.train.PrivacyEngine.save`.
    """

    steps: int
    lost_steps: int
    passes: int
    extra: dict[str, Any]


class Saver:
    """Writes and reads the checkpoints of one run, and starts its journal.

    Args:
        plan: the model, the optimizer and the clips.
        step: what every step does.
        accountant: the run's ledger.
        world: its processes.
    """

    def __init__(
        self, plan: ReleasePlan, step: PrivateStep, accountant: Accountant, world: World
    ) -> None:
        """Give the run a name of its own."""
        self._plan, self._step, self._accountant, self._world = plan, step, accountant, world
        self._run = secrets.token_hex(8)
        self._lost = 0
        self._optimizer = type(plan.optimizer).__name__

    def save(self, path: Path, scheduler: Any, extra: dict[str, Any]) -> None:
        """See :meth:`lap2.train.PrivacyEngine.save`."""
        step = self._step
        journal = step.journal or Journal(path.parent, self._run)
        if journal.path.parent.resolve() != path.parent.resolve():
            raise ValueError(
                f"path must be in {os.fspath(journal.path.parent)!r}, where the run's journal is, "
                f"got {os.fspath(path)!r}"
            )
        if step.journal is None and path.exists():
            raise ValueError(
                f"path must be a new file, got {os.fspath(path)!r}, which holds the checkpoint of "
                "another run: load it to continue that run, or choose another path"
            )
        self._world.wait()  # all have looked before one writes
        if self._world.rank == 0:
            if step.journal is None:
                journal.start(step.released)
            step.schedules.restore(keep=True)  # in a rehearsal they may be ahead
            checkpoint.write(path, self._state(scheduler, extra))
        step.journal = journal
        self._world.wait()

    def load(self, path: Path, scheduler: Any, *, fall_back: bool, journal_lost: bool) -> Resumed:
        """See :meth:`lap2.train.PrivacyEngine.load`."""
        step = self._step
        if self._accountant.steps:
            raise RuntimeError("load must come before the first step: the ledger is not empty")
        state = _read(path, fall_back=fall_back)
        self._check_fits(path, state, scheduler)
        entries = ledger.loads(state["ledger"])
        journal = Journal(path.parent, state["run"])
        written = int(state["released"])
        released = written if journal_lost else max(journal.steps(), written)
        # Nothing was changed so far, and nothing is refused from here on.
        self._plan.module.load_state_dict(state["model"])
        self._plan.optimizer.load_state_dict(state["optimizer"])
        if scheduler is not None:
            scheduler.load_state_dict(state["scheduler"])
        for entry in entries:
            self._accountant.compose(
                entry.mechanism, sampling_prob=entry.sampling_prob, steps=entry.steps
            )
        step.account(released - written)
        step.denoiser.load_state_dict(state["denoiser"])
        if step.loader is not None:
            step.loader.load_state_dict(state["loader"])
        self._run, self._lost = state["run"], state["lost"] + released - written
        step.released, step.journal = released, journal
        self._world.wait()  # all have read before one goes on writing
        if self._world.rank == 0:
            journal.start(released)
        passes = step.loader.passes if step.loader else 0
        return Resumed(released - self._lost, released - written, passes, state["extra"])

    def _state(self, scheduler: Any, extra: dict[str, Any]) -> dict[str, Any]:
        step = self._step
        return {
            "run": self._run,
            "fingerprint": self._fingerprint(),
            "model": self._plan.module.state_dict(),
            "optimizer": self._plan.optimizer.state_dict(),
            "scheduler": None if scheduler is None else scheduler.state_dict(),
            "ledger": self._accountant.to_json(),
            "denoiser": step.denoiser.state_dict(),
            "loader": step.loader.state_dict() if step.loader else None,
            "released": step.released,
            "lost": self._lost,
            "extra": extra,
        }

    def _fingerprint(self) -> dict[str, str]:
        """What must be the same for a checkpoint to fit, in words."""
        plan, step = self._plan, self._step
        shapes = {name: tuple(t.shape) for name, t in plan.module.state_dict().items()}
        groups = [len(group["params"]) for group in plan.optimizer.param_groups]
        return {
            "model": repr(shapes),
            "optimizer": f"{self._optimizer} over {groups} parameters",
            "denoising": f"{step.denoiser.mode} {step.denoiser.tau}{' rotated' * plan.rotated}",
            "mechanism": repr(step.mechanism),
            "sampling probability": repr(step.sampling_prob),
            "clips": repr(plan.clips),
            "divisor": repr(step.divisor),
        }

    def _check_fits(self, path: Path, state: dict[str, Any], scheduler: Any) -> None:
        ours, theirs = self._fingerprint(), state["fingerprint"]
        for name, value in ours.items():
            if theirs.get(name) != value:
                raise CheckpointError(
                    f"{path} is of another run: its {name} is {theirs.get(name)}, not {value}"
                )
        if (scheduler is None) != (state["scheduler"] is None):
            raise CheckpointError(
                f"{path} was saved with{'out' if state['scheduler'] is None else ''} a scheduler: "
                "load it the same way"
            )


def _read(path: Path, *, fall_back: bool) -> dict[str, Any]:
    try:
        return checkpoint.read(path)
    except CheckpointError as error:
        if not fall_back:
            raise
        try:
            state = checkpoint.read(checkpoint.previous(path))
        except CheckpointError as second:
            raise CheckpointError(f"{error}; {second}") from second
        warnings.warn(f"{error}. Going on from the one before it", stacklevel=5)
        return state
