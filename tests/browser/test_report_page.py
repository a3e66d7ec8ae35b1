"""The page as a reader has it: every control does what it says, nothing is fetched, nothing fails."""

from __future__ import annotations

import re

import pytest
from browser_pages import PHONE, draw, facts_of, fits_a_phone, texts, written
from decided_run import LATENCIES_US, OVER_BF16, OVER_FP32
from sample_run import make_run

from loka_onnx.report import ReportData

THEMES = ("system", "light", "dark")
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


def wait_until_reloaded_as(page, label: str) -> None:
    """Storage is written behind the page's back: it is there after a while."""
    for _ in range(20):
        page.reload()
        if page.locator("#theme").inner_text() == label:
            return
        page.wait_for_timeout(200)
    pytest.fail(f"after 20 times, the button does not say '{label}'")


def draw_everything(page) -> None:
    page.evaluate("for (const d of document.querySelectorAll('details')) d.open = true")
    for index in range(page.locator(".plot:visible").count()):
        plot = page.locator(".plot:visible").nth(index)
        plot.scroll_into_view_if_needed()
        plot.locator(".main-svg").first.wait_for()


def test_it_loads_draws_and_fetches_nothing(visit, report):
    opened = visit(report)
    draw_everything(opened.page)
    assert opened.page.locator(".plot:visible .main-svg").count() >= 2
    opened.check(report)
    assert "default-src 'none'" in opened.page.locator("meta[http-equiv]").get_attribute("content")


def test_the_verdict_says_which_engine_how_much_faster_and_at_what_cost(visit, report):
    page = visit(report).page
    verdict = page.locator(".verdict").first
    said = verdict.locator("h2").inner_text()
    assert said.startswith("gpu: fp8-safe, 1.62× over BF16 (190.0 µs → 117.0 µs at 1,024), ΔNE +0.0012 % ± ")
    overview = page.locator("details.table").first
    assert texts(overview.locator("tbody th")) == ["gpu", "cpu", "rtx"]
    assert "1.62× over BF16" in overview.inner_text()
    # What it means in words is a click away.
    assert not verdict.locator("li").first.is_visible()
    stats = dict(zip(texts(verdict.locator("dt")), texts(verdict.locator(".stats .figure")), strict=True))
    assert stats["Speed over FP32"] == f"{OVER_FP32.value:.3f}×"
    assert stats["Speed over BF16"] == f"{OVER_BF16.value:.3f}×"
    assert stats["ΔNE"] == "+0.0012 %"
    assert stats["Budget"] == "0.02 %"
    assert stats["Latency p50"] == f"{LATENCIES_US['fp8-safe']:.1f} µs"
    notes = " ".join(texts(verdict.locator(".stats .note")))
    assert "[1.581, 1.660], measured, over gpu-onnxruntime-sm90-bf16" in notes
    assert "within; the upper end is at 32 % of it" in notes
    # Above the fold of a laptop.
    assert verdict.locator(".budget svg").bounding_box()["y"] < 900


def test_the_bar_has_the_interval_inside_of_the_budget(visit, report):
    svg = visit(report).page.locator(".budget.within svg").first
    places = {
        name: svg.locator(f".{name}").first.bounding_box() for name in ("interval", "limit", "zero", "inside")
    }
    interval, limit, zero = places["interval"], places["limit"], places["zero"]
    assert interval["x"] < zero["x"] < interval["x"] + interval["width"] < limit["x"]
    # The upper end is at 32 % of the budget.
    part = (interval["x"] + interval["width"] - zero["x"]) / (limit["x"] - zero["x"])
    assert part == pytest.approx(0.32, abs=0.02)
    assert "within against the budget of 0.02 %" in svg.get_attribute("aria-label")


def test_every_candidate_is_in_the_chart_or_named_beside_it(visit, report):
    page = visit(report).page
    chart = page.locator("#chart-engines .chart:visible")
    chart.locator(".main-svg").first.wait_for()
    names = " ".join(chart.locator(".textpoint").all_text_contents())
    for plan in LATENCIES_US:
        assert plan in names
    legend = chart.locator(".legendtext").all_text_contents()
    assert legend == ["Pareto front", "within", "beyond", "emitted"]
    assert "budget 0.02 %" in chart.locator(".annotation-text").all_text_contents()
    # Different symbols, not only different colours.
    paths = {p.get_attribute("d") for p in chart.locator(".scatterlayer .point").all()}
    assert len(paths) == 3
    # The front joins what nothing beats.
    front = page.evaluate(
        "() => document.querySelector('#chart-engines .plot').data"
        ".filter(t => t.name === 'Pareto front').map(t => t.x)[0]"
    )
    assert front == [LATENCIES_US["fp8-all"], LATENCIES_US["fp8-safe"], LATENCIES_US["fp32"]]
    for name, wanted in (
        ("ctr on cpu", "cpu-onnxruntime-cpu-fp8-all: latency simulated: speed never counts"),
        ("ctr on cpu", "cpu-onnxruntime-cpu-bf16"),
        ("ctr on cpu", "cpu-onnxruntime-cpu-fp32: nothing to compare it with"),
        ("ctr on rtx", "nothing to draw"),
        ("ctr on rtx", "rtx-tensorrt_rtx-sm89-fp8-safe: latency not measured"),
    ):
        page.locator("#chart-engines select").select_option(label=name)
        assert wanted in page.locator("#chart-engines .chart:visible").inner_text()


def test_tables_sort_by_mouse_and_by_keyboard(visit, report):
    page = visit(report).page
    table = page.locator("#sites details.table").first.locator("table")
    unsorted = site_rows(page)
    reasons = noted(table)
    assert len(reasons) == len(unsorted) and len(set(reasons.values())) > 1
    head = table.locator("th", has_text=re.compile("^K$"))
    column = [cell.inner_text() for cell in table.locator("thead th").all()].index(head.inner_text())

    def values() -> list[int]:
        rows = table.locator("tbody tr:has(th)").all()
        return [int(row.locator("th, td").nth(column).inner_text()) for row in rows]

    head.locator("button").click()
    assert head.get_attribute("aria-sort") == "ascending"
    shown = values()
    assert shown == sorted(shown) and len(set(shown)) > 1
    head.locator("button").press("Enter")
    assert head.get_attribute("aria-sort") == "descending" and values() == shown[::-1]
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
    column = [cell.inner_text() for cell in table.locator("thead th").all()].index(head.inner_text())
    # As Python writes them; two of a kind, whose difference is no number.
    table.evaluate(
        "(t, [column, values]) => [...t.tBodies[0].rows].filter(r => r.querySelector('th'))"
        ".forEach((row, i) => {"
        "row.cells[column].textContent = row.cells[column].dataset.value = values[i] ?? 'nan' })",
        [column, ["inf", "7", "-inf", "inf", "5"]],
    )

    def cells() -> list[str]:
        rows = table.locator("tbody tr:has(th)").all()[:5]
        return [row.locator("th, td").nth(column).inner_text() for row in rows]

    head.locator("button").click()
    assert cells() == ["-inf", "5", "7", "inf", "inf"]
    head.locator("button").click()
    assert cells() == ["inf", "inf", "7", "5", "-inf"]


def test_sites_are_filtered_and_counted(visit, report, data: ReportData):
    page = visit(report).page
    names = [site.name for site in data.modified.sites]
    tools = page.locator("#sites details.table").first.locator(".tools")
    assert tools.locator("output").inner_text() == "3 of 3 shown"
    assert site_rows(page) == names
    tools.locator("input").fill("FC1")
    assert site_rows(page) == [names[1]]
    assert tools.locator("output").inner_text() == "1 of 3 shown"
    # A word of the reason finds its site, too.
    tools.locator("input").fill("nothing to gain")
    assert site_rows(page) == [names[2]]
    tools.locator("input").fill("")
    for choice, value, left in (
        ("verdict", "unsafe", [names[1]]),
        ("speed", "fast", [names[0]]),
        ("precision", "fp8", [names[0]]),
    ):
        select = tools.locator(f"select[data-choice='{choice}']")
        select.select_option(value)
        assert site_rows(page) == left
        select.select_option("")
    tools.locator("select[data-choice='speed']").select_option("slow")
    tools.locator("select[data-choice='verdict']").select_option("safe")
    assert site_rows(page) == []
    assert tools.locator("output").inner_text() == "0 of 3 shown"


def test_a_site_is_chosen_by_its_row_by_the_list_and_by_the_event(visit, report, data: ReportData):
    opened = visit(report)
    page = opened.page
    names = [site.name for site in data.modified.sites]
    panel = page.locator("#site-panel")
    page.evaluate(
        "() => { window.heard = []; document.addEventListener('loka:site', e => heard.push(e.detail.site)) }"
    )

    def chosen() -> str:
        value = panel.locator("#site-choice").input_value()
        return panel.locator(f"#site-choice option[value='{value}']").inner_text()

    assert chosen() == names[0]
    table = page.locator("#sites details.table").first
    # Anywhere in the row, the note included.
    table.locator("tr.note").nth(1).click()
    assert chosen() == names[1]
    assert "unsafe" in panel.locator("#site-reason").inner_text()
    assert table.locator("tr[aria-current]").locator("th").inner_text() == names[1]
    panel.locator("#site-choice").select_option(names[0])
    assert table.locator("tr[aria-current]").locator("th").inner_text() == names[0]
    assert page.evaluate("() => heard") == [names[1], names[0]]
    page.evaluate(
        "name => document.dispatchEvent(new CustomEvent('loka:site', { detail: { site: name } }))", names[1]
    )
    assert chosen() == names[1]
    # A name that no site has changes nothing.
    page.evaluate("() => document.dispatchEvent(new CustomEvent('loka:site', { detail: { site: 'no' } }))")
    assert chosen() == names[1]
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
    scale = 6.0 / 448
    assert [2 ** shape["x1"] for shape in figure["shapes"][:3]] == pytest.approx(
        [2**-10 * scale, 2**-6 * scale, 448 * scale]
    )
    facts = facts_of(page)
    assert [facts[name] for name in ("Format", "Underflowed to zero", "Saturated")] == [
        "E4M3FN",
        "0.5 %",
        "0.2 %",
    ]
    kinds = []
    for _ in range(2):
        kinds.append(page.evaluate("() => document.querySelector('#site-plot').layout.yaxis.type"))
        page.locator("#site-log").check()
        page.wait_for_timeout(200)
    assert kinds == ["linear", "log"]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_theme_is_that_of_the_system_until_it_is_chosen(visit, report, scheme):
    opened = visit(report, scheme=scheme)
    page = opened.page
    colors = {"light": "rgb(255, 255, 255)", "dark": "rgb(16, 19, 23)"}
    assert background(page) == colors[scheme]
    button = page.locator("#theme")
    seen = {}
    for name in ("light", "dark", "system"):
        button.click()
        assert button.inner_text() == f"Theme: {name}"
        seen[name] = background(page)
    assert seen == {**colors, "system": colors[scheme]}
    # Plots follow: their text has the colour of the page's.
    page.locator("#chart-engines .plot:visible .main-svg").first.wait_for()
    for _ in range(2):
        button.click()
    ink = page.evaluate("getComputedStyle(document.body).color")
    assert ink == "rgb(231, 234, 238)"
    text = page.locator("#chart-engines .plot:visible .xtitle")
    assert text.evaluate("e => getComputedStyle(e).fill") == ink
    # Remembered where there is storage.
    wait_until_reloaded_as(page, "Theme: dark")
    assert background(page) == colors["dark"]
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


def test_a_phone_scrolls_tables_and_not_the_page(visit, report, undecided_report):
    for path in (report, undecided_report):
        opened = visit(path, size=PHONE)
        draw_everything(opened.page)
        assert fits_a_phone(opened.page)
        opened.check(path)


def test_paper_is_white_and_has_every_row_and_no_controls(visit, report):
    opened = visit(report, scheme="dark")
    page = opened.page
    draw_everything(page)
    page.locator("#theme").click()
    page.locator("#theme").click()
    page.locator("#sites details.table").first.evaluate("e => { e.open = false }")
    pdf = page.pdf()
    assert pdf.startswith(b"%PDF") and len(pdf) > 50_000
    # Afterwards it is as it was.
    assert page.locator("#sites details.table").first.get_attribute("open") is None
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


def test_without_scripts_every_table_is_there(visit, report, data: ReportData):
    page = visit(report, javascript=False).page
    assert site_rows(page) == [site.name for site in data.modified.sites]
    assert not page.locator("#theme").is_visible()
    assert not page.locator("#site-panel").is_visible()
