"""Find the sites of a graph."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

from loka_onnx.core.site import Operand, Site, SiteKind
from loka_onnx.graph.model import GraphModel, Node, Tensor, is_constant
from loka_onnx.graph.shape_values import static_shape

_BY_CHANNEL = frozenset({"GroupNormalization", "InstanceNormalization"})
_BY_AXES = frozenset({"LayerNormalization", "RMSNormalization", "SimplifiedLayerNormalization"})
NORM_OPS = _BY_CHANNEL | _BY_AXES | {"LpNormalization"}
PRODUCT_OPS = frozenset({"MatMul", "Gemm"})
BATCH = 61
"""Batch size at which the rows of sites are counted: an axis may be the batch times a length."""

Shape = tuple[int | None, ...]
Shapes = Mapping[str, Shape]


def is_site(node: Node) -> bool:
    """True if the node is a normalization, or a MatMul or Gemm whose factors are not both constant."""
    return node.op in NORM_OPS or (
        node.op in PRODUCT_OPS and not all(is_constant(tensor) for tensor in node.inputs[:2])
    )


def find_sites(model: GraphModel, merged_from: dict[str, tuple[str, ...]] | None = None) -> tuple[Site, ...]:
    """Return every site of the main graph, in topological order; `merged_from` are origins by site name."""
    origins = merged_from or {}
    nodes = [node for node in model.sorted_nodes() if is_site(node)]
    shapes = model.shapes_at(BATCH) if nodes else {}
    return tuple(_describe(node, shapes, origins.get(node.name, ())) for node in nodes)


def _describe(node: Node, shapes: Shapes, merged_from: tuple[str, ...]) -> Site:
    if node.op in NORM_OPS:
        return _describe_norm(node, shapes, merged_from)
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
        _length(operand.tensor, operand.shape, operand.contracting_axis, shapes)
        for operand in reversed(operands)
        if operand.contracting_axis is not None
    )
    k = next(filter(None, lengths), 0)
    n = _columns(node, operands[1], shapes)
    rows = _per_example(node.outputs[0], shapes, n)
    return Site(node.name, kind, node.op, operands, node.outputs[0].name, k, n, rows, merged_from)


def channel_axis(operand: Operand) -> int:
    """Return an operand's output-channel axis: of the last two, the one not summed; ValueError for a norm."""
    if operand.contracting_axis is None:
        raise ValueError("a norm has no output channels")
    rank = len(operand.shape)
    if rank == 1:
        return 0
    return rank - 2 if operand.contracting_axis == rank - 1 else rank - 1


def _describe_norm(node: Node, shapes: Shapes, merged_from: tuple[str, ...]) -> Site:
    source = node.inputs[0]
    shape = static_shape(source)
    k = _normalized(node, shape) if shape else 0
    operand, rows = Operand(source.name, 0, False, None, shape), _per_example(source, shapes, k)
    return Site(node.name, SiteKind.NORM, node.op, (operand,), node.outputs[0].name, k, 0, rows, merged_from)


def _normalized(node: Node, shape: tuple[int | None, ...]) -> int:
    """Return the number of elements that share their statistics; dynamic axes count as 1."""
    if node.op == "LpNormalization":
        axis = int(node.attrs.get("axis", -1)) % len(shape)
        return _size(shape[axis : axis + 1])
    if node.op in _BY_CHANNEL:
        # (batch, channels, …): an InstanceNormalization is one of as many groups as channels.
        channels = _size(shape[1:2])
        groups = int(node.attrs["num_groups"]) if node.op == "GroupNormalization" else channels
        return channels // groups * _size(shape[2:])
    return _size(shape[int(node.attrs.get("axis", -1)) % len(shape) :])


def _size(dimensions: Sequence[int | None]) -> int:
    return prod(d for d in dimensions if d is not None)


def _contracting_axes(node: Node) -> tuple[int | None, int | None]:
    """Contracting axis of each operand in its stored shape."""
    left, right = (len(static_shape(tensor)) for tensor in node.inputs[:2])
    if node.op == "Gemm":
        return (0 if node.attrs.get("transA", 0) else 1), (1 if node.attrs.get("transB", 0) else 0)
    return max(left - 1, 0), max(right - 2, 0)


def _length(tensor: str, shape: Shape, axis: int, shapes: Shapes) -> int:
    """Return the length of an axis, 0 if unknown; where `shape` leaves it open, that at `BATCH` rows."""
    if not shape or shape[axis] is not None:
        return (shape[axis] or 0) if shape else 0
    length = (shapes.get(tensor) or shape)[axis] or 0
    # A multiple of the batch is of rows.
    return length if length % BATCH else 0


def _columns(node: Node, second: Operand, shapes: Shapes) -> int:
    """Return the output channels, 0 if unknown. The output of a product is (batch, …, rows, columns), or
    (experts, batch, columns). With the weight on the left, channels are the rows of that output. A weight of
    rank 1 has one channel.
    """
    if second.constant and second.shape:
        return (second.shape[channel_axis(second)] or 0) if len(second.shape) > 1 else 1
    return _length(node.outputs[0].name, static_shape(node.outputs[0]), -1, shapes)


def _per_example(tensor: Tensor, shapes: Shapes, width: int) -> int:
    """Return rows of `width` elements for each example, at least 1; unknown axes count as 1."""
    shape = shapes.get(tensor.name, ())
    is_known = shape and None not in shape
    elements = _size(shape) // BATCH if is_known else _size(static_shape(tensor))
    return max(elements // width, 1) if width else 1
