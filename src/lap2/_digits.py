"""Numbers as text that says no less than they do: six digits, rounded outwards, in decimal."""

import math
from decimal import ROUND_CEILING, ROUND_FLOOR, Context, Decimal

_DIGITS = 6


def rounded_up(value: float) -> str:
    """The least decimal of six significant digits that is not below the number itself.

    >>> rounded_up(1.9664600001), rounded_up(2.0), rounded_up(5e-324)
    ('1.96647', '2', '4.94066e-324')
    """
    return _rounded(value, ROUND_CEILING)


def rounded_down(value: float) -> str:
    """The largest decimal of six significant digits that is not above the number itself."""
    return _rounded(value, ROUND_FLOOR)


def as_given(value: float) -> str:
    """The shortest decimal that is read as this number: for what a user gave, every digit of it.

    >>> as_given(1e-5), as_given(10.0), as_given(1 / 60_000)
    ('1e-05', '10', '1.6666666666666667e-05')
    """
    return _general(Decimal(repr(float(value)))) if math.isfinite(value) else f"{value:g}"


def _rounded(value: float, direction: str) -> str:
    if not math.isfinite(value):
        return f"{value:g}"
    # The exact value of a float has up to 767 digits, all of which take part.
    return _general(Context(prec=_DIGITS, rounding=direction).create_decimal(Decimal(value)))


def _general(number: Decimal) -> str:
    """As the format "g" writes numbers, but without passing through a float."""
    exponent = number.adjusted()
    if not number or -5 < exponent < _DIGITS:
        return f"{number.normalize():f}"
    return f"{number.scaleb(-exponent).normalize():f}e{exponent:+03d}"
