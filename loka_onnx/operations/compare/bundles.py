"""What differs between two verified bundles, from what they say of themselves.

Nothing is loaded or run. The manifests are compared field by field, and so are the plans; a list whose
elements have a name (engines by id, files by path, stages, outputs, batch sizes) is compared by that name.
Every field takes part, also one that this module does not know: two bundles that differ anywhere do not pass
for equal. What follows from the rest is left out (seals, the digest of the lineage).

The difference of B from A is that of A from B with the sides exchanged, in the same order.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from loka_onnx.core import serde
from loka_onnx.core.evaluation import Evaluation, Latency, OutputEvaluation, TargetChoice
from loka_onnx.core.manifest import Manifest
from loka_onnx.core.plan import PlanSet
from loka_onnx.operations.compare.bundle_document import BundleDifference, BundleIdentity, Change, Section
from loka_onnx.operations.compare.bundle_plans import TargetPlans, plan_changes, plan_differences
from loka_onnx.operations.compare.values import are_same, kind_of, leaves
from loka_onnx.sessions.bundle_archive import is_archive, unpacked
from loka_onnx.sessions.bundle_files import verify_bundle
from loka_onnx.sessions.bundle_signature import read_signature

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
    """Facts that a bundle states of itself.

    Attributes:
        manifest: Its manifest.
        plans: Its plans.
        signed_with: Fingerprints of the keys that it claims to be signed with.
    """

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
    """How the facts of one bundle differ from those of another.

    Args:
        a: The one.
        b: The other.
        path_a: What to call the one.
        path_b: What to call the other.
    """
    targets = [
        TargetPlans(one.target, one.plan, other.plan) for one, other in _targets_apart(a.manifest, b.manifest)
    ]
    plans = plan_differences(a.plans, b.plans, targets)
    changes = (
        *_manifest_changes(a.manifest, b.manifest),
        *_recorded_by_target(a.manifest, b.manifest),
        *plan_changes(a.plans, b.plans),
        *plans.sites,
        *leaves(list(a.signed_with), list(b.signed_with), ("signed with",), Section.SIGNATURE),
    )
    # Two engines of one target may lead to the same pair of plans.
    ordered = sorted(
        dict.fromkeys(changes),
        key=lambda change: (_ORDER[change.section], _by_number(change.what), sorted((change.a, change.b))),
    )
    return BundleDifference(_identity(a, path_a), _identity(b, path_b), tuple(ordered), plans.pairs)


def _by_number(text: str) -> list[tuple[int, str]]:
    """What puts batch 8 before batch 32."""
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
    """What was recorded for one engine: a line for each output and batch size, and the other fields."""
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
    """What was recorded for the main engines of a target, where they are not the same engine."""
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
