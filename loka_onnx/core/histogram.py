"""A histogram of magnitudes whose bins are the same for every tensor, so that it merges exactly.

The bins are those of FP32's own bits: the exponent and the first three bits of the significand of |x|. An
octave [2**e, 2**(e+1)) has eight bins of equal width 2**(e−3), so that a bin's upper edge is at most 9/8 of
its lower one. No range is fixed beforehand: only the bins between the first and the last that hold something
are kept.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from math import ldexp

BINS_PER_OCTAVE = 8
BINS = 2048
"""Eight bits of exponent, three of significand. Bin 0 (|x| < 2**-129) counts as zero."""
RELATIVE_BIN_WIDTH = 1.0 / BINS_PER_OCTAVE
"""Width of a bin over its lower edge, at most; FP32's subnormals excepted."""


def bin_edge(index: int) -> float:
    """Lower edge of a bin, and upper edge of the one before it."""
    octave, part = divmod(index, BINS_PER_OCTAVE)
    return ldexp(part, -129) if octave == 0 else ldexp(BINS_PER_OCTAVE + part, octave - 130)


@dataclass(frozen=True)
class MagnitudeHistogram:
    """How many elements have which magnitude; merges exactly.

    Attributes:
        zeros: Elements that are zero.
        first: Index of the first bin that holds something; 0 where none does.
        counts: Elements of that bin and the following ones, up to the last that holds something.
    """

    zeros: int = 0
    first: int = 0
    counts: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        # One form for equal histograms, so that equality and the JSON text tell them apart.
        if (self.counts and 0 in (self.counts[0], self.counts[-1])) or (not self.counts and self.first):
            raise ValueError("the counts of a histogram begin and end with a bin that holds something")
        if self.zeros < 0 or min(self.counts, default=0) < 0:
            raise ValueError("a histogram counts elements: no count is negative")
        if self.counts and not 0 < self.first <= BINS - len(self.counts):
            raise ValueError(f"bins are numbered 1 to {BINS - 1}")

    @property
    def total(self) -> int:
        """Elements counted, zeros included."""
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
        """Magnitude that a share of the elements does not exceed, zeros included.

        Counts are taken as evenly spread in a bin. The quantile of the counted elements lies in the same bin,
        so that the result is off by less than `RELATIVE_BIN_WIDTH` of it.

        Args:
            share: Between 0 and 1.

        Raises:
            ValueError: The share is not between 0 and 1, or nothing was counted.
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

    def share_below(self, bound: float) -> float:
        """Share of the elements that are not zero and smaller than a bound, zeros counted in the whole.

        Off by at most the share of the one bin that the bound divides; 0 where nothing was counted.
        """
        edges, found = self.edges, 0.0
        for index, count in enumerate(self.counts):
            low, high = edges[index], edges[index + 1]
            found += count * min(max((bound - low) / (high - low), 0.0), 1.0)
        return found / self.total if self.total else 0.0


NOTHING_COUNTED = MagnitudeHistogram()
