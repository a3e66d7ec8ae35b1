"""Charts, the panel of a site, and the numbers that a reader sees with all scripts."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from browser_pages import checked_numbers, draw, facts_of, written
from changed_run import comparable, with_profile
from rich_run import rich

from loka_onnx.core import serde
from loka_onnx.core.statistics import MagnitudeHistogram
from loka_onnx.operations.compare.difference import write_difference
from loka_onnx.operations.compare.runs import compare_runs
from loka_onnx.report import ReportData

LATENCY = "#chart-engines"


def test_a_chart_that_was_hidden_meanwhile_is_as_wide_as_its_place(visit, data: ReportData, tmp_path):
    file = written(comparable(data), tmp_path)
    opened = visit(file)
    page = opened.page
    page.locator(LATENCY).scroll_into_view_if_needed()
    drawn = page.evaluate(
        f"() => [...document.querySelectorAll('{LATENCY} .chart')]"
        ".flatMap((chart, i) => chart.querySelector('.plot') ? [String(i)] : [])"
    )
    first, second, *_ = drawn
    choice, plot = page.locator(f"{LATENCY} select"), page.locator(f"{LATENCY} .plot:visible")
    for index in (first, second):
        choice.select_option(index)
        plot.locator(".main-svg").first.wait_for()
    page.set_viewport_size({"width": 1000, "height": 800})
    page.wait_for_timeout(300)
    choice.select_option(first)
    page.wait_for_timeout(300)
    chart, place = plot.locator(".main-svg").first.bounding_box(), plot.bounding_box()
    assert chart["width"] == pytest.approx(place["width"], abs=2)
    opened.check(file)


def test_a_browser_that_cannot_draw_says_so_in_words(browser, report):
    context = browser.new_context()
    context.add_init_script("window.DecompressionStream = undefined")
    page = context.new_page()
    page.goto(report.as_uri())
    plot = page.locator(f"{LATENCY} .plot").first
    plot.scroll_into_view_if_needed()
    page.locator(f"{LATENCY} .plot.failed").first.wait_for()
    assert plot.inner_text() == "This browser cannot draw the charts; the tables have all of their numbers."
    # Nothing says that it is a picture, or still to come: a screen reader would not read the sentence.
    assert [plot.get_attribute(name) for name in ("role", "aria-label", "aria-busy")] == [None] * 3
    context.close()


def test_the_chosen_site_is_told_to_a_screen_reader(visit, report, data: ReportData):
    page = visit(report).page
    names = [site.name for site in data.modified.sites]

    def pressed() -> set[str]:
        buttons = page.locator("button.site[aria-pressed=true]")
        return {button.get_attribute("data-site") for button in buttons.all()}

    assert page.locator("#site-reason").get_attribute("aria-live") == "polite"
    for name in (names[1], names[0]):
        page.locator(f"#sites details.table button[data-site='{name}']").first.press("Enter")
        assert pressed() == {name}
        assert page.locator("#site-reason").inner_text().startswith(f"{name}: ")
    assert page.locator("button.site:not([aria-pressed])").count() == 0
    label = page.locator("#site-plot").get_attribute("aria-label")
    assert label == f"Histogram of the magnitudes of dense, read by {names[0]}"


@pytest.fixture
def with_histogram(visit, data: ReportData, tmp_path) -> Callable[[MagnitudeHistogram], Any]:
    """The page where the activation of the first site has another histogram."""

    def opened(histogram: MagnitudeHistogram) -> Any:
        first, *others = data.profile.sites
        operands = {name: replace(stats, histogram=histogram) for name, stats in first.operands.items()}
        changed = with_profile(data, sites=(replace(first, operands=operands), *others))
        return visit(written(changed, tmp_path)).page

    return opened


def test_shares_are_of_all_sampled_elements_zeros_included(with_histogram):
    """Half are zero, and of the others all are normal."""
    page = with_histogram(MagnitudeHistogram(zeros=500, first=1024, counts=(500,)))
    shown, regions = facts_of(page), ("becomes 0", "subnormal", "normal")
    assert [shown[f"Sampled elements: {region}"] for region in regions] == ["0 %", "0 %", "50 %"]
    assert "50 %" in " ".join(draw(page, "#site-plot").locator(".annotation-text").all_text_contents())
    assert "of all sampled elements, zeros included" in page.locator("#site-panel .fine").inner_text()


def test_an_activation_of_zeros_is_told_from_one_without_a_histogram(with_histogram):
    page = with_histogram(MagnitudeHistogram(zeros=800))
    zeros = "Every sampled element of this activation is zero, so there is nothing to draw."
    for site, said in (("over_arch.fc0", zeros), ("over_arch.fc2", "No histogram was kept of this site.")):
        page.locator("#site-choice").select_option(site)
        assert page.locator("#site-none").inner_text() == said
        assert not page.locator("#site-plot").is_visible()


@pytest.mark.parametrize("control", ["#site-choice", "#site-log", "#chart-engines select"])
def test_coming_back_does_not_bring_back_half_of_a_choice(visit, report, control):
    """Browsers fill controls in again, and know nothing of what they have led to."""
    page = visit(report).page
    found = page.locator(control)
    if control == "#site-log":
        found.check()
    else:
        found.select_option(index=1)
    page.goto("about:blank")
    page.go_back()
    if control == "#site-log":
        assert not found.is_checked()
    elif control == "#site-choice":
        name = found.evaluate("e => e.selectedOptions[0].text")
        assert page.locator("#site-reason").inner_text().startswith(f"{name}: ")
    else:
        shown = [chart.is_visible() for chart in page.locator("#chart-engines .chart").all()]
        assert shown.index(True) == int(found.input_value())


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
