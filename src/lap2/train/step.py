"""One private step: clip, add noise, denoise, and hand over to the optimizer."""

# pyright: basic

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lap2 import _validate
from lap2.accountant import Accountant
from lap2.mechanism import Gaussian, Joint, Laplace, LaplaceL1, Mechanism
from lap2.noise import Sampler
from lap2.train.budget import Budget
from lap2.train.checkpoint import Journal
from lap2.train.denoise import Denoiser
from lap2.train.distributed import World, refuse_wrapped
from lap2.train.poisson import PoissonLoader
from lap2.train.precision import full_precision
from lap2.train.recorder import BookkeepingError, Recorded, Recorder
from lap2.train.rotate import gather, spread, spread_size

__all__ = ["Clip", "MechanismName", "PrivateStep", "ReleasePlan", "make_step_private"]

MechanismName = Literal["laplace", "gaussian", "laplace-l1"]
Clip = float | Sequence[float]

_SHRINK = 1 - 2.0**-14
"""Clipping aims this far below the clip, so that rounded norms never let a gradient exceed it."""


@dataclass(frozen=True)
class ReleasePlan:
    """What is clipped together, what is released of it, and with which noise.

    Attributes:
        module: the model.
        optimizer: of its trainable parameters.
        mechanism: the kind of noise.
        groups: the parameters that are clipped together.
        clips: of the groups.
        rotated: whether the sum of a group is released in the basis of :mod:`lap2.train.rotate`.
    """

    module: nn.Module
    optimizer: Optimizer
    mechanism: MechanismName
    groups: tuple[tuple[Tensor, ...], ...]
    clips: tuple[float, ...]
    rotated: bool

    @classmethod
    def of(
        cls,
        module: nn.Module,
        optimizer: Optimizer,
        clip: Clip,
        mechanism: MechanismName,
        denoiser: Denoiser,
    ) -> "ReleasePlan":
        """Check that everything fits together.

        Sums that will be denoised are rotated, if they are clipped in l2: l1 norms change with the
        basis.
        """
        _validate.choice("mechanism", mechanism, ("laplace", "gaussian", "laplace-l1"))
        refuse_wrapped(module)
        trained = {id(p): name for name, p in module.named_parameters() if p.requires_grad}
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        foreign, missing = held - set(trained), [n for i, n in trained.items() if i not in held]
        if foreign or missing:
            raise ValueError(
                "optimizer must hold exactly the module's trainable parameters; "
                f"{len(foreign)} of its parameters are not among them, and it lacks {missing}"
            )
        if isinstance(clip, Sequence):
            groups = _parts(module, optimizer, len(clip))
            clips = [_validate.positive("max_grad_norm", c) for c in clip]
        else:
            groups = [[p for group in optimizer.param_groups for p in group["params"]]]
            clips = [_validate.positive("max_grad_norm", clip)]
        rotated = mechanism == "laplace" and denoiser.mode != "none"
        return cls(module, optimizer, mechanism, tuple(map(tuple, groups)), tuple(clips), rotated)

    @property
    def sizes(self) -> list[int]:
        """Number of released coordinates of each group."""
        sizes = [sum(p.numel() for p in group) for group in self.groups]
        return [spread_size(size) for size in sizes] if self.rotated else sizes

    def prepare(self, sums: dict[int, Tensor]) -> list[Tensor]:
        """What to add noise to: tensors by parameter, or a vector by group.

        Args:
            sums: by parameter, those that took part; taken out one group at a time.
        """
        released: list[Tensor] = []
        for group in self.groups:
            found = [sums.pop(id(p)) if id(p) in sums else _zeros(p) for p in group]
            released += [spread(found)] if self.rotated else found
        sums.clear()
        return released

    def restore(self, released: list[Tensor], factor: float) -> list[Tensor]:
        """What became of :meth:`prepare`'s result, by parameter, times a factor."""
        if not self.rotated:
            return [part.mul_(factor) for part in released]
        sums = [[torch.empty_like(p, dtype=_wide(p)) for p in group] for group in self.groups]
        for flat, part in zip(released, sums, strict=True):
            gather(flat, part, factor)
        return [total for part in sums for total in part]

    @property
    def total_clip(self) -> float:
        """The most that one record moves the whole release."""
        return math.hypot(*self.clips)

    def describe(self, scale: float, spacing: float) -> Mechanism:
        """The release, with noise of ``scale``, when rounding moves a coordinate by ``spacing``."""
        members: list[Mechanism] = []
        for clip, size in zip(self.clips, self.sizes, strict=True):
            if self.mechanism == "gaussian":
                members.append(Gaussian(scale / clip))
            elif self.mechanism == "laplace-l1":
                members.append(LaplaceL1(_ratio(scale, clip + size * spacing)))
            else:
                members.append(Laplace(_ratio(scale, clip + math.sqrt(size) * spacing), size))
        return members[0] if len(members) == 1 else Joint(members)

    def spacing(self, sampler: Sampler, scale: float, world: World) -> float:
        """How far rounding moves one coordinate, when each process does its slice."""
        size = world.slice_size(sum(self.sizes))
        return sampler.added_sensitivity(scale, size) / math.sqrt(max(size, 1))

    def scale_for(
        self, wanted: Mechanism, template: Mechanism, sampler: Sampler, world: World
    ) -> float:
        """The scale whose release, rounding included, has at least the noise that is wanted."""
        targets = _multipliers(wanted)
        scale = targets[0] / _multipliers(template)[0]
        for _ in range(50):
            reached = self.describe(scale, self.spacing(sampler, scale, world))
            pairs = zip(targets, _multipliers(reached), strict=True)
            short = max(target / member for target, member in pairs)
            if short <= 1:
                return scale
            scale *= short * (1 + 1e-15)
        raise ValueError(f"no noise scale covers the rounding of {sum(self.sizes)} coordinates")


def _parts(module: nn.Module, optimizer: Optimizer, count: int) -> list[list[Tensor]]:
    """Trained parameters by optimizer group, or by layer: whichever there are ``count`` of."""
    groups = [list(group["params"]) for group in optimizer.param_groups]
    if len(groups) == count:
        return groups
    seen: set[int] = set()
    layers: list[list[Tensor]] = []
    for layer in module.modules():
        own: list[Tensor] = [
            p for p in layer.parameters(recurse=False) if p.requires_grad and id(p) not in seen
        ]
        seen.update(map(id, own))  # a parameter that two layers share belongs to the first
        layers += [own] if own else []
    if len(layers) != count:
        raise ValueError(
            "max_grad_norm must be a number, one number for each of the optimizer's "
            f"{len(groups)} parameter groups, or one for each of the module's {len(layers)} layers "
            f"with trainable parameters, got {count}"
        )
    return layers


def _multipliers(mechanism: Mechanism) -> list[float]:
    members = mechanism.groups if isinstance(mechanism, Joint) else (mechanism,)
    return [member.noise_multiplier for member in members]  # pyright: ignore[reportAttributeAccessIssue]


def _ratio(scale: float, widened: float) -> float:
    return math.nextafter(scale / math.nextafter(widened, math.inf), 0.0)


class PrivateStep:
    """Clip, add noise, denoise: everything between ``backward`` and the optimizer's own step."""

    def __init__(
        self,
        *,
        plan: ReleasePlan,
        recorder: Recorder,
        loader: PoissonLoader | None,
        sampler: Sampler,
        scale: float,
        divisor: float,
        denoiser: Denoiser,
        loss_reduction: str,
        accountant: Accountant,
        sampling_prob: float,
        world: World,
    ) -> None:
        """Describe the release once; every step repeats it."""
        self.loader, self.sampler, self.scale, self.divisor = loader, sampler, scale, divisor
        self.mechanism = plan.describe(scale, plan.spacing(sampler, scale, world))
        self.total_clip = plan.total_clip
        self.denoiser, self.skipped, self.released = denoiser, 0, 0
        self.taus: list[float] = []
        self.budget: Budget | None = None
        self.journal: Journal | None = None
        self._world = world
        self._plan, self._recorder, self._reduction = plan, recorder, loss_reduction
        self._accountant, self.sampling_prob = accountant, sampling_prob
        self._params = [p for group in plan.groups for p in group]
        self._held = sorted(id(p) for p in self._params)
        self._sums: dict[int, Tensor] = {}
        self._batch_id, self._last_piece = -1, 0
        if loader is not None:
            loader.before_piece = self._before_piece

    def _before_piece(self, begins_batch: bool) -> None:
        """Nothing of the last piece may be left over, and a batch needs a budget for its step."""
        self._recorder.discard()
        if begins_batch and self.budget is not None:
            self.budget.check()

    @torch.no_grad()
    def advance(self) -> bool:
        """Take in what was recorded; at the end of a batch, put the noisy gradient into ``.grad``.

        Returns:
            Whether there is a gradient to step with: False between the pieces of a batch.
        """
        loader = self.loader
        held = [id(p) for group in self._plan.optimizer.param_groups for p in group["params"]]
        if sorted(held) != self._held:
            self._recorder.discard()
            raise BookkeepingError(
                "the optimizer must hold the parameters it was made private with: others would be "
                "trained without noise"
            )
        if loader is not None and loader.pieces_begun == self._last_piece:
            self._recorder.discard()
            raise BookkeepingError(
                "each batch that the loader yields allows one step: a second one would release the "
                "same sample again, while the ledger counts on a fresh one"
            )
        if loader is not None and loader.batches_begun != self._batch_id:
            self._sums.clear()  # of a batch that was given up before its end
            self._batch_id = loader.batches_begun
        with full_precision():
            recorded = self._recorder.collect(loss_reduction=self._reduction)
        if loader is not None and recorded.batch and recorded.batch != loader.piece_size:
            raise BookkeepingError(
                "a step must be taken on the batch that the loader yielded, of "
                f"{loader.piece_size} records; the recorded one has {recorded.batch}"
            )
        if loader is not None:
            self._last_piece = loader.pieces_begun
        if recorded.batch:
            with full_precision():
                self._accumulate(recorded)
        del recorded  # and the activations it holds, before the noise needs memory
        if loader is not None and not loader.ends_batch:
            return False
        self._release()
        return True

    def _accumulate(self, recorded: Recorded) -> None:
        found = {id(g.param): g for g in recorded.gradients}
        l1 = self._plan.mechanism == "laplace-l1"
        for group, clip in zip(self._plan.groups, self._plan.clips, strict=True):
            members = [found[id(p)] for p in group if id(p) in found]
            if not members:
                continue
            if l1:
                norms = torch.stack([m.abs_sums() for m in members]).sum(dim=0)
            else:
                norms = torch.stack([m.square_norms() for m in members]).sum(dim=0).sqrt()
            norms = norms * recorded.scale
            finite = norms.isfinite()
            if not finite.all():
                self.skipped += int((~finite).sum())
                for member in members:
                    member.zero(~finite)
            weights = torch.where(finite, (clip / norms).clamp(max=1.0) * _SHRINK, 0.0)
            weights = torch.where(norms == 0, 0.0, weights) * recorded.scale
            for member in members:
                total = member.weighted_sum(weights)
                key = id(member.param)
                self._sums[key] = self._sums[key].add_(total) if key in self._sums else total

    def _release(self) -> None:
        """Account, add noise once to every coordinate, denoise, divide by the public batch size."""
        release = self._plan.prepare(self._sums)
        self._enter()
        self._world.release(
            release, lambda part: self.sampler.add(part, self.scale), sliced=self.sampler.is_secure
        )
        self.taus = self.denoiser(release, self.scale)
        means = self._plan.restore(release, 1 / self.divisor)
        for param, mean in zip(self._params, means, strict=True):
            param.grad = mean.to(param.dtype)
        if self.loader is not None:
            self.loader.position += 1

    def _enter(self) -> None:
        """Enter the step in the journal, if there is one, and in the ledger: before its noise."""
        if self.budget is not None:
            self.budget.check()
        if self.journal is not None and self._world.rank == 0:
            self.journal.record(self.released + 1)
        self.account(1)
        self.released += 1

    def account(self, steps: int) -> None:
        """Enter steps in the ledger."""
        self._accountant.compose(self.mechanism, sampling_prob=self.sampling_prob, steps=steps)


def _zeros(param: Tensor) -> Tensor:
    return torch.zeros_like(param, dtype=_wide(param))


def _wide(param: Tensor) -> torch.dtype:
    return torch.float64 if param.dtype == torch.float64 else torch.float32


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

    def step(self, closure=None):
        if closure is not None:
            raise ValueError("closure must be None: a private step cannot evaluate the loss again")
        self._opt_called = True  # schedulers look for it
        return base.step(self) if private.advance() else None

    def add_param_group(_self, _param_group):
        raise ValueError(
            "optimizer must keep the parameters it was made private with: others would be trained "
            "without noise. Give them to it before make_private"
        )

    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    members = {"step": step, "add_param_group": add_param_group}
    optimizer.__class__ = type(f"Private{base.__name__}", (base,), members)
