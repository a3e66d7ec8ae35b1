"""The model graph as a reader has it: it is drawn, moves, finds, tells, and agrees with the tables."""

from __future__ import annotations

import json

import pytest
from browser_pages import HEAR, STAGE, assert_all_inside, wait_until

ROOT = "#model-graph"


@pytest.fixture
def page(visit, report):
    opened = visit(report)
    opened.page.locator(STAGE).scroll_into_view_if_needed()
    yield opened.page
    opened.check(report)


def node(page, name: str):
    names = [item["name"] for item in json.loads(page.locator("#graph-data").inner_text())]
    return page.locator(f"{ROOT} [data-node='{names.index(name)}']")


def box_of(page, name: str) -> tuple[float, float, float]:
    """Middle and width of the box of a node on the screen."""
    box = node(page, name).locator("rect").first.bounding_box()
    return box["x"] + box["width"] / 2, box["y"] + box["height"] / 2, box["width"]


def is_in_the_middle(page, name: str) -> bool:
    stage, (x, y, _) = page.locator(STAGE).bounding_box(), box_of(page, name)
    middle = (stage["x"] + stage["width"] / 2, stage["y"] + stage["height"] / 2)
    return (x, y) == (pytest.approx(middle[0], abs=3), pytest.approx(middle[1], abs=3))


def selected(page) -> str:
    return page.locator(ROOT).get_attribute("data-selected") or ""


def color_of(page, name: str, property: str = "stroke") -> str:
    return node(page, name).locator("rect").first.evaluate(f"e => getComputedStyle(e).{property}")


def test_sites_differ_by_colour_shape_and_border(page):
    names = ("over_arch.fc0", "over_arch.fc1", "over_arch.fc2")
    assert [color_of(page, name) for name in names] == [
        "rgb(20, 122, 72)", "rgb(192, 52, 43)", "rgb(92, 102, 117)",
    ]  # fmt: skip
    marks = [node(page, name).locator("use").get_attribute("href") for name in names]
    assert marks == ["#mark-safe", "#mark-unsafe", "#mark-not-judged"]
    assert len({color_of(page, name, "strokeDasharray") for name in names}) == 2
    legend = page.locator(f"{ROOT} .graph-legend li").all_inner_texts()
    assert [text.strip() for text in legend] == ["safe", "unsafe", "not judged", "no site"]


def test_buttons_keys_and_the_mouse_zoom_move_and_fit(page):
    fitted = box_of(page, "dense")
    page.get_by_role("button", name="Zoom in").click()
    assert box_of(page, "dense")[2] == pytest.approx(1.4 * fitted[2], rel=0.02)
    page.get_by_role("button", name="Zoom out").click()
    assert box_of(page, "dense") == pytest.approx(fitted, abs=1)
    page.locator(STAGE).focus()
    page.keyboard.press("+")
    wide = box_of(page, "dense")
    assert wide[2] > fitted[2]
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowDown")
    moved = box_of(page, "dense")
    assert moved[0] < wide[0] and moved[1] < wide[1]
    page.keyboard.press("0")
    assert box_of(page, "dense") == pytest.approx(fitted, abs=1)
    box = page.locator(STAGE).bounding_box()
    x, y = box["x"] + 40, box["y"] + 40
    page.mouse.move(x, y)
    page.mouse.down()
    page.mouse.move(x + 60, y + 50, steps=5)
    page.mouse.up()
    assert box_of(page, "dense")[:2] == pytest.approx((fitted[0] + 60, fitted[1] + 50), abs=2)
    # A drag chooses nothing.
    assert not selected(page)


def test_the_wheel_scrolls_the_page_until_the_reader_turns_to_the_drawing(page):
    x, y, before = box_of(page, "over_arch.fc0")
    page.mouse.move(x, y)
    top = page.evaluate("scrollY")
    page.mouse.wheel(0, -40)
    page.locator(f"{ROOT} .graph-hint").wait_for()
    wait_until(page, f"scrollY < {top}")
    x, y, after = box_of(page, "over_arch.fc0")
    assert after == before
    page.mouse.click(x, y)
    page.mouse.wheel(0, -200)
    page.wait_for_timeout(100)
    # What lies under the pointer stays there.
    assert box_of(page, "over_arch.fc0")[:2] == pytest.approx((x, y), abs=2)
    assert box_of(page, "over_arch.fc0")[2] > 1.3 * before


def test_the_search_finds_sites_operators_and_verdicts_and_goes_through_them(page):
    page.evaluate(HEAR)
    query, output = page.locator("#graph-query"), page.locator(f"{ROOT} output")
    query.fill("dense")
    query.fill("matmul")
    for place, name in ((1, "fc0"), (2, "fc1"), (3, "fc2"), (1, "fc0")):
        assert (output.inner_text(), selected(page)) == (f"{place} of 3", f"over_arch.{name}")
        query.press("Enter")
    page.locator(ROOT).get_by_role("button", name="Next").click()
    assert output.inner_text() == "3 of 3"
    # "safe" is a verdict, and no part of "unsafe".
    for text, name in (("fc1", "fc1"), ("safe", "fc0"), ("fp8", "fc0"), ("unsafe", "fc1")):
        query.fill(text)
        assert (output.inner_text(), selected(page)) == ("1 of 1", f"over_arch.{name}")
        assert is_in_the_middle(page, f"over_arch.{name}")
    assert page.evaluate("heard.at(-1)") == "over_arch.fc1"
    assert "over_arch.fc1: unsafe" in page.locator("#site-reason").inner_text()
    query.fill("no such thing")
    assert output.inner_text() == "none"


def test_the_keyboard_chooses_and_goes_along_the_data(page):
    page.locator("#graph-query").fill("fc0")
    page.locator("#graph-query").press("Tab")
    page.locator(STAGE).focus()
    # What the keys do is said to whoever comes by keyboard.
    assert "Enter chooses" in page.locator(f"{ROOT} .graph-hint").inner_text()
    page.keyboard.press("n")
    after = selected(page)
    assert after != "over_arch.fc0"
    page.keyboard.press("p")
    assert selected(page) == "over_arch.fc0" and is_in_the_middle(page, "over_arch.fc0")
    # A neighbour is a button below the drawing, which leads back into it.
    detail = page.locator(f"{ROOT} .graph-detail")
    assert "read by" in detail.inner_text()
    detail.get_by_role("button", name=after, exact=True).press("Enter")
    assert selected(page) == after and is_in_the_middle(page, after)
    assert page.evaluate("document.activeElement.className") == "graph-stage"
    # Enter chooses what the arrow keys have brought to the middle.
    (x, y, _), (to_x, to_y, _) = box_of(page, after), box_of(page, "over_arch.fc0")
    for distance, keys in ((to_y - y, ("ArrowUp", "ArrowDown")), (to_x - x, ("ArrowLeft", "ArrowRight"))):
        for _ in range(round(abs(distance) / 60)):
            page.keyboard.press(keys[distance > 0])
    page.keyboard.press("Enter")
    assert selected(page) == "over_arch.fc0"


def test_a_click_tells_of_a_node_and_names_its_site_to_the_page(page):
    page.evaluate(HEAR)
    page.mouse.click(*box_of(page, "over_arch.fc1")[:2])
    lines = [line for line in page.locator(f"{ROOT} .graph-detail").inner_text().splitlines() if line]
    assert lines[:4] == [
        "over_arch.fc1",
        "MatMul · in over_arch",
        "unsafe · fp32",
        "KL alone would take the budget",
    ]
    # Where the data comes from and goes to.
    assert [line.split()[0] for line in lines[4:]] == ["reads", "read"]
    # Under the pointer stands the same, by the browser's own means.
    assert "KL alone would take the budget" in node(page, "over_arch.fc1").locator("title").inner_html()
    row = page.locator("#sites details.table").first.locator("tr", has_text="over_arch.fc1").first
    assert "selected" in row.get_attribute("class")
    # What was clicked stays where it was; an operator that is no site is named to nobody.
    place, operator = box_of(page, "dense"), page.locator(f"{ROOT} .node.bare.operator").first
    operator.click()
    assert page.evaluate("heard") == ["over_arch.fc1"]
    assert selected(page) not in ("", "over_arch.fc1") and box_of(page, "dense") == place
    # A site that the page names is centred without an echo.
    page.locator("#sites button[data-site='over_arch.fc2']").first.click()
    assert page.evaluate("heard") == ["over_arch.fc1", "over_arch.fc2"]
    assert selected(page) == "over_arch.fc2" and is_in_the_middle(page, "over_arch.fc2")


def test_paper_gets_the_whole_graph_in_light_colours_and_the_reader_the_view_of_before(visit, report):
    page = visit(report, scheme="dark").page
    page.locator("#graph-query").fill("fc1")
    before = box_of(page, "over_arch.fc1")
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    page.emulate_media(media="print")
    assert color_of(page, "over_arch.fc0") == "rgb(20, 122, 72)"
    assert_all_inside(page)
    page.emulate_media(media="screen")
    page.evaluate("dispatchEvent(new Event('afterprint'))")
    assert box_of(page, "over_arch.fc1") == pytest.approx(before, abs=2)
