"""What a target promises, in words, where its numbers promise less than they seem to.

An (epsilon, delta) can be proven and still protect nobody. Nothing here refuses one: it says what
an attacker could still do.
"""

import math
from typing import Any

from lap2 import _validate
from lap2._digits import as_given

__all__ = ["caveats_of_target"]

_LARGE_DELTA = 1e-3
"""Without the number of records: at or above 1/N for each data set of 1,000 records or more, and
private training of fewer is a special case whose number of records should be given."""
_LARGE_EPSILON = 10.0


def caveats_of_target(
    epsilon: float, delta: float, *, records: Any | None = None
) -> tuple[str, ...]:
    """Sentences to print beside (epsilon, delta); none if nothing speaks against it.

    Args:
        epsilon: at least 0, infinity allowed.
        delta: in [0, 1].
        records: how many records the data set has, if that is known.

    >>> caveats_of_target(1.0, 1e-5, records=60_000)
    ()
    >>> print(*caveats_of_target(1.0, 0.01, records=60_000))
    delta = 0.01 is at or above 1/60000: publishing each record with probability delta, one whole \
record or more on average, meets it too
    """
    epsilon = _validate.real("epsilon", epsilon, "a number at least 0")
    if not epsilon >= 0:
        raise ValueError(f"epsilon must be a number at least 0, got {epsilon!r}")
    delta = _validate.probability("delta", delta)
    return (*_of_delta(delta, records), *_of_epsilon(epsilon))


def _of_delta(delta: float, records: Any | None) -> tuple[str, ...]:
    if records is not None:
        size = _validate.integer("records", records, least=1)
        if delta < 1 / size:
            return ()
        return (
            f"delta = {as_given(delta)} is at or above 1/{size}: publishing each record with "
            "probability delta, one whole record or more on average, meets it too",
        )
    if delta < _LARGE_DELTA:
        return ()
    return (
        f"delta = {as_given(delta)} is large: publishing each record with probability delta meets "
        "it too, and it should be far below 1 over the number of records",
    )


def _of_epsilon(epsilon: float) -> tuple[str, ...]:
    if epsilon == math.inf:
        return ("epsilon is infinite: nothing is promised",)
    if epsilon <= _LARGE_EPSILON:
        return ()
    return (
        f"epsilon = {epsilon:.4g} is large: an attacker's odds that a given record was in the data "
        f"may grow by a factor of 10^{epsilon / math.log(10):.1f}, from a coin toss to certainty "
        "but for one part in that",
    )
