"""What the report of a large model costs: its size, until it is ready, and how it moves.

A generated ranker of about 5,000 nodes and 1,000 sites (`report_size_model`) is reported by the real
`render`, and the page is opened from disk in Chromium, headless, at 1440 × 900, a few times over::

    nice -n 5 python -m benchmarks.micro.report_size

Times are taken by the page's own clock. "Ready" is the end of the `load` event; the graph is drawn when the
reader comes to it, which is timed from the moment at which the page is told to scroll there. Frames are the
times between animation frames while the drawing is moved and zoomed by its keys, at the scale where all of it
is seen and at the scale where names are read. Without a GPU, Chromium computes the pixels on the CPU: a
reader's machine is faster.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

from benchmarks.micro.report_size_model import describe
from benchmarks.recording import write_record
from loka_onnx.core.site import SiteKind
from loka_onnx.report import HTML_NAME, ReportData, render
from loka_onnx.report.graph_layout import lay_out

LAYERS = 125
TABLES = 990
MOST_BYTES = 10e6
MOST_READY_S = 3.0
MOST_FRAME_MS = 50.0

_GESTURE = """async () => {
    const stage = document.querySelector('#model-graph .graph-stage');
    stage.focus({ preventScroll: true });
    const frame = () => new Promise(requestAnimationFrame);
    const frames = [];
    await frame();
    let last = await frame();
    for (let i = 0; i < 90; i += 1) {
        const turn = ['ArrowLeft', 'ArrowDown', 'ArrowRight', 'ArrowUp'][(i / 15 | 0) % 4];
        const key = i % 5 === 4 ? (i % 10 === 4 ? '+' : '-') : turn;
        stage.dispatchEvent(new KeyboardEvent('keydown', { key, bubbles: true, cancelable: true }));
        const now = await frame();
        frames.push(now - last);
        last = now;
    }
    return frames;
}"""

# An action, until the frame after it was shown.
_TIMED = """async (act) => {
    const begin = performance.now();
    act();
    await new Promise(r => requestAnimationFrame(() => requestAnimationFrame(r)));
    return performance.now() - begin;
}"""

_TABLE = "document.querySelector('#sites details.table')"
_SEARCH = f"{_TABLE}.querySelector('.tools input')"
_ACTIONS = {
    "filter_to_one_site": f"{_SEARCH}.value = 'layers.77.fmb.mlp.fc2';"
    f"{_SEARCH}.dispatchEvent(new Event('input', {{bubbles: true}}))",
    "filter_off": f"{_SEARCH}.value = ''; {_SEARCH}.dispatchEvent(new Event('input', {{bubbles: true}}))",
    "sort_by_site": f"{_TABLE}.querySelector('thead button').click()",
    "find_in_graph": "const q = document.getElementById('graph-query'); q.value = 'layers.99.norm';"
    "q.dispatchEvent(new Event('input', {bubbles: true}))",
    "switch_theme": "document.getElementById('theme').click()",
}


def measure_files(data: ReportData, directory: Path) -> dict[str, Any]:
    """Renders the report; its sizes and the time it takes."""
    begin = perf_counter()
    files = render(data, directory)
    rendered = perf_counter() - begin
    begin = perf_counter()
    assert data.graph is not None
    layout = lay_out(data.graph)
    return {
        "bytes": {path.name: path.stat().st_size for path in files},
        "render_s": round(rendered, 2),
        "layout_s": round(perf_counter() - begin, 2),
        "graph": {
            "nodes": len(data.graph.nodes),
            "edges": len(data.graph.edges),
            "layers": max(layout.layers) + 1,
            "columns": max(Counter(layout.layers).values()),
        },
        "sites": {
            "all": len(data.modified.sites),
            "linear": sum(site.kind is SiteKind.LINEAR for site in data.modified.sites),
        },
    }


def measure_page(browser: Any, page_path: Path) -> dict[str, Any]:
    """Opens the page once and uses it."""
    page = browser.new_page(viewport={"width": 1440, "height": 900})
    said: list[str] = []
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.goto(page_path.as_uri(), wait_until="load")
    page.wait_for_function("performance.getEntriesByType('navigation')[0].loadEventEnd > 0")
    found: dict[str, Any] = page.evaluate(
        """() => {
            const [load] = performance.getEntriesByType('navigation');
            const paint = performance.getEntriesByName('first-contentful-paint')[0];
            return {
                first_contentful_paint_ms: paint ? paint.startTime : null,
                dom_content_loaded_ms: load.domContentLoadedEventEnd,
                ready_ms: load.loadEventEnd,
            };
        }"""
    )
    found["graph_drawn_ms"] = page.evaluate(
        """async () => {
            const begin = performance.now();
            const root = document.getElementById('model-graph');
            root.scrollIntoView();
            while (!root.dataset.ready) await new Promise(requestAnimationFrame);
            return performance.now() - begin;
        }"""
    )
    page.wait_for_timeout(500)
    found["frames_whole_ms"] = page.evaluate(_GESTURE)
    page.evaluate("document.dispatchEvent(new CustomEvent('loka:site', {detail: {site: 'layers.60.norm'}}))")
    found["frames_close_ms"] = page.evaluate(_GESTURE)
    # The table is folded where it is long; a reader opens it to use it.
    page.evaluate(f"{_TABLE}.open = true; {_TABLE}.scrollIntoView()")
    page.wait_for_timeout(500)
    for name, action in _ACTIONS.items():
        found[f"{name}_ms"] = page.evaluate(f"({_TIMED})(() => {{ {action} }})")
    page.close()
    if said:
        raise SystemExit(f"the page complains: {said}")
    return found


def summarize(pages: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Medians over the openings; of frames, the median and the 95th percentile of all."""
    summary: dict[str, Any] = {}
    for name in pages[0]:
        values = [page[name] for page in pages]
        if name.startswith("frames"):
            frames = sorted(frame for page in values for frame in page)
            tail = frames[int(0.95 * (len(frames) - 1))]
            summary[name] = {"median": round(statistics.median(frames), 1), "p95": round(tail, 1)}
        elif None not in values:
            summary[name] = {"median": round(statistics.median(values), 1), "max": round(max(values), 1)}
    return summary


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--openings", type=int, default=5)
    parser.add_argument("--keep", type=Path, help="where the report is left, to look at it")
    options = parser.parse_args()
    from playwright.sync_api import sync_playwright

    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        raise SystemExit("needs Chromium, or Chrome, on the PATH")
    with TemporaryDirectory() as scratch, sync_playwright() as playwright:
        directory = options.keep or Path(scratch)
        directory.mkdir(parents=True, exist_ok=True)
        figures = measure_files(describe(directory, LAYERS, TABLES), directory)
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        pages = [measure_page(browser, directory / HTML_NAME) for _ in range(options.openings)]
        version = browser.version
        browser.close()
    figures["page"] = summarize(pages)
    figures["held"] = {
        "size_below_10_MB": figures["bytes"][HTML_NAME] < MOST_BYTES,
        "ready_below_3_s": figures["page"]["ready_ms"]["median"] < 1e3 * MOST_READY_S,
        "median_frame_below_50_ms": all(
            figures["page"][name]["median"] < MOST_FRAME_MS for name in ("frames_whole_ms", "frames_close_ms")
        ),
    }
    settings = {
        "chromium": version,
        "layers": LAYERS,
        "openings": options.openings,
        "tables": TABLES,
        "viewport": "1440 x 900",
    }
    print(write_record("report_size", figures, settings))
    print(figures)


if __name__ == "__main__":
    main()
