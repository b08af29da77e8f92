"""Free post-processing of Laplace-noised sums: clamping at the score of the noise.

See :mod:`lap2.signal` for what it buys. Whatever is computed here, from released sums alone, costs
no privacy: the choice of the clamp included.
"""

# pyright: basic

import math
from functools import lru_cache

import numpy as np
from torch import Tensor

from lap2 import _validate
from lap2.signal import best_clamp

__all__ = ["Denoiser"]

_LEAST_TAU = 0.1
_LARGEST_TAU = 1000.0


class Denoiser:
    """Clamps each noisy tensor at ``tau`` noise scales, with unit gain for small signals.

    Args:
        denoise: "none" leaves sums as they are; a number is tau for all tensors; "auto" chooses tau
            for each tensor from its own released sums.

    "auto" tracks the mean absolute value of a tensor in noise scales, with a memory of ``memory``
    steps. For signal s it is ``s + exp(-s)``, about ``1 + s^2 / 2``, so its excess over 1 tells the
    root-mean-square signal, and :func:`lap2.signal.best_clamp` the clamp that loses least.
    """

    def __init__(self, denoise: str | float = "auto", *, memory: int = 100) -> None:
        """Check the argument."""
        self.mode = denoise if isinstance(denoise, str) else "fixed"
        if isinstance(denoise, str):
            _validate.choice("denoise", denoise, ("auto", "none"))
        self.tau = math.inf if isinstance(denoise, str) else _validate.positive("denoise", denoise)
        self._memory = _validate.integer("memory", memory, least=1)
        self._means: list[float] = []
        self._steps = 0

    def __call__(self, sums: list[Tensor], scale: float) -> list[float]:
        """Clamp released sums in place; the tau used for each."""
        if self.mode == "none":
            return [math.inf] * len(sums)
        fixed = self.mode == "fixed"
        taus = [self.tau] * len(sums) if fixed else self._choose(sums, scale)
        for tensor, tau in zip(sums, taus, strict=True):
            if tau < math.inf:
                tensor.clamp_(-tau * scale, tau * scale).div_(-math.expm1(-tau))
        return taus

    def state_dict(self) -> dict[str, object]:
        """What "auto" has learnt from released sums."""
        return {"means": list(self._means), "steps": self._steps}

    def load_state_dict(self, state: dict[str, object]) -> None:
        """Continue from :meth:`state_dict`."""
        self._means, self._steps = list(state["means"]), int(state["steps"])  # type: ignore[call-overload]

    def _choose(self, sums: list[Tensor], scale: float) -> list[float]:
        self._steps += 1
        rate = max(1 / self._steps, 1 / self._memory)
        now = [float(tensor.abs().mean()) / scale for tensor in sums]
        before = self._means or now
        self._means = [(1 - rate) * a + rate * b for a, b in zip(before, now, strict=True)]
        means, taus = _table()
        return np.interp(self._means, means, taus).tolist()


@lru_cache(maxsize=1)
def _table() -> tuple[np.ndarray, np.ndarray]:
    """Mean absolute value of a coordinate, in noise scales, and its best clamp."""
    signals = np.geomspace(0.02, 100.0, 120)
    taus = [max(_LEAST_TAU, min(best_clamp(s)[0], _LARGEST_TAU)) for s in signals.tolist()]
    return signals + np.exp(-signals), np.array(taus)
