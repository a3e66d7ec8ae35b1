"""`loka-onnx compare-runs`: what differs between two runs, by their reports."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from loka_onnx.cli.outcome import shown
from loka_onnx.cli.terminal import terminal_of
from loka_onnx.operations.compare.difference import print_difference
from loka_onnx.operations.compare.run_document import Change
from loka_onnx.operations.compare.run_text import render_comparison, runs_view
from loka_onnx.operations.compare.runs import compare_runs as compare

DIFFERENT = 3
"""Exit code of two runs that emit different engines, where it was asked for: a check that did not hold."""


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
    Nothing is run: `loka-onnx compare` asks two deployments for the same rows.
    """
    terminal = terminal_of(context)
    found = compare(old, new)
    files = render_comparison(found, out)
    print_difference(terminal.out, runs_view(found))
    for path in files:
        terminal.out.print(Text.assemble(("wrote ", "bold"), shown(path)), soft_wrap=True)
    if exit_code and any(target.change is not Change.SAME for target in found.targets):
        raise typer.Exit(DIFFERENT)
