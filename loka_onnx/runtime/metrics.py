"""Counters of a loaded engine, also for Prometheus.

`Metrics.snapshot` returns the numbers as a value. `Metrics` is also a collector of `prometheus_client`, which
is imported only for that; nothing is registered automatically::

    registry = prometheus_client.CollectorRegistry()
    registry.register(engine.metrics)

| name | labels | |
|---|---|---|
| `loka_onnx_request_seconds` | engine, batch | histogram, from the call to the answer, waiting included |
| `loka_onnx_rows_total` | engine, batch | rows answered |
| `loka_onnx_errors_total` | kind | requests that were refused (`request`), failed in the engine (`engine`), came after `close` (`closed`), or failed otherwise (`internal`) |
| `loka_onnx_running_requests` | | running or waiting for the engine |
| `loka_onnx_host_copies_total` | | requests from a device that were copied to the host, as the engine does not read them there |
| `loka_onnx_skipped_engines` | reason | preferred engines of the bundle that do not run here, by `Cause` |
| `loka_onnx_fallback` | | 1 where the FP32 model serves because no emitted engine runs here |
| `loka_onnx_engine_info` | engine, backend, plan, architecture | 1 |
| `loka_onnx_sampled_requests_total` | | requests whose values were counted (`saturation`) |
| `loka_onnx_sampled_values_total` | tensor | values counted |
| `loka_onnx_sampled_nonfinite_total` | tensor | of these, NaN or infinite |
| `loka_onnx_sampled_saturated_total` | tensor | of these, beyond the range of the tensor's calibrated FP8 scale |

Label `batch` is the smallest served batch size that holds the request, or a power of two where any size is
served; ``more`` beyond the largest. At most `MOST_SIZES` sizes are distinguished. Label `tensor` names
`MOST_TENSORS` tensors, those with a calibrated range first, and adds the rest as ``other``: a ranker may have
an input for each of thousands of columns.
"""  # noqa: E501 — a table cannot be broken

from __future__ import annotations

import itertools
import threading
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from loka_onnx.errors import MissingPackage
from loka_onnx.runtime.gate import Gate
from loka_onnx.runtime.health import Cause
from loka_onnx.runtime.saturation import Look

LATENCY_BOUNDS_S = (
    5e-5, 1e-4, 2e-4, 3e-4, 5e-4, 7.5e-4,
    1e-3, 1.5e-3, 2e-3, 3e-3, 5e-3, 7.5e-3, 1e-2, 2e-2, 5e-2, 0.1, 0.5, 1.0,
)  # fmt: skip
"""Upper bounds of the latency histogram, seconds: a ranker answers in 0.1 to 10 ms."""
MORE, OTHER = "more", "other"
MOST_SIZES = 32
"""Most batch buckets of an engine."""
MOST_TENSORS = 64
"""Most tensors with their own label."""
ERROR_KINDS = ("request", "engine", "closed", "internal")


@dataclass(frozen=True)
class LatencyHistogram:
    """Answered requests of one engine and batch bucket.

    Attributes:
        counts: Requests by bound of `LATENCY_BOUNDS_S`, not cumulative; the last is for longer ones.
        seconds: Sum of their latencies.
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
    """All numbers at one time.

    Attributes:
        latency: One histogram for each engine and batch bucket that has served.
        errors: Requests without an answer, by kind.
        host_copies: Requests that were copied from a device.
        skipped: Skipped engines by cause.
        is_fallback: Whether the FP32 model serves as fallback.
        engines: Loaded engines: id, backend, plan, architecture.
        sampled: Requests whose values were counted.
        looks: Counts of their values, by tensor.
    """

    latency: tuple[LatencyHistogram, ...]
    errors: dict[str, int]
    running: int
    host_copies: int
    skipped: dict[str, int]
    is_fallback: bool
    engines: tuple[tuple[str, str, str, str], ...]
    sampled: int
    looks: dict[str, Look] = field(default_factory=dict)

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
    """Counters of one engine, by batch bucket.

    Args:
        engine: Its id.
        sizes: Served batch sizes, ascending; empty for any.
        largest: Most rows of a request.
    """

    def __init__(self, engine: str, sizes: Sequence[int], largest: int) -> None:
        self.engine = engine
        # Powers of two up to one that holds the largest request.
        powers = tuple(1 << power for power in range(max(largest - 1, 0).bit_length() + 1))
        self._sizes = _thinned(tuple(sizes) or powers)
        self._series = tuple(_Series() for _ in range(len(self._sizes) + 1))

    def of(self, rows: int) -> _Series:
        """Counters of requests of so many rows."""
        return self._series[bisect_left(self._sizes, rows)]

    def histograms(self) -> Iterator[LatencyHistogram]:
        """Histograms of buckets that have served."""
        for batch, series in zip((*map(str, self._sizes), MORE), self._series, strict=True):
            if any(series.counts):
                yield LatencyHistogram(self.engine, batch, tuple(series.counts), series.seconds, series.rows)


class Metrics:
    """Counters of a loaded engine, thread-safe; `enabled` tells whether requests are counted and timed."""

    def __init__(self, *, enabled: bool = True) -> None:
        self.enabled = enabled
        self._lock = threading.Lock()
        self._engines: tuple[tuple[EngineSeries, tuple[str, str, str, str]], ...] = ()
        self._errors = dict.fromkeys(ERROR_KINDS, 0)
        self._gate: Gate | None = None
        self._host_copies, self._sampled = 0, 0
        self._skipped = {cause.value: 0 for cause in Cause}
        self._is_fallback = False
        self._looks: dict[str, Look] = {}

    def describe_engines(
        self,
        engines: Sequence[tuple[EngineSeries, tuple[str, str, str, str]]],
        causes: Sequence[Cause],
        gate: Gate,
        *,
        is_fallback: bool,
    ) -> None:
        """Set the serving engines, and the causes of skipped ones.

        Args:
            engines: Counters of each loaded engine, and its id, backend, plan and architecture.
            causes: One for each skipped engine.
            is_fallback: Whether the FP32 model serves as fallback.
        """
        with self._lock:
            self._engines, self._gate, self._is_fallback = tuple(engines), gate, is_fallback
            self._skipped = {cause.value: list(causes).count(cause) for cause in Cause}

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

    def looked(self, looks: Mapping[str, Look]) -> None:
        """Add the counts of a sampled request."""
        with self._lock:
            self._sampled += 1
            # The first tensors keep their labels: a counter must not change its label.
            for name, look in sorted(looks.items(), key=lambda item: item[1].saturated is None):
                self._looks[name] = self._looks.get(name, Look()).merge(look)

    def snapshot(self) -> Snapshot:
        """Return all numbers of one moment."""
        with self._lock:
            return Snapshot(
                latency=tuple(each for series, _ in self._engines for each in series.histograms()),
                errors=dict(self._errors),
                running=0 if self._gate is None else self._gate.inside,
                host_copies=self._host_copies,
                skipped=dict(self._skipped),
                is_fallback=self._is_fallback,
                engines=tuple(described for _, described in self._engines),
                sampled=self._sampled,
                looks=dict(self._looks),
            )

    def describe(self) -> list[Any]:
        """Return nothing, so that `CollectorRegistry.register` does not collect to learn the names."""
        return []

    def collect(self) -> Iterator[Any]:
        """Yield the numbers as metric families of `prometheus_client`.

        Raises:
            MissingPackage: It is not installed.
        """
        try:
            from prometheus_client.metrics_core import (
                CounterMetricFamily,
                GaugeMetricFamily,
                HistogramMetricFamily,
            )
        except ImportError as error:
            raise MissingPackage(
                "prometheus_client is not installed",
                evidence=str(error),
                remedy="pip install prometheus_client, or read `engine.metrics.snapshot()`",
            ) from error

        now = self.snapshot()
        labels = ["engine", "batch"]
        seconds = HistogramMetricFamily(
            "loka_onnx_request_seconds", "From the call to the answer, waiting included", labels=labels
        )
        rows = CounterMetricFamily("loka_onnx_rows", "Rows answered", labels=labels)
        for each in now.latency:
            seconds.add_metric([each.engine, each.batch], _cumulative(each.counts), each.seconds)
            rows.add_metric([each.engine, each.batch], each.rows)
        yield from (seconds, rows)

        errors = CounterMetricFamily("loka_onnx_errors", "Requests without an answer", labels=["kind"])
        for kind, count in now.errors.items():
            errors.add_metric([kind], count)
        yield errors
        yield GaugeMetricFamily("loka_onnx_running_requests", "Requests in work", value=now.running)
        yield CounterMetricFamily(
            "loka_onnx_host_copies", "Requests that were copied from a device", value=now.host_copies
        )

        skipped = GaugeMetricFamily(
            "loka_onnx_skipped_engines", "Engines that were passed over", labels=["reason"]
        )
        for cause, count in now.skipped.items():
            skipped.add_metric([cause], count)
        yield skipped
        yield GaugeMetricFamily(
            "loka_onnx_fallback", "Whether the FP32 model stands in", value=float(now.is_fallback)
        )
        info = GaugeMetricFamily(
            "loka_onnx_engine_info", "Loaded engines", labels=["engine", "backend", "plan", "architecture"]
        )
        for described in now.engines:
            info.add_metric(list(described), 1)
        yield info

        yield CounterMetricFamily(
            "loka_onnx_sampled_requests", "Requests whose values were looked at", value=now.sampled
        )
        values = CounterMetricFamily("loka_onnx_sampled_values", "Values looked at", labels=["tensor"])
        nonfinite = CounterMetricFamily(
            "loka_onnx_sampled_nonfinite", "Of these, NaN or infinite", labels=["tensor"]
        )
        saturated = CounterMetricFamily(
            "loka_onnx_sampled_saturated", "Of these, beyond the calibrated FP8 range", labels=["tensor"]
        )
        for name, look in _labelled(now.looks).items():
            values.add_metric([name], look.values)
            nonfinite.add_metric([name], look.nonfinite)
            if look.saturated is not None:
                saturated.add_metric([name], look.saturated)
        yield from (values, nonfinite, saturated)


def _thinned(sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Select at most `MOST_SIZES` of ascending sizes, evenly spaced, including the largest."""
    step = -(-len(sizes) // MOST_SIZES)
    return sizes if step <= 1 else sizes[::-1][::step][::-1]


def _labelled(looks: Mapping[str, Look]) -> dict[str, Look]:
    """Counts by tensor, those beyond `MOST_TENSORS` added up."""
    named = dict(itertools.islice(looks.items(), MOST_TENSORS))
    for look in itertools.islice(looks.values(), MOST_TENSORS, None):
        named[OTHER] = named.get(OTHER, Look()).merge(look)
    return named


def _cumulative(counts: Sequence[int]) -> list[tuple[str, float]]:
    """Cumulative buckets of Prometheus, the last one for all requests."""
    total, buckets = 0, []
    for bound, count in zip((*map(str, LATENCY_BOUNDS_S), "+Inf"), counts, strict=True):
        total += count
        buckets.append((bound, float(total)))
    return buckets
