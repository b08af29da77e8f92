"""One private step: clip, add noise, read out, and hand over to the optimizer."""

# pyright: basic

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from itertools import chain

import torch
from torch import Tensor
from torch.optim import Optimizer

from lap2.train.clip import ClippedGroup, Clipping
from lap2.train.distributed import World
from lap2.train.errors import BookkeepingError
from lap2.train.plan import ReleasePlan
from lap2.train.poisson import Piece, PoissonLoader
from lap2.train.precision import full_precision
from lap2.train.recorder import Recorded, Recorder
from lap2.train.rehearsal import CHANGED, Rehearsal, Rehearsed
from lap2.train.rounding import HALF
from lap2.train.run import RUN, Run, load_with_run
from lap2.train.schedules import Schedules
from lap2.train.secrecy import StaysHere, forget_locals, reduced_as
from lap2.train.writes import Writes

__all__ = ["PrivateStep", "make_step_private"]


class PrivateStep(StaysHere):
    """Clip, add noise, read out: everything between ``backward`` and the optimizer's own step."""

    def __init__(
        self,
        *,
        plan: ReleasePlan,
        loader: PoissonLoader | None,
        scale: float,
        divisor: float,
        loss_reduction: str,
        run: Run,
        world: World,
        rounding: float,
        rehearse: bool,
        sums: torch.dtype,
        public_state: Sequence[str],
        caveats: Sequence[str],
    ) -> None:
        """Describe the release once; every step repeats it."""
        self.loader, self.scale, self.divisor = loader, scale, divisor
        self.run, self._given_caveats = run, tuple(caveats)
        self.total_clip, self.rounding = plan.total_clip, rounding
        self.skipped = 0
        self.losses: set[str] = set()
        """How the losses of the steps taken were reduced."""
        self.unchecked: set[str] = set()
        """Parameters that were trained before a rehearsal had seen a gradient of theirs."""
        self._writes = Writes(plan.module, public_state)
        self.recorder = Recorder(plan.module, lambda: self._rehearsed is not None)
        self.rehearsal = Rehearsal(self.recorder.names) if rehearse and loader else None
        power = 1 if plan.mechanism == "laplace-l1" else 2
        self.clipping = Clipping(plan.groups, plan.clips, power, sums, world.size)
        self.schedules = Schedules(plan.optimizer)
        self.world = world
        self._plan, self._reduction = plan, loss_reduction
        self._held = sorted(id(p) for p in plan.params)
        self._state = self._current_state()
        self._sums: list[Tensor] = []
        """Room for the sum of a batch, kept from step to step."""
        self._parts: dict[Tensor, Tensor] = {}
        self._is_begun = False
        self._taken, self._postponed = 0, False
        if loader is not None:
            loader.attach(self)

    @property
    def _rehearsed(self) -> Rehearsed | None:
        """What is rehearsed with the batch at hand, if it is a rehearsal."""
        piece = None if self.loader is None else self.loader.piece
        return None if piece is None else piece.rehearsal

    def before_piece(self, piece: Piece) -> None:
        """Nothing of the last piece may be left over, and a batch needs a budget for its step."""
        self.recorder.discard()
        rehearses = piece.rehearsal is not None
        if piece.is_first and not rehearses:
            self.run.check()
        self._writes.begin(bits=rehearses)
        if self.rehearsal is not None:
            self.rehearsal.begin()

    @property
    def wants_rehearsal(self) -> bool:
        """Whether the model is to be checked before the next batch."""
        self._postponed = False
        return self.rehearsal is not None and self.rehearsal.is_due(self._taken)

    def give_up(self) -> None:
        """Hold nothing of the batch at hand, and leave no gradient of it."""
        self.recorder.discard()
        self.recorder.free()
        self._clear_sums()
        if self.loader is not None:
            self.loader.end_rehearsal()
        if self.rehearsal is not None:
            self.rehearsal.forget()
        held = (p for group in self._plan.optimizer.param_groups for p in group["params"])
        for param in chain(self._plan.module.parameters(), held):
            param.grad = None

    def end_pass(self) -> None:
        """Keep no memory in which gradients were formed; the next pass will have its own."""
        self.recorder.free()

    def advance(self) -> bool:
        """Take in what was recorded; at the end of a batch, put the noisy gradient into ``.grad``.

        Returns:
            Whether there is a gradient to step with: False between the pieces of a batch, and in a
            rehearsal.
        """
        self.schedules.restore()
        with self.all_or_nothing(), torch.no_grad():
            if not self._is_complete():
                return False
            self._release()
        return True

    @contextmanager
    def all_or_nothing(self) -> Iterator[None]:
        """An error gives up the batch at hand, and shows no record."""
        try:
            yield
        except BaseException as error:
            self.give_up()
            forget_locals(error)
            raise

    def _is_complete(self) -> bool:
        """Take in what was recorded; whether the batch ends with it."""
        piece = None if self.loader is None else self.loader.take()
        self._refuse_changes()
        with full_precision():
            recorded = self.recorder.collect(loss_reduction=self._reduction)
            return self._take_in(recorded, piece)

    def _take_in(self, recorded: Recorded, piece: Piece | None) -> bool:
        """Add to the sum of the batch; whether that is complete."""
        if piece is not None and piece.is_first and piece.rehearsal is None:
            self._clear_sums()  # another was given up before its end
        if piece is not None and not piece.is_first and not self._is_begun:
            raise BookkeepingError(
                "all pieces of a batch are released together, or none: one was refused before. "
                "Go on with the next pass over the loader"
            )
        if piece is None or piece.size:
            if self.loader is not None and self._rehearsed is not None:
                # Between the model and the loss, too, may be half precision.
                seen = max(recorded.precision, self.loader.backward_precision)
                recorded = recorded._replace(precision=seen)
            _refuse_unfit(recorded, piece)
            total = recorded.batch if piece is None else piece.total
            groups = self.clipping.clip(
                recorded.gradients, recorded.scale, size=recorded.batch, total=total
            )
            if piece is not None and self.rehearsal is not None:
                if piece.rehearsal is not None:
                    self._rehearse(self.rehearsal, piece.rehearsal, groups, recorded)
                    return False
                if self._must_wait(self.rehearsal, groups, recorded):
                    return False
            self.losses.add(recorded.loss)
            self._accumulate(groups)
        return piece is None or piece.is_last

    def _rehearse(
        self,
        rehearsal: Rehearsal,
        rehearsed: Rehearsed,
        groups: list[ClippedGroup],
        recorded: Recorded,
    ) -> None:
        self.schedules.hold()  # a scheduler that steps now is put back
        rehearsal.compare(
            rehearsed,
            groups,
            form=recorded.form,
            precision=recorded.precision,
            step=self._taken,
        )
        self.unchecked &= rehearsal.open_names

    def _must_wait(
        self, rehearsal: Rehearsal, groups: list[ClippedGroup], recorded: Recorded
    ) -> bool:
        """Whether the model is not as it was in any rehearsal, so that one comes first."""
        if rehearsal.has_passed(recorded.form):
            self._postponed = False
            self.unchecked.update(rehearsal.unchecked(groups))
            return False
        if rehearsal.failure or self._postponed:
            raise BookkeepingError(rehearsal.failure or CHANGED)
        if self.loader is None or len(self.loader.dataset) < 2:  # type: ignore[arg-type]
            self.unchecked.update(self.recorder.names.values())
            return False
        self._postponed = True
        self.loader.postpone()
        return True

    def _refuse_changes(self) -> None:
        """What the plan rests on must be as it was."""
        optimizer = self._plan.optimizer
        held = [id(p) for group in optimizer.param_groups for p in group["params"]]
        if sorted(held) != self._held:
            raise BookkeepingError(
                "the optimizer must hold the parameters it was made private with: others would be "
                "trained without noise"
            )
        if self._current_state() != self._state:
            raise BookkeepingError(
                "the model must keep the parameters it was made private with, as they were: some "
                "were replaced, added, frozen or unfrozen since. Wrap, shard or change the model "
                "before make_private"
            )
        if World.current() != self.world:
            raise BookkeepingError(
                f"the process group must be as it was when the model was made private, "
                f"{self.world}, got {World.current()}: initialise torch.distributed before that"
            )
        if self.loader is not None:  # else nobody knows when a batch began, nor claims anything
            self._writes.check()

    def _current_state(self) -> list[tuple[int, torch.Size, bool]]:
        return [(id(p), p.shape, p.requires_grad) for p in self._plan.module.parameters()]

    def _accumulate(self, groups: list[ClippedGroup]) -> None:
        self._begin_sum()
        for group in groups:
            self.skipped += int((~group.finite).sum())
            for member in group.members:
                member.add_to(self._parts[member.param], group.weights)

    def _begin_sum(self) -> None:
        """Have sums of this batch alone, zero at first."""
        if not self._sums:
            self._sums = self._plan.blank()
            self._parts = self._plan.parts(self._sums)
        self._is_begun = True

    def _clear_sums(self) -> None:
        """Leave nothing of a batch, which could be without noise."""
        if self._is_begun:
            for total in self._sums:
                total.zero_()
        self._is_begun = False

    def _release(self) -> None:
        """Account, release the sum with noise once, divide by the public batch size."""
        self._begin_sum()
        prepared = self._plan.prepare(self._sums)
        self.run.enter(self.caveats())
        released = self._plan.release(prepared, self.scale, self.world)
        means = self._plan.restore(released, 1 / self.divisor)
        self._clear_sums()
        for param, mean in zip(self._plan.params, means, strict=True):
            param.grad = mean
        self._taken += 1
        if self.loader is not None:
            self.loader.finish_batch()

    def caveats(self) -> tuple[str, ...]:
        """Why the steps are no guarantee, beside what their ledger entry says of the noise."""
        caveats: list[str] = list(self._given_caveats)
        if self.rehearsal is None:
            caveats.append(
                "rehearse=False: nobody has checked that no record's gradient depends on others"
            )
        elif self.rehearsal.has_passed_once and not self.rehearsal.has_compared_sizes:
            caveats.append(
                "batches of different sizes were not compared, because the loop or the collate "
                "function draws random numbers that rehearsals cannot fix (of NumPy, say): use "
                "torch's"
            )
        if self.unchecked:
            names = sorted(self.unchecked)
            shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if names[3:] else "")
            caveats.append(f"parameters were trained that no rehearsal has checked so far: {shown}")
        if self.clipping.dtype != torch.float64:
            caveats.append("sums='float32': what rounding does to norms and sums is not accounted")
        return tuple(caveat[:1000] for caveat in caveats)


def _refuse_unfit(recorded: Recorded, piece: Piece | None) -> None:
    """What was recorded must be the batch that was handed out, with a loss that can be undone."""
    if not recorded.batch:
        raise BookkeepingError(
            "no gradients were recorded: call the model, in training mode (model.train()) and with "
            "gradients enabled, and backward, before each optimizer step. Otherwise the step would "
            "be nothing but noise"
        )
    expected = len(piece.rehearsal.records) if piece and piece.rehearsal else piece and piece.size
    if piece is not None and recorded.batch != expected:
        raise BookkeepingError(
            "a step must be taken on the batch that the loader yielded, got one with another "
            "number of records"
        )
    if recorded.loss == "mean" and recorded.precision > HALF:
        raise BookkeepingError(
            "a mean over the batch must not be taken in half precision, where 1/B is rounded "
            "differently for each batch size B, which moves every record: call "
            "engine.backward(losses) with one loss for each record instead of loss.backward()"
        )


def make_step_private(optimizer: Optimizer, private: PrivateStep) -> None:
    """Give this one optimizer a class of its own, whose step is private.

    Raises:
        ValueError: the optimizer's own ``step`` was replaced, so that the class's is never called.
    """
    base = type(optimizer)
    # A scheduler that was made before hangs its count of steps on the optimizer itself, where it
    # would hide the private step; the class counts for it.
    if hasattr(optimizer.__dict__.get("step"), "_wrapped_by_lr_sched"):
        del optimizer.__dict__["step"]
    if "step" in optimizer.__dict__:
        raise ValueError(
            "optimizer must have its class's own step, got one with a replaced step: make the "
            "optimizer private before anything else wraps it"
        )

    def state_dict(self):
        return {**base.state_dict(self), RUN: asdict(private.run.state())}

    def load_state_dict(self, state_dict):
        load_with_run(private.run, state_dict, partial(base.load_state_dict, self))

    def step(self, closure=None):
        loss = None
        if closure is not None:  # it is called once: forward and backward of the batch at hand
            with private.all_or_nothing(), torch.enable_grad():
                loss = closure()
        self._opt_called = True  # schedulers look for it
        if private.advance():
            base.step(self)
        return loss

    def add_param_group(_self, _param_group):
        raise ValueError(
            "optimizer must keep the parameters it was made private with: others would be trained "
            "without noise. Give them to it before make_private"
        )

    def reduced(self, protocol):  # a pickle or copy is an ordinary optimizer, of its own class
        return reduced_as(base, base.__reduce_ex__(self, protocol), type(self))

    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    members = {
        "step": step,
        "state_dict": state_dict,
        "load_state_dict": load_state_dict,
        "add_param_group": add_param_group,
        "__reduce_ex__": reduced,
    }
    optimizer.__class__ = type(f"Private{base.__name__}", (base,), members)
