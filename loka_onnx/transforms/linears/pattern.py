"""Read a linear layer, a product with one constant operand and its bias, and move factors into it.

Mods that change the shape of sites need a rank-2 constant weight to cut, join and pad along K or N,
and that multiplies an activation without factors, so that no value is rounded again when it moves.

With s and c for each input channel k, and t and d for each output channel n::

    (s·x + c) · W + b      =   x · (diag(s) W) + (b + c W)
    t·(x · W + b) + d      =   x · (W diag(t)) + (t·b + d)

New constants are computed in FP64 and rounded once, to the type of the weight.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from loka_onnx.graph.model import GraphModel, Node, Tensor, is_constant, producer, values_of
from loka_onnx.graph.shape_values import static_shape
from loka_onnx.graph.sites import PRODUCT_OPS
from loka_onnx.transforms.base import NotRewritten

Vector = npt.NDArray[np.float64]

NOMINAL_LENGTH = 256
"""Length of a dynamic axis where work is compared."""


class Work(NamedTuple):
    """Operations of products, and elements that are written for them or between them."""

    flops: int
    elements: int


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

    @property
    def channel_axis(self) -> int:
        """Axis of the output channels in the result, and of the input channels in the source."""
        return -2 if self.on_left else -1

    def weight_kn(self) -> npt.NDArray[np.floating]:
        """Return the weight as (K, N)."""
        values = values_of(self.weight)
        return values.T if self.is_transposed else values

    def stored(self, weight: npt.NDArray[np.floating]) -> npt.NDArray[np.floating]:
        """Return a weight (K, N) in the stored layout."""
        return weight.T if self.is_transposed else weight

    def bias_n(self) -> npt.NDArray[np.floating]:
        """Return the bias as (N,), zeros where there is none."""
        if self.bias is None:
            return np.zeros(self.n, values_of(self.weight).dtype)
        return np.broadcast_to(values_of(self.bias).reshape(-1), (self.n,))


def is_candidate(node: Node) -> bool:
    """Return whether a node is a MatMul or Gemm of which exactly one factor is constant."""
    return node.op in PRODUCT_OPS and is_constant(node.inputs[0]) != is_constant(node.inputs[1])


def read_linear(model: GraphModel, node: Node) -> Linear:
    """Return a candidate (`is_candidate`) with its bias as a linear; NotRewritten if it has another form."""
    is_gemm, on_left = node.op == "Gemm", is_constant(node.inputs[0])
    source, weight = node.inputs[1::-1] if on_left else node.inputs[:2]
    shape = values_of(weight).shape
    if len(shape) != 2:
        raise NotRewritten(f"its weight has rank {len(shape)}, not 2")
    if source.shape is None or len(source.shape) < 2:
        raise NotRewritten("the rank of its activation is unknown or below 2")
    if is_gemm and (on_left or node.attrs.get("transA", 0)):
        raise NotRewritten("a Gemm whose weight stands on the left, or whose activation is transposed")
    if is_gemm and (node.attrs.get("alpha", 1.0) != 1.0 or node.attrs.get("beta", 1.0) != 1.0):
        raise NotRewritten("a Gemm with factors alpha or beta, which would round the weight")
    is_transposed = bool(node.attrs.get("transB", 0)) if is_gemm else on_left
    n, k = shape if is_transposed else shape[::-1]
    add, bias = (None, None) if is_gemm or on_left else _bias_behind(model, node, n)
    if is_gemm and len(node.inputs) > 2 and node.inputs[2].name:
        bias = node.inputs[2]
        if not is_bias(bias, n):
            raise NotRewritten("a Gemm whose third operand is not a constant bias of N elements")
    result = (add or node).outputs[0]
    return Linear(node, source, weight, on_left, is_transposed, bias, add, result, k, n)


def _bias_behind(model: GraphModel, node: Node, n: int) -> tuple[Node | None, Tensor | None]:
    """Return the Add of a constant bias behind a MatMul, and that bias."""
    add = model.only_reader(node.outputs[0])
    bias = next((t for t in add.inputs if is_bias(t, n)), None) if add and add.op == "Add" else None
    return (None, None) if bias is None else (add, bias)


def is_bias(tensor: Tensor, n: int) -> bool:
    """Return whether a constant has one number, or one for each of N channels."""
    if not is_constant(tensor):
        return False
    shape = values_of(tensor).shape
    # More leading ones than the product has axes would add axes to it.
    return len(shape) <= 2 and shape[-1:] in ((), (1,), (n,)) and all(d == 1 for d in shape[:-1])


def absorb_before(model: GraphModel, node: Node, scale: Vector, shift: Vector | None = None) -> None:
    """Let a linear give for x what it gave for s·x + c, in place: W becomes diag(s) W, and b becomes b + c W.
    `scale` is s (K,), `shift` is c (K,), None for zeros. Raises as `read_linear`.
    """
    linear = read_linear(model, node)
    weight = linear.weight_kn().astype(np.float64)
    if shift is not None and shift.any():
        set_bias(model, linear, linear.bias_n().astype(np.float64) + shift @ weight)
    _set_weight(model, linear, scale[:, None] * weight)


def absorb_behind(model: GraphModel, node: Node, scale: Vector, shift: Vector | None = None) -> None:
    """Let a linear give t·y + d where it gave y, in place: W becomes W diag(t), and b becomes t·b + d.
    `scale` is t (N,), `shift` is d (N,), None for zeros. Raises as `read_linear`.
    """
    linear = read_linear(model, node)
    bias = scale * linear.bias_n() + (0.0 if shift is None else shift)
    if linear.bias is not None or bias.any():
        set_bias(model, linear, bias)
    _set_weight(model, linear, linear.weight_kn().astype(np.float64) * scale)


def _set_weight(model: GraphModel, linear: Linear, weight: Vector) -> None:
    dtype = values_of(linear.weight).dtype
    constant = model.constant(f"{linear.node.name}.weight", linear.stored(weight).astype(dtype))
    linear.node.inputs[0 if linear.on_left else 1] = constant


def set_bias(model: GraphModel, linear: Linear, bias: Vector) -> None:
    """Replace the bias of a linear by a constant (N,); a MatMul without one gets an Add behind it."""
    values = bias.astype(values_of(linear.weight).dtype)
    # With the weight on the left, rows of the product are output channels.
    constant = model.constant(f"{linear.node.name}.bias", values[:, None] if linear.on_left else values)
    if linear.add is not None:
        position = next(i for i, tensor in enumerate(linear.add.inputs) if is_constant(tensor))
        linear.add.inputs[position] = constant
    elif linear.node.op == "Gemm":
        linear.node.inputs = [*linear.node.inputs[:2], constant]
    else:
        model.insert_behind(linear.node.outputs[0], "Add", [constant], f"{linear.node.name}/add")


def made_by(tensor: Tensor, op: str) -> Node | None:
    """Return the producer of a tensor if it is of that operator, else None."""
    node = producer(tensor)
    return node if node is not None and node.op == op else None


def static_dim(tensor: Tensor, axis: int) -> int | None:
    """Return the length of an axis; None where it is unknown."""
    shape = static_shape(tensor)
    return shape[axis] if -len(shape) <= axis < len(shape) else None


def is_along_last(node: Node, tensor: Tensor) -> bool:
    """Return whether the axis of a node is the last one of a tensor."""
    return tensor.shape is not None and int(node.attrs.get("axis", 0)) in (-1, len(tensor.shape) - 1)


def constant_at(node: Node, position: int) -> npt.NDArray[Any] | None:
    """Return a constant input of a node; None where it is computed or absent."""
    is_given = len(node.inputs) > position and is_constant(node.inputs[position])
    return values_of(node.inputs[position]) if is_given else None
