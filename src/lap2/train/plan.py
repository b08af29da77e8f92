"""What is clipped together, what is released of it, and how that is accounted."""

# pyright: basic

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lap2 import _validate
from lap2.mechanism import Gaussian, Joint, Laplace, LaplaceL1, Mechanism
from lap2.signal import spread_size
from lap2.train.distributed import World, refuse_wrapped
from lap2.train.readout import Readout
from lap2.train.rotate import blank, gather, turned

__all__ = ["Clip", "MechanismName", "ReleasePlan"]

MechanismName = Literal["laplace", "gaussian", "laplace-l1"]
Clip = float | Sequence[float]


@dataclass(frozen=True)
class ReleasePlan:
    """What is clipped together, what is released of it, and with which noise.

    Attributes:
        module: the model.
        optimizer: of its trainable parameters.
        mechanism: the kind of noise.
        groups: the parameters that are clipped together.
        clips: of the groups.
        readout: in which form sums are released.
        rotated: whether the sum of a group is released in the basis of :mod:`lap2.train.rotate`.
        copies: of each coordinate of each group, whose signs are released.
    """

    module: nn.Module
    optimizer: Optimizer
    mechanism: MechanismName
    groups: tuple[tuple[Tensor, ...], ...]
    clips: tuple[float, ...]
    readout: Readout
    rotated: bool
    copies: tuple[int, ...]

    @classmethod
    def of(
        cls,
        module: nn.Module,
        optimizer: Optimizer,
        clip: Clip,
        mechanism: MechanismName,
        readout: Readout,
    ) -> "ReleasePlan":
        """Check that everything fits together; there is one copy of each coordinate.

        Sums are rotated where that helps, if they are clipped in l2: l1 norms change with the
        basis.
        """
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
            groups = _groups(module, optimizer, len(clip))
            clips = [_validate.positive("max_grad_norm", c) for c in clip]
        else:
            groups = [[p for group in optimizer.param_groups for p in group["params"]]]
            clips = [_validate.positive("max_grad_norm", clip)]
        return cls(
            module,
            optimizer,
            mechanism,
            tuple(map(tuple, groups)),
            tuple(clips),
            readout,
            rotated=mechanism == "laplace" and readout.spreads,
            copies=(1,) * len(groups),
        )

    def with_copies(self, scale: float, batch_size: float) -> "ReleasePlan":
        """The same, with as many copies of coordinates as this noise and batch size are worth."""
        one = replace(self, copies=(1,) * len(self.groups))
        pairs = zip(one.sizes, self.clips, strict=True)
        copies = [
            self.readout.copies_for(size, batch_size=batch_size, noise_multiplier=scale / clip)
            for size, clip in pairs
        ]
        return replace(self, copies=tuple(copies))

    @property
    def sizes(self) -> list[int]:
        """Number of released coordinates of each group, every copy counted."""
        sizes = [sum(p.numel() for p in group) for group in self.groups]
        spread = [spread_size(size) for size in sizes] if self.rotated else sizes
        return [size * times for size, times in zip(spread, self.copies, strict=True)]

    def release(self, sums: list[Tensor], scale: float, world: World) -> list[Tensor]:
        """What is released of :meth:`prepare`'s result, in its place."""
        self.readout.release_from(sums, self.copies, scale, world)
        return sums

    def blank(self) -> list[Tensor]:
        """Room for the sum of each group, all zero."""
        sums: list[Tensor] = []
        for group in self.groups:
            size, device = sum(p.numel() for p in group), group[0].device
            room = blank(size, device)
            sums.append(room if self.rotated else room[:size])
        return sums

    def parts(self, sums: list[Tensor]) -> dict[Tensor, Tensor]:
        """Where in the sums each parameter's part is, in its shape."""
        return {
            param: part
            for group, flat in zip(self.groups, sums, strict=True)
            for param, part in zip(group, _split(flat, group), strict=True)
        }

    def prepare(self, sums: list[Tensor]) -> list[Tensor]:
        """What to add noise to, of the sums, which are overwritten or shared.

        A vector for each group, if it is turned; or else a tensor for each parameter.
        """
        if self.rotated:
            sizes = (sum(p.numel() for p in group) for group in self.groups)
            return [turned(flat, size) for flat, size in zip(sums, sizes, strict=True)]
        return list(self.parts(sums).values())

    def restore(self, released: list[Tensor], factor: float) -> list[Tensor]:
        """What became of :meth:`prepare`'s result, by parameter, times a factor."""
        if not self.rotated:
            pairs = zip(released, self.params, strict=True)
            return [part.mul_(factor).to(p, copy=True) for part, p in pairs]
        means = [[torch.empty_like(p) for p in group] for group in self.groups]
        for flat, part in zip(released, means, strict=True):
            gather(flat, part, factor)
        return [mean for part in means for mean in part]

    @property
    def params(self) -> list[Tensor]:
        """All parameters that are trained, group by group."""
        return [p for group in self.groups for p in group]

    @property
    def total_clip(self) -> float:
        """The most that one record moves the whole release."""
        return math.hypot(*self.clips)

    def describe(self, scale: float, spacing: float, rho: float) -> Mechanism:
        """The release, as it is accounted.

        Args:
            scale: of the noise.
            spacing: by how much rounding, when noise is added, moves a coordinate.
            rho: by which share of the clip rounding before that may exceed it.
        """
        members: list[Mechanism] = []
        for clip, size in zip(self.clips, self.sizes, strict=True):
            moved = clip * (1 + rho)
            if self.mechanism == "laplace-l1":
                members.append(LaplaceL1(_ratio(scale, moved + size * spacing)))
                continue
            multiplier = _ratio(scale, moved + math.sqrt(size) * spacing)
            gaussian = self.mechanism == "gaussian"
            members.append(Gaussian(multiplier) if gaussian else Laplace(multiplier, size))
        return members[0] if len(members) == 1 else Joint(members)

    def spacing(self, scale: float, world: World) -> float:
        """How far rounding moves one coordinate, when each process does its slice."""
        size = world.slice_size(sum(self.sizes))
        return self.readout.noise.added_sensitivity(scale, size) / math.sqrt(max(size, 1))

    def scale_for(self, wanted: Mechanism, template: Mechanism, world: World, rho: float) -> float:
        """The scale whose release, rounding included, has at least the noise that is wanted."""
        targets = _multipliers(wanted)
        scale = targets[0] / _multipliers(template)[0]
        for _ in range(50):
            reached = self.describe(scale, self.spacing(scale, world), rho)
            pairs = zip(targets, _multipliers(reached), strict=True)
            short = max(target / member for target, member in pairs)
            if short <= 1:
                return scale
            scale *= short * (1 + 1e-15)
        raise ValueError(f"no noise scale covers the rounding of {sum(self.sizes)} coordinates")


def _groups(module: nn.Module, optimizer: Optimizer, count: int) -> list[list[Tensor]]:
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


def _split(flat: Tensor, group: Sequence[Tensor]) -> list[Tensor]:
    sizes = [p.numel() for p in group]
    return [
        part.view(p.shape) for part, p in zip(flat[: sum(sizes)].split(sizes), group, strict=True)
    ]
