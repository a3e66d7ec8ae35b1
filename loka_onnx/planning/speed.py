"""How fast engines are to one another, and how sure that is.

The time of an engine over several batch sizes is the mean of its median latencies per row, so that a large
batch does not outweigh a small one by its size alone. Two engines that were timed in turns are compared part
by part (`Latency.parts_us`): what slowed the machine for a while slowed both, and cancels. The interval of
their ratio is that of the median over the parts.
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

    def over(self, other: Speed) -> Interval:
        """The time of this engine over that of another, over the batch sizes that both were timed at.

        Returns:
            The ratio of the medians with an interval of at least 95 %; without width where too few parts were
            kept to say how sure it is. Its rows are the parts.

        Raises:
            KeyError: They have no batch size in common.
        """
        batches = tuple(batch for batch in self.batches if batch in other.latencies)
        if not batches:
            raise KeyError("the engines were not timed at a batch size in common")
        ratio = self._per_row(batches) / other._per_row(batches)
        ours, theirs = self._parts(batches), other._parts(batches)
        found = None
        if len(ours) == len(theirs) and ours:
            found = median_interval([a / b for a, b in zip(ours, theirs, strict=True)], CONFIDENCE)
        if found is None:
            return Interval(ratio, ratio, ratio, CONFIDENCE, 0)
        # The ratio of two medians may lie beside the median of ratios.
        return Interval(ratio, min(found.lower, ratio), max(found.upper, ratio), found.confidence, found.rows)

    def _per_row(self, batches: Sequence[int]) -> float:
        return fmean(self.latencies[batch].p50_us / batch for batch in batches)

    def _parts(self, batches: Sequence[int]) -> list[float]:
        """Mean time per row of each part; empty where the batch sizes have different numbers of parts."""
        parts = [[us / batch for us in self.latencies[batch].parts_us] for batch in batches]
        if len({len(each) for each in parts}) != 1:
            return []
        return [fmean(same) for same in zip(*parts, strict=True)]
