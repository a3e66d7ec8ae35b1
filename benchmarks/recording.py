"""Records: what a benchmark measured, where, and with which versions."""

from __future__ import annotations

import json
import os
import platform
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from loka_onnx.core.serde import write_text
from loka_onnx.pipeline.versions import library_versions

RECORDS = Path(__file__).parent / "records"
BESIDE = "BENCHMARKS_BESIDE"
"""Environment variable: what else ran on the host meanwhile, for the record."""


def write_record(name: str, figures: Any, settings: dict[str, Any], directory: Path | None = None) -> Path:
    """Write one record, sorted and indented, with the machine and the versions that made it."""
    beside = os.environ.get(BESIDE)
    if beside:
        settings = settings | {"beside": beside}
    document = {
        "benchmark": name,
        "date": datetime.now(UTC).date().isoformat(),
        "machine": {"cores": os.cpu_count(), "processor": platform.machine()},
        "versions": library_versions(),
        "settings": settings,
        "figures": figures,
    }
    path = (directory or RECORDS) / f"{name}.json"
    write_text(json.dumps(document, indent=1, sort_keys=True) + "\n", path)
    return path
