"""Metrics of a monitor, for Prometheus."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from loka_onnx.calibration.observers.sampling import COLUMN
from loka_onnx.errors import MissingPackage
from loka_onnx.operations.drift.report import DriftReport

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
