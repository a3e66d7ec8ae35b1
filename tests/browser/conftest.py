"""A headless Chromium, and pages of reports to open in it.

The browser lives for one module, not for the session: while Playwright runs, its event loop is that of the
thread, and tests of other modules that start one of their own in the same worker would fail.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "unit" / "report"))
sys.path.insert(0, str(Path(__file__).parent))

from browser_pages import DESKTOP, Opened, open_page, written
from decided_run import decided, large
from sample_run import SampleRun, make_run

from loka_onnx.report import ReportData

_PROGRAMS = ("chromium", "chromium-browser", "google-chrome")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that open pages, a second or two each, belong to the full tier."""
    here = Path(__file__).parent
    for item in items:
        if item.path.parent == here:
            item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Chromium as the system has it; Playwright's own downloads are not used."""
    path = next(filter(None, map(shutil.which, _PROGRAMS)), None)
    if path is None:
        pytest.skip("needs chromium, or Chrome, on the PATH")
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        pytest.skip("needs chromium and playwright: `pip install playwright`")
    with sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield launched
        launched.close()


@pytest.fixture
def visit(browser: Any) -> Iterator[Callable[..., Opened]]:
    """Opens a file; scheme, size and whether scripts run can be chosen."""
    pages = []

    def opened(
        path: Path, scheme: str = "light", size: tuple[int, int] = DESKTOP, javascript: bool = True
    ) -> Opened:
        viewport = {"width": size[0], "height": size[1]}
        found = open_page(
            browser, path, viewport=viewport, color_scheme=scheme, java_script_enabled=javascript
        )
        pages.append(found.page)
        return found

    yield opened
    for page in pages:
        page.context.close()


@pytest.fixture(scope="session")
def run(tmp_path_factory: pytest.TempPathFactory) -> SampleRun:
    return make_run(tmp_path_factory.mktemp("run") / "run")


@pytest.fixture(scope="session")
def data(run: SampleRun) -> ReportData:
    """A run in which an FP8 engine was measured and emitted."""
    return decided(run.report)


@pytest.fixture(scope="session")
def report(data: ReportData, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(data, tmp_path_factory.mktemp("decided"))


@pytest.fixture(scope="session")
def undecided_report(run: SampleRun, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of a run whose FP8 engines are simulated, on synthetic data."""
    return written(run.report, tmp_path_factory.mktemp("undecided"))


@pytest.fixture(scope="session")
def large_report(data: ReportData, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of a model with 1,000 sites."""
    return written(large(data, 1000), tmp_path_factory.mktemp("large"))
