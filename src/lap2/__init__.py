"""Differentially private training with Laplace noise and l2 clipping.

Describe a step, account for it, read epsilon::

    lap2.Accountant().compose(lap2.Laplace(1.0, 26010), sampling_prob=0.0043, steps=5860)

Importing this package imports NumPy and nothing heavier.
"""

from lap2.accountant import Accountant, Answer
from lap2.bracket import Bracket, bracket
from lap2.calibration import (
    CalibrationError,
    calibrate_clip,
    calibrate_noise,
    calibrate_sampling_prob,
    calibrate_steps,
)
from lap2.clip_search import (
    clip_from_private_norms,
    clip_from_public_norms,
    first_order,
    search_clip,
)
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
from lap2.planner import Plan, plan
from lap2.sampling import univariate_log_moment
from lap2.signal import same_noise_ratio, signal_to_noise

__version__ = "0.1.0"

__all__ = [
    "Accountant",
    "Answer",
    "Bracket",
    "CalibrationError",
    "Entry",
    "Gaussian",
    "Joint",
    "Laplace",
    "LaplaceL1",
    "LedgerError",
    "MajorizedLaplace",
    "Mechanism",
    "NotAGuaranteeWarning",
    "Plan",
    "PublishedLaplace",
    "bracket",
    "calibrate_clip",
    "calibrate_noise",
    "calibrate_sampling_prob",
    "calibrate_steps",
    "clip_from_private_norms",
    "clip_from_public_norms",
    "first_order",
    "majorization_set",
    "plan",
    "same_noise_ratio",
    "search_clip",
    "signal_to_noise",
    "univariate_log_moment",
    "weakly_majorizes",
]
