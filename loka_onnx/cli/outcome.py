"""What a run ends with: the table, the choice with its reason, and where things are."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from rich.text import Text

from loka_onnx.cli.outcome_tables import decision_table, fitted, latency_table
from loka_onnx.cli.terminal import Terminal
from loka_onnx.core.engine import BuildStatus, EngineArtifact
from loka_onnx.core.evaluation import BudgetStatus
from loka_onnx.errors import BudgetMissed
from loka_onnx.pipeline.jobs import BUILD_JOB, JOBS
from loka_onnx.pipeline.run import RunResult
from loka_onnx.report import ReportData, summary_table
from loka_onnx.report.slice_tables import slices_sentence
from loka_onnx.report.verdict import budget_sentence

SPLIT = "certification"
DISPENSABLE = ("FP8 FLOPs", "INT8 FLOPs", "FP8 sites", "INT8 sites", "size", "AUC", "NE", "ΔAUC", "KL")
"""What a narrow terminal shows of candidates only where there is room, the first to go first."""


def print_outcome(terminal: Terminal, result: RunResult) -> None:
    """Print what a finished run found; nothing for one that ended before its report."""
    out = terminal.out
    if result.report is None:
        return
    for target in dict.fromkeys(engine.target for engine in result.report.engines):
        out.print()
        out.print(fitted(summary_table(_only(result.report, target), SPLIT), out, DISPENSABLE))
    data = result.report
    for table in (decision_table(data), latency_table(data)):
        if table is not None:
            out.print()
            out.print(table)
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
    """Check that at least one FP8 plan is inside the budget of every output.

    It is a check of accuracy, on the certification split: a plan counts whether or not its engine was the
    fastest one, and where its engine is a simulation.

    Raises:
        BudgetMissed: No FP8 plan is.
    """
    data = result.report
    if data is None:
        return
    fp8 = {plan.id for plan in data.plans.plans if plan.fp8_sites}
    judged = [e for e in data.evaluations.evaluations if e.split == SPLIT and e.plan in fp8]
    if any(evaluation.is_within_budget for evaluation in judged):
        return
    bounds = [
        f"{evaluation.engine}, {output.output}: upper bound of {output.difference.judged_name} "
        f"{output.difference.judged.upper:+.3%} "
        f"against {output.budget:.3%}{''.join(f', {remark}' for remark in output.remarks)}"
        for evaluation in judged
        for output in evaluation.outputs
        if output.difference is not None
    ]
    raise BudgetMissed(
        "E1713 no FP8 plan is inside the budget",
        where=data.title,
        evidence="; ".join(bounds) or "no FP8 engine could be evaluated here",
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


def _only(data: ReportData, target: str) -> ReportData:
    """The facts of one target: one table for each, so that rows fit into a terminal."""
    return replace(
        data,
        title=f"{data.title}, {target}",
        engines=tuple(engine for engine in data.engines if engine.target == target),
        evaluations=replace(
            data.evaluations,
            evaluations=tuple(
                e for e in data.evaluations.evaluations if e.target == target or e.engine in data.references
            ),
        ),
    )


def _chosen(data: ReportData) -> Iterator[Text]:
    for choice in data.choice.targets:
        yield Text.assemble(
            (f"{choice.target}: ", "bold"),
            (", ".join(choice.plans), "bold green"),
            f" — {choice.reason} (speed: {choice.basis})",
        )


def _undecided(data: ReportData) -> Iterator[Text]:
    for evaluation in data.evaluations.evaluations:
        if evaluation.split != SPLIT:
            continue
        for output in evaluation.outputs:
            if output.budget_status == BudgetStatus.UNDECIDED or output.remarks:
                yield Text.assemble(
                    ("? ", "yellow"), f"{evaluation.engine}, {output.output}: {budget_sentence(output)}"
                )


def _harmed_slices(data: ReportData) -> Iterator[Text]:
    for name in (name for choice in data.choice.targets for name in choice.engines):
        evaluation = data.evaluation(name, SPLIT)
        for output in evaluation.outputs if evaluation is not None else ():
            if output.slices_of(BudgetStatus.BEYOND):
                yield Text.assemble(
                    ("! ", "red"), f"{name}, {output.output}, slices: {slices_sentence(output)}"
                )


def _not_built(result: RunResult, data: ReportData) -> Iterator[Text]:
    for engine in data.engines:
        if not engine.is_built:
            mark = ("✗ ", "red") if engine.status is BuildStatus.FAILED else ("– ", "dim")
            detail = first_line(engine, result.directory)
            yield Text.assemble(mark, f"{engine.id} {engine.status}: {detail}")
