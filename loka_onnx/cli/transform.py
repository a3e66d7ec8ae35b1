"""`loka-onnx transform`: equivalent rewrites, each held against the model before it."""

from __future__ import annotations

from typing import Annotated

import typer

from loka_onnx.cli.outcome import print_written
from loka_onnx.cli.run import Output, Overrides, RunFile, read_run_file, run_until
from loka_onnx.cli.terminal import Terminal, terminal_of
from loka_onnx.core import serde
from loka_onnx.core.artifact import ModelArtifact
from loka_onnx.core.explanation import Explanation, Line, Mark, SiteStory
from loka_onnx.core.explanation import explain as explain_sites
from loka_onnx.core.rewrite import RewriteLog, RewriteRecord
from loka_onnx.core.split import ModelSplit
from loka_onnx.pipeline.run import RunOptions, Stage

_SIGNS = {Mark.APPLIED: ("+", "green"), Mark.DECLINED: ("-", "yellow"), Mark.ROLLED_BACK: ("!", "red")}


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
        _print_explanation(terminal, explain_sites(log, before.sites, after.sites))
    print_written(terminal, result, *written)


def _print_record(terminal: Terminal, record: RewriteRecord) -> None:
    check = ""
    if record.max_abs is not None and record.tolerance is not None:
        check = f"; largest change of an output {record.max_abs:.3g}, tolerance {record.tolerance:.3g}"
    undone = "; rolled back" if record.rolled_back else ""
    counts = f"{len(record.applied)} applied, {len(record.declined)} declined"
    terminal.say((record.transform, "bold"), f": {counts}{check}{undone}")


def _print_explanation(terminal: Terminal, explanation: Explanation) -> None:
    terminal.out.print()
    for story in explanation.sites:
        terminal.say((story.site, "bold"), _fate(story))
        _print_lines(terminal, story.lines, story.site)
    if explanation.elsewhere:
        terminal.say(("elsewhere", "bold"))
        _print_lines(terminal, explanation.elsewhere, "")
    terminal.out.print()


def _fate(story: SiteStory) -> str:
    """What stands behind the name of a site."""
    if story.became:
        return f" → {', '.join(story.became)}"
    if story.is_gone:
        return ": no site of the model any more"
    return "" if story.lines else ": nothing applied or declined"


def _print_lines(terminal: Terminal, lines: tuple[Line, ...], site: str) -> None:
    for line in lines:
        sign, colour = _SIGNS[line.mark]
        where = "" if line.at == site else f" at {line.at}"
        terminal.say((f"  {sign} ", colour), f"{line.transform}{where}: {line.text}")
