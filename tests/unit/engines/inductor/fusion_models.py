"""BF16 graphs that fusions are tried on, and how they are fused and run."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import torch
from onnx import TensorProto, helper, numpy_helper

from loka_onnx.engines.inductor.fusions import FusionReport, fuse
from loka_onnx.engines.inductor.fusions.planned import PlannedGraph
from loka_onnx.engines.inductor.lowering.model import lower

BATCH, N, D, K, NF = 5, 12, 16, 8, 7
BF16, FP8 = ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn
RANDOM = np.random.default_rng(11)
ULP = 2.0**-8
"""Half a unit in the last place of BF16, relative."""


@dataclass
class Model:
    """Nodes and constants of a BF16 graph over one FP32 input."""

    width: tuple[int, ...]
    nodes: list[onnx.NodeProto] = field(default_factory=list)
    constants: dict[str, np.ndarray] = field(default_factory=dict)
    outputs: tuple[str, ...] = ("y",)

    def add(self, op: str, inputs: list[str], output: str, /, name: str = "", **attributes: object) -> Model:
        self.nodes.append(helper.make_node(op, inputs, output.split(), name=name or output, **attributes))
        return self

    def constant(self, name: str, values: np.ndarray) -> Model:
        self.constants[name] = values
        return self

    def save(self, path: Path) -> Path:
        """Outputs are cast to FP32."""
        nodes = [helper.make_node("Cast", ["x32"], ["x"], name="enter", to=TensorProto.BFLOAT16)]
        nodes += self.nodes
        nodes += [helper.make_node("Cast", [o], [f"{o}32"], name=f"leave {o}", to=1) for o in self.outputs]
        graph = helper.make_graph(
            nodes,
            "g",
            [helper.make_tensor_value_info("x32", 1, ["batch", *self.width])],
            [helper.make_tensor_value_info(f"{o}32", 1, None) for o in self.outputs],
            [numpy_helper.from_array(v, n) for n, v in self.constants.items()],
        )
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
        onnx.save(model, path)
        return path


def bf16(*shape: int, scale: float = 1.0) -> np.ndarray:
    return (RANDOM.standard_normal(shape) * scale).astype(BF16)


def fused(model: Model, folder: Path) -> tuple[PlannedGraph, FusionReport]:
    graph = PlannedGraph.load(model.save(folder / "planned.onnx"))
    return graph, fuse(graph)


def ops(graph: PlannedGraph) -> list[str]:
    return sorted(f"{node.domain}::{node.op}" if node.domain else node.op for node in graph.live_nodes())


def run(model: Path | PlannedGraph, *inputs: np.ndarray) -> list[np.ndarray]:
    module = lower(model).eval()
    with torch.no_grad():
        return [np.asarray(value) for value in module(*map(torch.from_numpy, inputs))]


def product(bias: bool, behind: str, outputs: str) -> Model:
    """An FP8 Gemm with what follows it."""
    k, n = 32, 48
    model = Model((k,)).constant("s", np.array(0.0078125, BF16)).constant("zero", np.array(0, FP8))
    model.constant("w", (RANDOM.standard_normal((n, k)) * 40).astype(FP8))
    model.constant("ws", np.abs(bf16(n)) * BF16(0.01) + BF16(0.005)).constant("wz", np.zeros(n, FP8))
    model.constant("b", bf16(n))
    model.add("QuantizeLinear", ["x", "s", "zero"], "q").add("DequantizeLinear", ["q", "s", "zero"], "dq")
    model.add("DequantizeLinear", ["w", "ws", "wz"], "dw", axis=0)
    model.add("Gemm", ["dq", "dw", "b"] if bias else ["dq", "dw"], "g", name="fc", transB=1)
    last = _followed(model, behind, k, n)
    if "quantized" in outputs:
        _quantized(model, last)
    if "wide" in outputs:
        model.add("Identity", [last], "wide")
    model.outputs = (("y",) if "quantized" in outputs else ()) + (("wide",) if "wide" in outputs else ())
    return model


def half(behind: str, width: int = 32, transposed: bool = True) -> Model:
    """A BF16 Gemm with what follows it."""
    n = 48
    weight = bf16(n, width, scale=0.2) if transposed else bf16(width, n, scale=0.2)
    model = Model((width,)).constant("w", weight).constant("b", bf16(n))
    model.add("Gemm", ["x", "w", "b"], "g", name="fc", transB=int(transposed))
    last = _followed(model, behind, width, n)
    if "quantized" in behind:
        _quantized(model, last)
    model.outputs = ("y",) if "quantized" in behind else (last,)
    return model


def _followed(model: Model, behind: str, k: int, n: int) -> str:
    """Add a ReLU, or the sum of a first cross layer."""
    if "relu" in behind:
        model.add("Relu", ["g"], "r")
    if "cross" in behind:
        model.constant("m", bf16(k, n, scale=0.2)).add("MatMul", ["x", "m"], "x0", name="other")
        model.add("Mul", ["x0", "g"], "gm").add("Add", ["gm", "x0"], "r")
    return "r" if "relu" in behind or "cross" in behind else "g"


def _quantized(model: Model, last: str) -> None:
    model.constant("s2", np.array(0.03125, BF16)).constant("zero", np.array(0, FP8))
    model.add("QuantizeLinear", [last, "s2", "zero"], "q2")
    model.add("DequantizeLinear", ["q2", "s2", "zero"], "y")


def in_fp32(model: Model, path: Path) -> onnx.ModelProto:
    """The FP32 form of a model, as plans are made for it."""
    model.constants = {
        name: value.astype(np.float32) if value.dtype == BF16 else value
        for name, value in model.constants.items()
    }
    proto = onnx.load(model.save(path))
    proto.graph.node[0].attribute[0].i = TensorProto.FLOAT
    onnx.save(proto, path)
    return proto


def unchanged(model: Model, folder: Path, *inputs: np.ndarray) -> FusionReport:
    """The fused form computes what the planned one does, whatever was fused."""
    graph, report = fused(model, folder)
    for found, expected in zip(run(graph, *inputs), run(folder / "planned.onnx", *inputs), strict=True):
        assert found.shape == expected.shape
        np.testing.assert_allclose(
            found, expected, rtol=4 * ULP, atol=8 * ULP * max(1, np.abs(expected).max())
        )
    return report
