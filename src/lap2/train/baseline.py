"""Noise of the Gaussian baseline."""

# pyright: basic

import torch
from torch import Tensor

from lap2 import _validate

__all__ = ["OrdinaryGaussian"]


class OrdinaryGaussian:
    """Normal noise from torch's own generator, for comparisons: no guarantee rests on it.

    Args:
        seed: None seeds from the operating system.
    """

    is_secure = False

    def __init__(self, seed: int | None = None) -> None:
        """Start a generator of its own."""
        self._generator = torch.Generator()
        if seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(_validate.integer("seed", seed, least=0))

    def added_sensitivity(self, scale: float, size: int) -> float:
        """Zero: nothing is rounded."""
        _validate.positive("scale", scale)
        _validate.integer("size", size, least=0)
        return 0.0

    def add(self, array: list[Tensor], scale: float) -> float:
        """Add noise of standard deviation ``scale`` to all tensors, in place."""
        for tensor in array:
            noise = torch.randn(tensor.shape, dtype=tensor.dtype, generator=self._generator)
            tensor.add_(noise.to(tensor.device), alpha=scale)
        return 0.0
