"""One verb per stage: `export`, `calibrate`, `transform`, `plan`, `build`, `evaluate`, `report`.

Each runs the pipeline up to its stage in the run's own directory, so that finished stages before it are taken
over and it can be followed by the next verb, or by `run --resume`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Column, Table
from rich.text import Text

from loka_onnx.cli.outcome import first_line, print_outcome, print_written, shown
from loka_onnx.cli.progress import reported
from loka_onnx.cli.run import Output, Overrides, RunFile, read_run_file, run_until
from loka_onnx.cli.terminal import Terminal, terminal_of
from loka_onnx.config import Executor
from loka_onnx.core import serde
from loka_onnx.core.artifact import ModelArtifact
from loka_onnx.core.engine import EngineSet
from loka_onnx.core.plan import PlanSet
from loka_onnx.core.profile import Profile
from loka_onnx.core.rewrite import Applied, Declined, ModelSplit, RewriteLog, RewriteRecord
from loka_onnx.core.site import Site
from loka_onnx.errors import ConfigError, EngineError
from loka_onnx.pipeline.job_execution import execute_job
from loka_onnx.pipeline.jobs import RESULT, find_jobs
from loka_onnx.pipeline.probing import EXPORTED
from loka_onnx.pipeline.run import RunOptions, RunResult, Stage
from loka_onnx.report.site_tables import calibration_facts, open_sites

Show = Callable[[Terminal, RunResult], None]
MOST_SITES = 100
"""Sites that `export` lists; their document has all."""
ELSEWHERE = "elsewhere"


def add_stage_verb(app: typer.Typer, stage: Stage) -> None:
    """Register the command that runs the stages up to this one, and shows what it left."""
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
        _print_explanation(terminal, log, before.sites, after.sites)
    print_written(terminal, result, *written)


def _print_record(terminal: Terminal, record: RewriteRecord) -> None:
    check = ""
    if record.max_abs is not None and record.tolerance is not None:
        check = f"; largest change of an output {record.max_abs:.3g}, tolerance {record.tolerance:.3g}"
    undone = "; rolled back" if record.rolled_back else ""
    counts = f"{len(record.applied)} applied, {len(record.declined)} declined"
    terminal.say((record.transform, "bold"), f": {counts}{check}{undone}")


def _print_explanation(
    terminal: Terminal, log: RewriteLog, before: tuple[Site, ...], after: tuple[Site, ...]
) -> None:
    terminal.out.print()
    names = (*(site.name for site in (*after, *before)), ELSEWHERE)
    entries: dict[str, list[tuple[RewriteRecord, Applied | Declined]]] = {name: [] for name in names}
    for record in log.records:
        of_record: tuple[Applied | Declined, ...] = (*record.applied, *record.declined)
        for entry in of_record:
            for name in _sites_of(entry) & entries.keys() or {ELSEWHERE}:
                entries[name].append((record, entry))
    for name, of_site in entries.items():
        if of_site or name != ELSEWHERE:
            is_gone = name not in {site.name for site in after}
            became = ", ".join(site.name for site in after if is_gone and name in site.merged_from)
            fate = f" → {became}" if became else "" if of_site else ": nothing applied or declined"
            terminal.say((name, "bold"), fate)
        for record, entry in of_site:
            is_applied = isinstance(entry, Applied)
            sign = ("!", "red") if record.rolled_back else ("+", "green") if is_applied else ("-", "yellow")
            where = "" if entry.at == name else f" at {entry.at}"
            words = entry.what if isinstance(entry, Applied) else entry.reason
            undone = "; rolled back" if record.rolled_back and is_applied else ""
            terminal.say("  ", sign, f" {record.transform}{where}: {words}{undone}")
    terminal.out.print()


def _sites_of(entry: Applied | Declined) -> set[str]:
    """Return the names that may be sites: the place, its module, and the sites of a replacement."""
    names = {entry.at, entry.at.rpartition("/")[0]}
    if isinstance(entry, Applied):
        names.update(entry.origins, *entry.origins.values())
    return names


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
        result = run_until(terminal, config, RunOptions(resume=True, until=Stage.BUILD))
        for engine in serde.read(EngineSet, result.directory / "engines.json").engines:
            detail = first_line(engine, result.directory)
            terminal.say(f"{engine.id}: {engine.status}{f' ({detail})' if detail else ''}")
        print_written(terminal, result, "engines.json")


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


_VERBS: dict[Stage, tuple[str, Show]] = {
    Stage.EXPORT: ("Bring the model into canonical ONNX with named sites.", _show_model),
    Stage.PLAN: ("Decide the precision of each site.", _show_plans),
    Stage.EVALUATE: (
        "Measure accuracy and latency of the engines.",
        lambda terminal, result: print_written(terminal, result, "evaluation.json"),
    ),
    Stage.REPORT: ("Choose the engines and write the report.", print_outcome),
}
