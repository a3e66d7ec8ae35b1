import pytest
from hypothesis import given
from hypothesis import strategies as st

from loka_onnx.core.intervals import Interval
from loka_onnx.report import numbers


def between(lower: float, value: float, upper: float) -> Interval:
    return Interval(value, lower, upper, 0.95, 1000)


@pytest.mark.parametrize(
    ("interval", "text"),
    [
        (between(-0.00001, 0.00012, 0.00025), "+0.012 % [-0.001 %, +0.025 %]"),
        (between(0.01, 0.02, 0.03), "+2.00 % [+1.00 %, +3.00 %]"),
        (between(1.1e-7, 1.2e-7, 1.3e-7), "+0.0000120 % [+0.0000110 %, +0.0000130 %]"),
        (between(0, 0, 0), "0 % [0 %, 0 %]"),
        (between(-1e-3, -1e-9, 1e-3), "0 % [-0.10 %, +0.10 %]"),
        (between(float("-inf"), 0, float("inf")), "0 % [-inf, inf]"),
    ],
)
def test_a_relative_change_shows_its_sign_and_the_digits_of_its_interval(interval, text):
    assert numbers.percent_interval(interval) == text


@pytest.mark.parametrize("upper", [0.00020001, 0.00019999])
def test_rounding_never_lays_an_end_on_the_budget(upper):
    text = numbers.percent_interval(between(-0.001, 0.0001, upper), budget=0.0002)
    shown = float(text.split(", ")[1].removesuffix(" %]"))
    assert (shown > 0.02) == (upper > 0.0002)
    assert shown != 0.02


def test_a_budget_that_is_no_short_decimal_takes_no_more_digits_than_another():
    interval = between(0.0003, 0.0008, 0.0013102576)
    for budget in (None, 0.0002, 0.002 / 3, 0.0004 / 7):
        assert numbers.percent_interval(interval, budget) == "+0.080 % [+0.030 %, +0.131 %]"
    # The upper end lies just beyond: as many digits as tell it from the budget, and no more.
    near = between(0.0003, 0.0005, 0.002 / 3 + 4e-8)
    assert numbers.percent_interval(near, 0.002 / 3) == "+0.050 % [+0.030 %, +0.067 %]"
    near = between(0.0003, 0.0005, 0.002 / 3 - 4e-8)
    assert numbers.percent_interval(near, 0.002 / 3) == "+0.05000 % [+0.03000 %, +0.06666 %]"


@given(
    value=st.floats(-0.01, 0.01),
    half=st.floats(1e-6, 0.01),
    budget=st.sampled_from([0.0002, 0.0005, 0.001, 0.002 / 3, 0.0004 / 7]),
)
def test_what_is_read_off_an_interval_is_the_verdict(value, half, budget):
    interval = between(value - half, value, value + half)
    text = numbers.percent_interval(interval, budget)
    lower, upper = (float(part.strip(" %]")) for part in text.split("[")[1].split(","))
    for shown, exact in ((lower, interval.lower), (upper, interval.upper)):
        # Two digits of the half-width, but nothing far below a hundredth of the budget.
        assert abs(shown - 100 * exact) <= max(0.05 * 100 * half, 0.005 * 100 * budget) + 1e-8
        # Eight decimals are the most that is shown: an end nearer than that may look to be on the budget.
        if abs(exact - budget) > 1e-9:
            assert (shown > 100 * budget) == (exact > budget)


@given(
    value=st.floats(-0.01, 0.01),
    half=st.floats(1e-8, 0.01),
    budget=st.sampled_from([0.0002, 0.001, 0.002 / 3]),
)
def test_what_is_read_off_a_symmetric_interval_is_the_verdict(value, half, budget):
    interval = between(value - half, value, value + half)
    shown, _, width = numbers.plus_minus(interval, budget).partition(" ± ")
    upper = sum(float(part.strip(" %")) for part in (shown, width) if part)
    if abs(interval.upper - budget) > 1e-8:
        assert (upper > 100 * budget + 1e-12) == (interval.upper > budget)


def test_a_change_far_below_the_budget_is_0():
    exact = between(-1.3e-9, 4e-10, 2.1e-9)
    assert numbers.plus_minus(exact, 0.0002) == "0 %"
    assert numbers.percent_interval(exact, 0.0002) == "0 % [0 %, 0 %]"
    assert not numbers.is_symmetric(between(0.0, 1e-5, 4e-5))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (numbers.budget_percent(0.0002), "0.02 %"),
        (numbers.budget_percent(0.00025), "0.025 %"),
        (numbers.share(0.6324), "63.2 %"),
        (numbers.error_percent(0.0231), "2.31 %"),
        (numbers.metric(0.812345), "0.81234"),
        (numbers.size(999), "999 B"),
        (numbers.size(1 << 20), "1.0 MiB"),
        (numbers.size(5 << 30), "5.00 GiB"),
        (numbers.latency(123.44), "123.4 µs"),
        (numbers.latency(12_345.0), "12.35 ms"),
        (numbers.seconds(0.0123), "12.3 ms"),
        (numbers.count(1234567), "1,234,567"),
    ],
)
def test_units(text, expected):
    assert text == expected
