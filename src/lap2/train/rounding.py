"""What rounding may do to a clipped sum: the constants of the proof (docs/theory.md, section 12).

Factors and sums are in float64, whatever the model is in. Each gradient is scaled so that its exact
norm is at most the clip, and so that the terms it is a sum of are together not much longer; then a
computed sum is within ``SHARE`` clips of the exact one. Two neighbouring sums are therefore at most
``C (1 + rho)`` apart, and that is what is accounted.
"""

__all__ = ["HALF", "RATIO", "SHARE", "SHRINK", "UNIT", "rho", "sum_error"]

SHRINK = 1 - 2.0**-20
"""Clipping aims this far below the clip. A norm of ``2^29`` numbers, taken in float64 in any order,
is wrong by less than ``2^-23`` of it, and so is the factor made from it."""

SHARE = 2.0**-12
"""Of the clip: how far a sum that was computed may be from the exact one, at most."""

HALF = 1e-5
"""Relative rounding error: more than that of float32, and less than that of half precision."""

_TURN = 1024
"""Units in the last place by which the change of basis may miss, in proportion to the sum. It adds
up numbers in at most three rounds of 32, each of which loses at most ``32 sqrt(32)`` units."""


RATIO = 128.0
"""The terms that one example's gradient is a sum of are together at most this many clips long; more
only where they cancel nearly all of each other. A constant, because what a record contributes must
not depend on how many others there are."""

UNIT = 2.0**-53
"""The relative error of one rounding in float64."""


def sum_error(*, size: int, terms: int, total: int, processes: int) -> float:
    """How far the computed sum of a batch may be from the exact one, in clips.

    A sum of vectors, in any order and with or without fused multiplications, errs by at most a unit
    for each addition in it, times the sum of the vectors' lengths.

    Args:
        size: examples in a piece of the batch.
        terms: of each example.
        total: examples in the whole batch of this process; it has at most as many pieces, each of
            which may be added to the sum term by term.
        processes: that share the batch.
    """
    return processes * UNIT * total * (terms * (size * RATIO + total) + 64 * RATIO)


def rho(*, records: int, processes: int) -> float:
    """By which share of the clip one record may move the sum further than the clip.

    Both neighbouring sums may err by :data:`SHARE`; adding up the sums of all processes and
    changing the basis err in proportion to the sum, which is at most ``records`` clips long.
    """
    return 2 * (SHARE + records * (_TURN + processes) * UNIT)
