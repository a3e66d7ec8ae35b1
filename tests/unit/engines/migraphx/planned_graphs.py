"""Planned graphs as `apply_plan` writes them, and what they compute, without MIGraphX."""

from typing import Any

import ml_dtypes
import numpy as np
import onnx
from onnx import TensorProto as T
from onnx import helper as h
from onnx import numpy_helper
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun

Array = np.ndarray[Any, Any]
FN, FNUZ = ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e4m3fnuz
LARGEST = {np.dtype(FN): 448.0, np.dtype(FNUZ): 240.0}
NUMPY = {T.FLOAT: np.float32, T.BFLOAT16: ml_dtypes.bfloat16, T.FLOAT16: np.float16}


class QuantizeLinear(OpRun):
    """Saturating, nearest even, in FP32: the ONNX specification's table, by ml_dtypes."""

    op_domain = ""

    def _run(self, x, scale, zero=None, **attributes):
        assert not np.ndim(scale)
        assert zero is not None
        if zero.dtype == np.int8:
            assert not zero.any()
            return (np.clip(np.rint(x.astype(np.float32) / np.float32(scale)), -128, 127).astype(np.int8),)
        limit = LARGEST[zero.dtype]
        with np.errstate(over="ignore"):
            quotient = x.astype(np.float32) / np.float32(scale)
        return (np.clip(quotient, -limit, limit).astype(zero.dtype),)


class DequantizeLinear(OpRun):
    """Exact in float64, then in the type of the scale."""

    op_domain = ""

    def _run(self, x, scale, zero=None, axis=None, **attributes):
        factor = np.asarray(scale).astype(np.float64)
        if factor.ndim:
            shape = [1] * x.ndim
            shape[1 if axis is None else axis] = -1
            factor = factor.reshape(shape)
        return ((x.astype(np.float64) * factor).astype(np.asarray(scale).dtype),)


def evaluate(model: onnx.ModelProto, **inputs: Array) -> list[Array]:
    evaluator = ReferenceEvaluator(model, new_ops=[QuantizeLinear, DequantizeLinear])
    return list(evaluator.run(None, inputs))


def reread(model: onnx.ModelProto) -> onnx.ModelProto:
    """The carrier with every FP8 constant read as E4M3FN again, as `reread_float8` does with programs."""
    result = onnx.ModelProto()
    result.CopyFrom(model)
    for tensor in result.graph.initializer:
        if tensor.data_type == T.FLOAT8E4M3FNUZ:
            tensor.data_type = T.FLOAT8E4M3FN
    return result


def constants(model: onnx.ModelProto) -> dict[str, Array]:
    return {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}


def quantizers(model: onnx.ModelProto) -> list[onnx.NodeProto]:
    return [node for node in model.graph.node if node.op_type in {"QuantizeLinear", "DequantizeLinear"}]


class Planned:
    """Collects nodes and constants; every method returns the name of the tensor it made."""

    def __init__(self, base: int = T.FLOAT, seed: int = 0) -> None:
        self.base, self.nodes, self.constants = base, [], {}
        self.random = np.random.default_rng(seed)

    def constant(self, name: str, values: Any, dtype: Any = None) -> str:
        array = np.asarray(values).astype(NUMPY[self.base] if dtype is None else dtype)
        self.constants.setdefault(name, numpy_helper.from_array(array, name))
        return name

    def op(self, kind: str, inputs: list[str], name: str, **attributes: Any) -> str:
        self.nodes.append(h.make_node(kind, inputs, [f"{name}:0"], name, **attributes))
        return f"{name}:0"

    def enter(self, tensor: str = "x") -> str:
        return tensor if self.base == T.FLOAT else self.op("Cast", [tensor], f"{tensor}/in", to=self.base)

    def pair(self, tensor: str, name: str, scale: float, dtype: Any = FN) -> str:
        inputs = [self.constant(f"{name}/scale", scale), self.constant(f"{name}/zero_point", 0.0, dtype)]
        q = self.op("QuantizeLinear", [tensor, *inputs], f"{name}/q")
        return self.op("DequantizeLinear", [q, *inputs], f"{name}/dq")

    def weight(self, name: str, values: Array, axis: int | None = None) -> str:
        """A weight in E4M3FN, one scale or one for each index of an axis; scales are BF16 numbers."""
        others = None if axis is None else tuple(a for a in range(values.ndim) if a != axis)
        scale = np.abs(values).max(axis=others) / 448
        scale = np.asarray(scale, np.float64).astype(ml_dtypes.bfloat16).astype(np.float32)
        spread = scale if axis is None else np.expand_dims(scale, others)
        inputs = [
            self.constant(f"{name}/fp8", np.clip(values / spread, -448, 448), FN),
            self.constant(f"{name}/scale", scale),
            self.constant(f"{name}/zero_point", np.zeros_like(scale), FN),
        ]
        attributes = {} if axis is None else {"axis": axis}
        return self.op("DequantizeLinear", inputs, f"{name}/dq", **attributes)

    def normal(self, *shape: int) -> Array:
        return self.random.normal(size=shape).astype(np.float32)

    def model(self, result: str, opset: int = 21, **inputs: tuple[Any, ...]) -> onnx.ModelProto:
        """One output ``y``, FP32; inputs with their shapes behind the batch."""
        leaving = ("Identity", {}) if self.base == T.FLOAT else ("Cast", {"to": T.FLOAT})
        self.nodes.append(h.make_node(leaving[0], [result], ["y"], "y/out", **leaving[1]))
        inputs = inputs or {"x": (8,)}
        graph = h.make_graph(
            self.nodes,
            "planned",
            [h.make_tensor_value_info(i, T.FLOAT, ["batch", *s]) for i, s in inputs.items()],
            [h.make_tensor_value_info("y", T.FLOAT, ["batch", *[None] * max(map(len, inputs.values()))])],
            list(self.constants.values()),
        )
        model = h.make_model(graph, opset_imports=[h.make_opsetid("", opset)], ir_version=11)
        onnx.checker.check_model(model, full_check=True)
        return model
