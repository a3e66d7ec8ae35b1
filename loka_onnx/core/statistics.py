"""Calibration statistics of tensors and sites, as sums that merge exactly."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import accumulate
from math import inf, ldexp, log10, sqrt
from typing import ClassVar

from loka_onnx.core.exact_sum import NOTHING_ADDED, ExactSum, Rules, Sums, least

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
    """Counts of elements by magnitude, with the same bins for every tensor; merges exactly.

    Bins are the exponent and the first three bits of the significand of |x| in FP32: an octave [2**e,
    2**(e+1)) has eight, each 2**(e−3) wide. `counts` begin at bin `first`; the first and last are not 0.
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

        Counts are taken as evenly spread in a bin: the error is less than `RELATIVE_BIN_WIDTH` of the result.
        ValueError if the share is not between 0 and 1, or the histogram is empty.
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


@dataclass(frozen=True)
class BatchSums(Sums):
    """Sums of one statistic over batches, and of its squares."""

    total: ExactSum = NOTHING_ADDED
    squares: ExactSum = NOTHING_ADDED


@dataclass(frozen=True)
class BatchSpread:
    """Spread of one tensor over full batches of `rows`, the reference for changes; merges exactly.

    Elements of a tensor are correlated (an item, a user, a feature), so their number overstates the certainty
    of a mean: batches are the unit. A statistic missing by name was 0 in every batch.
    """

    batches: int = 0
    rows: int = 0
    statistics: dict[str, BatchSums] = field(default_factory=dict)

    def merge(self, other: BatchSpread) -> BatchSpread:
        """Merge both sets of batches. Raises ValueError if their batches are of different sizes."""
        if self.batches and other.batches and self.rows != other.rows:
            raise ValueError("statistics of batches of different sizes do not merge")
        names = sorted({*self.statistics, *other.statistics})
        nothing = BatchSums()
        return BatchSpread(
            self.batches + other.batches,
            max(self.rows, other.rows),
            {n: self.statistics.get(n, nothing).merge(other.statistics.get(n, nothing)) for n in names},
        )


NO_BATCHES = BatchSpread()


def _merged_channels(ours: tuple[float, ...], theirs: tuple[float, ...]) -> tuple[float, ...]:
    if not ours or not theirs:
        return ()
    if len(ours) != len(theirs):
        raise ValueError("ranges of tensors with different numbers of channels do not merge")
    return tuple(map(max, ours, theirs))


@dataclass(frozen=True)
class RangeStats(Sums):
    """Range of one tensor over the calibration rows, of `count` elements; merges exactly.

    Attributes:
        histogram: Magnitudes. Of an activation, a sample of the rows (`calibration.observers.sampling`): it
            says shares and quantiles, the range itself is `amax`.
        channel_amax: Largest magnitude at each index of the last axis, over the rows of the histogram; empty
            where unknown (a scalar, a layout of another tensor, an axis that is not fixed).
        spread: Spread over batches; of an activation only.
    """

    RULES: ClassVar[Rules] = {"amax": max, "minimum": min, "maximum": max, "channel_amax": _merged_channels}

    count: int
    amax: float
    minimum: float
    maximum: float
    total: ExactSum
    total_squares: ExactSum
    histogram: MagnitudeHistogram = NOTHING_COUNTED
    channel_amax: tuple[float, ...] = ()
    spread: BatchSpread = NO_BATCHES

    @property
    def mean(self) -> float:
        """Mean of the values."""
        return self.total.value / self.count

    @property
    def variance(self) -> float:
        """Population variance of the values."""
        return max(self.total_squares.value / self.count - self.mean**2, 0.0)


@dataclass(frozen=True)
class TensorRange(Sums):
    """Magnitudes of one floating-point tensor over the calibration rows; merges exactly.

    An infinity, as masks hold, counts as FP32's largest number in `amax`. `smallest` is the smallest
    magnitude above 0 of a divisor (`graph.protected`); None where always 0, and for every other tensor.
    """

    RULES: ClassVar[Rules] = {"amax": max, "smallest": least}

    amax: float
    smallest: float | None = None


@dataclass(frozen=True)
class ErrorStats(Sums):
    """Error of a site's output under one recipe; merges exactly under equal scales.

    Attributes:
        recipe: Id of the recipe, or the precision for a norm, which has no `activation_scale`.
        signal: Sum of squares of the exact output; `noise`: of the difference of the quantized one.
        saturated: Activation elements beyond the format's range.
        underflowed: Nonzero activation elements that became zero.
    """

    KEYS: ClassVar[tuple[str, ...]] = ("recipe", "activation_scale")

    recipe: str
    activation_scale: float | None
    count: int
    signal: ExactSum
    noise: ExactSum
    activation_count: int
    saturated: int
    underflowed: int
    zeros: int = 0

    @property
    def relative_error(self) -> float:
        """‖quantized − exact‖ / ‖exact‖; 0 where both are zero."""
        if self.signal.value == 0.0:
            return 0.0 if self.noise.value == 0.0 else inf
        return sqrt(self.noise.value / self.signal.value)

    @property
    def sqnr_db(self) -> float:
        """Signal to quantization noise ratio of the output, decibels; infinite without noise."""
        error = self.relative_error
        return -20.0 * log10(error) if error > 0.0 else inf
