"""A trap through the pipeline, and its engine held against the original."""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.reference
import onnxruntime
from trap_models import Trap

from loka_onnx.config import build_run_config
from loka_onnx.core import serde
from loka_onnx.core.engine import EngineSet
from loka_onnx.errors import LokaError, UserError
from loka_onnx.pipeline.run import RunOptions, Stage, run

ROWS = 600


@dataclass(frozen=True)
class Passage:
    refusal: LokaError | None
    seconds: float
    moved: float = 0.0


def rows_of(trap: Trap, rows: int, seed: int = 0) -> dict[str, np.ndarray]:
    """Inputs of a trap, (rows, …) each."""
    model = trap.model
    random = np.random.default_rng(seed)
    initializers = {tensor.name for tensor in model.graph.initializer}
    found: dict[str, np.ndarray] = {}
    for value in model.graph.input:
        if value.name in initializers:
            continue
        sizes = [d.dim_value if d.HasField("dim_value") else 16 for d in value.type.tensor_type.shape.dim]
        shape = (rows, *sizes[1:])
        dtype = onnx.helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type)
        if dtype.kind == "f" or dtype.name == "bfloat16":
            values: Any = random.standard_normal(shape)
            values = np.abs(values) + 0.1 if trap.positive else values
        elif dtype.kind == "O":
            values = np.full(shape, "a")
            dtype = values.dtype
        else:
            values = random.integers(0, 2 if dtype.kind == "b" else 9, shape)
        found[value.name] = np.asarray(values).astype(dtype)
    return found


def reference(trap: Trap, path: Path, feeds: dict[str, np.ndarray]) -> np.ndarray:
    """The judged output of the model as it was written."""
    settings = onnxruntime.SessionOptions()
    settings.log_severity_level = 4
    settings.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    try:
        return np.asarray(onnxruntime.InferenceSession(str(path), settings).run(["y"], feeds)[0])
    except onnxruntime.capi.onnxruntime_pybind11_state.NotImplemented:
        return np.asarray(onnx.reference.ReferenceEvaluator(str(path)).run(["y"], feeds)[0])


def pass_through(trap: Trap, folder: Path, until: Stage = Stage.BUILD) -> Passage:
    """Run the pipeline, and hold its FP32 engine against the original."""
    path = folder / "trap.onnx"
    if trap.external:
        onnx.save(trap.model, path, save_as_external_data=True, location="trap.bin", size_threshold=64)
    else:
        onnx.save(trap.model, path)
    feeds = rows_of(trap, ROWS)
    stored = {name: v.astype(np.float32) if v.dtype.kind in "fV" else v for name, v in feeds.items()}
    labels = (np.random.default_rng(5).random(ROWS) < 0.4).astype(np.float32)
    np.savez(folder / "rows.npz", **stored, label=labels)
    config = build_run_config(
        {
            "name": "trap",
            "model": {"onnx": "trap.onnx"},
            "outputs": [{"name": "y", "kind": "logit", "label": "label", "budget": 0.01}],
            "data": {"path": "rows.npz", "split": {"by": "order"}, "synthetic": True},
            "batch": {"min": 1, "serve": [16], "max": 65},
            "calibration": {"sensitivity_rows": 128},
            "plan": {"plans": ["fp32", "fp8-all"]},
            "targets": [{"device": "cpu", "backends": ["onnxruntime"]}],
            "threads": 1,
            "output": "run",
        },
        folder,
    )
    began = time.perf_counter()
    try:
        result = run(config, RunOptions(until=until))
    except UserError as refusal:
        return Passage(refusal, time.perf_counter() - began)
    seconds = time.perf_counter() - began
    engines = serde.read(EngineSet, result.directory / "engines.json").engines
    exact = next(engine for engine in engines if engine.plan == "fp32")
    assert exact.path is not None, exact.detail
    few = {name: values[:40] for name, values in feeds.items()}
    expected = reference(trap, path, few).astype(np.float64)
    session = onnxruntime.InferenceSession(str(result.directory / exact.path))
    taken = {i.name: few[i.name].astype(_numpy(i.type)) for i in session.get_inputs()}
    found = session.run(["y"], taken)[0].astype(np.float64)
    assert found.shape == expected.shape
    moved = float(np.abs(found - expected).max() / np.abs(expected).max())
    return Passage(None, seconds, moved)


def _numpy(name: str) -> str:
    return {"tensor(float)": "float32", "tensor(double)": "float64", "tensor(float16)": "float16"}.get(
        name, name.removeprefix("tensor(").removesuffix(")")
    )
