"""`loka-onnx calibrate`: the Probe stage, or further rows for its profile."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from loka_onnx.cli.outcome import print_written
from loka_onnx.cli.run import Output, Overrides, RunFile, read_run_file, run_until
from loka_onnx.cli.terminal import terminal_of
from loka_onnx.config import Executor
from loka_onnx.core import serde
from loka_onnx.core.profile import Profile
from loka_onnx.pipeline.probing import EXPORTED
from loka_onnx.pipeline.run import RunOptions, Stage
from loka_onnx.report.site_tables import calibration_facts, open_sites


def calibrate(
    context: typer.Context,
    run_file: RunFile,
    output: Output = None,
    overrides: Overrides = None,
    update: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Add the rows of this file to the profile, measured under its scales. Every later stage "
            "then is done again.",
        ),
    ] = None,
    executor: Annotated[
        Executor | None,
        typer.Option(help="Where batches are run; calibration.executor of the run file by default."),
    ] = None,
) -> None:
    """Measure on data what FP8 does to each site. Reuses the finished stages before it."""
    terminal = terminal_of(context)
    if executor is not None:
        overrides = [*(overrides or []), f"calibration.executor={executor}"]
    config = read_run_file(run_file, output, overrides)
    added = None if update is None else update.absolute()
    options = RunOptions(resume=True, until=Stage.CALIBRATE, added=added)
    result = run_until(terminal, config, options)
    profile = serde.read(Profile, result.directory / EXPORTED)
    for fact in (*calibration_facts(profile), *open_sites(profile)):
        terminal.say(fact)
    print_written(terminal, result, EXPORTED)
