"""What differs between two runs, one kind of thing at a time; `pipeline.compare_runs` puts it together."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from loka_onnx.core.evaluation import Evaluation, InputPlace, Latency, OutputEvaluation, TargetChoice
from loka_onnx.core.intervals import Interval
from loka_onnx.core.plan import Decision, PrecisionPlan
from loka_onnx.core.run_comparison import (
    AccuracyChange,
    Change,
    EmittedEngine,
    GainChange,
    JudgedOutput,
    LatencyChange,
    MedianLatency,
    PlanChange,
    PlanSummary,
    RewriteChange,
    RewriteOutcome,
    SiteChange,
    SiteDecision,
    SitePresence,
    SplitChange,
    SplitRows,
    TargetDifference,
    ValueChange,
)
from loka_onnx.core.site import Site
from loka_onnx.report import ReportData

BASELINES = ("fp32", "bf16", "fp16")
"""Plans that a gain is told over."""


def targets(old: ReportData, new: ReportData) -> Iterator[TargetDifference]:
    """What is emitted, of every target of either."""
    for name in _target_names(old, new):
        before, after = _emitted(old, name), _emitted(new, name)
        yield TargetDifference(name, _change(_kind(before), _kind(after)), before, after)


def _kind(engine: EmittedEngine | None) -> tuple[str, ...] | None:
    return None if engine is None else (engine.backend, engine.architecture, engine.plan)


def _change(old: object, new: object) -> Change:
    if old is None:
        return Change.APPEARED
    if new is None:
        return Change.VANISHED
    return Change.SAME if old == new else Change.CHANGED


def _emitted(data: ReportData, target: str) -> EmittedEngine | None:
    choice, engine = _chosen(data, target), None
    if choice is not None:
        engine = data.engine(choice.engine)
    if choice is None or engine is None:
        return None
    plan = data.plan(choice.plan)
    return EmittedEngine(
        engine=engine.id,
        plan=choice.plan,
        backend=engine.backend,
        backend_version=engine.backend_version,
        architecture=engine.architecture,
        digest=engine.digest,
        bytes=engine.bytes,
        simulated=engine.simulated,
        fp8_sites=0 if plan is None else len(plan.fp8_sites),
        fp8_share=0.0 if plan is None else plan.fp8_share,
        routes=max(len(choice.routes), 1),
        reason=choice.reason,
        basis=choice.basis,
    )


def _chosen(data: ReportData, target: str) -> TargetChoice | None:
    return next((choice for choice in data.choice.targets if choice.target == target), None)


def _target_names(old: ReportData, new: ReportData) -> list[str]:
    return list(dict.fromkeys(choice.target for data in (old, new) for choice in data.choice.targets))


def accuracy(old: ReportData, new: ReportData) -> Iterator[AccuracyChange]:
    """What the emitted engines cost, by output and split."""
    rows_differ = {split.split for split in splits(old, new) if not split.is_same}
    for target in _target_names(old, new):
        before, after = _judged(old, target), _judged(new, target)
        for place in dict.fromkeys((*before, *after)):
            yield _accuracy(target, place, (before.get(place), after.get(place)), rows_differ)


_Place = tuple[str, str]
"""Output and split."""


def _judged(data: ReportData, target: str) -> dict[_Place, JudgedOutput]:
    choice = _chosen(data, target)
    return {
        (output.output, evaluation.split): _judged_output(evaluation, output)
        for evaluation in data.evaluations.evaluations
        if choice is not None and evaluation.engine == choice.engine
        for output in evaluation.outputs
    }


def _judged_output(evaluation: Evaluation, output: OutputEvaluation) -> JudgedOutput:
    difference = output.difference
    return JudgedOutput(
        engine=evaluation.engine,
        rows=evaluation.rows,
        name="reference" if difference is None else difference.judged_name,
        judged=None if difference is None else difference.judged,
        budget=output.budget,
        status=output.budget_status,
        normalized_entropy=output.metrics.normalized_entropy,
        auc=output.metrics.auc,
    )


def _accuracy(
    target: str,
    place: _Place,
    sides: tuple[JudgedOutput | None, JudgedOutput | None],
    rows_differ: set[str],
) -> AccuracyChange:
    (output, split), (old, new) = place, sides
    if old is None or new is None or old.judged is None or new.judged is None:
        side = "old" if old is None or old.judged is None else "new"
        remark = f"it was not measured in the {side} run"
        return AccuracyChange(target, output, split, old, new, None, None, remark)
    if old.name != new.name:
        remark = f"the old run judges {old.name}, the new one {new.name}"
        return AccuracyChange(target, output, split, old, new, None, None, remark)
    remark = "measured on different rows" if split in rows_differ else ""
    difference = new.judged.value - old.judged.value
    overlap = _overlap(old.judged, new.judged)
    return AccuracyChange(target, output, split, old, new, difference, overlap, remark)


def _overlap(old: Interval, new: Interval) -> bool:
    return old.lower <= new.upper and new.lower <= old.upper


def latency(old: ReportData, new: ReportData) -> Iterator[LatencyChange]:
    """Median latencies of the emitted engines, by batch size."""
    for target in _target_names(old, new):
        before, after = _timed(old, target), _timed(new, target)
        for batch, inputs in sorted({*before, *after}):
            sides = before.get((batch, inputs)), after.get((batch, inputs))
            remark = _why_no_ratio(*sides)
            ratio = None
            if not remark and sides[0] is not None and sides[1] is not None:
                ratio = sides[1].p50_us / sides[0].p50_us
            yield LatencyChange(target, batch, inputs, *sides, ratio, remark)


def _timed(data: ReportData, target: str) -> dict[tuple[int, InputPlace], MedianLatency]:
    """Of the engine that takes requests of each size; simulations, whose speed says nothing, are left out."""
    choice = _chosen(data, target)
    if choice is None:
        return {}
    found: dict[tuple[int, InputPlace], MedianLatency] = {}
    for evaluation in data.evaluations.evaluations:
        engine = data.engine(evaluation.engine)
        for item in evaluation.latencies:
            if choice.route(item.batch) == evaluation.engine and engine is not None and not engine.simulated:
                found.setdefault((item.batch, item.inputs), _median(evaluation.engine, item))
    return found


def _median(engine: str, item: Latency) -> MedianLatency:
    return MedianLatency(engine, item.device, item.p50_us, item.p99_us, item.repeats, item.counts_for_choice)


def _why_no_ratio(old: MedianLatency | None, new: MedianLatency | None) -> str:
    if old is None or new is None:
        return f"it was not measured in the {'old' if old is None else 'new'} run"
    if old.device != new.device:
        return f"not comparable: measured on '{old.device}' and on '{new.device}'"
    if not (old.counts_for_choice and new.counts_for_choice):
        return "not comparable: not measured on the target"
    return ""


def gains(old: ReportData, new: ReportData) -> Iterator[GainChange]:
    """How much faster each emitted engine is than the baselines of its own run."""
    for target in _target_names(old, new):
        for baseline in BASELINES:
            before, after = (_gain(data, target, baseline) for data in (old, new))
            if before is None and after is None:
                continue
            overlap = None if before is None or after is None else _overlap(before, after)
            yield GainChange(target, baseline, before, after, overlap)


def _gain(data: ReportData, target: str, baseline: str) -> Interval | None:
    choice = _chosen(data, target)
    losers = choice.losers if choice is not None else ()
    found = [
        loser.times
        for loser in losers
        if loser.times is not None
        and (engine := data.engine(loser.engine)) is not None
        and engine.plan == baseline
    ]
    return min(found, key=lambda times: times.value, default=None)


def sites(old: ReportData, new: ReportData) -> Iterator[SiteChange]:
    """Sites of both models that a plan treats differently: each plan that both have, and what is emitted."""
    common = {site.name for site in old.modified.sites} & {site.name for site in new.modified.sites}
    names = [site.name for site in new.modified.sites if site.name in common]
    for place, before, after in _compared_plans(old, new):
        for site in names:
            was, now = _decision(before, site), _decision(after, site)
            if was is not None and now is not None and _decided(was) != _decided(now):
                yield SiteChange(place, site, was, now)


def _compared_plans(old: ReportData, new: ReportData) -> Iterator[tuple[str, PrecisionPlan, PrecisionPlan]]:
    for plan in new.plans.plans:
        before = old.plan(plan.id)
        if before is not None and (plan.fp8_sites or before.fp8_sites):
            yield f"plan {plan.id}", before, plan
    for target in _target_names(old, new):
        was, now = _chosen(old, target), _chosen(new, target)
        if was is None or now is None or was.plan == now.plan:
            continue
        before, after = old.plan(was.plan), new.plan(now.plan)
        if before is not None and after is not None:
            yield f"emitted for {target}", before, after


def _decided(decision: SiteDecision) -> tuple[str, ...]:
    return decision.precision, decision.recipe, decision.verdict


def _decision(plan: PrecisionPlan, site: str) -> SiteDecision | None:
    found: Decision | None = next((d for d in plan.decisions if d.site == site), None)
    if found is None:
        return None
    recipe = "" if found.recipe is None else found.recipe.id
    return SiteDecision(plan.id, found.precision.value, recipe, found.verdict.value, found.reason)


def presence(old: ReportData, new: ReportData) -> Iterator[SitePresence]:
    """Sites that only one of both models has: those that vanished first."""
    before = {site.name: site for site in old.modified.sites}
    after = {site.name: site for site in new.modified.sites}
    yield from (_present(site, Change.VANISHED) for name, site in before.items() if name not in after)
    yield from (_present(site, Change.APPEARED) for name, site in after.items() if name not in before)


def _present(site: Site, change: Change) -> SitePresence:
    return SitePresence(site.name, change, site.kind.value, site.k, site.n, site.merged_from)


def plans(old: ReportData, new: ReportData) -> Iterator[PlanChange]:
    """Every plan of either run."""
    for name in dict.fromkeys(plan.id for data in (old, new) for plan in data.plans.plans):
        before, after = old.plan(name), new.plan(name)
        yield PlanChange(name, _summary(before), _summary(after), _moved(before, after))


def _summary(plan: PrecisionPlan | None) -> PlanSummary | None:
    return None if plan is None else PlanSummary(plan.base.value, len(plan.fp8_sites), plan.fp8_share)


def _moved(old: PrecisionPlan | None, new: PrecisionPlan | None) -> int:
    if old is None or new is None:
        return 0
    before = {decision.site: decision.precision for decision in old.decisions}
    return sum(before.get(d.site, d.precision) is not d.precision for d in new.decisions)


def rewrites(old: ReportData, new: ReportData) -> Iterator[RewriteChange]:
    """Places that a transform applied to in one run and declined, or did not look at, in the other."""
    before, after = _outcomes(old), _outcomes(new)
    for place in dict.fromkeys((*before, *after)):
        was, now = before.get(place), after.get(place)
        if (was and was.outcome) != (now and now.outcome):
            yield RewriteChange(*place, was, now)


def _outcomes(data: ReportData) -> dict[tuple[str, str, str], RewriteOutcome]:
    found: dict[tuple[str, str, str], RewriteOutcome] = {}
    for sequence, log in data.rewrites.items():
        for record in log.records:
            done = "rolled back" if record.rolled_back else "applied"
            for item in record.applied:
                found[sequence, record.transform, item.at] = RewriteOutcome(done, item.what)
            for left in record.declined:
                place = sequence, record.transform, left.at
                # A place may be rewritten in one round and left alone in the next: what was done counts.
                found.setdefault(place, RewriteOutcome("declined", left.reason))
    return found


def splits(old: ReportData, new: ReportData) -> Iterator[SplitChange]:
    """Every split of either, and whether both have the same rows."""
    before, after = _split_rows(old), _split_rows(new)
    for name in dict.fromkeys((*before, *after)):
        was, now = before.get(name), after.get(name)
        is_same = was is not None and now is not None and (was.digest, was.rule) == (now.digest, now.rule)
        yield SplitChange(name, was, now, is_same)


def _split_rows(data: ReportData) -> dict[str, SplitRows]:
    return {s.split: SplitRows(s.name, s.rows, s.digest, s.rule) for s in data.data.splits}


def values(old: Mapping[str, str], new: Mapping[str, str]) -> Iterator[ValueChange]:
    """Entries that differ, by name."""
    for name in sorted({*old, *new}):
        if old.get(name) != new.get(name):
            yield ValueChange(name, old.get(name), new.get(name))


def flat(config: Mapping[str, Any], leave_out: Iterable[str] = ()) -> dict[str, str]:
    """A configuration as JSON by the path of each setting: ``calibration.batch_size``."""
    found: dict[str, str] = {}
    for name, value in config.items():
        if name in leave_out:
            continue
        if isinstance(value, Mapping) and value:
            found |= {f"{name}.{inner}": text for inner, text in flat(value).items()}
        else:
            found[name] = json.dumps(value, sort_keys=True, ensure_ascii=False)
    return found
