"""Write a convolution of kernel size 1 as a matrix product, which can be a site and have FP8.

Without groups, strides and padding every position is multiplied by one matrix (C channels in, O out, P
positions)::

    Conv(X, W, b)[n, :, p]   =   W · X[n, :, p] + b        W (O, C), X (batch, C, P), b (O, 1)

Several position axes become one by a Reshape, and several again behind the product. The compressed
interaction network of xDeepFM has such convolutions. One that FP8 products cannot serve (`Site.is_fp8_able`)
stays.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

import numpy as np
import numpy.typing as npt
import onnx

from loka_onnx.core.rewrite import Applied, Declined
from loka_onnx.core.site import LEAST_FP8
from loka_onnx.graph.model import GraphModel, Node, Tensor, element_type, is_constant, values_of
from loka_onnx.transforms.base import Mod, NotRewritten, find


@dataclass(frozen=True)
class Pointwise:
    """A convolution with weight (O, C) and bias (O, 1), and lengths of its positions, -1 if unknown."""

    node: Node
    weight: npt.NDArray[np.floating]
    bias: npt.NDArray[np.floating] | None
    positions: tuple[int, ...]


class ConvToMatMul(Mod[Pointwise]):
    """Conv of kernel size 1, with `least` channels before and behind → MatMul."""

    name = "conv-to-matmul"

    def __init__(self, least: int = LEAST_FP8) -> None:
        self._least = least

    def _find(self, model: GraphModel) -> Iterator[Pointwise | Declined]:
        nodes = (node for node in model.nodes if node.op == "Conv")
        return find(nodes, lambda node: _read(node, self._least))

    def rewrite(self, model: GraphModel, match: Pointwise) -> Applied:
        """Replace the Conv by a MatMul, weight on the left, named after its module, between Reshapes."""
        node, (channels, summed) = match.node, match.weight.shape
        # Nodes that are no site are called after their module and their operator.
        base = str(node.name).removesuffix("/conv").replace("/", ".").strip(".")
        result: Tensor = node.inputs[0]
        is_flat = len(match.positions) == 1
        if not is_flat:
            together = -1 if -1 in match.positions else prod(match.positions)
            result = _reshaped(model, result, (0, summed, together), f"{base}/flat")
        weight = model.constant(f"{base}.weight", match.weight)
        result = model.add("MatMul", [weight, result], f"{base}/matmul", node.outputs[0].dtype)
        site = result.inputs[0]
        if match.bias is not None:
            result = model.add("Add", [result, model.constant(f"{base}.bias", match.bias)], f"{base}/bias")
        if not is_flat:
            result = _reshaped(model, result, (0, channels, *match.positions), f"{base}/positions")
        model.hand_over(node.outputs[0], result)
        model.rename(site, base)
        return Applied(site.name, f"Conv of kernel size 1, {summed} → {channels} channels → MatMul")


def _read(node: Node, least: int) -> Pointwise:
    source, weight, *rest = node.inputs
    biases = [tensor for tensor in rest if tensor.name]
    if not all(map(is_constant, [weight, *biases])):
        raise NotRewritten("its weight or its bias is computed")
    values = values_of(weight)
    kernel = values.shape[2:]
    if any(length != 1 for length in kernel):
        raise NotRewritten(f"its kernel is {' × '.join(map(str, kernel))}, not 1")
    for attribute, plain in (("group", 1), ("strides", 1), ("pads", 0)):
        given = np.atleast_1d(node.attrs.get(attribute, plain))
        if (given != plain).any():
            raise NotRewritten(f"it has {attribute} {given.tolist()}")
    dtype = node.outputs[0].dtype
    if dtype is None or element_type(dtype) not in {onnx.TensorProto.FLOAT, onnx.TensorProto.DOUBLE}:
        raise NotRewritten("its operands are not known to be FP32")
    if min(values.shape[:2]) < least:
        raise NotRewritten(f"{values.shape[1]} → {values.shape[0]} channels: FP8 products begin at {least}")
    positions = tuple(length if isinstance(length, int) else -1 for length in (source.shape or ())[2:])
    if len(positions) != len(kernel) or (len(positions) > 1 and positions.count(-1) > 1):
        raise NotRewritten(
            f"of its input's shape {source.shape} more than one axis of positions is not known"
        )
    bias = values_of(biases[0]).reshape(-1, 1) if biases else None
    return Pointwise(node, values.reshape(values.shape[:2]), bias, positions)


def _reshaped(model: GraphModel, tensor: Tensor, shape: tuple[int, ...], name: str) -> Tensor:
    return model.add("Reshape", [tensor, model.constant(f"{name}.shape", np.array(shape, np.int64))], name)
