"""The few numbers that a choice is made by: how much faster, over which baseline, at what cost."""

from __future__ import annotations

from collections.abc import Iterator
from math import isfinite

from loka_onnx.core.evaluation import Evaluation, Loser, OutputEvaluation, TargetChoice, Why
from loka_onnx.core.formats import Precision
from loka_onnx.core.intervals import Interval
from loka_onnx.report import numbers
from loka_onnx.report.budget_bar import BudgetBar, can_be_drawn
from loka_onnx.report.data import ReportData
from loka_onnx.report.document import Stat, Tone, cell
from loka_onnx.report.figures import Place, at, derive, ends, formed, percent_interval, shown, told

BASELINES = ("fp32", "bf16", "fp16")
"""Ids of the plans that a gain is told over, where an engine of them competed."""
_TONES = {"within": Tone.GOOD, "beyond": Tone.BAD, "undecided": Tone.WARN}


def stats(data: ReportData, choice: TargetChoice) -> tuple[Stat, ...]:
    """The numbers of one target: its plan, its gain over each baseline, its cost against the budget."""
    return (
        _plan_stat(data, choice),
        *speed_stats(data, choice),
        *_cost_stats(data, choice),
        _latency_stat(data, choice),
    )


def bars(data: ReportData, choice: TargetChoice) -> tuple[BudgetBar, ...]:
    """What was judged on the deciding split, by output; of an engine of the same plan, where this one was not
    run.
    """
    evaluation = _deciding(data, choice)
    if evaluation is None:
        return ()
    return tuple(
        BudgetBar(
            label=f"{output.output} on {evaluation.split}",
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
        for output in evaluation.outputs
        if output.difference is not None
        and can_be_drawn(output.difference.judged)
        and isfinite(output.budget)
    )


def speed_stats(data: ReportData, choice: TargetChoice) -> Iterator[Stat]:
    """The gain over the best engine of each baseline, as measured in turns; in words where there is none."""
    is_simulated = _is_simulated(data, choice.engine)
    for plan in BASELINES:
        label = f"Speed over {plan.upper()}"
        if plan == choice.plan:
            yield Stat(label, cell("none", Tone.MUTED), "this is the engine of that plan itself")
            continue
        losers = [loser for loser in choice.losers if _plan_of(data, loser.engine) == plan]
        measured = [loser for loser in losers if loser.times is not None]
        if is_simulated and losers:
            yield Stat(label, cell("simulated", Tone.MUTED), "its speed says nothing")
        elif measured:
            yield _gain(label, min(measured, key=_times))
        elif losers:
            yield Stat(label, cell(numbers.NOT_MEASURED, Tone.MUTED), _why_not(losers[0]))


def _gain(label: str, baseline: Loser) -> Stat:
    assert baseline.times is not None
    times = baseline.times
    is_known = times.lower < times.upper
    tone = Tone.GOOD if times.lower > 1 else Tone.WARN
    value, lower, upper = ends(times)
    interval = told("[{}, {}], ", formed("{:.3f}".format, lower), formed("{:.3f}".format, upper))
    note = told("{}measured, over {}", interval if is_known else "", baseline.engine)
    return Stat(label, cell(formed("{:.3f}×".format, value), tone), note)


def _times(loser: Loser) -> float:
    return loser.times.value if loser.times is not None else float("inf")


def _why_not(loser: Loser) -> str:
    return f"{loser.engine}: {loser.why}" if loser.why is not Why.NOT_MEASURED else loser.engine


def _plan_stat(data: ReportData, choice: TargetChoice) -> Stat:
    plan = data.plan(choice.plan)
    if plan is None:
        return Stat("Plan", cell(choice.plan))
    if not plan.fp8_sites:
        return Stat("Plan", cell(choice.plan), "no FP8")
    sites = formed(numbers.count, derive("count", Place(plan, "decisions"), precision=Precision.FP8.value))
    note = told("sites in FP8: {}, {} of the FLOPs", sites, shown(numbers.share, plan, "fp8_share"))
    return Stat("Plan", cell(choice.plan), note)


def _latency_stat(data: ReportData, choice: TargetChoice) -> Stat:
    label = "Latency p50"
    if _is_simulated(data, choice.engine):
        return Stat(label, cell("simulated", Tone.MUTED), "its speed says nothing")
    found = [
        latency
        for evaluation in data.evaluations.evaluations
        if evaluation.engine == choice.engine
        for latency in evaluation.latencies
    ]
    if not found:
        return Stat(label, cell(numbers.NOT_MEASURED, Tone.MUTED), choice.basis)
    largest = max(found, key=lambda latency: latency.batch)
    elsewhere = "" if largest.counts_for_choice else ", which is not the target"
    note = told("batch {}, on {}{}", shown(numbers.count, largest, "batch"), largest.device, elsewhere)
    return Stat(label, cell(shown(numbers.latency, largest, "p50_us")), note)


def _cost_stats(data: ReportData, choice: TargetChoice) -> Iterator[Stat]:
    evaluation = _deciding(data, choice)
    worst = max(evaluation.outputs, key=_over_budget, default=None) if evaluation is not None else None
    if evaluation is None or worst is None:
        yield Stat("Accuracy", cell(numbers.NOT_MEASURED, Tone.MUTED))
        return
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
            _whose(data, choice, evaluation),
        ),
    )
    yield Stat("Budget", cell(shown(numbers.budget_percent, worst, "budget")), _held(worst, judged))


def _held(output: OutputEvaluation, judged: Interval) -> str:
    if output.budget <= 0:
        return output.budget_status
    part = derive("ratio", at(judged, "upper"), at(output, "budget"))
    return told("{}; the upper end is at {} of it", output.budget_status, formed(numbers.error_percent, part))


def _whose(data: ReportData, choice: TargetChoice, evaluation: Evaluation) -> str:
    """Whose accuracy it is, where the emitted engine was not run."""
    if evaluation.engine == choice.engine:
        return ", simulated FP8" if _is_simulated(data, choice.engine) else ""
    how = "simulated" if _is_simulated(data, evaluation.engine) else "measured"
    return f"; {how} by {evaluation.engine}, this engine was not run"


def stand_in(data: ReportData, choice: TargetChoice) -> Evaluation | None:
    """The worst evaluation of another engine of the same plan; None where the emitted engine has its own."""
    if _own(data, choice) is not None:
        return None
    for split in reversed(data.splits):
        same = [
            evaluation
            for evaluation in data.evaluations.evaluations
            if (evaluation.split, evaluation.plan) == (split, choice.plan)
            and evaluation.outputs
            and data.engine(evaluation.engine) is not None
        ]
        if same:
            return max(same, key=lambda evaluation: max(map(_over_budget, evaluation.outputs)))
    return None


def _deciding(data: ReportData, choice: TargetChoice) -> Evaluation | None:
    return _own(data, choice) or stand_in(data, choice)


def _own(data: ReportData, choice: TargetChoice) -> Evaluation | None:
    """That of the last split which the emitted engine was run on: certification, where there is one."""
    found = (data.evaluation(choice.engine, split) for split in reversed(data.splits))
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
