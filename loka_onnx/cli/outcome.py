"""What a run ends with: the table, the choice with its reason, and where things are."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from rich.text import Text

from loka_onnx.cli.terminal import Terminal
from loka_onnx.core.engine import BuildStatus, EngineArtifact
from loka_onnx.core.evaluation import BudgetStatus
from loka_onnx.errors import BudgetMissed
from loka_onnx.pipeline.jobs import BUILD_JOB, JOBS
from loka_onnx.pipeline.run import RunResult
from loka_onnx.report import ReportData, summary_table
from loka_onnx.report.slice_tables import slices_sentence
from loka_onnx.report.verdict import budget_sentence, verdicts

SPLIT = "certification"


def print_outcome(terminal: Terminal, result: RunResult) -> None:
    """Print what a finished run found; nothing for one that ended before its report."""
    out, data = terminal.out, result.report
    if data is None:
        return
    for target in dict.fromkeys(engine.target for engine in data.engines):
        out.print()
        out.print(summary_table(data, target, SPLIT))
    out.print()
    for line in (*_chosen(data), *_undecided(data), *_harmed_slices(data), *_not_built(result, data)):
        # soft_wrap: a path or id that is cut at the margin cannot be copied.
        out.print(line, soft_wrap=True)
    out.print()
    for path in result.report_files:
        if path.suffix == ".html":
            terminal.say(("report ", "bold"), shown(path))
    if result.bundle is not None:
        terminal.say(("bundle ", "bold"), shown(result.bundle))


def check_fp8(result: RunResult) -> None:
    """Raise BudgetMissed where no quantized plan is inside the budget of every output on certification.

    It is a check of accuracy: a plan counts also where its engine is slower, or a simulation.
    """
    data = result.report
    if data is None:
        return
    low, fp8 = data.plans.quantized, {plan.id for plan in data.plans.plans if plan.quantized_sites}
    judged = [e for e in data.evaluations.evaluations if e.split == SPLIT and e.plan in fp8]
    if any(evaluation.is_within_budget for evaluation in judged):
        return
    bounds = []
    for engine, output in ((e.engine, output) for e in judged for output in e.outputs):
        if change := output.difference:
            bound = f"upper bound of {change.judged_name} {change.judged.upper:+.3%}"
            remarks = "".join(f", {remark}" for remark in output.remarks)
            bounds.append(f"{engine}, {output.output}: {bound} against {output.budget:.3%}{remarks}")
    raise BudgetMissed(
        f"E1713 no {low} plan is inside the budget",
        where=data.title,
        evidence="; ".join(bounds) or f"no {low} engine could be evaluated here",
        remedy="raise `outputs.budget`, give more certification rows, or run without --require-fp8 to take "
        "the high-precision engine",
    )


def print_written(terminal: Terminal, result: RunResult, *names: str) -> None:
    """Say which files of the run directory a stage leaves."""
    for name in names:
        terminal.say(("wrote ", "bold"), shown(result.directory / name))


def shown(path: Path) -> str:
    """A path as short as it can be given from here."""
    relative = os.path.relpath(path)
    return str(path) if relative.startswith("..") else relative


def first_line(engine: EngineArtifact, directory: Path) -> str:
    """What is told of an engine's build in one line, with the place of its job as seen from here.

    Documents of a run hold places below its directory, which may be moved.
    """
    detail = engine.detail.strip().partition("\n")[0]
    return detail.replace(f"{BUILD_JOB} {JOBS}/", f"{BUILD_JOB} {shown(directory / JOBS)}/")


def _chosen(data: ReportData) -> Iterator[Text]:
    for choice, verdict in zip(data.choice.targets, verdicts(data), strict=True):
        yield Text.assemble(
            (f"{choice.target}: ", "bold"),
            (", ".join(choice.plans), "bold green"),
            f" — {choice.reason} (speed: {choice.basis})",
        )
        for stat in verdict.stats:
            if stat.label.startswith(("Speed", "Latency")):
                yield Text(f"  {stat.label}: {stat.shown.text} ({stat.note})")


def _undecided(data: ReportData) -> Iterator[Text]:
    judged = (e for e in data.evaluations.evaluations if e.split == SPLIT)
    for engine, output in ((e.engine, output) for e in judged for output in e.outputs):
        if output.budget_status == BudgetStatus.UNDECIDED or output.remarks:
            yield Text.assemble(("? ", "yellow"), f"{engine}, {output.output}: {budget_sentence(output)}")


def _harmed_slices(data: ReportData) -> Iterator[Text]:
    for name in (name for choice in data.choice.targets for name in choice.engines):
        for output in data.outputs(name, SPLIT):
            if output.slices_of(BudgetStatus.BEYOND):
                harm = f"{name}, {output.output}, slices: {slices_sentence(output)}"
                yield Text.assemble(("! ", "red"), harm)


def _not_built(result: RunResult, data: ReportData) -> Iterator[Text]:
    for engine in data.engines:
        if not engine.is_built:
            mark = ("✗ ", "red") if engine.status is BuildStatus.FAILED else ("– ", "dim")
            detail = first_line(engine, result.directory)
            yield Text.assemble(mark, f"{engine.id} {engine.status}: {detail}")
