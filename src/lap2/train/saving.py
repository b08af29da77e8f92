"""Checkpoints: what is kept of a run, what must fit, and that a refusal changes nothing."""

# pyright: basic

import copy
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lap2.train import checkpoint
from lap2.train.journal import CheckpointError
from lap2.train.plan import ReleasePlan
from lap2.train.run import RUN, RunState
from lap2.train.step import PrivateStep

__all__ = ["Resumed", "Saver"]

_FIELDS = {
    RUN: dict,
    "fingerprint": dict,
    "model": dict,
    "optimizer": dict,
    "scheduler": (dict, type(None)),
    "loader": (dict, type(None)),
    "extra": dict,
}
"""What a checkpoint has, and of which types."""


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
    """Writes and reads the checkpoints of one run.

    Args:
        plan: the model, the optimizer and the clips.
        step: what every step does.
    """

    def __init__(self, plan: ReleasePlan, step: PrivateStep) -> None:
        """Remember what the optimizer was before it was private."""
        self._plan, self._step = plan, step
        self._optimizer = type(plan.optimizer).__name__
        self._has_saved = False

    def save(self, path: Path, scheduler: Any, extra: dict[str, Any]) -> None:
        """See :meth:`lap2.train.PrivacyEngine.save`."""
        step = self._step
        if not self._has_saved and path.exists():
            raise ValueError(
                f"path must be a new file, got {os.fspath(path)!r}, which holds the checkpoint of "
                "another run: load it to continue that run, or choose another path"
            )
        step.world.wait()  # all have looked before one writes
        step.run.start_journal(path.parent)
        if step.world.rank == 0:
            step.schedules.restore(keep=True)  # in a rehearsal they may be ahead
            checkpoint.write(path, self._state(scheduler, extra))
        self._has_saved = True
        step.world.wait()

    def load(self, path: Path, scheduler: Any, *, fall_back: bool, journal_lost: bool) -> Resumed:
        """See :meth:`lap2.train.PrivacyEngine.load`."""
        step = self._step
        if step.run.released:
            raise RuntimeError("load must come before the first step: the ledger is not empty")
        state = _read(path, fall_back=fall_back)
        try:
            self._check_fits(state, scheduler)
            saved = RunState.of(state[RUN])
        except CheckpointError as error:
            raise CheckpointError(f"{path}: {error}") from error
        taken = step.run.take(saved, path.parent, journal_lost=journal_lost)
        try:
            with self._all_or_nothing(path, scheduler):
                self._plan.module.load_state_dict(state["model"])
                _load_plainly(self._plan.optimizer, state["optimizer"])
                if scheduler is not None:
                    scheduler.load_state_dict(state["scheduler"])
                if step.loader is not None:
                    step.loader.load_state_dict(state["loader"])
                lost = step.run.adopt(taken)
        except BaseException:
            step.run.give_back(taken)
            raise
        self._has_saved = True
        passes = step.loader.passes if step.loader else 0
        return Resumed(step.run.released - step.run.lost, lost, passes, state["extra"])

    @contextmanager
    def _all_or_nothing(self, path: Path, scheduler: Any) -> Iterator[None]:
        """Put everything back as it was if not all of it can be loaded."""
        step, plan = self._step, self._plan
        held: list[tuple[Any, Any]] = [
            (part.load_state_dict, copy.deepcopy(part.state_dict()))
            for part in (plan.module, scheduler, step.loader)
            if part is not None
        ]
        optimizer = copy.deepcopy(_plain_state(plan.optimizer))
        held_by_scheduler = getattr(scheduler, "__dict__", {})
        attributes = set(held_by_scheduler)
        try:
            yield
        except Exception as error:
            for load, before in held:
                load(before)
            for name in set(held_by_scheduler) - attributes:  # it takes any field for an attribute
                del held_by_scheduler[name]
            _load_plainly(plan.optimizer, optimizer)
            if isinstance(error, OSError):
                raise
            kind = type(error).__name__
            raise CheckpointError(f"{path} does not fit this run: {kind}: {error}") from error

    def _state(self, scheduler: Any, extra: dict[str, Any]) -> dict[str, Any]:
        step = self._step
        return {
            RUN: asdict(step.run.state()),
            "fingerprint": self._fingerprint(),
            "model": self._plan.module.state_dict(),
            "optimizer": _plain_state(self._plan.optimizer),
            "scheduler": None if scheduler is None else scheduler.state_dict(),
            "loader": step.loader.state_dict() if step.loader else None,
            "extra": extra,
        }

    def _fingerprint(self) -> dict[str, str]:
        """What must be the same for a checkpoint to fit, in words."""
        plan, step = self._plan, self._step
        entry = step.run.step
        shapes = {name: tuple(t.shape) for name, t in plan.module.state_dict().items()}
        groups = [len(group["params"]) for group in plan.optimizer.param_groups]
        return {
            "model": repr(shapes),
            "optimizer": f"{self._optimizer} over {groups} parameters",
            "noise": entry.noise,
            "sampling": entry.sampling,
            "sampling probability": repr(entry.sampling_prob),
            "release": plan.readout.describe(plan.copies),
            "mechanism": repr(entry.mechanism),
            "clips": repr(plan.clips),
            "divisor": repr(step.divisor),
        }

    def _check_fits(self, state: dict[str, Any], scheduler: Any) -> None:
        if state.keys() != _FIELDS.keys():
            raise CheckpointError(f"it must have the fields {', '.join(_FIELDS)}, and no others")
        for name, kinds in _FIELDS.items():
            if not isinstance(state[name], kinds):
                raise CheckpointError(f"its {name} is of type {type(state[name]).__name__}")
        ours, theirs = self._fingerprint(), state["fingerprint"]
        for name, value in ours.items():
            if theirs.get(name) != value:
                raise CheckpointError(
                    f"it is of another run: its {name} is {theirs.get(name)}, not {value}"
                )
        for name, value in self._plan.module.state_dict().items():
            if not _is_like(state["model"].get(name), value):
                raise CheckpointError(f"its {name!r} is not a tensor like the model's")
        if (scheduler is None) != (state["scheduler"] is None):
            raise CheckpointError(
                f"it was saved with{'out' if state['scheduler'] is None else ''} a scheduler: "
                "load it the same way"
            )
        known = {} if scheduler is None else scheduler.state_dict()
        for name in state["scheduler"] or {}:
            if not isinstance(name, str) or (name not in known and hasattr(scheduler, name)):
                raise CheckpointError(f"its scheduler must not replace {name!r}")
        if (self._step.loader is None) != (state["loader"] is None):
            raise CheckpointError("its loader is not of the kind that this run has")


def _is_like(value: Any, other: Any) -> bool:
    """Whether one may be copied to the other: ordinary tensors of one shape and type."""
    if not isinstance(other, Tensor):
        return type(value) is type(other)
    return (
        type(value) is Tensor
        and value.layout is torch.strided
        and (value.shape, value.dtype) == (other.shape, other.dtype)
    )


def _plain_state(optimizer: Any) -> dict[str, Any]:
    """An optimizer's state as its own class has it."""
    ordinary: Any = super(type(optimizer), optimizer)
    return ordinary.state_dict()


def _load_plainly(optimizer: Any, state: dict[str, Any]) -> None:
    ordinary: Any = super(type(optimizer), optimizer)
    ordinary.load_state_dict(state)


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
