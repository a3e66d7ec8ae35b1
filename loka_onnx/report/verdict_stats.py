"""The few deciding numbers: speedup over each baseline, and cost."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import isfinite

from loka_onnx.core.evaluation import Because, Evaluation, OutputEvaluation, Rejection, TargetChoice, Why
from loka_onnx.core.formats import Precision
from loka_onnx.core.plan import PrecisionPlan
from loka_onnx.report import numbers
from loka_onnx.report.data import ReportData
from loka_onnx.report.document import BUDGET_TONES, BudgetBar, Cell, Stat, Tone, can_be_drawn, cell
from loka_onnx.report.figures import (
    at,
    counted,
    derive,
    ends,
    formed,
    joined,
    metric_interval,
    percent_interval,
    shown,
    told,
)

BASELINES = ("fp32", "bf16", "fp16")
"""Ids of baseline plans, where an engine of them competed."""
_NOT_MEASURED = cell(numbers.NOT_MEASURED, Tone.MUTED)
_SIMULATED = (cell("simulated", Tone.MUTED), "its speed says nothing")


@dataclass(frozen=True)
class Emitted:
    """A selected engine; `apart` is ``of`` and its id where a target has several, else empty."""

    engine: str
    plan: str
    apart: str = ""


def emitted(choice: TargetChoice) -> tuple[Emitted, ...]:
    """Return all engines of a target, the main one first."""
    plans = {choice.engine: choice.plan} | {route.engine: route.plan for route in choice.routes}
    several = len(plans) > 1
    return tuple(Emitted(name, plan, f" of {name}" if several else "") for name, plan in plans.items())


def stats(data: ReportData, choice: TargetChoice) -> tuple[Stat, ...]:
    """Return the numbers of one target: its plan, its gain over each baseline, its cost against the
    budget.
    """
    return (
        _plan_stat(data, choice),
        *speed_stats(data, choice),
        *_cost_stats(data, choice),
        _latency_stat(data, choice),
    )


def bars(data: ReportData, choice: TargetChoice) -> tuple[BudgetBar, ...]:
    """Return judged quantities on the deciding split, by engine and output; of an engine of the same plan,
    where this one was not run.
    """
    return tuple(
        BudgetBar(
            label=f"{output.output} on {evaluation.split}{engine.apart}",
            text=told("{} {}", change.judged_name, percent_interval(change.judged, output.budget)),
            status=output.budget_status,
            interval=change.judged,
            budget=output.budget,
            budget_text=shown(numbers.budget_percent, output, "budget"),
        )
        for engine, evaluation, output in _judged(data, choice)
        if (change := output.difference) is not None
        and can_be_drawn(change.judged)
        and isfinite(output.budget)
    )


def speed_stats(data: ReportData, choice: TargetChoice) -> Iterator[Stat]:
    """Yield the gain of the main engine over the best one of each baseline, measured in turns; in words
    without one.
    """
    main = emitted(choice)[0]
    for plan in BASELINES:
        label = f"Speed over {plan.upper()}"
        if plan == choice.plan:
            who = "the main engine is" if main.apart else "this is the engine"
            yield Stat(label, cell("none", Tone.MUTED), f"{who} of that plan itself")
            continue
        of_plan = {engine.id for engine in data.engines if engine.plan == plan}
        losers = [loser for loser in choice.losers if loser.engine in of_plan]
        measured = [(loser.times.value, i) for i, loser in enumerate(losers) if loser.times is not None]
        if losers and data.is_simulated(choice.engine):
            yield Stat(label, *_SIMULATED)
        elif measured:
            yield _gain(label, losers[min(measured)[1]], main)
        elif losers:
            why = "" if losers[0].why is Why.NOT_MEASURED else f": {losers[0].why}"
            yield Stat(label, _NOT_MEASURED, f"{losers[0].engine}{why}")


def _gain(label: str, baseline: Rejection, main: Emitted) -> Stat:
    assert baseline.times is not None
    times = baseline.times
    is_known = times.lower < times.upper
    value, lower, upper = (formed("{:.3f}".format, end) for end in ends(times))
    note = told(
        "{}{}measured{}, over {}",
        "a tie: " if is_known and times.lower <= 1.0 <= times.upper else "",
        told("[{}, {}], ", lower, upper) if is_known else "",
        main.apart and f",{main.apart}",
        baseline.engine,
    )
    return Stat(label, cell(told("{}×", value), Tone.GOOD if times.lower > 1 else Tone.WARN), note)


def _plan_stat(data: ReportData, choice: TargetChoice) -> Stat:
    notes = [(name, _fp8_of(plan)) for name in choice.plans if (plan := data.plan(name)) is not None]
    if len(choice.plans) == 1:
        return Stat("Plan", cell(choice.plan), notes[0][1] if notes else "")
    note = joined("; ", [told("{}: {}", name, fp8) for name, fp8 in notes])
    return Stat("Plans", cell(", ".join(choice.plans)), note)


def _fp8_of(plan: PrecisionPlan) -> str:
    if not plan.fp8_sites:
        return "no FP8"
    sites = counted(plan, "decisions", precision=Precision.FP8.value)
    return told("sites in FP8: {}, {} of the FLOPs", sites, shown(numbers.share, plan, "fp8_share"))


def _latency_stat(data: ReportData, choice: TargetChoice) -> Stat:
    label = "Latency p50"
    if data.is_simulated(choice.engine):
        return Stat(label, *_SIMULATED)
    latencies = [
        latency
        for evaluation in data.evaluations.evaluations
        for latency in evaluation.latencies
        if evaluation.engine == choice.route(latency.batch)
    ]
    if not latencies:
        return Stat(label, _NOT_MEASURED, choice.basis)
    largest = max(latencies, key=lambda latency: latency.batch)
    elsewhere = "" if largest.counts_for_choice else ", which is not the target"
    by = f", by {choice.route(largest.batch)}" if choice.routes else ""
    note = told("batch {}, on {}{}{}", shown(numbers.count, largest, "batch"), largest.device, elsewhere, by)
    return Stat(label, cell(shown(numbers.latency, largest, "p50_us")), note)


_Judged = tuple[Emitted, Evaluation, OutputEvaluation]


def _judged(data: ReportData, choice: TargetChoice) -> list[_Judged]:
    """Return the outputs of all selected engines on the deciding split."""
    return [
        (engine, evaluation, output)
        for engine in emitted(choice)
        if (evaluation := _own(data, engine) or stand_in(data, engine)) is not None
        for output in evaluation.outputs
    ]


def _cost_stats(data: ReportData, choice: TargetChoice) -> Iterator[Stat]:
    """Yield the worst cost against its budget of all selected engines, and its guarded quantities."""
    judged_outputs = _judged(data, choice)
    if not judged_outputs:
        yield Stat("Accuracy", _NOT_MEASURED)
        return
    engine, evaluation, worst = max(judged_outputs, key=lambda row: _over_budget(row[2]))
    change = worst.difference
    if change is None:
        yield Stat("Accuracy", cell("reference", Tone.MUTED), "every engine is compared with it")
        return
    decimals = numbers.interval_decimals(change.judged, worst.budget)
    value, lower, upper = (
        formed(lambda v: numbers.signed_percent(v, decimals), end) for end in ends(change.judged)
    )
    note = told(
        "[{}, {}], {}{} {} rows{}",
        lower,
        upper,
        f"{worst.output}, " if len(evaluation.outputs) > 1 else "",
        shown(numbers.count, evaluation, "rows"),
        evaluation.split,
        _whose(data, engine, evaluation),
    )
    yield Stat(change.judged_name, cell(value, BUDGET_TONES.get(worst.budget_status, Tone.PLAIN)), note)
    verdict: str = worst.verdict
    if worst.budget > 0:
        part = derive("ratio", at(change.judged, "upper"), at(worst, "budget"))
        verdict = told("{}; the upper end is at {} of it", verdict, formed(numbers.error_percent, part))
    yield Stat("Budget", cell(shown(numbers.budget_percent, worst, "budget")), verdict)
    if change.delta_ne is not None:
        yield Stat("KL", *_guarded(worst, Because.MAX_KL))
    if change.delta_auc is not None:
        yield Stat("ΔAUC", *_guarded(worst, Because.MAX_AUC_DROP))


def _guarded(output: OutputEvaluation, name: Because) -> tuple[Cell, str]:
    """Return a guarded quantity and its limit, if any."""
    change = output.difference
    assert change is not None
    is_kl = name is Because.MAX_KL
    text = percent_interval(change.kl) if is_kl else metric_interval(change.delta_auc)
    guard = next((guard for guard in output.guards if guard.name is name), None)
    if guard is None:
        return cell(text), ""
    limit = shown(numbers.budget_percent if is_kl else numbers.scientific, guard, "limit")
    note = told("accepted{}: {}", "" if is_kl else " drop", limit)
    return cell(text, BUDGET_TONES.get(guard.status, Tone.PLAIN)), note


def _whose(data: ReportData, engine: Emitted, evaluation: Evaluation) -> str:
    """Return whose accuracy it is, where there are several engines or the selected one was not run."""
    whose = engine.apart and f",{engine.apart}"
    if evaluation.engine == engine.engine:
        return f"{whose}, simulated FP8" if data.is_simulated(engine.engine) else whose
    how = "simulated" if data.is_simulated(evaluation.engine) else "measured"
    return f"{whose}; {how} by {evaluation.engine}, this engine was not run"


def stand_in(data: ReportData, engine: Emitted) -> Evaluation | None:
    """Return the worst evaluation of another engine of the same plan; None where the engine has its own."""
    if _own(data, engine) is not None:
        return None
    for split in reversed(data.splits):
        same = [
            evaluation
            for evaluation in data.evaluations.evaluations
            if (evaluation.split, evaluation.plan) == (split, engine.plan)
            and evaluation.outputs
            and data.engine(evaluation.engine) is not None
        ]
        if same:
            return max(same, key=lambda evaluation: max(map(_over_budget, evaluation.outputs)))
    return None


def _own(data: ReportData, engine: Emitted) -> Evaluation | None:
    """Return the evaluation of the last split that the engine was run on: certification, if any."""
    return next((e for e in data.evaluations_of(engine.engine) if e.outputs), None)


def _over_budget(output: OutputEvaluation) -> float:
    if output.difference is None:
        return float("-inf")
    return output.difference.judged.upper - output.budget
