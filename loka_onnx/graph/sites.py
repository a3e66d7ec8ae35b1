"""Find the sites of a graph."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from loka_onnx.core.site import Operand, Site, SiteKind
from loka_onnx.graph.model import GraphModel, Node, is_constant
from loka_onnx.graph.shape_values import static_shape

_BY_CHANNEL = frozenset({"GroupNormalization", "InstanceNormalization"})
_BY_AXES = frozenset({"LayerNormalization", "RMSNormalization", "SimplifiedLayerNormalization"})
NORM_OPS = _BY_CHANNEL | _BY_AXES | {"LpNormalization"}
PRODUCT_OPS = frozenset({"MatMul", "Gemm"})


def is_site(node: Node) -> bool:
    """True if the node is a matrix product or a normalization."""
    return node.op in NORM_OPS or (
        node.op in PRODUCT_OPS and not all(is_constant(tensor) for tensor in node.inputs[:2])
    )


def find_sites(model: GraphModel, merged_from: dict[str, tuple[str, ...]] | None = None) -> tuple[Site, ...]:
    """Return every site of the main graph, in topological order, with the origins of merged ones."""
    origins = merged_from or {}
    return tuple(describe(node, origins.get(node.name, ())) for node in model.sorted_nodes() if is_site(node))


def describe(node: Node, merged_from: tuple[str, ...] = ()) -> Site:
    """Return the site of one node."""
    if node.op in NORM_OPS:
        return _describe_norm(node, merged_from)
    left, right = node.inputs[0], node.inputs[1]
    axes = _contracting_axes(node)
    operands = tuple(
        Operand(tensor.name, index, is_constant(tensor), axis, static_shape(tensor))
        for index, (tensor, axis) in enumerate(zip((left, right), axes, strict=True))
    )
    if operands[0].constant:
        operands = operands[::-1]
    kind = SiteKind.LINEAR if operands[1].constant else SiteKind.INTERACTION
    lengths = (
        operand.shape[operand.contracting_axis]
        for operand in reversed(operands)
        if operand.shape and operand.contracting_axis is not None
    )
    k = next((length for length in lengths if length is not None), 0)
    n, rows = _columns_and_rows(node, operands)
    return Site(node.name, kind, node.op, operands, node.outputs[0].name, k, n, rows, merged_from)


def channel_axis(operand: Operand) -> int:
    """Return the output-channel axis of a product's operand: of the last two axes, the one not contracted."""
    if operand.contracting_axis is None:
        raise ValueError("a norm has no output channels")
    rank = len(operand.shape)
    if rank == 1:
        return 0
    return rank - 2 if operand.contracting_axis == rank - 1 else rank - 1


def _describe_norm(node: Node, merged_from: tuple[str, ...]) -> Site:
    source = node.inputs[0]
    shape = static_shape(source)
    k, rows = _normalized(node, shape) if shape else (0, 1)
    operand = Operand(source.name, 0, False, None, shape)
    return Site(node.name, SiteKind.NORM, node.op, (operand,), node.outputs[0].name, k, 0, rows, merged_from)


def _normalized(node: Node, shape: tuple[int | None, ...]) -> tuple[int, int]:
    """Return elements that share their statistics, and such sets in one example; dynamic axes count as 1."""
    if node.op == "LpNormalization":
        axis = int(node.attrs.get("axis", -1)) % len(shape)
        normalized, others = shape[axis : axis + 1], (*shape[1:axis], *shape[axis + 1 :])
        return _size(normalized), _size(others)
    if node.op in _BY_CHANNEL:
        # (batch, channels, …): an InstanceNormalization is one of as many groups as channels.
        channels = _size(shape[1:2])
        groups = int(node.attrs["num_groups"]) if node.op == "GroupNormalization" else channels
        return channels // groups * _size(shape[2:]), groups
    axis = int(node.attrs.get("axis", -1)) % len(shape)
    return _size(shape[axis:]), _size(shape[1:axis])


def _size(dimensions: Sequence[int | None]) -> int:
    return prod(d for d in dimensions if d is not None)


def _contracting_axes(node: Node) -> tuple[int | None, int | None]:
    """Contracting axis of each operand in its stored shape."""
    left, right = (len(static_shape(tensor)) for tensor in node.inputs[:2])
    if node.op == "Gemm":
        return (0 if node.attrs.get("transA", 0) else 1), (1 if node.attrs.get("transB", 0) else 0)
    return max(left - 1, 0), max(right - 2, 0)


def _columns_and_rows(node: Node, operands: Sequence[Operand]) -> tuple[int, int]:
    """Return output channels, and products per example that share one weight. The output of a product is
    (batch, …, rows, columns), or (experts, batch, columns). With the weight on the left, channels are the
    rows of that output. A weight of rank 1 has one channel.
    """
    output = static_shape(node.outputs[0])
    weight = operands[1]
    if weight.constant and weight.shape:
        channels = (weight.shape[channel_axis(weight)] or 0) if len(weight.shape) > 1 else 1
    else:
        channels = (output[-1] or 0) if output else 0
    per_example = prod(d for d in output if d is not None) if output else channels
    return channels, max(per_example // channels, 1) if channels else 1
