"""Tables of the time that FP8 saves at each site by kernel times, behind the quadrants."""

from __future__ import annotations

from collections.abc import Iterator

from loka_onnx.core.plan import PrecisionPlan, SiteSpeed, SpeedVerdict, Verdict
from loka_onnx.report import numbers
from loka_onnx.report.data import ReportData
from loka_onnx.report.document import Cell, Column, Table, Tone, cell
from loka_onnx.report.figures import shown
from loka_onnx.report.quadrants import quadrants

_SPEED_TONES = {
    SpeedVerdict.FAST: Tone.GOOD,
    SpeedVerdict.SLOW: Tone.BAD,
    SpeedVerdict.UNKNOWN: Tone.MUTED,
}


def speed_tables(data: ReportData, judged_in: PrecisionPlan | None) -> Iterator[Table]:
    """Yield the quadrants and savings by site, of each device with kernel times.

    Args:
        judged_in: The plan whose accuracy verdicts are shown.
    """
    verdicts = {d.site: d.verdict for d in judged_in.decisions} if judged_in is not None else {}
    for found in quadrants(data):
        yield found.table()
        speeds = [speed for speed in data.plans.speeds if speed.device == found.device]
        if speeds:
            yield _by_site(found.device, speeds, verdicts)


def _by_site(device: str, speeds: list[SiteSpeed], verdicts: dict[str, Verdict]) -> Table:
    batches = list(dict.fromkeys(batch for speed in speeds for batch in speed.saved_us))
    columns = (
        Column("Site"),
        Column("Accuracy"),
        Column("Speed"),
        *(Column(f"Product saves at {batch}, µs", numeric=True) for batch in batches),
        *(Column(f"Quantize at {batch}, µs", numeric=True) for batch in batches),
        Column("Tensor"),
        Column("Times"),
        Column("Reason", prose=True),
    )
    rows = tuple(
        (
            cell(speed.site),
            cell(verdicts.get(speed.site, Verdict.NOT_JUDGED)),
            cell(speed.verdict, _SPEED_TONES[speed.verdict]),
            *(_us(speed.saved_us, batch) for batch in batches),
            *(_us(speed.quantize_us, batch) for batch in batches),
            cell(speed.tensor),
            cell(_source(speed)),
            cell(speed.reason),
        )
        for speed in speeds
    )
    caption = f"What FP8 saves on {device} by kernel times; sites of one tensor quantize it once"
    return Table(caption, columns, rows)


def _source(speed: SiteSpeed) -> str:
    if speed.verdict is SpeedVerdict.UNKNOWN:
        return numbers.NONE
    return "measured" if speed.is_measured else "predicted"


def _us(times: dict[str, float], batch: str) -> Cell:
    return cell(shown("{:.2f}".format, times, batch) if batch in times else numbers.NONE)
