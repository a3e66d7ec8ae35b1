"""Numbers for graphs, and files as ONNX Runtime itself runs them."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

RANDOM = np.random.default_rng(0)


def randn(*shape: int) -> np.ndarray:
    """Standard normal numbers, other ones with each call."""
    return RANDOM.standard_normal(shape).astype(np.float32)


def run(path: Path, **feeds: Any) -> np.ndarray:
    """The first output of a file."""
    runtime = pytest.importorskip("onnxruntime", reason="needs onnxruntime: pip install 'loka-onnx[cpu]'")
    session = runtime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    return np.asarray(session.run(None, feeds)[0])
