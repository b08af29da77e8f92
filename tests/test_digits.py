"""Numbers as text: outwards everywhere, and no further than the last digit."""

import math
from fractions import Fraction

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from lap2._digits import as_given, rounded_down, rounded_up

floats = st.floats(allow_nan=False, allow_infinity=False)
edges = [5e-324, 1e-323, 2.1e-320, 1e-312, 2.2250738585072014e-308, 9.999995e151, 1.8e-5]
edges += [9.999999999999999e151, 1.7976931348623157e308, 0.1, 1e22, 1e23, 123456.5, 999999.5, 0.0]


def on_edges(test):
    for edge in edges:
        test = example(edge)(example(-edge)(test))
    return test


@given(floats)
@on_edges
def test_printed_numbers_are_on_the_right_side_and_within_a_digit(value):
    up, down = Fraction(rounded_up(value)), Fraction(rounded_down(value))
    assert down <= Fraction(value) <= up
    assert up - down <= abs(Fraction(value)) / 10**5
    assert (up == down) == (Fraction(value) == up)
    assert float(rounded_down(value)) <= value <= float(rounded_up(value))


@given(floats)
@on_edges
def test_six_digits_in_the_usual_notation(value):
    for text in (rounded_up(value), rounded_down(value)):
        if value == 0 or 1e-300 < abs(value) < 1e300:
            assert text == f"{float(text):.6g}"
        assert len(text.lstrip("-").partition("e")[0].replace(".", "").strip("0")) <= 6


@given(floats)
@on_edges
def test_what_was_given_is_read_back_as_the_same_number(value):
    assert float(as_given(value)) == value


@pytest.mark.parametrize("text", [rounded_up, rounded_down, as_given])
def test_infinity_and_nan_have_names(text):
    assert [text(v) for v in (math.inf, -math.inf, math.nan, 0.0)] == ["inf", "-inf", "nan", "0"]
