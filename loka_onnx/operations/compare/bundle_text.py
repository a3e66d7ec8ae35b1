"""The difference of two bundles as text: one screen, or all of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from loka_onnx.operations.compare.bundle_document import (
    BundleDifference,
    BundleIdentity,
    Change,
    Kind,
    PlanDifference,
    Section,
)

SCREEN_LINES = 40
SCREEN_COLUMNS = 110
_MARKS = {Kind.ADDED: "+", Kind.REMOVED: "-", Kind.CHANGED: "~"}


def describe_difference(difference: BundleDifference, *, everything: bool = False) -> str:
    """The difference for a terminal, ending with a newline.

    Args:
        difference: The difference.
        everything: Every change in full; else as many of each section as fit on a screen of `SCREEN_LINES`
            lines, with what is left out counted.
    """
    head = [*_side("A", difference.a), *_side("B", difference.b)]
    if difference.is_equal:
        return "\n".join([*head, "the bundles are equal"]) + "\n"
    lines = list[str]()
    most = None if everything else _most(difference)
    for section in Section:
        lines += _section(difference, section, most)
    # A path that is cut off cannot be copied; a value can be had in full.
    lines = lines if everything else [_clipped(line) for line in lines]
    return "\n".join([*head, *lines]) + "\n"


def _side(name: str, identity: BundleIdentity) -> tuple[str, str]:
    signed = (
        f", signed with {', '.join(key[:12] for key in identity.signed_with)}" if identity.signed_with else ""
    )
    engines, files = _count(identity.engines, "engine"), _count(identity.files, "file")
    return (
        f"{name}  {identity.path}",
        f"   {identity.created_by}, model {identity.model_digest[:12]}, {engines}, "
        f"{files}, {identity.bytes:,} bytes{signed}",
    )


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _most(difference: BundleDifference) -> int:
    """Most changes of a section that still fit on a screen; at least one."""
    most = 1
    while most < SCREEN_LINES and _lines(difference, most + 1) <= SCREEN_LINES:
        most += 1
    return most


def _lines(difference: BundleDifference, most: int) -> int:
    return 4 + sum(len(list(_section(difference, section, most))) for section in Section)


def _section(difference: BundleDifference, section: Section, most: int | None) -> Iterator[str]:
    changes = difference.of(section)
    if not changes:
        return
    counts = Counter(change.kind for change in changes)
    yield f"{section}: {', '.join(f'{counts[kind]} {kind}' for kind in Kind if counts[kind])}"
    if section is Section.SITES:
        pairs = difference.plans[:most]
        yield from map(_plan, pairs)
        if len(difference.plans) > len(pairs):
            yield f"    … and {len(difference.plans) - len(pairs)} more pairs of plans (--all)"
    shown = changes[:most]
    yield from map(_change, shown)
    if len(changes) > len(shown):
        yield f"  … and {len(changes) - len(shown)} more (--all)"


def _plan(pair: PlanDifference) -> str:
    names = pair.plan_a if pair.plan_a == pair.plan_b else f"{pair.plan_a} → {pair.plan_b} ({pair.why})"
    ratio = ""
    if pair.largest_ratio is not None:
        ratio = f"; largest scale ratio ×{pair.largest_ratio:.4g} at {pair.largest_at}"
    return (
        f"  {names}: of {pair.sites} sites {pair.precision} in another precision, {pair.recipe} by another "
        f"recipe, {pair.scale} with other scales{ratio}"
    )


def _change(change: Change) -> str:
    mark = _MARKS[change.kind]
    if change.kind is Kind.CHANGED:
        return f"  {mark} {change.what}: {change.a} → {change.b}"
    return f"  {mark} {change.what}: {change.a or change.b}".removesuffix(": ")


def _clipped(line: str) -> str:
    return line if len(line) <= SCREEN_COLUMNS else f"{line[: SCREEN_COLUMNS - 1]}…"
