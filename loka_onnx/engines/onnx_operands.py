"""Operands of products in an ONNX graph: element types, Q/DQ pairs and FP8 weights.

Read from graphs that an engine maker has optimized, independently of the plan.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, numpy_helper
from onnx.external_data_helper import uses_external_data

from loka_onnx.graph.storage import read_external
from loka_onnx.sessions.model_files import FLOAT8_NAMES

LAYOUT_OPS = frozenset({"Transpose", "Reshape", "Flatten", "Squeeze", "Unsqueeze", "Identity"})
"""Operators that move values without changing them; an optimizer may put one between a DQ and its product."""
INTEGER_OPS: Mapping[str, tuple[int, int]] = {
    "QGemm": (0, 3),
    "QLinearMatMul": (0, 3),
    "QLinearConv": (0, 3),
    "MatMulIntegerToFloat": (0, 1),
    "MatMulInteger": (0, 1),
    "ConvInteger": (0, 1),
}
"""ONNX Runtime's products of integers, and the positions of their factors."""
PRODUCT_OPS = frozenset(
    {"MatMul", "Gemm", "FusedMatMul", "FusedGemm", "TransposeMatMul", "Conv", "FusedConv", *INTEGER_OPS}
)


@dataclass(frozen=True)
class Source:
    """Origin of an operand's values, which have `element_type` at the product.

    Attributes:
        float8: Name of the FP8 type that they were rounded to, if any.
        constant: Name of their float initializer, if they were folded.
    """

    element_type: str
    float8: str = ""
    constant: str = ""

    def describe(self) -> str:
        """Return for example ``float8e4m3fn dequantized to float``."""
        return f"{self.float8} dequantized to {self.element_type}" if self.float8 else self.element_type


class OperandReader:
    """Reads the operands of products in one ONNX file; loads external data on demand."""

    def __init__(self, model: Path) -> None:
        self._folder = os.fspath(model.parent)
        self._model = onnx.load(os.fspath(model), load_external_data=False)
        graph = self._model.graph
        self._initializers: dict[str, onnx.TensorProto] = {t.name: t for t in graph.initializer}
        self._producers: dict[str, onnx.NodeProto] = {o: node for node in graph.node for o in node.output}
        self._nodes: dict[str, onnx.NodeProto] = {node.name: node for node in graph.node if node.name}
        inferred = onnx.shape_inference.infer_shapes(self._model).graph
        self._types: dict[str, int] = {
            value.name: value.type.tensor_type.elem_type
            for group in (inferred.input, inferred.value_info, inferred.output)
            for value in group
        }

    def product(self, site: str) -> onnx.NodeProto | None:
        """Return the node of a site: the one of its name, or the one that an optimizer fused it into."""
        if site in self._nodes:
            return self._nodes[site]
        # ONNX Runtime names a fused node ``<first node>/<fusion>``.
        for name, node in self._nodes.items():
            if node.op_type in PRODUCT_OPS and name.startswith(f"{site}/") and "Fusion" in name[len(site) :]:
                return node
        return None

    def operands(self, node: onnx.NodeProto) -> tuple[Source, ...]:
        """Sources of a product's two factors (not a Gemm's bias), or of a norm's input."""
        factors = INTEGER_OPS.get(node.op_type, (0, 1) if node.op_type in PRODUCT_OPS else (0,))
        return tuple(self._source(node.input[index]) for index in factors)

    def float_types(self) -> frozenset[str]:
        """Names of all floating-point types of the graph's tensors."""
        wide = (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16, TensorProto.DOUBLE)
        types = {t.data_type for t in self._initializers.values()} | set(self._types.values())
        return frozenset(_type_name(kind) for kind in types & {*wide, *FLOAT8_NAMES})

    def constant(self, name: str) -> npt.NDArray[Any]:
        """Values of an initializer."""
        tensor = self._initializers[name]
        if uses_external_data(tensor):
            # onnx's own reader refuses files with several hard links, as an engine has.
            tensor = TensorProto.FromString(tensor.SerializeToString())
            read_external(tensor, Path(self._folder))
        return numpy_helper.to_array(tensor)

    def note(self, key: str) -> str:
        """Value of the model's metadata; empty where it has none."""
        return next((entry.value for entry in self._model.metadata_props if entry.key == key), "")

    def dequantized_weight(self, site: str) -> npt.NDArray[np.float32] | None:
        """FP8 weight of a product times its scale; None when it has no FP8 initializer."""
        node = self._nodes.get(site)
        for tensor in node.input[:2] if node is not None else ():
            dequantize = self._behind_layout(tensor)
            if dequantize is None or dequantize.op_type != "DequantizeLinear":
                continue
            stored = self._initializers.get(dequantize.input[0])
            if stored is None or stored.data_type not in FLOAT8_NAMES:
                continue
            values = self.constant(stored.name).astype(np.float32)
            scale = self.constant(dequantize.input[1]).astype(np.float32)
            if scale.ndim == 1:
                shape = [1] * values.ndim
                shape[attribute(dequantize, "axis", 1)] = -1
                scale = scale.reshape(shape)
            return np.asarray(values * scale, np.float32)
        return None

    def _behind_layout(self, tensor: str) -> onnx.NodeProto | None:
        node = self._producers.get(tensor)
        while node is not None and node.op_type in LAYOUT_OPS:
            node = self._producers.get(node.input[0])
        return node

    def _source(self, tensor: str) -> Source:
        initializer = self._initializers.get(tensor)
        if initializer is not None:
            return Source(_type_name(initializer.data_type), constant=tensor)
        node = self._behind_layout(tensor)
        element = _type_name(self._element_type(tensor, node))
        if node is not None and node.op_type == "DequantizeLinear":
            return Source(element, FLOAT8_NAMES.get(self._quantized_type(node), ""))
        return Source(element)

    def _element_type(self, tensor: str, node: onnx.NodeProto | None) -> int:
        known = self._types.get(tensor, TensorProto.UNDEFINED)
        if known == TensorProto.UNDEFINED and node is not None and node.op_type == "DequantizeLinear":
            scale = self._initializers.get(node.input[1])
            return scale.data_type if scale is not None else TensorProto.UNDEFINED
        return known

    def _quantized_type(self, dequantize: onnx.NodeProto) -> int:
        stored = self._initializers.get(dequantize.input[0])
        if stored is not None:
            return stored.data_type
        quantize = self._behind_layout(dequantize.input[0])
        if quantize is None or quantize.op_type != "QuantizeLinear":
            return TensorProto.UNDEFINED
        if len(quantize.input) > 2 and quantize.input[2] in self._initializers:
            return self._initializers[quantize.input[2]].data_type
        return int(attribute(quantize, "output_dtype", TensorProto.UNDEFINED))


def attribute(node: onnx.NodeProto, name: str, default: Any) -> Any:
    """Value of an attribute, or `default`."""
    return next((onnx.helper.get_attribute_value(a) for a in node.attribute if a.name == name), default)


def _type_name(kind: int) -> str:
    return str(TensorProto.DataType.Name(kind)).lower()


def is_same_up_to_transpose(left: npt.NDArray[Any], right: npt.NDArray[Any]) -> bool:
    """True if two matrices are equal up to a transposition, as folding may apply."""
    return bool(np.array_equal(left, right) or (left.ndim == 2 and np.array_equal(left.T, right)))
