"""The end of a run on the terminal: the table, the choice with its reason, and the files."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from itertools import zip_longest
from pathlib import Path
from typing import Any

from rich.padding import Padding
from rich.text import Text

from loka_onnx.cli.terminal import Terminal, print_words
from loka_onnx.core.engine import BuildStatus, EngineArtifact
from loka_onnx.core.evaluation import BudgetStatus
from loka_onnx.errors import BudgetMissed
from loka_onnx.pipeline.jobs import BUILD_JOB, JOBS
from loka_onnx.pipeline.run import RunResult
from loka_onnx.report import ReportData, summary_table
from loka_onnx.report.data import CERTIFICATION
from loka_onnx.report.slice_tables import slices_sentence
from loka_onnx.report.summary import engine_rows, measured_targets, short_names, target_rows
from loka_onnx.report.verdict import budget_sentence, sentence


def print_outcome(terminal: Terminal, result: RunResult) -> None:
    """Print what a finished run found; nothing for one that ended before its report."""
    out, data = terminal.out, result.report
    if data is None:
        return
    out.print()
    for line in _chosen(data):
        print_words(out, line) if isinstance(line, Text) else out.print(line)
    for target in measured_targets(data):
        out.print()
        out.print(summary_table(data, target, CERTIFICATION))
    out.print()
    for line in (*_undecided(data), *_harmed_slices(data), *_not_built(result, data)):
        print_words(out, line)
    for path in result.report_files:
        if path.suffix == ".html":
            terminal.say(("report ", "bold"), shown(path))
    if result.bundle is not None:
        terminal.say(("bundle ", "bold"), shown(result.bundle))


def outcome_json(result: RunResult) -> dict[str, Any]:
    """Return what `print_outcome` prints, and all of its numbers, as plain values."""
    data = result.report
    return {
        "directory": str(result.directory),
        "report": [str(path) for path in result.report_files],
        "bundle": result.bundle and str(result.bundle),
        "targets": target_rows(data) if data else [],
        "engines": engine_rows(data) if data else [],
    }


def check_fp8(result: RunResult) -> None:
    """Raise BudgetMissed where no quantized plan is inside the budget of every output on certification.

    It is a check of accuracy: a plan counts also where its engine is slower, or a simulation.
    """
    data = result.report
    if data is None:
        return
    low, fp8 = data.plans.quantized, {plan.id for plan in data.plans.plans if plan.quantized_sites}
    judged = [e for e in data.evaluations.evaluations if e.split == CERTIFICATION and e.plan in fp8]
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
    """The first line of an engine's build detail, with the path of its job relative to here."""
    detail = engine.detail.strip().partition("\n")[0]
    return detail.replace(f"{BUILD_JOB} {JOBS}/", f"{BUILD_JOB} {shown(directory / JOBS)}/")


def _chosen(data: ReportData) -> Iterator[Text | Padding]:
    """Yield a sentence for each target; a reason that several share once, after the last of them."""
    targets = data.choice.targets
    for choice, following in zip_longest(targets, targets[1:]):
        head, rest = f"{choice.target}: ", sentence(data, choice).removeprefix(f"{choice.target}: ")
        plans = " and ".join(choice.plans)
        yield Text.assemble((head, "bold"), (plans, "bold green"), rest.removeprefix(plans))
        if following is None or following.reason != choice.reason:
            yield Padding(Text(choice.reason, style="dim"), (0, 0, 0, 2))


def _undecided(data: ReportData) -> Iterator[Text]:
    sentences = (
        (e.engine, f"{output.output} is {budget_sentence(output)}")
        for e in data.evaluations.evaluations
        for output in e.outputs
        if e.split == CERTIFICATION and (output.budget_status == BudgetStatus.UNDECIDED or output.remarks)
    )
    yield from _grouped(data, sentences, ("? ", "yellow"))


def _harmed_slices(data: ReportData) -> Iterator[Text]:
    for name in (name for choice in data.choice.targets for name in choice.engines):
        for output in data.outputs(name, CERTIFICATION):
            if output.slices_of(BudgetStatus.BEYOND):
                harm = f"{name}, {output.output}, slices: {slices_sentence(output)}"
                yield Text.assemble(("! ", "red"), harm)


def _not_built(result: RunResult, data: ReportData) -> Iterator[Text]:
    for status in (BuildStatus.FAILED, BuildStatus.DECLINED, BuildStatus.WAITING):
        mark = ("✗ ", "red") if status is BuildStatus.FAILED else ("– ", "dim")
        engines = (engine for engine in data.engines if engine.status is status)
        details = ((e.id, f"{status}: {first_line(e, result.directory)}") for e in engines)
        yield from _grouped(data, details, mark)


def _grouped(data: ReportData, lines: Iterable[tuple[str, str]], mark: tuple[str, str]) -> Iterator[Text]:
    """Yield each text once, behind the targets and engines that it concerns."""
    names, groups = short_names(data), dict[str, dict[str, list[str]]]()
    for engine, text in lines:
        built = data.engine(engine)
        groups.setdefault(text, {}).setdefault(built.target if built else "", []).append(
            names.get(engine, engine)
        )
    for text, targets in groups.items():
        whose = "; ".join(f"{target} {', '.join(engines)}".strip() for target, engines in targets.items())
        yield Text.assemble(mark, f"{whose}: {text}")
