"""Private training with PyTorch. Needs ``lap2[train]``."""

from lap2.train.denoise import Denoiser
from lap2.train.engine import PrivacyEngine, Statement
from lap2.train.layers import UnsupportedModuleError
from lap2.train.poisson import PoissonLoader
from lap2.train.recorder import BookkeepingError, Recorder

__all__ = [
    "BookkeepingError",
    "Denoiser",
    "PoissonLoader",
    "PrivacyEngine",
    "Recorder",
    "Statement",
    "UnsupportedModuleError",
]
