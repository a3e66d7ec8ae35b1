"""`loka-onnx drift`: new data against a profile."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from loka_onnx.cli.outcome import shown
from loka_onnx.cli.progress import reported
from loka_onnx.cli.terminal import Terminal, terminal_of
from loka_onnx.core import serde
from loka_onnx.errors import ConfigError, DataError, DriftFound
from loka_onnx.operations.drift.report import DriftOptions, DriftReport, Relevance
from loka_onnx.operations.drift.run import check_drift, open_run

SHOWN = 12
"""Most rows of a table."""


def drift(  # noqa: PLR0913, PLR0917 - typer reads one parameter for each option
    context: typer.Context,
    profile: Annotated[Path, typer.Option(help="The profile: profile.json of a run.", show_default=False)],
    data: Annotated[Path, typer.Option(help="Live rows, Parquet or npz; no labels.", show_default=False)],
    run: Annotated[Path | None, typer.Option(help="The run directory, if the profile is elsewhere.")] = None,
    plan: Annotated[
        str | None, typer.Option(help="Plan whose FP8 sites count; the chosen one, or fp8-safe.")
    ] = None,
    family_wise: Annotated[float, typer.Option(help="Largest probability of any false alarm.")] = 0.01,
    max_predicted_delta_ne: Annotated[
        float | None,
        typer.Option(help="Alarm when ΔNE is predicted to grow by more; half of each output's budget."),
    ] = None,
    relevance: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=VALUE", help="How large a change must be to alarm, as in rms=0.2."),
    ] = None,
    rows: Annotated[int | None, typer.Option(min=1, help="Use the first rows only.")] = None,
    json: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the whole report there.")] = None,
) -> None:
    """Compare new data with a profile; exit with 3 if they have moved away from it.

    An alarm needs a change that is certain (no false alarm in 99 of 100 comparisons) and large enough to
    matter.
    """
    terminal = terminal_of(context)
    options = DriftOptions(family_wise, _relevance(relevance or []), max_predicted_delta_ne, rows)
    opened = open_run(profile, run, plan)
    with reported(terminal, "drift") as progress:
        report = check_drift(opened, data, options, progress)
    print_drift(terminal, report)
    if json is not None:
        serde.write(report, json)
        terminal.say(("wrote ", "bold"), shown(json))
    raise_for(report, data)


def raise_for(report: DriftReport, data: Path) -> None:
    """Raise DataError where nothing could be judged, DriftFound where an alarm stands."""
    if not report.is_judged:
        what, _, remedy = report.not_judged.rpartition(": ")
        raise DataError("E1710 drift was not judged", where=str(data), evidence=what, remedy=remedy)
    if report.alarms:
        first, others = report.alarms[0], len(report.alarms) - 1
        more = f" ({others} more alarm{'s' * (others > 1)} above)" if others else ""
        raise DriftFound(
            "E1711 the data have moved away from the profile",
            where=str(data),
            evidence=f"{first.sentence}{more}",
            remedy="find out whether the change is meant; if it is, calibrate and plan again on recent rows",
        )


def print_drift(terminal: Terminal, report: DriftReport) -> None:
    """Print the tables, worst first, and the alarms."""
    out = terminal.out
    terminal.say(
        f"{report.live_rows:,} live rows ({report.live_batches} batches of {report.batch_rows}) against "
        f"{report.profile_rows:,} of the profile ({report.profile_batches} batches); {report.tests} "
        f"tests at a family-wise {report.family_wise:.2g}"
    )
    if report.synthetic:
        terminal.say(("the profile was measured on generated rows", "yellow"))
    alarming = {alarm.where for alarm in report.alarms}
    for what, heads, rows in (
        ("tensors", ("tensor", "rms", "mean", "index", "range", "beyond", "p (adjusted)"), _tensors(report)),
        ("sites", ("site", "clipped", "in the profile", "noise / signal", "ΔNE"), _sites(report)),
    ):
        table = Table(box=None, pad_edge=False)
        for heading in heads:
            table.add_column(heading, no_wrap=True, justify="right" if table.columns else "left")
        for row in rows[:SHOWN]:
            table.add_row(*map(Text, row), style="bold red" if row[0] in alarming else "")
        out.print()
        out.print(table)
        if len(rows) > SHOWN:
            out.print(Text(f"… and {len(rows) - SHOWN} {what} that changed less", style="dim"))
    out.print()
    for line in _verdict(report):
        out.print(line, soft_wrap=True)


def _tensors(report: DriftReport) -> list[tuple[str, ...]]:
    return [
        (
            tensor.tensor,
            f"×{1.0 + tensor.effect('rms'):.3f}" if tensor.shifts else "–",
            f"{tensor.effect('mean'):+.3f} sd" if tensor.shifts else "–",
            f"{tensor.stability_index:.3f}",
            f"×{tensor.range.growth:.2f}",
            f"{tensor.range.beyond} of {tensor.range.batches}" if tensor.shifts else "–",
            f"{tensor.smallest_adjusted:.2g}" if tensor.shifts else "–",
        )
        for tensor in report.tensors
    ]


def _sites(report: DriftReport) -> list[tuple[str, ...]]:
    rows = list[tuple[str, ...]]()
    for site in report.sites:
        change = "not FP8"
        if predicted := site.predicted:
            worst = max(predicted, key=predicted.__getitem__)
            change = (
                f"{worst} {predicted[worst]:+.4%}" if len(report.outputs) > 1 else f"{predicted[worst]:+.4%}"
            )
        ratio = f"×{site.live_noise / site.profile_noise:.2f}" if site.profile_noise else "–"
        rows.append((site.site, f"{site.live_saturated:.3%}", f"{site.profile_saturated:.3%}", ratio, change))
    return rows


def _verdict(report: DriftReport) -> Iterator[Text]:
    for output in report.outputs:
        if output.live_kl is None:
            continue
        budget = "" if output.budget is None else f"; budget {output.budget:.4%}"
        yield Text(
            f"{output.output}: FP8 costs {output.live_kl:.4%} of ΔNE on the live rows, {output.kl:.4%} on "
            f"the profile's ({report.basis}, label-free part){budget}"
        )
    yield Text()
    if not report.is_judged:
        yield Text.assemble(("not judged: ", "bold yellow"), report.not_judged)
    for alarm in report.alarms:
        yield Text.assemble((f"{alarm.measure}: ", "bold red"), alarm.sentence)
    if report.is_judged and not report.alarms:
        small = len(report.changed)
        certain = f"; {small} tensors changed for certain, but too little to matter" if small else ""
        yield Text.assemble(("no drift", "bold green"), certain)


def _relevance(given: list[str]) -> Relevance:
    known = {field.name: field for field in fields(Relevance)}
    thresholds: dict[str, float] = {}
    for item in given:
        name, equals, text = item.partition("=")
        try:
            value = float(text)
        except ValueError:
            value = -1.0
        if name not in known or not equals or not value >= 0.0:
            raise ConfigError(
                "E1712 a threshold is NAME=VALUE, at least 0",
                where=f"--relevance '{item}'",
                evidence=f"the names are {', '.join(known)}",
                remedy="write for example --relevance rms=0.2",
            )
        thresholds[name] = value
    return replace(Relevance(), **thresholds)
