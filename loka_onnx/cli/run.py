"""`loka-onnx run` and `demo`: the whole pipeline, on a run file or on the built-in model and data."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from loka_onnx.cli.outcome import check_fp8, outcome_json, print_outcome
from loka_onnx.cli.progress import StageReporter
from loka_onnx.cli.terminal import Terminal, print_words, terminal_of
from loka_onnx.config import RunConfig, load_run_file, parse_overrides
from loka_onnx.errors import ConfigError
from loka_onnx.pipeline.run import RunOptions, RunResult
from loka_onnx.pipeline.run import run as run_pipeline
from loka_zoo.demo import run_demo

RunFile = Annotated[Path, typer.Argument(metavar="RUN.yaml", help="The run file.", show_default=False)]
Source = Annotated[
    Path,
    typer.Argument(
        metavar="RUN.yaml", help="The run file; or an .onnx file, followed by DATA.", show_default=False
    ),
]
Output = Annotated[
    Path | None, typer.Option(help="The run directory; runs/<name> beside the run file by default.")
]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Replace a value of the run file, as in batch.max=512."),
]
RequireFp8 = Annotated[
    bool, typer.Option("--require-fp8", help="Exit with 3 if no FP8 or INT8 plan is inside the budget.")
]
Sign = Annotated[
    Path | None,
    typer.Option(metavar="KEY", help="Sign the bundle with this private key (PEM); see `bundle keygen`."),
]


def run(  # noqa: PLR0913, PLR0917 - typer reads one parameter for each option
    context: typer.Context,
    run_file: Source,
    data: Annotated[
        Path | None, typer.Argument(metavar="[DATA]", help="Rows of an .onnx file.", show_default=False)
    ] = None,
    output: Output = None,
    force: Annotated[bool, typer.Option("--force", help="Start over; removes the earlier run.")] = False,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the last finished stage.")] = False,
    overrides: Overrides = None,
    require_fp8: RequireFp8 = False,
    sign: Sign = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Run the whole pipeline: from a trained model to a report and a bundle."""
    if force and resume:
        raise ConfigError(
            "E1714 --force and --resume exclude each other",
            evidence="one removes the earlier run, the other goes on with it",
            remedy="give one of them",
        )
    terminal = terminal_of(context)
    options = RunOptions(force=force, resume=resume, sign=sign)
    config = (
        read_run_file(run_file, output, overrides)
        if data is None
        else _proposed(terminal, run_file, data, replaced(output, overrides))
    )
    result = run_until(terminal, config, options)
    if as_json:
        terminal.out.out(json.dumps(outcome_json(result), indent=2))
    else:
        print_outcome(terminal, result)
    if require_fp8:
        check_fp8(result)


def _proposed(terminal: Terminal, model: Path, data: Path, overrides: dict[str, object]) -> RunConfig:
    """The run file that `init` would write, for a run without one; says what was guessed."""
    from loka_onnx.operations.proposal import propose
    from loka_onnx.operations.running import proposed_config

    proposal = propose(model, data, home=Path.cwd())
    config = proposed_config(proposal, f"{model} {data}", overrides)
    for line in proposal.guesses:
        print_words(terminal.err, Text(line))
    return config


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


def read_run_file(path: Path, output: Path | None, overrides: list[str] | None) -> RunConfig:
    """The run file with what the command line replaces in it."""
    return load_run_file(path, replaced(output, overrides))


def replaced(output: Path | None, overrides: list[str] | None) -> dict[str, object]:
    """Values of the run file that the command line replaces."""
    given = parse_overrides(overrides or [])
    if output is not None:
        # A path in a run file starts at the file, one on the command line where the user is.
        given["output"] = str(output.absolute())
    return given


def run_until(terminal: Terminal, config: RunConfig, options: RunOptions) -> RunResult:
    """Run the pipeline, reporting on the terminal."""
    with StageReporter(terminal) as reporter:
        return run_pipeline(config, replace(options, **reporter.callbacks))
