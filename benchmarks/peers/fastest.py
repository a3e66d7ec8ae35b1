"""The fastest engine of each side: this project, every other tool, blanket FP8, and nothing quantized."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from benchmarks.peers.variants import NONE, OWN

BLANKET = "blanket"
"""How the names of the rows of blanket FP8 begin."""
NOBODY = (NONE, "", None)
"""`peer` of what no tool made."""
PLAIN, BLANKET_SIDE = "nothing quantized", "blanket FP8"


@dataclass(frozen=True)
class Timed:
    """A row of the table with its engines.

    Attributes:
        variant: Its name.
        peer: The tool.
        inside: Whether the upper end of its loss is inside the budget.
        engines: ``microseconds`` by batch size, by engine; ``simulated`` where FP8 was.
        later: Whether that was in a later run than the others'.
    """

    variant: str
    peer: str | None
    inside: bool
    engines: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    later: bool = False

    @property
    def has_fp8(self) -> bool:
        """Whether an engine of it computes a product in FP8."""
        return any(times.get("fp8_products_engaged") for times in self.engines.values())

    @property
    def side(self) -> str:
        """Blanket FP8 is a side of its own, whose engines this project builds."""
        if self.variant.startswith(BLANKET):
            return BLANKET_SIDE
        return PLAIN if self.peer in NOBODY else str(self.peer)


def fastest(rows: Iterable[Timed], batch: str) -> dict[str, dict[str, Any]]:
    """The fastest engine of each side at a batch size, FP8 or not, picked by these very times.

    One of ONNX Runtime that simulates FP8 is none.

    Returns:
        By side ``us``, ``variant``, ``engine``, ``later``, and ``over_loka_onnx``, where that has a time.
    """
    found: dict[str, dict[str, Any]] = {}
    for row in rows:
        for engine, times in row.engines.items():
            us = times.get("microseconds", {}).get(batch)
            if us is None or times.get("simulated"):
                continue
            least = found.get(row.side)
            if least is None or us < least["us"]:
                least = {"us": us, "variant": row.variant, "engine": engine, "later": row.later}
                least["quartiles"] = times.get("quartiles", {}).get(batch)
                found[row.side] = least
    ours = found.get(OWN)
    if ours is not None:
        for side in found.values():
            side["over_loka_onnx"] = side["us"] / ours["us"]
    return found
