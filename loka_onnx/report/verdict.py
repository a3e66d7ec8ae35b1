"""The verdict first: each target's engine, its cost, and the reason."""

from __future__ import annotations

import math
from collections.abc import Iterator

from loka_onnx.core.evaluation import KL_NAME, BudgetStatus, Evaluation, OutputEvaluation, TargetChoice
from loka_onnx.report import numbers
from loka_onnx.report.data import ReportData
from loka_onnx.report.document import Tone, Verdict
from loka_onnx.report.figures import Told, counted, joined, percent_interval, shown, told
from loka_onnx.report.slice_tables import slices_sentence
from loka_onnx.report.verdict_stats import Emitted, bars, emitted, speed_stats, stand_in, stats

SIMULATED_LATENCY = "simulated: speed never counts"
NO_LABELS = f"{KL_NAME}, no labels: the labelled first-order term is not seen"
"""Caution on every verdict on an output without labels."""


def verdicts(data: ReportData) -> tuple[Verdict, ...]:
    """One verdict per target."""
    return tuple(_verdict(data, choice) for choice in data.choice.targets)


def budget_sentence(output: OutputEvaluation) -> Told:
    """Return the budget status of an output, with cautions on its intervals."""
    return joined("; ", [_standing(output), *output.remarks])


def _standing(output: OutputEvaluation) -> Told:
    """Return the status alone, whose numbers all have a source in the report."""
    budget = shown(numbers.budget_percent, output, "budget")
    if output.difference is None:
        return told("the reference itself; budget {}", budget)
    status = _status(output, budget)
    return told("{} ({})", status, NO_LABELS) if output.difference.delta_ne is None else status


def _status(output: OutputEvaluation, budget: Told) -> Told:
    because = ", ".join(output.because)
    if output.budget_status == BudgetStatus.WITHIN:
        return told("within the budget of {}", budget)
    if output.budget_status == BudgetStatus.BEYOND:
        if because:
            return told("beyond what is accepted beside the budget of {}: {}", budget, because)
        return told("beyond the budget of {}", budget)
    if output.rows_to_decide is not None:
        rows = shown(numbers.count, output, "rows_to_decide")
        return told("undecided against the budget of {}; about {} rows would decide it", budget, rows)
    if because:
        return told("undecided against the budget of {} and what is accepted beside it", budget)
    judged = output.difference.judged if output.difference is not None else None
    if judged is None or not math.isfinite(judged.upper - judged.lower):
        why = "how many rows would decide it is not known: these are too few for an interval"
    else:
        why = "the estimate lies on it, and a hundred times as many rows would not tell on which side"
    return told("undecided against the budget of {}; {}", budget, why)


def _verdict(data: ReportData, choice: TargetChoice) -> Verdict:
    engines = emitted(choice)
    has_fp8 = any(plan.fp8_sites for name in choice.plans if (plan := data.plan(name)) is not None)
    headline = f"{choice.target}: emit {' and '.join(f'{e.engine} (plan {e.plan})' for e in engines)}"
    tone = Tone.GOOD if has_fp8 and all(_is_within(data, e.engine) for e in engines) else Tone.WARN
    facts = tuple(_facts(data, choice, engines, has_fp8))
    return Verdict(choice.target, headline, facts, tone, stats(data, choice), bars(data, choice))


def _facts(
    data: ReportData, choice: TargetChoice, engines: tuple[Emitted, ...], has_fp8: bool
) -> Iterator[str]:
    if not has_fp8:
        plans = ", ".join(choice.plans)
        yield f"No FP8 engine is emitted for this target: it gets high precision ({plans})."
    yield f"Why: {choice.reason}"
    for engine in engines:
        if data.is_simulated(engine.engine):
            which = engine.engine if engine.apart else "this engine"
            yield f"FP8 is simulated in {which}: its accuracy counts, its speed says nothing."
        yield from _costs(data, engine)
    for stat in speed_stats(data, choice):
        yield told("{}: {} ({}).", stat.label, stat.shown.text, stat.note)
    for engine in engines:
        for evaluation in data.evaluations_of(engine.engine):
            for output in evaluation.outputs:
                where = (engine.apart, output.output, evaluation.split)
                if output.slices:
                    yield told("Slices{} ({}, {}): {}.", *where, slices_sentence(output))
    if choice.routes:
        routes = [told("to {} rows {}", shown(numbers.count, r, "batch"), r.engine) for r in choice.routes]
        yield told("By batch size: {}.", joined("; ", routes))
    yield f"Speed: {choice.basis}."
    for engine in engines:
        built = data.engine(engine.engine)
        if built is not None and built.fallbacks:
            fallbacks = counted(built, "sites", engaged=False)
            yield told("Sites{} that do not run as planned: {}; see Fallbacks.", engine.apart, fallbacks)


def _is_within(data: ReportData, engine: str) -> bool:
    evaluations = data.evaluations_of(engine)
    outputs = [output for e in evaluations for output in e.outputs]
    is_harmless = not any(output.slices_of(BudgetStatus.BEYOND) for output in outputs)
    return bool(evaluations) and is_harmless and all(e.is_within_budget for e in evaluations)


def _costs(data: ReportData, engine: Emitted) -> Iterator[str]:
    """Yield the cost on each split; of an engine that was not run also that of another one of its plan."""
    evaluations = data.evaluations_of(engine.engine)
    if not any(e.outputs for e in evaluations):
        why = f" ({evaluations[0].status})" if evaluations else ""
        yield f"Cost{engine.apart}: {numbers.NOT_MEASURED}{why}."
    for evaluation in evaluations:
        for output in evaluation.outputs:
            yield _cost(evaluation, output, engine.apart)
    other = stand_in(data, engine)
    if other is not None:
        how = "simulated" if data.is_simulated(other.engine) else "measured"
        plan = f"plan {engine.plan}" if engine.apart else "this plan"
        for output in other.outputs:
            yield told("Of {}, {} by {}: {}", plan, how, other.engine, _cost(other, output))


def _cost(evaluation: Evaluation, output: OutputEvaluation, apart: str = "") -> str:
    rows = shown(numbers.count, evaluation, "rows")
    where = told("{}, {} {} rows", output.output, rows, evaluation.split)
    if output.difference is None:
        return told("Cost{} ({}): none, it is the reference.", apart, where)
    interval = percent_interval(output.difference.judged, output.budget)
    name = output.difference.judged_name
    return told("Cost{} ({}): {} {}, {}.", apart, where, name, interval, _standing(output))
