"""Values that the stages of a run share: run file and directory, the exported model, and the rows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from loka_onnx.config import RunConfig
from loka_onnx.core.artifact import ModelArtifact, OutputSpec
from loka_onnx.core.progress import Progress, silent
from loka_onnx.data import Dataset, InputBinding, Splits, open_dataset
from loka_onnx.evaluation.engines import REQUEST_ROWS, Reference, Split, predict_reference
from loka_onnx.evaluation.predictions import Run, Streams
from loka_onnx.graph.id_bounds import id_bounds
from loka_onnx.graph.model import GraphModel
from loka_onnx.numerics.intervals import CONFIDENCE
from loka_onnx.pipeline.directory import RunDirectory
from loka_onnx.pipeline.rows import Requests, bind_columns, bounded_by, open_splits
from loka_onnx.planning.climbing import SHARES
from loka_onnx.sessions.onnx_session import OnnxSession, SessionOptions
from loka_onnx.sessions.runner import Arrays, stream_count

CHECK_ROWS = 2048
"""Rows of the calibration split that mods and export parity are held against."""
LABEL_ROWS = 65536
"""Rows read at a time where only labels and weights are."""


@dataclass(frozen=True)
class RunSettings:
    """A run before its model is exported; `looks` are certification attempts, which divide its error."""

    config: RunConfig
    directory: RunDirectory
    progress: Progress = silent
    looks: int = 1
    signing_key: Path | None = None

    @property
    def specs(self) -> tuple[OutputSpec, ...]:
        """The judged outputs."""
        return self.config.output_specs

    @property
    def outputs_without_limits(self) -> list[dict[str, Any]]:
        """Entries of the judged outputs in the run file; no measurement depends on their limits."""
        limits = {"budget", "max_kl", "max_auc_drop"}
        return [output.model_dump(mode="json", exclude=limits) for output in self.config.outputs]

    @property
    def threads(self) -> int:
        """Threads of ONNX Runtime; 0 for one a core."""
        return self.config.threads or 0

    def path(self, relative: str) -> Path:
        """A path in the run directory."""
        return self.directory.path / relative


@dataclass(frozen=True)
class Context(RunSettings):
    """A run with its exported model, the FP32 model that everything is judged against."""

    exported: ModelArtifact = field(kw_only=True)
    _references: dict[str, Reference] = field(default_factory=dict, init=False, repr=False)

    @cached_property
    def bindings(self) -> tuple[InputBinding, ...]:
        """Bindings of model inputs to columns, with the bounds of ids."""
        graph = GraphModel.load(self.exported.path)
        return bind_columns(self.config.data.inputs, self.exported.inputs, id_bounds(graph))

    @cached_property
    def splits(self) -> Splits:
        """Calibration, selection and certification."""
        return open_splits(self.config, self.bindings)

    @cached_property
    def requests(self) -> Requests:
        """Generated inputs of the model."""
        rows = self.first_rows(CHECK_ROWS)
        # List lengths that the model leaves open, and ids that no table bounds, are those of the data.
        inputs = [replace(spec, shape=(None, *rows[spec.name].shape[1:])) for spec in self.exported.inputs]
        bindings = [bounded_by(binding, rows[binding.input]) for binding in self.bindings]
        request, each = self.config.data.request, max(1, round(self.candidates))
        requests = Requests(
            inputs, bindings, shared=() if request is None else request.inputs, candidates=each
        )
        drawn = requests.sample(self.as_batch(CHECK_ROWS))
        answers = self.open_exported().run(drawn).values()
        is_finite = all(np.isfinite(values).all() for values in answers if values.dtype.kind == "f")
        return requests if is_finite else replace(requests, unsigned=True)

    @cached_property
    def candidates(self) -> float:
        """Mean candidates of a request in the calibration rows; 1 where a row is a request of its own."""
        request = self.config.data.request
        if request is None:
            return 1.0
        ids = [
            batch[request.column] for batch in self.read_columns(self.splits.calibration, (request.column,))
        ]
        return float(self.splits.calibration.rows / len(np.unique(np.concatenate(ids))))

    def first_rows(self, rows: int) -> Arrays:
        """Model inputs of the first calibration rows."""
        return dict(next(self.splits.calibration.batches(rows)).inputs)

    def open_exported(self, threads: int | None = None) -> OnnxSession:
        """Open the exported model; with the threads of the run where none are given."""
        threads = self.threads if threads is None else threads
        return OnnxSession(self.exported.path, SessionOptions(threads=threads))

    def in_streams(self, run: Run) -> Streams:
        """A session of one thread, run on as many batches at once as the run has threads."""
        return Streams(run, stream_count(self.threads))

    def read_columns(
        self, data: Dataset, names: tuple[str, ...], most: int | None = None
    ) -> Iterator[Mapping[str, Any]]:
        """Columns of a split, or of its first rows, without its inputs, `LABEL_ROWS` at a time."""
        alone, stop = open_dataset(data.path, (), names, data.selection), min(data.rows, most or data.rows)
        return (batch.columns for batch in alone.batches(LABEL_ROWS, stop=stop))

    @property
    def judged_rows(self) -> dict[str, int]:
        """Rows of the splits that engines are judged on."""
        return {name: getattr(self.splits, name).rows for name in ("selection", "certification")}

    @property
    def selection(self) -> Split:
        """The rows that decide among plans and engines."""
        return self._judged("selection")

    @property
    def certification(self) -> Split:
        """The certification rows, with the confidence of each look at them."""
        return replace(self._judged("certification"), confidence=1.0 - (1.0 - CONFIDENCE) / self.looks)

    def attempt(self, number: int) -> Split:
        """The certification rows with the share of error of an attempt (from 0; `climbing.SHARES`)."""
        whole = self.certification
        return replace(whole, confidence=1.0 - (1.0 - whole.confidence) * SHARES[number])

    def as_batch(self, rows: int) -> int:
        """The nearest number of rows that engines are built for."""
        return max(self.config.batch.min, min(rows, self.config.batch.max))

    def reference(self, split: Split, progress: Progress | None = None) -> Reference:
        """Outputs of the exported model on a split; predicted once."""
        if split.name not in self._references:
            run = self.in_streams(self.open_exported(threads=1).run)
            known = predict_reference(split, run, self.specs, progress or self.progress)
            self._references[split.name] = known
        return self._references[split.name]

    def _judged(self, name: str) -> Split:
        data, size = self.config.data, self.as_batch(REQUEST_ROWS)
        return Split(name, getattr(self.splits, name), self.config.columns, data.group, data.slices, size)
