"""Numbers for graphs, and files as ONNX Runtime itself runs them."""

import logging
import warnings
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


def export(module: Any, shape: tuple[int, ...], path: Path, exporter: str = "dynamo") -> Path:
    """What one of PyTorch's exporters writes, with a dynamic batch; x is of that shape."""
    torch = pytest.importorskip("torch", reason="needs torch")
    how = {"dynamo": False, "input_names": ["x"], "dynamic_axes": {"x": {0: "batch"}}, "opset_version": 17}
    if exporter == "dynamo":
        how = {"dynamo": True, "dynamic_shapes": ({0: torch.export.Dim("batch")},), "opset_version": 21}
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        torch.onnx.export(module.eval(), (torch.randn(*shape),), path, verbose=False, **how)
    return path
