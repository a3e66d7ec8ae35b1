"""The pass over the magnitudes of all tensors; run where FP16 is a question."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from loka_onnx.calibration.instruments.batch_totals import BatchTotals
from loka_onnx.calibration.instruments.magnitudes import MagnitudeTap
from loka_onnx.calibration.instruments.reductions import Outputs, reduced_only
from loka_onnx.calibration.passes.executors import BatchResult, BatchWork
from loka_onnx.core.statistics import TensorRange
from loka_onnx.data import Batch
from loka_onnx.errors import CalibrationError
from loka_onnx.sessions.onnx_session import OnnxSession, SessionOptions


@dataclass(frozen=True)
class MagnitudeWork(BatchWork[Outputs]):
    """Runs a graph with magnitude taps.

    Attributes:
        path: The graph.
    """

    path: Path

    @property
    def files(self) -> tuple[Path, ...]:
        """See `BatchWork.files`."""
        return (self.path,)

    def open(self) -> Callable[[Batch], Outputs]:
        """See `BatchWork.open`."""
        session = OnnxSession(self.path, SessionOptions(threads=1))
        return lambda batch: reduced_only(session.run(batch.inputs))


class MagnitudeTotals:
    """Adds up batches, in place.

    Args:
        taps: What is measured.
    """

    def __init__(self, taps: tuple[MagnitudeTap, ...]) -> None:
        self.taps = taps
        self._totals = BatchTotals()

    def add(self, result: BatchResult[Outputs], where: str) -> None:
        """Take in one batch.

        Args:
            result: The batch.
            where: Which it is, for a message.

        Raises:
            CalibrationError: A tensor holds NaN. Infinities are magnitudes.
        """
        if any(np.isnan(values).any() for values in result.value.values()):
            raise self._not_a_number(result.value, where)
        self._totals.add(result.value, result.rows)

    def read(self) -> dict[str, TensorRange]:
        """Magnitudes of every tensor, by name."""
        return {tap.tensor: tap.read(self._totals) for tap in self.taps}

    def _not_a_number(self, reduced: Mapping[str, np.ndarray], where: str) -> CalibrationError:
        first = next(t for t in self.taps if np.isnan([t.low.read(reduced), t.high.read(reduced)]).any())
        return CalibrationError(
            f"tensor '{first.tensor}' is not a number in {where}",
            evidence=f"of {len(self.taps)} tensors it is the first",
            remedy="a model that makes NaN of these rows cannot be served: drop them, or mend the model",
        )
