"""The form of a planned model in which TensorRT for RTX stores every embedding table once.

The compiler moves Q in front of Concat, Transpose and Gather, into the table: Q(rows(E)) = rows(Q(E)). A
table whose rows only that Q reads is then stored in FP8, half the bytes. A table whose rows something else
reads as well would be stored twice, in FP8 and in the base precision: half as many bytes again. There the
dialect adds zero in front of Q, which the compiler does not move Q across::

    Q(x) = Q(x + 0)    exactly, for every x, NaN and infinities included (-0 becomes +0)

The sum is part of the kernel that looks the rows up, so it costs no pass over them. That tables are stored
once, and that FP8 is still engaged, is read from the built engine.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import onnx
from onnx import helper

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
"""Operators that move values without changing them. All inputs of Concat are values, else the first is."""


class TableReaders:
    """Who reads the rows of the tables of a graph.

    Args:
        graph: The graph.
    """

    def __init__(self, graph: onnx.GraphProto) -> None:
        self._constants = {tensor.name: tensor for tensor in graph.initializer}
        self._consumers: dict[str, list[onnx.NodeProto]] = {}
        for node in graph.node:
            for tensor in node.input:
                self._consumers.setdefault(tensor, []).append(node)
        self._tables = {
            node.input[0]
            for node in graph.node
            if node.op_type == "Gather" and self._is_float_constant(node.input[0])
        }
        self._outputs = {output.name for output in graph.output}

    def stored_twice(self) -> dict[str, int]:
        """Name of every Q that reads a table which something else reads too, and the table's ONNX type."""
        found: dict[str, int] = {}
        for table in self._tables:
            readers = {id(node): node for node in self._readers(table)}
            if len(readers) > 1 or self._leaves(table):
                found |= {
                    node.output[0]: self._constants[table].data_type
                    for node in readers.values()
                    if node.op_type == "QuantizeLinear"
                }
        return found

    def _is_float_constant(self, name: str) -> bool:
        kinds = {onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16}
        return name in self._constants and self._constants[name].data_type in kinds

    def _moved(self, tensor: str) -> Iterator[str]:
        """The tensor, and everything that its values are moved to."""
        pending, seen = [tensor], {tensor}
        while pending:
            name = pending.pop()
            yield name
            for node in self._consumers.get(name, ()):
                if _moves(node, name):
                    pending += [output for output in node.output if output not in seen]
                    seen.update(node.output)

    def _readers(self, table: str) -> Iterator[onnx.NodeProto]:
        for name in self._moved(table):
            yield from (node for node in self._consumers.get(name, ()) if not _moves(node, name))

    def _leaves(self, table: str) -> bool:
        return any(name in self._outputs for name in self._moved(table))


def _moves(node: onnx.NodeProto, tensor: str) -> bool:
    if node.op_type not in MOVEMENTS:
        return False
    return node.op_type == "Concat" or node.input[0] == tensor


def keep_tables_once(model: onnx.ModelProto) -> tuple[str, ...]:
    """Add zero in front of every Q for which a table would be stored twice; edits the model.

    Returns:
        The tensors that these Q make.
    """
    graph = model.graph
    quantized = TableReaders(graph).stored_twice()
    nodes = []
    for node in graph.node:
        kind = quantized.get(node.output[0]) if node.output else None
        if kind is not None:
            name = f"{node.name}/keep_table"
            zero = np.zeros((), helper.tensor_dtype_to_np_dtype(kind))
            graph.initializer.append(helper.make_tensor(f"{name}/zero", kind, (), zero.tobytes(), raw=True))
            nodes.append(helper.make_node("Add", [node.input[0], f"{name}/zero"], [f"{name}:0"], name))
            node.input[0] = f"{name}:0"
        nodes.append(node)
    if quantized:
        copies = [onnx.NodeProto.FromString(node.SerializeToString()) for node in nodes]
        del graph.node[:]
        graph.node.extend(copies)
    return tuple(quantized)
