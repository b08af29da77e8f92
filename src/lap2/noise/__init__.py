"""Noise that is private on a real machine: values on a grid, or only the signs of noisy values.

What each promises is in docs/noise.md.
"""

from lap2.noise.grid import SecureGaussian, SecureLaplace
from lap2.noise.keystream import EntropyError, new_key
from lap2.noise.seeded import ReproducibleGaussian, ReproducibleLaplace, ReproducibleSigns
from lap2.noise.signs import SecureSigns, estimates
from lap2.noise.source import Sampler, accounted_noise_multiplier, check_law

__all__ = [
    "EntropyError",
    "ReproducibleGaussian",
    "ReproducibleLaplace",
    "ReproducibleSigns",
    "Sampler",
    "SecureGaussian",
    "SecureLaplace",
    "SecureSigns",
    "accounted_noise_multiplier",
    "check_law",
    "estimates",
    "new_key",
]
