"""Writes the results pages as Markdown: ``python -m benchmarks.results --to DIRECTORY``."""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks.recording import RECORDS
from benchmarks.results.pages import result_pages


def main() -> None:
    """Write every page below the directory."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--to", type=Path, required=True, help="directory to write to")
    options = parser.parse_args()
    for address, content in result_pages(RECORDS).items():
        path = options.to / address
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content, encoding="utf-8")
        print(path)


if __name__ == "__main__":
    main()
