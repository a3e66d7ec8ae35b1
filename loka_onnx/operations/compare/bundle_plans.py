"""Differences of the plans of two bundles, site by site."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from loka_onnx.core import serde
from loka_onnx.core.plan import Decision, PlanSet, PrecisionPlan
from loka_onnx.operations.compare.bundle_document import Change, Kind, PlanDifference, Section
from loka_onnx.operations.compare.values import are_same, kind_of, leaves


@dataclass(frozen=True)
class TargetPlans:
    """Plans of the main engines that one target gets from either bundle."""

    target: str
    plan_a: str
    plan_b: str


@dataclass(frozen=True)
class PlanDifferences:
    """Pairs of plans that differ, with figures of each, and the sites that do."""

    pairs: tuple[PlanDifference, ...]
    sites: tuple[Change, ...]


def plan_changes(a: PlanSet, b: PlanSet) -> Iterator[Change]:
    """Everything of plans but their sites."""
    ours, theirs = (
        serde.to_plain(replace(plans, plans=tuple(replace(plan, decisions=()) for plan in plans.plans)))
        for plans in (a, b)
    )
    yield from leaves(ours, theirs, (), Section.PLANS)


def plan_differences(a: PlanSet, b: PlanSet, targets: Iterable[TargetPlans]) -> PlanDifferences:
    """Plans of one id, and those that the main engines of one target run, where sites differ.

    Args:
        a: Plans of the one bundle.
        b: Plans of the other.
        targets: Targets whose engines run different plans.
    """
    ours, theirs = ({plan.id: plan for plan in side.plans} for side in (a, b))
    pairs = {(name, name): "same id" for name in sorted(ours.keys() & theirs.keys())}
    for target in targets:
        if target.plan_a in ours and target.plan_b in theirs:
            pairs.setdefault((target.plan_a, target.plan_b), f"target {target.target}")
    found, changes = list[PlanDifference](), list[Change]()
    for (one_id, other_id), why in pairs.items():
        sites = tuple(_site_changes(ours[one_id], theirs[other_id]))
        if sites:
            changes += sites
            found.append(_plan_difference(ours[one_id], theirs[other_id], why))
    # In the order of both names together, which exchanging the sides keeps.
    found.sort(key=lambda pair: (sorted((pair.plan_a, pair.plan_b)), pair.why))
    return PlanDifferences(tuple(found), tuple(changes))


def _site_changes(a: PrecisionPlan, b: PrecisionPlan) -> Iterator[Change]:
    ours, theirs = ({decision.site: decision for decision in plan.decisions} for plan in (a, b))
    pair = a.id if a.id == b.id else " and ".join(sorted((a.id, b.id)))
    for site in sorted({*ours, *theirs}):
        one, other = ours.get(site), theirs.get(site)
        if one is not None and other is not None and are_same(*map(serde.to_plain, (one, other))):
            continue
        said = ["" if each is None else _decided(each) for each in (one, other)]
        if one is not None and other is not None:
            # A change is said on both sides where only one number of many differs.
            said = [text + more for text, more in zip(said, _apart(one, other), strict=True)]
        yield Change(Section.SITES, f"{pair} / {site}", kind_of(one, other), *said)
    order = [[d.site for d in plan.decisions if d.site in ours.keys() & theirs.keys()] for plan in (a, b)]
    if order[0] != order[1]:
        yield Change(Section.SITES, f"{pair} / order", Kind.CHANGED, ", ".join(order[0]), ", ".join(order[1]))


def _decided(decision: Decision) -> str:
    recipe = "" if decision.recipe is None else f" {decision.recipe.id}"
    return f"{decision.precision}{recipe}, {decision.verdict}"


def _apart(a: Decision, b: Decision) -> tuple[str, str]:
    """Scales and reasons of two decisions, as far as they differ."""
    one, other = "", ""
    if a.activation_scale != b.activation_scale:
        one, other = (f"; activation scale {d.activation_scale}" for d in (a, b))
    if a.weight_scale != b.weight_scale:
        largest = [f"{len(d.weight_scale)} weight scales to {max(d.weight_scale, default=0)}" for d in (a, b)]
        one, other = f"{one}; {largest[0]}", f"{other}; {largest[1]}"
        if len(a.weight_scale) == len(b.weight_scale):
            count = sum(x != y for x, y in zip(a.weight_scale, b.weight_scale, strict=True))
            one, other = f"{one}, {count} differ", f"{other}, {count} differ"
    if a.reason != b.reason:
        one, other = f"{one}; {a.reason}", f"{other}; {b.reason}"
    return one, other


def _plan_difference(a: PrecisionPlan, b: PrecisionPlan, why: str) -> PlanDifference:
    theirs = {decision.site: decision for decision in b.decisions}
    pairs = [(one, theirs[one.site]) for one in a.decisions if one.site in theirs]
    quantized = [(one, other) for one, other in pairs if one.recipe and other.recipe]
    ratios = [found for one, other in quantized if (found := _scale_ratio(one, other)) is not None]
    # Equally far ones are told apart by their place, so that exchanging the sides keeps the choice.
    largest = max(ratios, key=lambda found: (round(abs(math.log(found[0])), 12), found[1]), default=None)
    return PlanDifference(
        plan_a=a.id,
        plan_b=b.id,
        why=why,
        sites=len(pairs),
        precision=sum(one.precision is not other.precision for one, other in pairs),
        recipe=sum(one.recipe != other.recipe for one, other in quantized),
        scale=sum(
            one.recipe == other.recipe
            and (one.activation_scale, one.weight_scale) != (other.activation_scale, other.weight_scale)
            for one, other in quantized
        ),
        largest_ratio=None if largest is None else largest[0],
        largest_at="" if largest is None else largest[1],
    )


def _scale_ratio(a: Decision, b: Decision) -> tuple[float, str] | None:
    """The scale of B over that of A that is farthest from 1, and where; None where no scale differs."""
    ratios = []
    if a.activation_scale and b.activation_scale and a.activation_scale != b.activation_scale:
        ratios.append((b.activation_scale / a.activation_scale, f"{a.site}, activation"))
    if len(a.weight_scale) == len(b.weight_scale):
        ratios += [
            (y / x, f"{a.site}, weight channel {channel}")
            for channel, (x, y) in enumerate(zip(a.weight_scale, b.weight_scale, strict=True))
            if x != y and x > 0.0 and y > 0.0
        ]
    return max(ratios, key=lambda found: (abs(math.log(found[0])), found[1]), default=None)
