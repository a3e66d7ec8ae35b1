"""The numbers that a reader sees in the browser, scripts and all, are those of report.json."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from browser_pages import checked_numbers, written
from rich_run import rich

from loka_onnx.core import serde
from loka_onnx.operations.compare.difference import write_difference
from loka_onnx.operations.compare.runs import compare_runs


def test_every_number_of_the_page_equals_report_json(visit, run, tmp_path: Path) -> None:
    file = written(rich(run.report), tmp_path)
    facts = json.loads((file.parent / "report.json").read_text(encoding="utf-8"))
    page = visit(file).page
    # Sorted by the second column of every table, which moves rows about.
    page.evaluate("for (const b of document.querySelectorAll('th:nth-child(2) button')) b.click()")
    assert checked_numbers(page, facts) > 500


def test_the_page_of_two_runs_loads_and_its_numbers_are_those_of_its_json(visit, run, tmp_path: Path) -> None:
    later = replace(run.report, title="Ranker, day 08", versions={**run.report.versions, "torch": "2.13.0"})
    for name, data in (("old", run.report), ("new", rich(later))):
        serde.write(data, tmp_path / name / "report.json")
    *_, file = write_difference(compare_runs(tmp_path / "old", tmp_path / "new"), tmp_path / "out")
    opened = visit(file)
    opened.check(file)
    facts = json.loads(file.with_suffix(".json").read_text(encoding="utf-8"))
    assert checked_numbers(opened.page, facts) > 30
