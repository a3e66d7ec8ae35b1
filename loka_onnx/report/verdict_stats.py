"""The few deciding numbers: speedup over each baseline, and cost."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import isfinite

from loka_onnx.core.evaluation import Because, Evaluation, OutputEvaluation, Rejection, TargetChoice, Why
from loka_onnx.core.formats import Precision
from loka_onnx.core.intervals import Interval
from loka_onnx.core.plan import PrecisionPlan
from loka_onnx.report import numbers
from loka_onnx.report.budget_bar import BudgetBar, can_be_drawn
from loka_onnx.report.data import ReportData
from loka_onnx.report.document import Stat, Tone, cell
from loka_onnx.report.figures import (
    Place,
    at,
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
_TONES = {"within": Tone.GOOD, "beyond": Tone.BAD, "undecided": Tone.WARN}


@dataclass(frozen=True)
class Emitted:
    """A selected engine.

    Attributes:
        apart: ``of`` and its id where a target has several; else empty.
    """

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
            text=told(
                "{} {}",
                output.difference.judged_name,
                percent_interval(output.difference.judged, output.budget),
            ),
            status=output.budget_status,
            interval=output.difference.judged,
            budget=output.budget,
            budget_text=shown(numbers.budget_percent, output, "budget"),
        )
        for engine in emitted(choice)
        if (evaluation := _deciding(data, engine)) is not None
        for output in evaluation.outputs
        if output.difference is not None
        and can_be_drawn(output.difference.judged)
        and isfinite(output.budget)
    )


def speed_stats(data: ReportData, choice: TargetChoice) -> Iterator[Stat]:
    """Yield the gain of the main engine over the best one of each baseline, measured in turns; in words
    without one.
    """
    main = emitted(choice)[0]
    is_simulated = _is_simulated(data, choice.engine)
    for plan in BASELINES:
        label = f"Speed over {plan.upper()}"
        if plan == choice.plan:
            what = "the main engine is" if main.apart else "this is the engine"
            yield Stat(label, cell("none", Tone.MUTED), f"{what} of that plan itself")
            continue
        losers = [loser for loser in choice.losers if _plan_of(data, loser.engine) == plan]
        measured = [loser for loser in losers if loser.times is not None]
        if is_simulated and losers:
            yield Stat(label, cell("simulated", Tone.MUTED), "its speed says nothing")
        elif measured:
            yield _gain(label, min(measured, key=_times), main)
        elif losers:
            yield Stat(label, cell(numbers.NOT_MEASURED, Tone.MUTED), _why_not(losers[0]))


def _gain(label: str, baseline: Rejection, main: Emitted) -> Stat:
    assert baseline.times is not None
    times = baseline.times
    is_known = times.lower < times.upper
    tone = Tone.GOOD if times.lower > 1 else Tone.WARN
    value, lower, upper = ends(times)
    interval = told("[{}, {}], ", formed("{:.3f}".format, lower), formed("{:.3f}".format, upper))
    note = told(
        "{}{}measured{}, over {}",
        "a tie: " if is_known and times.lower <= 1.0 <= times.upper else "",
        interval if is_known else "",
        main.apart and f",{main.apart}",
        baseline.engine,
    )
    return Stat(label, cell(formed("{:.3f}×".format, value), tone), note)


def _times(loser: Rejection) -> float:
    return loser.times.value if loser.times is not None else float("inf")


def _why_not(loser: Rejection) -> str:
    return f"{loser.engine}: {loser.why}" if loser.why is not Why.NOT_MEASURED else loser.engine


def _plan_stat(data: ReportData, choice: TargetChoice) -> Stat:
    notes = [(name, _fp8_of(plan)) for name in choice.plans if (plan := data.plan(name)) is not None]
    if len(choice.plans) == 1:
        return Stat("Plan", cell(choice.plan), notes[0][1] if notes else "")
    note = joined("; ", [told("{}: {}", name, fp8) for name, fp8 in notes])
    return Stat("Plans", cell(", ".join(choice.plans)), note)


def _fp8_of(plan: PrecisionPlan) -> str:
    if not plan.fp8_sites:
        return "no FP8"
    sites = formed(numbers.count, derive("count", Place(plan, "decisions"), precision=Precision.FP8.value))
    return told("sites in FP8: {}, {} of the FLOPs", sites, shown(numbers.share, plan, "fp8_share"))


def _latency_stat(data: ReportData, choice: TargetChoice) -> Stat:
    label = "Latency p50"
    if _is_simulated(data, choice.engine):
        return Stat(label, cell("simulated", Tone.MUTED), "its speed says nothing")
    found = [
        latency
        for evaluation in data.evaluations.evaluations
        for latency in evaluation.latencies
        if evaluation.engine == choice.route(latency.batch)
    ]
    if not found:
        return Stat(label, cell(numbers.NOT_MEASURED, Tone.MUTED), choice.basis)
    largest = max(found, key=lambda latency: latency.batch)
    elsewhere = "" if largest.counts_for_choice else ", which is not the target"
    by = f", by {choice.route(largest.batch)}" if choice.routes else ""
    note = told("batch {}, on {}{}{}", shown(numbers.count, largest, "batch"), largest.device, elsewhere, by)
    return Stat(label, cell(shown(numbers.latency, largest, "p50_us")), note)


def _cost_stats(data: ReportData, choice: TargetChoice) -> Iterator[Stat]:
    """Yield the worst cost against its budget of all selected engines."""
    judged_outputs = [
        (engine, evaluation, output)
        for engine in emitted(choice)
        if (evaluation := _deciding(data, engine)) is not None
        for output in evaluation.outputs
    ]
    if not judged_outputs:
        yield Stat("Accuracy", cell(numbers.NOT_MEASURED, Tone.MUTED))
        return
    engine, evaluation, worst = max(judged_outputs, key=lambda found: _over_budget(found[2]))
    if worst.difference is None:
        yield Stat("Accuracy", cell("reference", Tone.MUTED), "every engine is compared with it")
        return
    judged, of = worst.difference.judged, f"{worst.output}, " if len(evaluation.outputs) > 1 else ""
    decimals = numbers.interval_decimals(judged, worst.budget)
    value, lower, upper = (formed(lambda v: numbers.signed_percent(v, decimals), end) for end in ends(judged))
    rows = shown(numbers.count, evaluation, "rows")
    yield Stat(
        worst.difference.judged_name,
        cell(value, _TONES.get(worst.budget_status, Tone.PLAIN)),
        told(
            "[{}, {}], {}{} {} rows{}",
            lower,
            upper,
            of,
            rows,
            evaluation.split,
            _whose(data, engine, evaluation),
        ),
    )
    yield Stat("Budget", cell(shown(numbers.budget_percent, worst, "budget")), _held(worst, judged))
    yield from _beside(worst)


def _beside(output: OutputEvaluation) -> Iterator[Stat]:
    """Yield guarded quantities."""
    change = output.difference
    limits = {guard.name: guard for guard in output.guards}
    if change is None:
        return
    if change.delta_ne is not None:
        guard = limits.get(Because.MAX_KL)
        note = "" if guard is None else told("accepted: {}", shown(numbers.budget_percent, guard, "limit"))
        tone = Tone.PLAIN if guard is None else _TONES.get(guard.status, Tone.PLAIN)
        yield Stat("KL", cell(percent_interval(change.kl), tone), note)
    if change.delta_auc is not None:
        guard = limits.get(Because.MAX_AUC_DROP)
        note = "" if guard is None else told("accepted drop: {}", shown(numbers.scientific, guard, "limit"))
        tone = Tone.PLAIN if guard is None else _TONES.get(guard.status, Tone.PLAIN)
        yield Stat("ΔAUC", cell(metric_interval(change.delta_auc), tone), note)


def _held(output: OutputEvaluation, judged: Interval) -> str:
    if output.budget <= 0:
        return output.verdict
    part = derive("ratio", at(judged, "upper"), at(output, "budget"))
    return told("{}; the upper end is at {} of it", output.verdict, formed(numbers.error_percent, part))


def _whose(data: ReportData, engine: Emitted, evaluation: Evaluation) -> str:
    """Return whose accuracy it is, where there are several engines or the selected one was not run."""
    whose = engine.apart and f",{engine.apart}"
    if evaluation.engine == engine.engine:
        return f"{whose}, simulated FP8" if _is_simulated(data, engine.engine) else whose
    how = "simulated" if _is_simulated(data, evaluation.engine) else "measured"
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


def _deciding(data: ReportData, engine: Emitted) -> Evaluation | None:
    return _own(data, engine) or stand_in(data, engine)


def _own(data: ReportData, engine: Emitted) -> Evaluation | None:
    """Return the evaluation of the last split that the engine was run on: certification, if any."""
    found = (data.evaluation(engine.engine, split) for split in reversed(data.splits))
    return next((evaluation for evaluation in found if evaluation is not None and evaluation.outputs), None)


def _over_budget(output: OutputEvaluation) -> float:
    if output.difference is None:
        return float("-inf")
    return output.difference.judged.upper - output.budget


def _plan_of(data: ReportData, engine_id: str) -> str:
    engine = data.engine(engine_id)
    return engine.plan if engine is not None else ""


def _is_simulated(data: ReportData, engine_id: str) -> bool:
    engine = data.engine(engine_id)
    return engine is not None and engine.simulated
