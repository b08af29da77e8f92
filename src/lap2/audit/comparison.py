"""Steps against simulated correct ones, by ranks: tests that are exact whatever is compared.

A release of bits has no closed form: what bits tell of turned coordinates is turned back, and
depends on each other a little. But a correct one can be simulated, any number of times, from what
is public. If what a step released has the law of the simulated releases, its rank among
them is uniform, by any number that is computed of them all.
"""

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray
from scipy import special

from lap2 import _validate
from lap2.audit.result import Check

__all__ = ["Comparison", "simulations_for"]

Floats = NDArray[np.float64]

_LEAST = 5
"""Simulated releases for each step; with k of them, one part in k + 1 of the precision is lost."""
_IN_ALL = 100
"""Simulated releases for the whole of a short run, whose ranks must be finer."""


def simulations_for(steps: int) -> int:
    """How many correct releases to simulate for each of so many steps."""
    return max(_LEAST, -(-_IN_ALL // _validate.integer("steps", steps, least=1)))


class Comparison:
    """Numbers that describe a step, each ranked among those of simulated correct steps.

    Formal guarantee:
        If, given everything that happened before, the release of each step and the simulated ones
        are independent with the same law, then p-values are exact: the rank, spread evenly over its
        place and at random among ties, is uniform and independent of all earlier ranks, so that its
        normal score is a standard normal number. Nothing is assumed about what is compared: not
        that coordinates are independent, nor that steps are alike.

    Args:
        rng: breaks ties and spreads ranks.
    """

    def __init__(self, rng: np.random.Generator) -> None:
        """Begin without a step."""
        self._rng = rng
        self._scores: dict[str, list[float]] = {}
        self._seen: dict[str, list[tuple[float, float]]] = {}

    @property
    def names(self) -> tuple[str, ...]:
        """The numbers that were compared."""
        return tuple(self._scores)

    def add(self, observed: Mapping[str, float], correct: Sequence[Mapping[str, float]]) -> None:
        """One step: what was observed, and the same of simulated correct releases."""
        for name, value in observed.items():
            others = np.array([numbers[name] for numbers in correct])
            below, ties = np.count_nonzero(others < value), np.count_nonzero(others == value)
            if not np.isfinite(value):  # beyond everything, not beside it
                below, ties = len(others), 0
            place = below + self._rng.integers(ties + 1) + self._rng.random()
            score = float(special.ndtri(place / (len(others) + 1)))
            self._scores.setdefault(name, []).append(score)
            self._seen.setdefault(name, []).append((value, float(others.mean())))

    def level(self, name: str, *, only_above: bool = False) -> Check:
        """Whether a number is as large as it should be, over all steps.

        Args:
            name: which.
            only_above: count only what is larger than it should be.
        """
        scores = np.array(self._scores[name])
        z = float(scores.sum() / np.sqrt(scores.size))
        p_value = special.ndtr(-z) if only_above else 2 * special.ndtr(-abs(z))
        return self._check(name, float(p_value))

    def steadiness(self, name: str) -> Check:
        """Whether a number varies from step to step as much as it should."""
        # How far out each step is, in either direction, put together as Fisher does.
        extreme: Floats = 2 * special.ndtr(-np.abs(np.array(self._scores[name])))
        far, freedom = -2 * float(np.log(extreme).sum()), 2 * extreme.size
        p_value = 2 * min(special.chdtr(freedom, far), special.chdtrc(freedom, far))
        deviation = np.array(self._seen[name])[:, 0].std()
        share = float(np.mean(extreme < 0.5))
        return Check(
            f"{name}, from step to step",
            min(1.0, float(p_value)),
            f"deviation {deviation:.4g}, {100 * share:.0f}% of steps farther out than most",
            "50% of steps",
        )

    def _check(self, name: str, p_value: float) -> Check:
        observed, expected = np.array(self._seen[name], dtype=np.float64).mean(axis=0)
        return Check(name, p_value, f"{observed:.5g}", f"about {expected:.5g}")
