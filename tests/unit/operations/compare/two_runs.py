"""Two runs that differ in what a test says, written down and compared."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from changed_run import with_differences, with_latencies, with_target

from loka_onnx.core import serde
from loka_onnx.core.evaluation import Latency
from loka_onnx.core.intervals import Interval
from loka_onnx.core.lineage import RunRecord
from loka_onnx.operations.compare.difference import Difference, Row
from loka_onnx.operations.compare.runs import compare_runs
from loka_onnx.report import ReportData


def slower(data: ReportData, factor: float, device: str = "cpu") -> ReportData:
    """Latencies of every engine times a factor."""

    def changed(item: Latency) -> Latency:
        loads = tuple(part * factor for part in item.loads_us)
        return replace(item, p50_us=item.p50_us * factor, loads_us=loads, device=device)

    return with_latencies(data, changed)


def emitting(data: ReportData, engine: str, plan: str) -> ReportData:
    """One engine for every request to the first target."""
    return with_target(data, engine=engine, plan=plan, routes=())


def costing(data: ReportData, interval: Interval, **output: Any) -> ReportData:
    """ΔNE of every engine."""
    return with_differences(data, output=output, delta_ne=interval)


def write_run(directory: Path, data: ReportData, **config: object) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    serde.write(data, directory / "report.json")
    serde.write(RunRecord({"name": "x", **config}, data.versions, (), directory), directory / "run.json")
    return directory


def compared(tmp_path: Path, old: ReportData, new: ReportData) -> Difference:
    first = write_run(tmp_path / "old", old, calibration={"batch_size": 512, "seed": 0}, budget=0.001)
    second = write_run(tmp_path / "new", new, calibration={"batch_size": 256, "seed": 0}, mods=["a"])
    return compare_runs(first, second)


def texts(item: Row) -> tuple[str | None, str | None, str]:
    """Old, new and verdict of a row."""
    verdict = item.verdict.text if item.verdict else ""
    return item.before and item.before.text, item.after and item.after.text, verdict


def named(found: Difference, section: str, what: str) -> Row:
    (item,) = [item for item in found.rows(section) if item.what == what]
    return item
