"""Deliberately broken noise: the negative controls of every audit.

An audit that has never failed has not been shown to work. Nothing here is private.
"""

# pyright: basic

from dataclasses import dataclass
from typing import Any

import numpy as np

from lap2.noise import Sampler, SecureLaplace

__all__ = ["FAULTS", "Fault", "FaultySampler", "NumpyLaplace", "TorchLaplace"]


@dataclass(frozen=True)
class Fault:
    """What is wrong with a private step; the default is nothing.

    Attributes:
        noise_factor: of the noise scale.
        clip_factor: of the clip.
        skips_layer: the last of several layers gets no noise; the last half of what is released as
            one vector.
        ignores_sampling: every record is in every batch.
        realised_divisor: the release is rescaled by the realised batch size.
        torch_noise: float32 noise of torch.distributions.
        repeats_noise: the noise of the first step is that of every step.
    """

    noise_factor: float = 1.0
    clip_factor: float = 1.0
    skips_layer: bool = False
    ignores_sampling: bool = False
    realised_divisor: bool = False
    torch_noise: bool = False
    repeats_noise: bool = False

    def sampler(self, honest: Sampler | None = None) -> Sampler:
        """The noise of a step with this fault."""
        honest = honest or SecureLaplace()
        return FaultySampler(TorchLaplace() if self.torch_noise else honest, fault=self)


FAULTS: dict[str, Fault] = {
    "none": Fault(),
    "noise": Fault(noise_factor=0.7),
    "clip": Fault(clip_factor=1.5),
    "layer": Fault(skips_layer=True),
    "sampling": Fault(ignores_sampling=True),
    "divisor": Fault(realised_divisor=True),
    "float32": Fault(torch_noise=True),
    "repeat": Fault(repeats_noise=True),
}
"""The faults an audit is tried on, by the name the command line gives them."""


class FaultySampler:
    """Noise of the wrong scale, or missing from the last of several arrays or half of one."""

    is_secure = False

    def __init__(self, honest: Sampler, *, fault: Fault) -> None:
        """Break ``honest``."""
        self._honest, self._fault = honest, fault
        self._first: dict[Any, list[Any]] = {}

    def added_sensitivity(self, scale: float, size: int) -> float:
        """As if nothing were wrong."""
        return self._honest.added_sensitivity(scale, size)

    def add(self, array: Any, scale: float) -> float:
        """Add noise, with the fault."""
        if self._fault.repeats_noise:
            return self._add_first(array if isinstance(array, list) else [array], scale)
        if self._fault.skips_layer and isinstance(array, list):
            array = array[:-1] if len(array) > 1 else [part[: len(part) // 2] for part in array]
        return self._honest.add(array, self._fault.noise_factor * scale)

    def _add_first(self, parts: list[Any], scale: float) -> float:
        """The noise that was drawn for the first call with arrays like these."""
        shapes = tuple(tuple(part.shape) for part in parts)
        if shapes not in self._first:
            self._first[shapes] = [0 * part for part in parts]
            self._honest.add(self._first[shapes], scale)
        for part, noise in zip(parts, self._first[shapes], strict=True):
            part[...] = part + noise
        return 0.0


class TorchLaplace:
    """Float32 noise of ``torch.distributions.Laplace``, which has holes in its support."""

    is_secure = False

    def added_sensitivity(self, scale: float, size: int) -> float:  # noqa: ARG002
        """Zero: nothing is rounded on purpose."""
        return 0.0

    def add(self, array: Any, scale: float) -> float:
        """Add noise to an array or tensor, or to a list of them, in place."""
        import torch  # noqa: PLC0415 - only this control needs it

        law = torch.distributions.Laplace(torch.tensor(0.0), torch.tensor(float(scale)))
        for part in array if isinstance(array, list) else [array]:
            part[...] = part + _like(part, law.sample(tuple(part.shape)))
        return 0.0


class NumpyLaplace:
    """Noise of ``numpy.random.Generator.laplace``: holes too, in float64."""

    is_secure = False

    def __init__(self, rng: np.random.Generator) -> None:
        """Draw from ``rng``."""
        self._rng = rng

    def added_sensitivity(self, scale: float, size: int) -> float:  # noqa: ARG002
        """Zero: nothing is rounded on purpose."""
        return 0.0

    def add(self, array: Any, scale: float) -> float:
        """Add noise to a NumPy array in place."""
        array += self._rng.laplace(scale=scale, size=array.shape).astype(array.dtype)
        return 0.0


def _like(part: Any, noise: Any) -> Any:
    return noise.numpy().astype(part.dtype) if isinstance(part, np.ndarray) else noise
