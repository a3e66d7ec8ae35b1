"""A run file over empty files, for tests of what is read of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from loka_onnx.config import RunConfig, load_run_file


def config_of(folder: Path, **sections: Any) -> RunConfig:
    """A run file in a folder, with sections replaced."""
    for name in ("ranker.onnx", "rows.parquet"):
        (folder / name).touch()
    splits = dict.fromkeys(("calibration", "selection", "certification"), "rows.parquet")
    document = {
        "model": {"onnx": "ranker.onnx"},
        "outputs": [{"name": "ctr", "kind": "logit", "label": "clicked"}],
        "data": {**splits, "inputs": {"dense": ["age"]}},
        "targets": [{"device": "cpu", "backends": ["onnxruntime"]}],
    }
    (folder / "run.yaml").write_text(yaml.safe_dump({**document, **sections}))
    return load_run_file(folder / "run.yaml")
