"""Counters of a loaded engine, also for Prometheus.

`Metrics.snapshot` returns the numbers as a value. `Metrics` is also a collector of `prometheus_client`, which
is imported only for that; nothing is registered automatically::

    registry = prometheus_client.CollectorRegistry()
    registry.register(engine.metrics)

Label `batch` is the smallest served batch size that holds the request, or a power of two where any size is
served; ``more`` beyond the largest. At most `MOST_SIZES` sizes are distinguished.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from loka_onnx.errors import MissingPackage
from loka_onnx.runtime.health import Cause

LATENCY_BOUNDS_S = (
    5e-5, 1e-4, 2e-4, 3e-4, 5e-4, 7.5e-4,
    1e-3, 1.5e-3, 2e-3, 3e-3, 5e-3, 7.5e-3, 1e-2, 2e-2, 5e-2, 0.1, 0.5, 1.0,
)  # fmt: skip
"""Upper bounds of the latency histogram, seconds: a ranker answers in 0.1 to 10 ms."""
MORE = "more"
MOST_SIZES = 32
"""Most batch buckets of an engine."""
ERROR_KINDS = ("request", "engine", "closed", "internal")
"""Requests that were refused, failed in the engine, came after `close`, or failed otherwise."""
_SERIES = ("engine", "batch")
_FAMILIES: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "rows_total": ("Rows answered", _SERIES),
    "errors_total": ("Requests without an answer", ("kind",)),
    "running_requests": ("Requests that run or wait for the engine", ()),
    "host_copies_total": ("Requests from a device that were copied to the host", ()),
    "skipped_engines": ("Preferred engines of the bundle that do not run here", ("reason",)),
    "fallback": ("1 where the FP32 model serves because no emitted engine runs here", ()),
    "engine_info": ("Loaded engines", ("engine", "backend", "plan", "architecture")),
}
"""Help and labels of the families beside the histogram `loka_onnx_request_seconds`."""


@dataclass(frozen=True)
class LatencyHistogram:
    """Answered requests of one engine and batch bucket. `counts` are by bound of `LATENCY_BOUNDS_S`, not
    cumulative, the last for longer ones; `seconds` is the sum of their latencies.
    """

    engine: str
    batch: str
    counts: tuple[int, ...]
    seconds: float
    rows: int

    @property
    def requests(self) -> int:
        """Number of requests."""
        return sum(self.counts)


@dataclass(frozen=True)
class Snapshot:
    """All numbers at one time; `engines` are id, backend, plan and architecture of each."""

    latency: tuple[LatencyHistogram, ...]
    errors: dict[str, int]
    running: int
    host_copies: int
    skipped: dict[str, int]
    is_fallback: bool
    engines: tuple[tuple[str, str, str, str], ...]

    @property
    def requests(self) -> int:
        """Answered requests."""
        return sum(each.requests for each in self.latency)

    @property
    def rows(self) -> int:
        """Answered rows."""
        return sum(each.rows for each in self.latency)


class _Series:
    """Counters of one engine and batch bucket; guarded by the lock of `Metrics`."""

    __slots__ = ("counts", "rows", "seconds")

    def __init__(self) -> None:
        self.counts = [0] * (len(LATENCY_BOUNDS_S) + 1)
        self.seconds, self.rows = 0.0, 0


class EngineSeries:
    """Counters of one engine, by served batch size (any size where there are none) up to `largest` rows."""

    def __init__(self, engine: str, sizes: Sequence[int], largest: int) -> None:
        self.engine = engine
        # Powers of two up to one that holds the largest request.
        powers = tuple(1 << power for power in range(max(largest - 1, 0).bit_length() + 1))
        self._sizes = _thinned(tuple(sizes) or powers)
        self._series = tuple(_Series() for _ in range(len(self._sizes) + 1))

    def of(self, rows: int) -> _Series:
        """Counters of the smallest size that holds so many rows, or of larger ones where none does."""
        return self._series[bisect_left(self._sizes, rows)]

    def histograms(self) -> Iterator[LatencyHistogram]:
        """Histograms of buckets that have served."""
        for batch, series in zip((*map(str, self._sizes), MORE), self._series, strict=True):
            if any(series.counts):
                yield LatencyHistogram(self.engine, batch, tuple(series.counts), series.seconds, series.rows)


class Metrics:
    """Counters of a loaded engine, thread-safe. Their owner sets the serving `engines` (id, backend, plan and
    architecture), the cause of each `skipped` one, and a function that returns the `running` requests.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.engines: tuple[tuple[EngineSeries, tuple[str, str, str, str]], ...] = ()
        self.skipped: tuple[Cause, ...] = ()
        self.running: Callable[[], int] = lambda: 0
        self.is_fallback = False
        self._errors = dict.fromkeys(ERROR_KINDS, 0)
        self._host_copies = 0

    def answered(self, series: _Series, rows: int, seconds: float) -> None:
        """Count an answered request."""
        place = bisect_left(LATENCY_BOUNDS_S, seconds)
        with self._lock:
            series.counts[place] += 1
            series.seconds += seconds
            series.rows += rows

    def failed(self, kind: str) -> None:
        """Count a request without an answer; `kind` is one of `ERROR_KINDS`."""
        with self._lock:
            self._errors[kind] += 1

    def copied(self) -> None:
        """Count a request that was copied from a device to the host."""
        with self._lock:
            self._host_copies += 1

    def snapshot(self) -> Snapshot:
        """Return all numbers of one moment."""
        with self._lock:
            return Snapshot(
                latency=tuple(each for series, _ in self.engines for each in series.histograms()),
                errors=dict(self._errors),
                running=self.running(),
                host_copies=self._host_copies,
                skipped={cause.value: self.skipped.count(cause) for cause in Cause},
                is_fallback=self.is_fallback,
                engines=tuple(described for _, described in self.engines),
            )

    def describe(self) -> list[Any]:
        """Return nothing, so that `CollectorRegistry.register` does not collect to learn the names."""
        return []

    def collect(self) -> Iterator[Any]:
        """Yield the numbers as metric families of `prometheus_client` (`MissingPackage` without it)."""
        with MissingPackage(
            "E1313 prometheus_client is not installed",
            remedy="pip install prometheus_client, or read `engine.metrics.snapshot()`",
        ).in_place_of(ImportError):
            from prometheus_client import metrics_core

        now = self.snapshot()
        seconds = metrics_core.HistogramMetricFamily(
            "loka_onnx_request_seconds", "From the call to the answer, waiting included", labels=_SERIES
        )
        bounds = (*map(str, LATENCY_BOUNDS_S), "+Inf")
        for each in now.latency:
            buckets = list(zip(bounds, map(float, accumulate(each.counts)), strict=True))
            seconds.add_metric((each.engine, each.batch), buckets, each.seconds)
        yield seconds
        values: dict[str, dict[tuple[str, ...], float]] = {
            "rows_total": {(each.engine, each.batch): each.rows for each in now.latency},
            "errors_total": {(kind,): count for kind, count in now.errors.items()},
            "running_requests": {(): now.running},
            "host_copies_total": {(): now.host_copies},
            "skipped_engines": {(cause,): count for cause, count in now.skipped.items()},
            "fallback": {(): float(now.is_fallback)},
            "engine_info": dict.fromkeys(now.engines, 1.0),
        }
        for name, (text, labels) in _FAMILIES.items():
            is_counter = name.endswith("_total")
            kind = metrics_core.CounterMetricFamily if is_counter else metrics_core.GaugeMetricFamily
            family = kind(f"loka_onnx_{name}", text, labels=labels)
            for key, value in values[name].items():
                family.add_metric(key, value)
            yield family


def _thinned(sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Select at most `MOST_SIZES` of ascending sizes, evenly spaced, including the largest."""
    step = -(-len(sizes) // MOST_SIZES)
    return sizes if step <= 1 else sizes[::-1][::step][::-1]
