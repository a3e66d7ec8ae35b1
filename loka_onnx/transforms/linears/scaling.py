"""Move factors and summands of channels into a linear layer.

With s and c for each input channel k, and t and d for each output channel n::

    (s·x + c) · W + b      =   x · (diag(s) W) + (b + c W)
    t·(x · W + b) + d      =   x · (W diag(t)) + (t·b + d)

New constants are computed in FP64 and rounded once, to the type of the weight.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from loka_onnx.graph.model import GraphModel, Node, is_constant, values_of
from loka_onnx.transforms.linears.pattern import Linear, read_linear

Vector = npt.NDArray[np.float64]


def absorb_before(model: GraphModel, node: Node, scale: Vector, shift: Vector | None = None) -> None:
    """Let a linear read x where it read s·x + c; `scale` s and `shift` c are (K,), None for zeros."""
    linear = read_linear(model, node)
    weight = linear.weight_kn().astype(np.float64)
    if shift is not None and shift.any():
        _set_bias(model, linear, linear.bias_n().astype(np.float64) + shift @ weight)
    _set_weight(model, linear, scale[:, None] * weight)


def absorb_behind(model: GraphModel, node: Node, scale: Vector, shift: Vector | None = None) -> None:
    """Let a linear compute t·y + d where it computed y with bias; `scale` t and `shift` d are (N,)."""
    linear = read_linear(model, node)
    bias = scale * linear.bias_n() + (0.0 if shift is None else shift)
    if linear.bias is not None or bias.any():
        _set_bias(model, linear, bias)
    _set_weight(model, linear, linear.weight_kn().astype(np.float64) * scale)


def _set_weight(model: GraphModel, linear: Linear, weight: Vector) -> None:
    dtype = values_of(linear.weight).dtype
    constant = model.constant(f"{linear.node.name}.weight", linear.stored(weight).astype(dtype))
    linear.node.inputs[0 if linear.on_left else 1] = constant


def _set_bias(model: GraphModel, linear: Linear, bias: Vector) -> None:
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
