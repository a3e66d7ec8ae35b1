"""Form of a planned model that TensorRT for RTX (1.7.1) compiles best; built engines confirm both rules.

`keep_tables_once`: the compiler moves Q across Concat, Transpose and Gather into the table, Q(rows(E)) =
rows(Q(E)), and stores a table that only that Q reads in half the bytes. A table with other readers would be
stored twice. There zero is added behind the lookup, across which the compiler does not move Q::

    Q(rows(E)) = Q(rows(E) + 0)    exactly, for every value, NaN and infinities included (-0 becomes +0)

The sum is computed in the lookup's kernel; behind Concat it would cost two more kernels in Wukong.

`split_by_heads`: sites that share an input are one product and a Split of its columns, and attention reads
each part by heads. Behind FP8 with a scale per output channel, the compiler cuts that product along the parts
and multiplies in the base precision. It does not when the columns are split by heads, the same movement of
values::

    q, k, v = Split(p),  H·D columns each;     Reshape(q) : (…, H, D),  …
    Split(Reshape(p) : (…, ΣH, D)),  H heads each
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from loka_onnx.engines.onnx_operands import attribute

MOVEMENTS = frozenset(
    {
        *("Concat", "Flatten", "Gather", "Identity", "Reshape"),
        *("Slice", "Split", "Squeeze", "Transpose", "Unsqueeze"),
    }
)
"""Operators that move values without changing them. All inputs of Concat are values, otherwise the first."""
FLOATS = frozenset({TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16})
Heads = tuple[tuple[int, ...], tuple[int, ...], int]
"""Sizes in front of the heads, heads of each part, and width of a head."""


class _Graph:
    """Producers and readers of tensors."""

    def __init__(self, graph: onnx.GraphProto) -> None:
        self.outputs = {output.name for output in graph.output}
        self.producers = {output: node for node in graph.node for output in node.output}
        self._readers: dict[str, list[onnx.NodeProto]] = {}
        for node in graph.node:
            for tensor in set(node.input):
                self._readers.setdefault(tensor, []).append(node)

    def readers(self, tensor: str) -> Sequence[onnx.NodeProto]:
        return self._readers.get(tensor, ())

    def moved(self, tensor: str) -> Iterator[str]:
        """Yield the tensor and every tensor that its values are moved to."""
        pending, seen = [tensor], {tensor}
        while pending:
            name = pending.pop()
            yield name
            for node in self.readers(name):
                if _moves(node, name):
                    pending += [output for output in node.output if output not in seen]
                    seen.update(node.output)


def _moves(node: onnx.NodeProto, tensor: str) -> bool:
    return node.op_type in MOVEMENTS and (node.op_type == "Concat" or node.input[0] == tensor)


def keep_tables_once(model: onnx.ModelProto) -> tuple[str, ...]:
    """Add zero to the rows of tables that would be stored twice; edits the model, returns them."""
    graph = model.graph
    tables = _stored_twice(graph)
    nodes: list[onnx.NodeProto] = []
    for original in graph.node:
        node = onnx.NodeProto()
        node.CopyFrom(original)
        nodes.append(node)
        if node.op_type != "Gather" or node.input[0] not in tables:
            continue
        kind, rows, name = tables[node.input[0]], node.output[0], f"{node.name or node.output[0]}/keep"
        zero = np.zeros((), helper.tensor_dtype_to_np_dtype(kind)).tobytes()
        graph.initializer.append(helper.make_tensor(f"{name}/zero", kind, (), zero, raw=True))
        node.output[0] = f"{name}/rows"
        nodes.append(helper.make_node("Add", [node.output[0], f"{name}/zero"], [rows], name))
    if tables:
        del graph.node[:]
        graph.node.extend(nodes)
    return tuple(tables)


def _stored_twice(graph: onnx.GraphProto) -> dict[str, int]:
    """Name and ONNX type of the tables whose rows a Q and another reader (a node, a Q, an output) read."""
    kinds = {tensor.name: tensor.data_type for tensor in graph.initializer if tensor.data_type in FLOATS}
    index = _Graph(graph)

    def is_shared(table: str) -> bool:
        tensors = list(index.moved(table))
        readers = [node for name in tensors for node in index.readers(name) if not _moves(node, name)]
        others = len(readers) - 1 + len(index.outputs.intersection(tensors))
        return others > 0 and any(node.op_type == "QuantizeLinear" for node in readers)

    lookups = (node.input[0] for node in graph.node if node.op_type == "Gather")
    return {table: kinds[table] for table in lookups if table in kinds and is_shared(table)}


def split_by_heads(model: onnx.ModelProto) -> tuple[str, ...]:
    """Split merged FP8 products by heads; edits the model and returns the Split nodes' names."""
    graph = model.graph
    index = _Graph(graph)
    integers = {
        tensor.name: tuple(int(value) for value in numpy_helper.to_array(tensor).flat)
        for tensor in graph.initializer
        if tensor.data_type == TensorProto.INT64
    }
    nodes: list[onnx.NodeProto] = []
    changed: dict[str, onnx.NodeProto] = {}
    for original in graph.node:
        heads = _heads_behind(index, integers, original) if original.op_type == "Split" else None
        if heads is None:
            nodes.append(original)
            continue
        (lead, counts, width), name = heads, original.name or original.output[0]
        shape, sizes, rows = (f"{name}/by_heads/{part}" for part in ("shape", "sizes", "rows"))
        for constant, values in ((shape, (*lead, sum(counts), width)), (sizes, counts)):
            graph.initializer.append(numpy_helper.from_array(np.array(values, np.int64), constant))
        nodes.append(helper.make_node("Reshape", [original.input[0], shape], [rows], f"{name}/by_heads"))
        changed[name] = helper.make_node("Split", [rows, sizes], [*original.output], name, axis=len(lead))
        nodes.append(changed[name])
    if changed:
        parts = {output for node in changed.values() for output in node.output}
        kept = [info for info in graph.value_info if info.name not in parts]
        del graph.node[:], graph.value_info[:]
        graph.node.extend(nodes)
        graph.value_info.extend(kept)
    return tuple(changed)


def _heads_behind(index: _Graph, integers: dict[str, tuple[int, ...]], split: onnx.NodeProto) -> Heads | None:
    """Match the heads of a merged FP8 product; None unless all parts are read by heads of one width."""
    product = index.producers.get(split.input[0])
    if product is None or product.op_type not in {"MatMul", "Gemm"} or split.input[0] in index.outputs:
        return None
    factors = [index.producers.get(factor) for factor in product.input[:2]]
    if not all(factor is not None and factor.op_type == "DequantizeLinear" for factor in factors):
        return None
    sizes = integers.get(split.input[1]) if len(split.input) > 1 else None
    shapes: list[tuple[int, ...]] = []
    for part in split.output:
        readers = index.readers(part)
        if part in index.outputs or len(readers) != 1 or readers[0].op_type != "Reshape":
            return None
        shape = integers.get(readers[0].input[1])
        if shape is None or len(shape) < 3 or attribute(readers[0], "allowzero", 0):
            return None
        shapes.append(shape)
    lead, width = shapes[0][:-2], shapes[0][-1]
    counts = tuple(shape[-2] for shape in shapes)
    if sizes is None or width <= 0 or any(shape[:-2] != lead or shape[-1] != width for shape in shapes):
        return None
    fits = all(count > 0 and count * width == size for count, size in zip(counts, sizes, strict=True))
    return (lead, counts, width) if fits and _keeps_rows(split, lead) else None


def _keeps_rows(split: onnx.NodeProto, lead: Sequence[int]) -> bool:
    """True if the Split cuts the last axis, and `lead` is valid for the whole as for a part.

    A -1 follows from the rest, which is in proportion. A 0 copies the size of an axis, which must not be the
    cut one; the last axis of a product is not its first.
    """
    axis = attribute(split, "axis", 0)
    return 0 not in lead[1:] if axis == -1 else axis == len(lead)
