"""`loka-onnx transform`: equivalent rewrites, each held against the model before it."""

from __future__ import annotations

from typing import Annotated

import typer

from loka_onnx.cli.outcome import print_written
from loka_onnx.cli.run import Output, Overrides, RunFile, read_run_file, run_until
from loka_onnx.cli.terminal import Terminal, terminal_of
from loka_onnx.core import serde
from loka_onnx.core.artifact import ModelArtifact
from loka_onnx.core.rewrite import Applied, Declined, ModelSplit, RewriteLog, RewriteRecord
from loka_onnx.core.site import Site
from loka_onnx.pipeline.run import RunOptions, Stage

ELSEWHERE = "elsewhere"


def transform(
    context: typer.Context,
    run_file: RunFile,
    output: Output = None,
    overrides: Overrides = None,
    explain: Annotated[
        bool, typer.Option("--explain", help="Print what was applied and declined, site by site.")
    ] = False,
) -> None:
    """Rewrite the model where that is equivalent on the data. Reuses the finished stages before it."""
    terminal = terminal_of(context)
    config = read_run_file(run_file, output, overrides)
    result = run_until(terminal, config, RunOptions(resume=True, until=Stage.TRANSFORM))
    models = result.directory / "model"
    log = serde.read(RewriteLog, models / "mods.json")
    for record in log.records:
        _print_record(terminal, record)
    modified = serde.read(ModelArtifact, models / "modified.json").path
    written = [str(modified), "model/mods.json", "profile.json"]
    if config.model.split_sparse:
        split = serde.read(ModelSplit, models / "split.json")
        log = RewriteLog((*log.records, *split.log.records))
        _print_record(terminal, split.log.records[0])
        halves = [] if split.halves is None else ["model/lookup.onnx", "model/dense.onnx"]
        written = [written[0], *halves, "model/split.json", *written[1:]]
    if explain:
        before, after = (
            serde.read(ModelArtifact, models / f"{name}.json") for name in ("exported", "modified")
        )
        _print_explanation(terminal, log, before.sites, after.sites)
    print_written(terminal, result, *written)


def _print_record(terminal: Terminal, record: RewriteRecord) -> None:
    check = ""
    if record.max_abs is not None and record.tolerance is not None:
        check = f"; largest change of an output {record.max_abs:.3g}, tolerance {record.tolerance:.3g}"
    undone = "; rolled back" if record.rolled_back else ""
    counts = f"{len(record.applied)} applied, {len(record.declined)} declined"
    terminal.say((record.transform, "bold"), f": {counts}{check}{undone}")


def _print_explanation(
    terminal: Terminal, log: RewriteLog, before: tuple[Site, ...], after: tuple[Site, ...]
) -> None:
    terminal.out.print()
    names = (*(site.name for site in (*after, *before)), ELSEWHERE)
    entries: dict[str, list[tuple[RewriteRecord, Applied | Declined]]] = {name: [] for name in names}
    for record in log.records:
        of_record: tuple[Applied | Declined, ...] = (*record.applied, *record.declined)
        for entry in of_record:
            for name in _sites_of(entry) & entries.keys() or {ELSEWHERE}:
                entries[name].append((record, entry))
    for name, of_site in entries.items():
        if of_site or name != ELSEWHERE:
            is_gone = name not in {site.name for site in after}
            became = ", ".join(site.name for site in after if is_gone and name in site.merged_from)
            fate = f" → {became}" if became else "" if of_site else ": nothing applied or declined"
            terminal.say((name, "bold"), fate)
        for record, entry in of_site:
            is_applied = isinstance(entry, Applied)
            sign = ("!", "red") if record.rolled_back else ("+", "green") if is_applied else ("-", "yellow")
            where = "" if entry.at == name else f" at {entry.at}"
            words = entry.what if isinstance(entry, Applied) else entry.reason
            undone = "; rolled back" if record.rolled_back and is_applied else ""
            terminal.say("  ", sign, f" {record.transform}{where}: {words}{undone}")
    terminal.out.print()


def _sites_of(entry: Applied | Declined) -> set[str]:
    """Return the names that may be sites: the place, its module, and the sites of a replacement."""
    names = {entry.at, entry.at.rpartition("/")[0]}
    if isinstance(entry, Applied):
        names.update(entry.origins, *entry.origins.values())
    return names
