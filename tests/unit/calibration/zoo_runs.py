"""The four zoo models, exported tiny with random weights, on generated rows; each once in a process."""

import atexit
import functools
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from loka_onnx.core.artifact import ModelArtifact, OutputKind, OutputSpec
from loka_onnx.data.dataset import Dataset
from loka_onnx.export.torch_module import export_torch
from loka_onnx.graph.model import GraphModel
from loka_onnx.sessions.onnx_session import Arrays, OnnxSession, SessionOptions
from loka_zoo import MODEL_NAMES, FeatureSpec, create
from loka_zoo.prepared import PreparedData
from loka_zoo.synthetic import SyntheticOptions, prepare_synthetic

ROWS = 1500
BATCH = 512
OUTPUTS = (OutputSpec("logit", OutputKind.LOGIT, "label"),)
FAST_MODEL = "dcnv2"
"""The one of the fast tier: it has norms, and activations that several sites read."""
EACH_MODEL = tuple(
    pytest.param(name, marks=() if name == FAST_MODEL else pytest.mark.slow) for name in MODEL_NAMES
)
"""Values of a parameter."""
TWO_MODELS = (FAST_MODEL, pytest.param("interformer", marks=pytest.mark.slow))
"""Without and with attention, interactions and a history."""


@dataclass(frozen=True)
class ZooRun:
    artifact: ModelArtifact
    data: Dataset

    def graph(self) -> GraphModel:
        return GraphModel.load(self.artifact.path)

    def inputs(self) -> Arrays:
        return dict(next(iter(self.data.batches(self.data.rows))).inputs)


@functools.cache
def _folder() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="loka-tests-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


@functools.cache
def prepared() -> PreparedData:
    return prepare_synthetic(_folder() / "data", SyntheticOptions(rows=(10, ROWS, 10, 10), seed=3))


@functools.cache
def zoo_run(name: str) -> ZooRun:
    source = prepared()
    data = source.open("calibration")
    module = create(name, FeatureSpec(source.categorical, source.numeric), "tiny", seed=1)
    rows = next(iter(data.batches(64))).inputs
    return ZooRun(export_torch(module, rows, _folder() / name / "model.onnx", OUTPUTS), data)


def capture(model: GraphModel, tensors: list[str], inputs: Arrays, folder: Path) -> Arrays:
    """Values of inner tensors, with every tensor an output of the graph; one thread, no fusions."""
    session = _capturing(model, tensors, folder, optimize=False)
    return session.run({name: inputs[name] for name in session.input_names}, list(dict.fromkeys(tensors)))


def capture_from(path: Path, tensors: list[str], data: Dataset, folder: Path) -> Arrays:
    """Values of inner tensors as the probe's own session computes them: fused, and in batches of `BATCH`."""
    session = _capturing(GraphModel.load(path), tensors, folder, optimize=True)
    names = list(dict.fromkeys(tensors))
    parts = [session.run(batch.inputs, names) for batch in data.batches(BATCH)]
    return {name: np.concatenate([part[name] for part in parts]) for name in names}


def _capturing(model: GraphModel, tensors: list[str], folder: Path, optimize: bool) -> OnnxSession:
    known = model.tensors()
    present = {tensor.name for tensor in model.outputs}
    for name in dict.fromkeys(tensors):
        if name not in present:
            model.add_output(known[name], np.float32, None)
    path = folder / "captured.onnx"
    model.save(path)
    return OnnxSession(path, SessionOptions(threads=1, optimize=optimize))
