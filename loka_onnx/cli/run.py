"""`loka-onnx init`, `run`, `demo` and `refresh`: whole runs, and the run file of one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from loka_onnx.cli.outcome import check_fp8, outcome_json, print_outcome, print_written, shown
from loka_onnx.cli.progress import StageReporter
from loka_onnx.cli.terminal import Terminal, print_words, terminal_of
from loka_onnx.config import RunConfig, load_run_file, parse_overrides
from loka_onnx.core import serde
from loka_onnx.core.intervals import Interval
from loka_onnx.core.lineage import REFRESH_NAME, Refresh
from loka_onnx.errors import ConfigError
from loka_onnx.operations.refresh.refreshing import RefreshOptions
from loka_onnx.operations.refresh.refreshing import refresh as refresh_run
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
    if data is None:
        config = read_run_file(run_file, output, overrides)
    else:
        from loka_onnx.operations.running import proposed_config

        config, guesses = proposed_config(run_file, data, replaced(output, overrides))
        for line in guesses:
            print_words(terminal.err, Text(line))
    result = run_until(terminal, config, options)
    if as_json:
        terminal.out.out(json.dumps(outcome_json(result), indent=2))
    else:
        print_outcome(terminal, result)
    if require_fp8:
        check_fp8(result)


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
    """The run file with the values that the command line replaces."""
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


def init(  # noqa: PLR0913, PLR0917 - typer reads one parameter for each option
    context: typer.Context,
    model: Annotated[Path, typer.Argument(help="An .onnx file.", show_default=False)],
    data: Annotated[Path, typer.Argument(help="A .parquet or .npz file.", show_default=False)],
    device: Annotated[
        list[str] | None, typer.Option(help="A device to build for; those of this machine by default.")
    ] = None,
    label: Annotated[list[str] | None, typer.Option(help="Label column of each output, in order.")] = None,
    budget: Annotated[float, typer.Option(help="Largest accepted relative increase of the loss.")] = 0.0002,
    output: Annotated[Path, typer.Option("--output", "-o", help="The run file to write.")] = Path("RUN.yaml"),
    force: Annotated[bool, typer.Option("--force", help="Replace the file if it is there.")] = False,
) -> None:
    """Write a run file for a model and rows; what was guessed is marked in it."""
    from loka_onnx.operations.proposal import propose

    if output.exists() and not force:
        raise ConfigError(
            "E1719 the run file is there already",
            where=str(output),
            evidence="it may hold your changes",
            remedy="give another --output, or --force to replace it",
        )
    home = output.absolute().parent
    proposal = propose(model, data, devices=device or (), labels=label or (), budget=budget, home=home)
    serde.write_text(proposal.text, output)
    terminal = terminal_of(context)
    checks = proposal.text.count("check this")
    terminal.out.print(Text(f'{output}: {len(proposal.matches)} inputs, {checks} lines say "check this"'))
    for match in proposal.unmatched:
        near = ", ".join(match.candidates) or "none of its type and width"
        print_words(terminal.out, Text(f"  no column for input '{match.input}'; candidates: {near}"))
    following = "fill in what is missing, then" if proposal.unmatched else "next:"
    terminal.out.print(Text(f"{following} loka-onnx run {output}"), soft_wrap=True)
    terminal.out.print(Text(f"it writes {shown(home / 'runs' / proposal.document['name'])}"), soft_wrap=True)


def refresh(  # noqa: PLR0913, PLR0917 - typer reads one parameter for each option
    context: typer.Context,
    earlier: Annotated[
        Path, typer.Option("--run", metavar="DIR", help="The finished run to refresh.", show_default=False)
    ],
    model: Annotated[
        Path,
        typer.Option(
            metavar="FILE",
            help="The retrained model: .onnx, or a checkpoint for the run's torch module.",
            show_default=False,
        ),
    ],
    output: Annotated[
        Path | None,
        typer.Option(help="The new run directory; <DIR>-<FILE without suffix> beside the run by default."),
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Start over; removes an earlier run in the new directory.")
    ] = False,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume", help="Go on with a refresh that was interrupted, or that waited for build jobs."
        ),
    ] = False,
    overrides: Overrides = None,
    no_fallback: Annotated[
        bool,
        typer.Option(
            "--no-fallback",
            help="Fail where the decisions of the run do not hold, in place of a full run: with 2 where the "
            "structure differs, with 3 where certification fails.",
        ),
    ] = False,
    require_fp8: RequireFp8 = False,
    sign: Sign = None,
) -> None:
    """Bring a finished run to a retrained model: keep its decisions, redo scales, build and certify."""
    terminal = terminal_of(context)
    with StageReporter(terminal) as reporter:
        options = RefreshOptions(
            output=output,
            overrides=parse_overrides(overrides or []),
            force=force,
            resume=resume,
            may_fall_back=not no_fallback,
            sign=sign,
            **reporter.callbacks,
        )
        result = refresh_run(earlier, model, options)
    print_outcome(terminal, result.run)
    terminal.out.print()
    for line in _lines(result.refresh):
        terminal.say(line)
    print_written(terminal, result.run, REFRESH_NAME)
    if require_fp8:
        check_fp8(result.run)


def _described(interval: Interval) -> str:
    return f"{interval.value:.4%} ({interval.lower:.4%} … {interval.upper:.4%})"


def _lines(refresh: Refresh) -> Iterator[str]:
    for move in refresh.outputs:
        before = "not measured before" if move.before is None else f"was {_described(move.before)}"
        yield (
            f"{move.engine}, {move.output}: {move.judged} {_described(move.now)}, {before}; "
            f"budget {move.budget:.4%}: {move.status}"
        )
    if refresh.fallback:
        yield f"everything was done anew: {refresh.fallback}"
        return
    took = refresh.earlier_seconds
    share = f"{refresh.seconds / took if took else 0.0:.0%} of the {took:.1f} s"
    yield f"refreshed in {refresh.seconds:.1f} s, {share} of the run before"
