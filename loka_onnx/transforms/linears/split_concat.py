"""Let a linear layer read parts of a concatenation apart that are the same for every row.

    Concat(a, b)·W + c   =   a·W_a + b·W_b + c

where b is a row that Expand or Tile copied to every row of the batch: the user's features beside those of
many candidates, or a learned vector. b·W_b is computed once, before the copy, and broadcast by the sum. The
rest of the Concat keeps the name of the site. Other parts stay together: apart they save a copy and cost a
product, up to 3.2 times the time on one H100 (`benchmarks/micro/site_shapes.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from loka_onnx.core.rewrite import Applied, Declined
from loka_onnx.graph.model import GraphModel, Node, Tensor, consumers, producer, shape_of
from loka_onnx.transforms.base import Mod, NotRewritten, find
from loka_onnx.transforms.linears.pattern import (
    Linear,
    is_along_last,
    is_candidate,
    made_by,
    read_linear,
    static_dim,
)


@dataclass(frozen=True)
class ConcatPart:
    """Inputs of the Concat, or one tensor before it was copied, that one product reads, and rows of the
    weight.
    """

    tensors: tuple[Tensor, ...]
    rows: tuple[int, ...]


@dataclass(frozen=True)
class Concatenated:
    """A layer that reads a concatenation, and its parts; the first keeps the name of the site."""

    layer: Linear
    concat: Node
    parts: tuple[ConcatPart, ...]


class SplitConcat(Mod[Concatenated]):
    """Linear of a Concat → sum of linears, where a part is the same for every row."""

    name = "split-concat"

    def _find(self, model: GraphModel) -> Iterator[Concatenated | Declined]:
        return find(filter(is_candidate, model.nodes), lambda node: _read(model, node))

    def rewrite(self, model: GraphModel, match: Concatenated) -> Applied:
        """Give the site the first part and add the products of the others."""
        layer, site = match.layer, str(match.layer.node.name)
        first, *shared = match.parts
        weight = layer.weight_kn()
        origins: dict[str, tuple[str, ...]] = {}
        tensor = layer.node.outputs[0]
        for part in shared:
            rows = model.constant(f"{site}.weight.shared", weight[list(part.rows)])
            product = model.add("MatMul", [part.tensors[0], rows], f"{site}.shared")
            model.rename(product.inputs[0], f"{site}.shared")
            origins[product.inputs[0].name] = (site,)
            tensor = model.insert_behind(tensor, "Add", [product], f"{site}/sum")
        layer.node.inputs[0] = _joined(model, first, match.concat)
        layer.node.inputs[1] = model.constant(f"{site}.weight.part", layer.stored(weight[list(first.rows)]))
        widths = " + ".join(str(len(part.rows)) for part in match.parts)
        return Applied(site, f"K {layer.k} → {widths}, the products of '{match.concat.name}' apart", origins)


def _read(model: GraphModel, node: Node) -> Concatenated | None:
    """Return a layer that reads a Concat along its K; None for other layers."""
    try:
        layer = read_linear(model, node)
    except NotRewritten:
        return None
    concat = made_by(layer.source, "Concat")
    if concat is None or layer.on_left or not is_along_last(concat, layer.source):
        return None
    return Concatenated(layer, concat, _parts(concat))


def _parts(concat: Node) -> tuple[ConcatPart, ...]:
    shared: list[ConcatPart] = []
    tensors: list[Tensor] = []
    rows: list[int] = []
    end = 0
    for tensor in concat.inputs:
        width = static_dim(tensor, -1)
        if width is None:
            raise NotRewritten("the width of a part of its Concat is not known")
        start, end = end, end + width
        row = _row(tensor)
        if row is not None:
            shared.append(ConcatPart((row,), tuple(range(start, end))))
        else:
            tensors.append(tensor)
            rows += range(start, end)
    if not tensors:
        raise NotRewritten("every part of its Concat is the same for every row")
    if not shared:
        reason = "no part of its Concat is the same for every row: the copy costs less than"
        raise NotRewritten(f"{reason} {len(tensors)} products")
    return (ConcatPart(tuple(tensors), tuple(rows)), *shared)


def _row(tensor: Tensor) -> Tensor | None:
    """Return the row that a tensor repeats for the whole batch; None when it does not."""
    node = producer(tensor)
    if node is None or node.op not in {"Expand", "Tile"}:
        return None
    row = node.inputs[0]
    if row.shape is None or tensor.shape is None or len(row.shape) != len(tensor.shape):
        return None
    is_row = all(d == 1 for d in row.shape[:-1]) and row.shape[-1] == tensor.shape[-1]
    return row if is_row and not isinstance(tensor.shape[0], int) else None


def _joined(model: GraphModel, part: ConcatPart, concat: Node) -> Tensor:
    """Return the input of a product: one tensor, or a Concat made once for all layers."""
    if len(part.tensors) == 1:
        return part.tensors[0]
    wanted = [id(tensor) for tensor in part.tensors]
    for node in consumers(part.tensors[0]):
        is_along_k = node.op == "Concat" and is_along_last(node, concat.outputs[0])
        if is_along_k and [id(tensor) for tensor in node.inputs] == wanted:
            return node.outputs[0]
    joined = model.add("Concat", part.tensors, f"{concat.name}/rest", attrs={"axis": -1})
    joined.shape = [*shape_of(concat.outputs[0])[:-1], len(part.rows)]
    return joined
