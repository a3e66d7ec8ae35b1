"""The first table of the peers' page: the fastest engine of each tool, model by model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import geometric_mean
from typing import Any

from benchmarks.peers.fastest import BLANKET_SIDE, PLAIN, Timed, fastest
from benchmarks.peers.variants import OWN, SAME_GRAPH
from loka_onnx.numerics.intervals import is_tie

NAMES = {
    "dlrm": "DLRM",
    "dcnv2": "DCNv2",
    "wukong": "Wukong",
    "interformer": "InterFormer",
    "deepfm": "DeepFM",
    "pnn": "PNN",
    "nfm": "NFM",
    "fibinet": "FiBiNET",
    "wdl": "WDL",
}
SIDES = {
    PLAIN: "nothing quantized",
    BLANKET_SIDE: "blanket FP8",
    "model-optimizer": "NVIDIA Model Optimizer",
    "onnxruntime": "ONNX Runtime",
    "quark": "AMD Quark",
}
UNKNOWN, LATER = "–", "†"
ENGINES = (
    "Every graph was compiled by this project's lowering to Inductor: the compilers that the tools write",
    "for (TensorRT; MIGraphX and AMD's GPUs) were not there, and what they would make of these graphs is",
    "**not measured**. Graphs with FP8 get this project's kernels, whoever quantized them; rows of which",
    "nothing is quantized are compiled without them, as by who does not have this project, but for the rows",
    "that name them. What was written with FP32 beside FP8 is compiled with BF16 there, and its accuracy is",
    "that of the graph as it was written, on the CPU.",
)
"""What a reader has to know of the engines."""


def fastest_table(models: Mapping[str, Mapping[str, Any]], budget: float) -> str:
    """The fastest engine of each tool on the device, model by model; empty where none was timed.

    Args:
        models: Figures by model.
        budget: Largest accepted relative loss.
    """
    rows: list[list[str]] = []
    common: list[dict[str, float]] = []
    for model, figures in models.items():
        timed = list(timed_rows(figures, budget))
        batches = {b for each in timed for e in each.engines.values() for b in e.get("microseconds", {})}
        for batch in sorted(batches, key=int):
            every, inside = fastest(timed, batch), fastest((each for each in timed if each.inside), batch)
            float8 = [each for each in timed if each.side == OWN and each.has_fp8]
            inside_float8 = fastest((each for each in float8 if each.inside), batch)
            ours = inside.get(OWN)
            shown = {side: inside.get(side) or every.get(side) for side in SIDES}
            if ours is not None and all(shown.values()):
                common.append({side: found["us"] / ours["us"] for side, found in shown.items() if found})
            rows.append(
                [
                    NAMES.get(model, model),
                    batch,
                    f"**{ours['us']:.1f}** ({ours['variant']})" if ours else "none inside",
                    _side(inside_float8.get(OWN), fastest(float8, batch).get(OWN), ours),
                    *(_side(inside.get(side), every.get(side), ours) for side in SIDES),
                ]
            )
    if not rows:
        return ""
    means = [f"{geometric_mean(c[side] for c in common):.2f} ×" if common else UNKNOWN for side in SIDES]
    return "\n".join(
        [
            "### The fastest engine of each on the device",
            "",
            "µs of a request, inputs on the device, in turns with all others, by Inductor or ONNX Runtime,"
            " whichever is faster; in brackets over LoKA-ONNX's fastest inside the budget, whose row is"
            " named, with FP8 or without. An engine is inside where the upper end of its row's loss of NE is"
            f" at most {100 * budget:g} %; of a tool that has none inside, its fastest stands there, marked"
            " ✗. The fastest are picked by these very times, among more rows of this project than of another"
            f" tool; {LATER} marks one of a later run on a machine of the same kind.",
            "",
            " ".join(ENGINES),
            "",
            row(["model", "batch", "LoKA-ONNX", "LoKA-ONNX in FP8", *SIDES.values()]),
            row(["---", "---:", *["---:"] * (2 + len(SIDES))]),
            *map(row, rows),
            row([f"geometric mean of {len(common)} where all have one", "", "1 ×", "", *means]),
        ]
    )


def timed_rows(figures: Mapping[str, Any], budget: float) -> Iterator[Timed]:
    """The rows of a model that have engines on the device.

    A row that was made for the device has the verdict of the row whose graph it is.
    """
    for name, entry in figures["variants"].items():
        if entry.get("device"):
            inside, later = is_inside(entry, budget), bool(entry.get("timed_later"))
            yield Timed(name, entry.get("peer"), inside, entry["device"], later)
    for name, engines in figures.get("beside", {}).items():
        same = figures["variants"].get(SAME_GRAPH.get(name, ""), {})
        yield Timed(name, OWN, is_inside(same, budget), engines)


def is_inside(entry: Mapping[str, Any], budget: float) -> bool:
    """Whether the upper end of a row's loss is inside the budget; false where it was not judged."""
    accuracy = entry.get("accuracy")
    return accuracy is not None and bool(accuracy["delta_ne_percent"][2] <= 100 * budget)


def _side(inside: Mapping[str, Any] | None, every: Mapping[str, Any] | None, ours: Any) -> str:
    found = inside or every
    if found is None:
        return UNKNOWN
    mark = "" if inside else "✗ "
    ratio = f" ({_over(found, ours)})" if ours else ""
    return f"{mark}{found['us']:.1f}{LATER if found['later'] else ''}{ratio}"


def _over(found: Mapping[str, Any], ours: Mapping[str, Any]) -> str:
    """A ratio of medians; a tie where their quartiles overlap."""
    quartiles = found.get("quartiles"), ours.get("quartiles")
    if found is not ours and all(quartiles) and is_tie(*(tuple(each) for each in quartiles if each)):
        return "tie"
    return f"{found['us'] / ours['us']:.2f} ×"


def row(cells: Sequence[str]) -> str:
    """A row of Markdown."""
    return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"
