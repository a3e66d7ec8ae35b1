"""Pages from the Markdown files of the repository's root, and from its notebook."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOK = "examples/notebook.ipynb"
PAGES = {"CONTRIBUTING.md": "development/contributing.md", "CHANGELOG.md": "development/changelog.md"}


def root_pages(root: Path) -> dict[str, str]:
    """Address in the site → content; links into ``docs/`` lead to the pages of the site."""
    return {
        address: re.sub(r"\]\((?:\./)?docs/", "](../", (root / name).read_text(encoding="utf-8"))
        for name, address in PAGES.items()
        if (root / name).is_file()
    }


def notebook_page(notebook: Path) -> str:
    """The executed notebook in Markdown: its cells, and what each gave as text."""
    return "\n\n".join(_blocks(json.loads(notebook.read_text(encoding="utf-8"))["cells"])) + "\n"


def _blocks(cells: list[dict[str, Any]]) -> Iterator[str]:
    for cell in cells:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            yield source
            continue
        yield f"```python\n{source}\n```"
        for output in cell["outputs"]:
            if output.get("name") != "stderr":
                text = "".join(output.get("text") or output["data"]["text/plain"])
                yield f"```text\n{text.rstrip()}\n```"
