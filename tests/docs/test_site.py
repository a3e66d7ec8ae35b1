"""The documentation site: built strictly, whole, free of other hosts, and looked at in a browser."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

import pytest

import loka_onnx

ROOT = Path(__file__).parents[2]
CHROMIUM = Path("/usr/bin/chromium")
PAGES = (
    *("index.html", "tutorial/index.html", "bundle.html", "architecture.html"),
    *("reference/command-line.html", "reference/run-file.html", "reference/schemas.html"),
    *("reference/api/index.html", "results/index.html", "results/engines.html", "development/changelog.html"),
)
LOADED = {"script": "src", "img": "src", "iframe": "src", "source": "src", "link": "href", "object": "data"}
"""Elements that a browser fetches something for, and where they say what."""

pytestmark = pytest.mark.slow


class Links(HTMLParser):
    """What a page loads, where it leads, and what may be led to."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.loaded: list[str] = []
        self.linked: list[str] = []
        self.ids: set[str] = set()
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.ids |= {value for name, value in attrs if name in ("id", "name") and value}
        address = found.get(LOADED.get(tag, ""))
        if address and found.get("rel") not in ("canonical", "prev", "next"):
            self.loaded.append(address)
        if tag == "a" and found.get("href"):
            self.linked.append(found["href"] or "")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built as CI builds it."""
    target = tmp_path_factory.mktemp("docs") / "site"
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", target],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "WARNING" not in done.stdout + done.stderr
    return target


@pytest.fixture(scope="module")
def parsed(site: Path) -> dict[Path, Links]:
    return {path: Links(path.read_text(encoding="utf-8")) for path in site.rglob("*.html")}


def test_the_pages_are_there(site: Path) -> None:
    for page in PAGES:
        assert (site / page).is_file(), page
    assert not list(site.rglob("*.py")), "the machinery is no part of the site"
    for schema in (ROOT / "docs").glob("*-schema.json"):
        assert (site / schema.name).read_text() == schema.read_text()


def test_nothing_comes_from_another_host(site: Path, parsed: dict[Path, Links]) -> None:
    for path, links in parsed.items():
        for address in links.loaded:
            assert not re.match(r"(?:https?:)?//", address), f"{path}: {address}"
    for path in [*site.rglob("*.css"), *site.rglob("*.html")]:
        text = path.read_text(encoding="utf-8")
        assert not re.search(r"url\(\s*[\"']?(?:https?:)?//", text), path
        assert not re.search(r"@import\s+[\"']?(?:url\()?[\"']?https?:", text), path


def test_every_link_leads_somewhere(site: Path, parsed: dict[Path, Links]) -> None:
    for path, links in parsed.items():
        if path.name == "404.html":
            continue  # shown below any address, so its links begin at the root of a host
        for address in [*links.loaded, *links.linked]:
            if re.match(r"[a-z]+:", address):
                continue
            place, _, anchor = address.partition("#")
            target = (path.parent / unquote(place)).resolve() if place else path
            assert target.is_file(), f"{path}: {address}"
            if anchor and target in parsed and anchor != "__skip":
                assert unquote(anchor) in parsed[target].ids, f"{path}: {address}"


def test_every_public_name_has_its_entry(site: Path, parsed: dict[Path, Links]) -> None:
    ids = set().union(*(parsed[path].ids for path in (site / "reference" / "api").glob("*.html")))
    for name in loka_onnx.__all__:
        assert f"loka_onnx.{name}" in ids, name
    text = (site / "reference" / "api" / "serving.html").read_text(encoding="utf-8")
    assert "Verify a bundle and load the first of its engines that runs here" in text
    assert "Raises" in text and "trust" in text


def test_formulas_are_mathml_and_none_is_left(site: Path) -> None:
    pages = [path.read_text(encoding="utf-8") for path in (site / "concepts").glob("*.html")]
    assert sum(page.count("<math") for page in pages) > 0
    for page in pages:
        assert "arithmatex" not in page
        for formula in re.findall(r"<math.*?</math>", page, re.DOTALL):
            assert "\\" not in formula, formula


@pytest.fixture(scope="module")
def browser() -> Iterator[object]:
    sync_api = pytest.importorskip("playwright.sync_api", reason="needs playwright: `make venv` installs it")
    if not CHROMIUM.is_file():
        pytest.fail(f"{CHROMIUM} is not there: apt-get install chromium")
    with sync_api.sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield opened
        opened.close()


@pytest.mark.parametrize("width", [390, 1360], ids=["phone", "desktop"])
def test_pages_open_from_disk(site: Path, browser: object, width: int) -> None:
    """No request leaves the disk, no script fails, and no page is wider than the screen."""
    page = browser.new_page(viewport={"width": width, "height": 900})  # type: ignore[attr-defined]
    told: list[str] = []
    page.on("console", lambda message: told.append(message.text))
    page.on("pageerror", lambda error: told.append(str(error)))
    page.on("requestfailed", lambda request: told.append(request.url))
    page.on("request", lambda request: request.url.startswith("http") and told.append(request.url))
    for address in (*PAGES, "results/accuracy.html", "results/fleet.html", "concepts/loss-change.html"):
        page.goto((site / address).as_uri())
        page.wait_for_timeout(200)
        assert page.evaluate("document.documentElement.scrollWidth") <= width, address
        assert told == [], address
    page.close()


@pytest.mark.parametrize("word", ["docker", "pandas", "csv", "github action"])
def test_search_knows_the_words_of_strangers(site: Path, word: str) -> None:
    index = (site / "search" / "search_index.js").read_text(encoding="utf-8")
    titles = re.findall(r'"title":"([^"]*)"', index)
    assert any(word in title.lower() for title in titles), "no section is about it"


def test_search_and_theme_work_from_disk(site: Path, browser: object) -> None:
    page = browser.new_page(viewport={"width": 1360, "height": 900})  # type: ignore[attr-defined]
    page.goto((site / "results" / "index.html").as_uri())
    page.keyboard.press("/")
    page.keyboard.type("certification")
    page.wait_for_selector(".md-search-result__item", timeout=20_000)
    assert page.locator(".md-search-result__item").count() > 1
    page.keyboard.press("Escape")
    before = page.evaluate("getComputedStyle(document.body).backgroundColor")
    page.locator("label.md-header__button[for^=__palette]:visible").first.click()
    page.wait_for_function(f"getComputedStyle(document.body).backgroundColor !== '{before}'", timeout=5_000)
    page.close()
