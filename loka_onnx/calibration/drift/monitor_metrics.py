"""Metrics of a monitor, written by `prometheus_client`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from loka_onnx.calibration.instruments.batch_spread import COLUMN
from loka_onnx.core.drift import DriftReport
from loka_onnx.errors import MissingPackage

if TYPE_CHECKING:
    from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric

PREFIX = "loka_onnx_"


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


@dataclass(frozen=True)
class MonitorMetrics:
    """A collector of `prometheus_client`, of one moment.

    Attributes:
        tally: Counted so far.
        report: The window against the profile; None before the first batch.
        labels: The model and the profile that are compared.
    """

    tally: Tally
    report: DriftReport | None
    labels: dict[str, str]

    def text(self) -> str:
        """Return the text format of Prometheus.

        Raises:
            MissingPackage: `prometheus_client` is not installed.
        """
        try:
            from prometheus_client import generate_latest
        except ImportError as error:
            raise MissingPackage(
                "prometheus_client is not installed",
                evidence=str(error),
                remedy="pip install 'loka-onnx[serve]'",
            ) from error
        return generate_latest(self).decode()

    def collect(self) -> Iterable[Metric]:
        """Return the metrics; those without samples are left out."""
        return [metric for metric in self._metrics() if metric.samples]

    def _metrics(self) -> Iterable[Metric]:
        info = _gauge("monitor_info", "The model and the profile that rows are held against.", *self.labels)
        info.add_metric(list(self.labels.values()), 1)
        yield info
        yield from _counters(self.tally)
        yield from _by_name(self.tally)
        if self.report is not None:
            yield from _window(self.report)
            yield from _tensors(self.report)
            yield from _sites(self.report)


def _gauge(name: str, text: str, *labels: str) -> GaugeMetricFamily:
    from prometheus_client.metrics_core import GaugeMetricFamily

    return GaugeMetricFamily(PREFIX + name, text, labels=labels)


def _counter(name: str, text: str, *labels: str) -> CounterMetricFamily:
    from prometheus_client.metrics_core import CounterMetricFamily

    return CounterMetricFamily(PREFIX + name, text, labels=labels)


def _single(name: str, text: str, value: float) -> GaugeMetricFamily:
    gauge = _gauge(name, text)
    gauge.add_metric([], value)
    return gauge


def _counters(tally: Tally) -> Iterable[Metric]:
    for name, text, value in (
        ("rows_fed", "Rows that were fed.", tally.fed),
        ("rows_sampled", "Rows that were drawn and could be used.", tally.sampled),
        ("rows_rejected", "Rows that were drawn and held a number or an id out of range.", tally.rejected),
        ("calls_rejected", "Calls whose arrays are not the inputs of the model.", tally.rejected_calls),
        ("rows_dropped", "Rows of batches that came faster than they could be measured.", tally.dropped),
        ("batches", "Batches that were measured.", tally.batches),
        ("batches_failed", "Batches that could not be measured; the log says why.", tally.failed_batches),
        ("cpu_seconds", "CPU time of measuring.", tally.seconds),
    ):
        counter = _counter(f"monitor_{name}", text)
        counter.add_metric([], value)
        yield counter


def _by_name(tally: Tally) -> Iterable[Metric]:
    for name, label, text, counts in (
        (
            "tensor_batches_beyond",
            "tensor",
            "Batches with a magnitude beyond the profile's range.",
            tally.beyond,
        ),
        ("site_activation_elements", "site", "Elements of the site's activation.", tally.elements),
        (
            "site_saturated_elements",
            "site",
            "Elements of the site's activation that its FP8 scale clips.",
            tally.saturated,
        ),
    ):
        counter = _counter(name, text, label)
        for key in sorted(counts):
            counter.add_metric([key], counts[key])
        yield counter


def _window(report: DriftReport) -> Iterable[Metric]:
    yield _single("window_batches", "Batches that the gauges speak of.", report.live_batches)
    yield _single(
        "window_judged",
        "1 where the window and the profile hold batches enough to judge drift; without it no alarm means "
        "nothing.",
        report.is_judged,
    )
    yield _single(
        "drift_alarms",
        f"Changes of the window that are certain (family-wise {report.family_wise:g}) and large enough to "
        "matter.",
        len(report.alarms),
    )
    alarms = _gauge("drift_alarm", "Size of a change that alarms, over its threshold.", "where", "measure")
    for alarm in report.alarms:
        excess = alarm.value / alarm.threshold if alarm.threshold else float("inf")
        alarms.add_metric([alarm.where, alarm.measure], excess)
    yield alarms


def _tensors(report: DriftReport) -> Iterable[Metric]:
    rms = _gauge("tensor_rms_ratio", "Root mean square over that of the profile.", "tensor")
    mean = _gauge("tensor_mean_shift", "Shift of the mean in standard deviations of the elements.", "tensor")
    peak = _gauge("tensor_range_ratio", "Largest magnitude over that of the profile.", "tensor")
    index = _gauge("tensor_stability_index", "Population stability index of magnitudes by octave.", "tensor")
    for tensor in sorted(report.tensors, key=lambda t: t.tensor):
        if tensor.shifts:
            rms.add_metric([tensor.tensor], 1.0 + tensor.effect("rms"))
            mean.add_metric([tensor.tensor], tensor.effect("mean"))
        peak.add_metric([tensor.tensor], tensor.range.growth)
        index.add_metric([tensor.tensor], tensor.stability_index)
    yield from (rms, mean, peak, index)
    yield from _columns(report)


def _columns(report: DriftReport) -> Iterable[Metric]:
    """Of columns that have names: of others they would be many and say little."""
    rms = _gauge("column_rms_ratio", "Root mean square over that of the profile.", "tensor", "column")
    mean = _gauge("column_mean_shift", "Shift of the mean in standard deviations.", "tensor", "column")
    for tensor in sorted(report.tensors, key=lambda t: t.tensor):
        for position, name in enumerate(tensor.columns):
            if not name or tensor.shift(f"{COLUMN}{position}.rms") is None:
                continue
            labels = [tensor.tensor, name]
            rms.add_metric(labels, 1.0 + tensor.effect(f"{COLUMN}{position}.rms"))
            mean.add_metric(labels, tensor.effect(f"{COLUMN}{position}.mean"))
    yield from (rms, mean)


def _sites(report: DriftReport) -> Iterable[Metric]:
    saturated = _gauge("site_saturated_share", "Share of the site's activation that its scale clips.", "site")
    before = _gauge("site_profile_saturated_share", "The same in the profile, which does not change.", "site")
    noise = _gauge(
        "site_noise_ratio",
        "Noise energy over signal energy of the site's output, over the same in the profile.",
        "site",
    )
    for site in sorted(report.sites, key=lambda s: s.site):
        saturated.add_metric([site.site], site.live_saturated)
        before.add_metric([site.site], site.profile_saturated)
        if site.profile_noise:
            noise.add_metric([site.site], site.live_noise / site.profile_noise)
    yield from (saturated, before, noise)
