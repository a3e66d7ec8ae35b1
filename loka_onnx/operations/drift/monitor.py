"""Drift of the rows that a serving process scores, as metrics for Prometheus.

`Monitor.feed` draws rows one by one, so that a batch mixes many requests as the profile's batches do, checks
and copies them, and returns; a thread of its own runs full batches through the instrumented model. Memory is
bounded: less than one batch is held, at most `pending` more wait, further ones are dropped and counted.

Counters are over the life of the process; gauges are over a window of recent batches, which are compared with
the profile as `operations.drift.measure` does. The family-wise level holds for each full window, not for all
of them together. What it costs: `benchmarks/records/drift_alarms.json`.
"""

from __future__ import annotations

import copy
import logging
import queue
import tempfile
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from loka_onnx.calibration.passes.executors import BatchResult, ReductionWork
from loka_onnx.calibration.passes.totals import ErrorTotals, RangeWork
from loka_onnx.core import serde
from loka_onnx.core.artifact import TensorSpec
from loka_onnx.data import Batch
from loka_onnx.errors import ConfigError, DataError
from loka_onnx.graph.id_bounds import id_bounds
from loka_onnx.graph.model import GraphModel
from loka_onnx.operations.drift.live import (
    DEFAULT_BATCH_ROWS,
    Baseline,
    Live,
    RangeWatch,
    observe_activations,
    observe_products,
)
from loka_onnx.operations.drift.measure import compare
from loka_onnx.operations.drift.monitor_metrics import Tally, exposition
from loka_onnx.operations.drift.report import DriftOptions, DriftReport

Arrays = Mapping[str, npt.NDArray[Any]]
_LOG = logging.getLogger(__name__)
BLOCKS = 4
"""Parts of a window: it moves on by one of them, and only they are kept."""


@dataclass(frozen=True)
class MonitorOptions:
    """Options of a monitor.

    Attributes:
        sample_rate: Share of the rows that are measured.
        window: Batches that gauges cover, once so many were seen; at most a quarter more.
        pending: Full batches that may wait.
        drift: Comparison with the profile; rows and threads are not used.
        seed: Of the draw of rows; None for another one in each process.
    """

    sample_rate: float = 0.01
    window: int = 64
    pending: int = 2
    drift: DriftOptions = field(default_factory=DriftOptions)
    seed: int | None = None

    def __post_init__(self) -> None:
        if not 0.0 < self.sample_rate <= 1.0 or self.window < BLOCKS or self.pending < 1:
            raise ConfigError(
                "E1624 a monitor samples a share of the rows, over a window of some batches",
                where="MonitorOptions",
                evidence=f"sample_rate {self.sample_rate:g}, window {self.window}, pending {self.pending}",
                remedy=f"sample_rate in (0, 1], window at least {BLOCKS}, pending at least 1",
            )


@dataclass(frozen=True)
class _RowRules:
    """Inputs of a model, with the ids that each column of an input may hold (None: no bound)."""

    inputs: Sequence[TensorSpec]
    bounds: Mapping[str, tuple[range | None, ...]]

    def rows_of(self, arrays: Arrays) -> int:
        """Return the number of rows; a DataError unless they have the model's inputs, shapes and types."""
        lengths = {len(array) for array in arrays.values() if array.ndim}
        if (
            set(arrays) != {spec.name for spec in self.inputs}
            or len(lengths) != 1
            or not all(
                len(spec.shape) == arrays[spec.name].ndim
                and all(
                    d in (None, n) for d, n in zip(spec.shape[1:], arrays[spec.name].shape[1:], strict=True)
                )
                and np.can_cast(arrays[spec.name].dtype, np.dtype(spec.dtype), "same_kind")
                for spec in self.inputs
            )
        ):
            fed = ", ".join(f"'{name}' {array.dtype}{array.shape}" for name, array in sorted(arrays.items()))
            raise DataError(
                "E1620 what was fed does not fit the inputs of the model",
                evidence=f"fed {fed or 'nothing'}; the model takes {', '.join(map(str, self.inputs))}",
                remedy="feed one array for each input, with the same rows on axis 0",
            )
        return lengths.pop()

    def converted(self, arrays: Arrays, rows: npt.NDArray[np.int64]) -> dict[str, npt.NDArray[Any]]:
        """Copy some rows in the types of the model; numbers beyond a type become infinite."""
        with np.errstate(over="ignore"):
            return {spec.name: arrays[spec.name][rows].astype(spec.dtype) for spec in self.inputs}

    def usable(self, arrays: Arrays) -> npt.NDArray[np.bool_]:
        """Return (rows,): True if the numbers of a row are finite and its ids inside their tables."""
        usable = np.ones(len(arrays[self.inputs[0].name]), dtype=np.bool_)
        for spec in self.inputs:
            array = arrays[spec.name]
            if array.dtype.kind == "f":
                usable &= np.isfinite(array).all(axis=tuple(range(1, array.ndim)))
            for column, allowed in enumerate(self.bounds.get(spec.name, ())):
                if allowed is not None:
                    ids = array if array.ndim == 1 else array[:, column]
                    usable &= (ids >= allowed.start) & (ids < allowed.stop)
        return usable


class _BatchBuilder:
    """Gathers rows into batches of one size, in place; holds less than one batch. Not thread-safe."""

    def __init__(self, batch_rows: int) -> None:
        self._size, self._held = batch_rows, 0
        self._pieces: list[Arrays] = []

    def add(self, arrays: Arrays, rows: int) -> list[dict[str, npt.NDArray[Any]]]:
        """Keep rows that obey `_RowRules`, in arrays that nobody else writes to; return full batches."""
        if rows:
            self._pieces.append(arrays)
            self._held += rows
        if self._held < self._size:
            return []
        whole = {name: np.concatenate([piece[name] for piece in self._pieces]) for name in arrays}
        full, self._held = self._held - self._held % self._size, self._held % self._size
        self._pieces = [{name: array[full:].copy() for name, array in whole.items()}]
        return [
            {name: array[start : start + self._size] for name, array in whole.items()}
            for start in range(0, full, self._size)
        ]


class Monitor:
    """Measures rows that are fed; thread-safe. Make it after the serving process has forked its workers.

    Args:
        baseline: Model and profile (`loka_onnx.open_run(…).baseline`).
        scratch: Directory for instrumented models, on the file system of the model; a temporary one for
            None. Tables are mapped from there as long as the monitor is open.
    """

    def __init__(
        self, baseline: Baseline, options: MonitorOptions | None = None, scratch: Path | None = None
    ) -> None:
        self.baseline, self.options = baseline, options or MonitorOptions()
        self.batch_rows = baseline.batch_rows or DEFAULT_BATCH_ROWS
        self._folder = tempfile.TemporaryDirectory(dir=scratch, prefix=".monitor-")
        folder = Path(self._folder.name)
        model = GraphModel.load(baseline.model.path)
        self._rules = _RowRules(baseline.model.inputs, id_bounds(model))
        self._range_observers = observe_activations(model, baseline, self.batch_rows)
        model.save(folder / "ranges.onnx")
        model = GraphModel.load(baseline.model.path)
        self._error_observers = observe_products(model, baseline, {})
        model.save(folder / "errors.onnx")
        self._start_block()
        self._run_ranges = RangeWork(folder / "ranges.onnx", self._watch.totals.samples).open()
        self._run_errors = ReductionWork(folder / "errors.onnx").open()

        self._intake = threading.Lock()
        self._random = np.random.default_rng(self.options.seed)
        self._builder = _BatchBuilder(self.batch_rows)
        self._waiting: queue.Queue[Arrays | None] = queue.Queue(self.options.pending)
        self._worker: threading.Thread | None = None
        self._is_closed = False

        self._state = threading.Lock()
        self._tally = Tally()
        self._blocks: deque[Live] = deque(maxlen=BLOCKS)

    def feed(self, inputs: Mapping[str, Any]) -> None:
        """Sample these rows of the model's inputs (copied, the rows on axis 0); a thread measures them later.

        Rows that cannot be used are counted as rejected; nothing is raised.
        """
        try:
            self._feed(inputs)
        except Exception as error:
            # Whatever was handed in, serving goes on.
            with self._state:
                self._tally.rejected_calls += 1
            _LOG.debug("rows were rejected: %s", error)

    def _feed(self, inputs: Mapping[str, Any]) -> None:
        arrays = {name: np.asarray(values) for name, values in inputs.items()}
        rows = self._rules.rows_of(arrays)
        with self._intake:
            drawn = np.flatnonzero(self._random.random(rows) < self.options.sample_rate)
            if drawn.size > self.batch_rows:
                # One call must not fill the memory, nor the window.
                drawn = np.sort(self._random.choice(drawn, self.batch_rows, replace=False))
        taken = self._rules.converted(arrays, drawn)
        usable = self._rules.usable(taken)
        kept = int(usable.sum())
        if kept < drawn.size:
            taken = {name: array[usable] for name, array in taken.items()}
        with self._state:
            self._tally.fed += rows
            self._tally.sampled += kept
            self._tally.rejected += int(drawn.size) - kept
        with self._intake:
            for batch in () if self._is_closed else self._builder.add(taken, kept):
                self._submit(batch)

    def _submit(self, batch: Arrays) -> None:
        if self._worker is None:
            self._worker = threading.Thread(target=self._work, name="loka-onnx-monitor", daemon=True)
            self._worker.start()
        try:
            self._waiting.put_nowait(batch)
        except queue.Full:
            with self._state:
                self._tally.dropped += self.batch_rows

    def _work(self) -> None:
        while (batch := self._waiting.get()) is not None:
            try:
                self._take(Batch(batch, {}, 0))
            except Exception:
                # A monitor that died in silence would look like data that do not drift.
                _LOG.exception("a batch could not be measured")
                with self._state:
                    self._tally.failed_batches += 1
            finally:
                self._waiting.task_done()
        self._waiting.task_done()

    def _take(self, batch: Batch) -> None:
        began = time.thread_time()
        errors = BatchResult(batch.rows, self._run_errors(batch))
        ranges = BatchResult(batch.rows, self._run_ranges(batch))
        with self._state:
            self._errors.add(errors, "a batch that was fed")
            self._watch.add(ranges, "a batch that was fed")
            self._in_block += 1
            if self._in_block * BLOCKS >= self.options.window:
                self._blocks.append(self._block())
                _add_block(self._tally, self._blocks[-1])
                self._start_block()
            self._tally.batches += 1
            self._tally.seconds += time.thread_time() - began

    def _block(self) -> Live:
        errors = {site: stats[0] for site, stats in self._errors.read().items()}
        return replace(self._watch.read("window"), errors=errors)

    def _start_block(self) -> None:
        self._watch = RangeWatch(self._range_observers, self.baseline.ranges, self.batch_rows)
        self._errors, self._in_block = ErrorTotals(self._error_observers), 0

    def tally(self) -> Tally:
        """Return a copy of the counts since the monitor was made."""
        return self._look()[0]

    def report(self) -> DriftReport | None:
        """Compare the window with the profile; None before the first batch."""
        return self._compared(self._look()[1])

    def text(self) -> str:
        """Return all metrics in the text format of Prometheus; see `exposition`."""
        tally, blocks = self._look()
        model, profile = self.baseline.model.digest, self.baseline.profile.data_digest
        labels = {"model_digest": model, "profile_digest": profile}
        return exposition(tally, self._compared(blocks), labels)

    def write(self, path: str | Path) -> None:
        """Write `text` to a file (``*.prom`` for node-exporter's textfile collector), whole or not at all."""
        serde.write_text(self.text(), Path(path))

    def _look(self) -> tuple[Tally, list[Live]]:
        with self._state:
            tally, blocks = copy.deepcopy(self._tally), list(self._blocks)
            if self._in_block:
                blocks.append(self._block())
                _add_block(tally, blocks[-1])
        return tally, blocks

    def _compared(self, blocks: list[Live]) -> DriftReport | None:
        return compare(self.baseline, reduce(Live.merge, blocks), self.options.drift) if blocks else None

    def flush(self, timeout_seconds: float | None = None) -> bool:
        """Wait until every full batch is measured; False after the timeout."""
        done = self._waiting.all_tasks_done
        with done:
            return done.wait_for(lambda: not self._waiting.unfinished_tasks, timeout_seconds)

    def close(self) -> None:
        """Measure waiting batches, and end; rows fed later are ignored."""
        with self._intake:
            is_first, self._is_closed = not self._is_closed, True
        if not is_first:
            return
        if self._worker is not None:
            self._waiting.put(None)
            self._worker.join()
        self._folder.cleanup()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _add_block(tally: Tally, block: Live) -> None:
    """Add to a tally, in place."""
    tally.beyond.update(block.beyond)
    tally.elements.update({site: stats.activation_count for site, stats in block.errors.items()})
    tally.saturated.update({site: stats.saturated for site, stats in block.errors.items()})
