"""What a monitor tells Prometheus."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from loka_onnx.calibration.instruments.batch_spread import COLUMN
from loka_onnx.core.drift import DriftReport
from loka_onnx.operations.drift.exposition import Family, Kind

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


def families(tally: Tally, report: DriftReport | None, labels: dict[str, str]) -> Iterable[Family]:
    """All metrics.

    Args:
        tally: Counted so far.
        report: The window against the profile; None before the first batch.
        labels: What is watched.
    """
    yield _single(
        "monitor_info", Kind.GAUGE, "The model and the profile that rows are held against.", 1, labels
    )
    yield from _counters(tally)
    yield from _by_name(tally)
    if report is not None:
        yield from _window(report)
        yield from _tensors(report)
        yield from _sites(report)


def _single(name: str, kind: Kind, text: str, value: float, labels: dict[str, str] | None = None) -> Family:
    family = Family(PREFIX + name, kind, text)
    family.add(value, **(labels or {}))
    return family


def _counters(tally: Tally) -> Iterable[Family]:
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
        yield _single(f"monitor_{name}_total", Kind.COUNTER, text, value)


def _by_name(tally: Tally) -> Iterable[Family]:
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
        family = Family(f"{PREFIX}{name}_total", Kind.COUNTER, text)
        for key in sorted(counts):
            family.add(counts[key], **{label: key})
        yield family


def _window(report: DriftReport) -> Iterable[Family]:
    yield _single("window_batches", Kind.GAUGE, "Batches that the gauges speak of.", report.live_batches)
    yield _single(
        "window_judged",
        Kind.GAUGE,
        "1 where the window and the profile hold batches enough to judge drift; without it no alarm means "
        "nothing.",
        report.is_judged,
    )
    yield _single(
        "drift_alarms",
        Kind.GAUGE,
        f"Changes of the window that are certain (family-wise {report.family_wise:g}) and large enough to "
        "matter.",
        len(report.alarms),
    )
    alarms = Family(PREFIX + "drift_alarm", Kind.GAUGE, "Size of a change that alarms, over its threshold.")
    for alarm in report.alarms:
        excess = alarm.value / alarm.threshold if alarm.threshold else float("inf")
        alarms.add(excess, where=alarm.where, measure=alarm.measure)
    yield alarms


def _tensors(report: DriftReport) -> Iterable[Family]:
    rms = Family(PREFIX + "tensor_rms_ratio", Kind.GAUGE, "Root mean square over that of the profile.")
    mean = Family(
        PREFIX + "tensor_mean_shift", Kind.GAUGE, "Shift of the mean in standard deviations of the elements."
    )
    peak = Family(PREFIX + "tensor_range_ratio", Kind.GAUGE, "Largest magnitude over that of the profile.")
    index = Family(
        PREFIX + "tensor_stability_index", Kind.GAUGE, "Population stability index of magnitudes by octave."
    )
    for tensor in sorted(report.tensors, key=lambda t: t.tensor):
        if tensor.shifts:
            rms.add(1.0 + tensor.effect("rms"), tensor=tensor.tensor)
            mean.add(tensor.effect("mean"), tensor=tensor.tensor)
        peak.add(tensor.range.growth, tensor=tensor.tensor)
        index.add(tensor.stability_index, tensor=tensor.tensor)
    yield from (rms, mean, peak, index)
    yield from _columns(report)


def _columns(report: DriftReport) -> Iterable[Family]:
    """Of columns that have names: of others they would be many and say little."""
    rms = Family(PREFIX + "column_rms_ratio", Kind.GAUGE, "Root mean square over that of the profile.")
    mean = Family(PREFIX + "column_mean_shift", Kind.GAUGE, "Shift of the mean in standard deviations.")
    for tensor in sorted(report.tensors, key=lambda t: t.tensor):
        for position, name in enumerate(tensor.columns):
            if not name or tensor.shift(f"{COLUMN}{position}.rms") is None:
                continue
            labels = {"tensor": tensor.tensor, "column": name}
            rms.add(1.0 + tensor.effect(f"{COLUMN}{position}.rms"), **labels)
            mean.add(tensor.effect(f"{COLUMN}{position}.mean"), **labels)
    yield from (rms, mean)


def _sites(report: DriftReport) -> Iterable[Family]:
    saturated = Family(
        PREFIX + "site_saturated_share", Kind.GAUGE, "Share of the site's activation that its scale clips."
    )
    before = Family(
        PREFIX + "site_profile_saturated_share", Kind.GAUGE, "The same in the profile, which does not change."
    )
    noise = Family(
        PREFIX + "site_noise_ratio",
        Kind.GAUGE,
        "Noise energy over signal energy of the site's output, over the same in the profile.",
    )
    for site in sorted(report.sites, key=lambda s: s.site):
        saturated.add(site.live_saturated, site=site.site)
        before.add(site.profile_saturated, site=site.site)
        if site.profile_noise:
            noise.add(site.live_noise / site.profile_noise, site=site.site)
    yield from (saturated, before, noise)
