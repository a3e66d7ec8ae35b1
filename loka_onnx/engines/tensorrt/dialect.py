"""Form of a planned model in which TensorRT for RTX stores every embedding table once.

The compiler moves Q across Concat, Transpose and Gather into the table: Q(rows(E)) = rows(Q(E)). A table
whose rows only that Q reads is stored in FP8, in half the bytes. A table with other readers too would be
stored twice, in FP8 and in the base precision. There the dialect adds zero behind the lookup, across which
the compiler does not move Q::

    Q(rows(E)) = Q(rows(E) + 0)    exactly, for every value, NaN and infinities included (-0 becomes +0)

The sum is computed in the lookup's kernel without another pass; behind Concat it would cost two more kernels
in Wukong. Built engines confirm that tables are stored once and FP8 is used.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import onnx
from onnx import TensorProto, helper

MOVEMENTS = frozenset(
    {
        "Concat",
        "Flatten",
        "Gather",
        "Identity",
        "Reshape",
        "Slice",
        "Split",
        "Squeeze",
        "Transpose",
        "Unsqueeze",
    }
)
"""Operators that move values without changing them. All inputs of Concat are values, otherwise the first."""
FLOATS = frozenset({TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16})


def keep_tables_once(model: onnx.ModelProto) -> tuple[str, ...]:
    """Add zero to the rows of every table that would be stored twice; edits the model and returns these
    tables.
    """
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
    """Name and ONNX type of the tables whose rows a Q and something else read."""
    kinds = {tensor.name: tensor.data_type for tensor in graph.initializer if tensor.data_type in FLOATS}
    lookups = (node.input[0] for node in graph.node if node.op_type == "Gather")
    rows = _Rows(graph)
    return {table: kinds[table] for table in lookups if table in kinds and rows.are_shared(table)}


class _Rows:
    """Flow of a tensor's values."""

    def __init__(self, graph: onnx.GraphProto) -> None:
        self._outputs = {output.name for output in graph.output}
        self._consumers: dict[str, list[onnx.NodeProto]] = {}
        for node in graph.node:
            for tensor in set(node.input):
                self._consumers.setdefault(tensor, []).append(node)

    def are_shared(self, table: str) -> bool:
        """Tell whether a Q and another reader (a node, another Q, or an output) read a table's rows."""
        places = list(self._places(table))
        readers = [
            node for name in places for node in self._consumers.get(name, ()) if not _moves(node, name)
        ]
        others = len(readers) - 1 + len(self._outputs.intersection(places))
        return others > 0 and any(node.op_type == "QuantizeLinear" for node in readers)

    def _places(self, table: str) -> Iterator[str]:
        """Yield the table and every tensor that its values are moved to."""
        pending, seen = [table], {table}
        while pending:
            name = pending.pop()
            yield name
            for node in self._consumers.get(name, ()):
                if _moves(node, name):
                    pending += [output for output in node.output if output not in seen]
                    seen.update(node.output)


def _moves(node: onnx.NodeProto, tensor: str) -> bool:
    return node.op_type in MOVEMENTS and (node.op_type == "Concat" or node.input[0] == tensor)
