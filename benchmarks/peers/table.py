"""The peers' record as Markdown: the fastest of each tool, and a table for each model, with what failed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from benchmarks.peers.fastest_table import LATER, NAMES, UNKNOWN, fastest_table, row
from benchmarks.peers.variants import KERNELS

HEADS = (
    "tool",
    "sites in FP8",
    "FP8 share of FLOPs",
    "ΔNE, %",
    "ΔAUC, 10⁻⁴",
    "calibration, s",
    "total, s",
    "of the CPU, s",
    "peak memory, MiB",
    "CPU, µs",
)
ADDED = {KERNELS: "LoKA-ONNX's kernels, no mods, BF16"}
"""Rows that were made for the device alone."""
MOST_OF_A_NOTE = 240
"""Characters of a failure under a table; the record has it whole."""


def markdown(record: Mapping[str, Any]) -> str:
    """The whole record.

    Args:
        record: Document of `benchmarks.recording`.
    """
    order, settings = record["settings"]["order"], record["settings"]
    models = record["figures"]["models"]
    tables = (table_of(model, models[model], order["variants"]) for model in order["models"])
    first = fastest_table({model: models[model] for model in order["models"]}, settings["budget"])
    return "\n\n".join([*([first] if first else []), _legend(settings), *tables])


def table_of(model: str, figures: Mapping[str, Any], order: Sequence[str]) -> str:
    """One model.

    Args:
        model: Its name.
        figures: Of the record.
        order: Names of the rows.
    """
    entries = {name: figures["variants"][name] for name in order if name in figures["variants"]}
    for name, times in figures.get("beside", {}).items():
        entries[name] = {"label": ADDED.get(name, name), "device": times}
    columns = device_columns(entries)
    heads = [*HEADS, *(f"{engine}, batch {batch}, µs" for engine, batch in columns)]
    lines = [
        f"### {NAMES.get(model, model)}",
        "",
        f"{figures['linear_sites']} linear sites; {figures['certification_rows']:,} rows of certification; "
        f"NE {figures['reference']['ne']:.4f}, AUC {figures['reference']['auc']:.4f} in FP32.",
        "",
        row(heads),
        row(["---", *["---:"] * (len(heads) - 1)]),
        *(row(_cells(entry, columns)) for entry in entries.values()),
    ]
    notes = list(_notes(entries, columns))
    return "\n".join([*lines, *(["", *notes] if notes else [])])


def device_columns(entries: Mapping[str, Mapping[str, Any]]) -> list[tuple[str, str]]:
    """``(engine, batch)`` of every time from a device, in order."""
    found = {
        (engine, batch)
        for entry in entries.values()
        for engine, times in entry.get("device", {}).items()
        for batch in times.get("microseconds", {})
    }
    return sorted(found, key=lambda column: (column[0], int(column[1])))


def _legend(settings: Mapping[str, Any]) -> str:
    clock, rows = settings["clock"], settings["calibration_rows"]
    return " ".join(
        (
            f"Every tool had the same ONNX file and the same {rows:,} calibration rows;",
            f"{settings['labels_used']}.",
            "A site counts where both operands of its product come from an FP8 DequantizeLinear.",
            "ΔNE is relative to the FP32 model's loss, ΔAUC absolute, both on certification rows with paired",
            "95 % intervals, rows of one user together.",
            f"{settings['accuracy']}.",
            "Seconds are those of the tool's own call, without imports, by the clock and of the CPU (all",
            "threads); those of calibration alone are there where the tool lets them be told. Memory is",
            "anonymous, of the tool's process, imports included.",
            f"The time on the CPU is of one request of {clock['batch']} rows, {clock['threads']} thread,",
            "with quartiles; in brackets where FP8 or a narrow type is only simulated, which says nothing",
            "of speed. Of a plan that is there with the rest in FP32 and in BF16, Inductor builds the",
            "second. Beside a time stands how many of the products that are FP8 in the graph the engine",
            "computes in FP8, where it is not all: kernels take K and N that are multiples of 16, to which",
            "our mods pad.",
            f"{LATER} marks times of a later run on a machine of the same kind.",
        )
    )


def _cells(entry: Mapping[str, Any], columns: Sequence[tuple[str, str]]) -> list[str]:
    accuracy, sites = entry.get("accuracy"), entry.get("sites")
    failed = "not judged" if entry.get("not_judged") else "failed" if "failure" in entry else UNKNOWN
    return [
        entry["label"],
        f"{len(sites['sites'])} of {sites['linear_sites']}" if sites else failed,
        f"{100 * sites['share']:.0f} %" if sites else UNKNOWN,
        _bounds(accuracy["delta_ne_percent"], 1.0, 4) if accuracy else failed,
        _bounds(accuracy["delta_auc"], 1e4, 2) if accuracy and accuracy["delta_auc"] else failed,
        _seconds(entry.get("calibration_seconds")),
        _seconds(entry.get("seconds")),
        _seconds(entry.get("cpu_seconds")),
        f"{entry['peak_anonymous_mib']:.0f}" if entry.get("peak_anonymous_mib") else UNKNOWN,
        _cpu(entry.get("cpu")),
        *(_device(entry, engine, batch) for engine, batch in columns),
    ]


def _cpu(found: Mapping[str, Any] | None) -> str:
    if found is None:
        return UNKNOWN
    if "microseconds" not in found:
        return "does not run"
    low, high = found["iqr"]
    text = f"{found['microseconds']:.0f} [{low:.0f}, {high:.0f}]"
    return f"({text} simulated)" if found["simulated"] else text


def _device(entry: Mapping[str, Any], engine: str, batch: str) -> str:
    times = entry.get("device", {}).get(engine)
    if times is None:
        return UNKNOWN
    if "instead" in times:
        return "rest BF16"
    if batch not in times.get("microseconds", {}):
        return "failed" if "failure" in times else UNKNOWN
    text = f"{times['microseconds'][batch]:.1f}{LATER if entry.get('timed_later') else ''}"
    planned, engaged = times.get("fp8_products") or 0, times.get("fp8_products_engaged") or 0
    if engaged < planned:
        text += f" ({engaged} of {planned} in FP8)"
    return f"({text} simulated)" if times.get("simulated") else text


def _notes(entries: Mapping[str, Mapping[str, Any]], columns: Sequence[tuple[str, str]]) -> Iterator[str]:
    """What the cells have no room for."""
    for entry in entries.values():
        if "failure" in entry:
            yield f"- {entry['label']}: {_short(entry['failure'])}"
        elif "sites" in entry and entry["sites"]["pairs"] and not entry["sites"]["products"]:
            pairs = entry["sites"]["pairs"]
            yield f"- {entry['label']}: {pairs} Q/DQ pairs, none of which makes a product FP8."
        for engine in dict.fromkeys(engine for engine, _ in columns):
            reason = entry.get("device", {}).get(engine, {}).get("failure")
            if reason:
                yield f"- {entry['label']}, {engine}: {_short(reason)}"


def _bounds(interval: Sequence[float], unit: float, digits: int) -> str:
    value, lower, upper = (unit * end for end in interval)
    return f"{value:+.{digits}f} [{lower:+.{digits}f}, {upper:+.{digits}f}]"


def _short(text: str) -> str:
    return text if len(text) <= MOST_OF_A_NOTE else f"{text[:MOST_OF_A_NOTE].rstrip()} …"


def _seconds(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:.1f}"
