"""Private training with PyTorch. Needs ``lap2[train]``."""

from lap2.train.budget import BudgetExhaustedError
from lap2.train.checkpoint import CheckpointError
from lap2.train.coverage import Coverage, coverage
from lap2.train.engine import PrivacyEngine, Statement
from lap2.train.errors import BookkeepingError
from lap2.train.layers import UnsupportedModuleError
from lap2.train.poisson import Piece, PoissonLoader
from lap2.train.recorder import Recorder
from lap2.train.saving import Resumed

__all__ = [
    "BookkeepingError",
    "BudgetExhaustedError",
    "CheckpointError",
    "Coverage",
    "Piece",
    "PoissonLoader",
    "PrivacyEngine",
    "Recorder",
    "Resumed",
    "Statement",
    "UnsupportedModuleError",
    "coverage",
]
