"""The verdict first: each target's engine, its cost, and the reason."""

from __future__ import annotations

import math

from loka_onnx.core.evaluation import KL_NAME, BudgetStatus, Evaluation, OutputEvaluation, TargetChoice
from loka_onnx.report import numbers
from loka_onnx.report.data import ReportData
from loka_onnx.report.document import Tone, Verdict
from loka_onnx.report.figures import Place, Told, derive, formed, joined, percent_interval, shown, told
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
    if output.difference is None:
        return told("the reference itself; budget {}", shown(numbers.budget_percent, output, "budget"))
    said = _status_sentence(output)
    return told("{} ({})", said, NO_LABELS) if output.difference.delta_ne is None else said


def _status_sentence(output: OutputEvaluation) -> Told:
    budget = shown(numbers.budget_percent, output, "budget")
    if output.budget_status == BudgetStatus.WITHIN:
        return told("within the budget of {}", budget)
    if output.budget_status == BudgetStatus.BEYOND:
        if output.because:
            return told(
                "beyond what is accepted beside the budget of {}: {}", budget, ", ".join(output.because)
            )
        return told("beyond the budget of {}", budget)
    if output.rows_to_decide is None and output.because:
        return told("undecided against the budget of {} and what is accepted beside it", budget)
    if output.rows_to_decide is None:
        return told("undecided against the budget of {}; {}", budget, _why_open(output))
    return told(
        "undecided against the budget of {}; about {} rows would decide it",
        budget,
        shown(numbers.count, output, "rows_to_decide"),
    )


def _why_open(output: OutputEvaluation) -> str:
    """Return why no deciding number of rows can be given."""
    judged = output.difference.judged if output.difference is not None else None
    if judged is None or not math.isfinite(judged.upper - judged.lower):
        return "how many rows would decide it is not known: these are too few for an interval"
    return "the estimate lies on it, and a hundred times as many rows would not tell on which side"


def _verdict(data: ReportData, choice: TargetChoice) -> Verdict:
    engines = emitted(choice)
    has_fp8 = any(plan.fp8_sites for name in choice.plans if (plan := data.plan(name)) is not None)
    facts: list[str] = [f"Why: {choice.reason}"]
    if not has_fp8:
        plans = ", ".join(choice.plans)
        facts.insert(0, f"No FP8 engine is emitted for this target: it gets high precision ({plans}).")
    for engine in engines:
        if (built := data.engine(engine.engine)) is not None and built.simulated:
            which = engine.engine if engine.apart else "this engine"
            facts.append(f"FP8 is simulated in {which}: its accuracy counts, its speed says nothing.")
        facts += _costs(data, engine)
        facts += _stood_in(data, engine)
    facts += [told("{}: {} ({}).", s.label, s.shown.text, s.note) for s in speed_stats(data, choice)]
    for engine in engines:
        facts += _slices(data, engine)
    if choice.routes:
        served = [told("to {} rows {}", shown(numbers.count, r, "batch"), r.engine) for r in choice.routes]
        facts.append(told("By batch size: {}.", joined("; ", served)))
    facts.append(f"Speed: {choice.basis}.")
    for engine in engines:
        if (built := data.engine(engine.engine)) is not None and built.fallbacks:
            fallbacks = formed(numbers.count, derive("count", Place(built, "sites"), engaged=False))
            said = told("Sites{} that do not run as planned: {}; see Fallbacks.", engine.apart, fallbacks)
            facts.append(said)
    headline = f"{choice.target}: emit {' and '.join(f'{e.engine} (plan {e.plan})' for e in engines)}"
    is_good = has_fp8 and all(_is_within(data, engine.engine) for engine in engines)
    tone = Tone.GOOD if is_good else Tone.WARN
    return Verdict(choice.target, headline, tuple(facts), tone, stats(data, choice), bars(data, choice))


def _evaluations(data: ReportData, engine: str) -> list[Evaluation]:
    found = (data.evaluation(engine, split) for split in reversed(data.splits))
    return [e for e in found if e is not None]


def _is_within(data: ReportData, engine: str) -> bool:
    found = _evaluations(data, engine)
    return bool(found) and all(e.is_within_budget and not _beyond(e) for e in found)


def _beyond(evaluation: Evaluation) -> bool:
    return any(output.slices_of(BudgetStatus.BEYOND) for output in evaluation.outputs)


def _slices(data: ReportData, engine: Emitted) -> list[str]:
    return [
        told("Slices{} ({}, {}): {}.", engine.apart, output.output, evaluation.split, slices_sentence(output))
        for evaluation in _evaluations(data, engine.engine)
        for output in evaluation.outputs
        if output.slices
    ]


def _costs(data: ReportData, engine: Emitted) -> list[str]:
    found = _evaluations(data, engine.engine)
    if not found:
        return [f"Cost{engine.apart}: {numbers.NOT_MEASURED}."]
    measured = [(evaluation, output) for evaluation in found for output in evaluation.outputs]
    return [_cost(evaluation, output, engine.apart) for evaluation, output in measured] or [
        f"Cost{engine.apart}: {numbers.NOT_MEASURED} ({found[0].status})."
    ]


def _stood_in(data: ReportData, engine: Emitted) -> list[str]:
    """Return the expected cost of an engine that was not run: that of another one of its plan."""
    found = stand_in(data, engine)
    if found is None:
        return []
    other = data.engine(found.engine)
    how = "simulated" if other is not None and other.simulated else "measured"
    plan = f"plan {engine.plan}" if engine.apart else "this plan"
    return [
        told("Of {}, {} by {}: {}", plan, how, found.engine, _cost(found, output)) for output in found.outputs
    ]


def _cost(evaluation: Evaluation, output: OutputEvaluation, apart: str = "") -> str:
    rows = shown(numbers.count, evaluation, "rows")
    where = told("{}, {} {} rows", output.output, rows, evaluation.split)
    if output.difference is None:
        return told("Cost{} ({}): none, it is the reference.", apart, where)
    interval = percent_interval(output.difference.judged, output.budget)
    name = output.difference.judged_name
    return told("Cost{} ({}): {} {}, {}.", apart, where, name, interval, _standing(output))
