"""The record of the peers' table, from what models left in a work directory, with times of devices."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.peers.device_times import merged
from benchmarks.peers.environments import PINS
from benchmarks.peers.judging import SETTINGS, Clock
from benchmarks.peers.processes import ChildLimits
from benchmarks.peers.trimming import trimmed
from benchmarks.peers.variants import EXPORTED, VARIANTS
from benchmarks.pipeline.movielens1m import MOST_ROWS
from benchmarks.pipeline.training import GROUP, TRAINING
from benchmarks.recording import write_record
from loka_onnx.core import serde
from loka_onnx.core.digests import digest_file
from loka_zoo.movielens1m import SELECTION_ROWS

RECORD = "peers"
ZOO = ("dlrm", "dcnv2", "wukong", "interformer")
CTR = ("deepfm", "pnn", "nfm", "fibinet", "wdl")
WEIGHTS = "model.onnx"
DESCRIPTION = "variant.json"
DEVICE = "device-*.json"
"""Times that were merged, in their order."""

Entry = dict[str, Any]


@dataclass(frozen=True)
class Settings:
    """What a comparison was asked for; all of it is in the record.

    Attributes:
        budget: Largest accepted relative loss, which this project's plan keeps to.
        calibration_rows: Rows of the calibration split that every tool gets.
        batch: Rows of a calibration batch.
        most_rows: Most certification rows that are judged, by model; all where it is not named.
        limits: Of a tool's process.
        clock: How CPU latencies are taken.
    """

    budget: float
    calibration_rows: int
    batch: int
    most_rows: Mapping[str, int]
    limits: ChildLimits
    clock: Clock


def recorded(work: Path, environments: Path, settings: Settings) -> tuple[Entry, Entry]:
    """Figures and settings of the record, from what every model left in the work directory."""
    models = {name: work / "figures" / f"{name}.json" for name in (*ZOO, *CTR)}
    found = {
        name: json.loads(path.read_text(encoding="utf-8")) for name, path in models.items() if path.is_file()
    }
    order = [EXPORTED, *(n for v in VARIANTS for n in (v.name, v.narrow) if n)]
    narrow = {variant.narrow: variant.name for variant in VARIANTS if variant.narrow}
    # The longest first: the work directory may lie in the current one.
    places = {str(work): "WORK", str(environments): "ENVIRONMENTS", str(Path.cwd()): "HERE"}
    paths = dict(sorted(places.items(), key=lambda item: -len(item[0])))
    measured = _measured(found, asdict(settings))
    found = {name: trimmed(figures, narrow, paths) for name, figures in found.items()}
    for model, figures in found.items():
        for variant, entry in figures["variants"].items():
            graph = work / "models" / model / variant / WEIGHTS
            if graph.is_file() and "failure" not in entry:
                entry["digest"] = digest_file(graph)
    return {"models": found}, {
        # Rows are told model by model, which may have been measured by several commands.
        **{key: value for key, value in measured.items() if key != "most_rows"},
        "group": GROUP,
        "accuracy": SETTINGS,
        "order": {"models": list(found), "variants": order},
        "training": {m: vars(TRAINING[m]) for m in found if m in TRAINING},
        "pins": {
            path.stem: path.read_text(encoding="utf-8").splitlines() for path in sorted(PINS.glob("*.txt"))
        },
        "labels_used": f"LoKA-ONNX reads {SELECTION_ROWS:,} labelled rows of the selection split besides "
        f"({MOST_ROWS['interformer']:,} for InterFormer), to accept corrections; no other tool reads labels",
    }


def _measured(found: Mapping[str, Entry], asked: Entry) -> Entry:
    """Settings under which all models were measured, which are not those of a command that merges."""
    told = [figures.pop("settings", asked) | {"most_rows": None} for figures in found.values()]
    if any(each != told[0] for each in told):
        raise SystemExit("models in the work directory were measured under different settings: measure again")
    return told[0] if told else asked


def describe(work: Path, figures: Entry, budget: float) -> None:
    """Say beside each graph what it is, for `on_device`; a graph that failed here is not described.

    Args:
        work: Holds the graphs.
        figures: Of the record.
        budget: Largest accepted relative loss, held against the upper end of ΔNE.
    """
    for model, found in figures["models"].items():
        for variant, entry in found["variants"].items():
            path = work / "models" / model / variant / DESCRIPTION
            path.unlink(missing_ok=True)
            if "failure" in entry or not path.with_name(WEIGHTS).is_file():
                continue
            facts = {key: entry.get(key) for key in ("label", "peer", "precision", "sites")}
            planned = found["variants"].get(entry.get("same_plan_as", variant), entry)
            facts["plan"] = planned.get("plan")
            upper = entry["accuracy"]["delta_ne_percent"][2]
            facts |= {"model": model, "variant": variant, "inside_budget": upper <= 100 * budget}
            facts["digest"] = entry.get("digest")
            serde.write_text(json.dumps(facts, indent=1, sort_keys=True) + "\n", path)


def write(work: Path, environments: Path, settings: Settings, directory: Path | None) -> Path:
    """Write the record from what is in the work directory, with device times where they are there."""
    figures, asked = recorded(work, environments, settings)
    describe(work, figures, asked["budget"])
    documents = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(work.glob(DEVICE))]
    for document in documents:
        figures, told = merged(figures, document)
        asked.setdefault("device_runs", []).append(told)
    if documents:
        # As the driver tells it, which is what other records have there.
        asked["device"] = documents[0].get("device", {}).get("facts", "")
    return write_record(RECORD, figures, asked, directory)
