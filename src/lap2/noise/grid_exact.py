"""Noise in grid steps with as many bits as it takes: what float64 cannot decide.

All is exact: a floor is given only if it is the same for all continuations of the bits so far.
"""

import math
from collections.abc import Callable, Sequence
from decimal import Context, Decimal, localcontext
from functools import lru_cache

__all__ = ["gaussian_floor", "gaussian_steps", "laplace_floor", "laplace_steps"]

More = Callable[[], int]
"""The next 64 bits that belong to a draw."""
_U = (1 << 63) - 1


def laplace_steps(words: Sequence[int], _which: int, more: More, ratio: float) -> float:
    """The Laplace noise of a word and the bits that follow it: ``floor(X / g) + 1/2``."""
    u, bits, magnitude = words[0] & _U, 63, None
    while magnitude is None:
        u = (u << 64) | more()
        bits += 64
        magnitude = laplace_floor(u, bits, ratio)
    return _signed(magnitude, words[0])


def gaussian_steps(words: Sequence[int], which: int, more: More, ratio: float) -> float:
    """The normal noise of two words and the bits that follow, in turns: one of the two."""
    u, v, bits, magnitude = words[0] & _U, words[1] & _U, 63, None
    while magnitude is None:
        u, v = (u << 64) | more(), (v << 64) | more()
        bits += 64
        magnitude = gaussian_floor(u, v, bits, ratio, which)
    return _signed(magnitude, words[which])


def _signed(magnitude: int, word: int) -> float:
    return -(magnitude + 0.5) if word >> 63 else magnitude + 0.5


def laplace_floor(u: int, bits: int, ratio: float) -> int | None:
    """``floor(-ln(U) ratio)`` for all U in ``[u, u + 1) / 2^bits``.

    None if that is not one number, or is too close to call with digits in proportion to the bits.
    """
    if u == 0:
        return None
    with localcontext(Context(prec=bits // 4)):
        log, slack = _minus_log(u, bits)
        low, high = (math.floor(end * Decimal(ratio)) for end in (log - slack, log + slack))
    return high if high == max(low, 0) else None  # the logarithm of U < 1 is negative


def gaussian_floor(u: int, v: int, bits: int, ratio: float, which: int) -> int | None:
    """``floor(sqrt(-ln U) (cos t -+ sin t) ratio)``, ``t = pi/2 (V - 1/2)``; plus if ``which``.

    For all U in ``[u, u + 1) / 2^bits`` and V likewise, or None as :func:`laplace_floor`.
    """
    if u == 0:
        return None
    digits = bits // 4
    with localcontext(Context(prec=digits)):
        unit = Decimal(10) ** (1 - digits)
        log, slack = _minus_log(u, bits)
        t = _pi(digits) * (2 * v - (1 << bits)) / (1 << (bits + 2))
        total, term, n = Decimal(0), Decimal(1), 0
        positive = (0, 1) if which else (0, 3)
        while abs(term) > unit:  # |t| < 0.8: what is cut off is less than two units
            total += term if n % 4 in positive else -term
            n += 1
            term *= t / n
        # t errs by less than 5 units, with the bits of V that follow; the n-th term by n units of
        # its own size; each sum, of which there are fewer than digits, by one. The products below
        # err by less than 5 units of their size together.
        error = (100 + digits) * unit
        low = max(log - slack, Decimal(0)).sqrt() * (total - error) * Decimal(ratio)
        high = (log + slack).sqrt() * (total + error) * Decimal(ratio)
        floor = math.floor(high)
        return floor if floor == max(math.floor(low), 0) else None  # a magnitude is not negative


def _minus_log(u: int, bits: int) -> tuple[Decimal, Decimal]:
    """``-ln(U)`` in the current precision, and by how much it may err for U in ``[u, u + 1)``.

    The quotient, its logarithm, and two more sums and products err by less than ten units in the
    last place of the logarithm; the bits of U that follow take away 1/u at most.
    """
    log = -(Decimal(u) / (1 << bits)).ln()
    unit = Decimal(10) ** (max(log.adjusted(), 0) + 1 - bits // 4)
    return log, 100 * unit + 1 / Decimal(u)


@lru_cache(maxsize=8)
def _pi(digits: int) -> Decimal:
    """Pi in the current precision of so many digits (Machin's formula)."""
    one = 10 ** (digits + 10)

    def arccot(x: int) -> int:
        total, term, n = 0, one // x, 0
        while term:
            total += (-1) ** n * (term // (2 * n + 1))
            n += 1
            term //= x * x
        return total

    return Decimal(4 * (4 * arccot(5) - arccot(239))) / one
