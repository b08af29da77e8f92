"""What a correct release looks like: an engine's own public readout, with noise of the auditor's.

A release is a sum that is laid out for noise (turned into another basis), made noisy or replaced by
what bits tell of it, and turned back. All of it but the sum and the noise is public and is taken
from the engine; the sum is the auditor's, and noise or bits are ideal. Whatever audits know of an
engine's insides is here.
"""

# pyright: basic

import math
from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from lap2.audit.bits import IdealNoise, counts_of, repetition, wholeness
from lap2.audit.result import Check
from lap2.mechanism import Mechanism
from lap2.signal import block_size
from lap2.train.distributed import World
from lap2.train.engine import PrivacyEngine
from lap2.train.poisson import PoissonLoader

__all__ = ["Reference", "size_of_sample"]

Sums = Mapping[Tensor, Tensor]
"""By trained parameter."""


class Reference:
    """Correct releases of an engine.

    Args:
        engine: already has its model.
        scale: the Laplace scale b that is claimed.
    """

    def __init__(self, engine: PrivacyEngine, *, scale: float) -> None:
        """Look up what is public."""
        self._step, _ = engine._attached()
        self._plan = self._step._plan
        self._scale = scale

    @property
    def mechanism(self) -> Mechanism:
        """What the engine enters in its ledger for a step."""
        return self._step.run.step.mechanism

    @property
    def divisor(self) -> float:
        """What the engine divides its sums by."""
        return self._step.divisor

    def now(self, rng: np.random.Generator) -> Callable[[Sums], dict[Tensor, Tensor]]:
        """A function that makes correct releases of the engine's steps, from exact sums.

        Each call is a release of its own. Parameters that are not given have the sum zero.

        Args:
            rng: of the noise or the bits.
        """
        readout = replace(self._plan.readout, noise=IdealNoise(rng))

        def release(sums: Sums) -> dict[Tensor, Tensor]:
            noisy = self._laid_out(sums)
            readout.release_from(noisy, self._plan.copies, self._scale, World())
            # Rounded as the engine's means are, so that equal releases are equal numbers.
            means = self._plan.restore(noisy, 1 / self.divisor)
            released = (mean.double() * self.divisor for mean in means)
            return dict(zip(self._plan.params, released, strict=True))

        return release

    def numbers(self, released: Sums) -> dict[str, float]:
        """What a release is compared by, of what it was where it was made noisy.

        What is not given, and what fills up a vector there and is lost when that is turned back,
        counts as zero: then counts are not quite whole.
        """
        noisy = [part.double().flatten().numpy() for part in self._laid_out(released)]
        found = {"coordinates that are alike": repetition(np.concatenate(noisy))}
        if self._plan.readout.release == "bits":
            groups = zip(noisy, self._plan.copies, self._plan.groups, strict=True)
            for number, (part, copies, group) in enumerate(groups):
                block = block_size(sum(param.numel() for param in group))
                mixed = part.reshape(block, -1) if block > 1 else part[:, None]
                name = f"bits counted in group {number}" if number else "bits counted"
                found[name] = wholeness(counts_of(mixed, copies=copies, scale=self._scale))
        return found

    def length_check(self, sums: Mapping[str, Sums]) -> Check:
        """Whether sums are as long where noise is added as they are where they are clipped.

        A comparison with simulated releases takes the engine's word for this.

        Args:
            sums: by name, of any length.
        """
        ratios = {}
        for name, given in sums.items():
            before = math.sqrt(sum(float(t.double().square().sum()) for t in given.values()))
            after = math.sqrt(sum(float(t.double().square().sum()) for t in self._laid_out(given)))
            ratios[name] = after / before
        worst = max(ratios, key=lambda name: ratios[name])
        return Check(
            "length of a record where noise is added",
            float(ratios[worst] <= 1 + 1e-6),
            f"{ratios[worst]:.7f} of its clipped length ({worst})",
            "1",
        )

    def footprint(self, sums: Sums) -> set[int]:
        """Which of the numbers that noise is added to a sum has a share in."""
        flat = torch.cat([part.flatten() for part in self._laid_out(sums)])
        return set(flat.nonzero().flatten().tolist())

    def _laid_out(self, sums: Sums) -> list[Tensor]:
        room = self._plan.blank()
        parts = self._plan.parts(room)
        for param, total in sums.items():
            parts[param].copy_(total)
        return self._plan.prepare(room)


def size_of_sample(loader: object) -> int:
    """How many records are in the batch that was handed out and is not used yet."""
    if not isinstance(loader, PoissonLoader) or loader.piece is None:
        raise ValueError(f"loader must have handed out a batch of a Poisson sample, got {loader!r}")
    return loader.piece.total
