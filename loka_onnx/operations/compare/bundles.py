"""Difference of two verified bundles, from what they say of themselves.

Nothing is loaded or run. The manifests are compared field by field, and so are the plans; a list whose
elements have a name (engines by id, files by path, stages, outputs, batch sizes) is compared by that name.
Every field takes part, also one that this module does not know: two bundles that differ anywhere do not pass
for equal. What follows from the rest is left out (seals, the digest of the lineage).

The difference of B from A is that of A from B with the sides exchanged, in the same order.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from loka_onnx.bundle.format.archive import is_archive, unpacked
from loka_onnx.bundle.format.files import verify_bundle
from loka_onnx.bundle.format.signature import read_signature
from loka_onnx.core import serde
from loka_onnx.core.evaluation import Evaluation, Latency, OutputEvaluation, TargetChoice
from loka_onnx.core.manifest import Manifest
from loka_onnx.core.plan import Decision, PlanSet, PrecisionPlan
from loka_onnx.operations.compare.bundle_document import (
    BundleDifference,
    BundleIdentity,
    Change,
    Kind,
    PlanDifference,
    Section,
)

DERIVED = frozenset({"seal", "lineage_digest"})
"""Fields of a manifest that follow from the others."""
_SECTION_OF = {
    "model_digest": Section.MODEL,
    "inputs": Section.INTERFACE,
    "outputs": Section.INTERFACE,
    "judged": Section.INTERFACE,
    "cut": Section.INTERFACE,
    "engines": Section.ENGINES,
    "fallback": Section.ENGINES,
    "choice": Section.CHOICE,
    "created_by": Section.VERSIONS,
    "versions": Section.VERSIONS,
    "files": Section.FILES,
    "plans": Section.FILES,
    "sample": Section.FILES,
    "report": Section.FILES,
    "lineage": Section.LINEAGE,
}
_ORDER = {section: place for place, section in enumerate(Section)}


@dataclass(frozen=True)
class BundleFacts:
    """Facts that a bundle states of itself; `signed_with`: fingerprints of the keys that it claims."""

    manifest: Manifest
    plans: PlanSet
    signed_with: tuple[str, ...] = ()


def diff_bundles(a: Path, b: Path) -> BundleDifference:
    """Verify two bundles, each a directory or a single file, and compare them.

    Raises:
        BundleInvalid: One of them does not verify.
        UserError: The plans of one are of another version.
    """
    with ExitStack() as stack:
        one, other = (_read(path, stack) for path in (a, b))
    return difference_of(one, other, str(a), str(b))


def difference_of(a: BundleFacts, b: BundleFacts, path_a: str = "A", path_b: str = "B") -> BundleDifference:
    """The difference of the facts of two bundles, which are called by their paths."""
    pairs, sites = plan_differences(a, b)
    changes = (
        *_manifest_changes(a.manifest, b.manifest),
        *_recorded_by_target(a.manifest, b.manifest),
        *plan_changes(a.plans, b.plans),
        *sites,
        *leaves(list(a.signed_with), list(b.signed_with), ("signed with",), Section.SIGNATURE),
    )
    # Two engines of one target may lead to the same pair of plans.
    ordered = sorted(
        dict.fromkeys(changes),
        key=lambda change: (_ORDER[change.section], _by_number(change.what), sorted((change.a, change.b))),
    )
    return BundleDifference(_identity(a, path_a), _identity(b, path_b), tuple(ordered), pairs)


def _by_number(text: str) -> list[tuple[int, str]]:
    """Sort key that puts batch 8 before batch 32."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"([0-9]+)", text)]


def _read(path: Path, stack: ExitStack) -> BundleFacts:
    directory = stack.enter_context(unpacked(path)) if is_archive(path) else path
    manifest = verify_bundle(directory)
    signature = read_signature(directory)
    plans = serde.read(PlanSet, directory / manifest.plans)
    return BundleFacts(manifest, plans, () if signature is None else signature.keys)


def _identity(facts: BundleFacts, path: str) -> BundleIdentity:
    manifest = facts.manifest
    return BundleIdentity(
        path,
        manifest.created_by,
        manifest.model_digest,
        len(manifest.engines),
        len(manifest.files),
        manifest.total_bytes,
        facts.signed_with,
    )


# Manifests ----------------------------------------------------------------------------------------


def _manifest_changes(a: Manifest, b: Manifest) -> Iterator[Change]:
    ours, theirs = map(_plain, (a, b))
    for key in sorted({*ours, *theirs}):
        yield from leaves(ours.get(key), theirs.get(key), (key,), _SECTION_OF.get(key, Section.OTHER))
    before, after = ({entry.id: entry.evaluation for entry in side.candidates} for side in (a, b))
    for name in sorted({*before, *after}):
        yield from _evaluation_changes(before.get(name), after.get(name), name)


def _plain(manifest: Manifest) -> dict[str, Any]:
    """A manifest as dicts and lists, without evaluations, which are told in words of their own."""
    plain = {key: value for key, value in serde.to_plain(manifest).items() if key not in DERIVED}
    for entry in (*plain["engines"], plain["fallback"]):
        del entry["evaluation"]
    plain["files"] = [
        {"path": file["path"], "content": f"{file['bytes']:,} bytes, sha256 {file['sha256']}"}
        for file in plain["files"]
    ]
    return plain


def _evaluation_changes(a: Evaluation | None, b: Evaluation | None, engine: str) -> Iterator[Change]:
    """Changes of one engine's record: one for each output and batch size, and the other fields."""
    ours, theirs = (_recorded(found, engine) for found in (a, b))
    for section, name in sorted({*ours, *theirs}):
        before, after = (side.get((section, name)) for side in (ours, theirs))
        sides = [None if found is None else serde.to_plain(found) for found in (before, after)]
        if are_same(*sides):
            continue
        said = ["" if found is None else _said(found) for found in (before, after)]
        if said[0] == said[1]:
            count = sum(1 for _ in leaves(sides[0], sides[1], (), section))
            said = [f"{text}; {count} figures behind it differ" for text in said]
        yield Change(section, name, kind_of(before, after), *said)
    if a is not None and b is not None:
        rest = [serde.to_plain(replace(found, outputs=(), latencies=())) for found in (a, b)]
        yield from leaves(rest[0], rest[1], (engine,), Section.ACCURACY)
    elif a is not None or b is not None:
        said = ["" if found is None else found.status for found in (a, b)]
        yield Change(Section.ACCURACY, f"{engine} / status", kind_of(a, b), *said)


def _recorded(found: Evaluation | None, engine: str) -> dict[tuple[Section, str], OutputEvaluation | Latency]:
    if found is None:
        return {}
    outputs = {(Section.ACCURACY, f"{engine} / {output.output}"): output for output in found.outputs}
    timed = {(Section.LATENCY, f"{engine} / batch {each.batch}"): each for each in found.latencies}
    return {**outputs, **timed}


def _recorded_by_target(a: Manifest, b: Manifest) -> Iterator[Change]:
    """Records of the main engines of a target, where they are not the same engine."""
    for ours, theirs in _targets_apart(a, b):
        sides = []
        for manifest, choice in ((a, ours), (b, theirs)):
            entry = next((entry for entry in manifest.engines if entry.id == choice.engine), None)
            found = None if entry is None else entry.evaluation
            prefix = f"target {choice.target}"
            sides.append({key: f"{choice.engine}: {_said(v)}" for key, v in _recorded(found, prefix).items()})
        for section, name in sorted({*sides[0], *sides[1]}):
            one, other = (side.get((section, name), "") for side in sides)
            yield Change(section, name, kind_of(one or None, other or None), one, other)


def _targets_apart(a: Manifest, b: Manifest) -> Iterator[tuple[TargetChoice, TargetChoice]]:
    """Targets of both that get different main engines; one that stands for several devices is left out."""
    ours, theirs = (
        {
            choice.target: choice
            for choice in side.choice.targets
            if sum(choice.target == other.target for other in side.choice.targets) == 1
        }
        for side in (a, b)
    )
    for name in sorted(ours.keys() & theirs.keys()):
        if ours[name].engine != theirs[name].engine:
            yield ours[name], theirs[name]


def _said(found: OutputEvaluation | Latency) -> str:
    if isinstance(found, Latency):
        return f"p50 {found.p50_us:.1f} µs, p99 {found.p99_us:.1f} µs on {found.device}"
    if found.difference is None:
        return "the reference itself"
    change = found.difference.judged
    ends = f"[{100 * change.lower:+.4f} %, {100 * change.upper:+.4f} %]"
    return f"{found.difference.judged_name} {100 * change.value:+.4f} % {ends}, {found.verdict}"


# Plans --------------------------------------------------------------------------------------------


def plan_changes(a: PlanSet, b: PlanSet) -> Iterator[Change]:
    """Everything of plans but their sites."""
    ours, theirs = (
        serde.to_plain(replace(plans, plans=tuple(replace(plan, decisions=()) for plan in plans.plans)))
        for plans in (a, b)
    )
    yield from leaves(ours, theirs, (), Section.PLANS)


def plan_differences(a: BundleFacts, b: BundleFacts) -> tuple[tuple[PlanDifference, ...], tuple[Change, ...]]:
    """Pairs of plans whose sites differ, and these sites.

    Plans of one id are compared, and those that the main engines of one target run.
    """
    ours, theirs = ({plan.id: plan for plan in side.plans.plans} for side in (a, b))
    pairs = {(name, name): "same id" for name in sorted(ours.keys() & theirs.keys())}
    for one, other in _targets_apart(a.manifest, b.manifest):
        if one.plan in ours and other.plan in theirs:
            pairs.setdefault((one.plan, other.plan), f"target {one.target}")
    found, changes = list[PlanDifference](), list[Change]()
    for (one_id, other_id), why in pairs.items():
        sites = tuple(_site_changes(ours[one_id], theirs[other_id]))
        if sites:
            changes += sites
            found.append(_plan_difference(ours[one_id], theirs[other_id], why))
    # In the order of both names together, which exchanging the sides keeps.
    found.sort(key=lambda pair: (sorted((pair.plan_a, pair.plan_b)), pair.why))
    return tuple(found), tuple(changes)


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


# Values -------------------------------------------------------------------------------------------

_NAMES = ("id", "name", "path", "site", "stage", "output", "batch", "node", "target", "engine")
"""Fields that tell the elements of a list apart, the first one that does."""
_NAMED_BY_SECTION = frozenset({"engines", "files", "versions", "plans", "lineage", "choice"})
"""Lists and parts whose name says nothing where the section and the name of the element do."""


def kind_of(a: object, b: object) -> Kind:
    """Return how two sides differ; a side that is None says nothing."""
    if a is None:
        return Kind.ADDED
    return Kind.REMOVED if b is None else Kind.CHANGED


def leaves(a: Any, b: Any, path: tuple[str, ...], section: Section) -> Iterator[Change]:
    """Yield a change for each scalar at `path` that differs, and for each element that one side lacks."""
    if are_same(a, b):
        return
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        for key in sorted({*a, *b}):
            if key in a and key in b:
                yield from leaves(a[key], b[key], (*path, key), section)
            else:
                value = a[key] if key in a else b[key]
                yield _one_sided(value, (*path, key), section, is_ours=key in a)
        return
    if isinstance(a, list) and isinstance(b, list):
        field = _naming_field(a, b)
        if field is not None:
            ours, theirs = ({str(item[field]): item for item in items} for items in (a, b))
            yield from leaves(ours, theirs, path, section)
            common = [[name for name in side if name in ours and name in theirs] for side in (ours, theirs)]
            if common[0] != common[1]:
                texts = map(", ".join, common)
                yield Change(section, _joined((*path, "order")), Kind.CHANGED, *texts)
            return
    yield Change(section, _joined(path), Kind.CHANGED, _text(a), _text(b))


def _one_sided(value: Any, path: tuple[str, ...], section: Section, *, is_ours: bool) -> Change:
    if is_ours:
        return Change(section, _joined(path), Kind.REMOVED, _text(value), "")
    return Change(section, _joined(path), Kind.ADDED, "", _text(value))


def are_same(a: Any, b: Any) -> bool:
    """Equality in which NaN equals NaN."""
    if isinstance(a, float) and isinstance(b, float):
        return a == b or (math.isnan(a) and math.isnan(b))
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return a.keys() == b.keys() and all(are_same(a[key], b[key]) for key in a)
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(are_same, a, b))
    return type(a) is type(b) and bool(a == b)


def _naming_field(a: Sequence[Any], b: Sequence[Any]) -> str | None:
    """The field that tells the elements of two lists apart; None where there is none."""
    items = [*a, *b]
    if not items or not all(isinstance(item, Mapping) for item in items):
        return None
    for name in _NAMES:
        if all(name in item and isinstance(item[name], (str, int)) for item in items) and all(
            max(Counter(str(item[name]) for item in side).values(), default=0) <= 1 for side in (a, b)
        ):
            return name
    return None


def _joined(path: tuple[str, ...]) -> str:
    # The name of the list says nothing where its elements do.
    shown = path[1:] if len(path) > 1 and path[0] in _NAMED_BY_SECTION else path
    return " / ".join(shown)


def _text(value: Any) -> str:
    """A value in one line."""
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_text(item)}" for key, item in value.items() if item not in ({}, [], ""))
    if isinstance(value, list):
        return f"[{', '.join(map(_text, value))}]"
    return "none" if value is None else str(value)
