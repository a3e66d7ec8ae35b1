"""Sites by accuracy and speed of FP8: safe or not, fast or not, or without a known speed.

A speed verdict is never guessed: a site without one has a column of its own. Norms have none and are left
out: they only choose between other precisions.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from loka_onnx.core.plan import PrecisionPlan, SiteSpeed, SpeedVerdict, Verdict
from loka_onnx.core.site import Site, SiteKind
from loka_onnx.report import numbers
from loka_onnx.report.data import ReportData
from loka_onnx.report.document import Column, Table, Tone, cell
from loka_onnx.report.figures import Place, Told, derive, formed

SAFE_PLAN = "fp8-safe"
_ALWAYS = (Verdict.SAFE, Verdict.UNSAFE)
SPEED_TONES = {SpeedVerdict.FAST.value: Tone.GOOD, SpeedVerdict.SLOW.value: Tone.BAD}
SPEEDS = (SpeedVerdict.FAST.value, SpeedVerdict.SLOW.value, numbers.NOT_MEASURED)
"""Columns in order."""


@dataclass(frozen=True)
class Quadrant:
    """Sites of one accuracy verdict and one speed verdict.

    Attributes:
        speed: ``fast``, ``slow`` or ``not measured``.
        sites: In model order.
        count: Number of sites.
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
    """All sites but norms, on one device.

    Attributes:
        device: Name in run files; empty where no device has speed verdicts.
        rows: One per accuracy verdict, each with the columns of `SPEEDS`.
    """

    device: str
    rows: tuple[tuple[Quadrant, ...], ...]

    @property
    def caption(self) -> str:
        """Caption of the table."""
        if not self.device:
            return "Sites by accuracy and speed of FP8; no speed was measured or predicted"
        return f"Sites by accuracy and speed of FP8 on {self.device}"

    def table(self) -> Table:
        """The quadrants as table rows; others without a site are left out."""
        columns = (
            Column("Accuracy"),
            Column("Speed"),
            Column("Sites", numeric=True),
            Column("FLOP share", numeric=True),
            Column("Names", prose=True),
        )
        found = [
            (
                cell(quadrant.accuracy),
                cell(quadrant.speed, quadrant.tone),
                cell(quadrant.count),
                cell(quadrant.flop_share),
                cell(", ".join(quadrant.sites) or numbers.NONE),
            )
            for row in self.rows
            for quadrant in row
            if quadrant.sites or quadrant.speed != numbers.NOT_MEASURED
        ]
        return Table(self.caption, columns, tuple(found), keys=2)


def quadrants(data: ReportData) -> tuple[Quadrants, ...]:
    """Return the quadrants of each device with speed verdicts; one without a device where there is none."""
    sites = [site for site in data.modified.sites if site.kind is not SiteKind.NORM]
    plan = judged_in(data)
    if not sites or plan is None:
        return ()
    verdicts = {d.site: d.verdict for d in plan.decisions}
    devices = list(dict.fromkeys(speed.device for speed in data.plans.speeds)) or [""]
    return tuple(_on(data, device, sites, verdicts) for device in devices)


def judged_in(data: ReportData) -> PrecisionPlan | None:
    """Return the plan whose accuracy verdicts count: the one in which every site was judged."""
    return data.plan(SAFE_PLAN) or next((p for p in data.plans.plans if p.fp8_sites), None)


def speed_texts(data: ReportData) -> dict[str, str]:
    """Return the speed of FP8 at each site: ``fast``; of several devices, each by name.

    Sites of unknown speed are left out.
    """
    found: dict[str, dict[str, str]] = {}
    for speed in data.plans.speeds:
        found.setdefault(speed.site, {})[speed.device] = _known(speed)
    devices = dict.fromkeys(speed.device for speed in data.plans.speeds)
    if len(devices) < 2:
        return {site: known for site, by_device in found.items() for known in by_device.values()}
    return {
        site: "; ".join(f"{device}: {by_device.get(device, numbers.NOT_MEASURED)}" for device in devices)
        for site, by_device in found.items()
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
    rows = tuple(
        tuple(_quadrant(data, accuracy, speed, groups.get((accuracy, speed), []), speeds) for speed in SPEEDS)
        for accuracy in Verdict
        if accuracy in _ALWAYS or accuracy in judged
    )
    return Quadrants(device, rows)


def _quadrant(
    data: ReportData,
    accuracy: Verdict,
    speed: str,
    sites: list[Site],
    speeds: dict[str, SiteSpeed],
) -> Quadrant:
    predicted = [
        speeds[site.name]
        for site in sites
        if speed != numbers.NOT_MEASURED and not speeds[site.name].is_measured
    ]
    return Quadrant(
        accuracy,
        speed,
        tuple(site.name for site in sites),
        _number_of(sites),
        _number_of(predicted) if predicted else Told(""),
        _flop_share(data, [site for site in sites if site.is_fp8_able]),
    )


def _number_of(found: Sequence[object]) -> Told:
    return formed(numbers.count, derive("entries", *map(Place, found)))


def _flop_share(data: ReportData, sites: Iterable[Site]) -> Told:
    if not data.modified.fp8_able_flops:
        return Told(numbers.NONE)
    flops = derive("sum", *(derive("flops", Place(site)) for site in sites))
    able = derive("fp8_able_flops", Place(data.modified, "sites"))
    return formed(numbers.share, derive("ratio", flops, able))
