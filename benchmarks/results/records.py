"""Reading records."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Record:
    """What one benchmark measured (`benchmarks.recording`).

    Attributes:
        name: Name of its file, without suffix.
        date: Day of the measurement.
        machine: Cores and processor of the host.
        versions: Package → version.
        settings: How it was measured.
        figures: What was measured.
    """

    name: str
    date: str
    machine: Mapping[str, Any]
    versions: Mapping[str, str]
    settings: Mapping[str, Any]
    figures: Any

    @property
    def device(self) -> Mapping[str, str]:
        """Property → value of the accelerator, as its driver tells them; empty where none was used."""
        told = str(self.settings.get("device", ""))
        lines = told.splitlines()
        if len(lines) == 2 and lines[0].startswith("name,"):
            return dict(zip(_fields(lines[0]), _fields(lines[1]), strict=True))
        return {"name": told} if told else {}


def _fields(line: str) -> list[str]:
    return [field.strip() for field in line.split(",")]


def load_records(directory: Path) -> dict[str, Record]:
    """Name → record, of every file in a directory, by name."""
    records = {}
    for path in sorted(directory.glob("*.json")):
        document = json.loads(path.read_text(encoding="utf-8"))
        records[path.stem] = Record(
            path.stem,
            str(document.get("date", "")),
            document.get("machine", {}),
            document.get("versions", {}),
            document.get("settings", {}),
            document["figures"],
        )
    return records
