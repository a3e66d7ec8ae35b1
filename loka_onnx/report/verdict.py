"""The verdict first: each target's engine, its cost, the reason, and the few deciding numbers."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from loka_onnx.core.evaluation import (
    KL_NAME,
    Because,
    BudgetStatus,
    Evaluation,
    Guard,
    Latency,
    OutputEvaluation,
    Rejection,
    TargetChoice,
    Why,
)
from loka_onnx.core.intervals import Interval
from loka_onnx.core.plan import PrecisionPlan
from loka_onnx.report import numbers
from loka_onnx.report.data import BASELINES, ReportData
from loka_onnx.report.document import BUDGET_TONES, BudgetBar, Cell, Stat, TargetVerdict, Tone, can_be_drawn
from loka_onnx.report.figures import (
    Place,
    Told,
    counted,
    derive,
    ends,
    formed,
    joined,
    metric_interval,
    percent_interval,
    plus_minus,
    shown,
    told,
)
from loka_onnx.report.slice_tables import slices_sentence

SIMULATED_LATENCY = "simulated: speed never counts"
NO_LABELS = f"{KL_NAME}, no labels: the labelled first-order term is not seen"
"""Caution on every verdict on an output without labels."""
BUSY = 1.5
"""Load average over cores from which on a host is busy; measuring alone makes up to 1."""
_NOT_MEASURED = Cell(numbers.NOT_MEASURED, Tone.MUTED)
_SIMULATED = (Cell("simulated", Tone.MUTED), "its speed says nothing")


@dataclass(frozen=True)
class _Emitted:
    """A selected engine; `apart` is ``of`` and its id where a target has several, else empty."""

    engine: str
    plan: str
    apart: str = ""


def verdicts(data: ReportData) -> tuple[TargetVerdict, ...]:
    """One verdict per target."""
    return tuple(_verdict(data, choice) for choice in data.choice.targets)


def sentence(data: ReportData, choice: TargetChoice) -> Told:
    """Return the result on a target in one line: the plan, its gain over what there was, and its cost."""
    return told("{}: {}, {}, {}", choice.target, " and ".join(choice.plans), *parts(data, choice))


def parts(data: ReportData, choice: TargetChoice) -> tuple[Told, Told]:
    """Return speed and cost of what was selected on a target, as in its `sentence`."""
    return _speed_part(data, choice), _cost_part(data, choice)


def baseline(data: ReportData, choice: TargetChoice) -> Rejection | None:
    """Return the fastest baseline that the selected engine was timed with; None where that is FP32 itself."""
    if choice.plan == BASELINES[0] or data.is_simulated(choice.engine):
        return None
    rivals = data.losers(choice, {*BASELINES} - {choice.plan})
    return next((loser for loser in rivals if loser.times), None)


def _speed_part(data: ReportData, choice: TargetChoice) -> Told:
    largest, before = _largest(data, choice), baseline(data, choice)
    if largest is None or data.is_simulated(choice.engine) or not largest.counts_for_choice:
        return Told("not timed")
    now, batch = shown(numbers.latency, largest, "p50_us"), shown(numbers.count, largest, "batch")
    if before is None or before.times is None:
        return told("{} at {}", now, batch)
    every = [x for e in data.evaluations_of(before.engine) for x in e.latencies]
    timed, sizes = (x for x in every if x.batch == largest.batch), {x.batch for x in every}
    then = next((told("{} → ", shown(numbers.latency, x, "p50_us")) for x in timed), Told(""))
    built = data.engine(before.engine)
    is_tie = before.times.lower <= 1.0 <= before.times.upper
    return told(
        "{}{}× over {} ({}{}{} at {})",
        "a tie, " if is_tie else "",
        formed("{:.2f}".format, Place(before.times, "value")),
        built.plan.upper() if built else before.engine,
        told("mean of {} sizes; ", len(sizes)) if len(sizes) > 1 else Told(""),
        then,
        now,
        batch,
    )


def _cost_part(data: ReportData, choice: TargetChoice) -> Told:
    judged = _judged(data, choice)
    if not judged:
        return Told("accuracy not measured")
    engine, evaluation, worst = max(judged, key=lambda row: _over_budget(row[2]))
    if worst.difference is None:
        return Told("the reference itself")
    is_simulated = data.is_simulated(evaluation.engine)
    how = (
        ", simulated" if is_simulated else "" if evaluation.engine == engine.engine else ", by another engine"
    )
    is_within = worst.budget_status == BudgetStatus.WITHIN
    return told(
        "{} {} of {}{}{}",
        "KL" if worst.difference.delta_ne is None else worst.difference.judged_name,
        plus_minus(worst.difference.judged, worst.budget),
        shown(numbers.budget_percent, worst, "budget"),
        "" if is_within else f", {worst.verdict}",
        how,
    )


def budget_sentence(output: OutputEvaluation) -> Told:
    """Return the budget status of an output, with cautions on its intervals."""
    return joined("; ", [_standing(output), *output.remarks])


def _standing(output: OutputEvaluation) -> Told:
    """Return the status alone, whose numbers all have a source in the report."""
    budget, because = shown(numbers.budget_percent, output, "budget"), ", ".join(output.because)
    if output.difference is None:
        return told("the reference itself; budget {}", budget)
    judged = output.difference.judged
    if output.budget_status == BudgetStatus.WITHIN:
        status = told("within the budget of {}", budget)
    elif output.budget_status == BudgetStatus.BEYOND and because:
        status = told("beyond what is accepted beside the budget of {}: {}", budget, because)
    elif output.budget_status == BudgetStatus.BEYOND:
        status = told("beyond the budget of {}", budget)
    elif output.rows_to_decide is not None:
        rows = shown(numbers.count, output, "rows_to_decide")
        status = told("undecided against the budget of {}; about {} rows would decide it", budget, rows)
    elif because:
        status = told("undecided against the budget of {} and what is accepted beside it", budget)
    else:
        why = "the estimate lies on it, and a hundred times as many rows would not tell on which side"
        if not math.isfinite(judged.upper - judged.lower):
            why = "how many rows would decide it is not known: these are too few for an interval"
        status = told("undecided against the budget of {}; {}", budget, why)
    return told("{} ({})", status, NO_LABELS) if output.difference.delta_ne is None else status


def _verdict(data: ReportData, choice: TargetChoice) -> TargetVerdict:
    engines = _emitted(choice)
    is_quantized = any(plan.quantized_sites for name in choice.plans if (plan := data.plan(name)) is not None)
    tone = Tone.GOOD if is_quantized and all(_is_within(data, e.engine) for e in engines) else Tone.WARN
    facts, speeds = tuple(_facts(data, choice, engines, is_quantized)), _speed_stats(data, choice)
    stats = (_plan_stat(data, choice), *speeds, *_cost_stats(data, choice), _latency_stat(data, choice))
    return TargetVerdict(choice.target, sentence(data, choice), facts, tone, stats, _bars(data, choice))


def _facts(
    data: ReportData, choice: TargetChoice, engines: tuple[_Emitted, ...], is_quantized: bool
) -> Iterator[str]:
    if not is_quantized:
        plans = ", ".join(choice.plans)
        low = data.plans.quantized
        yield f"No {low} engine is emitted for this target: it gets high precision ({plans})."
    yield f"Why: {choice.reason}"
    for engine in engines:
        if data.is_simulated(engine.engine):
            which = engine.engine if engine.apart else "this engine"
            yield f"FP8 is simulated in {which}: its accuracy counts, its speed says nothing."
        yield from _costs(data, engine)
    for stat in _speed_stats(data, choice):
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


def _costs(data: ReportData, engine: _Emitted) -> Iterator[str]:
    """Yield the cost on each split; of an engine that was not run also that of another one of its plan."""
    evaluations = data.evaluations_of(engine.engine)
    if not any(e.outputs for e in evaluations):
        why = f" ({evaluations[0].status})" if evaluations else ""
        yield f"Cost{engine.apart}: {numbers.NOT_MEASURED}{why}."
    for evaluation in evaluations:
        for output in evaluation.outputs:
            yield _cost(evaluation, output, engine.apart)
    other = _stand_in(data, engine)
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


def _emitted(choice: TargetChoice) -> tuple[_Emitted, ...]:
    """Return all engines of a target, the main one first."""
    plans = {choice.engine: choice.plan} | {route.engine: route.plan for route in choice.routes}
    several = len(plans) > 1
    return tuple(_Emitted(name, plan, f" of {name}" if several else "") for name, plan in plans.items())


def _bars(data: ReportData, choice: TargetChoice) -> tuple[BudgetBar, ...]:
    """Return judged quantities on the deciding split, by engine and output."""
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
        if (change := output.difference) and can_be_drawn(change.judged) and math.isfinite(output.budget)
    )


def _speed_stats(data: ReportData, choice: TargetChoice) -> Iterator[Stat]:
    """Yield the gain of the main engine over the best one of each baseline, measured in turns."""
    main = _emitted(choice)[0]
    for plan in BASELINES:
        label, losers = f"Speed over {plan.upper()}", data.losers(choice, {plan} - {choice.plan})
        if losers and data.is_simulated(choice.engine):
            yield Stat(label, *_SIMULATED)
        elif losers and losers[0].times is not None:
            yield _gain(label, losers[0].engine, losers[0].times, main)
        elif losers:
            why = "" if losers[0].why is Why.NOT_MEASURED else f": {losers[0].why}"
            yield Stat(label, _NOT_MEASURED, f"{losers[0].engine}{why}")


def _gain(label: str, baseline: str, times: Interval, main: _Emitted) -> Stat:
    is_known = times.lower < times.upper
    value, lower, upper = (formed("{:.3f}".format, end) for end in ends(times))
    note = told(
        "{}{}measured{}, over {}",
        "a tie: " if is_known and times.lower <= 1.0 <= times.upper else "",
        told("[{}, {}], ", lower, upper) if is_known else "",
        main.apart and f",{main.apart}",
        baseline,
    )
    return Stat(label, Cell(told("{}×", value), Tone.GOOD if times.lower > 1 else Tone.WARN), note)


def _plan_stat(data: ReportData, choice: TargetChoice) -> Stat:
    notes = [(name, _fp8_of(data, plan)) for name in choice.plans if (plan := data.plan(name)) is not None]
    if len(choice.plans) == 1:
        return Stat("Plan", Cell(choice.plan), notes[0][1] if notes else "")
    note = joined("; ", [told("{}: {}", name, fp8) for name, fp8 in notes])
    return Stat("Plans", Cell(", ".join(choice.plans)), note)


def _fp8_of(data: ReportData, plan: PrecisionPlan) -> str:
    if not plan.quantized_sites:
        return f"no {data.plans.quantized}"
    counts = [
        told("sites in {}: {}", precision.upper(), counted(plan, "decisions", precision=precision.value))
        for precision in plan.precisions
    ]
    return told("{}, {} of the FLOPs", joined(", ", counts), shown(numbers.share, plan, "fp8_share"))


def _latency_stat(data: ReportData, choice: TargetChoice) -> Stat:
    label = "Latency p50"
    if data.is_simulated(choice.engine):
        return Stat(label, *_SIMULATED)
    largest = _largest(data, choice)
    if largest is None:
        return Stat(label, _NOT_MEASURED, choice.basis)
    elsewhere = "" if largest.counts_for_choice else ", which is not the target"
    by = f", by {choice.route(largest.batch)}" if choice.routes else ""
    batch = shown(numbers.count, largest, "batch")
    note = told("batch {}, on {}{}{}{}", batch, largest.device, elsewhere, by, busy(largest))
    return Stat(label, Cell(shown(numbers.latency, largest, "p50_us")), note)


def busy(latency: Latency) -> Told:
    """Return the load of the host that timed a latency, for the end of a sentence, if it was busy."""
    if latency.host_load is None or latency.host_load < BUSY:
        return Told("")
    return told("; busy host: load {} a core", shown("{:.1f}".format, latency, "host_load"))


def _largest(data: ReportData, choice: TargetChoice) -> Latency | None:
    """Return the latency of the largest batch size that was timed, by the engine that serves it."""
    timed = ((e.engine, latency) for e in data.evaluations.evaluations for latency in e.latencies)
    latencies = (latency for engine, latency in timed if engine == choice.route(latency.batch))
    return max(latencies, key=lambda latency: latency.batch, default=None)


_Judged = tuple[_Emitted, Evaluation, OutputEvaluation]


def _judged(data: ReportData, choice: TargetChoice) -> list[_Judged]:
    """Return the outputs of all selected engines on the deciding split."""
    return [
        (engine, evaluation, output)
        for engine in _emitted(choice)
        if (evaluation := _own(data, engine) or _stand_in(data, engine)) is not None
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
        yield Stat("Accuracy", Cell("reference", Tone.MUTED), "every engine is compared with it")
        return
    form = partial(numbers.signed_percent, decimals=numbers.interval_decimals(change.judged, worst.budget))
    value, lower, upper = (formed(form, end) for end in ends(change.judged))
    note = told(
        "[{}, {}], {}{} {} rows{}",
        lower,
        upper,
        f"{worst.output}, " if len(evaluation.outputs) > 1 else "",
        shown(numbers.count, evaluation, "rows"),
        evaluation.split,
        _whose(data, engine, evaluation),
    )
    yield Stat(change.judged_name, Cell(value, BUDGET_TONES.get(worst.budget_status, Tone.PLAIN)), note)
    verdict: str = worst.verdict
    if worst.budget > 0:
        part = derive("ratio", Place(change.judged, "upper"), Place(worst, "budget"))
        verdict = told("{}; the upper end is at {} of it", verdict, formed(numbers.error_percent, part))
    yield Stat("Budget", Cell(shown(numbers.budget_percent, worst, "budget")), verdict)
    guards = {guard.name: guard for guard in worst.guards}
    if change.delta_ne is not None:
        guard = guards.get(Because.MAX_KL)
        limit: str = told("accepted: {}", shown(numbers.budget_percent, guard, "limit")) if guard else ""
        yield Stat("KL", Cell(percent_interval(change.kl), _tone(guard)), limit)
    if change.delta_auc is not None:
        guard = guards.get(Because.MAX_AUC_DROP)
        limit = told("accepted drop: {}", shown(numbers.scientific, guard, "limit")) if guard else ""
        yield Stat("ΔAUC", Cell(metric_interval(change.delta_auc), _tone(guard)), limit)


def _tone(guard: Guard | None) -> Tone:
    return Tone.PLAIN if guard is None else BUDGET_TONES.get(guard.status, Tone.PLAIN)


def _whose(data: ReportData, engine: _Emitted, evaluation: Evaluation) -> str:
    """Return whose accuracy it is, where there are several engines or the selected one was not run."""
    whose = engine.apart and f",{engine.apart}"
    if evaluation.engine == engine.engine:
        return f"{whose}, simulated FP8" if data.is_simulated(engine.engine) else whose
    how = "simulated" if data.is_simulated(evaluation.engine) else "measured"
    return f"{whose}; {how} by {evaluation.engine}, this engine was not run"


def _stand_in(data: ReportData, engine: _Emitted) -> Evaluation | None:
    """Return the worst evaluation of another engine of the same plan; None where the engine has its own."""
    if _own(data, engine) is not None:
        return None
    for split in reversed(data.splits):
        of_plan = [e for e in data.evaluations.evaluations if (e.split, e.plan) == (split, engine.plan)]
        same = [e for e in of_plan if e.outputs and data.engine(e.engine) is not None]
        if same:
            return max(same, key=lambda evaluation: max(map(_over_budget, evaluation.outputs)))
    return None


def _own(data: ReportData, engine: _Emitted) -> Evaluation | None:
    """Return the evaluation of the last split that the engine was run on: certification, if any."""
    return next((e for e in data.evaluations_of(engine.engine) if e.outputs), None)


def _over_budget(output: OutputEvaluation) -> float:
    if output.difference is None:
        return float("-inf")
    return output.difference.judged.upper - output.budget
