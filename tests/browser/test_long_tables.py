"""A table of a thousand sites: the first rows are laid out, and every way to the others leads there."""

from __future__ import annotations

import pytest

SITES = "#sites details.table:has(.tools)"
FIRST = 100
"""Rows that are laid out at first, as `parts.html.j2` marks them."""

pytestmark = pytest.mark.slow


@pytest.fixture
def page(visit, large_report):
    opened = visit(large_report)
    yield opened.page
    opened.check(large_report)


def laid_out(page, table: str = SITES) -> int:
    """Rows of sites that are laid out; a note is none."""
    return page.evaluate(
        "selector => [...document.querySelector(selector).querySelectorAll('tbody tr:not(.note)')]"
        ".filter(row => getComputedStyle(row).display !== 'none').length",
        table,
    )


def notes_laid_out(page) -> int:
    return page.evaluate(
        "selector => [...document.querySelector(selector).querySelectorAll('tr.note')]"
        ".filter(row => getComputedStyle(row).display !== 'none').length",
        SITES,
    )


def counted(page) -> str:
    return page.locator(f"{SITES} output").inner_text()


def names(page) -> list[str]:
    return [text.strip() for text in page.locator(f"{SITES} tbody th:visible").all_inner_texts()]


def test_rows_come_while_a_reader_scrolls(page) -> None:
    assert (laid_out(page), notes_laid_out(page)) == (FIRST, FIRST)
    assert counted(page) == "1000 of 1000 match, first 100 shown"
    for _ in range(12):
        page.evaluate(f"() => {{ const r = document.querySelector('{SITES} .wide'); r.scrollTop = 1e6 }}")
        page.evaluate("() => new Promise(r => requestAnimationFrame(() => requestAnimationFrame(r)))")
    assert laid_out(page) == 1000
    assert names(page)[-1] == "tower.099.fc9"
    assert counted(page) == "1000 of 1000 shown"
    assert not page.locator(f"{SITES} .more").is_visible()


def test_a_button_brings_every_row_to_a_reader_without_a_mouse(page) -> None:
    button = page.locator(f"{SITES} .more button")
    rows = page.locator(f"{SITES} table")
    assert button.inner_text() == "Show all 1000 rows"
    # Each with the note below it, and the head.
    assert rows.get_attribute("aria-rowcount") == "2001"
    page.locator(f"{SITES} select[data-choice='verdict']").select_option("unsafe")
    assert counted(page) == "333 of 1000 match, first 100 shown"
    assert button.inner_text() == "Show all 333 rows"
    assert rows.get_attribute("aria-rowcount") == "667"
    # It stands before the table: whoever goes through the rows by Tab gets more of them, and no end.
    page.locator(f"{SITES} .tools select").last.focus()
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Show all 333 rows"
    page.keyboard.press("Enter")
    assert (laid_out(page), counted(page)) == (333, "333 of 1000 shown")
    assert button.is_hidden()
    assert rows.get_attribute("aria-rowcount") is None
    # The reader goes on where the rows went on.
    assert page.evaluate("document.activeElement.textContent") == names(page)[FIRST]
    page.keyboard.press("Shift+Tab")
    assert page.evaluate("document.activeElement.textContent") == names(page)[FIRST - 1]


def test_a_filter_finds_and_counts_what_was_not_laid_out(page) -> None:
    page.locator(f"{SITES} .tools input").fill("tower.099")
    assert names(page) == [f"tower.099.fc{i}" for i in range(10)]
    assert counted(page) == "10 of 1000 shown"
    page.locator(f"{SITES} .tools input").fill("")
    assert (laid_out(page), counted(page)) == (FIRST, "1000 of 1000 match, first 100 shown")


def test_the_first_rows_of_an_order_are_laid_out(page) -> None:
    button = page.locator(f"{SITES} thead th button").first
    button.click()
    button.click()
    assert names(page)[:2] == ["tower.099.fc9", "tower.099.fc8"]
    assert laid_out(page) == FIRST
    # Each note still stands below its row.
    assert page.evaluate(
        "selector => [...document.querySelector(selector).querySelectorAll('tr.note')]"
        ".every(note => !note.previousElementSibling.classList.contains('note'))",
        SITES,
    )
    page.locator(f"{SITES} .tools input").fill("fc3")
    assert names(page)[0] == "tower.099.fc3"
    assert counted(page) == "100 of 1000 shown"


def test_a_chosen_site_is_laid_out_and_in_sight(page) -> None:
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


def test_the_browsers_own_search_finds_every_row(page) -> None:
    page.keyboard.press("Control+f")
    assert laid_out(page) == 1000
    # What is filtered out stays so.
    page.locator(f"{SITES} .tools input").fill("tower.000")
    page.keyboard.press("Control+f")
    assert laid_out(page) == 10


def test_paper_has_every_row(page) -> None:
    page.emulate_media(media="print")
    assert (laid_out(page), notes_laid_out(page)) == (1000, 1000)


def test_without_scripts_every_row_is_there(visit, large_report) -> None:
    page = visit(large_report, javascript=False).page
    assert page.locator(f"{SITES} tbody tr.later").first.is_visible()
    assert page.locator(f"{SITES} tbody th:visible").count() == 1000
