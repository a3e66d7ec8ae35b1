"""A report with something in it changed: evaluations, outputs, latencies, the first target, the profile."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from loka_onnx.core.evaluation import Evaluation, EvaluationSet, Latency, OutputEvaluation
from loka_onnx.report import ReportData


def with_evaluations(data: ReportData, change: Callable[[Evaluation], Evaluation]) -> ReportData:
    return replace(data, evaluations=EvaluationSet(tuple(map(change, data.evaluations.evaluations))))


def with_outputs(
    data: ReportData,
    change: Callable[[OutputEvaluation], OutputEvaluation],
    split: str = "",
    engine: str = "",
) -> ReportData:
    """Outputs on a split and of an engine, or on all and of all."""

    def changed(each: Evaluation) -> Evaluation:
        is_meant = split in {"", each.split} and engine in {"", each.engine}
        return replace(each, outputs=tuple(map(change, each.outputs))) if is_meant else each

    return with_evaluations(data, changed)


def with_differences(data: ReportData, split: str = "", output: Any = None, **changes: Any) -> ReportData:
    """Differences from the reference, and fields of the outputs that have one."""

    def changed(each: OutputEvaluation) -> OutputEvaluation:
        if each.difference is None:
            return each
        return replace(each, difference=replace(each.difference, **changes), **(output or {}))

    return with_outputs(data, changed, split)


def with_latencies(data: ReportData, change: Callable[[Latency], Latency]) -> ReportData:
    return with_evaluations(data, lambda e: replace(e, latencies=tuple(map(change, e.latencies))))


def with_target(data: ReportData, **changes: Any) -> ReportData:
    """The choice for the first target."""
    first, *rest = data.choice.targets
    return replace(data, choice=replace(data.choice, targets=(replace(first, **changes), *rest)))


def with_profile(data: ReportData, **changes: Any) -> ReportData:
    return replace(data, profile=replace(data.profile, **changes))


def with_ranges(data: ReportData, **changes: Any) -> ReportData:
    """Ranges of every activation."""
    sites = tuple(
        replace(entry, operands={name: replace(stats, **changes) for name, stats in entry.operands.items()})
        for entry in data.profile.sites
    )
    return with_profile(data, sites=sites)


def with_plans(data: ReportData, **changes: Any) -> ReportData:
    return replace(data, plans=replace(data.plans, **changes))


def comparable(data: ReportData) -> ReportData:
    """Nothing is simulated, and everything that was judged was timed: each target has points to compare."""
    engines = tuple(replace(engine, simulated=False) for engine in data.engines)
    timed = next(e.latencies for e in data.evaluations.evaluations if e.latencies)
    return with_evaluations(
        replace(data, engines=engines), lambda e: replace(e, latencies=e.latencies or timed)
    )
