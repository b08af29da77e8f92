"""One validator per kind of argument.

Every validator returns the value in the type the library computes with, or raises an
error that names the argument, the rule and the value. Rules are tested positively
(``if not rule``), so that NaN never passes.

Within these ranges answers are upper bounds, however far apart the arguments are: any noise
multiplier (more than 1e100 counts as 1e100), dimensions below 2^63 or infinite, any sampling
probability, up to 2^53 steps in an entry, any delta strictly between 0 and 1.
"""

import math
import operator
from numbers import Real
from typing import Any

_TOO_MANY = 2**63


def _shown(value: Any) -> str:
    """The value; of an integer with hundreds of digits, how long it is."""
    if isinstance(value, int) and value.bit_length() > 1000:
        return f"an integer of {value.bit_length()} bits"
    return repr(value)


def real(name: str, value: Any, rule: str) -> float:
    """Return ``value`` as a float; ``rule`` completes the message of the TypeError."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} must be {rule}, got {value!r} of type {type(value).__name__}")
    try:
        return float(value)
    except OverflowError:
        raise ValueError(f"{name} must be {rule}, got one too large for a float") from None


def non_negative(name: str, value: Any) -> float:
    """A finite number at least 0."""
    rule = "a finite number at least 0"
    number = real(name, value, rule)
    if not 0 <= number < math.inf:
        raise ValueError(f"{name} must be {rule}, got {value!r}")
    return number


def positive(name: str, value: Any) -> float:
    """A finite number above 0."""
    rule = "a finite number above 0"
    number = real(name, value, rule)
    if not 0 < number < math.inf:
        raise ValueError(f"{name} must be {rule}, got {value!r}")
    return number


def probability(name: str, value: Any) -> float:
    """A number in [0, 1]."""
    rule = "a probability in [0, 1]"
    number = real(name, value, rule)
    if not 0 <= number <= 1:
        raise ValueError(f"{name} must be {rule}, got {value!r}")
    return number


def open_probability(name: str, value: Any) -> float:
    """A number strictly between 0 and 1, as delta must be."""
    rule = "strictly between 0 and 1"
    number = real(name, value, rule)
    if not 0 < number < 1:
        raise ValueError(f"{name} must be {rule}, got {value!r}")
    return number


def integer(name: str, value: Any, *, least: int) -> int:
    """An integer (Python's or NumPy's, not a bool) at least ``least``."""
    rule = f"an integer at least {least}"
    if isinstance(value, bool):
        raise TypeError(f"{name} must be {rule}, got {value!r} of type bool")
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(
            f"{name} must be {rule}, got {value!r} of type {type(value).__name__}"
        ) from None
    if not number >= least:
        raise ValueError(f"{name} must be {rule}, got {_shown(value)}")
    return number


def dimension(name: str, value: Any) -> int | float:
    """A number of coordinates: an integer at least 1, or ``math.inf``."""
    if isinstance(value, Real) and value == math.inf:
        return math.inf
    return finite_dimension(name, value, rule="an integer at least 1 and below 2^63, or math.inf")


def finite_dimension(
    name: str, value: Any, *, rule: str = "an integer at least 1 and below 2^63"
) -> int:
    """A finite number of coordinates; more than 2^63 would underflow somewhere."""
    try:
        number = integer(name, value, least=1)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{name} must be {rule}, got {_shown(value)}") from None
    if not number < _TOO_MANY:
        raise ValueError(f"{name} must be {rule}, got {_shown(value)}")
    return number


def choice(name: str, value: Any, options: tuple[str, ...]) -> str:
    """One of a closed set of words."""
    if value not in options:
        raise ValueError(f"{name} must be one of {', '.join(options)}; got {value!r}")
    return value
