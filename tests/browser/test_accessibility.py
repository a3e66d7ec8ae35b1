"""axe-core finds nothing serious, light and dark, on a desktop and on a phone."""

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
