"""Readers without a mouse or with a screen reader, and tables of a thousand sites."""

from __future__ import annotations

import pytest
from browser_pages import DESKTOP, PHONE, texts

SERIOUS = {"serious", "critical"}


@pytest.mark.parametrize(
    ("which", "scheme", "size"),
    [
        ("report", "light", DESKTOP),
        ("report", "dark", DESKTOP),
        ("report", "dark", PHONE),
        ("undecided_report", "light", PHONE),
        ("undecided_report", "dark", DESKTOP),
    ],
    ids=str,
)
def test_nothing_serious(visit, request, which, scheme, size):
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="needs chromium and axe-core")
    page = visit(request.getfixturevalue(which), scheme=scheme, size=size).page
    page.evaluate("for (const d of document.querySelectorAll('details')) d.open = true")
    # A run in which no two candidates can be compared has none.
    for plot in page.locator(".plot:visible").all()[:1]:
        plot.scroll_into_view_if_needed()
        plot.locator(".main-svg").first.wait_for()
    found = axe.Axe().run(page)
    serious = [
        f"{v['id']}: {v['help']}: {node['target']} {node['html'][:200]}"
        for v in found.response["violations"]
        if v["impact"] in SERIOUS
        for node in v["nodes"][:3]
    ]
    assert serious == []
    # It looked: a page that it could not read has no results at all.
    assert len(page.locator("main table").all()) > 5


_STOP = """() => {
  const element = document.activeElement;
  const box = element.getBoundingClientRect();
  // A tall region is seen in part: of it, what lies in the window counts.
  const clip = (low, high, end) => (Math.max(low, 0) + Math.min(high, end)) / 2;
  const x = clip(box.left, box.right, innerWidth);
  const seen = element.matches('.wide, .graph-stage')
    ? [[x, clip(box.top, box.bottom, innerHeight)]]
    : [[box.left + 1, box.top + 2], [x, (box.top + box.bottom) / 2], [box.right - 1, box.bottom - 2]];
  const covers = seen
    .map(([x, y]) => document.elementFromPoint(x, y))
    .filter(top => !top || !(element.contains(top) || top.contains(element)));
  return {
    what: element === document.body ? 'body' : element.matches('button.site') ? `site ${element.dataset.site}`
      : element.matches('.sort') ? `sort ${element.textContent}` : element.id ? `#${element.id}`
      : element.matches('.bar a') ? element.getAttribute('href') : element.className || element.localName,
    box: [box.left, box.top, box.right, box.bottom].map(Math.round).join(' '),
    section: element.closest('section')?.id ?? '',
    covered: covers.map(top => top ? top.outerHTML.slice(0, 80) : 'outside of the window'),
  };
}"""


def stop(page) -> dict:
    """What has the focus, and what lies over it."""
    # A scroll of the page that follows the focus is over with the next frames.
    page.evaluate("() => new Promise(r => requestAnimationFrame(() => requestAnimationFrame(r)))")
    return page.evaluate(_STOP)


def test_the_tab_key_leads_through_the_page_and_nothing_covers_where_it_is(visit, report):
    opened = visit(report)
    page, met = opened.page, []
    while "graph-stage" not in met and len(met) < 400:
        page.keyboard.press("Tab")
        now = stop(page)
        assert now["covered"] == [], now
        met.append(now["what"])
    # In the order of the page: sections, theme, filter, heads, rows, the search of the graph, the graph.
    wanted = [
        *("#verdict", "#sites", "#theme", "sort Site", "site over_arch.fc0", "site over_arch.fc1"),
        *("#graph-query", "graph-stage"),
    ]
    assert [what for what in dict.fromkeys(met) if what in wanted] == wanted
    page.keyboard.press("Escape")
    assert stop(page)["what"] == "body"
    # On from where the reader was, and not from the top.
    page.keyboard.press("Tab")
    assert stop(page)["section"] not in {"", "verdict"}
    opened.check(report)


def test_the_head_of_a_table_does_not_cover_what_shift_tab_leads_to(visit, large_report):
    page = visit(large_report).page
    buttons = page.locator("#sites details.table:has(.tools) tbody button.site")
    buttons.nth(40).focus()
    for index in range(39, -1, -1):
        page.keyboard.press("Shift+Tab")
        assert page.evaluate("document.activeElement.dataset.site") == buttons.nth(index).inner_text()
        assert stop(page)["covered"] == []


def test_the_heads_of_a_table_that_is_scrolled_to_its_side_are_not_covered(visit, large_report):
    page = visit(large_report, size=(900, 700)).page
    region = page.locator("#sites details.table:has(.tools) .wide")
    heads = region.locator("thead .sort")
    heads.last.focus()
    assert region.evaluate("e => e.scrollLeft") > 0
    for _ in range(heads.count() - 1):
        page.keyboard.press("Shift+Tab")
        assert stop(page)["covered"] == []
    # A head that stays where it is scrolls nothing.
    region.evaluate("e => { e.scrollLeft = 50; e.scrollTop = 300 }")
    heads.nth(3).focus()
    assert region.evaluate("e => e.scrollTop") == 300


SITES = "#sites details.table:has(.tools)"


def test_a_filter_finds_and_counts_in_the_order_of_the_reader(visit, large_report) -> None:
    opened = visit(large_report)
    page = opened.page
    table = page.locator(SITES)

    def shown(count: int) -> list[str]:
        assert table.locator("output").inner_text() == f"{count} of 1000 shown"
        return texts(table.locator("tbody th:visible"))

    assert len(shown(1000)) == 1000
    button = table.locator("thead th button").first
    button.click()
    button.click()
    assert shown(1000)[:2] == ["tower.099.fc9", "tower.099.fc8"]
    # Each note still stands below its row.
    assert page.evaluate(
        "selector => [...document.querySelector(selector).querySelectorAll('tr.note')]"
        ".every(note => !note.previousElementSibling.classList.contains('note'))",
        SITES,
    )
    table.locator(".tools input").fill("tower.099")
    assert shown(10) == [f"tower.099.fc{i}" for i in reversed(range(10))]
    table.locator(".tools input").fill("")
    assert shown(1000)
    opened.check(large_report)


def test_a_chosen_site_is_in_sight_and_one_that_is_filtered_out_moves_nothing(visit, large_report) -> None:
    page = visit(large_report).page
    row, region = page.locator(f"{SITES} tr[aria-current]"), page.locator(f"{SITES} .wide")
    page.locator("#site-choice").select_option("tower.099.fc9")
    assert row.locator("th").inner_text() == "tower.099.fc9"
    box = region.bounding_box()
    assert box["y"] <= row.bounding_box()["y"] < box["y"] + box["height"]
    page.locator(f"{SITES} .tools select").first.select_option("fp8")
    region.evaluate("e => { e.scrollTop = 900 }")
    page.locator("#site-choice").select_option("tower.099.fc8")
    assert row.is_hidden()
    assert region.evaluate("e => e.scrollTop") == 900
