"""Free post-processing of Laplace-noised sums: clamping at the score of the noise.

See :mod:`lap2.signal` for what it buys. Whatever is computed here, from released sums alone, costs
no privacy: the choice of the clamp included.
"""

# pyright: basic

import math

import torch
from torch import Tensor

from lap2 import _validate

__all__ = ["Denoiser"]

_TAUS = (0.1, 0.2, 0.3, 0.5, 0.7, 1.0, 1.5, 2.0, 3.0, 5.0, 10.0, math.inf)
_SAMPLE = 8192
"""Coordinates of a tensor that are looked at in one step."""
_EVERY = 10
"""After the first steps, only one in this many is looked at: signals change slowly."""


class Denoiser:
    """Clamps each noisy tensor at ``tau`` noise scales, with unit gain for small signals.

    Args:
        denoise: "none" leaves sums as they are; a number is tau for all tensors; "auto" chooses tau
            for each tensor from its own released sums.
        memory: how many of the steps looked at "auto" remembers.

    "auto" maximises the share of the clamped tensor that is signal, ``E[s f(y)]^2 / E[f(y)^2]``,
    where y is the released sum in noise scales, s the sum without noise and f the clamp. Though
    nobody has seen s, the numerator is known: for Laplace noise ``E[s f(y)] = E[y f(y) - 2 F'(y)]``
    with F the mean of f under noise (docs/theory.md, section 11), whatever the signals are like.
    """

    def __init__(self, denoise: str | float = "auto", *, memory: int = 20) -> None:
        """Check the argument."""
        self.mode = denoise if isinstance(denoise, str) else "fixed"
        if isinstance(denoise, str):
            _validate.choice("denoise", denoise, ("auto", "none"))
        self.tau = math.inf if isinstance(denoise, str) else _validate.positive("denoise", denoise)
        self._memory = _validate.integer("memory", memory, least=1)
        self._steps = self._looks = 0
        self._signal: list[Tensor] = []
        self._power: list[Tensor] = []
        self._taus: list[float] = []

    def __call__(self, sums: list[Tensor], scale: float) -> list[float]:
        """Clamp released sums in place; the tau used for each."""
        if self.mode == "none":
            return [math.inf] * len(sums)
        taus = [self.tau] * len(sums) if self.mode == "fixed" else self._choose(sums, scale)
        for tensor, tau in zip(sums, taus, strict=True):
            tensor.clamp_(-tau * scale, tau * scale).div_(-math.expm1(-tau))
        return taus

    def state_dict(self) -> dict[str, object]:
        """What "auto" has learnt from released sums."""
        return {
            "steps": self._steps,
            "looks": self._looks,
            "signal": [values.tolist() for values in self._signal],
            "power": [values.tolist() for values in self._power],
            "taus": self._taus,
        }

    def load_state_dict(self, state: dict[str, object]) -> None:
        """Continue from :meth:`state_dict`."""
        self._steps, self._looks = int(state["steps"]), int(state["looks"])  # type: ignore[call-overload]
        self._signal = [_doubles(values) for values in state["signal"]]  # type: ignore[attr-defined]
        self._power = [_doubles(values) for values in state["power"]]  # type: ignore[attr-defined]
        self._taus = list(state["taus"])  # type: ignore[call-overload]

    def _choose(self, sums: list[Tensor], scale: float) -> list[float]:
        if self._steps < _EVERY or self._steps % _EVERY == 0:
            self._look(sums, scale)
        self._steps += 1
        return self._taus

    def _look(self, sums: list[Tensor], scale: float) -> None:
        """Update what is known of every tensor, and the clamps."""
        self._looks += 1
        rate = max(1 / self._looks, 1 / self._memory)
        grid = _doubles(_TAUS)
        gains = -torch.expm1(-grid)
        taus = []
        for index, tensor in enumerate(sums):
            stride = -(-tensor.numel() // _SAMPLE)
            sample = tensor.flatten()[self._looks % stride :: stride].to("cpu", torch.float64)
            signal, power = _share(sample.abs() / scale, grid)
            if index == len(self._signal):
                self._signal.append(signal)
                self._power.append(power)
            self._signal[index] = signal = torch.lerp(self._signal[index], signal, rate)
            self._power[index] = power = torch.lerp(self._power[index], power, rate)
            # Where chance could have made all of the signal, believe in a small one.
            doubt = 1 / math.sqrt(sample.numel() / rate)
            share = (signal + doubt * gains).clamp_min(0.0).square() / power
            taus.append(_TAUS[int(share.argmax())])
        self._taus = taus


def _share(size: Tensor, grid: Tensor) -> tuple[Tensor, Tensor]:
    """Estimates of ``E[s f(y)]``, unbiased, and of ``E[f(y)^2]``, for every clamp of the grid.

    Args:
        size: absolute values of released coordinates, in noise scales.
        grid: the clamps.
    """
    size = size.unsqueeze(1)
    clamped = torch.minimum(size, grid)
    # The derivative of the clamp's mean under noise: 1 - exp(-tau) cosh(y) inside, and
    # exp(-y) sinh(tau) outside; one formula for both, with y and tau in order.
    high = torch.maximum(size, grid)
    slope = torch.exp(clamped - high) - torch.exp(-clamped - high)
    slope = torch.where(
        size <= grid, 2 - torch.exp(clamped - high) - torch.exp(-clamped - high), slope
    )
    return (size * clamped - slope).mean(dim=0), clamped.square().mean(dim=0)


def _doubles(values: object) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)
