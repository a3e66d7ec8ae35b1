"""When the sensitivity pass looks at what it has, and may stop.

The first look is after 4096 rows, and each next one when the rows have grown by half: a verdict that is
within reach is found after at most half again the rows it needs, and a million rows take fifteen looks. The
intervals that verdicts are made of hold at every number of rows at once (`RatioMoments.anytime_interval`), so
that looking often costs width once, not once a look. They are tightest at 16384 rows, which is fixed here:
it must not depend on what is seen, or on how many rows there are to stop at.

Data that end before the first look have one look at a fixed number of rows, and so has a pass that nobody
stops. In which order rows are taken is `calibration.passes.row_order`.
"""

from __future__ import annotations

FIRST_LOOK_ROWS = 4096
GROWTH = 1.5
TIGHTEST_AT_ROWS = 16384


class Looks:
    """Numbers of rows that are looked at.

    Args:
        limit: Most rows; there is a look when they are reached.
        may_stop: Whether there are looks before.

    Attributes:
        taken: Looks so far.
        may_stop_early: Whether a look before the last may come.
    """

    def __init__(self, limit: int, may_stop: bool) -> None:
        self.limit, self.taken = limit, 0
        self.may_stop_early = may_stop and limit > FIRST_LOOK_ROWS
        self._next = FIRST_LOOK_ROWS if self.may_stop_early else limit

    def is_due(self, done: int) -> bool:
        """Whether so many rows are to be looked at."""
        return done >= min(self._next, self.limit)

    def take(self, done: int) -> None:
        """A look was taken at so many rows."""
        self.taken += 1
        while self._next <= done:
            self._next = max(int(self._next * GROWTH), self._next + 1)
