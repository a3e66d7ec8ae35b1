"""A calibrated model of five sites, and live rows for it; each once in a process."""

from __future__ import annotations

import atexit
import functools
import shutil
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2] / "calibration"))

from small_models import LOGIT, artifact_of, columns_of, dataset_of

from loka_onnx.calibration.calibrate import ProbeOptions, calibrate
from loka_onnx.core.recipe import PER_TENSOR
from loka_onnx.data import Dataset
from loka_onnx.operations.drift.live import Baseline
from loka_onnx.operations.drift.measure import measure_drift
from loka_onnx.operations.drift.report import DriftOptions, DriftReport

BATCH, PROFILE_ROWS, LIVE_ROWS = 64, 64 * 24 + 10, 64 * 16 + 5
NAMES = tuple(f"feature {i}" for i in range(16))
OPTIONS = ProbeOptions(recipes=(PER_TENSOR,), batch_size=BATCH, error_precision=None, draws=1, threads=1)


@functools.cache
def folder() -> Path:
    found = Path(tempfile.mkdtemp(prefix="loka-tests-"))
    atexit.register(shutil.rmtree, found, ignore_errors=True)
    return found


@functools.cache
def baseline() -> Baseline:
    """Sites left and right read x, whose columns have names; every linear site is FP8-able but the head."""
    place = folder() / "profile"
    artifact = artifact_of(place)
    data = dataset_of(place, columns_of(PROFILE_ROWS, seed=1))
    profile = calibrate(artifact, (LOGIT,), data, place, OPTIONS)
    return Baseline(artifact, profile, (LOGIT,), columns={"x": NAMES})


def live_columns(rows: int = LIVE_ROWS, seed: int = 2) -> np.ndarray:
    """(rows, 16) of the distribution of the profile."""
    return columns_of(rows, seed)["x"]


def live_data(x: np.ndarray, name: str = "live") -> Dataset:
    """Rows as a data set without labels."""
    return dataset_of(folder() / name, {"x": x})


def drift_of(x: np.ndarray, options: DriftOptions | None = None) -> DriftReport:
    """The report on rows, over one thread."""
    options = replace(options or DriftOptions(), threads=1)
    return measure_drift(baseline(), live_data(x), folder() / "scratch", options)
