"""How long a task will still take, from the pace that it keeps."""

from __future__ import annotations

from collections import deque

WINDOW_SECONDS = 30.0
"""The pace is that of the last so many seconds: a task may slow down."""
FEWEST_MARKS = 4
"""Reports that the pace rests on where they come more rarely than the window is long."""
LEAST_SECONDS = 1.0
"""A pace of less than this is noise of the first batch."""


class Pace:
    """The reports of one task.

    Args:
        now: When it began, seconds of a monotonic clock.
        done: Units done at that moment.
        total: Units of the whole; 0 where nobody knows.
    """

    def __init__(self, now: float, done: int, total: int) -> None:
        self.total = total
        self._marks = deque([(now, done)])

    @property
    def done(self) -> int:
        """Units that are done."""
        return self._marks[-1][1]

    def note(self, now: float, done: int) -> None:
        """`done` units are finished."""
        if done <= self.done:
            return
        self._marks.append((now, done))
        while len(self._marks) > FEWEST_MARKS and now - self._marks[1][0] > WINDOW_SECONDS:
            self._marks.popleft()

    def seconds_left(self, now: float) -> float | None:
        """Seconds until the end at this pace; None until it can be known, and once the end is overdue.

        Between two reports the time runs down. It stops where the next report is late: what is done by now
        is at most one step more, and the pace no better than that.
        """
        (began, first), (spoke, done) = self._marks[0], self._marks[-1]
        if done == first or spoke - began < LEAST_SECONDS:
            return None
        step = done - self._marks[-2][1]
        at_pace = (self.total - done) * (spoke - began) / (done - first) - (now - spoke)
        at_best = max(0, self.total - done - step) * (now - began) / (done + step - first)
        left = max(at_pace, at_best)
        return left if left > 0.0 else None


def clock(seconds: float | None) -> str:
    """A time as a clock shows it, ``0:07``, ``12:34``, ``1:02:03``; a dash where it is not known."""
    if seconds is None:
        return "–"
    minutes, rest = divmod(int(seconds + 0.5), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
