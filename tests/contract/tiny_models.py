"""Tiny ONNX models as backends get them: named sites, Q/DQ at eight-bit sites, explicit casts."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
from onnx import TensorProto as T
from onnx import helper as h
from onnx.reference import ReferenceEvaluator

from loka_onnx.core.formats import E4M3FN, NumberFormat, Precision
from loka_onnx.core.job import BatchSizes
from loka_onnx.core.plan import Decision, PrecisionPlan, Verdict
from loka_onnx.core.recipe import PER_CHANNEL_WEIGHT, PER_TENSOR
from loka_onnx.core.site import Operand, Site, SiteKind
from loka_onnx.engines.request import BuildRequest

ONNX_TYPES = {Precision.FP32: T.FLOAT, Precision.BF16: T.BFLOAT16, Precision.FP16: T.FLOAT16}
NUMPY_TYPES: dict[int, Any] = {
    T.FLOAT: np.float32,
    T.BFLOAT16: ml_dtypes.bfloat16,
    T.FLOAT16: np.float16,
    T.FLOAT8E4M3FN: ml_dtypes.float8_e4m3fn,
    T.INT8: np.int8,
    T.INT64: np.int64,
}


class GraphWriter:
    """Collects nodes and initializers; every method returns the name of the tensor it made."""

    def __init__(self, base: Precision, seed: int = 0, format: NumberFormat = E4M3FN) -> None:
        self.base, self.format = ONNX_TYPES[base], format
        self.nodes: list[onnx.NodeProto] = []
        self.initializers: dict[str, onnx.TensorProto] = {}
        self.sites: list[Site] = []
        self._random = np.random.default_rng(seed)

    def constant(self, name: str, value: Any, kind: int | None = None) -> str:
        kind = self.base if kind is None else kind
        array = np.asarray(value).astype(NUMPY_TYPES[kind])
        tensor = h.make_tensor(name, kind, array.shape, array.tobytes(), raw=True)
        self.initializers.setdefault(name, tensor)
        return name

    def op(self, kind: str, inputs: list[str], name: str, **attributes: Any) -> str:
        self.nodes.append(h.make_node(kind, inputs, [f"{name}:0"], name, **attributes))
        return f"{name}:0"

    def enter(self, tensor: str) -> str:
        return tensor if self.base == T.FLOAT else self.op("Cast", [tensor], f"{tensor}/cast", to=self.base)

    def leave(self, tensor: str, name: str = "out") -> str:
        kind: dict[str, Any] = {} if self.base == T.FLOAT else {"to": T.FLOAT}
        op = "Cast" if kind else "Identity"
        self.nodes.append(h.make_node(op, [tensor], [name], f"{name}/leave", **kind))
        return name

    def quantized(self, tensor: str, tag: str, amax: float = 4.0) -> str:
        scale = self.constant(f"{tag}/scale", amax / self.format.max)
        zero = self.constant(f"zero_{self.format.id}", 0.0, self.format.onnx_type)
        q = self.op("QuantizeLinear", [tensor, scale, zero], f"{tag}/q")
        return self.op("DequantizeLinear", [q, scale, zero], f"{tag}/dq")

    def weight(self, site: str, shape: tuple[int, ...]) -> str:
        return self.constant(f"{site}/w", self._values(shape))

    def narrow_weight(self, site: str, shape: tuple[int, ...], axis: int | None = None) -> str:
        values = self._values(shape)
        others = None if axis is None else tuple(a for a in range(len(shape)) if a != axis)
        scale = np.abs(values).max(axis=others) / self.format.max
        spread = scale if axis is None else np.expand_dims(scale, others or ())
        stored = values / spread if self.format.is_float else np.rint(values / spread)
        q = self.constant(f"{site}/w_eight", stored, self.format.onnx_type)
        s = self.constant(f"{site}/w_scale", scale)
        zero = self.constant(
            f"zero_{self.format.id}{np.shape(scale)}", np.zeros_like(scale), self.format.onnx_type
        )
        attributes = {} if axis is None else {"axis": axis}
        return self.op("DequantizeLinear", [q, s, zero], f"{site}/wdq", **attributes)

    def site(self, name: str, kind: SiteKind, k: int, n: int, output: str) -> None:
        node = next(node for node in self.nodes if node.name == name)
        operands = tuple(
            Operand(t, i, kind is SiteKind.LINEAR and "/w" in t, None, ())
            for i, t in enumerate(node.input[:2])
        )
        self.sites.append(Site(name, kind, node.op_type, operands, output, k, n, 1))

    def save(self, path: Path, inputs: dict[str, tuple[int, ...]], *, external: bool = False) -> Path:
        graph = h.make_graph(
            self.nodes,
            "tiny",
            [h.make_tensor_value_info(i, T.FLOAT, ["batch", *s]) for i, s in inputs.items()],
            [h.make_tensor_value_info("out", T.FLOAT, ["batch", None])],
            list(self.initializers.values()),
        )
        model = h.make_model(graph, opset_imports=[h.make_opsetid("", 21)], ir_version=10)
        onnx.checker.check_model(model)
        data = f"{path.name}.data"
        onnx.save(model, path, save_as_external_data=external, location=data, size_threshold=64)
        return path

    def _values(self, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
        return (self._random.normal(size=shape) / np.sqrt(shape[0])).astype(np.float32)


@dataclass(frozen=True)
class TinyModel:
    path: Path
    plan: PrecisionPlan
    sites: tuple[Site, ...]
    sample: Path

    def rows(self, count: int) -> dict[str, np.ndarray[Any, Any]]:
        return {name: value[:count] for name, value in np.load(self.sample).items()}

    def expected(self, count: int) -> np.ndarray[Any, Any]:
        """Its first output for these rows, by ONNX's reference evaluator."""
        return ReferenceEvaluator(onnx.load(self.path)).run(None, self.rows(count))[0]


def request_for(model: TinyModel, output: Path, device: str = "cpu", **changes: Any) -> BuildRequest:
    """Builds a model; the architecture is the device where `changes` have no other."""
    own = {"model": model.path, "plan": model.plan, "sites": model.sites, "sample": model.sample}
    own |= {"output": output, "target": device, "architecture": device, "batch": BatchSizes(1, 8, 16)}
    return BuildRequest(**own | changes)


def make_plan(
    sites: tuple[Site, ...], *, base: Precision, fp8: tuple[str, ...] = (), per_channel: tuple[str, ...] = ()
) -> PrecisionPlan:
    recipes = {s.name: PER_CHANNEL_WEIGHT if s.name in per_channel else PER_TENSOR for s in sites}
    decisions = tuple(
        Decision(s.name, Precision.FP8, recipes[s.name], Verdict.SAFE, "test", 4.0 / 448, (0.01,))
        if s.name in fp8
        else Decision(s.name, base, None, Verdict.NOT_JUDGED, "test")
        for s in sites
    )
    return PrecisionPlan("fp8-all" if fp8 else base.value, "digest", base, decisions, {}, 1.0 if fp8 else 0.0)


def write_sample(path: Path, inputs: dict[str, tuple[int, ...]], rows: int = 16) -> Path:
    random = np.random.default_rng(1)
    np.savez(path, **{name: random.normal(size=(rows, *s)).astype(np.float32) for name, s in inputs.items()})
    return path


@dataclass(frozen=True)
class MlpShape:
    widths: tuple[int, ...] = (64, 128, 32)
    per_channel: tuple[str, ...] = ()
    external: bool = False
    drop_activation_qdq: tuple[str, ...] = ()


def mlp(
    folder: Path, base: Precision, plan_base: Precision, *, fp8: bool, shape: MlpShape | None = None
) -> TinyModel:
    """Gemm (transB) and Relu chain ``mlp.fc0``, ``mlp.fc1`` … over one input ``x``."""
    shape = shape or MlpShape()
    w = GraphWriter(base)
    x = w.enter("x")
    for i, (k, n) in enumerate(zip(shape.widths, shape.widths[1:], strict=False)):
        name = f"mlp.fc{i}"
        axis = 0 if name in shape.per_channel else None
        weight = w.narrow_weight(name, (n, k), axis) if fp8 else w.weight(name, (n, k))
        left = w.quantized(x, f"{name}/x") if fp8 and name not in shape.drop_activation_qdq else x
        x = w.op("Gemm", [left, weight, w.constant(f"{name}/b", np.ones(n) / 10)], name, transB=1)
        w.site(name, SiteKind.LINEAR, k, n, x)
        x = w.op("Relu", [x], f"mlp.relu{i}")
    w.leave(x)
    folder.mkdir(parents=True, exist_ok=True)
    inputs = {"x": (shape.widths[0],)}
    path = w.save(folder / "model.onnx", inputs, external=shape.external)
    sites = tuple(w.sites)
    names = tuple(s.name for s in sites) if fp8 else ()
    plan = make_plan(sites, base=plan_base, fp8=names, per_channel=shape.per_channel)
    return TinyModel(path, plan, sites, write_sample(folder / "sample.npz", inputs))
