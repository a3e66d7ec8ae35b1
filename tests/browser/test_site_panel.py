"""The panel of one site: what it says of the chosen site, in the drawing and to a screen reader."""

from __future__ import annotations

from dataclasses import replace

import pytest
from browser_pages import draw, facts_of, written

from loka_onnx.core.statistics import MagnitudeHistogram
from loka_onnx.report import ReportData


def with_histogram(data: ReportData, histogram: MagnitudeHistogram) -> ReportData:
    """The first site's first activation has another histogram."""
    first, *others = data.profile.sites
    name, stats = next(iter(first.operands.items()))
    operands = {**first.operands, name: replace(stats, histogram=histogram)}
    return replace(data, profile=replace(data.profile, sites=(replace(first, operands=operands), *others)))


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


def test_shares_are_of_all_sampled_elements_zeros_included(visit, data: ReportData, tmp_path):
    """Half are zero, and of the others all are normal."""
    one = MagnitudeHistogram(zeros=500, first=1024, counts=(500,))
    page = visit(written(with_histogram(data, one), tmp_path)).page
    shown, regions = facts_of(page), ("becomes 0", "subnormal", "normal")
    assert [shown[f"Sampled elements: {region}"] for region in regions] == ["0 %", "0 %", "50 %"]
    assert "50 %" in " ".join(draw(page, "#site-plot").locator(".annotation-text").all_text_contents())
    assert "of all sampled elements, zeros included" in page.locator("#site-panel .fine").inner_text()


def test_an_activation_of_zeros_is_told_from_one_without_a_histogram(visit, data: ReportData, tmp_path):
    zeros = with_histogram(data, MagnitudeHistogram(zeros=800))
    page = visit(written(zeros, tmp_path)).page
    page.locator("#site-choice").select_option(data.modified.sites[0].name)
    assert page.locator("#site-none").inner_text() == (
        "Every sampled element of this activation is zero, so there is nothing to draw."
    )
    assert not page.locator("#site-plot").is_visible()
    page.locator("#site-choice").select_option("over_arch.fc2")
    assert page.locator("#site-none").inner_text() == "No histogram was kept of this site."


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
        charts = page.locator("#chart-engines .chart").all()
        assert [chart.is_visible() for chart in charts].index(True) == int(found.input_value())
