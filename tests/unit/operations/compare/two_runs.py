"""Two runs that differ in what a test says, written down and compared."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from loka_onnx.core import serde
from loka_onnx.core.evaluation import EvaluationSet, OutputEvaluation
from loka_onnx.core.intervals import Interval
from loka_onnx.core.lineage import RunRecord
from loka_onnx.operations.compare.difference import Difference, Row
from loka_onnx.operations.compare.runs import compare_runs
from loka_onnx.report import ReportData


def slower(data: ReportData, factor: float, device: str = "cpu") -> ReportData:
    """Latencies of every engine times a factor."""
    evaluations = tuple(
        dataclasses.replace(
            e,
            latencies=tuple(
                dataclasses.replace(
                    item,
                    p50_us=item.p50_us * factor,
                    loads_us=tuple(part * factor for part in item.loads_us),
                    device=device,
                )
                for item in e.latencies
            ),
        )
        for e in data.evaluations.evaluations
    )
    return dataclasses.replace(data, evaluations=EvaluationSet(evaluations))


def emitting(data: ReportData, engine: str, plan: str) -> ReportData:
    """One engine for every request to the first target."""
    first, *rest = data.choice.targets
    chosen = dataclasses.replace(first, engine=engine, plan=plan, routes=())
    return dataclasses.replace(data, choice=dataclasses.replace(data.choice, targets=(chosen, *rest)))


def costing(data: ReportData, interval: Interval, split: str = "", **output: Any) -> ReportData:
    """ΔNE of every engine on a split, or on all."""

    def changed(each: OutputEvaluation) -> OutputEvaluation:
        if each.difference is None:
            return each
        difference = dataclasses.replace(each.difference, delta_ne=interval)
        return dataclasses.replace(each, difference=difference, **output)

    evaluations = tuple(
        dataclasses.replace(e, outputs=tuple(map(changed, e.outputs))) if split in {"", e.split} else e
        for e in data.evaluations.evaluations
    )
    return dataclasses.replace(data, evaluations=EvaluationSet(evaluations))


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
    return (
        item.before and item.before.text,
        item.after and item.after.text,
        item.verdict.text if item.verdict else "",
    )


def named(found: Difference, section: str, what: str) -> Row:
    (item,) = [item for item in found.rows(section) if item.what == what]
    return item
