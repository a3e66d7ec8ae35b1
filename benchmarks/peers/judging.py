"""Accuracy and latency of a graph in ONNX Runtime on the CPU, whoever wrote it, under one set of rules.

FP8 Q/DQ are executed as they are written: at ``ORT_ENABLE_BASIC`` with ``session.disable_quant_qdq``, because
above it ONNX Runtime refuses FP8 or is silently wrong (`loka_onnx.sessions.onnx_session`). What is in BF16 or
FP16 is rounded there (`rounding`). Each change is paired with the exported FP32 model's output on the same
rows, and rows of one user belong together.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx.reference import ReferenceEvaluator

from benchmarks.peers.rounding import narrow_types, rounded_in_float32
from benchmarks.pipeline.training import GROUP
from loka_onnx.core.artifact import OutputSpec
from loka_onnx.core.intervals import Interval
from loka_onnx.core.progress import silent
from loka_onnx.data import Dataset
from loka_onnx.errors import LokaError
from loka_onnx.evaluation.accuracy import evaluate_outputs, evaluate_reference
from loka_onnx.evaluation.engines import Reference, Split, predict_reference, predict_split
from loka_onnx.sessions.onnx_session import OnnxSession, SessionOptions, holds_float8

SETTINGS = (
    "ONNX Runtime, CPU provider; graphs with FP8 at ORT_ENABLE_BASIC with session.disable_quant_qdq=1, "
    "others at ORT_ENABLE_ALL; tensors in BF16 or FP16 are FP32 tensors rounded to that type after each node"
)
JUDGED_BATCH = 2048
CHECKED_ROWS = 32
"""Rows that the ONNX reference evaluator computes too; it takes a second or more for each graph."""

ONE_THREAD = SessionOptions(threads=1)
"""For judging: FP8 Q/DQ on the CPU gain nothing by a second thread, and two would wait for each other."""

Arrays = Mapping[str, npt.NDArray[Any]]


class Judge:
    """Holds graphs of one model against its exported FP32 model.

    Args:
        exported: The FP32 model.
        data: Certification rows, with labels and users.
        spec: The judged output.
        most: Most rows; None for all.
        scratch: For the form in which a graph is run.
    """

    def __init__(
        self, exported: Path, data: Dataset, spec: OutputSpec, most: int | None, scratch: Path
    ) -> None:
        assert spec.label is not None
        self._specs, self._scratch = (spec,), scratch
        self._split = Split(
            "certification", data, (spec.label, GROUP), GROUP, batch_size=JUDGED_BATCH, most=most
        )
        with OnnxSession(exported, ONE_THREAD) as session:
            self._reference: Reference = predict_reference(self._split, session.run, self._specs)

    @property
    def rows(self) -> int:
        """Rows that are judged."""
        return self._split.rows

    def reference(self) -> dict[str, Any]:
        """NE and AUC of the exported model."""
        known = self._reference.predictions
        (output,) = evaluate_reference(known.outputs, known.columns, self._specs)
        return {"ne": output.metrics.normalized_entropy, "auc": output.metrics.auc}

    def accuracy(self, graph: Path) -> dict[str, Any]:
        """ΔNE (relative, %) and ΔAUC with their paired 95 % intervals, over all rows."""
        began = time.perf_counter()
        with OnnxSession(as_run(graph, self._scratch), ONE_THREAD) as session:
            found = predict_split(self._split, session.run, self._specs, "", silent)
        known = self._reference
        (output,) = evaluate_outputs(
            known.predictions.outputs, found.outputs, known.predictions.columns, self._specs, known.units
        )
        difference = output.difference
        assert difference is not None
        assert difference.delta_ne is not None
        return {
            "rows": found.rows,
            "ne": output.metrics.normalized_entropy,
            "auc": output.metrics.auc,
            "delta_ne_percent": bounds(difference.delta_ne, 100.0),
            "delta_auc": None if difference.delta_auc is None else bounds(difference.delta_auc, 1.0),
            "kl_percent": bounds(difference.kl, 100.0),
            "logit_rmse": difference.delta_rmse,
            "seconds": time.perf_counter() - began,
        }


def bounds(interval: Interval, unit: float) -> list[float]:
    """Value, lower and upper end."""
    return [unit * interval.value, unit * interval.lower, unit * interval.upper]


def as_run(graph: Path, scratch: Path) -> Path:
    """The file that is run in a graph's place: itself, or with its narrow types as rounded FP32."""
    model = onnx.load(os.fspath(graph))
    if not narrow_types(model):
        return graph
    target = scratch / f"{graph.parent.name}-rounded.onnx"
    onnx.save(rounded_in_float32(model), os.fspath(target))
    return target


def against_reference_evaluator(graph: Path, rows: Arrays, output: str, scratch: Path) -> float:
    """Largest difference between ONNX Runtime and the ONNX reference evaluator over a few rows.

    Args:
        graph: Any graph; run in the form that its accuracy is judged in.
        rows: Inputs.
        output: Name of the output.
        scratch: For that form.
    """
    few = {name: values[:CHECKED_ROWS] for name, values in rows.items()}
    path = as_run(graph, scratch)
    with OnnxSession(path) as session:
        ours = session.run(few)[output]
    (theirs,) = ReferenceEvaluator(os.fspath(path)).run([output], dict(few))
    return float(np.abs(np.asarray(ours, np.float64) - np.asarray(theirs, np.float64)).max())


@dataclass(frozen=True)
class Clock:
    """How graphs are timed.

    Attributes:
        batch: Rows of a request.
        rounds: Requests of each graph, in turns with the others.
        threads: Of one operator; with more, pools of graphs that wait for their turn would spin.
    """

    batch: int = 512
    rounds: int = 25
    threads: int = 1


def latencies(graphs: Mapping[str, Path], rows: Arrays, clock: Clock) -> dict[str, dict[str, Any]]:
    """Median time of a request of each graph as it was written, in turns; or why it does not run.

    Returns:
        By name: ``microseconds``, or ``not_run``; ``simulated`` where FP8 or a narrow type is not computed as
        such.
    """
    few = {name: values[: clock.batch] for name, values in rows.items()}
    sessions, found = {}, dict[str, dict[str, Any]]()
    for name, path in graphs.items():
        model = onnx.load(os.fspath(path))
        try:
            sessions[name] = OnnxSession(path, SessionOptions(threads=clock.threads))
        # Whatever a runtime refuses is told, not raised.
        except Exception as error:
            reason = error.evidence if isinstance(error, LokaError) else str(error)
            found[name] = {"not_run": " ".join(reason.split())[:300]}
            continue
        found[name] = {"simulated": holds_float8(model) or bool(narrow_types(model))}
    seconds: dict[str, list[float]] = {name: [] for name in sessions}
    for number in range(clock.rounds + 3):
        for name, session in sessions.items():
            began = time.perf_counter()
            session.run(few)
            if number >= 3:
                seconds[name].append(time.perf_counter() - began)
    for name, values in seconds.items():
        found[name] |= {"microseconds": 1e6 * statistics.median(values), "iqr": _spread(values)}
        sessions[name].close()
    return found


def _spread(values: Sequence[float]) -> list[float]:
    low, _, high = statistics.quantiles(values, n=4)
    return [1e6 * low, 1e6 * high]
