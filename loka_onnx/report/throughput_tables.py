"""Tables of throughput: requests per second at a limit on the 99th percentile."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from loka_onnx.core.throughput import Throughput, ThroughputSet
from loka_onnx.report import numbers
from loka_onnx.report.data import ReportData
from loka_onnx.report.document import Cell, Field, Section, Tone, cell, fact, number, table_of, text
from loka_onnx.report.figures import at, derive, formed, shown, told


def throughput_sections(data: ReportData) -> tuple[Section, ...]:
    """Return every engine under load; empty for none."""
    measurements = data.throughput.measurements
    if not measurements:
        return ()
    paragraphs = (
        "The highest rate of requests whose 99th percentile of latency is under the limit. Requests arrive "
        "at random times (Poisson), whether or not earlier ones are answered, and latency counts from the "
        "arrival that was intended, so that what waits in the queue is in it. The share over the limit is "
        "held under 1 % by its upper end, and the rate was confirmed under other arrivals.",
    )
    items: list[str] = [
        told("{} at batch {}: {}", m.engine, shown(numbers.count, m, "batch"), m.failure)
        for m in measurements
        if m.failure
    ]
    items += _gains(data.throughput)
    table = table_of("Throughput", _FIELDS, measurements)
    return (Section("throughput", "Throughput", paragraphs, tuple(items), (table,)),)


def _there(name: str, form: Callable[[float], str]) -> Callable[[Throughput], str]:
    """Show a number of the trial at the highest rate."""
    return lambda measured: numbers.NONE if measured.best is None else shown(form, measured.best, name)


def _rate(measured: Throughput) -> Cell:
    answered = shown("{:,.1f}".format, measured, "requests_per_s")
    if not measured.requests_per_s:
        answered = told(numbers.NOT_MEASURED if measured.failure else "none is low enough")
    return cell(answered, Tone.WARN if measured.best is None else Tone.PLAIN)


def _rows(measured: Throughput) -> str:
    rows = derive("product", at(measured, "requests_per_s"), at(measured, "batch"))
    return formed("{:,.0f}".format, rows) if measured.requests_per_s else numbers.NONE


_FIELDS: tuple[Field[Throughput], ...] = (
    text("Engine", "engine"),
    fact("Batch", "batch", numbers.count),
    text("Is", "role"),
    text("Inputs", lambda measured: f"on the {measured.inputs}"),
    fact("Streams", "streams", numbers.count),
    fact("p99 limit", "p99_limit_us", numbers.latency),
    number("Requests/s", _rate),
    number("Rows/s", _rows),
    number("p50 there", _there("p50_us", numbers.latency)),
    number("p99 there", _there("p99_us", numbers.latency)),
    number("Over the limit, upper end", _there("over_upper", lambda share: f"{100 * share:.2f} %")),
    fact("Without pause", "capacity_per_s", "{:,.1f}".format),
    number("Of the generator, p99", _there("late_us", numbers.latency)),
)


def _gains(throughput: ThroughputSet) -> Iterator[str]:
    by_name = {(m.engine, m.batch): m for m in throughput.measurements}
    for gain in throughput.gains:
        ours, other = (by_name[engine, gain.batch] for engine in (gain.engine, gain.other))
        yield told(
            "{} at batch {}: the chosen engine answers {}× the requests of {}",
            gain.target,
            shown(numbers.count, ours, "batch"),
            formed("{:.2f}".format, derive("ratio", at(ours, "requests_per_s"), at(other, "requests_per_s"))),
            gain.other,
        )
