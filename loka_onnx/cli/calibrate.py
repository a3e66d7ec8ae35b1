"""`loka-onnx calibrate`: the Probe stage, of every site or of some."""

from __future__ import annotations

from typing import Annotated

import typer

from loka_onnx.cli.outcome import print_written
from loka_onnx.cli.run import Output, Overrides, RunFile, read_run_file, run_until
from loka_onnx.cli.terminal import terminal_of
from loka_onnx.pipeline.run import RunOptions, Stage


def calibrate(
    context: typer.Context,
    run_file: RunFile,
    output: Output = None,
    overrides: Overrides = None,
    only: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PATTERN",
            help="Measure the sites of this name again and keep the others; as in 'over.*'.",
        ),
    ] = None,
) -> None:
    """Measure on data what FP8 does to each site. Reuses the finished stages before it."""
    terminal = terminal_of(context)
    config = read_run_file(run_file, output, overrides)
    options = RunOptions(resume=True, until=Stage.CALIBRATE, only=tuple(only or ()))
    print_written(terminal, run_until(terminal, config, options), "calibration/exported.json")
