"""The answer first: which engine each target gets, what it costs, and why."""

from __future__ import annotations

from loka_onnx.core.evaluation import KL_NAME, BudgetStatus, Evaluation, OutputEvaluation, TargetChoice
from loka_onnx.report import numbers
from loka_onnx.report.data import ReportData
from loka_onnx.report.document import Tone, Verdict
from loka_onnx.report.slice_tables import slices_sentence

SIMULATED_LATENCY = "simulated: speed never counts"
NO_LABELS = f"{KL_NAME}, no labels: the labelled first-order term is not seen"
"""What must be said of every verdict on an output that has no labels."""


def verdicts(data: ReportData) -> tuple[Verdict, ...]:
    """One verdict per target."""
    return tuple(_verdict(data, choice) for choice in data.choice.targets)


def budget_sentence(output: OutputEvaluation) -> str:
    """How an output stands to its budget, on what, and the rows that an undecided verdict lacks."""
    if output.difference is None:
        return f"the reference itself; budget {numbers.budget_percent(output.budget)}"
    said = _status_sentence(output)
    return f"{said} ({NO_LABELS})" if output.difference.delta_ne is None else said


def _status_sentence(output: OutputEvaluation) -> str:
    budget = numbers.budget_percent(output.budget)
    if output.budget_status == BudgetStatus.WITHIN:
        return f"within the budget of {budget}"
    if output.budget_status == BudgetStatus.BEYOND:
        return f"beyond the budget of {budget}"
    if output.rows_to_decide is None:
        return f"undecided against the budget of {budget}; no number of rows would decide it"
    return (
        f"undecided against the budget of {budget}; about {numbers.count(output.rows_to_decide)} rows "
        "would decide it"
    )


def _verdict(data: ReportData, choice: TargetChoice) -> Verdict:
    plan = data.plan(choice.plan)
    engine = data.engine(choice.engine)
    has_fp8 = plan is not None and bool(plan.fp8_sites)
    facts = [f"Why: {choice.reason}"]
    if not has_fp8:
        facts.insert(0, f"No FP8 engine is emitted for this target: it gets high precision ({choice.plan}).")
    if engine is not None and engine.simulated:
        facts.append("FP8 is simulated in this engine: its accuracy counts, its speed says nothing.")
    facts += _costs(data, choice.engine)
    facts += _slices(data, choice.engine)
    if choice.routes:
        served = "; ".join(f"to {numbers.count(r.batch)} rows {r.engine}" for r in choice.routes)
        facts.append(f"By batch size: {served}.")
    facts.append(f"Speed: {choice.basis}.")
    if engine is not None and engine.fallbacks:
        facts.append(f"Sites that do not run as planned: {len(engine.fallbacks)}; see Fallbacks.")
    headline = f"{choice.target}: emit {choice.engine} (plan {choice.plan})"
    is_good = has_fp8 and _is_within(data, choice.engine)
    return Verdict(choice.target, headline, tuple(facts), Tone.GOOD if is_good else Tone.WARN)


def _evaluations(data: ReportData, engine: str) -> list[Evaluation]:
    found = (data.evaluation(engine, split) for split in reversed(data.splits))
    return [e for e in found if e is not None]


def _is_within(data: ReportData, engine: str) -> bool:
    found = _evaluations(data, engine)
    return bool(found) and all(e.is_within_budget and not _beyond(e) for e in found)


def _beyond(evaluation: Evaluation) -> bool:
    return any(output.slices_of(BudgetStatus.BEYOND) for output in evaluation.outputs)


def _slices(data: ReportData, engine: str) -> list[str]:
    return [
        f"Slices ({output.output}, {evaluation.split}): {slices_sentence(output)}."
        for evaluation in _evaluations(data, engine)
        for output in evaluation.outputs
        if output.slices
    ]


def _costs(data: ReportData, engine: str) -> list[str]:
    found = _evaluations(data, engine)
    if not found:
        return [f"Cost: {numbers.NOT_MEASURED}."]
    return [_cost(evaluation, output) for evaluation in found for output in evaluation.outputs] or [
        f"Cost: {numbers.NOT_MEASURED} ({found[0].status})."
    ]


def _cost(evaluation: Evaluation, output: OutputEvaluation) -> str:
    where = f"{output.output}, {numbers.count(evaluation.rows)} {evaluation.split} rows"
    if output.difference is None:
        return f"Cost ({where}): none, it is the reference."
    interval = numbers.percent_interval(output.difference.judged, output.budget)
    return f"Cost ({where}): {output.difference.judged_name} {interval}, {budget_sentence(output)}."
