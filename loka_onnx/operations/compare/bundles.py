"""Difference of two verified bundles, from what they say of themselves: nothing is loaded or run.

Manifests and plans are compared field by field; a list whose elements have a name (engines by id, files by
path, stages, outputs, batch sizes) is compared by that name. Every field takes part, also one that this
module does not know, but for those that follow from the rest (seals, the digest of the lineage). The
difference of B from A is that of A from B with the sides exchanged, in the same order.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from loka_onnx.bundle.format.archive import as_directory
from loka_onnx.bundle.format.files import verify_bundle
from loka_onnx.bundle.format.signature import read_signature
from loka_onnx.core import serde
from loka_onnx.core.evaluation import Evaluation, Latency, OutputEvaluation
from loka_onnx.core.manifest import Manifest
from loka_onnx.core.plan import Decision, PlanSet, PrecisionPlan
from loka_onnx.operations.compare.difference import Difference, Row, Section, Side, Value, row

DERIVED = frozenset({"seal", "lineage_digest"})
"""Fields of a manifest that follow from the others."""
_SECTIONS: dict[str, tuple[str, tuple[str, ...]]] = {
    "model": ("model", ("model_digest",)),
    "interface": ("inputs and outputs", ("inputs", "outputs", "judged", "cut")),
    "engines": ("engines", ("engines", "fallback")),
    "choice": ("choice", ("choice",)),
    "plans": ("plans", ()),
    "sites": ("sites", ()),
    "accuracy": ("accuracy as recorded", ()),
    "latency": ("latency as recorded", ()),
    "signature": ("signature", ()),
    "versions": ("versions", ("created_by", "versions")),
    "files": ("files", ("files", "plans", "sample", "report")),
    "lineage": ("lineage", ("lineage",)),
    "other": ("other fields", ()),
}
"""Sections in the order of importance: title, and fields of the manifest."""
_SECTION_OF = {key: name for name, (_, keys) in _SECTIONS.items() for key in keys}
_Change = tuple[str, Row]
"""Section and difference."""


@dataclass(frozen=True)
class BundleFacts:
    """Facts that a bundle states of itself; `signed_with`: fingerprints of the keys that it claims."""

    manifest: Manifest
    plans: PlanSet
    signed_with: tuple[str, ...] = ()


def diff_bundles(a: Path, b: Path) -> Difference:
    """Verify two bundles, each a directory or a single file, and compare them.

    Raises BundleInvalid if one does not verify, UserError if its plans are of another version.
    """
    with ExitStack() as stack:
        before, after = (_read(path, stack) for path in (a, b))
    return difference_of(before, after, str(a), str(b))


def difference_of(a: BundleFacts, b: BundleFacts, path_a: str = "A", path_b: str = "B") -> Difference:
    """The difference of the facts of two bundles."""
    pairs, sites = _plan_differences(a, b)
    signatures = leaves(list(a.signed_with), list(b.signed_with), ("signed with",))
    # Everything of plans but their sites.
    ours, theirs = (
        serde.to_plain(replace(s.plans, plans=tuple(replace(plan, decisions=()) for plan in s.plans.plans)))
        for s in (a, b)
    )
    changes = dict.fromkeys(
        (
            *_manifest_changes(a.manifest, b.manifest),
            *(("plans", change) for change in leaves(ours, theirs, ())),
            *(("sites", change) for change in sites),
            *(("signature", change) for change in signatures),
        )
    )
    sections = list[Section]()
    for name, (title, _) in _SECTIONS.items():
        rows = tuple(sorted((change for section, change in changes if section == name), key=_order))
        if name == "sites" and pairs:
            sections.append(Section("sites-by-plan", "sites by plan", pairs))
        if rows:
            sections.append(Section(name, f"{title}: {_counts(rows)}", rows))
    if not sections:
        sections.append(Section("equal", "the bundles are equal", ()))
    sides = _side("A", a, path_a), _side("B", b, path_b)
    return Difference("Two bundles", *sides, tuple(sections), is_different=bool(changes))


def _order(change: Row) -> tuple[list[tuple[int, str]], list[str]]:
    """Sort key that puts batch 8 before batch 32, and does not know the sides."""
    parts = re.split(r"([0-9]+)", change.what)
    by_number = [(int(part), "") if part.isdigit() else (-1, part) for part in parts]
    return by_number, sorted(value.text for value in (change.before, change.after) if value is not None)


def _counts(rows: Sequence[Row]) -> str:
    kinds = Counter(
        "only in B" if item.before is None else "only in A" if item.after is None else "changed"
        for item in rows
    )
    return ", ".join(f"{kinds[kind]} {kind}" for kind in ("only in B", "only in A", "changed") if kinds[kind])


def _read(path: Path, stack: ExitStack) -> BundleFacts:
    directory = stack.enter_context(as_directory(path))
    manifest = verify_bundle(directory)
    signature = read_signature(directory)
    plans = serde.read(PlanSet, directory / manifest.plans)
    return BundleFacts(manifest, plans, () if signature is None else signature.keys)


def _side(name: str, facts: BundleFacts, path: str) -> Side:
    manifest = facts.manifest
    signed = [f"signed with {', '.join(facts.signed_with)}, not verified"] if facts.signed_with else []
    size = f"{len(manifest.files)} files, {manifest.total_bytes:,} bytes"
    engines = f"{len(manifest.engines)} engines beside the fallback"
    return Side(name, path, manifest.model_digest, (f"{manifest.created_by}, {engines}, {size}", *signed))


def _manifest_changes(a: Manifest, b: Manifest) -> Iterator[_Change]:
    ours, theirs = map(_plain, (a, b))
    for key in sorted({*ours, *theirs}):
        section = _SECTION_OF.get(key, "other")
        yield from ((section, change) for change in leaves(ours.get(key), theirs.get(key), (key,)))
    before, after = ({entry.id: entry.evaluation for entry in side.candidates} for side in (a, b))
    for name in sorted({*before, *after}):
        yield from _evaluation_changes(before.get(name), after.get(name), name)


def _plain(manifest: Manifest) -> dict[str, Any]:
    """A manifest as dicts and lists, without evaluations, which have rows of their own."""
    plain = {key: value for key, value in serde.to_plain(manifest).items() if key not in DERIVED}
    for entry in (*plain["engines"], plain["fallback"]):
        del entry["evaluation"]
    plain["files"] = [
        {"path": file["path"], "content": f"{file['bytes']:,} bytes, sha256 {file['sha256']}"}
        for file in plain["files"]
    ]
    return plain


def _evaluation_changes(a: Evaluation | None, b: Evaluation | None, engine: str) -> Iterator[_Change]:
    """Changes of one engine's record: one for each output and batch size, and the other fields."""
    sides = [_recorded(record, engine) for record in (a, b)]
    for section, name in sorted({*sides[0], *sides[1]}):
        before, after = (side.get((section, name)) for side in sides)
        plain = [None if record is None else serde.to_plain(record) for record in (before, after)]
        if are_same(*plain):
            continue
        texts = [None if record is None else _result(record) for record in (before, after)]
        if texts[0] == texts[1]:
            count = sum(1 for _ in leaves(plain[0], plain[1], ()))
            texts = [f"{text}; {count} figures behind it differ" for text in texts]
        yield section, row(name, *texts)
    if a is not None and b is not None:
        ours, theirs = (serde.to_plain(replace(record, outputs=(), latencies=())) for record in (a, b))
        yield from (("accuracy", change) for change in leaves(ours, theirs, (engine,)))
    elif a is not None or b is not None:
        statuses = (None if record is None else record.status for record in (a, b))
        yield "accuracy", row(f"{engine} / status", *statuses)


def _recorded(record: Evaluation | None, name: str) -> dict[tuple[str, str], OutputEvaluation | Latency]:
    """Results by section and row."""
    if record is None:
        return {}
    outputs = {("accuracy", f"{name} / {output.output}"): output for output in record.outputs}
    timed = {("latency", f"{name} / batch {each.batch}"): each for each in record.latencies}
    return {**outputs, **timed}


def _result(record: OutputEvaluation | Latency) -> str:
    if isinstance(record, Latency):
        return f"p50 {record.p50_us:.1f} µs, p99 {record.p99_us:.1f} µs on {record.device}"
    if record.difference is None:
        return "the reference itself"
    change = record.difference.judged
    ends = f"[{100 * change.lower:+.4f} %, {100 * change.upper:+.4f} %]"
    return f"{record.difference.judged_name} {100 * change.value:+.4f} % {ends}, {record.verdict}"


def _plan_differences(a: BundleFacts, b: BundleFacts) -> tuple[tuple[Row, ...], list[Row]]:
    """Plans of one id whose sites differ, and these sites."""
    ours, theirs = ({plan.id: plan for plan in side.plans.plans} for side in (a, b))
    rows, changes = list[Row](), list[Row]()
    for name in sorted(ours.keys() & theirs.keys()):
        sites = list(_site_changes(ours[name], theirs[name]))
        if sites:
            rows.append(_plan_difference(name, ours[name], theirs[name]))
            changes += sites
    return tuple(rows), changes


def _site_changes(a: PrecisionPlan, b: PrecisionPlan) -> Iterator[Row]:
    ours, theirs = ({decision.site: decision for decision in plan.decisions} for plan in (a, b))
    for site in sorted({*ours, *theirs}):
        before, after = ours.get(site), theirs.get(site)
        texts = [None if each is None else _decided(each) for each in (before, after)]
        if before is not None and after is not None:
            if are_same(*map(serde.to_plain, (before, after))):
                continue
            # Scales have many numbers: only those that differ are shown.
            texts = [f"{text}{more}" for text, more in zip(texts, _apart(before, after), strict=True)]
        yield row(f"{a.id} / {site}", *texts)
    yield from _order_change(list(ours), list(theirs), (a.id,))


def _decided(decision: Decision) -> str:
    recipe = "" if decision.recipe is None else f" {decision.recipe.id}"
    return f"{decision.precision}{recipe}, {decision.verdict}"


def _apart(a: Decision, b: Decision) -> list[str]:
    """Scales and reasons of two decisions, as far as they differ."""
    texts = ["", ""]
    if a.activation_scale != b.activation_scale:
        texts = [f"; activation scale {d.activation_scale}" for d in (a, b)]
    if a.weight_scale != b.weight_scale:
        differ = ""
        if len(a.weight_scale) == len(b.weight_scale):
            differ = f", {sum(x != y for x, y in zip(a.weight_scale, b.weight_scale, strict=True))} differ"
        for side, d in enumerate((a, b)):
            largest = max(d.weight_scale, default=0)
            texts[side] += f"; {len(d.weight_scale)} weight scales to {largest}{differ}"
    if a.reason != b.reason:
        texts = [f"{text}; {d.reason}" for text, d in zip(texts, (a, b), strict=True)]
    return texts


def _plan_difference(name: str, a: PrecisionPlan, b: PrecisionPlan) -> Row:
    """Count the sites that both decide in another precision, recipe and scale."""
    theirs = {decision.site: decision for decision in b.decisions}
    pairs = [(before, theirs[before.site]) for before in a.decisions if before.site in theirs]
    quantized = [(before, after) for before, after in pairs if before.recipe and after.recipe]
    precision = sum(before.precision is not after.precision for before, after in pairs)
    recipe = sum(before.recipe != after.recipe for before, after in quantized)
    scale = sum(
        before.recipe == after.recipe
        and (before.activation_scale, before.weight_scale) != (after.activation_scale, after.weight_scale)
        for before, after in quantized
    )
    counts = (len(pairs), precision, recipe, scale)
    text = "of {} sites {} in another precision, {} by another recipe, {} with other scales".format(*counts)
    ratios = [ratio for before, after in quantized for ratio in _scale_ratios(before, after)]
    if not ratios:
        return Row(name, verdict=Value(text, counts))
    # Equally far ones are told apart by their place, so that exchanging the sides keeps the choice.
    largest, where = max(ratios, key=lambda ratio: (round(abs(math.log(ratio[0])), 12), ratio[1]))
    verdict = Value(f"{text}; largest scale ratio ×{largest:.4g}", (*counts, largest))
    return Row(name, verdict=verdict, note=f"at {where}")


def _scale_ratios(a: Decision, b: Decision) -> Iterator[tuple[float, str]]:
    """Scales of B over those of A that differ, and where."""
    if a.activation_scale and b.activation_scale and a.activation_scale != b.activation_scale:
        yield b.activation_scale / a.activation_scale, f"{a.site}, activation"
    if len(a.weight_scale) == len(b.weight_scale):
        for channel, (x, y) in enumerate(zip(a.weight_scale, b.weight_scale, strict=True)):
            if x != y and x > 0.0 and y > 0.0:
                yield y / x, f"{a.site}, weight channel {channel}"


_NAMES = ("id", "name", "path", "site", "stage", "output", "batch", "node", "target", "engine")
"""Fields that tell the elements of a list apart, the first one that does."""
_NAMED_BY_SECTION = frozenset({"engines", "files", "versions", "plans", "lineage", "choice"})
"""Lists and parts whose name says nothing where the section and the name of the element do."""


def leaves(a: Any, b: Any, path: tuple[str, ...]) -> Iterator[Row]:
    """Yield a row for each scalar at `path` that differs, and for each element that one side lacks."""
    if are_same(a, b):
        return
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        for key in sorted({*a, *b}):
            if key in a and key in b:
                yield from leaves(a[key], b[key], (*path, key))
            else:
                sides = (_text(side[key]) if key in side else None for side in (a, b))
                yield row(_joined((*path, key)), *sides)
        return
    if isinstance(a, list) and isinstance(b, list) and (field := _naming_field(a, b)) is not None:
        ours, theirs = ({str(item[field]): item for item in items} for items in (a, b))
        yield from leaves(ours, theirs, path)
        yield from _order_change(list(ours), list(theirs), path)
        return
    yield row(_joined(path), _text(a), _text(b))


def _order_change(ours: list[str], theirs: list[str], path: tuple[str, ...]) -> Iterator[Row]:
    """A row where the names of both sides stand in another order."""
    common = [[name for name in side if name in ours and name in theirs] for side in (ours, theirs)]
    if common[0] != common[1]:
        yield row(_joined((*path, "order")), *map(", ".join, common))


def are_same(a: Any, b: Any) -> bool:
    """Equality of plain JSON values, of types too, in which NaN equals NaN."""
    return json.dumps(a, sort_keys=True) == json.dumps(b, sort_keys=True)


def _naming_field(a: Sequence[Any], b: Sequence[Any]) -> str | None:
    """The field that tells the elements of two lists apart; None where there is none."""
    items = [*a, *b]
    if not items or not all(isinstance(item, Mapping) for item in items):
        return None
    for name in _NAMES:
        is_there = all(isinstance(item.get(name), (str, int)) for item in items)
        if is_there and all(len({str(item[name]) for item in side}) == len(side) for side in (a, b)):
            return name
    return None


def _joined(path: tuple[str, ...]) -> str:
    # The name of the list says nothing where its elements do.
    shown = path[1:] if len(path) > 1 and path[0] in _NAMED_BY_SECTION else path
    return " / ".join(shown)


def _text(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_text(item)}" for key, item in value.items() if item not in ({}, [], ""))
    if isinstance(value, list):
        return f"[{', '.join(map(_text, value))}]"
    return "none" if value is None else str(value)
