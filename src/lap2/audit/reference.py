"""What a correct release looks like: an engine's own public readout, with noise of the auditor's.

A release is a sum that is laid out for noise (turned into another basis, each coordinate perhaps
repeated), made noisy, and read out (denoised, added up, turned back). All of it but the sum and the
noise is public and is taken from the engine, what it has learnt from earlier releases included; the
sum is the auditor's, and the noise is ideal. Whatever audits know of an engine's insides is here.
"""

# pyright: basic

import copy
import math
from collections.abc import Callable, Mapping

import numpy as np
import torch
from torch import Tensor

from lap2.audit.result import Check
from lap2.mechanism import Mechanism
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

    def learnt(self) -> object:
        """What the readout has learnt from the releases so far."""
        return copy.deepcopy(self._step.denoiser)

    def forget(self, learnt: object) -> None:
        """Let the engine's next release be read out as if this were all that was learnt."""
        self._step.denoiser = copy.deepcopy(learnt)  # type: ignore[assignment]

    def now(self, rng: np.random.Generator) -> Callable[[Sums], dict[Tensor, Tensor]]:
        """A function that makes correct releases of the engine's *next* step, from exact sums.

        Each call is a release of its own. Parameters that are not given have the sum zero.

        Args:
            rng: of the noise.
        """
        learnt = self.learnt()

        def release(sums: Sums) -> dict[Tensor, Tensor]:
            noisy = self._laid_out(sums)
            for part in noisy:
                part.add_(self._noise(part, rng))
            copy.deepcopy(learnt)(noisy, self._scale)  # type: ignore[operator]
            return dict(zip(self._plan.params, self._plan.restore(noisy, 1.0), strict=True))

        return release

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

    def _noise(self, like: Tensor, rng: np.random.Generator) -> Tensor:
        """Laplace noise: the difference of two exponential variates of NumPy's."""
        first, second = rng.standard_exponential((2, *like.shape), dtype=np.float32)
        return torch.from_numpy(self._scale * (first - second))


def size_of_sample(loader: object) -> int:
    """How many records are in the batch that was handed out and is not used yet."""
    if not isinstance(loader, PoissonLoader) or loader.piece is None:
        raise ValueError(f"loader must have handed out a batch of a Poisson sample, got {loader!r}")
    return loader.piece.total
