"""A normalization exported as primitives, and the checks before it is fused; `reading` reads it.

Conversions between float types may stand around a norm, never inside: from its squares to its quotient all
must be FP32, as PyTorch and Keras write the norms of FP16 and BF16 models.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import isqrt, prod

import onnx

from loka_onnx.graph.model import GraphModel, Node, Tensor, consumers, is_constant, producer, shape_of
from loka_onnx.transforms.norms.walk import NotANorm, lossless_chain, static_length, type_of

_LARGEST_PATTERN = 100
"""Nodes; the longest exported pattern has about forty."""
_INTEGERS = frozenset({onnx.TensorProto.INT64, onnx.TensorProto.INT32})


class NotFused(NotANorm):
    """The operator of a rule does not compute this norm; the message names the difference."""

    def __init__(self, reason: str, norm: DecomposedNorm) -> None:
        super().__init__(reason)
        self.norm = norm


@dataclass(frozen=True)
class DecomposedNorm:
    """A normalization read from primitives.

    Attributes:
        axes: Normalized axes, negative, ascending.
        epsilon: Summand of the mean of squares.
        is_mean: Whether squares are averaged; added otherwise.
        inner: Every node of the pattern; only `result` may be read from outside.
        factor: Multiplies the scale; a power of two.
    """

    source: Tensor
    axes: tuple[int, ...]
    epsilon: float
    is_centred: bool
    is_mean: bool
    scale: Tensor | None
    bias: Tensor | None
    result: Tensor
    module: str
    inner: tuple[Node, ...] = ()
    factor: float = 1.0

    @property
    def shape(self) -> tuple[int, ...] | None:
        """Lengths of the normalized axes; None where one is unknown."""
        if static_length(self.source, self.axes) is None:
            return None
        return tuple(int(shape_of(self.source)[axis]) for axis in self.axes)


def with_scale(norm: DecomposedNorm) -> DecomposedNorm:
    """Take in a constant scale that is the only reader of the result."""
    step = _constant_step(norm, "Mul") if norm.scale is None and norm.bias is None else None
    return norm if step is None else replace(extended(norm, step[0]), scale=step[1])


def with_bias(norm: DecomposedNorm) -> DecomposedNorm:
    """Take in a constant bias that is the only reader of the result."""
    step = _constant_step(norm, "Add") if norm.bias is None else None
    return norm if step is None else replace(extended(norm, step[0]), bias=step[1])


def extended(norm: DecomposedNorm, node: Node) -> DecomposedNorm:
    """Return a norm with one more node at its end."""
    return replace(norm, result=node.outputs[0], inner=(*norm.inner, node))


def why_not_fused(model: GraphModel, norm: DecomposedNorm) -> str | None:
    """Return why a norm cannot be fused; None when it can."""
    if type_of(norm.source) != onnx.TensorProto.FLOAT:
        return "only FP32 norms are fused: the fused node takes its statistics in FP32"
    if norm.shape is None:
        return "the length of a normalized axis is not known"
    if not _is_private(model, norm):
        return "an intermediate result of the norm is read elsewhere"
    return None


def over_last_axes(norm: DecomposedNorm) -> DecomposedNorm:
    """Return the norm in operator form: last axes, averaged squares, scale along the axes.

    Where squares are added over K elements, sum(d·d) + ε = K·(mean(d·d) + ε/K).
    """
    if norm.axes != tuple(range(-len(norm.axes), 0)):
        raise NotFused(f"it normalizes axes {list(norm.axes)}, which are not the last ones", norm)
    if not varies_within(norm, norm.scale) or not varies_within(norm, norm.bias):
        raise NotFused("its scale or bias varies along other axes than the normalized ones", norm)
    if norm.is_mean or norm.shape is None:
        return norm
    length = prod(norm.shape)
    root = isqrt(length)
    if root * root != length or root & (root - 1):
        reason = f"it adds {length} squares, and 1/√{length}, the scale of the operator that averages them,"
        raise NotFused(f"{reason} is no FP32 number", norm)
    return replace(norm, is_mean=True, epsilon=norm.epsilon / length, factor=1 / root)


def varies_within(norm: DecomposedNorm, constant: Tensor | None) -> bool:
    """Return whether a constant varies over the normalized axes only, and adds no axis."""
    if constant is None:
        return True
    shape = norm.shape
    if shape is None:
        # `why_not_fused` reports it.
        return True
    rank, own = len(shape_of(norm.source)), shape_of(constant)
    padded = (1,) * (rank - len(own)) + own
    target = (1,) * (rank - len(shape)) + shape
    return len(padded) == rank and all(a in (1, b) for a, b in zip(padded, target, strict=True))


def module_of(node: Node) -> str:
    """Return the module path in a node's name (``<module>/<op>``); empty at the top of the model."""
    return str(node.name).rpartition("/")[0]


def nodes_between(source: Tensor, result: Tensor) -> tuple[Node, ...]:
    """Return the nodes that compute a tensor from another one and from constants."""
    stops = {id(tensor) for tensor in lossless_chain(source)}
    found: dict[int, Node] = {}
    pending = [result]
    while pending:
        tensor = pending.pop()
        node = producer(tensor)
        if id(tensor) in stops or is_constant(tensor) or not tensor.name:
            continue
        if node is None or len(found) > _LARGEST_PATTERN:
            raise NotANorm("it depends on another tensor")
        if id(node) not in found:
            found[id(node)] = node
            # The origin of a shape does not matter: its value was read.
            pending += [] if node.op == "Shape" else list(node.inputs)
    return tuple(found.values())


def _is_private(model: GraphModel, norm: DecomposedNorm) -> bool:
    """Return whether only nodes of the pattern read its inner results, and none is a graph output."""
    inner = {id(node) for node in norm.inner}
    for node in norm.inner:
        for tensor in node.outputs:
            # Shapes are computed once for many readers.
            if tensor is norm.result or type_of(tensor) in _INTEGERS:
                continue
            if model.is_output(tensor) or any(id(reader) not in inner for reader in tensor.outputs):
                return False
    return True


def _constant_step(norm: DecomposedNorm, op: str) -> tuple[Node, Tensor] | None:
    """Return the only reader of the result, of that operator, and its other operand, which is constant."""
    readers = consumers(norm.result)
    if norm.shape is None or len(readers) != 1 or readers[0].op != op:
        return None
    constant = next((tensor for tensor in readers[0].inputs if is_constant(tensor)), None)
    return None if constant is None or not varies_within(norm, constant) else (readers[0], constant)
