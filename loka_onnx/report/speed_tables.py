"""Tables of what FP8 saves at each site by kernel times, and of the quadrants: safe or not, fast or not."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from loka_onnx.core.plan import PrecisionPlan, SiteSpeed, SpeedVerdict, Verdict
from loka_onnx.report import numbers
from loka_onnx.report.data import ReportData
from loka_onnx.report.document import Cell, Column, Table, Tone, cell

_SPEED_TONES = {
    SpeedVerdict.FAST: Tone.GOOD,
    SpeedVerdict.SLOW: Tone.BAD,
    SpeedVerdict.UNKNOWN: Tone.MUTED,
}
_DECIDED = (Verdict.SAFE, Verdict.UNSAFE)


def speed_tables(data: ReportData, judged_in: PrecisionPlan | None) -> Iterator[Table]:
    """Both tables of each device that there are kernel times of; nothing where there are none.

    Args:
        data: The facts.
        judged_in: The plan whose verdicts on accuracy are shown.
    """
    for device in dict.fromkeys(speed.device for speed in data.plans.speeds):
        speeds = [speed for speed in data.plans.speeds if speed.device == device]
        verdicts = {d.site: d.verdict for d in judged_in.decisions} if judged_in is not None else {}
        yield _quadrants(device, speeds, verdicts)
        yield _by_site(device, speeds, verdicts)


def _quadrants(device: str, speeds: list[SiteSpeed], verdicts: dict[str, Verdict]) -> Table:
    """Sites of each pair of verdicts; the four of safe, unsafe, fast and slow also where they are empty."""
    columns = (
        Column("Accuracy"),
        Column("Speed"),
        Column("Sites", numeric=True),
        Column("Names", prose=True),
    )
    rows = []
    for accuracy, verdict in product(Verdict, SpeedVerdict):
        names = [
            speed.site
            for speed in speeds
            if (verdicts.get(speed.site, Verdict.NOT_JUDGED), speed.verdict) == (accuracy, verdict)
        ]
        if names or (accuracy in _DECIDED and verdict is not SpeedVerdict.UNKNOWN):
            tone = _SPEED_TONES[verdict] if accuracy is Verdict.SAFE else Tone.PLAIN
            count, listed = numbers.count(len(names)), ", ".join(names) or numbers.NONE
            rows.append((cell(accuracy), cell(verdict, tone), cell(count), cell(listed)))
    return Table(f"Sites by accuracy and speed of FP8 on {device}", columns, tuple(rows), keys=2)


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
            *(_us(speed.saved_us.get(batch)) for batch in batches),
            *(_us(speed.quantize_us.get(batch)) for batch in batches),
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


def _us(value: float | None) -> Cell:
    return cell(numbers.NONE if value is None else f"{value:.2f}")
