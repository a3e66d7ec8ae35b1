"""`loka-onnx build`: the engines of a run, or a build job of a run on another host."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from loka_onnx.cli.outcome import shown
from loka_onnx.cli.progress import reported
from loka_onnx.cli.run import Output, Overrides, read_run_file, run_until
from loka_onnx.cli.stages import show_engines
from loka_onnx.cli.terminal import Terminal, terminal_of
from loka_onnx.errors import ConfigError, EngineError
from loka_onnx.pipeline.job_execution import execute_job
from loka_onnx.pipeline.jobs import RESULT, find_jobs
from loka_onnx.pipeline.run import RunOptions, Stage


def build(
    context: typer.Context,
    run_file: Annotated[
        Path | None, typer.Argument(metavar="[RUN.yaml]", help="The run file.", show_default=False)
    ] = None,
    output: Output = None,
    overrides: Overrides = None,
    job: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Execute the build job in this directory, or all jobs in it, and leave `result/` in each; "
            "in place of a run file.",
        ),
    ] = None,
) -> None:
    """Build an engine for every backend and plan. Reuses the finished stages before it."""
    terminal = terminal_of(context)
    if (run_file is None) == (job is None):
        raise ConfigError(
            "E1701 `build` takes a run file or `--job DIR`",
            evidence="both are given" if job is not None else "neither is given",
            remedy="`loka-onnx build RUN.yaml` builds the engines of a run, `loka-onnx build --job DIR` "
            "executes what another host wrote",
        )
    if job is not None:
        if output is not None or overrides:
            raise ConfigError(
                "E1702 --output and --set belong to a run file",
                evidence="a build job says everything that its engine depends on",
                remedy="leave them out",
            )
        _execute_all(terminal, find_jobs(job))
    elif run_file is not None:
        config = read_run_file(run_file, output, overrides)
        show_engines(terminal, run_until(terminal, config, RunOptions(resume=True, until=Stage.BUILD)))


def _execute_all(terminal: Terminal, jobs: Sequence[Path]) -> None:
    """Execute what this host can; of several jobs, those for other hosts are left out."""
    executed = 0
    for directory in jobs:
        try:
            _execute(terminal, directory)
            executed += 1
        except EngineError as error:
            if len(jobs) == 1:
                raise
            terminal.say(f"{directory.name}: left out, {error.evidence}")
    if not executed:
        raise EngineError(
            "E1703 this host can execute none of the jobs",
            where=str(jobs[0].parent),
            evidence=", ".join(directory.name for directory in jobs),
            remedy="copy them to a host with their devices",
        )


def _execute(terminal: Terminal, directory: Path) -> None:
    with reported(terminal, "job") as progress:
        result = execute_job(directory, progress)
    detail = (result.failure or result.artifact.detail).strip().partition("\n")[0]
    terminal.say(f"{result.candidate}: {result.artifact.status}{f' ({detail})' if detail else ''}")
    for latency in result.latencies:
        terminal.say(f"  batch {latency.batch}: {latency.p50_us:.1f} µs (median of {latency.repeats})")
    terminal.say(("wrote ", "bold"), shown(directory.absolute() / RESULT))
