"""A sum that one record moves by at most ``C (1 + rho)``, whatever is rounded on the way.

See :mod:`lap2.train.rounding` for the constants, and docs/theory.md, section 12, for the proof.
"""

# pyright: basic

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from lap2.train.errors import BookkeepingError
from lap2.train.gradients import PerExample, Size
from lap2.train.rounding import RATIO, SHARE, SHRINK, sum_error

__all__ = ["ClippedGroup", "Clipping"]


class ClippedGroup(NamedTuple):
    """The gradients of parameters that are clipped together, and what they are multiplied with.

    Attributes:
        clip: of the group.
        members: the gradients.
        weights: of each example.
        finite: which examples had a gradient that is finite; the others contribute nothing.
        scale: what gradients are multiplied with anyway.
    """

    clip: float
    members: list[PerExample]
    weights: Tensor
    finite: Tensor
    scale: float


@dataclass(frozen=True)
class Clipping:
    """How gradients are clipped.

    Attributes:
        groups: the parameters that are clipped together.
        clips: of the groups.
        power: 2 to clip l2 norms, 1 to clip l1 norms.
        dtype: in which norms and sums are taken; the proof is for float64.
        processes: that share each batch.
    """

    groups: tuple[tuple[Tensor, ...], ...]
    clips: tuple[float, ...]
    power: int
    dtype: torch.dtype
    processes: int

    def clip(
        self, gradients: Sequence[PerExample], scale: float, *, size: int, total: int
    ) -> list[ClippedGroup]:
        """Weights under which no example's gradient exceeds its clip.

        Args:
            gradients: of the parameters that took part.
            scale: what the gradients must be multiplied with.
            size: number of examples.
            total: number of examples in their whole batch, of which they may be a piece.
        """
        found = {id(g.param): g for g in gradients}
        terms = max((g.terms for g in gradients), default=1)
        error = sum_error(size=size, terms=terms, total=total, processes=self.processes)
        if error > SHARE and self.dtype == torch.float64:
            raise BookkeepingError(
                "a batch has too many records, or positions in each, for its sum to be certain: "
                "make max_physical_batch_size smaller, or batch_size"
            )
        clipped: list[ClippedGroup] = []
        for group, clip in zip(self.groups, self.clips, strict=True):
            members = [found[id(p)] for p in group if id(p) in found]
            if members:
                sizes = [member.size(self.power, self.dtype) for member in members]
                clipped.append(self._clipped(members, sizes, clip, scale))
        return clipped

    def _clipped(
        self, members: list[PerExample], sizes: list[Size], clip: float, scale: float
    ) -> ClippedGroup:
        norms, lengths = (torch.stack(list(of)) for of in zip(*sizes, strict=True))
        # Long terms that cancel are held back too: rounding errors are in proportion to them.
        needed = torch.maximum(self._joined(norms), self._joined(lengths) / RATIO) * scale
        finite = needed.isfinite()
        if not finite.all():
            for member in members:
                member.zero(~finite)
        weights = torch.where(finite, (clip / needed).clamp(max=1.0) * (SHRINK * scale), 0.0)
        return ClippedGroup(clip, members, torch.where(needed == 0, 0.0, weights), finite, scale)

    def _joined(self, of: Tensor) -> Tensor:
        """The norm of all parameters' gradients together, from those of each."""
        return torch.linalg.vector_norm(of, self.power, dim=0)
