"""Tables of throughput: requests per second at a limit on the 99th percentile."""

from __future__ import annotations

from collections.abc import Iterator

from loka_onnx.core.throughput import Throughput, ThroughputSet
from loka_onnx.report import numbers
from loka_onnx.report.data import ReportData
from loka_onnx.report.document import Cell, Column, Section, Table, Tone, cell
from loka_onnx.report.figures import at, derive, formed, shown, told

_COLUMNS = (
    Column("Engine"),
    Column("Batch", numeric=True),
    Column("Is"),
    Column("Inputs"),
    Column("Streams", numeric=True),
    Column("p99 limit", numeric=True),
    Column("Requests/s", numeric=True),
    Column("Rows/s", numeric=True),
    Column("p50 there", numeric=True),
    Column("p99 there", numeric=True),
    Column("Over the limit, upper end", numeric=True),
    Column("Without pause", numeric=True),
    Column("Of the generator, p99", numeric=True),
)
LATE = 0.1
"""Share of the limit from which the load generator's part is marked."""


def throughput_sections(data: ReportData) -> tuple[Section, ...]:
    """Return every engine under load; empty for none."""
    found = data.throughput.measurements
    if not found:
        return ()
    paragraphs = (
        "The highest rate of requests whose 99th percentile of latency is under the limit. Requests arrive "
        "at random times (Poisson), whether or not earlier ones are answered, and latency counts from the "
        "arrival that was intended, so that what waits in the queue is in it. The share over the limit is "
        "held under 1 % by its upper end, and the rate was confirmed under other arrivals.",
    )
    items: list[str] = [
        told("{} at batch {}: {}", m.engine, shown(numbers.count, m, "batch"), m.failure)
        for m in found
        if m.failure
    ]
    items += _gains(data.throughput)
    table = Table("Throughput", _COLUMNS, tuple(_row(m) for m in found), keys=2)
    return (Section("throughput", "Throughput", paragraphs, tuple(items), (table,)),)


def _row(measured: Throughput) -> tuple[Cell, ...]:
    best = measured.best
    none = cell(numbers.NONE)
    if best is None:
        under = (none, none, none)
        late = none
    else:
        under = (
            cell(shown(numbers.latency, best, "p50_us")),
            cell(shown(numbers.latency, best, "p99_us")),
            cell(shown(_percent, best, "over_upper")),
        )
        tone = Tone.WARN if best.late_us > LATE * measured.p99_limit_us else Tone.PLAIN
        late = cell(shown(numbers.latency, best, "late_us"), tone)
    rate = at(measured, "requests_per_s")
    rows = derive("product", rate, at(measured, "batch"))
    answered = formed("{:,.1f}".format, rate) if measured.requests_per_s else "none is low enough"
    return (
        cell(measured.engine),
        cell(shown(numbers.count, measured, "batch")),
        cell(measured.role),
        cell(f"on the {measured.inputs}"),
        cell(shown(numbers.count, measured, "streams")),
        cell(shown(numbers.latency, measured, "p99_limit_us")),
        cell(
            numbers.NOT_MEASURED if measured.failure else answered, Tone.WARN if best is None else Tone.PLAIN
        ),
        cell(formed("{:,.0f}".format, rows) if measured.requests_per_s else numbers.NONE),
        *under,
        cell(
            shown("{:,.1f}".format, measured, "capacity_per_s") if measured.capacity_per_s else numbers.NONE
        ),
        late,
    )


def _percent(value: float) -> str:
    return f"{100 * value:.2f} %"


def _gains(found: ThroughputSet) -> Iterator[str]:
    by_name = {(m.engine, m.batch): m for m in found.measurements}
    for gain in found.gains:
        ours, other = (by_name[engine, gain.batch] for engine in (gain.engine, gain.other))
        yield told(
            "{} at batch {}: the chosen engine answers {}× the requests of {}",
            gain.target,
            shown(numbers.count, ours, "batch"),
            formed("{:.2f}".format, derive("ratio", at(ours, "requests_per_s"), at(other, "requests_per_s"))),
            gain.other,
        )
