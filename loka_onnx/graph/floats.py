"""Convert weights of other forms to dense FP32, the reference of errors.

A model of FP16 or FP64 weights computes in FP32 from here on: weights, inputs, outputs, and every cast to
those types. FP64 weights are rounded; FP16 embedding tables stay as stored, and looked-up rows are cast.
`export.preflight` compares the result with the original on rows: a model may need the digits that FP32 lacks.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto
from onnx.external_data_helper import uses_external_data

from loka_onnx.errors import ModelError
from loka_onnx.graph.detached import refill
from loka_onnx.graph.storage import all_attributes, all_initializers, looked_up, read_external, with_subgraphs

_OTHERS: dict[int, str] = {
    TensorProto.FLOAT16: "FP16",
    TensorProto.DOUBLE: "FP64",
    TensorProto.BFLOAT16: "BF16",
}
_TYPE_ATTRIBUTES = frozenset({"to", "dtype", "output_dtype", "stash_type"})


def to_float32(proto: onnx.ModelProto, path: Path) -> tuple[str, ...]:
    """Convert a model with weights, inputs or outputs of another float type; edits it.

    Returns the conversions, for the report. Raises ModelError if it computes in BF16, or a weight does not
    fit.
    """
    # 16-bit embedding tables.
    stored, used = {TensorProto.FLOAT16, TensorProto.BFLOAT16}, looked_up(proto.graph)
    tables = frozenset(t.name for t in proto.graph.initializer if t.data_type in stored and t.name in used)
    found = _float_types(proto, tables)
    if not found:
        return ()
    if TensorProto.BFLOAT16 in found:
        raise ModelError(
            f"E0308 '{path}' computes in BF16",
            where=f"tensor '{found[TensorProto.BFLOAT16]}'",
            evidence="ONNX Runtime has no BF16 on the CPU, so that a conversion could not be held against it",
            remedy="export the model in FP32; `plan.base` lowers it to BF16 where that is asked for",
        )
    for tensor in all_initializers(proto.graph):
        if tensor.name not in tables:
            _widen(tensor, path)
    for graph in with_subgraphs(proto.graph):
        del graph.value_info[:]
        for info in (*graph.input, *graph.output):
            _retype(info.type)
    for attribute in all_attributes(proto.graph):
        _widen(attribute.t, path)
        _retype(attribute.tp)
        if attribute.name in _TYPE_ATTRIBUTES and attribute.i in _OTHERS:
            attribute.i = TensorProto.FLOAT
    _cast_lookups(proto.graph, tables)
    names = " and ".join(sorted(_OTHERS[kind] for kind in found))
    return (f"converted from {names} to FP32, inputs and outputs among it",)


def to_dense(proto: onnx.ModelProto) -> tuple[str, ...]:
    """Store sparse weights densely; edits a model. Returns the conversions, for the report."""
    count = 0
    for graph in with_subgraphs(proto.graph):
        count += len(graph.sparse_initializer)
        graph.initializer.extend(map(_dense, graph.sparse_initializer))
        del graph.sparse_initializer[:]
    for attribute in all_attributes(proto.graph):
        if attribute.type == onnx.AttributeProto.SPARSE_TENSOR:
            attribute.CopyFrom(onnx.helper.make_attribute("value", _dense(attribute.sparse_tensor)))
            count += 1
    return (f"{count} sparse weights stored densely",) if count else ()


def _dense(sparse: onnx.SparseTensorProto) -> TensorProto:
    """Return a dense tensor; indices are offsets, or one for each axis (ONNX IR, SparseTensorProto)."""
    values, places = (onnx.numpy_helper.to_array(part) for part in (sparse.values, sparse.indices))
    dense = np.zeros(tuple(sparse.dims), values.dtype)
    if places.ndim == 1:
        dense.reshape(-1)[places] = values
    else:
        dense[tuple(places.T)] = values
    return onnx.numpy_helper.from_array(dense, sparse.values.name)


def _float_types(proto: onnx.ModelProto, tables: frozenset[str]) -> dict[int, str]:
    """Return other float types of matrices, inputs and outputs, each with its first tensor."""
    constants = (a.t for a in all_attributes(proto.graph) if a.type == onnx.AttributeProto.TENSOR)
    tensors = (*all_initializers(proto.graph), *constants)
    kinds = [(t.data_type, t.name) for t in tensors if len(t.dims) > 1 and t.name not in tables]
    kinds += [(i.type.tensor_type.elem_type, i.name) for i in (*proto.graph.input, *proto.graph.output)]
    return {kind: name for kind, name in reversed(kinds) if kind in _OTHERS}


def _widen(tensor: TensorProto, path: Path) -> None:
    if tensor.data_type not in _OTHERS:
        return
    if uses_external_data(tensor):
        read_external(tensor, path.parent)
    values = onnx.numpy_helper.to_array(tensor)
    with np.errstate(over="ignore"):
        narrow = values.astype(np.float32)
    if not np.array_equal(np.isfinite(values), np.isfinite(narrow)):
        raise ModelError(
            f"E0309 a weight of '{path}' does not fit FP32",
            where=f"tensor '{tensor.name}'",
            evidence=f"its largest magnitude is {np.abs(values[np.isfinite(values)]).max():.4g}",
            remedy="rescale it, or export the model in FP32",
        )
    tensor.CopyFrom(onnx.numpy_helper.from_array(narrow, tensor.name))


def _retype(kind: onnx.TypeProto) -> None:
    """Replace other float types by FP32, in sequences and optionals too; edits it."""
    which = kind.WhichOneof("value")
    if which == "tensor_type" and kind.tensor_type.elem_type in _OTHERS:
        kind.tensor_type.elem_type = TensorProto.FLOAT
    elif which in {"sequence_type", "optional_type"}:
        _retype(getattr(kind, which).elem_type)


def _cast_lookups(graph: onnx.GraphProto, tables: frozenset[str]) -> None:
    nodes: list[onnx.NodeProto] = []
    for node in graph.node:
        nodes.append(node)
        if node.op_type == "Gather" and node.input[0] in tables:
            name = node.output[0]
            node.output[0] = f"{name}.stored"
            cast = onnx.helper.make_node("Cast", [node.output[0]], [name], f"{node.name}/fp32")
            cast.attribute.append(onnx.helper.make_attribute("to", TensorProto.FLOAT))
            nodes.append(cast)
    refill(graph.node, [onnx.NodeProto.FromString(node.SerializeToString()) for node in nodes])
