"""What the record keeps of the figures of a model: each fact once, no path of this machine, six digits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

DIGITS = 6
OF_THE_PLAN = ("origins", "plan", "call", "versions", "stage_seconds")
"""What a row that came with another has in common with it."""


def trimmed(
    figures: Mapping[str, Any], narrow: Mapping[str, str], paths: Mapping[str, str]
) -> dict[str, Any]:
    """Figures of one model as the record has them.

    Args:
        figures: As they were measured.
        narrow: Row that each row which came with another belongs to, by name.
        paths: What stands for a directory of this machine, by its path.

    Returns:
        The same without repetition: of FP8 products their number, and the names of those that no site is
        known for; of a row that came with another, what that one has too is left out.
    """
    entries = {}
    for name, entry in figures["variants"].items():
        kept = {key: value for key, value in entry.items() if key != "origins"}
        if "sites" in kept:
            kept["sites"] = kept["sites"] | {"products": _count(kept["sites"]["products"])}
        if name in narrow:
            kept = {key: value for key, value in kept.items() if key not in OF_THE_PLAN}
            kept["same_plan_as"] = narrow[name]
        entries[name] = kept
    found: dict[str, Any] = _written(dict(figures) | {"variants": entries}, paths)
    return found


def _count(products: Any) -> int:
    return products if isinstance(products, int) else len(products)


def _written(value: Any, paths: Mapping[str, str]) -> Any:
    if isinstance(value, Mapping):
        return {key: _written(each, paths) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_written(each, paths) for each in value]
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}")
    if isinstance(value, str):
        for path, name in paths.items():
            value = value.replace(path, name)
    return value
