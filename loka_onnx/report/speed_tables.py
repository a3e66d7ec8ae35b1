"""Sites by accuracy and speed of FP8: safe or not, fast or not, or without a known speed.

A speed verdict is never guessed: a site without one has a column of its own. Norms have none and are left
out: they only choose between other precisions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from loka_onnx.core.plan import PrecisionPlan, SiteSpeed, SpeedVerdict, Verdict
from loka_onnx.core.site import Site, SiteKind
from loka_onnx.report import numbers
from loka_onnx.report.data import ReportData
from loka_onnx.report.document import Field, Table, Tone, cell, number, prose, table_of, text
from loka_onnx.report.figures import Place, Told, derive, formed, shown

SAFE_PLAN = "fp8-safe"
_ALWAYS = (Verdict.SAFE, Verdict.UNSAFE)
SPEED_TONES = {SpeedVerdict.FAST.value: Tone.GOOD, SpeedVerdict.SLOW.value: Tone.BAD}
SPEEDS = (SpeedVerdict.FAST.value, SpeedVerdict.SLOW.value, numbers.NOT_MEASURED)
"""Columns in order."""


@dataclass(frozen=True)
class Quadrant:
    """Sites of one accuracy verdict and one speed verdict of `SPEEDS`, in model order.

    Attributes:
        predicted: Number of sites with a predicted, not measured speed; empty for none.
        flop_share: Their share of the FP8-able FLOPs of the model after mods, padding included.
    """

    accuracy: Verdict
    speed: str
    sites: tuple[str, ...]
    count: Told
    predicted: Told
    flop_share: Told

    @property
    def tone(self) -> Tone:
        """Colour: good for safe and fast, the purpose of FP8."""
        return SPEED_TONES.get(self.speed, Tone.MUTED) if self.accuracy is Verdict.SAFE else Tone.PLAIN


@dataclass(frozen=True)
class Quadrants:
    """All sites but norms, on one device; without a name where no device has speed verdicts.

    There is one row per accuracy verdict, each with the columns of `SPEEDS`.
    """

    device: str
    rows: tuple[tuple[Quadrant, ...], ...]

    @property
    def caption(self) -> str:
        """Caption of the table."""
        on = f" on {self.device}" if self.device else "; no speed was measured or predicted"
        return f"Sites by accuracy and speed of FP8{on}"

    def table(self) -> Table:
        """The quadrants as table rows; others without a site are left out."""
        fields: tuple[Field[Quadrant], ...] = (
            text("Accuracy", "accuracy"),
            text("Speed", lambda quadrant: cell(quadrant.speed, quadrant.tone)),
            number("Sites", lambda quadrant: quadrant.count),
            number("FLOP share", lambda quadrant: quadrant.flop_share),
            prose("Names", lambda quadrant: ", ".join(quadrant.sites) or numbers.NONE),
        )
        listed = (q for row in self.rows for q in row if q.sites or q.speed != numbers.NOT_MEASURED)
        return table_of(self.caption, fields, listed, keys=2)


def quadrants(data: ReportData) -> tuple[Quadrants, ...]:
    """Return the quadrants of each device with speed verdicts; one without a device where there is none."""
    sites = [site for site in data.modified.sites if site.kind is not SiteKind.NORM]
    # The plan in which every site was judged.
    plan = data.plan(SAFE_PLAN) or next((p for p in data.plans.plans if p.quantized_sites), None)
    if not sites or plan is None:
        return ()
    verdicts = {d.site: d.verdict for d in plan.decisions}
    devices = dict.fromkeys(speed.device for speed in data.plans.speeds) or [""]
    return tuple(_on(data, device, sites, verdicts) for device in devices)


def speed_texts(data: ReportData) -> dict[str, str]:
    """Return the speed of FP8 at each site: ``fast``; of several devices, each by name.

    Sites of unknown speed are left out.
    """
    by_site: dict[str, dict[str, str]] = {}
    for speed in data.plans.speeds:
        by_site.setdefault(speed.site, {})[speed.device] = _known(speed)
    devices = dict.fromkeys(speed.device for speed in data.plans.speeds)
    if len(devices) < 2:
        return {site: known for site, by_device in by_site.items() for known in by_device.values()}
    return {
        site: "; ".join(f"{device}: {by_device.get(device, numbers.NOT_MEASURED)}" for device in devices)
        for site, by_device in by_site.items()
    }


def _known(speed: SiteSpeed) -> str:
    return numbers.NOT_MEASURED if speed.verdict is SpeedVerdict.UNKNOWN else speed.verdict.value


def _on(data: ReportData, device: str, sites: list[Site], verdicts: dict[str, Verdict]) -> Quadrants:
    speeds = {speed.site: speed for speed in data.plans.speeds if speed.device == device}
    groups: dict[tuple[Verdict, str], list[Site]] = {}
    for site in sites:
        known = _known(speeds[site.name]) if site.name in speeds else numbers.NOT_MEASURED
        groups.setdefault((verdicts.get(site.name, Verdict.NOT_JUDGED), known), []).append(site)
    judged = {accuracy for accuracy, _ in groups}
    rows = []
    for accuracy in (verdict for verdict in Verdict if verdict in _ALWAYS or verdict in judged):
        row = []
        for speed in SPEEDS:
            members = groups.get((accuracy, speed), [])
            known_speeds = [speeds[site.name] for site in members if speed != numbers.NOT_MEASURED]
            predicted = [known for known in known_speeds if not known.is_measured]
            row.append(
                Quadrant(
                    accuracy,
                    speed,
                    tuple(site.name for site in members),
                    _number_of(members),
                    _number_of(predicted) if predicted else Told(""),
                    _flop_share(data, members),
                )
            )
        rows.append(tuple(row))
    return Quadrants(device, tuple(rows))


def _number_of(entries: Sequence[object]) -> Told:
    return formed(numbers.count, derive("entries", *map(Place, entries)))


def _flop_share(data: ReportData, sites: Sequence[Site]) -> Told:
    if not data.modified.fp8_able_flops:
        return Told(numbers.NONE)
    flops = derive("sum", *(derive("flops", Place(site)) for site in sites if site.is_fp8_able))
    able = derive("fp8_able_flops", Place(data.modified, "sites"))
    return formed(numbers.share, derive("ratio", flops, able))


def speed_tables(data: ReportData, judged_in: PrecisionPlan | None) -> Iterator[Table]:
    """Yield the quadrants and savings by site, of each device with kernel times.

    `judged_in` is the plan whose accuracy verdicts are shown.
    """
    verdicts = {d.site: d.verdict for d in judged_in.decisions} if judged_in is not None else {}
    for of_device in quadrants(data):
        yield of_device.table()
        speeds = [speed for speed in data.plans.speeds if speed.device == of_device.device]
        if speeds:
            by = f"on {of_device.device} by kernel times"
            caption = f"What FP8 saves {by}; sites of one tensor quantize it once"
            yield table_of(caption, _speed_fields(speeds, verdicts), speeds)


def _speed_fields(speeds: list[SiteSpeed], verdicts: dict[str, Verdict]) -> tuple[Field[SiteSpeed], ...]:
    def us(title: str, name: str) -> Iterator[Field[SiteSpeed]]:
        for batch in dict.fromkeys(batch for speed in speeds for batch in speed.saved_us):
            yield number(f"{title} at {batch}, µs", partial(_us, name, batch))

    def origin(speed: SiteSpeed) -> str:
        known = "measured" if speed.is_measured else "predicted"
        return numbers.NONE if speed.verdict is SpeedVerdict.UNKNOWN else known

    return (
        text("Site", "site"),
        text("Accuracy", lambda speed: verdicts.get(speed.site, Verdict.NOT_JUDGED)),
        text("Speed", lambda speed: cell(speed.verdict, SPEED_TONES.get(speed.verdict, Tone.MUTED))),
        *us("Product saves", "saved_us"),
        *us("Quantize", "quantize_us"),
        text("Tensor", "tensor"),
        text("Times", origin),
        prose("Reason", "reason"),
    )


def _us(name: str, batch: str, speed: SiteSpeed) -> str:
    times = getattr(speed, name)
    return shown("{:.2f}".format, times, batch) if batch in times else numbers.NONE
