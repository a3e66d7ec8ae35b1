"""A page of a report in a browser, and all that it said and asked for."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from page_numbers import NUMBER, check_numbers

from loka_onnx.report import HTML_NAME, ReportData, render

DESKTOP = (1440, 900)
PHONE = (390, 844)
_READ = """() => {
  for (const details of document.querySelectorAll('details')) details.open = true;
  return [...document.querySelectorAll('td, th[scope=row], [data-source]')].map(element => ({
    text: element.textContent,
    numeric: element.classList.contains('numeric'),
    source: element.dataset.source ?? '',
    value: element.dataset.value ?? null,
  }));
}"""


@dataclass
class Opened:
    """An open page.

    Attributes:
        page: Playwright's.
        said: What it logged, and errors that nobody caught.
        requests: Addresses that it asked for, its own first.
    """

    page: Any
    said: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)

    def check(self, path: Path) -> None:
        """Nothing was logged, nothing failed, and nothing but the file itself was read."""
        assert self.said == []
        assert self.requests == [path.as_uri()]


def open_page(browser: Any, path: Path, **context: Any) -> Opened:
    """Opens a file in a context of its own; the caller closes it (`Opened.page.context`)."""
    page = browser.new_context(**context).new_page()
    page.set_default_timeout(20_000)
    opened = Opened(page)
    page.on("console", lambda message: opened.said.append(f"{message.type}: {message.text}"))
    page.on("pageerror", lambda error: opened.said.append(f"error: {error}"))
    page.on("request", lambda request: opened.requests.append(request.url))
    page.goto(path.as_uri(), wait_until="load")
    return opened


def texts(locator: Any) -> list[str]:
    return [text.strip() for text in locator.all_inner_texts()]


def facts_of(page: Any) -> dict[str, str]:
    """What the panel of the chosen site says."""
    names, values = (page.locator(f"#site-facts {tag}") for tag in ("dt", "dd"))
    return dict(zip(texts(names), texts(values), strict=True))


def draw(page: Any, selector: str) -> Any:
    """Brings a plot into sight, and returns it when it is drawn."""
    plot = page.locator(selector).first
    plot.scroll_into_view_if_needed()
    plot.locator(".main-svg").first.wait_for()
    return plot


def wait_until(page: Any, expression: str) -> None:
    """Wait for an expression to be true; the page's policy forbids the `eval` of `Page.wait_for_function`."""
    for _ in range(500):
        if page.evaluate(expression):
            return
        page.wait_for_timeout(20)
    raise AssertionError(f"not within 10 s: {expression}")


def is_as_wide_as(page: Any, size: tuple[int, int]) -> bool:
    """Nothing sticks out to the side."""
    return page.evaluate("document.documentElement.scrollWidth") == size[0]


STAGE = "#model-graph .graph-stage"
HEAR = "window.heard = []; document.addEventListener('loka:site', e => heard.push(e.detail.site))"


def assert_all_inside(page: Any) -> None:
    """Every node of the graph is seen."""
    stage = page.locator(STAGE).bounding_box()
    for rect in page.locator("#model-graph .node rect").all():
        box = rect.bounding_box()
        assert stage["x"] < box["x"] and box["x"] + box["width"] < stage["x"] + stage["width"]
        assert stage["y"] < box["y"] and box["y"] + box["height"] < stage["y"] + stage["height"]


def written(data: ReportData, directory: Path) -> Path:
    """The page of a run."""
    render(data, directory)
    return directory / HTML_NAME


def checked_numbers(page: Any, facts: Any) -> int:
    """How many numbers of the page were found in the facts: those of tables, and all that name a source."""
    checked = 0
    for cell in page.evaluate(_READ):
        text = " ".join(cell["text"].split())
        if cell["numeric"] and NUMBER.search(text):
            assert cell["source"] and cell["value"] is not None, text
        if cell["source"]:
            checked += check_numbers(facts, text, cell["source"], cell["value"])
    return checked
