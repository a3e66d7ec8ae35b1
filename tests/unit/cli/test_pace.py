"""The time left: known when it can be, never past, never more precise than the reports."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loka_onnx.cli.pace import LEAST_SECONDS, WINDOW_SECONDS, Pace, clock


def paced(total: int, *marks: tuple[float, int]) -> Pace:
    (now, done), *others = marks
    pace = Pace(now, done, total)
    for now, done in others:
        pace.note(now, done)
    return pace


def test_nothing_is_known_at_first() -> None:
    assert paced(100, (0.0, 0)).seconds_left(50.0) is None
    assert paced(100, (0.0, 10)).seconds_left(50.0) is None, "what was done before says nothing of the pace"
    soon = LEAST_SECONDS / 2
    assert paced(100, (0.0, 0), (soon, 10)).seconds_left(soon) is None


def test_a_steady_task() -> None:
    pace = paced(100, (5.0, 0), (15.0, 20))
    assert pace.seconds_left(15.0) == pytest.approx(40.0)
    assert pace.seconds_left(18.0) == pytest.approx(37.0), "it runs down between reports"


def test_a_late_report_holds_the_time_up() -> None:
    pace = paced(4, (0.0, 0), (10.0, 1))
    # By the pace 30 s were left at 10 s. At 100 s at most one more is done: two more at 50 s each.
    assert pace.seconds_left(10.0) == pytest.approx(30.0)
    assert pace.seconds_left(100.0) == pytest.approx(100.0)


def test_an_overdue_end_is_not_known() -> None:
    pace = paced(2, (0.0, 0), (10.0, 1))
    assert pace.seconds_left(19.0) == pytest.approx(1.0)
    assert pace.seconds_left(25.0) is None
    assert paced(2, (0.0, 0), (10.0, 2)).seconds_left(11.0) is None, "it is done"


def test_the_pace_is_that_of_now() -> None:
    fast = [(float(second), 100 * second) for second in range(60)]
    slow = [(60.0 + second, 5900 + second) for second in range(1, int(WINDOW_SECONDS) + 2)]
    now, done = slow[-1]
    left = paced(done + 100, *fast, *slow).seconds_left(now)
    assert left == pytest.approx(100.0, rel=0.05), "one a second, whatever it was before"


def test_rare_reports_are_not_forgotten() -> None:
    hourly = [(3600.0 * hour, hour) for hour in range(6)]
    assert paced(10, *hourly).seconds_left(5 * 3600.0) == pytest.approx(5 * 3600.0)


@given(
    steps=st.lists(st.tuples(st.floats(0.01, 100.0), st.integers(0, 50)), min_size=1, max_size=30),
    wait=st.floats(0.0, 1000.0),
    more=st.integers(0, 100),
)
def test_it_is_never_past_and_never_less_than_what_is_certain(
    steps: list[tuple[float, int]], wait: float, more: int
) -> None:
    now, done, total = 0.0, 0, sum(step for _, step in steps) + more
    pace = Pace(0.0, 0, total)
    for seconds, step in steps:
        now, done = now + seconds, done + step
        pace.note(now, done)
    left = pace.seconds_left(now + wait)
    assert left is None or left > 0.0
    later = pace.seconds_left(now + wait + 1e-3)
    assert left is None or later is None or later > left - 2e-3, "it does not fall faster than the clock runs"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(None, "–"), (0.2, "0:00"), (59.4, "0:59"), (59.6, "1:00"), (3599.6, "1:00:00"), (36_000.0, "10:00:00")],
)
def test_clocks(seconds: float | None, text: str) -> None:
    assert clock(seconds) == text
