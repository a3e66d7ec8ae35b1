"""How fast engines are to one another, and how sure that is.

The time of an engine over several batch sizes is the mean of its median latencies per row, so that a large
batch does not outweigh a small one by its size alone. Two engines that were timed in turns are compared part
by part (`Latency.parts_us`): what slowed the machine for a while slowed both, and cancels. The interval of
their ratio is that of the median over the parts. Of engines that were timed apart, in build jobs of their
own, the ratio of the medians is all that there is: what differed between machines and days is in it, and no
interval says how much.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from loka_onnx.core.evaluation import Evaluation, Latency
from loka_onnx.core.intervals import Interval
from loka_onnx.numerics.medians import median_interval

CONFIDENCE = 0.95
"""Least coverage of the interval of a ratio."""


@dataclass(frozen=True)
class Speed:
    """What one engine takes on the target.

    Attributes:
        latencies: By batch size.
    """

    latencies: Mapping[int, Latency]

    @classmethod
    def of(cls, evaluation: Evaluation | None, is_simulated: bool) -> Speed | None:
        """The speed of an engine; None where none was measured on the target, or only a simulation's."""
        if is_simulated or evaluation is None or not evaluation.latencies:
            return None
        if not all(latency.counts_for_choice for latency in evaluation.latencies):
            return None
        return cls({latency.batch: latency for latency in evaluation.latencies})

    @property
    def batches(self) -> tuple[int, ...]:
        """Batch sizes, ascending."""
        return tuple(sorted(self.latencies))

    @property
    def per_row_us(self) -> float:
        """Mean over batch sizes of the median latency per row."""
        return self._per_row(self.batches)

    def at(self, batch: int) -> Speed:
        """The same at one batch size.

        Raises:
            KeyError: It was not timed at that size.
        """
        return Speed({batch: self.latencies[batch]})

    def ratio(self, other: Speed) -> float:
        """The time of this engine over that of another by their medians, wherever they were timed.

        Raises:
            KeyError: They have no batch size in common.
        """
        batches = self._in_common(other)
        return self._per_row(batches) / other._per_row(batches)

    def over(self, other: Speed) -> Interval | None:
        """The time of this engine over that of another, over the batch sizes that both were timed at.

        Returns:
            The ratio of the medians with an interval of at least 95 %; without width where too few parts were
            kept to say how sure it is. Its rows are the parts. None where the two were not timed in turns.

        Raises:
            KeyError: They have no batch size in common.
        """
        batches = self._in_common(other)
        if self._timed_in(batches) != other._timed_in(batches):
            return None
        ratio = self.ratio(other)
        ours, theirs = self._parts(batches), other._parts(batches)
        found = None
        if len(ours) == len(theirs) and ours:
            found = median_interval([a / b for a, b in zip(ours, theirs, strict=True)], CONFIDENCE)
        if found is None:
            return Interval(ratio, ratio, ratio, CONFIDENCE, 0)
        # The ratio of two medians may lie beside the median of ratios.
        return Interval(ratio, min(found.lower, ratio), max(found.upper, ratio), found.confidence, found.rows)

    def least_over(self, other: Speed) -> float:
        """The lower end of `over`; of engines that were timed apart, the ratio of their medians."""
        times = self.over(other)
        return self.ratio(other) if times is None else times.lower

    def _in_common(self, other: Speed) -> tuple[int, ...]:
        """Batch sizes that both were timed at."""
        batches = tuple(batch for batch in self.batches if batch in other.latencies)
        if not batches:
            raise KeyError("the engines were not timed at a batch size in common")
        return batches

    def _timed_in(self, batches: Sequence[int]) -> list[tuple[str, str]]:
        """Job and device of each time; alike for engines that were timed in turns."""
        return [(self.latencies[batch].job, self.latencies[batch].device) for batch in batches]

    def _per_row(self, batches: Sequence[int]) -> float:
        return fmean(self.latencies[batch].p50_us / batch for batch in batches)

    def _parts(self, batches: Sequence[int]) -> list[float]:
        """Mean time per row of each part; empty where the batch sizes have different numbers of parts."""
        parts = [[us / batch for us in self.latencies[batch].parts_us] for batch in batches]
        if len({len(each) for each in parts}) != 1:
            return []
        return [fmean(same) for same in zip(*parts, strict=True)]
