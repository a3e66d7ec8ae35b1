"""Reading of untrusted ONNX models."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import onnx

from loka_onnx.errors import ModelError

FLOAT8_NAMES: dict[int, str] = {
    int(onnx.TensorProto.DataType.Value(name)): name.lower()
    for name in ("FLOAT8E4M3FN", "FLOAT8E4M3FNUZ", "FLOAT8E5M2", "FLOAT8E5M2FNUZ")
}
"""ONNX's FP8 types, with their names."""
FLOAT8_TYPES = frozenset(FLOAT8_NAMES)


def read_model(path: Path) -> onnx.ModelProto:
    """Read an ONNX model of any suffix without its external data; a `ModelError` where it is none."""
    try:
        return onnx.load(os.fspath(path), format="protobuf", load_external_data=False)
    except Exception as error:
        # The import path of google.protobuf's DecodeError depends on its implementation.
        raise ModelError(f"E0916 '{path}' is not an ONNX model", evidence=str(error)[:200]) from error


def external_tensors(model: onnx.ModelProto) -> Iterator[onnx.TensorProto]:
    """Every tensor of a model with external data, wherever it is."""
    for message in messages(model):
        if isinstance(message, onnx.TensorProto) and message.data_location == onnx.TensorProto.EXTERNAL:
            yield message


def messages(model: onnx.ModelProto) -> Iterator[Any]:
    """Every message in a model."""
    pending: list[Any] = [model]
    while pending:
        message = pending.pop()
        yield message
        for descriptor, value in message.ListFields():
            if descriptor.message_type is not None:
                pending.extend((value,) if hasattr(value, "ListFields") else value)


def data_locations(model: onnx.ModelProto) -> tuple[str, ...]:
    """External data files of an ONNX model, as it names them, sorted."""
    entries = (item for tensor in external_tensors(model) for item in tensor.external_data)
    return tuple(sorted({item.value for item in entries if item.key == "location"}))


def batched_outputs(model: onnx.ModelProto) -> frozenset[str]:
    """Outputs whose first axis is dynamic: it is the batch."""
    first = {output.name: output.type.tensor_type.shape.dim[:1] for output in model.graph.output}
    return frozenset(name for name, dims in first.items() if dims and not dims[0].HasField("dim_value"))


def reads_of(nodes: Iterable[onnx.NodeProto]) -> Iterator[str]:
    """Names that nodes read, once for each read; subgraphs also read their outputs."""
    for node in nodes:
        yield from node.input
        for attribute in node.attribute:
            for graph in (attribute.g, *attribute.graphs):
                yield from reads_of(graph.node)
                yield from (output.name for output in graph.output)


def operators(model: onnx.ModelProto) -> frozenset[str]:
    """Operators of a model, including subgraphs and functions."""
    return frozenset(each.op_type for each in messages(model) if isinstance(each, onnx.NodeProto))


def nested_nodes(body: Iterable[onnx.NodeProto]) -> Iterator[onnx.NodeProto]:
    """Yield nodes and those of their subgraphs; the recursion ends, as protobuf reads at most 33 levels."""
    for node in body:
        yield node
        for attribute in node.attribute:
            for graph in (attribute.g, *attribute.graphs):
                yield from nested_nodes(graph.node)
