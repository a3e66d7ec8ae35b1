"""Charts behind the list of charts, and where none can be drawn."""

from __future__ import annotations

import pytest
from browser_pages import written
from changed_run import comparable

from loka_onnx.report import ReportData

LATENCY = "#chart-engines"


@pytest.fixture
def two_charts(data: ReportData, tmp_path):
    """A page of two targets with points to compare: nothing is simulated."""
    return written(comparable(data), tmp_path)


def settle(page) -> None:
    page.evaluate("() => new Promise(r => requestAnimationFrame(() => requestAnimationFrame(r)))")
    page.wait_for_timeout(300)


def widths(page) -> tuple[float, float]:
    """Of the chart that is shown, and of the place that it is drawn in."""
    plot = page.locator(f"{LATENCY} .plot:visible")
    return plot.locator(".main-svg").first.bounding_box()["width"], plot.bounding_box()["width"]


def drawn_charts(page) -> list[int]:
    """Places in the list of two charts that have something to draw, each drawn once; the second is shown."""
    indices = page.evaluate(
        f"() => [...document.querySelectorAll('{LATENCY} .chart')]"
        ".flatMap((chart, i) => chart.querySelector('.plot') ? [i] : [])"
    )
    if len(indices) < 2:
        pytest.fail("only one of the charts has something to draw")
    for index in indices[:2]:
        page.locator(f"{LATENCY} select").select_option(str(index))
        page.locator(f"{LATENCY} .plot:visible .main-svg").first.wait_for()
    return indices[:2]


def test_a_chart_that_was_hidden_meanwhile_is_as_wide_as_its_place(visit, two_charts):
    opened = visit(two_charts)
    page = opened.page
    page.locator(LATENCY).scroll_into_view_if_needed()
    first, _ = drawn_charts(page)
    page.set_viewport_size({"width": 1000, "height": 800})
    settle(page)
    page.locator(f"{LATENCY} select").select_option(str(first))
    settle(page)
    chart, place = widths(page)
    assert chart == pytest.approx(place, abs=2)
    opened.check(two_charts)


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


def test_without_scripts_a_sentence_stands_where_a_chart_would(visit, report):
    page = visit(report, javascript=False).page
    chart = page.locator(f"{LATENCY} .chart:visible")
    assert "The drawing needs scripts; the tables have all of its numbers." in chart.inner_text()
    assert not chart.locator(".plot").is_visible()
    # A list that leads nowhere is not offered.
    assert not page.locator(f"{LATENCY} select").is_visible()
