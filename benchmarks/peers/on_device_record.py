"""What was asked of a device, and the record of what came of it."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.peers.fastest import Timed, fastest
from benchmarks.peers.on_device_models import Variant
from benchmarks.peers.on_device_times import INDUCTOR
from loka_onnx.core.serde import write_text
from loka_onnx.pipeline.versions import library_versions

RECORD = "device.json"
BEGAN = time.perf_counter()
"""Start of the command."""


@dataclass(frozen=True)
class Asked:
    """What ``time`` was asked for; all of it is in the record.

    Attributes:
        target: Device, as run files name it.
        batches: Batch sizes.
        backends: Which engines.
        jobs: Builds side by side.
        seconds: Wall seconds, after which it ends.
        rounds: Turns of each engine at each batch size.
        options: Of the builds by Inductor.
        models: Which ones; all where none is named.
        variants: Likewise.
    """

    target: str
    batches: tuple[int, ...]
    backends: tuple[str, ...] = (INDUCTOR, "onnxruntime")
    jobs: int = 1
    seconds: float = 400.0
    rounds: int = 25
    options: dict[str, int] = field(default_factory=dict)
    models: tuple[str, ...] = ()
    variants: tuple[str, ...] = ()

    def takes(self, variant: Variant) -> bool:
        """Whether a variant is asked for."""
        return (not self.models or variant.model in self.models) and (
            not self.variants or variant.name in self.variants
        )


def compared(
    variants: Sequence[Variant], entries: Mapping[str, Mapping[str, Any]], batch: int
) -> dict[str, dict[str, dict[str, Any]]]:
    """The fastest engine of each side at a batch size, of all and of those inside the budget.

    Without a verdict on accuracy an engine is not among those inside.

    Returns:
        ``fastest`` and ``inside the budget``: by side its engine, and what that took over this project's.
    """
    rows = [
        Timed(v.name, v.info.get("peer"), bool(v.info.get("inside_budget")), entries[v.name])
        for v in variants
    ]
    return {
        "fastest": fastest(rows, str(batch)),
        "inside the budget": fastest((row for row in rows if row.inside), str(batch)),
    }


class Record:
    """``device.json``, written as a whole each time.

    Args:
        asked: What was asked for.
        out: Its directory.
        device: What the driver says of the device, and what it reaches.
    """

    def __init__(self, asked: Asked, out: Path, device: dict[str, Any]) -> None:
        self._path, self._asked, self._device = out / RECORD, asked, device
        self._models: dict[str, Any] = {}
        self._beside: dict[str, Any] = {}
        self._compared: dict[str, Any] = {}
        self._digests: dict[str, Any] = {}

    def put(self, model: str, variants: Sequence[Variant], entries: dict[str, dict[str, Any]]) -> None:
        """Take in a model and write."""
        added = {each.name for each in variants if each.info.get("added")}
        self._models[model] = {name: entry for name, entry in entries.items() if name not in added}
        self._beside[model] = {name: entry for name, entry in entries.items() if name in added}
        self._digests[model] = {v.name: v.info["digest"] for v in variants if v.info.get("digest")}
        self._compared[model] = {str(b): compared(variants, entries, b) for b in self._asked.batches}
        self.write()

    def put_limits(self, reached: dict[str, float]) -> None:
        """Take in what the device reaches at best, and write."""
        self._device = {**self._device, "limits": reached}
        self.write()

    def write(self) -> None:
        """Write it."""
        document = {
            "date": datetime.now(UTC).date().isoformat(),
            "device": self._device,
            "cores": os.cpu_count(),
            "versions": library_versions(),
            "settings": asdict(self._asked),
            "seconds": time.perf_counter() - BEGAN,
            "models": self._models,
            "beside": self._beside,
            "compared": self._compared,
            "digests": self._digests,
        }
        write_text(json.dumps(document, indent=1, sort_keys=True) + "\n", self._path)
