"""Sites, plans and rewrites of two runs: what was decided differently, and why."""

from __future__ import annotations

from collections.abc import Iterator

from loka_onnx.core.formats import Precision
from loka_onnx.core.plan import Decision, PrecisionPlan
from loka_onnx.core.site import Site
from loka_onnx.operations.compare.difference import Row, Section, number, row
from loka_onnx.operations.compare.hardware import hardware_pairs
from loka_onnx.report import ReportData, numbers
from loka_onnx.report.figures import Told, told


def reasons_of(old: str | None, new: str | None) -> str:
    """Reasons of both sides in one sentence."""
    sides = (("then", old), ("now", new))
    return "; ".join(f"{when}: {reason.rstrip('.')}" for when, reason in sides if reason is not None)


def sites(old: ReportData, new: ReportData) -> Iterator[Section]:
    """Sites that a plan treats differently, that one model lacks, and that have another shape."""
    before, after = ({site.name: site for site in data.modified.sites} for data in (old, new))
    common = [name for name in after if name in before]
    decisions = [
        item
        for place, was, now in _compared_plans(old, new)
        for name in common
        for item in _decided(f"{place} · {name}", _decision(was, name), _decision(now, name))
    ]
    yield Section("sites", "Sites with another precision or verdict", tuple(decisions))
    gone = [row(name, _shape(site), note=_merged(site)) for name, site in before.items() if name not in after]
    came = [
        row(name, None, _shape(site), note=_merged(site))
        for name, site in after.items()
        if name not in before
    ]
    yield Section("sites", "Sites of one model only", (*gone, *came))
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


def _decision(plan: PrecisionPlan, site: str) -> Decision | None:
    return next((decision for decision in plan.decisions if decision.site == site), None)


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
    return told(
        "{}, sites in {}: {}, of the FLOPs {}",
        plan.base.value,
        (plan.quantized or Precision.FP8).upper(),
        sites,
        share,
    )


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
