"""Differences of two reports, one kind of thing at a time; `runs` puts them together."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import isclose
from typing import Any

from loka_onnx.core.evaluation import Evaluation, InputPlace, Latency, OutputEvaluation, TargetChoice
from loka_onnx.core.intervals import Interval
from loka_onnx.core.plan import Decision, PrecisionPlan
from loka_onnx.core.site import Site
from loka_onnx.numerics.medians import median_interval
from loka_onnx.operations.compare.run_document import (
    AccuracyChange,
    Change,
    EmittedEngine,
    EmittedRoute,
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
    SiteReshape,
    SiteShape,
    SplitChange,
    SplitRows,
    TargetDifference,
    ValueChange,
    named,
)
from loka_onnx.planning.choice import NOISE
from loka_onnx.report import ReportData

BASELINES = ("fp32", "bf16", "fp16")
"""Plans that a gain is told over."""


def targets(old: ReportData, new: ReportData) -> Iterator[TargetDifference]:
    """Emitted engines of every target of either."""
    for pair in hardware_pairs(old, new):
        before, after = _emitted(old, pair.old), _emitted(new, pair.new)
        change = _change(_kind(before), _kind(after))
        yield TargetDifference(pair.target, pair.architecture, change, before, after)


def _kind(engine: EmittedEngine | None) -> tuple[object, ...] | None:
    """Identity of an emitted engine, its digest apart, and the routing of requests."""
    return None if engine is None else (engine.backend, engine.architecture, engine.plan, engine.routing)


def _change(old: object, new: object) -> Change:
    if old is None or new is None:
        return Change.APPEARED if old is None else Change.VANISHED
    return Change.SAME if old == new else Change.CHANGED


def _emitted(data: ReportData, choice: TargetChoice | None) -> EmittedEngine | None:
    engine = None if choice is None else data.engine(choice.engine)
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
        routes=tuple(EmittedRoute(route.batch, route.engine, route.plan) for route in choice.routes),
        reason=choice.reason,
        basis=choice.basis,
    )


@dataclass(frozen=True)
class _Basis:
    """Splits that are not the same for certain, and whether the exported models differ."""

    other_splits: frozenset[str]
    other_model: bool

    def remarks(self, split: str) -> Iterator[str]:
        """Differences of what costs on a split rest on."""
        if split in self.other_splits:
            yield "measured on another file, another selection of rows or other columns of them"
        if self.other_model:
            yield "relative to another FP32 model"


def accuracy(old: ReportData, new: ReportData) -> Iterator[AccuracyChange]:
    """Return the cost of the emitted engines, by output and split."""
    basis = _Basis(
        frozenset(split.split for split in splits(old, new) if not split.is_same),
        old.exported.digest != new.exported.digest,
    )
    for pair in hardware_pairs(old, new):
        for first, second in pair.engines:
            before, after = _judged(old, first), _judged(new, second)
            for place in dict.fromkeys((*before, *after)):
                yield _accuracy(pair, place, (before.get(place), after.get(place)), basis)


_Place = tuple[str, str]
"""Output and split."""


def _judged(data: ReportData, engine: str | None) -> dict[_Place, JudgedOutput]:
    return {
        (output.output, evaluation.split): _judged_output(evaluation, output)
        for evaluation in data.evaluations.evaluations
        if evaluation.engine == engine
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
    pair: HardwarePair,
    place: _Place,
    sides: tuple[JudgedOutput | None, JudgedOutput | None],
    basis: _Basis,
) -> AccuracyChange:
    (output, split), (old, new) = place, sides
    remarks, difference, overlap = list(basis.remarks(split)), None, None
    is_same_basis = not remarks
    if old is None or new is None or old.judged is None or new.judged is None:
        side = "old" if old is None or old.judged is None else "new"
        remarks = [f"it was not measured in the {side} run"]
    elif old.name != new.name:
        remarks = [f"the old run judges {old.name}, the new one {new.name}"]
    else:
        difference = new.judged.value - old.judged.value
        overlap = _overlap(old.judged, new.judged)
        remarks += _other_confidence(old.judged, new.judged)
    place_of = (pair.target, pair.architecture, output, split)
    return AccuracyChange(*place_of, old, new, difference, overlap, is_same_basis, "; ".join(remarks))


def _overlap(old: Interval, new: Interval) -> bool:
    return old.lower <= new.upper and new.lower <= old.upper


def _other_confidence(old: Interval, new: Interval) -> list[str]:
    """That two intervals are not as wide for the same reason, where they are not."""
    if isclose(old.confidence, new.confidence):
        return []
    return ["the intervals are of different confidence"]


def latency(old: ReportData, new: ReportData) -> Iterator[LatencyChange]:
    """Median latencies of the emitted engines, by batch size."""
    for pair in hardware_pairs(old, new):
        before, after = _timed(old, pair.old), _timed(new, pair.new)
        for batch, inputs in sorted({*before, *after}):
            was, now = before.get((batch, inputs)), after.get((batch, inputs))
            remark, ratio, is_slower = _why_no_ratio(was, now), None, None
            if not remark and was is not None and now is not None:
                ratio, is_slower = now.p50_us / was.p50_us, _is_slower(was, now)
            place = (pair.target, pair.architecture, batch, inputs)
            yield LatencyChange(*place, was, now, ratio, is_slower, remark)


def _timed(data: ReportData, choice: TargetChoice | None) -> dict[tuple[int, InputPlace], MedianLatency]:
    """Of the engine that takes requests of each size; simulations, whose speed says nothing, are left out."""
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
    return MedianLatency(
        engine=engine,
        device=item.device,
        p50_us=item.p50_us,
        p99_us=item.p99_us,
        repeats=item.repeats,
        counts_for_choice=item.counts_for_choice,
        spread=median_interval(item.loads_us) if item.loads_us else None,
    )


def _why_no_ratio(old: MedianLatency | None, new: MedianLatency | None) -> str:
    if old is None or new is None:
        return f"it was not measured in the {'old' if old is None else 'new'} run"
    if old.device != new.device:
        return f"not comparable: measured on '{old.device}' and on '{new.device}'"
    if not (old.counts_for_choice and new.counts_for_choice):
        return "not comparable: not measured on the target"
    return ""


def _is_slower(old: MedianLatency, new: MedianLatency) -> bool:
    """True if even the least of the new medians is above the largest of the old ones, and by more than noise.

    Of a measurement whose parts were not kept, its median stands for all of them.
    """
    largest = old.p50_us if old.spread is None else max(old.p50_us, old.spread.upper)
    least = new.p50_us if new.spread is None else min(new.p50_us, new.spread.lower)
    return least > largest * (1.0 + NOISE)


def gains(old: ReportData, new: ReportData) -> Iterator[GainChange]:
    """Return how much faster each emitted engine is than the baselines of its own run."""
    for pair in hardware_pairs(old, new):
        for baseline in BASELINES:
            before, after = _gain(old, pair.old, baseline), _gain(new, pair.new, baseline)
            if before is None and after is None:
                continue
            overlap, remarks = None, list[str]()
            if before is not None and after is not None:
                overlap, remarks = _overlap(before, after), _other_confidence(before, after)
            place = (pair.target, pair.architecture, baseline)
            yield GainChange(*place, before, after, overlap, "; ".join(remarks))


def _gain(data: ReportData, choice: TargetChoice | None, baseline: str) -> Interval | None:
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
            if _decided(was) != _decided(now):
                yield SiteChange(place, site, was, now)


def _compared_plans(old: ReportData, new: ReportData) -> Iterator[tuple[str, PrecisionPlan, PrecisionPlan]]:
    for plan in new.plans.plans:
        before = old.plan(plan.id)
        if before is not None:
            yield f"plan {plan.id}", before, plan
    for pair in hardware_pairs(old, new):
        emitted = {
            (before.id, after.id): (before, after)
            for first, second in pair.engines
            if (before := _plan_of(old, first)) is not None and (after := _plan_of(new, second)) is not None
        }
        place = f"emitted for {named(pair.target, pair.architecture)}"
        for before, after in emitted.values():
            if before.id != after.id:
                both = f", {before.id} → {after.id}" if len(emitted) > 1 else ""
                yield f"{place}{both}", before, after


def _plan_of(data: ReportData, engine: str | None) -> PrecisionPlan | None:
    found = None if engine is None else data.engine(engine)
    return None if found is None else data.plan(found.plan)


def _decided(decision: SiteDecision | None) -> tuple[str, ...]:
    return () if decision is None else (decision.precision, decision.recipe, decision.verdict)


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


def reshaped(old: ReportData, new: ReportData) -> Iterator[SiteReshape]:
    """Sites of both models by their names that are not of one kind and size in both."""
    before = {site.name: _shape(site) for site in old.modified.sites}
    for site in new.modified.sites:
        was, now = before.get(site.name), _shape(site)
        if was is not None and was != now:
            yield SiteReshape(site.name, was, now)


def _shape(site: Site) -> SiteShape:
    return SiteShape(site.kind.value, site.k, site.n)


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
    """Every split of either, and whether both have the same rows for certain."""
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


# Choices and engines that are compared with one another ------------------------------------------


@dataclass(frozen=True)
class HardwarePair:
    """Choices of both runs for one target, and architecture where a run has engines for several."""

    target: str
    architecture: str
    old: TargetChoice | None
    new: TargetChoice | None

    @property
    def engines(self) -> tuple[tuple[str | None, str | None], ...]:
        """Ids of the two engines that answer requests of one size, by ascending size; each two once.

        A main engine that no size is routed to is emitted all the same: it comes last.
        """
        sides = self.old, self.new
        sizes = sorted({route.batch for side in sides if side is not None for route in side.routes}) or [1]
        pairs = [(_at(self.old, size), _at(self.new, size)) for size in sizes]
        mains = _main(self.old), _main(self.new)
        is_routed = all(
            main in {pair[side] for pair in pairs} for side, main in enumerate(mains) if main is not None
        )
        return tuple(dict.fromkeys(pairs if is_routed else [*pairs, mains]))


def _at(choice: TargetChoice | None, size: int) -> str | None:
    return None if choice is None else choice.route(size)


def _main(choice: TargetChoice | None) -> str | None:
    return None if choice is None else choice.engine


def hardware_pairs(old: ReportData, new: ReportData) -> Iterator[HardwarePair]:
    """The choices of both runs by target and, where one has several for a target, by architecture."""
    for target in dict.fromkeys(choice.target for data in (old, new) for choice in data.choice.targets):
        before, after = _choices(old, target), _choices(new, target)
        if len(before) <= 1 and len(after) <= 1:
            yield HardwarePair(target, "", next(iter(before), None), next(iter(after), None))
            continue
        was = _named(old, before, _names(new, after))
        now = _named(new, after, was)
        for architecture in dict.fromkeys((*was, *now)):
            yield HardwarePair(target, architecture, was.get(architecture), now.get(architecture))


def _choices(data: ReportData, target: str) -> list[TargetChoice]:
    return [choice for choice in data.choice.targets if choice.target == target]


def _named(
    data: ReportData, choices: Sequence[TargetChoice], others: Iterable[str]
) -> dict[str, TargetChoice]:
    """Choices of one target by their architecture.

    `others` are names that the other run has: one piece of hardware here may be one of several there.
    """
    if len(choices) != 1:
        return dict(zip(_names(data, choices), choices, strict=True))
    (choice,) = choices
    rivals = _architectures(data, choice)
    own = _names(data, choices)[0]
    return {next((name for name in (own, *others) if name in rivals and name in others), own): choice}


def _names(data: ReportData, choices: Sequence[TargetChoice]) -> list[str]:
    """The architecture of each choice of one target: the one that its rivals have and no other choice's.

    An engine that is for no architecture in particular competes for each of them, and may be what is emitted.
    """
    rivals = [_architectures(data, choice) for choice in choices]
    names: list[str] = []
    for place, choice in enumerate(choices):
        elsewhere = {name for other, found in enumerate(rivals) if other != place for name in found}
        emitted = data.engine(choice.engine)
        known = "" if emitted is None else emitted.architecture
        own = [name for name in rivals[place] if name not in elsewhere]
        name = known if known in own or not own else own[0]
        names.append(name if name not in names else f"{name} #{place + 1}")
    return names


def _architectures(data: ReportData, choice: TargetChoice) -> tuple[str, ...]:
    ids = (*choice.engines, *(loser.engine for loser in choice.losers))
    found = (data.engine(name) for name in ids)
    return tuple(dict.fromkeys(engine.architecture for engine in found if engine is not None))
