"""The record of other tools on the same models and rows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from benchmarks.peers.table import markdown
from benchmarks.results.formats import interval, number, table, times
from benchmarks.results.generic import readable, scalar
from benchmarks.results.records import Record


def render(record: Record) -> str:
    """One table for each model: a row for each tool and variant."""
    if isinstance(record.figures, Mapping) and "models" in record.figures:
        return markdown({"settings": record.settings, "figures": record.figures})
    parts = []
    for model, rows in _by_model(record.figures):
        columns = list(dict.fromkeys(key for _, row in rows for key in row))
        texts = [(name, *(_cell(key, row.get(key)) for key in columns)) for name, row in rows]
        parts += [f"**{model}**", table(("tool", *map(readable, columns)), texts)]
    return "\n\n".join(parts)


def _by_model(figures: Any) -> Iterator[tuple[str, list[tuple[str, Mapping[str, Any]]]]]:
    """The rows of each model, from a list of rows or from model → tool → columns."""
    if isinstance(figures, Mapping) and isinstance(figures.get("rows"), list):
        figures = figures["rows"]
    if isinstance(figures, list):
        models = dict.fromkeys(row["model"] for row in figures)
        for model in models:
            held = [row for row in figures if row["model"] == model]
            yield model, [(_name(row), _columns(row)) for row in held]
        return
    for model, tools in figures.items():
        yield model, [(name, _columns(held)) for name, held in tools.items() if isinstance(held, Mapping)]


def _name(row: Mapping[str, Any]) -> str:
    return ", ".join(str(row[key]) for key in ("peer", "tool", "variant") if row.get(key))


def _columns(row: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in row.items():
        if key in ("model", "peer", "tool", "variant"):
            continue
        if isinstance(value, Mapping):
            found |= {f"{key}, {below}": held for below, held in value.items()}
        else:
            found[key] = value
    return found


def _cell(key: str, value: Any) -> str:
    if _is_interval(value) and ("delta" in key or "Δ" in key):
        return interval(value)
    return scalar(value)


def _is_interval(value: Any) -> bool:
    return (
        isinstance(value, Sequence)
        and len(value) == len(("estimate", "low", "high"))
        and all(isinstance(each, float | int) for each in value)
    )


FP32, OWN = "FP32, as exported", "LoKA-ONNX, "


def cpu_engines(record: Record) -> str:
    """FP32's time over each graph's: the fastest own engine inside the budget, and every peer's graph."""
    tools = dict.fromkeys(name for model in record.figures.values() for name in model["graphs"])
    peers = [name for name in tools if not name.startswith((FP32, OWN))]
    rows = []
    for model, entry in record.figures.items():
        graphs = {name: graph for name, graph in entry["graphs"].items() if "us" in graph}
        for size, base in graphs[FP32]["us"].items():
            beyond = {name for name, graph in graphs.items() if _is_beyond(graph, record.settings)}
            taken = {name: graph["us"][size] for name, graph in graphs.items()}
            own = min((n for n in graphs if n.startswith(OWN) and n not in beyond), key=lambda n: taken[n][1])
            cells = [_over(base, taken[own]), own.removeprefix(OWN)]
            for peer in peers:
                if peer not in graphs:
                    cells.append("failed")
                    continue
                known = f"{_over(base, taken[peer])}, {number(_upper(graphs[peer]))} %"
                cells.append(f"({known})" if peer in beyond else known)
            rows.append((model, size, *cells))
    header = ("model", "threads x batch", "LoKA-ONNX", "plan", *peers)
    note = "Behind a ratio: the upper end of ΔNE, in parentheses where it is beyond the budget. =: a tie."
    return f"{note}\n\n{table(header, rows)}"


def _over(base: Sequence[float], quartiles: Sequence[float]) -> str:
    """A ratio of medians; marked where the quartiles overlap."""
    is_tie = base[0] <= quartiles[2] and quartiles[0] <= base[2]
    return f"{times(base[1] / quartiles[1])}{' =' if is_tie else ''}"


def _is_beyond(graph: Mapping[str, Any], limits: Mapping[str, Any]) -> bool:
    """True beyond the budget or, where a record has it, beyond the limit of KL: luck is not accuracy."""
    is_lucky = "kl_percent" in graph and graph["kl_percent"][2] > 100 * limits["max_kl"]
    return _upper(graph) > 100 * limits["budget"] or is_lucky


def _upper(graph: Mapping[str, Any]) -> float:
    return float(graph["delta_ne_percent"][2])
