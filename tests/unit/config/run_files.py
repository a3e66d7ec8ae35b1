"""A run file that is right, and the message of one that is not."""

from pathlib import Path

import pytest

from loka_onnx.config import load_run_file
from loka_onnx.errors import ConfigError

RUN_FILE = """\
model: {onnx: ranker.onnx}
outputs:
  - name: ctr
    kind: logit
    label: clicked
    budget: 2e-4
data:
  calibration: day-07.parquet
  selection: day-08.parquet
  certification: day-09.parquet
  inputs: {dense: [age, price], country: country_id}
  group: request_id
  slices: [country]
batch: {min: 1, serve: [256, 1024], max: 4096}
plan: {keep: ["*.calibrator"]}
targets:
  - {device: nvidia-h100, backends: [inductor, tensorrt]}
"""
FILES = ("ranker.onnx", "day-07.parquet", "day-08.parquet", "day-09.parquet")
"""What it names."""


def refusal(path: Path, *, old: str = "", new: str = "", **overrides: object) -> str:
    """The message, with the directory shortened to DIR."""
    if old:
        assert old in RUN_FILE
        path.write_text(RUN_FILE.replace(old, new))
    with pytest.raises(ConfigError) as caught:
        load_run_file(path, {key.replace("__", "."): value for key, value in overrides.items()})
    assert caught.value.exit_code == 2
    assert caught.value.remedy and caught.value.evidence
    return str(caught.value).replace(str(path.parent), "DIR")
