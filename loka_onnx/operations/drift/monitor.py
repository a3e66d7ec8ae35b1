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
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from loka_onnx.calibration.observers.sampling import COLUMN
from loka_onnx.calibration.passes.executors import BatchResult, ReductionWork
from loka_onnx.calibration.passes.totals import ErrorTotals, RangeWork
from loka_onnx.core import serde
from loka_onnx.core.artifact import TensorSpec
from loka_onnx.data import Batch
from loka_onnx.errors import ConfigError, DataError, MissingPackage
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
from loka_onnx.operations.drift.measure import drift_report
from loka_onnx.operations.drift.report import DriftOptions, DriftReport

PREFIX = "loka_onnx_"


@dataclass
class Tally:
    """Counts since the monitor was made; edited in place. `_COUNTERS` says what each counts."""

    fed: int = 0
    sampled: int = 0
    rejected: int = 0
    rejected_calls: int = 0
    dropped: int = 0
    batches: int = 0
    failed_batches: int = 0
    seconds: float = 0.0
    beyond: Counter[str] = field(default_factory=Counter)
    elements: Counter[str] = field(default_factory=Counter)
    saturated: Counter[str] = field(default_factory=Counter)


_COUNTERS = (
    # Attribute of the tally, name, help.
    ("fed", "rows_fed", "Rows that were fed."),
    ("sampled", "rows_sampled", "Rows that were drawn and could be used."),
    ("rejected", "rows_rejected", "Rows that were drawn and held a number or an id out of range."),
    ("rejected_calls", "calls_rejected", "Calls whose arrays are not the inputs of the model."),
    ("dropped", "rows_dropped", "Rows of batches that came faster than they could be measured."),
    ("batches", "batches", "Batches that were measured."),
    ("failed_batches", "batches_failed", "Batches that could not be measured; the log says why."),
    ("seconds", "cpu_seconds", "CPU time of measuring."),
)
_COUNTERS_BY_NAME = (
    # Attribute of the tally, name, label, help.
    ("beyond", "tensor_batches_beyond", "tensor", "Batches with a magnitude beyond the profile's range."),
    ("elements", "site_activation_elements", "site", "Elements of the site's activation."),
    ("saturated", "site_saturated_elements", "site", "Elements that the site's FP8 scale clips."),
)
_GAUGES = {
    "monitor_info": "The model and the profile that rows are held against.",
    "window_batches": "Batches that the gauges speak of.",
    "window_judged": "1 where there are enough batches to judge drift; otherwise no alarm means nothing.",
    "drift_alarms": "Changes of the window that are certain and matter.",
    "drift_alarm": "Size of a change that alarms, over its threshold.",
    "tensor_rms_ratio": "Root mean square over that of the profile.",
    "tensor_mean_shift": "Shift of the mean in standard deviations.",
    "tensor_range_ratio": "Largest magnitude over that of the profile.",
    "tensor_stability_index": "Population stability index by octave.",
    "column_rms_ratio": "Root mean square over that of the profile.",
    "column_mean_shift": "Shift of the mean in standard deviations.",
    "site_saturated_share": "Share of the site's activation that its scale clips.",
    "site_profile_saturated_share": "The same in the profile.",
    "site_noise_ratio": "Noise energy over signal energy of the site's output, over the same in the profile.",
}
_Sample = tuple[str, float, dict[str, str]]
"""Gauge, value, labels."""


def exposition(tally: Tally, report: DriftReport | None, labels: dict[str, str]) -> str:
    """All metrics in the text format of Prometheus, or MissingPackage where its client is not installed.

    `report` is of the window, None before the first batch; `labels` are digests of the model and the profile.
    """
    with MissingPackage(
        "E1625 prometheus_client is not installed", remedy="pip install 'loka-onnx[serve]'"
    ).in_place_of(ImportError):
        from prometheus_client import CollectorRegistry, generate_latest
    registry = CollectorRegistry(auto_describe=False)
    registry.register(
        _Collector(tally, [("monitor_info", 1.0, labels), *(_gauges(report) if report else ())])
    )
    return generate_latest(registry).decode()


@dataclass(frozen=True, eq=False)
class _Collector:
    tally: Tally
    samples: list[_Sample]

    def collect(self) -> Iterator[Any]:
        """Yield the metric families that have samples."""
        from prometheus_client.core import CounterMetricFamily as Counters
        from prometheus_client.core import GaugeMetricFamily

        for attribute, name, text in _COUNTERS:
            yield Counters(f"{PREFIX}monitor_{name}", text, value=getattr(self.tally, attribute))
        for attribute, name, label, text in _COUNTERS_BY_NAME:
            family = Counters(PREFIX + name, text, labels=[label])
            for key, count in sorted(getattr(self.tally, attribute).items()):
                family.add_metric([key], count)
            if family.samples:
                yield family
        gauges: dict[str, Any] = {}
        for name, value, labels in self.samples:
            new = GaugeMetricFamily(PREFIX + name, _GAUGES[name], labels=list(labels))
            gauges.setdefault(name, new).add_metric(list(labels.values()), value)
        yield from gauges.values()


def _gauges(report: DriftReport) -> Iterator[_Sample]:
    yield "window_batches", report.live_batches, {}
    yield "window_judged", report.is_judged, {}
    yield "drift_alarms", len(report.alarms), {}
    for alarm in report.alarms:
        excess = alarm.value / alarm.threshold if alarm.threshold else float("inf")
        yield "drift_alarm", excess, {"where": alarm.where, "measure": alarm.measure}
    for tensor in sorted(report.tensors, key=lambda t: t.tensor):
        label = {"tensor": tensor.tensor}
        if tensor.shifts:
            yield "tensor_rms_ratio", 1.0 + tensor.effect("rms"), label
            yield "tensor_mean_shift", tensor.effect("mean"), label
        yield "tensor_range_ratio", tensor.range.growth, label
        yield "tensor_stability_index", tensor.stability_index, label
        # Columns without names would be many and say little.
        for place, name in enumerate(tensor.columns):
            if name and tensor.shift(f"{COLUMN}{place}.rms") is not None:
                labels = {**label, "column": name}
                yield "column_rms_ratio", 1.0 + tensor.effect(f"{COLUMN}{place}.rms"), labels
                yield "column_mean_shift", tensor.effect(f"{COLUMN}{place}.mean"), labels
    for site in sorted(report.sites, key=lambda s: s.site):
        label = {"site": site.site}
        yield "site_saturated_share", site.live_saturated, label
        yield "site_profile_saturated_share", site.profile_saturated, label
        if site.profile_noise:
            yield "site_noise_ratio", site.live_noise / site.profile_noise, label


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
        names = [spec.name for spec in self.inputs]
        if set(arrays) != set(names):
            raise DataError(
                "E1620 what was fed are not the inputs of the model",
                evidence=f"fed {', '.join(sorted(arrays)) or 'nothing'}; the inputs are {', '.join(names)}",
                remedy="feed one array for each input, the rows on axis 0",
            )
        lengths = set[int]()
        for spec in self.inputs:
            array = arrays[spec.name]
            shape, evidence = tuple(array.shape), ""
            if len(shape) != len(spec.shape) or any(
                d not in (None, n) for d, n in zip(spec.shape[1:], shape[1:], strict=True)
            ):
                evidence = f"its shape is {shape}"
            elif not np.can_cast(array.dtype, np.dtype(spec.dtype), "same_kind"):
                evidence = f"its type is {array.dtype}"
            if evidence:
                raise DataError(
                    f"E1622 what was fed to input '{spec.name}' does not fit",
                    evidence=f"{evidence}; the model takes {spec.dtype} of shape {spec.shape}",
                    remedy="feed what the model is fed",
                )
            lengths.add(shape[0])
        if len(lengths) != 1:
            raise DataError(
                "E1621 the arrays that were fed have different numbers of rows",
                evidence=f"{', '.join(map(str, sorted(lengths)))} rows",
                remedy="feed the same rows to every input",
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

    `baseline` is model and profile (`loka_onnx.open_run(…).baseline`). `scratch` is for instrumented models,
    on the model's file system, whose tables stay mapped; a temporary directory for None.
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
        return drift_report(self.baseline, reduce(Live.merge, blocks), self.options.drift) if blocks else None

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
    tally.beyond.update(block.beyond)
    tally.elements.update({site: stats.activation_count for site, stats in block.errors.items()})
    tally.saturated.update({site: stats.saturated for site, stats in block.errors.items()})
