"""One verb per stage: `export`, `calibrate`, `plan`, `evaluate`, `report`; others have files of their own.

Each runs the pipeline up to its stage in the run's own directory, so that finished stages before it are taken
over and it can be followed by the next verb, or by `run --resume`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Column, Table
from rich.text import Text

from loka_onnx.cli.outcome import first_line, print_outcome, print_written
from loka_onnx.cli.run import Output, Overrides, RunFile, read_run_file, run_until
from loka_onnx.cli.terminal import Terminal, terminal_of
from loka_onnx.config import Executor
from loka_onnx.core import serde
from loka_onnx.core.artifact import ModelArtifact
from loka_onnx.core.engine import EngineSet
from loka_onnx.core.plan import PlanSet
from loka_onnx.core.profile import Profile
from loka_onnx.pipeline.probing import EXPORTED
from loka_onnx.pipeline.run import RunOptions, RunResult, Stage
from loka_onnx.report.site_tables import calibration_facts, open_sites

Show = Callable[[Terminal, RunResult], None]
MOST_SITES = 100
"""Sites that `export` lists; their document has all."""


def add_stage_verb(app: typer.Typer, stage: Stage) -> None:
    """Register the verb of a stage."""
    help_text, show = _VERBS[stage]

    def verb(
        context: typer.Context, run_file: RunFile, output: Output = None, overrides: Overrides = None
    ) -> None:
        terminal = terminal_of(context)
        config = read_run_file(run_file, output, overrides)
        show(terminal, run_until(terminal, config, RunOptions(resume=True, until=stage)))

    app.command(stage.value, help=f"{help_text} Reuses the finished stages before it.")(verb)


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


def _show_model(terminal: Terminal, result: RunResult) -> None:
    model = serde.read(ModelArtifact, result.directory / "model/exported.json")
    sites = model.sites[:MOST_SITES]
    room = max((len(site.name) for site in sites), default=0)
    if sites:
        terminal.say((f"{'site':<{room}}  {'kind':<11} {'K':>6} {'N':>6}", "bold"))
    for site in sites:
        terminal.say(f"{site.name:<{room}}  {site.kind:<11} {site.k:>6} {site.n or '–':>6}")
    if len(model.sites) > MOST_SITES:
        terminal.say(f"and {len(model.sites) - MOST_SITES} more, all of them in model/exported.json")
    linear = len(model.linear_sites)
    terminal.say(f"{len(model.sites)} sites, {linear} of them linear; opset {model.opset}")
    print_written(terminal, result, "model/exported.onnx", "model/exported.json")


def _show_plans(terminal: Terminal, result: RunResult) -> None:
    known = serde.read(PlanSet, result.directory / "plan.json")
    low = known.quantized
    headings = (Column(heading, no_wrap=True) for heading in ("plan", "base", f"{low} sites", f"{low} FLOPs"))
    table = Table(*headings, box=None, pad_edge=False)
    for plan in known.plans:
        sites = f"{len(plan.quantized_sites)} of {len(plan.decisions)}"
        table.add_row(Text(plan.id), Text(plan.base), sites, f"{plan.fp8_share:.1%}")
    terminal.out.print(table)
    print_written(terminal, result, "plan.json")


def show_engines(terminal: Terminal, result: RunResult) -> None:
    """How each build of a run ended."""
    engines = serde.read(EngineSet, result.directory / "engines.json").engines
    for engine in engines:
        detail = first_line(engine, result.directory)
        terminal.say(f"{engine.id}: {engine.status}{f' ({detail})' if detail else ''}")
    print_written(terminal, result, "engines.json")


_VERBS: dict[Stage, tuple[str, Show]] = {
    Stage.EXPORT: ("Bring the model into canonical ONNX with named sites.", _show_model),
    Stage.PLAN: ("Decide the precision of each site.", _show_plans),
    Stage.EVALUATE: (
        "Measure accuracy and latency of the engines.",
        lambda terminal, result: print_written(terminal, result, "evaluation.json"),
    ),
    Stage.REPORT: ("Choose the engines and write the report.", print_outcome),
}
