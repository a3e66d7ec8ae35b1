"""`loka-onnx transform`: equivalent rewrites, each held against the model before it."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.text import Text

from loka_onnx.cli.outcome import print_written
from loka_onnx.cli.run import Output, Overrides, RunFile, read_run_file, run_until
from loka_onnx.cli.terminal import Terminal, terminal_of
from loka_onnx.core import serde
from loka_onnx.core.rewrite import RewriteLog, RewriteRecord
from loka_onnx.pipeline.run import RunOptions, Stage


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
    log = serde.read(RewriteLog, result.directory / "model/mods.json")
    for record in log.records:
        _print_record(terminal, record, explain=explain)
    print_written(terminal, result, "model/modified.onnx", "model/mods.json", "profile.json")


def _print_record(terminal: Terminal, record: RewriteRecord, *, explain: bool) -> None:
    check = ""
    if record.max_abs is not None and record.tolerance is not None:
        check = f"; largest change of an output {record.max_abs:.3g}, tolerance {record.tolerance:.3g}"
    undone = "; rolled back" if record.rolled_back else ""
    terminal.out.print(
        Text.assemble(
            (record.transform, "bold"),
            f": {len(record.applied)} applied, {len(record.declined)} declined{check}{undone}",
        ),
        soft_wrap=True,
    )
    if not explain:
        return
    for applied in record.applied:
        terminal.out.print(Text.assemble(("  + ", "green"), f"{applied.at}: {applied.what}"), soft_wrap=True)
    for declined in record.declined:
        terminal.out.print(
            Text.assemble(("  - ", "yellow"), f"{declined.at}: {declined.reason}"), soft_wrap=True
        )
