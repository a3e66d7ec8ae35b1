"""BF16 graphs that fusions are tried on, and how they are fused and run."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import torch
from onnx import TensorProto
from onnx_text import parsed

from loka_onnx.engines.inductor.fusions import FusionReport, fuse
from loka_onnx.engines.inductor.fusions.planned import PlannedGraph
from loka_onnx.engines.inductor.lowering.model import lower

BATCH, N, D, K, NF = 5, 12, 16, 8, 7
BF16, FP8 = ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn
RANDOM = np.random.default_rng(11)
ULP = 2.0**-8
"""Half a unit in the last place of BF16, relative."""


@dataclass(frozen=True)
class Model:
    """A BF16 graph from x, which is cast from one FP32 input; outputs are cast to FP32.

    Each has the zero point ``zero`` of FP8.
    """

    width: tuple[int, ...]
    text: str
    constants: dict[str, Any]
    outputs: tuple[str, ...] = ("y",)

    def but(self, old: str, new: str, outputs: tuple[str, ...] = (), **constants: Any) -> Model:
        """The graph with another text in one place, and with other outputs and constants."""
        assert self.text.count(old) == 1, (old, self.text)
        text = self.text.replace(old, new)
        return Model(self.width, text, self.constants | constants, outputs or self.outputs)

    def then(self, text: str, *outputs: str, **constants: Any) -> Model:
        """The graph with more nodes, and with other outputs."""
        return Model(self.width, f"{self.text} {text}", self.constants | constants, outputs or self.outputs)

    def save(self, path: Path, base: int = TensorProto.BFLOAT16) -> Path:
        leave = " ".join(f"{name}32 = Cast<to=1>({name})" for name in self.outputs)
        lengths = ",".join(map(str, ("batch", *self.width)))
        outputs = ", ".join(f"float[] {name}32" for name in self.outputs)
        text = f"x = Cast<to={base}>(x32) {self.text} {leave}"
        constants = {"zero": np.array(0, FP8), **self.constants}
        onnx.save(parsed(text, constants, inputs=f"float[{lengths}] x32", outputs=outputs), path)
        return path

    def in_fp32(self, path: Path) -> Path:
        """Save the form that plans are made for."""
        wide = {
            name: value.astype(np.float32) if value.dtype == BF16 else value
            for name, value in self.constants.items()
        }
        return replace(self, constants=wide).save(path, TensorProto.FLOAT)

    def rows(self, batch: int = BATCH) -> np.ndarray:
        return RANDOM.standard_normal((batch, *self.width)).astype(np.float32)

    def wide(self) -> dict[str, np.ndarray]:
        return {name: np.asarray(value).astype(np.float64) for name, value in self.constants.items()}


def bf16(*shape: int, scale: float = 1.0) -> np.ndarray:
    return (RANDOM.standard_normal(shape) * scale).astype(BF16)


def rounded(values: np.ndarray) -> np.ndarray:
    """Values as BF16 rounds them, in float64."""
    return values.astype(np.float32).astype(BF16).astype(np.float64)


def fused(model: Model, folder: Path) -> tuple[PlannedGraph, FusionReport]:
    graph = PlannedGraph.load(model.save(folder / "planned.onnx"))
    return graph, fuse(graph)


def ops(graph: PlannedGraph) -> list[str]:
    return sorted(node.op for node in graph.live_nodes())


def sites_of(report: FusionReport, fusion: str) -> list[tuple[str, ...]]:
    return [place.sites for place in report.fused.get(fusion, ())]


def run(model: Path | PlannedGraph, *inputs: np.ndarray) -> list[np.ndarray]:
    module = lower(model).eval()
    with torch.no_grad():
        return [np.asarray(value) for value in module(*map(torch.from_numpy, inputs))]


def close(found: np.ndarray, exact: np.ndarray, relative: float = 4, absolute: float | None = None) -> None:
    """Within some half units of BF16, by default of the value and of the largest one."""
    assert found.shape == exact.shape
    absolute = 4 * float(np.abs(exact).max()) if absolute is None else absolute
    np.testing.assert_allclose(found, exact, rtol=relative * ULP, atol=absolute * ULP)


def close_quantized(
    found: np.ndarray, exact: np.ndarray, scale: float, relative: float = 4, absolute: float | None = None
) -> None:
    """Half a step of E4M3 more than `close`, which takes steps."""
    steps = np.clip(exact / scale, -448, 448)
    absolute = 4 * float(np.abs(exact).max()) / scale if absolute is None else absolute
    close(found / scale, steps, relative + 2.0**-4 / ULP, absolute + 2.0**-9 / ULP)


def unchanged(model: Model, folder: Path) -> FusionReport:
    """The fused form computes what the planned one does, whatever was fused."""
    graph, report = fused(model, folder)
    x = model.rows()
    for found, expected in zip(run(graph, x), run(folder / "planned.onnx", x), strict=True):
        close(found, expected, absolute=8 * max(1.0, float(np.abs(expected).max())))
    return report


def quantized(tensor: str, scale: str = "s", name: str = "y") -> str:
    """Q and DQ of a tensor, without the constant of the scale."""
    q, how = f"{name}q", f"{scale}, zero"
    return f"{q} = QuantizeLinear({tensor}, {how}) {name} = DequantizeLinear({q}, {how})"


def product(bias: bool = False, behind: str = "", outputs: str = "wide") -> Model:
    k, n = 32, 48
    constants = {
        "s": np.array(0.0078125, BF16),
        "w": (RANDOM.standard_normal((n, k)) * 40).astype(FP8),
        "ws": np.abs(bf16(n)) * BF16(0.01) + BF16(0.005),
        "wz": np.zeros(n, FP8),
        "b": bf16(n),
    }
    text = f"{quantized('x', name='dq')} dw = DequantizeLinear<axis=0>(w, ws, wz)"
    text += f" [fc] g = Gemm<transB=1>(dq, dw{', b' if bias else ''})"
    model, last = _followed(Model((k,), text, constants), behind, k, n)
    if "quantized" in outputs:
        model = model.then(quantized(last, "s2"), s2=np.array(0.03125, BF16))
    ends = (("y",) if "quantized" in outputs else ()) + (("wide",) if "wide" in outputs else ())
    return model.then(f"wide = Identity({last})" if "wide" in outputs else "", *ends)


def half(behind: str, width: int = 32, transposed: bool = True) -> Model:
    n = 48
    weight = bf16(n, width, scale=0.2) if transposed else bf16(width, n, scale=0.2)
    text = f"[fc] g = Gemm<transB={int(transposed)}>(x, w, b)"
    model, last = _followed(Model((width,), text, {"w": weight, "b": bf16(n)}), behind, width, n)
    if "quantized" not in behind:
        return model.then("", last)
    return model.then(quantized(last, "s2"), s2=np.array(0.03125, BF16))


def _followed(model: Model, behind: str, k: int, n: int) -> tuple[Model, str]:
    """Add a ReLU, or the sum of a first cross layer."""
    if "relu" in behind:
        return model.then("r = LeakyRelu<alpha=0.25>(g)" if "leaky" in behind else "r = Relu(g)"), "r"
    if "cross" in behind:
        text = "[other] x0 = MatMul(x, m) gm = Mul(x0, g) r = Add(gm, x0)"
        return model.then(text, m=bf16(k, n, scale=0.2)), "r"
    return model, "g"
