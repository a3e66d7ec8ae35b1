"""Speed of FP8 at each site. A speed verdict is never guessed; norms have none and are left out."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from loka_onnx.core.plan import SiteSpeed, SpeedVerdict
from loka_onnx.report import numbers
from loka_onnx.report.data import ReportData
from loka_onnx.report.document import Field, Table, Tone, cell, number, prose, table_of, text
from loka_onnx.report.figures import shown

SPEED_TONES = {SpeedVerdict.FAST.value: Tone.GOOD, SpeedVerdict.SLOW.value: Tone.BAD}


def speed_texts(data: ReportData) -> dict[str, str]:
    """Return the speed of FP8 at each site: ``fast``; of several devices, each by name.

    Sites of unknown speed are left out.
    """
    by_site: dict[str, dict[str, str]] = {}
    for speed in data.plans.speeds:
        known = numbers.NOT_MEASURED if speed.verdict is SpeedVerdict.UNKNOWN else speed.verdict.value
        by_site.setdefault(speed.site, {})[speed.device] = known
    devices = dict.fromkeys(speed.device for speed in data.plans.speeds)
    if len(devices) < 2:
        return {site: known for site, by_device in by_site.items() for known in by_device.values()}
    return {
        site: "; ".join(f"{device}: {by_device.get(device, numbers.NOT_MEASURED)}" for device in devices)
        for site, by_device in by_site.items()
    }


def speed_tables(data: ReportData) -> Iterator[Table]:
    """Yield savings by site, of each device with kernel times."""
    for device in dict.fromkeys(speed.device for speed in data.plans.speeds):
        speeds = [speed for speed in data.plans.speeds if speed.device == device]
        caption = f"What FP8 saves on {device} by kernel times; sites of one tensor quantize it once"
        yield table_of(caption, _speed_fields(speeds), speeds)


def _speed_fields(speeds: list[SiteSpeed]) -> tuple[Field[SiteSpeed], ...]:
    def us(title: str, name: str) -> Iterator[Field[SiteSpeed]]:
        for batch in dict.fromkeys(batch for speed in speeds for batch in speed.saved_us):
            yield number(f"{title} at {batch}, µs", partial(_us, name, batch))

    def origin(speed: SiteSpeed) -> str:
        known = "measured" if speed.is_measured else "predicted"
        return numbers.NONE if speed.verdict is SpeedVerdict.UNKNOWN else known

    return (
        text("Site", "site"),
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
