"""Metrics of a monitor, for Prometheus."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from loka_onnx.calibration.observers.batch_spread import COLUMN
from loka_onnx.errors import MissingPackage
from loka_onnx.operations.drift.report import DriftReport

PREFIX = "loka_onnx_"
Gauge = Callable[..., None]
"""Adds a value to a gauge: name, help, value, labels."""


@dataclass
class Tally:
    """Counts since the monitor was made; edited in place.

    Attributes:
        fed: Rows that were fed.
        sampled: Rows that were drawn and could be used.
        rejected: Rows that were drawn and could not.
        rejected_calls: Calls whose arrays are not the model's inputs.
        dropped: Rows of batches that found no place to wait.
        batches: Batches that were measured.
        failed_batches: Batches that could not be.
        seconds: CPU time of measuring.
        beyond: Batches beyond the profile's range, by tensor.
        elements: Activation elements, by site.
        saturated: Those beyond the format's range, by site.
    """

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


@dataclass(frozen=True, eq=False)
class MonitorCollector:
    """All metrics of a monitor, as a collector of `prometheus_client`.

    Attributes:
        tally: Counted so far.
        report: The window against the profile; None before the first batch.
        labels: What is watched.
    """

    tally: Tally
    report: DriftReport | None
    labels: dict[str, str]

    def collect(self) -> Iterator[Any]:
        """Yield the metric families that have samples."""
        from prometheus_client.core import CounterMetricFamily as Counters
        from prometheus_client.core import GaugeMetricFamily

        found: dict[str, Any] = {}

        def gauge(name: str, text: str, value: float, **labels: str) -> None:
            family = found.setdefault(name, GaugeMetricFamily(PREFIX + name, text, labels=list(labels)))
            family.add_metric(list(labels.values()), value)

        for attribute, name, text in _COUNTERS:
            yield Counters(f"{PREFIX}monitor_{name}", text, value=getattr(self.tally, attribute))
        for attribute, name, label, text in _COUNTERS_BY_NAME:
            family = Counters(PREFIX + name, text, labels=[label])
            for key, count in sorted(getattr(self.tally, attribute).items()):
                family.add_metric([key], count)
            if family.samples:
                yield family
        gauge("monitor_info", "The model and the profile that rows are held against.", 1, **self.labels)
        if self.report is not None:
            _add_window(self.report, gauge)
            _add_tensors(self.report, gauge)
            _add_sites(self.report, gauge)
        yield from found.values()


def exposition(collector: MonitorCollector) -> str:
    """All metrics in the text format of Prometheus.

    Raises:
        MissingPackage: `prometheus_client` is not installed.
    """
    try:
        from prometheus_client import CollectorRegistry, generate_latest
    except ImportError as error:
        raise MissingPackage(
            "prometheus_client is not installed", evidence=str(error), remedy="pip install 'loka-onnx[serve]'"
        ) from error
    registry = CollectorRegistry(auto_describe=False)
    registry.register(collector)
    return generate_latest(registry).decode()


def _add_window(report: DriftReport, gauge: Gauge) -> None:
    gauge("window_batches", "Batches that the gauges speak of.", report.live_batches)
    text = "1 where window and profile hold enough batches to judge drift; otherwise no alarm means nothing."
    gauge("window_judged", text, report.is_judged)
    text = f"Changes of the window that are certain (family-wise {report.family_wise:g}) and matter."
    gauge("drift_alarms", text, len(report.alarms))
    for alarm in report.alarms:
        excess = alarm.value / alarm.threshold if alarm.threshold else float("inf")
        text = "Size of a change that alarms, over its threshold."
        gauge("drift_alarm", text, excess, where=alarm.where, measure=alarm.measure)


def _add_tensors(report: DriftReport, gauge: Gauge) -> None:
    over, shift = "Root mean square over that of the profile.", "Shift of the mean in standard deviations."
    peak, index = "Largest magnitude over that of the profile.", "Population stability index by octave."
    for tensor in sorted(report.tensors, key=lambda t: t.tensor):
        label = {"tensor": tensor.tensor}
        if tensor.shifts:
            gauge("tensor_rms_ratio", over, 1.0 + tensor.effect("rms"), **label)
            gauge("tensor_mean_shift", shift, tensor.effect("mean"), **label)
        gauge("tensor_range_ratio", peak, tensor.range.growth, **label)
        gauge("tensor_stability_index", index, tensor.stability_index, **label)
        # Columns without names would be many and say little.
        for position, name in enumerate(tensor.columns):
            if name and tensor.shift(f"{COLUMN}{position}.rms") is not None:
                rms, mean = (tensor.effect(f"{COLUMN}{position}.{what}") for what in ("rms", "mean"))
                gauge("column_rms_ratio", over, 1.0 + rms, **label, column=name)
                gauge("column_mean_shift", shift, mean, **label, column=name)


def _add_sites(report: DriftReport, gauge: Gauge) -> None:
    noise = "Noise energy over signal energy of the site's output, over the same in the profile."
    share, before = "Share of the site's activation that its scale clips.", "The same in the profile."
    for site in sorted(report.sites, key=lambda s: s.site):
        label = {"site": site.site}
        gauge("site_saturated_share", share, site.live_saturated, **label)
        gauge("site_profile_saturated_share", before, site.profile_saturated, **label)
        if site.profile_noise:
            gauge("site_noise_ratio", noise, site.live_noise / site.profile_noise, **label)
