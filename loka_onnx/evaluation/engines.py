"""Judge built engines on a split, against the exported model in FP32."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from loka_onnx.core.artifact import OutputSpec
from loka_onnx.core.engine import EngineArtifact
from loka_onnx.core.evaluation import FAILED, Evaluation, OutputEvaluation
from loka_onnx.core.progress import Progress, silent
from loka_onnx.data import Batch, Dataset
from loka_onnx.errors import StageError
from loka_onnx.evaluation.accuracy import Units, evaluate_outputs, evaluate_reference
from loka_onnx.evaluation.latency import Interleaved
from loka_onnx.evaluation.predictions import Predictions, Run, predict
from loka_onnx.numerics.intervals import CONFIDENCE

REFERENCE = "reference"
"""Id of the exported model before mods, in ONNX Runtime on the CPU in FP32."""
CERTIFICATION = "certification"
REQUEST_ROWS = 256
"""Rows of a request that accuracy is judged by, where engines take so many. With 1,024 rows a sequence model
(DIN) no longer fits the caches of a CPU, and a row takes up to twice as long."""


@dataclass(frozen=True)
class Split:
    """Rows that engines are judged on, ``selection`` or ``certification``.

    `columns` includes the group and the slices. `confidence` is that of the intervals that are compared with
    the budget. At most `most` rows are judged, in requests at even distances.
    """

    name: str
    data: Dataset
    columns: tuple[str, ...]
    group: str | None = None
    slices: tuple[str, ...] = ()
    batch_size: int = REQUEST_ROWS
    confidence: float = CONFIDENCE
    most: int | None = None

    @property
    def rows(self) -> int:
        """Number of judged rows."""
        return sum(stop - start for start, stop in self._spans)

    def batches(self) -> Iterator[Batch]:
        """Yield the judged rows, in order, `batch_size` at a time."""
        for start, stop in self._spans:
            yield from self.data.batches(self.batch_size, start=start, stop=stop)

    @property
    def _spans(self) -> tuple[tuple[int, int], ...]:
        """Rows [start, stop) of each piece: one whole, or requests at even distances."""
        if self.most is None or self.data.rows <= self.most:
            return ((0, self.data.rows),)
        size = min(self.batch_size, self.most)
        count = self.most // size
        starts = (index * self.data.rows // count for index in range(count))
        return tuple((start, start + size) for start in starts)


@dataclass(frozen=True)
class Reference:
    """Outputs of the FP32 model and columns of a split, with groups and slices of its rows."""

    predictions: Predictions
    units: Units


def predict_split(
    split: Split, run: Run, specs: tuple[OutputSpec, ...], task: str, progress: Progress
) -> Predictions:
    """Return the outputs of an engine for every row of a split."""
    return predict(
        run,
        split.batches(),
        tuple(spec.name for spec in specs),
        split.columns,
        lambda done: progress(task, done, split.rows),
    )


def predict_reference(
    split: Split, run: Run, specs: tuple[OutputSpec, ...], progress: Progress = silent
) -> Reference:
    """Return the FP32 reference of a split."""
    predictions = predict_split(split, run, specs, f"judge reference on {split.name}", progress)
    units = Units.of(predictions.columns, split.group, split.slices, split.name == CERTIFICATION)
    return Reference(predictions, units)


def judge_reference(split: Split, reference: Reference, specs: tuple[OutputSpec, ...]) -> Evaluation:
    """Return the evaluation of the reference itself."""
    known = reference.predictions
    outputs = evaluate_reference(known.outputs, known.columns, specs, split.name == CERTIFICATION)
    return Evaluation(
        REFERENCE, "onnxruntime", "fp32", "cpu", split.name, known.rows, outputs, (), "measured"
    )


def judge_engine(
    artifact: EngineArtifact,
    split: Split,
    reference: Reference,
    specs: tuple[OutputSpec, ...],
    open_run: Callable[[], Run],
    progress: Progress = silent,
) -> Evaluation:
    """Return the accuracy of an engine (loaded by `open_run`) from its own outputs; failures are recorded."""

    def result(status: str, rows: int, outputs: tuple[OutputEvaluation, ...] = ()) -> Evaluation:
        known = (artifact.id, artifact.backend, artifact.plan, artifact.target, split.name)
        return Evaluation(*known, rows, outputs, (), status)

    if not artifact.is_built or not artifact.was_run:
        why = artifact.detail if artifact.is_built else ""
        return result(f"not measured: {why or artifact.status}", split.data.rows)
    try:
        task = f"judge {artifact.plan} on {split.name}"
        predictions = predict_split(split, open_run(), specs, task, progress)
        known = reference.predictions
        outputs = evaluate_outputs(
            known.outputs, predictions.outputs, known.columns, specs, reference.units, split.confidence
        )
    except StageError as error:
        return result(f"{FAILED} on {split.name}: {error}", split.data.rows)
    return result("measured", predictions.rows, outputs)


def with_latencies(evaluation: Evaluation, timed: Interleaved) -> Evaluation:
    """Return the evaluation with its engine's latencies and timing failure."""
    return replace(
        evaluation,
        latencies=timed.latencies.get(evaluation.engine, ()),
        latency_failure=timed.failures.get(evaluation.engine, ""),
    )
