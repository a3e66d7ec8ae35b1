"""Products of an exported model, and shares of them, reckoned from files alone.

The share of a plan is that of the FP8-able arithmetic (2·M·N·K over linear sites with K and N of 16 and more)
and, beside it, that of all products of the exported model: matrix products of two activations, convolutions,
contractions and recurrent cells too, whether they are sites or not. Sizes come from running two rows through
ONNX Runtime, so that nothing rests on shape inference.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
from onnx import helper

PRODUCTS = ("MatMul", "Gemm", "Conv", "Einsum", "GRU", "LSTM", "RNN")
ROWS = 2
"""Some models are exported so that they fail at one row: a squeeze takes its axis away."""
GATES = {"GRU": 3, "LSTM": 4, "RNN": 1}


@dataclass(frozen=True)
class Product:
    """One node that multiplies.

    Attributes:
        node: Its name.
        op_type: Its operator.
        flops: Of one row.
    """

    node: str
    op_type: str
    flops: int


def products_of(path: Path, rows: Mapping[str, np.ndarray]) -> tuple[Product, ...]:
    """Every product of the main graph of a model, with its floating-point operations for one row.

    Args:
        path: The ONNX file.
        rows: Input → its values for `ROWS` rows.
    """
    model = onnx.load(path)
    nodes = [node for node in model.graph.node if node.op_type in PRODUCTS]
    constants = {one.name: tuple(one.dims) for one in model.graph.initializer}
    wanted = {name for node in nodes for name in (*node.input, *node.output) if name} - set(constants)
    wanted -= {one.name for one in model.graph.input} | {one.name for one in model.graph.output}
    model.graph.output.extend(helper.make_empty_tensor_value_info(name) for name in sorted(wanted))
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = ort.InferenceSession(model.SerializeToString(), options)
    names = [one.name for one in session.get_outputs()]
    taken = {one.name for one in session.get_inputs()}
    values = session.run(names, {name: value for name, value in rows.items() if name in taken})
    shapes = constants | {name: value.shape for name, value in rows.items()}
    shapes |= {name: np.shape(value) for name, value in zip(names, values, strict=True)}
    return tuple(Product(node.name, node.op_type, flops_of(node, shapes) // ROWS) for node in nodes)


def flops_of(node: onnx.NodeProto, shapes: Mapping[str, tuple[int, ...]]) -> int:
    """Multiplications and additions of a product.

    Args:
        node: One of `PRODUCTS`.
        shapes: Of its inputs and outputs.
    """
    attributes = {one.name: helper.get_attribute_value(one) for one in node.attribute}
    inputs = [shapes[name] for name in node.input if name]
    if node.op_type in GATES:
        steps, batch, _ = inputs[0]
        _, gates, width = inputs[1]
        return 2 * steps * batch * gates * (width + inputs[2][-1])
    if node.op_type == "Einsum":
        equation = attributes["equation"].decode().replace(" ", "")
        sizes: dict[str, int] = {}
        left, _, right = equation.partition("->")
        for letters, shape in zip(left.split(","), inputs, strict=True):
            sizes |= dict(zip(letters, shape, strict=True))
        contracted = set(left) - {","} - set(right)
        return 2 * prod(sizes.values()) if len(inputs) > 1 and contracted else 0
    output = prod(shapes[node.output[0]])
    if node.op_type == "Conv":
        return 2 * output * prod(inputs[1][1:])
    if node.op_type == "Gemm":
        return 2 * output * inputs[0][0 if attributes.get("transA", 0) else 1]
    return 2 * output * inputs[0][-1]


def two_rows(path: Path, widths: Mapping[str, int]) -> dict[str, np.ndarray]:
    """Ones for two rows of what a model is fed; `widths` is of axes that the file leaves open."""
    kinds = {"tensor(int64)": np.int64, "tensor(int32)": np.int32, "tensor(float)": np.float32}
    session = ort.InferenceSession(str(path))
    rows = {}
    for one in session.get_inputs():
        rest = [widths[one.name] if not isinstance(size, int) else size for size in one.shape[1:]]
        rows[one.name] = np.ones((ROWS, *rest), kinds[one.type])
    return rows
