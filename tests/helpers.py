"""What tests of training share: noise that is none, and gradients' norms and sums.

Import it relative to the test's own place, ``from ..helpers import NoNoise`` in tests/train.
"""

import mpmath
import numpy as np
import torch
from torch import Tensor, nn

from lap2.train import Recorder
from lap2.train.gradients import PerExample

_BITS = 1074
"""Every float64 is a multiple of two to minus this."""

mp = mpmath.MPContext()
"""Arithmetic with 200 bits, which no other test changes."""
mp.prec = 200


class NoNoise:
    """Noise that is none, to look at the clipped sum."""

    is_secure = False
    added: list[list[Tensor]]
    """What it was to be added to, release by release."""

    def __init__(self):
        self.added = []

    def added_sensitivity(self, _scale, _size):
        return 0.0

    def add(self, array, _scale):
        self.added.append([t.detach().clone() for t in array])
        return 0.0


def norms(gradient: PerExample, power: int = 2, dtype: torch.dtype = torch.float64) -> Tensor:
    """Upper bounds on the norms, one for each example."""
    return gradient.size(power, dtype).norms


def lengths(gradient: PerExample, power: int = 2, dtype: torch.dtype = torch.float64) -> Tensor:
    """Upper bounds on the sums of the norms of each example's terms."""
    return gradient.size(power, dtype).lengths


def weighted_sum(
    gradient: PerExample, weights: Tensor, dtype: torch.dtype = torch.float64
) -> Tensor:
    """The gradients' sum under weights, in the parameter's shape."""
    total = torch.zeros(gradient.param.shape, dtype=dtype)
    gradient.add_to(total, weights.to(dtype))
    return total


def recorded(model: nn.Module, run, *, reduction: str = "sum") -> dict[str, Tensor]:
    """All per-example gradients after ``run()``, by name; the recorder is gone afterwards."""
    recorder = Recorder(model)
    run()
    found = recorder.collect(loss_reduction=reduction).gradients
    each = {recorder.names[g.param]: g.explicit().clone() for g in found}
    recorder.remove()
    return each


def clipped(recorder: Recorder, clip: float, *, reduction: str = "sum") -> dict[str, Tensor]:
    """Sums of what was recorded, with each example clipped over all parameters, by name."""
    found = recorder.collect(loss_reduction=reduction)
    joint = found.scale * torch.stack([norms(g) for g in found.gradients]).norm(dim=0)
    weights = (clip / joint).clamp(max=1.0) * found.scale
    return {recorder.names[g.param]: weighted_sum(g, weights) for g in found.gradients}


def whole(tensor: Tensor) -> np.ndarray:
    """The numbers exactly: Python's integers, in units of 2^-1074."""
    ratios = map(float.as_integer_ratio, tensor.double().flatten().tolist())
    numbers = [over << (_BITS + 1 - under.bit_length()) for over, under in ratios]
    return np.array(numbers, dtype=object).reshape(tensor.shape)


def real(number, power: int = 1) -> "mp.mpf":
    """An integer in so many of these units, multiplied with each other, with 200 bits."""
    return mp.ldexp(mp.mpf(int(number)), -_BITS * power)
