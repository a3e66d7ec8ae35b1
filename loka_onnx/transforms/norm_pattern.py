"""Reading a normalization that was exported as primitives.

Shared by the LayerNorm and the RMSNorm rule: both divide by the root of a mean of squares and scale the
result. A reader follows the graph backwards from the scaling product and returns what it read, or the
reason why it stopped.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import onnx

from loka_onnx.graph.model import (
    GraphModel,
    Node,
    Tensor,
    consumers,
    element_type,
    is_constant,
    producer,
    values_of,
)


class NotANorm(Exception):
    """The nodes compute something else; the message says what was read."""


@dataclass(frozen=True)
class DecomposedNorm:
    """A normalization read from primitives.

    Attributes:
        source: What is normalized.
        axis: First normalized axis, negative.
        epsilon: What is added to the mean of squares.
        scale: Constant factor, or None.
        bias: Constant summand, or None.
        result: The tensor that the norm replaces.
        module: Module path of the nodes, for the name of the fused node.
        inner: Every node of the pattern; only `result` may be read from outside.
    """

    source: Tensor
    axis: int
    epsilon: float
    scale: Tensor | None
    bias: Tensor | None
    result: Tensor
    module: str
    inner: tuple[Node, ...]


@dataclass(frozen=True)
class RootMeanSquare:
    """sqrt(mean(x²) + ε), or its reciprocal.

    Attributes:
        squared: The tensor whose squares are averaged.
        axis: First averaged axis, negative.
        epsilon: ε.
        inverted: Whether the reciprocal was read.
        nodes: The nodes that compute it.
    """

    squared: Tensor
    axis: int
    epsilon: float
    inverted: bool
    nodes: tuple[Node, ...]


def read_root_mean_square(tensor: Tensor) -> RootMeanSquare:
    """Follow a tensor back to the mean of squares that it is the root of.

    Raises:
        NotANorm: It is something else.
    """
    nodes: list[Node] = []
    node = _expect(tensor, {"Sqrt", "Reciprocal", "Pow", "Div"})
    inverted = False
    if node.op == "Reciprocal" or (node.op == "Div" and scalar(node.inputs[0]) == 1.0):
        inverted = True
        nodes.append(node)
        node = _expect(node.inputs[0 if node.op == "Reciprocal" else 1], {"Sqrt"})
    if node.op == "Pow":
        exponent = scalar(node.inputs[1])
        if exponent not in (0.5, -0.5):
            raise NotANorm(f"a power of {exponent}")
        inverted = exponent < 0
    elif node.op != "Sqrt":
        raise NotANorm(f"a {node.op}")
    nodes.append(node)
    add = _expect(node.inputs[0], {"Add"})
    nodes.append(add)
    epsilon, mean = _scalar_and_other(add)
    average = _expect(mean, {"ReduceMean"})
    nodes.append(average)
    square = _expect(average.inputs[0], {"Pow", "Mul"})
    nodes.append(square)
    if square.op == "Pow" and scalar(square.inputs[1]) != 2.0:
        raise NotANorm(f"a mean of powers of {scalar(square.inputs[1])}")
    if square.op == "Mul" and square.inputs[0] is not square.inputs[1]:
        raise NotANorm("a mean of products of two tensors")
    return RootMeanSquare(square.inputs[0], trailing_axis(average), epsilon, inverted, tuple(nodes))


def read_quotient(node: Node) -> tuple[Tensor, RootMeanSquare]:
    """Read ``x / sqrt(…)`` or ``x · rsqrt(…)``.

    Raises:
        NotANorm: It is something else.
    """
    if node.op == "Div":
        root = read_root_mean_square(node.inputs[1])
        if root.inverted:
            raise NotANorm("a division by a reciprocal root")
        return node.inputs[0], root
    for position in (1, 0):
        try:
            root = read_root_mean_square(node.inputs[position])
        except NotANorm:
            continue
        if root.inverted:
            return node.inputs[1 - position], root
    raise NotANorm("a product without a reciprocal root")


def read_centred(tensor: Tensor, axis: int) -> tuple[Tensor, tuple[Node, ...]]:
    """Read ``x − mean(x)`` over the axes from `axis` on: x, and the nodes.

    Raises:
        NotANorm: It is something else.
    """
    subtract = _expect(tensor, {"Sub"})
    average = _expect(subtract.inputs[1], {"ReduceMean"})
    if average.inputs[0] is not subtract.inputs[0]:
        raise NotANorm("what is subtracted is not the mean")
    if trailing_axis(average) != axis:
        raise NotANorm("mean and variance are taken over different axes")
    return subtract.inputs[0], (subtract, average)


def why_not_fused(model: GraphModel, norm: DecomposedNorm) -> str | None:
    """Why a norm that was read stays as it is; None when it can be fused."""
    if norm.source.dtype is None or element_type(norm.source.dtype) != onnx.TensorProto.FLOAT:
        return "only FP32 norms are fused: the fused node takes its statistics in FP32"
    if normalized_shape(norm.source, norm.axis) is None:
        return "the length of a normalized axis is not known"
    if not _is_private(model, norm):
        return "an intermediate result of the norm is read elsewhere"
    return None


def with_scale(norm: DecomposedNorm) -> DecomposedNorm:
    """Take a constant scale that is the only reader of the result."""
    scaled = _constant_step(norm, "Mul")
    if scaled is not None:
        node, constant = scaled
        norm = replace(norm, scale=constant, result=node.outputs[0], inner=(*norm.inner, node))
    return norm


def with_bias(norm: DecomposedNorm) -> DecomposedNorm:
    """Take a constant bias that is the only reader of the result."""
    shifted = _constant_step(norm, "Add")
    if shifted is not None:
        node, constant = shifted
        norm = replace(norm, bias=constant, result=node.outputs[0], inner=(*norm.inner, node))
    return norm


def trailing_axis(reduce: Node) -> int:
    """First axis of a reduction over trailing axes, negative.

    Raises:
        NotANorm: Other axes, or keepdims = 0, which a norm cannot broadcast.
    """
    if not reduce.attrs.get("keepdims", 1):
        raise NotANorm("a mean without kept dimensions")
    if "axes" in reduce.attrs:
        axes = [int(axis) for axis in reduce.attrs["axes"]]
    elif len(reduce.inputs) > 1 and is_constant(reduce.inputs[1]):
        axes = [int(axis) for axis in np.atleast_1d(values_of(reduce.inputs[1]))]
    else:
        raise NotANorm("a mean over axes that are not constant")
    shape = reduce.inputs[0].shape
    if shape is None and any(axis >= 0 for axis in axes):
        raise NotANorm("a mean over axes of a tensor of unknown rank")
    negative = sorted(axis - len(shape) if axis >= 0 else axis for axis in axes)
    if not negative or negative != list(range(-len(negative), 0)):
        raise NotANorm(f"a mean over axes {axes}, which are not the last ones")
    return negative[0]


def scalar(tensor: Tensor) -> float | None:
    """Value of a constant with one element; None for anything else."""
    if not is_constant(tensor):
        return None
    values = values_of(tensor)
    return float(values.reshape(-1)[0]) if values.size == 1 else None


def module_of(nodes: tuple[Node, ...]) -> str:
    """Module path in the name of the first node (``<module>/<op>``); empty at the top of the model."""
    return str(nodes[0].name).rpartition("/")[0]


def normalized_shape(source: Tensor, axis: int) -> tuple[int, ...] | None:
    """Static shape of the normalized axes; None where it is not known."""
    if source.shape is None or len(source.shape) < -axis:
        return None
    dims = source.shape[axis:]
    return tuple(int(d) for d in dims) if all(isinstance(d, int) and d > 0 for d in dims) else None


def _is_private(model: GraphModel, norm: DecomposedNorm) -> bool:
    """Whether only nodes of the pattern read its intermediate results, and none is a graph output."""
    for node in norm.inner:
        for tensor in node.outputs:
            if tensor is norm.result:
                continue
            if model.is_output(tensor) or any(
                all(reader is not other for other in norm.inner) for reader in consumers(tensor)
            ):
                return False
    return True


def _constant_step(norm: DecomposedNorm, op: str) -> tuple[Node, Tensor] | None:
    shape = normalized_shape(norm.source, norm.axis)
    readers = consumers(norm.result)
    if shape is None or len(readers) != 1 or readers[0].op != op:
        return None
    node = readers[0]
    rank = len(norm.source.shape)
    for tensor in node.inputs:
        if is_constant(tensor) and _varies_within(values_of(tensor).shape, shape, rank):
            return node, tensor
    return None


def _varies_within(shape: tuple[int, ...], normalized: tuple[int, ...], rank: int) -> bool:
    """Whether a constant varies over the normalized axes only, and adds no axis to a tensor of `rank`."""
    padded = (1,) * (rank - len(shape)) + shape
    target = (1,) * (rank - len(normalized)) + normalized
    return len(padded) == rank and all(a in (1, b) for a, b in zip(padded, target, strict=True))


def _expect(tensor: Tensor, ops: set[str]) -> Node:
    node = producer(tensor)
    if node is None or node.op not in ops:
        raise NotANorm(f"a {node.op if node is not None else 'constant or input'}")
    return node


def _scalar_and_other(add: Node) -> tuple[float, Tensor]:
    for position in (0, 1):
        value = scalar(add.inputs[position])
        if value is not None:
            return value, add.inputs[1 - position]
    raise NotANorm("a sum without a constant epsilon")
