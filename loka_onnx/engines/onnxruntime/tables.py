"""Embedding tables in INT8 with a scale for each row, in engines of ONNX Runtime's CPU provider.

A row is stored in d + 4 bytes instead of 4·d::

    Gather(E, ids)  ≈  Cast(Gather(Q, ids)) · Gather(s, ids)
    s[r] = max |E[r]| / 127        Q[r] = round(E[r] / s[r])

Each value moves by s[r] / 2 at most, whatever other rows hold, and a row of zeros (padding) stays exactly
zero. Ids are not constant, so that the optimizer folds none of it back into FP32. Declined, with the reason:
tables with other readers than Gather along axis 0, with NaN or infinity, or that would not shrink.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import numpy as np
import onnx
from onnx import NodeProto, TensorProto, helper, numpy_helper
from onnx.external_data_helper import uses_external_data

from loka_onnx.core.formats import INT8
from loka_onnx.engines.draft import attribute
from loka_onnx.engines.onnx_operands import OperandReader
from loka_onnx.graph.storage import Stored
from loka_onnx.numerics.rounding import quantize
from loka_onnx.sessions.model_files import reads_of

SCALE_BYTES = 4
"""Bytes of a row's scale."""
TABLE_REMARK = "embedding table "
"""Beginning of a printed line that says why a table stays."""
MATRIX = 2
"""Axes of a table."""


@dataclass(frozen=True)
class StoredTables:
    """Names of the tables that were written in INT8, and the reason of each other one. `locations` are the
    files beside the model that held written ones.
    """

    written: tuple[str, ...]
    declined: dict[str, str]
    locations: frozenset[str]


def write_tables(model: onnx.ModelProto, reader: OperandReader) -> StoredTables:
    """Rewrite the tables of a model in place; `reader` gives its constants."""
    graph, lookups = model.graph, _lookups(model)
    stored = {tensor.name: tensor for tensor in graph.initializer}
    declined: dict[str, str] = {}
    for name, nodes in lookups.items():
        if reason := _why_not(model, stored[name], nodes, stored):
            declined[name] = reason
            continue
        values = reader.values(name)
        if not np.isfinite(values).all():
            declined[name] = "it holds NaN or infinity"
            continue
        scales = np.abs(values).max(axis=1).astype(np.float32) / np.float32(INT8.max)
        scales[scales == 0] = 1
        graph.initializer.append(numpy_helper.from_array(quantize(values, scales, INT8, 0), f"{name}/int8"))
        graph.initializer.append(numpy_helper.from_array(scales[:, None], f"{name}/row_scale"))
        graph.initializer.remove(stored[name])
    written = lookups.keys() - declined.keys()
    outside = (stored[name] for name in written if uses_external_data(stored[name]))
    locations = frozenset(Stored.of(tensor).location for tensor in outside)
    nodes = [part for node in graph.node for part in (_rows(node) if _table(node) in written else [node])]
    del graph.node[:]
    graph.node.extend(nodes)
    return StoredTables(tuple(name for name in lookups if name in written), declined, locations)


def _table(node: NodeProto) -> str:
    return node.input[0] if node.op_type.startswith("Gather") and not node.domain else ""


def _lookups(model: onnx.ModelProto) -> dict[str, list[NodeProto]]:
    matrices = {
        tensor.name
        for tensor in model.graph.initializer
        if tensor.data_type == TensorProto.FLOAT and len(tensor.dims) == MATRIX
    }
    lookups: defaultdict[str, list[NodeProto]] = defaultdict(list)
    for node in model.graph.node:
        if _table(node) in matrices:
            lookups[_table(node)].append(node)
    return lookups


def _why_not(
    model: onnx.ModelProto, table: TensorProto, lookups: list[NodeProto], stored: dict[str, TensorProto]
) -> str:
    """Reason why a table keeps FP32; empty if it need not."""
    for node in lookups:
        axis = attribute(node, "axis", 0)
        if node.op_type != "Gather" or axis not in {0, -MATRIX}:
            return f"{node.op_type} '{node.name}' takes no whole rows of it"
        if node.input[1] in stored:
            return f"the ids of '{node.name}' are constant: the rows are computed once, in FP32"
    outputs = [output.name for output in model.graph.output]
    if [*reads_of(model.graph.node), *outputs].count(table.name) > len(lookups):
        return "not only lookups read it"
    if table.dims[1] + SCALE_BYTES >= table.dims[1] * np.dtype(np.float32).itemsize:
        return f"rows of {table.dims[1]} with a scale are not smaller in INT8"
    return ""


def _rows(lookup: NodeProto) -> list[NodeProto]:
    (table, ids), rows, name = lookup.input, lookup.output[0], lookup.name or lookup.output[0]
    narrow, wide, scale = f"{rows}/int8", f"{rows}/float", f"{rows}/scale"
    return [
        helper.make_node("Gather", [f"{table}/int8", ids], [narrow], name),
        helper.make_node("Gather", [f"{table}/row_scale", ids], [scale], f"{name}/scale"),
        helper.make_node("Cast", [narrow], [wide], f"{name}/float", to=TensorProto.FLOAT),
        helper.make_node("Mul", [wide, scale], [rows], f"{name}/rows"),
    ]
