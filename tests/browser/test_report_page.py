"""The page as a reader has it: every control does what it says, nothing is fetched, nothing fails."""

from __future__ import annotations

import re

import pytest
from browser_pages import (
    DESKTOP,
    HEAR,
    PHONE,
    STAGE,
    assert_all_inside,
    draw,
    facts_of,
    is_as_wide_as,
    texts,
    wait_until,
    written,
)
from decided_run import LATENCIES_US, OVER_FP32
from sample_run import make_run

from loka_onnx.report import ReportData

NASTY = (
    "x<img src=a onerror=\"document.title='owned'\"></script><script>document.title='owned'</script>'\"&lt;"
)


def site_rows(page) -> list[str]:
    return texts(page.locator("#sites details.table").first.locator("tbody th:visible"))


def noted(table) -> dict[str, str]:
    """The note below each row, by the row's name."""
    notes = table.evaluate(
        "t => [...t.querySelectorAll('tbody tr.note')].map(note => {"
        "let row = note; while (!row.querySelector('th')) row = row.previousElementSibling;"
        "return [row.querySelector('th').textContent, note.textContent] })"
    )
    return dict(notes)


def background(page) -> str:
    return page.evaluate("getComputedStyle(document.body).backgroundColor")


def draw_everything(page) -> None:
    page.evaluate("for (const d of document.querySelectorAll('details')) d.open = true")
    for plot in page.locator(".plot:visible").all():
        plot.scroll_into_view_if_needed()
        plot.locator(".main-svg").first.wait_for()


@pytest.mark.parametrize(
    ("which", "size"), [("report", DESKTOP), ("report", PHONE), ("undecided_report", PHONE)]
)
def test_it_loads_draws_fetches_nothing_and_is_as_wide_as_the_window(visit, request, which, size):
    """Tables scroll, and the page does not; the graph is seen as a whole."""
    file = request.getfixturevalue(which)
    opened = visit(file, size=size)
    draw_everything(opened.page)
    if which == "report":
        assert opened.page.locator(".plot:visible .main-svg").count() >= 2
    assert is_as_wide_as(opened.page, size)
    opened.page.locator(STAGE).scroll_into_view_if_needed()
    assert_all_inside(opened.page)
    opened.check(file)
    assert "default-src 'none'" in opened.page.locator("meta[http-equiv]").get_attribute("content")


def test_the_verdict_is_above_the_fold_and_what_it_means_a_click_away(visit, report):
    page = visit(report).page
    verdict = page.locator(".verdict").first
    said = verdict.locator("h2").inner_text()
    assert said.startswith("gpu: fp8-safe, 1.62× over BF16 (190.0 µs → 117.0 µs at 1,024), ΔNE +0.0012 % ± ")
    overview = page.locator("details.table").first
    assert texts(overview.locator("tbody th")) == ["gpu", "cpu", "rtx"]
    assert "1.62× over BF16" in overview.inner_text()
    assert not verdict.locator("li").first.is_visible()
    stats = dict(zip(texts(verdict.locator("dt")), texts(verdict.locator(".stats .figure")), strict=True))
    shown = [stats[name] for name in ("Speed over FP32", "ΔNE", "Budget", "Latency p50")]
    assert shown == [f"{OVER_FP32.value:.3f}×", "+0.0012 %", "0.02 %", f"{LATENCIES_US['fp8-safe']:.1f} µs"]
    # Of a laptop.
    assert verdict.locator(".budget svg").bounding_box()["y"] < 900


def test_every_candidate_is_in_the_chart_or_named_beside_it(visit, report):
    page = visit(report).page
    chart = page.locator("#chart-engines .chart:visible")
    chart.locator(".main-svg").first.wait_for()
    names = " ".join(chart.locator(".textpoint").all_text_contents())
    assert all(plan in names for plan in LATENCIES_US)
    legend = chart.locator(".legendtext").all_text_contents()
    assert legend == ["Pareto front", "within", "beyond", "emitted"]
    assert "budget 0.02 %" in chart.locator(".annotation-text").all_text_contents()
    # Different symbols, not only different colours.
    assert len({p.get_attribute("d") for p in chart.locator(".scatterlayer .point").all()}) == 3
    # The front joins what nothing beats.
    front = page.evaluate(
        "() => document.querySelector('#chart-engines .plot').data"
        ".filter(t => t.name === 'Pareto front').map(t => t.x)[0]"
    )
    assert front == [LATENCIES_US["fp8-all"], LATENCIES_US["fp8-safe"], LATENCIES_US["fp32"]]
    for name, wanted in (
        (
            "ctr on cpu",
            ("fp8-all: latency simulated: speed never counts", "fp32: nothing to compare it with"),
        ),
        ("ctr on rtx", ("nothing to draw", "rtx-tensorrt_rtx-sm89-fp8-safe: latency not measured")),
    ):
        page.locator("#chart-engines select").select_option(label=name)
        said = page.locator("#chart-engines .chart:visible").inner_text()
        assert all(text in said for text in wanted)


def place_of(table, head) -> int:
    return [cell.inner_text() for cell in table.locator("thead th").all()].index(head.inner_text())


def cells_of(table, column: int) -> list[str]:
    rows = table.locator("tbody tr:has(th)").all()
    return [row.locator("th, td").nth(column).inner_text() for row in rows]


def test_tables_sort_by_mouse_and_by_keyboard(visit, report):
    page = visit(report).page
    table = page.locator("#sites details.table").first.locator("table")
    unsorted = site_rows(page)
    reasons = noted(table)
    assert len(reasons) == len(unsorted) and len(set(reasons.values())) > 1
    head = table.locator("th", has_text=re.compile("^K$"))
    column = place_of(table, head)
    head.locator("button").click()
    assert head.get_attribute("aria-sort") == "ascending"
    shown = [int(text) for text in cells_of(table, column)]
    assert shown == sorted(shown) and len(set(shown)) > 1
    head.locator("button").press("Enter")
    assert head.get_attribute("aria-sort") == "descending"
    assert [int(text) for text in cells_of(table, column)] == shown[::-1]
    assert site_rows(page) != unsorted
    # Every reason stays below its own row.
    assert noted(table) == reasons
    head.locator("button").press("Space")
    assert head.get_attribute("aria-sort") == "none"
    assert site_rows(page) == unsorted


def test_infinite_values_stand_at_their_end_and_not_with_what_has_none(visit, report):
    page = visit(report).page
    table = page.locator("#engines details.table").first.locator("table")
    head = table.locator("th", has_text="Latency p50")
    column = place_of(table, head)
    # As Python writes them; two of a kind, whose difference is no number.
    table.evaluate(
        "(t, [column, values]) => [...t.tBodies[0].rows].filter(r => r.querySelector('th'))"
        ".forEach((row, i) => {"
        "row.cells[column].textContent = row.cells[column].dataset.value = values[i] ?? 'nan' })",
        [column, ["inf", "7", "-inf", "inf", "5"]],
    )
    for sorted_ in (["-inf", "5", "7", "inf", "inf"], ["inf", "inf", "7", "5", "-inf"]):
        head.locator("button").click()
        assert cells_of(table, column)[:5] == sorted_


def test_sites_are_filtered_and_counted(visit, report, data: ReportData):
    page = visit(report).page
    names = [site.name for site in data.modified.sites]
    tools = page.locator("#sites details.table").first.locator(".tools")
    for text, left in (
        ("", names),
        ("FC1", [names[1]]),
        # A word of the reason finds its site, too.
        ("nothing to gain", [names[2]]),
        ("", names),
    ):
        tools.locator("input").fill(text)
        assert site_rows(page) == left
        assert tools.locator("output").inner_text() == f"{len(left)} of 3 shown"
    for choices, left in (
        ({"verdict": "unsafe"}, [names[1]]),
        ({"speed": "fast"}, [names[0]]),
        ({"precision": "fp8"}, [names[0]]),
        ({"speed": "slow", "verdict": "safe"}, []),
    ):
        for choice in ("verdict", "speed", "precision"):
            tools.locator(f"select[data-choice='{choice}']").select_option(choices.get(choice, ""))
        assert site_rows(page) == left
        assert tools.locator("output").inner_text() == f"{len(left)} of 3 shown"


def test_a_site_is_chosen_by_its_row_by_the_list_and_by_the_event(visit, report, data: ReportData):
    opened = visit(report)
    page, panel = opened.page, opened.page.locator("#site-panel")
    first, second, _ = (site.name for site in data.modified.sites)
    page.evaluate(HEAR)

    def chosen() -> tuple[str, str]:
        value = panel.locator("#site-choice").input_value()
        row = table.locator("tr[aria-current]").locator("th")
        return panel.locator(f"#site-choice option[value='{value}']").inner_text(), row.inner_text()

    table = page.locator("#sites details.table").first
    # Anywhere in the row, the note included.
    table.locator("tr.note").nth(1).click()
    assert chosen() == (second, second)
    assert "unsafe" in panel.locator("#site-reason").inner_text()
    panel.locator("#site-choice").select_option(first)
    assert chosen() == (first, first)
    assert page.evaluate("() => heard") == [second, first]
    # A name that no site has changes nothing.
    for name in (second, "no"):
        page.evaluate(
            "name => document.dispatchEvent(new CustomEvent('loka:site', { detail: { site: name } }))", name
        )
        assert chosen() == (second, second)
    assert opened.said == []


def test_the_histogram_lies_over_the_range_of_the_format(visit, report, data: ReportData):
    page = visit(report).page
    draw(page, "#site-plot")
    figure = page.evaluate(
        "() => { const p = document.querySelector('#site-plot');"
        "return { x: p.data[0].x, width: p.data[0].width, y: p.data[0].y, shapes: p.layout.shapes } }"
    )
    histogram = data.profile.sites[0].operands["dense"].histogram
    shares = [y * width / 100 for y, width in zip(figure["y"], figure["width"], strict=True)]
    assert shares == pytest.approx([count / histogram.total for count in histogram.counts])
    assert 2 ** (figure["x"][0] - figure["width"][0] / 2) == pytest.approx(histogram.edges[0])
    # E4M3FN: half of 2**-9, 2**-6 and 448, each times the scale.
    bounds = [2 ** shape["x1"] for shape in figure["shapes"][:3]]
    assert bounds == pytest.approx([bound * 6.0 / 448 for bound in (2**-10, 2**-6, 448)])
    facts = facts_of(page)
    told = [facts[name] for name in ("Format", "Underflowed to zero", "Saturated")]
    assert told == ["E4M3FN", "0.5 %", "0.2 %"]
    kind = "() => document.querySelector('#site-plot').layout.yaxis.type"
    assert page.evaluate(kind) == "linear"
    page.locator("#site-log").check()
    wait_until(page, "document.querySelector('#site-plot').layout.yaxis.type === 'log'")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_theme_is_that_of_the_system_until_it_is_chosen(visit, report, scheme):
    opened = visit(report, scheme=scheme)
    page = opened.page
    colors = {"light": "rgb(255, 255, 255)", "dark": "rgb(16, 19, 23)"}
    assert background(page) == colors[scheme]
    button = page.locator("#theme")
    for name, color in {**colors, "system": colors[scheme]}.items():
        button.click()
        assert (button.inner_text(), background(page)) == (f"Theme: {name}", color)
    button.click()
    button.click()
    # Plots follow: their text has the colour of the page's.
    page.locator("#chart-engines .plot:visible .main-svg").first.wait_for()
    ink = page.evaluate("getComputedStyle(document.body).color")
    assert ink == "rgb(231, 234, 238)"
    text = page.locator("#chart-engines .plot:visible .xtitle")
    assert text.evaluate("e => getComputedStyle(e).fill") == ink
    # Remembered where there is storage, which is written behind the page's back: it is there after a while.
    for _ in range(20):
        page.reload()
        if button.inner_text() == "Theme: dark":
            break
        page.wait_for_timeout(200)
    assert (button.inner_text(), background(page)) == ("Theme: dark", colors["dark"])
    assert opened.said == []


def test_the_theme_works_without_storage(visit, report, tmp_path):
    """As where a browser forbids it to files."""
    broken = tmp_path / "report.html"
    forbid = (
        "<script>Object.defineProperty(window, 'localStorage',"
        " { get() { throw new DOMException('denied', 'SecurityError') } })</script>"
    )
    broken.write_text(report.read_text().replace("<title>", f"{forbid}<title>", 1))
    opened = visit(broken)
    opened.page.locator("#theme").click()
    opened.page.locator("#theme").click()
    assert background(opened.page) == "rgb(16, 19, 23)"
    assert opened.said == []


def test_names_are_text_whatever_is_in_them(visit, tmp_path):
    run = make_run(tmp_path / "run", prefix=NASTY)
    path = written(run.report, tmp_path / "report")
    opened = visit(path)
    page = opened.page
    draw_everything(page)
    names = [site.name for site in run.report.modified.sites]
    assert site_rows(page) == names
    page.locator("#site-choice").select_option(names[1])
    assert page.locator("#sites tr[aria-current] th").first.inner_text() == names[1]
    page.locator("#graph-query").fill("fc1")
    assert NASTY in page.locator("#model-graph .graph-detail").inner_text()
    assert page.locator("main img").count() == 0
    assert page.title() == run.report.title
    opened.check(path)


def test_paper_is_white_and_has_every_row_and_no_controls(visit, report):
    page = visit(report, scheme="dark").page
    draw_everything(page)
    for _ in range(2):
        page.locator("#theme").click()
    table = page.locator("#sites details.table").first
    table.evaluate("e => { e.open = false }")
    pdf = page.pdf()
    assert pdf.startswith(b"%PDF") and len(pdf) > 50_000
    # Afterwards it is as it was.
    assert table.get_attribute("open") is None
    page.emulate_media(media="print")
    assert background(page) == "rgb(255, 255, 255)"
    assert page.evaluate("getComputedStyle(document.body).color") == "rgb(22, 25, 29)"
    for control in ("#theme", ".bar", ".tools", "#chart-engines select"):
        assert not page.locator(control).first.is_visible()
    regions = page.locator(".wide").all()
    assert regions
    assert all(r.evaluate("e => e.scrollHeight <= e.clientHeight + 1") for r in regions)


def test_a_site_has_bars_of_its_error_and_its_effect(visit, report):
    page = visit(report).page
    bars = page.locator("#sites details.table").first.locator("td[style^='--bar']")
    assert bars.count() >= 4
    for bar in bars.all():
        share = float(bar.get_attribute("style").removeprefix("--bar: ").removesuffix("%"))
        assert 0 < share <= 100 and "gradient" in bar.evaluate("e => getComputedStyle(e).backgroundImage")


def test_without_scripts_every_table_and_the_graph_are_there(visit, report, data: ReportData):
    page = visit(report, javascript=False).page
    assert site_rows(page) == [site.name for site in data.modified.sites]
    assert page.locator("#model-graph .node").first.is_visible()
    chart = page.locator("#chart-engines .chart:visible")
    assert "The drawing needs scripts; the tables have all of its numbers." in chart.inner_text()
    # What leads nowhere is not offered.
    for tool in (
        page.locator("#theme, #site-panel, #graph-query, #chart-engines select"),
        chart.locator(".plot"),
    ):
        assert tool.count() and not any(each.is_visible() for each in tool.all())
