"""Read a linear layer: a product with one constant operand, and its bias.

Mods that change the shape of sites need a rank-2 constant weight to cut, join and pad along K or N,
and that multiplies an activation without factors, so that no value is rounded again when it moves.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from loka_onnx.graph.model import GraphModel, Node, Tensor, consumers, is_constant, producer, values_of
from loka_onnx.graph.sites import PRODUCT_OPS
from loka_onnx.transforms.base import NotRewritten


@dataclass(frozen=True)
class Linear:
    """``source · W + b``, or ``W · source`` without a bias when the weight stands on the left.

    Attributes:
        weight: The constant as stored: (N, K) if `is_transposed` (Gemm's transB, or a weight on the left).
        bias: Constant with N elements, or one; None when there is no bias.
        add: The Add of the bias; None where Gemm adds it.
        result: The tensor after the bias.
    """

    node: Node
    source: Tensor
    weight: Tensor
    on_left: bool
    is_transposed: bool
    bias: Tensor | None
    add: Node | None
    result: Tensor
    k: int
    n: int

    def weight_kn(self) -> npt.NDArray[np.floating]:
        """Return the weight as (K, N)."""
        values = values_of(self.weight)
        return values.T if self.is_transposed else values

    def stored(self, weight: npt.NDArray[np.floating]) -> npt.NDArray[np.floating]:
        """Return a weight (K, N) in the stored layout."""
        return weight.T if self.is_transposed else weight

    def bias_n(self) -> npt.NDArray[np.floating]:
        """Return the bias as (N,), zeros where there is none."""
        dtype = values_of(self.weight).dtype
        if self.bias is None:
            return np.zeros(self.n, dtype)
        return np.broadcast_to(values_of(self.bias).reshape(-1), (self.n,))


def is_candidate(node: Node) -> bool:
    """Return whether exactly one operand of a product is constant."""
    return node.op in PRODUCT_OPS and is_constant(node.inputs[0]) != is_constant(node.inputs[1])


def read_linear(model: GraphModel, node: Node) -> Linear:
    """Read the linear layer of a product with one constant operand."""
    on_left = is_constant(node.inputs[0])
    weight, source = node.inputs[0 if on_left else 1], node.inputs[1 if on_left else 0]
    shape = values_of(weight).shape
    if len(shape) != 2:
        raise NotRewritten(f"its weight has rank {len(shape)}, not 2")
    if source.shape is None or len(source.shape) < 2:
        raise NotRewritten("the rank of its activation is unknown or below 2")
    if node.op == "Gemm":
        return _read_gemm(node, source, weight, on_left)
    n, k = shape if on_left else shape[::-1]
    add, bias = (None, None) if on_left else _bias_behind(model, node, n)
    result = node.outputs[0] if add is None else add.outputs[0]
    return Linear(node, source, weight, on_left, on_left, bias, add, result, k, n)


def _read_gemm(node: Node, source: Tensor, weight: Tensor, on_left: bool) -> Linear:
    if on_left or node.attrs.get("transA", 0):
        raise NotRewritten("a Gemm whose weight stands on the left, or whose activation is transposed")
    if node.attrs.get("alpha", 1.0) != 1.0 or node.attrs.get("beta", 1.0) != 1.0:
        raise NotRewritten("a Gemm with factors alpha or beta, which would round the weight")
    is_transposed = bool(node.attrs.get("transB", 0))
    shape = values_of(weight).shape
    n, k = shape if is_transposed else shape[::-1]
    bias = node.inputs[2] if len(node.inputs) > 2 and node.inputs[2].name else None
    if bias is not None and not _is_bias(bias, n):
        raise NotRewritten("a Gemm whose third operand is not a constant bias of N elements")
    return Linear(node, source, weight, False, is_transposed, bias, None, node.outputs[0], k, n)


def _bias_behind(model: GraphModel, node: Node, n: int) -> tuple[Node | None, Tensor | None]:
    """Return the Add of a constant bias behind a MatMul, and that bias."""
    product = node.outputs[0]
    readers = consumers(product)
    if model.is_output(product) or len(readers) != 1 or readers[0].op != "Add":
        return None, None
    add = readers[0]
    for position in (0, 1):
        other = add.inputs[1 - position]
        if add.inputs[position] is product and _is_bias(other, n) and other is not product:
            return add, other
    return None, None


def _is_bias(tensor: Tensor, n: int) -> bool:
    if not is_constant(tensor):
        return False
    shape = values_of(tensor).shape
    # More leading ones than the product has axes would add axes to it.
    return len(shape) <= 2 and shape[-1:] in ((), (1,), (n,)) and all(d == 1 for d in shape[:-1])


def only_reader(model: GraphModel, tensor: Tensor) -> Node | None:
    """Return the only reader of a tensor; None for none, several, or a graph output."""
    if model.is_output(tensor) or len(tensor.outputs) != 1:
        return None
    reader: Node = tensor.outputs[0]
    return reader


def made_by(tensor: Tensor, op: str) -> Node | None:
    """Return the producer of a tensor if it is of that operator."""
    node = producer(tensor)
    return node if node is not None and node.op == op else None


def static_dim(tensor: Tensor, axis: int) -> int | None:
    """Return the length of an axis; None where it is unknown."""
    if tensor.shape is None or not -len(tensor.shape) <= axis < len(tensor.shape):
        return None
    length = tensor.shape[axis]
    return int(length) if isinstance(length, int) and length >= 0 else None
