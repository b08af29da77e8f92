"""What is said of a target that promises little."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lap2.sense import caveats_of_target


@given(
    records=st.integers(2, 10**12),
    epsilon=st.floats(0, 10),
    times=st.floats(1e-6, 1e6),
)
def test_delta_is_named_exactly_from_one_over_the_number_of_records(records, epsilon, times):
    delta = min(1.0, times / records)
    said = caveats_of_target(epsilon, delta, records=records)
    assert len(said) == (delta >= 1 / records)
    assert all(f"1/{records}" in caveat for caveat in said)
    assert caveats_of_target(epsilon, 1 / records, records=records)
    assert not caveats_of_target(epsilon, math.nextafter(1 / records, 0), records=records)


def test_without_a_number_of_records_a_thousand_of_them_are_assumed():
    assert caveats_of_target(1.0, 1e-3)
    assert not caveats_of_target(1.0, math.nextafter(1e-3, 0))
    assert not caveats_of_target(1.0, 0.0)


def test_large_and_infinite_epsilon_are_said_in_odds():
    assert not caveats_of_target(10, 1e-5)
    (large,) = caveats_of_target(math.nextafter(10, 11), 1e-5)
    assert "10^4.3" in large
    (huge,) = caveats_of_target(1e308, 1e-5)
    assert "nothing" not in huge
    assert caveats_of_target(math.inf, 0.0) == ("epsilon is infinite: nothing is promised",)
    assert len(caveats_of_target(11, 0.5, records=5)) == 2


@pytest.mark.parametrize(
    ("arguments", "rule"),
    [
        ({"epsilon": -1.0, "delta": 0.1}, "epsilon must be a number at least 0, got -1"),
        ({"epsilon": math.nan, "delta": 0.1}, "epsilon must be a number at least 0, got nan"),
        ({"epsilon": 1.0, "delta": 1.1}, "delta must be a probability"),
        ({"epsilon": 1.0, "delta": 0.1, "records": 0}, "records must be an integer at least 1"),
    ],
)
def test_what_is_no_target_is_refused(arguments, rule):
    with pytest.raises(ValueError, match=rule):
        caveats_of_target(**arguments)
