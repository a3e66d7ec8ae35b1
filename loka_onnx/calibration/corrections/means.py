"""Means over rows, computed by the graph: of activations and sites by channel, and of scores.

Sums run in DOUBLE, because the difference of two means is a ten-thousandth of either. Rows come in random
order, because a file may be sorted. Every example has equally many elements, so the mean of all rows is that
of the batches' means, weighted by their rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx

from loka_onnx.calibration.passes.executors import (
    BatchExecutor,
    BatchWork,
    LocalExecutor,
    Span,
    first_rows,
    span_rows,
    spans_in_random_order,
)
from loka_onnx.core.artifact import OutputSpec
from loka_onnx.core.progress import Progress, silent
from loka_onnx.data import Batch, Dataset
from loka_onnx.errors import CalibrationError
from loka_onnx.graph.biases import expose_scores
from loka_onnx.graph.model import GraphModel, Tensor
from loka_onnx.sessions.onnx_session import OnnxSession, SessionOptions

Values = npt.NDArray[np.float64]
Run = Callable[[Mapping[str, npt.NDArray[Any]]], Mapping[str, npt.NDArray[Any]]]
"""Runs one batch: inputs by name to outputs by name."""


@dataclass(frozen=True)
class MeanRows:
    """At most `most` rows, in random spans of the first `first` (None for all); with columns of weights."""

    data: Dataset
    most: int = 32_768
    batch_size: int = 512
    seed: int = 0
    executor: BatchExecutor = field(default_factory=LocalExecutor)
    progress: Progress = silent
    first: int | None = None

    @property
    def spans(self) -> tuple[Span, ...]:
        """The random spans."""
        used = min(self.data.rows, self.first or self.data.rows)
        drawn = first_rows(spans_in_random_order(used, self.batch_size, self.seed), self.most)
        # In file order: reading without jumps is faster.
        return tuple(sorted(drawn, key=lambda span: span.start))


@dataclass(frozen=True)
class Means:
    """Means over `rows` rows: of tensors, averaged axes of length 1; of scores (weighted) by output."""

    tensors: dict[str, Values]
    scores: dict[str, float]
    rows: int

    def named(self, names: Mapping[str, str]) -> Means:
        """Return the means of some tensors under other names, which map to those of their observers."""
        return replace(self, tensors={name: self.tensors[observer] for name, observer in names.items()})


class MeanObservers:
    """Collects means of tensors of a graph and makes them its outputs, in place of the model's own.

    The graph is edited. Of `specs`, the scores are averaged too.
    """

    def __init__(self, model: GraphModel, specs: Sequence[OutputSpec] = ()) -> None:
        self.model, self.specs = model, tuple(specs)
        scores = expose_scores(model, {spec.name: spec.kind for spec in specs})
        self._scores = _score_observers(specs, scores)
        kept = {observer.tensor for observer in self._scores}
        model.graph.outputs = [tensor for tensor in model.graph.outputs if tensor.name in kept]
        self._observers: dict[tuple[str, tuple[int, ...]], str] = {}

    def mean(self, tensor: Tensor, axes: tuple[int, ...]) -> str:
        """Observe the mean of a tensor over some axes, which keep length 1; return the observer's name."""
        key = (tensor.name, axes)
        if key not in self._observers:
            name = f"{tensor.name}.mean"
            to = {"to": onnx.TensorProto.DOUBLE}
            wide = self.model.add("Cast", [tensor], f"{name}.wide", np.float64, to)
            over = self.model.constant(f"{name}.axes", np.array(axes, np.int64))
            mean = self.model.add("ReduceMean", [wide, over], name, np.float64, {"keepdims": 1})
            self.model.add_output(mean, np.float64, None)
            self._observers[key] = mean.name
        return self._observers[key]

    def measure(self, rows: MeanRows, path: Path, task: str) -> Means:
        """Write the graph to `path` (its tables' file system) and run it; CalibrationError if not finite."""
        self.model.save(path)
        work = _MeanWork(path, tuple(self._observers.values()), tuple(self._scores))
        tensors: dict[str, Values] = {}
        totals: dict[str, Values] = {}
        done, total = 0, span_rows(rows.spans)
        with closing(rows.executor.run(work, rows.data, rows.spans, rows.batch_size)) as results:
            for result in results:
                of_tensors, of_scores = result.value
                for name, mean in of_tensors.items():
                    _check_finite(name, mean, rows.data, done)
                    tensors[name] = tensors.get(name, 0.0) + result.rows * mean
                for name, sums in of_scores.items():
                    _check_finite(name, sums, rows.data, done)
                    totals[name] = totals.get(name, 0.0) + sums
                done += result.rows
                rows.progress(task, done, total)
        return Means({name: total / done for name, total in tensors.items()}, _means_of(totals), done)


def mean_scores(
    run: Run, scores: Mapping[str, str], specs: Sequence[OutputSpec], rows: MeanRows
) -> dict[str, float]:
    """Return the weighted mean of each output's score, an output of `run` by its name in `scores`."""
    observers = _score_observers(specs, scores)
    totals = {observer.output: np.zeros(2) for observer in observers}
    for span in rows.spans:
        for batch in rows.data.batches(rows.batch_size, start=span.start, stop=span.stop):
            outputs = run(batch.inputs)
            for observer in observers:
                totals[observer.output] += observer.sums(outputs, batch)
    return _means_of(totals)


def _means_of(totals: Mapping[str, Values]) -> dict[str, float]:
    return {name: float(total / weight) for name, (total, weight) in totals.items() if weight > 0.0}


@dataclass(frozen=True)
class _ScoreObserver:
    """Score of an output, and the column of its row weights."""

    output: str
    tensor: str
    weight: str | None

    def sums(self, outputs: Mapping[str, npt.NDArray[Any]], batch: Batch) -> Values:
        """Return the weighted sum of the score over a batch, and the sum of the weights."""
        score = outputs[self.tensor].reshape(-1).astype(np.float64)
        weight = np.ones(score.size) if self.weight is None else batch.columns[self.weight]
        return np.array([(weight * score).sum(), weight.sum()], np.float64)


def _score_observers(specs: Sequence[OutputSpec], scores: Mapping[str, str]) -> list[_ScoreObserver]:
    return [_ScoreObserver(s.name, scores[s.name], s.weight) for s in specs if s.name in scores]


_BatchMeans = tuple[Mapping[str, Values], Mapping[str, Values]]
"""Means of one batch, and by output the weighted sum of its score and the sum of the weights."""


@dataclass(frozen=True)
class _MeanWork(BatchWork[_BatchMeans]):
    observers: tuple[str, ...]
    scores: tuple[_ScoreObserver, ...]

    def open(self) -> Callable[[Batch], _BatchMeans]:
        session = OnnxSession(self.path, SessionOptions(threads=1))

        def run(batch: Batch) -> _BatchMeans:
            outputs = session.run(batch.inputs)
            sums = {observer.output: observer.sums(outputs, batch) for observer in self.scores}
            return {name: outputs[name] for name in self.observers}, sums

        return run


def _check_finite(name: str, values: Values, data: Dataset, done: int) -> None:
    if np.isfinite(values).all():
        return
    raise CalibrationError(
        f"E0501 the mean of '{name}' is not finite",
        where=f"the batch after {done} rows of '{data.name}'",
        evidence=f"{int((~np.isfinite(values)).sum())} of {values.size} values",
        remedy="drop the rows that overflow, or correct the model",
    )
