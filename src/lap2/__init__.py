"""Differentially private training with Laplace noise and l2 clipping.

Describe a step, account for it, read epsilon::

    lap2.Accountant().compose(lap2.Laplace(1.0, 26010), sampling_prob=0.0043, steps=5860)

Importing this package imports NumPy and nothing heavier.
"""

from lap2.accountant import Accountant, Answer
from lap2.ledger import Entry, LedgerError
from lap2.majorization import majorization_set, weakly_majorizes
from lap2.mechanism import (
    Gaussian,
    Joint,
    Laplace,
    LaplaceL1,
    MajorizedLaplace,
    Mechanism,
    NotAGuaranteeWarning,
    PublishedLaplace,
)
from lap2.sampling import univariate_log_moment

__version__ = "0.1.0"

__all__ = [
    "Accountant",
    "Answer",
    "Entry",
    "Gaussian",
    "Joint",
    "Laplace",
    "LaplaceL1",
    "LedgerError",
    "MajorizedLaplace",
    "Mechanism",
    "NotAGuaranteeWarning",
    "PublishedLaplace",
    "majorization_set",
    "univariate_log_moment",
    "weakly_majorizes",
]
