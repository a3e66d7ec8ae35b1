"""Readers without a mouse or with a screen reader, and tables of a thousand sites."""

from __future__ import annotations

import pytest
from browser_pages import DESKTOP, PHONE

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
    page = opened.page
    met = []
    for _ in range(400):
        page.keyboard.press("Tab")
        now = stop(page)
        assert now["covered"] == [], now
        met.append(now["what"])
        if now["what"] == "graph-stage":
            break
    # In the order of the page: sections, theme, filter, heads, rows, the search of the graph, the graph.
    wanted = [
        "#verdict",
        "#sites",
        "#theme",
        "sort Site",
        "site over_arch.fc0",
        "site over_arch.fc1",
        "#graph-query",
        "graph-stage",
    ]
    assert [what for what in dict.fromkeys(met) if what in wanted] == sorted(wanted, key=met.index)
    assert set(wanted) <= set(met)
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


@pytest.fixture
def page(visit, large_report):
    opened = visit(large_report)
    yield opened.page
    opened.check(large_report)


def counted(page) -> str:
    return page.locator(f"{SITES} output").inner_text()


def names(page) -> list[str]:
    return [text.strip() for text in page.locator(f"{SITES} tbody th:visible").all_inner_texts()]


def test_a_filter_finds_and_counts_in_the_order_of_the_reader(page) -> None:
    assert (len(names(page)), counted(page)) == (1000, "1000 of 1000 shown")
    button = page.locator(f"{SITES} thead th button").first
    button.click()
    button.click()
    assert names(page)[:2] == ["tower.099.fc9", "tower.099.fc8"]
    # Each note still stands below its row.
    assert page.evaluate(
        "selector => [...document.querySelector(selector).querySelectorAll('tr.note')]"
        ".every(note => !note.previousElementSibling.classList.contains('note'))",
        SITES,
    )
    page.locator(f"{SITES} .tools input").fill("tower.099")
    assert names(page) == [f"tower.099.fc{i}" for i in reversed(range(10))]
    assert counted(page) == "10 of 1000 shown"
    page.locator(f"{SITES} .tools input").fill("")
    assert counted(page) == "1000 of 1000 shown"


def test_a_chosen_site_is_in_sight(page) -> None:
    page.locator("#site-choice").select_option("tower.099.fc9")
    row = page.locator(f"{SITES} tr[aria-current]")
    assert row.locator("th").inner_text() == "tower.099.fc9"
    region = page.locator(f"{SITES} .wide").bounding_box()
    assert region["y"] <= row.bounding_box()["y"] < region["y"] + region["height"]


def test_a_chosen_site_that_is_filtered_out_moves_nothing(page) -> None:
    page.locator(f"{SITES} .tools select").first.select_option("fp8")
    region = page.locator(f"{SITES} .wide")
    region.evaluate("e => { e.scrollTop = 900 }")
    page.locator("#site-choice").select_option("tower.099.fc8")
    assert page.locator(f"{SITES} tr[aria-current]").is_hidden()
    assert region.evaluate("e => e.scrollTop") == 900
