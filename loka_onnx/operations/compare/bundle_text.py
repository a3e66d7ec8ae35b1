"""View of two bundles as a `Difference`."""

from __future__ import annotations

from collections import Counter

from loka_onnx.operations.compare.bundle_document import (
    BundleDifference,
    BundleIdentity,
    Change,
    Kind,
    PlanDifference,
    Section,
)
from loka_onnx.operations.compare.difference import Difference, Row, Subject

_MARKS = {Kind.ADDED: "+ ", Kind.REMOVED: "- ", Kind.CHANGED: "~ "}


def bundles_view(found: BundleDifference) -> Difference:
    """The difference of two bundles, each section with the number of its changes."""
    subjects = list[Subject]()
    for section in Section:
        changes = found.of(section)
        counts = Counter(change.kind for change in changes)
        if section is Section.SITES and found.plans:
            subjects.append(Subject("sites by plan", tuple(map(_plan, found.plans))))
        if changes:
            title = f"{section}: {', '.join(f'{counts[kind]} {kind}' for kind in Kind if counts[kind])}"
            subjects.append(Subject(title, tuple(map(_row, changes))))
    if found.is_equal:
        subjects.append(Subject("the bundles are equal", ()))
    return Difference("Two bundles", (*_side("A", found.a), *_side("B", found.b)), tuple(subjects))


def _side(name: str, identity: BundleIdentity) -> tuple[str, str]:
    keys = ", ".join(key[:12] for key in identity.signed_with)
    signed = f", signed with {keys}" if keys else ""
    engines, files = _count(identity.engines, "engine"), _count(identity.files, "file")
    return (
        f"{name}  {identity.path}",
        f"   {identity.created_by}, model {identity.model_digest[:12]}, {engines}, {files}, "
        f"{identity.bytes:,} bytes{signed}",
    )


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _plan(pair: PlanDifference) -> Row:
    name = pair.plan_a if pair.plan_a == pair.plan_b else f"{pair.plan_a} → {pair.plan_b} ({pair.why})"
    ratio = ""
    if pair.largest_ratio is not None:
        ratio = f"; largest scale ratio ×{pair.largest_ratio:.4g} at {pair.largest_at}"
    return Row(
        name,
        after=f"of {pair.sites} sites {pair.precision} in another precision, {pair.recipe} by another "
        f"recipe, {pair.scale} with other scales{ratio}",
    )


def _row(change: Change) -> Row:
    if change.kind is Kind.CHANGED:
        return Row(change.what, change.a, change.b, mark=_MARKS[change.kind])
    return Row(change.what, after=change.a or change.b or None, mark=_MARKS[change.kind])
