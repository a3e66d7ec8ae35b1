"""Histogram of magnitudes with the same bins for every tensor, so that it merges exactly.

The bins follow FP32's bits: the exponent and the first three bits of the significand of |x|. An octave [2**e,
2**(e+1)) has eight bins of width 2**(e−3), so that a bin's upper edge is at most 9/8 of its lower one. Only
the bins between the first and the last nonempty one are kept.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from math import ldexp

BINS_PER_OCTAVE = 8
BINS = 2048
"""Eight bits of exponent, three of significand. Bin 0 (|x| < 2**-129) counts as zero."""
RELATIVE_BIN_WIDTH = 1.0 / BINS_PER_OCTAVE
"""Largest width of a bin over its lower edge; FP32's subnormals excepted."""


def bin_edge(index: int) -> float:
    """Return the lower edge of a bin, the upper edge of the one before."""
    octave, part = divmod(index, BINS_PER_OCTAVE)
    return ldexp(part, -129) if octave == 0 else ldexp(BINS_PER_OCTAVE + part, octave - 130)


@dataclass(frozen=True)
class MagnitudeHistogram:
    """Counts of elements by magnitude; merges exactly.

    Attributes:
        first: Index of the first nonempty bin; 0 where there is none.
        counts: Elements of that bin and the following ones, up to the last nonempty one.
    """

    zeros: int = 0
    first: int = 0
    counts: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        # One form for equal histograms makes them compare and serialize equal.
        if (self.counts and 0 in (self.counts[0], self.counts[-1])) or (not self.counts and self.first):
            raise ValueError("the counts of a histogram begin and end with a bin that holds something")
        if self.zeros < 0 or min(self.counts, default=0) < 0:
            raise ValueError("a histogram counts elements: no count is negative")
        if self.counts and not 0 < self.first <= BINS - len(self.counts):
            raise ValueError(f"bins are numbered 1 to {BINS - 1}")

    @property
    def total(self) -> int:
        """Counted elements, zeros included."""
        return self.zeros + sum(self.counts)

    @property
    def edges(self) -> tuple[float, ...]:
        """Edges of the kept bins, one more than there are bins."""
        return tuple(bin_edge(self.first + i) for i in range(len(self.counts) + 1))

    def merge(self, other: MagnitudeHistogram) -> MagnitudeHistogram:
        """Counts of both together."""
        parts = [part for part in (self, other) if part.counts]
        first = min((part.first for part in parts), default=0)
        counts = [0] * (max((part.first + len(part.counts) for part in parts), default=0) - first)
        for part in parts:
            for index, count in enumerate(part.counts, part.first - first):
                counts[index] += count
        return MagnitudeHistogram(self.zeros + other.zeros, first, tuple(counts))

    def quantile(self, share: float) -> float:
        """Return the magnitude that a share of the elements does not exceed, zeros included.

        Counts are taken as evenly spread in a bin, so the error is less than `RELATIVE_BIN_WIDTH` of the
        result.

        Raises ValueError if the share is not between 0 and 1, or the histogram is empty.
        """
        if not 0.0 <= share <= 1.0 or not self.total:
            raise ValueError(f"no quantile {share:g} of {self.total} elements")
        wanted = share * self.total - self.zeros
        if not self.counts or (self.zeros and wanted <= 0.0):
            return 0.0
        edges = self.edges
        for index, after in enumerate(accumulate(self.counts)):
            count = self.counts[index]
            if count and after >= wanted:
                part = 1.0 - (after - wanted) / count
                return edges[index] + part * (edges[index + 1] - edges[index])
        return edges[-1]


NOTHING_COUNTED = MagnitudeHistogram()
