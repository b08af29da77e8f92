"""Deliberately broken noise and bits: the negative controls of every audit.

An audit that has never failed has not been shown to work. Nothing here is private.
"""

# pyright: basic

import math
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from lap2.noise import Sampler, SecureLaplace, SecureSigns, estimates

__all__ = ["FAULTS", "Fault", "FaultySampler", "FaultySigns", "NumpyLaplace", "TorchLaplace"]


@dataclass(frozen=True)
class Fault:
    """What is wrong with a private step; the default is nothing.

    Attributes:
        noise_factor: of the noise scale. Bits have the chances of this scale, and are read out as
            if they had those of the right one.
        clip_factor: of the clip.
        skips_layer: the last of several layers gets no noise; the last half of what is released as
            one vector.
        ignores_sampling: every record is in every batch.
        realised_divisor: the release is rescaled by the realised batch size.
        torch_noise: float32 noise of torch.distributions.
        repeats_noise: the noise, or the uniform variates, of the first step are those of every
            step.
        shares_noise: the second half of what is released together has the noise of the first, or
            its uniform variates.
        copies_factor: there are so many times as many bits as are accounted.
        copies_over: each copy is its coordinate over the root of the number of copies "drawn", as
            it should be; or of that "accounted"; or over "nothing".
        shares_copies: all copies of a coordinate have the same uniform variate.
    """

    noise_factor: float = 1.0
    clip_factor: float = 1.0
    skips_layer: bool = False
    ignores_sampling: bool = False
    realised_divisor: bool = False
    torch_noise: bool = False
    repeats_noise: bool = False
    shares_noise: bool = False
    copies_factor: int = 1
    copies_over: Literal["drawn", "accounted", "nothing"] = "drawn"
    shares_copies: bool = False

    @property
    def is_of_bits(self) -> bool:
        """Whether it is of bits alone."""
        return (self.copies_factor, self.copies_over, self.shares_copies) != (1, "drawn", False)

    def sampler(self, release: str = "values", honest: Sampler | None = None) -> Sampler:
        """What makes noise with this fault, or bits; the real one if they are not its subject.

        Args:
            release: "values" or "bits".
            honest: what is broken, of values; a secure source by default.
        """
        elsewhere = {"clip_factor": 1.0, "ignores_sampling": False, "realised_divisor": False}
        is_fine = replace(self, **elsewhere) == Fault()
        if release == "bits":
            return SecureSigns() if is_fine else FaultySigns(self)
        if self.is_of_bits:
            raise ValueError("release must be 'bits' for a fault of bits, got 'values'")
        honest = honest or SecureLaplace()
        if is_fine:
            return honest
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
    "shared": Fault(shares_noise=True),
    "copies": Fault(copies_factor=4, copies_over="accounted"),
    "ledger": Fault(copies_factor=4),
    "whole": Fault(copies_over="nothing"),
    "twins": Fault(shares_copies=True),
}
"""The faults an audit is tried on, by the name the command line gives them.

The last four are of bits: four times as many as accounted, of copies that are too large; four times
as many as accounted, of copies of the right size; copies as large as their coordinate; and copies
that are one.
"""


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
        if self._fault.shares_noise:
            return self._add_shared(array if isinstance(array, list) else [array], scale)
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

    def _add_shared(self, parts: list[Any], scale: float) -> float:
        """The noise of the first half of all coordinates, twice."""
        sizes = [math.prod(part.shape) for part in parts]
        noise = np.zeros(sum(sizes))
        self._honest.add(noise, scale)
        _share(noise)
        shares = np.split(noise, np.cumsum(sizes)[:-1])
        for i, share in enumerate(shares):
            own = share.reshape(parts[i].shape)
            parts[i] += own if isinstance(parts[i], np.ndarray) else _tensor(own)
        return 0.0


class FaultySigns:
    """Signs as :class:`lap2.noise.SecureSigns` makes them, but for a fault.

    A bit is whether a uniform variate of NumPy's is below its probability; or, for noise of
    torch's, the sign of the noisy copy.
    """

    is_secure = False
    law = "laplace"

    def __init__(self, fault: Fault, copies: int = 1) -> None:
        """Draw so many bits of each coordinate, as is claimed."""
        self._fault, self.copies = fault, copies
        self._rng = np.random.default_rng()
        self._others: dict[int, FaultySigns] = {}
        self._first: dict[tuple[int, int], Any] = {}

    def times(self, copies: int) -> "FaultySigns":
        """The same with another number of copies, always the same one."""
        return self._others.setdefault(copies, FaultySigns(self._fault, copies))

    def added_sensitivity(self, scale: float, size: int) -> float:  # noqa: ARG002
        """As if nothing were wrong."""
        return 0.0

    def add(self, array: Any, scale: float) -> float:
        """Replace coordinates by their estimates, with the fault."""
        values = array if isinstance(array, np.ndarray) else array.numpy()
        values[...] = self._estimates(values.ravel(), scale).reshape(values.shape)
        return 0.0

    def _estimates(self, values: Any, scale: float) -> Any:
        fault, drawn = self._fault, self.copies * self._fault.copies_factor
        share = {"drawn": drawn, "accounted": self.copies, "nothing": 1}[fault.copies_over]
        u = values / (math.sqrt(share) * scale * fault.noise_factor)
        if fault.torch_noise:
            noisy = np.repeat(u.astype(np.float32), drawn)
            TorchLaplace().add(noisy, 1.0)
            positive = noisy.reshape(-1, drawn) > 0
        else:
            tail = np.exp(-np.abs(u)) / 2
            chance = np.where(u >= 0, 1 - tail, tail)
            positive = self._uniform((values.size, drawn)) < chance[:, None]
        return estimates(positive.sum(axis=1), copies=drawn, scale=scale)

    def _uniform(self, shape: tuple[int, int]) -> Any:
        if shape not in self._first or not self._fault.repeats_noise:
            self._first = {shape: self._rng.random(shape)}
        uniform = self._first[shape]
        if self._fault.shares_copies:
            uniform[:, 1:] = uniform[:, :1]
        if self._fault.shares_noise:
            _share(uniform)
        if self._fault.skips_layer:
            uniform[len(uniform) // 2 :] = 0.5
        return uniform


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


def _tensor(noise: Any) -> Any:
    import torch  # noqa: PLC0415 - only controls on tensors need it

    return torch.from_numpy(noise)


def _share(noise: Any) -> None:
    half = len(noise) // 2
    noise[half : 2 * half] = noise[:half]
