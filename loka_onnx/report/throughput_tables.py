"""Tables of throughput: requests per second at a limit on the 99th percentile."""

from __future__ import annotations

from loka_onnx.core.throughput import Gain, Throughput
from loka_onnx.report import numbers
from loka_onnx.report.data import ReportData
from loka_onnx.report.document import Cell, Column, Section, Table, Tone, cell

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
"""Part of the limit from which on what the load generator adds is marked."""


def throughput_sections(data: ReportData) -> tuple[Section, ...]:
    """Every engine that was put under load; nothing where none was."""
    found = data.throughput.measurements
    if not found:
        return ()
    paragraphs = (
        "The highest rate of requests whose 99th percentile of latency is under the limit. Requests arrive "
        "at random times (Poisson), whether or not earlier ones are answered, and latency counts from the "
        "arrival that was intended, so that what waits in the queue is in it. The share over the limit is "
        "held under 1 % by its upper end, and the rate was confirmed under other arrivals.",
    )
    items = [f"{m.engine} at batch {numbers.count(m.batch)}: {m.failure}" for m in found if m.failure]
    items += [_gain(gain) for gain in data.throughput.gains]
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
            cell(numbers.latency(best.p50_us)),
            cell(numbers.latency(best.p99_us)),
            cell(f"{100 * best.over_upper:.2f} %"),
        )
        tone = Tone.WARN if best.late_us > LATE * measured.p99_limit_us else Tone.PLAIN
        late = cell(numbers.latency(best.late_us), tone)
    rate = f"{measured.requests_per_s:,.1f}" if measured.requests_per_s else "none is low enough"
    return (
        cell(measured.engine),
        cell(numbers.count(measured.batch)),
        cell(measured.role),
        cell(f"on the {measured.inputs}"),
        cell(str(measured.streams)),
        cell(numbers.latency(measured.p99_limit_us)),
        cell(numbers.NOT_MEASURED if measured.failure else rate, Tone.WARN if best is None else Tone.PLAIN),
        cell(f"{measured.rows_per_s:,.0f}" if measured.requests_per_s else numbers.NONE),
        *under,
        cell(f"{measured.capacity_per_s:,.1f}" if measured.capacity_per_s else numbers.NONE),
        late,
    )


def _gain(gain: Gain) -> str:
    return (
        f"{gain.target} at batch {numbers.count(gain.batch)}: the chosen engine answers {gain.ratio:.2f}× "
        f"the requests of {gain.other}"
    )
