"""The chart of README and docs: latency over loss of ours and others' engines, from the peers' record.

    python -m benchmarks.peers.loss_latency

writes `docs/assets/latency-over-loss.svg`. Engines of simulated FP8 have no latency and are left out; of a
graph that two runtimes compiled, the faster is shown. The axis of the loss is linear up to the budget and
logarithmic beyond, because blanket quantization loses hundreds of percent.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import asinh
from pathlib import Path
from typing import Any

from benchmarks.peers.fastest_table import NAMES
from benchmarks.results.records import Record, load_records

PATH = Path(__file__).parents[2] / "docs" / "assets" / "latency-over-loss.svg"
MODELS, BATCH = ("dlrm", "dcnv2", "wukong", "interformer"), "2048"
SIDES = {
    "none": ("nothing quantized", "#616161"),
    "blanket": ("blanket FP8", "#7b1fa2"),
    "loka-onnx": ("LoKA-ONNX", "#303f9f"),
    "model-optimizer": ("Model Optimizer", "#2e7d32"),
    "onnxruntime": ("ONNX Runtime", "#ad6200"),
    "quark": ("Quark", "#c62828"),
}
WIDTH, PANEL, HEIGHT, TICKS = 960, 400, 190, (0.0, 0.02, 0.1, 1.0, 10.0, 100.0)


@dataclass(frozen=True)
class Point:
    """An engine: whose, its microseconds, ΔNE in percent with the ends of its interval."""

    name: str
    side: str
    us: float
    loss: tuple[float, float, float]


def points_of(figures: Mapping[str, Any]) -> Iterator[Point]:
    """Engines of a model that were timed at `BATCH` and judged."""
    for name, entry in figures["variants"].items():
        times = [
            engine["microseconds"][BATCH]
            for engine in (entry.get("device") or {}).values()
            if BATCH in engine.get("microseconds", {}) and not engine.get("simulated")
        ]
        if times and entry.get("accuracy"):
            loss = tuple(entry["accuracy"]["delta_ne_percent"])
            side = "blanket" if name.startswith("blanket") else entry.get("peer") or "none"
            yield Point(name, side, min(times), loss)


def chart(record: Record) -> str:
    """The chart as SVG, on a ground of its own, so that it reads the same in light and dark pages."""
    budget = 100 * record.settings["budget"]
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} 590" role="img" aria-labelledby="t" '
        'font-family="system-ui, sans-serif" font-size="12" fill="#212121">',
        f'<title id="t">Latency at {BATCH} rows over the change of the loss, four rankers on an H100</title>',
        f'<rect width="{WIDTH}" height="590" rx="8" fill="#fff"/>',
    ]
    for index, (label, colour) in enumerate(SIDES.values()):
        x = 64 + 152 * index
        lines.append(
            f'<circle cx="{x}" cy="24" r="5" fill="{colour}"/><text x="{x + 11}" y="28">{label}</text>'
        )
    for index, model in enumerate(MODELS):
        points = list(points_of(record.figures["models"][model]))
        lines += _panel(NAMES[model], points, budget, 60 + 470 * (index % 2), 60 + 260 * (index // 2))
    lines.append(
        '<text x="480" y="580" text-anchor="middle">ΔNE in %, 95 % interval (linear up to the budget, then '
        "logarithmic); shaded: inside the budget; µs of a request, inputs on the device</text></svg>"
    )
    return "\n".join(lines) + "\n"


def _panel(title: str, points: list[Point], budget: float, left: int, top: int) -> Iterator[str]:
    slowest = max(point.us for point in points) * 1.1

    def across(loss: float) -> float:
        low, high = asinh(-0.02 / budget), asinh(400 / budget)
        return left + PANEL * (min(max(asinh(loss / budget), low), high) - low) / (high - low)

    def down(us: float) -> float:
        return top + HEIGHT * (1 - us / slowest)

    yield f'<text x="{left}" y="{top - 6}" font-weight="700">{title}</text>'
    inside = across(budget) - left
    yield f'<rect x="{left}" y="{top}" width="{inside:.1f}" height="{HEIGHT}" fill="#e8f5e9"/>'
    yield f'<path d="M{left} {top}V{top + HEIGHT}H{left + PANEL}" fill="none" stroke="#9e9e9e"/>'
    for loss in TICKS:
        x, y = across(loss), top + HEIGHT
        yield f'<path d="M{x:.1f} {y}v4" stroke="#9e9e9e"/>'
        yield f'<text x="{x:.1f}" y="{y + 17}" text-anchor="middle">{loss:g}</text>'
    step = next(step for step in (10, 20, 25, 50, 100, 200, 500) if slowest / step <= 6)
    for us in range(0, int(slowest) + 1, step):
        y = down(us)
        yield f'<text x="{left - 6}" y="{y + 4:.1f}" text-anchor="end">{us}</text>'
        yield f'<path d="M{left} {y:.1f}h{PANEL}" stroke="#eeeeee"/>'
    for point in sorted(points, key=lambda point: point.side == "loka-onnx"):
        colour, y = SIDES[point.side][1], down(point.us)
        estimate, low, high = point.loss
        yield (
            f'<g stroke="{colour}" fill="{colour}"><title>{title}, {SIDES[point.side][0]}, {point.name}: '
            f"{point.us:.1f} µs, ΔNE {estimate:+.4f} % [{low:+.4f}, {high:+.4f}]</title>"
            f'<path d="M{across(low):.1f} {y:.1f}H{across(high):.1f}" stroke-width="1.5"/>'
            f'<circle cx="{across(estimate):.1f}" cy="{y:.1f}" r="4" fill-opacity=".75"/></g>'
        )


def main() -> None:
    """Write the chart."""
    PATH.write_text(
        chart(load_records(PATH.parents[2] / "benchmarks" / "records")["peers"]), encoding="utf-8"
    )


if __name__ == "__main__":
    main()
