"""A table of a thousand sites: every row is there, and stays quick to find."""

from __future__ import annotations

import pytest

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
