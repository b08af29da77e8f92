"""Free post-processing of Laplace-noised sums: clamping at the score of the noise.

See :mod:`lap2.signal` for what it buys, and :mod:`lap2.train.rotate` for the basis it is done in.
Whatever is computed here, from released sums alone, costs no privacy: the choice of the clamp
included.
"""

# pyright: basic

import math

import torch
from torch import Tensor

from lap2 import _validate

__all__ = ["Denoiser"]

_TAUS = (0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 1.0, 1.5, 2.0, 3.0, 5.0, 10.0, math.inf)
_SAMPLE = 8192
"""Coordinates of a tensor that are looked at in one step."""
_EVERY = 10
"""After the first steps, only one in this many is looked at: signals change slowly."""


class Denoiser:
    """Clamps each noisy tensor at ``tau`` noise scales, with unit gain for small signals.

    Args:
        denoise: "none" leaves sums as they are; a number is tau for all tensors; "auto" chooses tau
            for each tensor it is given (for l2-clipped sums, one for each clip) from what was
            released of it.
        memory: how many of the steps looked at "auto" remembers.

    "auto" maximises the share of the clamped tensor that is signal, ``E[s f(y)]^2 / E[f(y)^2]``,
    where y is the released sum in noise scales, s the sum without noise and f the clamp. Though
    nobody has seen s, the numerator is known: for Laplace noise ``E[s f(y)] = E[y f(y) - 2 F'(y)]``
    with F the mean of f under noise (docs/theory.md, section 11), whatever the signals are like.
    """

    def __init__(self, denoise: str | float = "auto", *, memory: int = 50) -> None:
        """Check the argument."""
        self.mode = denoise if isinstance(denoise, str) else "fixed"
        if isinstance(denoise, str):
            _validate.choice("denoise", denoise, ("auto", "none"))
        self.tau = math.inf if isinstance(denoise, str) else _validate.positive("denoise", denoise)
        self._memory = _validate.integer("memory", memory, least=1)
        self._steps = self._looks = 0
        self._moments: list[Tensor] = []
        self._taus: list[float] = []

    def __call__(self, sums: list[Tensor], scale: float) -> list[float]:
        """Clamp released sums in place; the tau used for each."""
        if self.mode == "none":
            return [math.inf] * len(sums)
        taus = [self.tau] * len(sums) if self.mode == "fixed" else self._choose(sums, scale)
        for tensor, tau in zip(sums, taus, strict=True):
            tensor.clamp_(-tau * scale, tau * scale).mul_(-1 / math.expm1(-tau))
        return taus

    def state_dict(self) -> dict[str, object]:
        """What "auto" has learnt from released sums."""
        return {
            "steps": self._steps,
            "looks": self._looks,
            "moments": [values.tolist() for values in self._moments],
            "taus": self._taus,
        }

    def load_state_dict(self, state: dict[str, object]) -> None:
        """Continue from :meth:`state_dict`; or learn anew, if it was made with other clamps."""
        moments = [_floats(values) for values in state["moments"]]  # type: ignore[attr-defined]
        if any(values.shape[1] != len(_TAUS) for values in moments):
            return
        self._steps, self._looks = int(state["steps"]), int(state["looks"])  # type: ignore[call-overload]
        self._moments = moments
        self._taus = [float(tau) for tau in state["taus"]]  # type: ignore[attr-defined]

    def _choose(self, sums: list[Tensor], scale: float) -> list[float]:
        if self._steps < _EVERY or self._steps % _EVERY == 0:
            self._look(sums, scale)
        self._steps += 1
        return self._taus

    def _look(self, sums: list[Tensor], scale: float) -> None:
        """Update what is known of every tensor, and the clamps."""
        self._looks += 1
        rate = max(1 / self._looks, 1 / self._memory)
        grid = _floats(_TAUS)
        taus = []
        for index, tensor in enumerate(sums):
            stride = -(-tensor.numel() // _SAMPLE)
            sample = tensor.flatten()[self._looks % stride :: stride].to("cpu", torch.float32)
            found = _moments(sample.abs() / scale, grid)
            if index == len(self._moments):
                self._moments.append(found)
            self._moments[index] = torch.lerp(self._moments[index], found, rate)
            taus.append(_best(self._moments[index], sample.numel() / rate))
        self._taus = taus


def _best(moments: Tensor, count: float) -> float:
    """The clamp that keeps the largest share of signal; the first, unless another surely does."""
    signal, square, cross, power = moments
    root = power.sqrt()
    kept = signal / root
    gain = kept - kept[0]
    variance = square / power + square[0] / power[0] - 2 * cross / (root * root[0])
    surely = gain - 3 * torch.sqrt(variance.clamp_min(0.0) / count)
    surely[0] = 0.0
    return _TAUS[int(surely.argmax())]


def _moments(size: Tensor, grid: Tensor) -> Tensor:
    """Means for every clamp f: of an unbiased estimate of ``s f(y)``, and of ``f(y)^2``.

    Between them, what tells how sure it is: the mean of the estimate's square, and of its product
    with the first clamp's.

    Args:
        size: absolute values of released coordinates, in noise scales.
        grid: the clamps.
    """
    # Twice the derivative of the clamp's mean under noise: 2 - 2 exp(-tau) cosh(y) inside the clamp
    # and 2 exp(-y) sinh(tau) outside. Inside, y is at most the largest finite tau.
    inverse = torch.exp(-size)
    inside = torch.outer(torch.exp(size.clamp(max=_TAUS[-2])) + inverse, torch.exp(-grid))
    outside = torch.outer(inverse, 2 * torch.sinh(grid))
    size = size.unsqueeze(1)
    slope = torch.where(size <= grid, 2 - inside, outside)
    clamped = torch.minimum(size, grid)
    signal = size * clamped - slope
    values = (signal, signal**2, signal * signal[:, :1], clamped**2)
    return torch.stack([value.mean(dim=0) for value in values])


def _floats(values: object) -> Tensor:
    return torch.tensor(values, dtype=torch.float32)
