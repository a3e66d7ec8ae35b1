"""What a finished run found, and which of its stages one more run takes over."""

import json
from pathlib import Path
from typing import Any

from synthetic_runs import Workplace

from loka_onnx.pipeline.directory import StageOutcome
from loka_onnx.pipeline.run import RunOptions, Stage, run

STAGES = [
    *("export", "calibrate", "mods", "loud channels", "recalibrate", "ladder", "plan", "correct", "build"),
    *("evaluate", "choose", "report", "bundle"),
]
_DOCUMENTS = "choice corrections engines evaluation ladder plan profile report rewrites run"
LAYOUT = {"bundle", "calibration", "engines", "model", "planned", "report.html", "report.md"}
LAYOUT |= {f"{name}.json" for name in _DOCUMENTS.split()}
"""Files of a run."""


def resumed(place: Workplace, until: Stage = Stage.BUNDLE) -> dict[str, bool]:
    """Whether each stage was taken over by one more run; the data are always checked anew."""
    seen: dict[str, bool] = {}

    def note(stage: str, outcome: StageOutcome | None) -> None:
        if outcome is not None and stage != "check data":
            seen[stage] = outcome.reused

    run(place.run_file, RunOptions(resume=True, until=until, on_stage=note))
    return seen


def findings(directory: Path) -> dict[str, Any]:
    """Everything that a run found and that does not depend on how fast the machine was."""
    evaluations = json.loads((directory / "evaluation.json").read_text())["value"]["evaluations"]
    engines = json.loads((directory / "engines.json").read_text())["value"]["engines"]
    profile = json.loads((directory / "profile.json").read_text())["value"]
    manifest = json.loads((directory / "bundle" / "manifest.json").read_text())["value"]
    return {
        "evaluations": [{k: v for k, v in e.items() if k != "latencies"} for e in evaluations],
        "engines": [(e["plan"], e["status"], e["digest"], e["sites"]) for e in engines],
        "profile": {k: v for k, v in profile.items() if k != "seconds"},
        "plans": (directory / "plan.json").read_text(),
        "choice": (directory / "choice.json").read_text().replace(str(directory), ""),
        "bundle": [(e["id"], e["digest"], e["tolerance"]) for e in manifest["engines"]],
        "sample": (directory / "bundle" / "sample.npz").read_bytes(),
    }
