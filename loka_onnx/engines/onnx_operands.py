"""Operands of products in an ONNX graph: element types, Q/DQ pairs and FP8 weights.

Read from graphs that an engine maker has optimized, independently of the plan.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto

from loka_onnx.engines.draft import GraphDraft, attribute
from loka_onnx.sessions.model_files import FLOAT8_NAMES, read_model

INTEGER_OPS: Mapping[str, tuple[int, int]] = {
    **dict.fromkeys(("QGemm", "QLinearMatMul", "QLinearConv"), (0, 3)),
    **dict.fromkeys(("MatMulIntegerToFloat", "MatMulInteger", "ConvInteger"), (0, 1)),
}
"""ONNX Runtime's products of integers, and the positions of their factors."""
PRODUCT_OPS = frozenset(
    {"MatMul", "Gemm", "FusedMatMul", "FusedGemm", "TransposeMatMul", "Conv", "FusedConv", *INTEGER_OPS}
)


@dataclass(frozen=True)
class OperandSource:
    """Origin of an operand's values, which have `element_type` at the product: the FP8 type (`float8`) that
    they were rounded to, or the name of their folded float initializer (`constant`), if any.
    """

    element_type: str
    float8: str = ""
    constant: str = ""

    def describe(self) -> str:
        """Description such as ``float8e4m3fn dequantized to float``."""
        return f"{self.float8} dequantized to {self.element_type}" if self.float8 else self.element_type


class OperandReader(GraphDraft):
    """Reads the operands of products in one ONNX file, which is not edited."""

    def __init__(self, model: Path) -> None:
        super().__init__(read_model(model), model.parent)
        self._producers = {output: node for node in self.nodes for output in node.output}
        self._named = {node.name: node for node in self.nodes if node.name}
        inferred = onnx.shape_inference.infer_shapes(self._model).graph
        self._types: dict[str, int] = {
            value.name: value.type.tensor_type.elem_type
            for group in (inferred.input, inferred.value_info, inferred.output)
            for value in group
        }

    def producer(self, tensor: str) -> onnx.NodeProto | None:
        """Node that computes a tensor; None for inputs and constants."""
        return self._producers.get(tensor)

    def product(self, site: str) -> onnx.NodeProto | None:
        """Return the node of a site: the one of its name, or the one that an optimizer fused it into."""
        if site in self._named:
            return self._named[site]
        # ONNX Runtime names a fused node ``<first node>/<fusion>``.
        for name, node in self._named.items():
            if node.op_type in PRODUCT_OPS and name.startswith(f"{site}/") and "Fusion" in name[len(site) :]:
                return node
        return None

    def operands(self, node: onnx.NodeProto) -> tuple[OperandSource, ...]:
        """Sources of a product's two factors (not a Gemm's bias), or of a norm's input."""
        factors = INTEGER_OPS.get(node.op_type, (0, 1) if node.op_type in PRODUCT_OPS else (0,))
        return tuple(self._source(node.input[index]) for index in factors)

    def float_types(self) -> frozenset[str]:
        """Names of all floating-point types of the graph's tensors."""
        wide = (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16, TensorProto.DOUBLE)
        types = {t.data_type for t in self.constants.values()} | set(self._types.values())
        return frozenset(_type_name(kind) for kind in types & {*wide, *FLOAT8_NAMES})

    def note(self, key: str) -> str:
        """Value of the model's metadata; empty where it has none."""
        return next((entry.value for entry in self._model.metadata_props if entry.key == key), "")

    def dequantized_weight(self, site: str) -> npt.NDArray[np.float32] | None:
        """FP8 weight of a product times its scale; None when it has no FP8 initializer."""
        node = self._named.get(site)
        for tensor in node.input[:2] if node is not None else ():
            dequantize = self.behind_layout(tensor)
            if dequantize is None or dequantize.op_type != "DequantizeLinear":
                continue
            stored = dequantize.input[0]
            if stored not in self.constants or self.kind(stored) not in FLOAT8_NAMES:
                continue
            values, scale = (self.values(name).astype(np.float32) for name in dequantize.input[:2])
            if scale.ndim == 1:
                shape = [1] * values.ndim
                shape[attribute(dequantize, "axis", 1)] = -1
                scale = scale.reshape(shape)
            return np.asarray(values * scale, np.float32)
        return None

    def _source(self, tensor: str) -> OperandSource:
        if tensor in self.constants:
            return OperandSource(_type_name(self.kind(tensor)), constant=tensor)
        node, element = self.behind_layout(tensor), self._types.get(tensor, TensorProto.UNDEFINED)
        if node is None or node.op_type != "DequantizeLinear":
            return OperandSource(_type_name(element))
        if element == TensorProto.UNDEFINED and node.input[1] in self.constants:
            element = self.kind(node.input[1])
        return OperandSource(_type_name(element), FLOAT8_NAMES.get(self.quantized_kind(node), ""))


def _type_name(kind: int) -> str:
    return str(TensorProto.DataType.Name(kind)).lower()


def is_same_up_to_transpose(left: npt.NDArray[Any], right: npt.NDArray[Any]) -> bool:
    """True if two matrices are equal up to a transposition, as folding may apply."""
    return bool(np.array_equal(left, right) or (left.ndim == 2 and np.array_equal(left.T, right)))
