"""Pages from the Markdown files of the repository's root."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGES = {"CONTRIBUTING.md": "development/contributing.md", "CHANGELOG.md": "development/changelog.md"}


def root_pages(root: Path) -> dict[str, str]:
    """Address in the site → content; links into ``docs/`` lead to the pages of the site."""
    return {
        address: re.sub(r"\]\((?:\./)?docs/", "](../", (root / name).read_text(encoding="utf-8"))
        for name, address in PAGES.items()
        if (root / name).is_file()
    }
