"""`loka-onnx demo`: the whole pipeline on the built-in model and data."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from loka_onnx.cli.outcome import print_outcome
from loka_onnx.cli.progress import StageReporter
from loka_onnx.cli.terminal import terminal_of
from loka_onnx.pipeline.run import RunOptions
from loka_zoo.demo import run_demo


def demo(
    context: typer.Context,
    output: Annotated[Path, typer.Option(help="The run directory.")] = Path("runs/demo"),
    force: Annotated[bool, typer.Option("--force", help="Start over instead of going on.")] = False,
) -> None:
    """Train a ranker on MovieLens 100K and run the whole pipeline over it.

    Needs no arguments and no network; finished stages of an earlier demo are reused.
    """
    terminal = terminal_of(context)
    with StageReporter(terminal) as reporter:
        result = run_demo(output, RunOptions(force=force, **reporter.callbacks))
    print_outcome(terminal, result)
