"""INT8 products in the form that ONNX Runtime's CPU provider fuses to integer kernels.

**Biases** become INT32::

    x · W + b ≈ sx·sw[c] · (Σ (qx − zx)·qw + b₃₂)        b₃₂ = round(b / (sx·sw[c]))

A product whose float bias becomes a Gemm's, as that of a MatMul and an Add does, runs in FP32 otherwise. The
bias moves by half a unit of the sum at most. One that is too large for INT32 is added by a Sum, which ONNX
Runtime does not fuse: it would clip the bias of a Gemm or an Add without a word. Likewise what is added to a
product and is no constant.

**A Relu behind a product** stays only where a single Q with zero point 0 reads it, which clips alike. ONNX
Runtime 1.31 fuses no product before another Relu: that becomes Max(y, 0).
"""

from __future__ import annotations

import os
from collections import defaultdict
from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnx
from onnx import NodeProto, TensorProto, helper, numpy_helper

from loka_onnx.engines.onnx_operands import OperandReader

MOST = 2.0**30
"""Largest magnitude of a bias: the sum of the products has the other half of INT32's range."""
MATRIX = 2
"""Axes of the result of a product that becomes a Gemm."""
_INTEGERS = {TensorProto.INT8, TensorProto.UINT8}
_ZERO = "loka/integer/zero"


def write_integer_products(engine: Path) -> None:
    """Rewrite the biases and Relus of INT8 products of a model file in place."""
    model = onnx.load(os.fspath(engine), load_external_data=False)
    _Writer(model, OperandReader(engine)).write()
    onnx.save(model, os.fspath(engine))


class _Writer:
    def __init__(self, model: onnx.ModelProto, reader: OperandReader) -> None:
        self._graph, self._reader = model.graph, reader
        self._makers = {name: node for node in self._graph.node for name in node.output}
        self._readers: dict[str, list[NodeProto]] = defaultdict(list)
        for node in self._graph.node:
            for name in node.input:
                self._readers[name].append(node)
        inferred = onnx.shape_inference.infer_shapes(model).graph
        typed = (*inferred.value_info, *inferred.output)
        self._ranks = {value.name: len(value.type.tensor_type.shape.dim) for value in typed}
        self._outputs = {value.name for value in self._graph.output}
        self._stored = {tensor.name: tensor.data_type for tensor in self._graph.initializer}

    def write(self) -> None:
        nodes, biases, has_max = [], [], False
        for node in self._graph.node:
            nodes.append(node)
            factors = self._factors(node)
            if not factors:
                continue
            last = self._sum_of(node)
            bias = self._bias(node, last, factors)
            if bias is not None and bias.op_type == "Sum":
                nodes.append(bias)
            elif bias is not None:
                biases.append(bias)
            for reader in self._readers[node.output[0]]:
                if node.op_type == "MatMul" and reader.op_type == "Add" and reader is not last:
                    reader.op_type = "Sum"
            for relu in self._readers[last.output[0]]:
                if relu.op_type == "Relu" and not self._is_clipped(relu):
                    relu.op_type, has_max = "Max", True
                    relu.input.append(_ZERO)
        if has_max:
            self._graph.initializer.append(numpy_helper.from_array(np.zeros((), np.float32), _ZERO))
        del self._graph.node[:]
        self._graph.node.extend([*biases, *nodes])

    def _factors(self, product: NodeProto) -> list[NodeProto]:
        """Return the DQ of both factors of an INT8 product; nothing of another node."""
        attributes = {a.name: helper.get_attribute_value(a) for a in product.attribute}
        if product.op_type not in {"Gemm", "MatMul"} or attributes.get("transA"):
            return []
        if attributes.get("alpha", 1.0) != 1.0 or attributes.get("beta", 1.0) != 1.0:
            return []
        makers = [self._makers.get(name) for name in product.input[:2]]
        found = [maker for maker in makers if maker is not None and self._is_integer(maker)]
        return found if len(found) == len(makers) else []

    def _is_integer(self, node: NodeProto) -> bool:
        kinds = {self._stored.get(name) for name in node.input[2:]}
        return node.op_type == "DequantizeLinear" and bool(kinds & _INTEGERS)

    def _sum_of(self, product: NodeProto) -> NodeProto:
        """Return the Add of a constant that alone reads a MatMul, or else the product itself."""
        readers = self._readers[product.output[0]]
        if product.op_type == "MatMul" and len(readers) == 1 and readers[0].op_type == "Add":
            return readers[0] if {*readers[0].input} & self._stored.keys() else product
        return product

    def _bias(self, product: NodeProto, holder: NodeProto, factors: list[NodeProto]) -> NodeProto | None:
        """Replace a float bias; return its node, to be added: a DQ, or the Sum of a Gemm; None for none."""
        at = next((i for i, n in enumerate(holder.input) if self._stored.get(n) == TensorProto.FLOAT), None)
        if at is None or self._ranks.get(product.output[0]) != MATRIX:
            return None
        bias = self._reader.constant(holder.input[at])
        steps = [self._reader.constant(factor.input[1]).astype(np.float32) for factor in factors]
        unit = np.asarray(steps[0] * steps[1], np.float32)
        rounded = np.rint(bias.astype(np.float64) / unit)
        if bias.ndim != 1 or not (np.abs(rounded) <= MOST).all():
            return self._summed(product, holder)
        dequantize = self._dequantize(f"{product.name}/bias", rounded.astype(np.int32), unit)
        holder.input[at] = dequantize.output[0]
        return dequantize

    def _summed(self, product: NodeProto, holder: NodeProto) -> NodeProto | None:
        """Keep a bias in FP32; return the Sum behind a Gemm, None where the Add becomes one."""
        if holder is not product:
            holder.op_type = "Sum"
            return None
        bias = product.input.pop()
        result, product.output[0] = product.output[0], f"{product.name}/product"
        return helper.make_node("Sum", [product.output[0], bias], [result], name=f"{product.name}/bias")

    def _dequantize(
        self, name: str, values: npt.NDArray[np.int32], unit: npt.NDArray[np.float32]
    ) -> NodeProto:
        inputs = {"q": values, "scale": unit, "zero": np.zeros(unit.shape, np.int32)}
        names = [f"{name}/{part}" for part in inputs]
        stored = (numpy_helper.from_array(a, n) for n, a in zip(names, inputs.values(), strict=True))
        self._graph.initializer.extend(stored)
        return helper.make_node("DequantizeLinear", names, [f"{name}/dq"], name=f"{name}/dq", axis=0)

    def _is_clipped(self, relu: NodeProto) -> bool:
        """True if a single Q reads a Relu, and its smallest value stands for 0."""
        readers = self._readers[relu.output[0]]
        if len(readers) != 1 or readers[0].op_type != "QuantizeLinear" or relu.output[0] in self._outputs:
            return False
        zero = readers[0].input[2] if len(readers[0].input) > MATRIX else ""
        return self._stored.get(zero) == TensorProto.UINT8 and not self._reader.constant(zero).any()
