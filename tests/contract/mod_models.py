"""A model for each mod that finds nothing in the ranker of `test_transforms`: the least that it rewrites."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
from onnx import numpy_helper

from loka_onnx.core.artifact import ModelArtifact
from loka_onnx.graph.model import GraphModel
from loka_onnx.graph.sites import find_sites


@dataclass(frozen=True)
class ModModel:
    """A model as text; the input ``x`` is (batch, 8) unless said otherwise.

    Attributes:
        body: Its nodes; those without a name are named after their output.
        weights: Shapes of random constants, by name.
        constants: Other constants, by name.
        inputs: Inputs as text.
        output: Shape of the output ``y`` behind the batch.
    """

    body: str
    weights: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    constants: Mapping[str, Any] = field(default_factory=dict)
    inputs: str = "float[batch,8] x"
    output: str = "8"

    def write(self, folder: Path) -> ModelArtifact:
        """The model as an artifact."""
        text = (
            f'<ir_version: 10, opset_import: ["" : 21]> g ({self.inputs}) => (float[batch,{self.output}] y)'
            f" {{ {self.body} }}"
        )
        proto = onnx.parser.parse_model(text)
        random = np.random.default_rng(0)
        values = {n: random.normal(size=s).astype(np.float32) / 4 for n, s in self.weights.items()}
        for name, value in (values | dict(self.constants)).items():
            proto.graph.initializer.append(numpy_helper.from_array(np.asarray(value), name))
        for node in proto.graph.node:
            node.name = node.name or f"block/{node.output[0]}"
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "model.onnx"
        onnx.save(proto, path)
        graph = GraphModel.load(path)
        return ModelArtifact(path, graph.save(path), 21, (), (), find_sites(graph), "test")


MOD_MODELS: dict[str, ModModel] = {
    "fold-batch-norm": ModModel(
        "[fc] h = MatMul(x, w) [bn] n = BatchNormalization(h, gamma, beta, mean, variance) y = Relu(n)",
        {"w": (8, 8), "gamma": (8,), "beta": (8,), "mean": (8,)},
        {"variance": np.linspace(0.5, 2, 8, dtype=np.float32)},
    ),
    "fold-norm-affine": ModModel(
        "[norm] n = LayerNormalization(x, gain, shift) [fc] y = MatMul(n, w)",
        {"w": (8, 8), "gain": (8,), "shift": (8,)},
    ),
    "einsum-to-matmul": ModModel(
        'y = Einsum<equation="bnd,bmd->bnm">(x, x)', inputs="float[batch,4,8] x", output="4,4"
    ),
    "conv-to-matmul": ModModel(
        "y = Conv(x, w, b)", {"w": (16, 16, 1), "b": (16,)}, inputs="float[batch,16,6] x", output="16,6"
    ),
    "column-to-row": ModModel(
        "[fc] h = MatMul(w, x) b = Add(h, bias) y = Tanh(b)",
        {"w": (8, 16), "bias": (8, 1)},
        inputs="float[batch,16,1] x",
        output="8,1",
    ),
    "split-concat": ModModel(
        "n = Shape<start=0, end=1>(x) s = Concat<axis=0>(n, width) e = Expand(row, s) c ="
        " Concat<axis=1>(x, e)"
        " [fc] y = MatMul(c, w)",
        {"row": (1, 4), "w": (12, 8)},
        {"width": np.array([4])},
    ),
    "fold-constants": ModModel("t = Transpose<perm=[1,0]>(w) [fc] y = MatMul(x, t)", {"w": (8, 8)}),
    "remove-no-ops": ModModel("i = Identity(x) [fc] y = MatMul(i, w)", {"w": (8, 8)}),
    "share-duplicates": ModModel(
        "a = Relu(x) b = Relu(x) [fc] h = MatMul(a, w) y = Add(h, b)", {"w": (8, 8)}
    ),
    "reassociate-interaction": ModModel(
        "t = Transpose<perm=[0,2,1]>(x) [dot] s = MatMul(x, t) [mix] y = MatMul(s, w)",
        {"w": (160, 4)},
        inputs="float[batch,160,64] x",
        output="160,4",
    ),
    "merge-gathers": ModModel(
        "i = Gather<axis=1>(ids, zero) j = Gather<axis=1>(ids, one) e = Gather<axis=0>(p, i)"
        " f = Gather<axis=0>(q, j) y = Concat<axis=1>(e, f)",
        {"p": (10, 4), "q": (12, 4)},
        {"zero": np.array(0), "one": np.array(1)},
        inputs="int64[batch,2] ids",
    ),
    "sum-experts": ModModel(
        "[fc1] a = MatMul(x, w1) c = Unsqueeze(a, last) [fc2] b = MatMul(x, w2) d = Unsqueeze(b, last)"
        " s = Concat<axis=2>(c, d) e = Unsqueeze(x, last) t = Slice(e, zero, two, one)"
        " g = Softmax<axis=1>(t) y = MatMul(s, g)",
        {"w1": (8, 8), "w2": (8, 8)},
        {"last": np.array([-1]), "zero": np.array([0]), "one": np.array([1]), "two": np.array([2])},
        output="8,1",
    ),
    "merge-parallel-linears": ModModel(
        "[fc1] g = MatMul(x, w1) [fc2] h = MatMul(x, w2) r = Relu(g) y = Mul(r, h)",
        {"w1": (8, 8), "w2": (8, 8)},
    ),
    "join-parts": ModModel(
        "a, b = Split<axis=1>(x, sizes) c = Concat<axis=1>(a, b) y = Relu(c)", {}, {"sizes": np.array([3, 5])}
    ),
    "pad-sites": ModModel(
        "[fc1] h = MatMul(x, w1) r = Relu(h) [fc2] y = MatMul(r, w2)",
        {"w1": (16, 20), "w2": (20, 8)},
        inputs="float[batch,16] x",
    ),
}
