"""Constants that a graph adds to products, and the logits of outputs.

Corrections of a quantized model go into a constant that is added anyway, so that no kernel is added.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from loka_onnx.core.artifact import OutputKind
from loka_onnx.graph.layout import LAYOUT_OPS
from loka_onnx.graph.model import GraphModel, Node, Tensor, consumers, is_constant, producer, values_of


@dataclass(frozen=True)
class Bias:
    """A constant input of a Gemm or Add, by `index`, which is 2 also for a Gemm without a third input yet."""

    node: Node
    index: int


def bias_of(model: GraphModel, product: Node) -> Bias | None:
    """Return the FP32 constant added to a product: the third input of a Gemm, present or not, unless `beta`
    is 0; or an operand of the Add that alone reads a MatMul. None for anything else.
    """
    if product.op == "Gemm":
        has_third = len(product.inputs) > 2 and bool(product.inputs[2].name)
        if product.attrs.get("beta", 1.0) == 0.0 or (has_third and not _is_float(product.inputs[2])):
            return None
        return Bias(product, 2)
    add = model.only_reader(product.outputs[0])
    if add is None or add.op != "Add":
        return None
    positions = (i for i in (0, 1) if _is_float(add.inputs[i]) and add.inputs[1 - i] is product.outputs[0])
    return next((Bias(add, index) for index in positions), None)


def biased(model: GraphModel, product: Node) -> Tensor:
    """Return the tensor of a product plus its constant (`bias_of`); the product's own tensor without one."""
    bias = bias_of(model, product)
    tensor: Tensor = (product if bias is None else bias.node).outputs[0]
    return tensor


@dataclass(frozen=True)
class Score:
    """The logit (or regression) of an output; for a probability also the Sigmoid that reads the logit."""

    tensor: Tensor
    sigmoid: Node | None


def score_of(model: GraphModel, output: str, kind: OutputKind) -> Score | None:
    """Return the score of a graph output: the output itself or, for a probability, the input of the Sigmoid
    that makes it, layout operators between. None for a probability that has readers, or no such Sigmoid.
    """
    tensor = next(each for each in model.outputs if each.name == output)
    if kind is not OutputKind.PROBABILITY:
        return Score(tensor, None)
    if consumers(tensor):
        return None
    node = _behind_layout(model, tensor)
    return Score(node.inputs[0], node) if node is not None and node.op == "Sigmoid" else None


def score_bias(model: GraphModel, score: Tensor) -> Bias | None:
    """Return the FP32 constant of the Gemm or Add that makes a score, layout operators between; or None."""
    node = _behind_layout(model, score)
    if node is None or node.op == "Gemm":
        return None if node is None else bias_of(model, node)
    positions = (index for index in (0, 1) if node.op == "Add" and _is_float(node.inputs[index]))
    return next((Bias(node, index) for index in positions), None)


def _behind_layout(model: GraphModel, tensor: Tensor) -> Node | None:
    """Return the maker of a tensor behind layout operators, each the only reader of its input."""
    node = producer(tensor)
    while node is not None and node.op in LAYOUT_OPS:
        node = producer(node.inputs[0]) if model.only_reader(node.inputs[0]) is not None else None
    return node


def _is_float(tensor: Tensor) -> bool:
    return is_constant(tensor) and values_of(tensor).dtype == np.float32


def expose_scores(model: GraphModel, kinds: Mapping[str, OutputKind]) -> dict[str, str]:
    """Make scores graph outputs, in place; return their names by output, but for outputs without a score."""
    names: dict[str, str] = {}
    for output, kind in kinds.items():
        score = score_of(model, output, kind)
        if score is None:
            continue
        if not model.is_output(score.tensor):
            model.add_output(score.tensor, np.float32, score.tensor.shape)
        names[output] = score.tensor.name
    return names
