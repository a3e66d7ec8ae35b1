"""A model of five sites, two of which read one tensor, and rows with every kind of column."""

from pathlib import Path

import numpy as np
import onnx
from onnx_text import parsed

from loka_onnx.core.artifact import ModelArtifact, OutputKind, OutputSpec
from loka_onnx.data.batch import InputBinding
from loka_onnx.data.dataset import Dataset
from loka_onnx.data.splits import open_dataset
from loka_onnx.export.onnx_model import import_onnx

LOGIT = OutputSpec("y", OutputKind.LOGIT, "label")
SHARED = ("left", "right")
BINDINGS = (InputBinding("x", ("x",), "float32", 2),)
BODY = """
    [left] a = MatMul(x, w_left)
    [right] b = MatMul(x, w_right)
    c = Tanh(a)  d = Mul(b, c)
    [norm] e = LayerNormalization(d, gain, bias)
    [deep] f = MatMul(e, w_deep)
    g = Relu(f)
    [head] y = MatMul(g, w_head)
"""

TWO_SITES = "[fc1] h = MatMul(x, w1)  r = Relu(h)  [fc2] y = MatMul(r, head)"
W1 = np.random.default_rng(0).standard_normal((16, 16))
HEAD = np.ones((16, 1))


def artifact_of(folder: Path, body: str = BODY, **weights: np.ndarray) -> ModelArtifact:
    """The model, or another one of the same weights and others, floating ones in FP32."""
    random = np.random.default_rng(0)
    known = {name: random.standard_normal((16, 16)) / 4 for name in ("w_left", "w_right", "w_deep")}
    known |= {"w_head": random.standard_normal((16, 1)), "gain": np.ones(16), "bias": np.zeros(16)}
    model = parsed(body, known | {"w1": W1, "head": HEAD} | weights, inputs="float[b,16] x")
    folder.mkdir(parents=True, exist_ok=True)
    onnx.save(model, folder / "source.onnx")
    return import_onnx(folder / "source.onnx", folder / "model.onnx", (LOGIT,))


def columns_of(rows: int, seed: int = 1) -> dict[str, np.ndarray]:
    random = np.random.default_rng(seed)
    user = random.integers(0, 40, rows)
    return {
        "x": random.standard_normal((rows, 16)).astype(np.float32) * 2,
        "label": (random.random(rows) < 0.3).astype(np.int8),
        "weight": random.integers(1, 4, rows),
        "rating": random.standard_normal(rows),
        "user": user,
        "name": np.char.add("user ", user.astype(str)),
    }


def dataset_of(folder: Path, columns: dict[str, np.ndarray]) -> Dataset:
    folder.mkdir(parents=True, exist_ok=True)
    np.savez(folder / "clicks-0412.npz", **columns)
    names = tuple(name for name in columns if name != "x")
    return open_dataset(folder / "clicks-0412.npz", BINDINGS, names)


def data_of(folder: Path, x: np.ndarray) -> Dataset:
    """Rows of x, with labels in turns."""
    return dataset_of(folder, {"x": x.astype(np.float32), "label": np.arange(len(x)) % 2})
