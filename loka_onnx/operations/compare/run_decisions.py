"""Sites, plans and rewrites of two runs: what was decided differently, and why."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from loka_onnx.core.evaluation import TargetChoice
from loka_onnx.core.formats import Precision
from loka_onnx.core.plan import Decision, PrecisionPlan
from loka_onnx.core.site import Site
from loka_onnx.operations.compare.difference import Row, Section, number, row
from loka_onnx.report import ReportData, numbers
from loka_onnx.report.figures import Told, told


@dataclass(frozen=True)
class HardwarePair:
    """Choices of both runs for one target, and architecture where a run has engines for several."""

    target: str
    architecture: str
    old: TargetChoice | None
    new: TargetChoice | None

    @property
    def name(self) -> str:
        """Target, and architecture where there are several: ``rtx (sm120)``."""
        return f"{self.target} ({self.architecture})" if self.architecture else self.target

    @property
    def engines(self) -> tuple[tuple[str | None, str | None], ...]:
        """Ids of the two engines that answer requests of one size, by ascending size; each two once.

        A main engine to which no size is routed is emitted too, and comes last.
        """
        old, new = self.old, self.new
        sizes = sorted({route.batch for side in (old, new) if side for route in side.routes}) or [1]
        pairs = [(old.route(size) if old else None, new.route(size) if new else None) for size in sizes]
        mains = (old.engine if old else None, new.engine if new else None)
        routed = ({pair[side] for pair in pairs} for side in (0, 1))
        is_routed = all(main is None or main in some for main, some in zip(mains, routed, strict=True))
        return tuple(dict.fromkeys(pairs if is_routed else [*pairs, mains]))


def hardware_pairs(old: ReportData, new: ReportData) -> Iterator[HardwarePair]:
    """The choices of both runs by target and, where one has several for a target, by architecture."""
    for target in dict.fromkeys(choice.target for data in (old, new) for choice in data.choice.targets):
        was, now = (_by_architecture(data, target) for data in (old, new))
        if len(was) <= 1 and len(now) <= 1:
            yield HardwarePair(target, "", next(iter(was.values()), None), next(iter(now.values()), None))
            continue
        for architecture in dict.fromkeys((*was, *now)):
            yield HardwarePair(target, architecture, was.get(architecture), now.get(architecture))


def _by_architecture(data: ReportData, target: str) -> dict[str, TargetChoice]:
    """Choices of one target by the architecture of the emitted engine, numbered where several have one."""
    choices = dict[str, TargetChoice]()
    for choice in data.choice.targets:
        if choice.target == target:
            engine = data.engine(choice.engine)
            name = "" if engine is None else engine.architecture
            choices[name if name not in choices else f"{name} #{len(choices) + 1}"] = choice
    return choices


def reasons_of(old: str | None, new: str | None) -> str:
    """Reasons of both sides in one sentence."""
    sides = (("then", old), ("now", new))
    return "; ".join(f"{when}: {reason.rstrip('.')}" for when, reason in sides if reason is not None)


def sites(old: ReportData, new: ReportData) -> Iterator[Section]:
    """Sites that a plan treats differently, that one model lacks, and that have another shape."""
    before, after = ({site.name: site for site in data.modified.sites} for data in (old, new))
    common = [name for name in after if name in before]
    decisions = list[Row]()
    for place, *both in _compared_plans(old, new):
        was, now = ({decision.site: decision for decision in plan.decisions} for plan in both)
        for name in common:
            decisions += _decided(f"{place} · {name}", was.get(name), now.get(name))
    yield Section("sites", "Sites with another precision or verdict", tuple(decisions))
    gone, came = (
        [s for s in ours.values() if s.name not in theirs]
        for ours, theirs in ((before, after), (after, before))
    )
    apart = [row(site.name, _shape(site), note=_merged(site)) for site in gone]
    apart += [row(site.name, None, _shape(site), note=_merged(site)) for site in came]
    yield Section("sites", "Sites of one model only", tuple(apart))
    shapes = [(name, _shape(before[name]), _shape(after[name])) for name in common]
    reshaped = tuple(row(*shape) for shape in shapes if shape[1] != shape[2])
    yield Section("sites", "Sites of another kind or size", reshaped)


def _compared_plans(old: ReportData, new: ReportData) -> Iterator[tuple[str, PrecisionPlan, PrecisionPlan]]:
    """Each plan that both runs have, and the plans of emitted engines where they differ."""
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
        for before, after in emitted.values():
            if before.id != after.id:
                both = f", {before.id} → {after.id}" if len(emitted) > 1 else ""
                yield f"emitted for {pair.name}{both}", before, after


def _plan_of(data: ReportData, engine: str | None) -> PrecisionPlan | None:
    artifact = None if engine is None else data.engine(engine)
    return None if artifact is None else data.plan(artifact.plan)


def _decided(what: str, *sides: Decision | None) -> Iterator[Row]:
    """A row of a site whose precision, recipe or verdict differs, with both reasons."""
    texts = []
    for side in sides:
        recipe = f" ({side.recipe.id})" if side and side.recipe else ""
        texts.append(f"{side.precision}{recipe}, {side.verdict}" if side else "not decided")
    if texts[0] != texts[1]:
        yield row(what, *texts, note=reasons_of(*(side.reason if side else None for side in sides)))


def _shape(site: Site) -> Told:
    sizes = (number(numbers.count, size) if size else numbers.NONE for size in (site.k, site.n))
    return told("{}, K {}, N {}", site.kind.value, *sizes)


def _merged(site: Site) -> str:
    return f"merged from {', '.join(site.merged_from)}" if site.merged_from else ""


def plans(old: ReportData, new: ReportData) -> Iterator[Row]:
    """Yield a row for each plan that differs or that only one run has."""
    for name in dict.fromkeys(plan.id for data in (old, new) for plan in data.plans.plans):
        before, after = old.plan(name), new.plan(name)
        texts = [None if side is None else _summary(side) for side in (before, after)]
        moved, verdict = 0, ""
        if before is not None and after is not None:
            known = {decision.site: decision.precision for decision in before.decisions}
            moved = sum(known.get(d.site, d.precision) is not d.precision for d in after.decisions)
            verdict = told("sites in another precision: {}", number(numbers.count, moved))
        if moved or texts[0] != texts[1]:
            yield row(name, *texts, verdict=verdict)


def _summary(plan: PrecisionPlan) -> Told:
    sites, share = number(numbers.count, len(plan.quantized_sites)), number(numbers.share, plan.fp8_share)
    names = plan.base.value, " and ".join(p.upper() for p in plan.precisions or (Precision.FP8,))
    return told("{}, sites in {}: {}, of the FLOPs {}", *names, sites, share)


def rewrites(old: ReportData, new: ReportData) -> Iterator[Row]:
    """Places that a transform applied to in one run and declined, or did not look at, in the other."""
    before, after = _outcomes(old), _outcomes(new)
    for place in dict.fromkeys((*before, *after)):
        sides = before.get(place), after.get(place)
        outcomes = [side[0] if side else "not looked at" for side in sides]
        if outcomes[0] != outcomes[1]:
            reasons = (side[1] if side else None for side in sides)
            yield row(" · ".join(place), *outcomes, note=reasons_of(*reasons))


def _outcomes(data: ReportData) -> dict[tuple[str, str, str], tuple[str, str]]:
    """Outcome and its reason by sequence, transform and place."""
    outcomes: dict[tuple[str, str, str], tuple[str, str]] = {}
    for sequence, log in data.rewrites.items():
        for record in log.records:
            done = "rolled back" if record.rolled_back else "applied"
            for item in record.applied:
                outcomes[sequence, record.transform, item.at] = done, item.what
            for declined in record.declined:
                # A place may be rewritten in one round and left alone in the next: what was done counts.
                place = sequence, record.transform, declined.at
                outcomes.setdefault(place, ("declined", declined.reason))
    return outcomes
