"""The report of a run as the command makes it, opened as its reader does."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from browser_pages import PHONE, checked_numbers, fits_a_phone

sys.path.insert(0, str(Path(__file__).parents[1] / "integration"))

from synthetic_runs import make_workplace

from loka_onnx.pipeline.run import run


def test_every_number_of_a_real_runs_page_equals_its_report_json(visit, tmp_path: Path) -> None:
    directory = run(make_workplace(tmp_path).run_file).directory
    file = directory / "report.html"
    facts = json.loads((directory / "report.json").read_text(encoding="utf-8"))
    opened = visit(file)
    # Sorted by the first column of every table, which moves rows about.
    opened.page.evaluate("for (const b of document.querySelectorAll('th:first-child button.sort')) b.click()")
    assert checked_numbers(opened.page, facts) > 100
    opened.page.locator("#model-graph").scroll_into_view_if_needed()
    opened.page.locator("#model-graph[data-ready]").wait_for()
    opened.page.locator("#site-plot .main-svg").first.wait_for()
    opened.check(file)
    narrow = visit(file, size=PHONE)
    assert fits_a_phone(narrow.page)
    narrow.check(file)
