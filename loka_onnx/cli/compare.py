"""`loka-onnx compare`, `compare-runs` and `bundle diff`: the difference of two things."""

from __future__ import annotations

import io
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from loka_onnx.cli.outcome import shown
from loka_onnx.cli.progress import reported
from loka_onnx.cli.terminal import print_words, terminal_of
from loka_onnx.core import serde
from loka_onnx.core.artifact import OutputKind
from loka_onnx.errors import BudgetMissed, ConfigError, EngineError
from loka_onnx.operations.compare.bundles import diff_bundles
from loka_onnx.operations.compare.deployments import CompareOptions, compare
from loka_onnx.operations.compare.difference import Difference, lines, screen_lines, write_difference
from loka_onnx.operations.compare.rows import ONLY, RowOptions
from loka_onnx.operations.compare.runs import compare_runs as between_runs
from loka_onnx.operations.compare.sides import Opening

FILE_COLUMNS = 120
"""Columns of a text report in a file."""
DIFFERENT = 3
"""Exit code of two things that differ, where it was asked for: a check that did not hold."""


class Format(StrEnum):
    """Formats of the result."""

    TEXT = "text"
    JSON = "json"


def compare_deployments(  # noqa: PLR0913, PLR0917 - typer reads one parameter for each option
    context: typer.Context,
    a: Annotated[
        Path,
        typer.Argument(metavar="A", help="Compared with: a bundle or an .onnx file.", show_default=False),
    ],
    b: Annotated[Path, typer.Argument(metavar="B", help="Compared: likewise.", show_default=False)],
    data: Annotated[Path, typer.Option(help="Rows, Parquet or npz.", show_default=False)],
    output: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=KIND", help="Kind: logit, probability or regression; others as the bundles say."
        ),
    ] = None,
    label: Annotated[
        list[str] | None,
        typer.Option(metavar="[OUTPUT=]COLUMN", help="Label; as the bundle says. Without any: KL."),
    ] = None,
    weight: Annotated[
        list[str] | None, typer.Option(metavar="[OUTPUT=]COLUMN", help="Weight of each row.")
    ] = None,
    group: Annotated[str | None, typer.Option(help="Column of rows that belong together.")] = None,
    slices: Annotated[
        list[str] | None, typer.Option(metavar="COLUMN", help="Judge each value of a column apart.")
    ] = None,
    inputs: Annotated[
        list[str] | None,
        typer.Option(metavar="INPUT=COLUMN,…", help="Columns of an input; the run's, or by name."),
    ] = None,
    run: Annotated[
        Path | None, typer.Option(help="The run directory that says columns, group and slices.")
    ] = None,
    rows: Annotated[int | None, typer.Option(min=1, help="Use the first rows only.")] = None,
    batch: Annotated[
        list[int] | None, typer.Option(min=1, help="Rows per request; what the bundles were timed at.")
    ] = None,
    latency: Annotated[bool, typer.Option(help="Time both, in turns.")] = True,
    seconds: Annotated[
        float, typer.Option(min=0.01, help="Time for each side at each batch size, over all loads.")
    ] = 3.0,
    loads: Annotated[int, typer.Option(min=1, help="Load both so many times to time them.")] = 6,
    threads: Annotated[int, typer.Option(min=0, help="Threads of ONNX Runtime; 0: its choice.")] = 0,
    budget: Annotated[
        float | None, typer.Option(help="Exit with 3 if ΔNE may be larger; 0.0002 is 0.02 %.")
    ] = None,
    trust: Annotated[bool, typer.Option("--trust", help="Run engines that are programs.")] = False,
    key: Annotated[
        list[Path] | None, typer.Option(help="Public key whose signature lets programs run.")
    ] = None,
    form: Annotated[Format, typer.Option("--format", help="Text or JSON.")] = Format.TEXT,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the result there.")] = None,
) -> None:
    """Run two deployments on the same rows and say what B costs or gains against A.

    Accuracy is the paired difference with its 95 % interval, relative to A's loss; latency is measured in
    turns. Labels, group and slices are those that the bundles and their run record, where the data have them.
    """
    terminal = terminal_of(context)
    options = CompareOptions(
        rows=RowOptions(
            kinds=_kinds(output or []),
            labels=_by_name(label or [], "--label", "ctr=clicked"),
            weights=_by_name(weight or [], "--weight", "ctr=importance"),
            group=group,
            slices=tuple(dict.fromkeys(slices or ())),
            inputs=_inputs(inputs or []),
            rows=rows,
            budget=budget,
            run=run,
        ),
        opening=Opening(trust=trust, keys=tuple(key or ()), threads=threads),
        batches=tuple(sorted(set(batch or ()))),
        latency=latency,
        seconds=seconds,
        loads=loads,
    )
    with reported(terminal, "compare") as progress:
        difference = compare(a, b, data, options, progress)
    if out is None:
        _print(terminal.out, difference, form)
    else:
        stream = io.StringIO()
        _print(Console(file=stream, width=FILE_COLUMNS, color_system=None, highlight=False), difference, form)
        serde.write_text(stream.getvalue(), out)
        terminal.say(("wrote ", "bold"), shown(out))
    raise_for(difference)


def _print(out: Console, difference: Difference, form: Format, *, screen: bool = False) -> None:
    if form is Format.JSON:
        out.out(serde.dumps(difference), end="")
    else:
        for line in screen_lines(difference) if screen else lines(difference):
            print_words(out, line)


def compare_runs(
    context: typer.Context,
    old: Annotated[
        Path,
        typer.Argument(
            metavar="OLD", help="Compared with: a run directory or a report.json.", show_default=False
        ),
    ],
    new: Annotated[Path, typer.Argument(metavar="NEW", help="Compared: likewise.", show_default=False)],
    out: Annotated[Path, typer.Option(metavar="DIR", help="Where comparison.html, .md and .json go.")] = Path(
        "comparison"
    ),
    exit_code: Annotated[
        bool, typer.Option("--exit-code", help="Exit with 3 if another engine answers any batch size.")
    ] = False,
) -> None:
    """Say what differs between two runs, from what their reports recorded, and write a report of it.

    Emitted engines, accuracy, latency, sites with both reasons, plans, rewrites, data, versions, settings.
    Nothing is run: `loka-onnx compare` runs two deployments on the same rows.
    """
    terminal = terminal_of(context)
    difference = between_runs(old, new)
    files = write_difference(difference, out)
    _print(terminal.out, difference, Format.TEXT, screen=True)
    for path in files:
        terminal.say(("wrote ", "bold"), shown(path))
    if exit_code and difference.is_different:
        raise typer.Exit(DIFFERENT)


def diff(
    context: typer.Context,
    a: Annotated[Path, typer.Argument(metavar="A", help="The one bundle.", show_default=False)],
    b: Annotated[Path, typer.Argument(metavar="B", help="The other.", show_default=False)],
    form: Annotated[Format, typer.Option("--format", help="JSON has everything.")] = Format.TEXT,
    everything: Annotated[bool, typer.Option("--all", help="Everything, not one screen of it.")] = False,
    exit_code: Annotated[bool, typer.Option("--exit-code", help="Exit with 3 if they differ.")] = False,
) -> None:
    """Verify two bundles, directories or single files, and say what differs between them.

    Engines, plans site by site, accuracy and latency as they were recorded, versions, files. Nothing is run:
    `loka-onnx compare` does that. Exit with 0 also when they differ.
    """
    difference = diff_bundles(a, b)
    _print(terminal_of(context).out, difference, form, screen=not everything)
    if exit_code and difference.is_different:
        raise typer.Exit(DIFFERENT)


def raise_for(difference: Difference) -> None:
    """Raise where the budget is missed or an output was not judged, else where a side failed while timed."""
    if difference.beyond:
        raise BudgetMissed(
            "E1707 B may cost more than the budget",
            where=difference.b.path,
            evidence="; ".join(difference.beyond),
            remedy="keep A; or compare on more rows, if only its interval is beyond the budget; "
            "an output that is not judged needs the column of its label (`--label OUTPUT=COLUMN`)",
        )
    failures = difference.failures
    if failures:
        raise EngineError(
            f"E1708 {' and '.join(failures)} failed while being timed",
            where=", ".join(side.path for side in (difference.a, difference.b) if side.name in failures),
            evidence="; ".join(failure.partition("\n")[0] for failure in failures.values()),
            remedy="see whether the device is shared or short of memory; without times: `--no-latency`",
        )


def _by_name(
    items: list[str],
    option: str,
    example: str,
    split: Callable[[str, str], tuple[str, str, str]] = str.partition,
) -> dict[str, str]:
    """NAME=VALUE by name; a value alone is that of the only output."""
    values: dict[str, str] = {}
    for item in items:
        name, equals, value = split(item, "=")
        name, value = (name, value) if equals else (ONLY, item)
        if not value or name in values:
            raise _wrong(option, item, "it is given twice" if value else "nothing is named", example)
        values[name] = value
    return values


def _kinds(items: list[str]) -> dict[str, OutputKind]:
    kinds = _by_name(items, "--output", "ctr=logit", str.rpartition)
    for name, kind in kinds.items():
        if name == ONLY or kind not in set(OutputKind):
            evidence = f"it is NAME=KIND, and the kinds are {', '.join(OutputKind)}"
            raise _wrong("--output", f"{name}={kind}" if name else kind, evidence, "ctr=logit")
    return {name: OutputKind(kind) for name, kind in kinds.items()}


def _inputs(items: list[str]) -> dict[str, tuple[str, ...]]:
    listed = _by_name(items, "--inputs", "ids=user,item").items()
    inputs = {name: tuple(map(str.strip, columns.split(","))) for name, columns in listed}
    for name, columns in inputs.items():
        if name == ONLY or not all(columns):
            raise _wrong("--inputs", f"{name}={','.join(columns)}", "a name is missing", "ids=user,item")
    return inputs


def _wrong(option: str, item: str, evidence: str, example: str) -> ConfigError:
    return ConfigError(
        f"E1709 {option} cannot be read",
        where=f"{option} '{item}'",
        evidence=evidence,
        remedy=f"write for example {option} {example}",
    )
