"""Reading ONNX models without trusting them."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

import onnx

from loka_onnx.errors import ModelError


def read_model(path: Path) -> onnx.ModelProto:
    """An ONNX model without its external data, whatever its name ends in.

    Raises:
        ModelError: The file is not an ONNX model.
    """
    try:
        return onnx.load(os.fspath(path), format="protobuf", load_external_data=False)
    except Exception as error:
        # google.protobuf's DecodeError has no stable import path across its implementations.
        raise ModelError(f"'{path}' is not an ONNX model", evidence=str(error)[:200]) from error


def operators(model: onnx.ModelProto) -> frozenset[str]:
    """Operators of a model, those of subgraphs and functions included."""
    bodies = (function.node for function in model.functions)
    return frozenset(node.op_type for body in (model.graph.node, *bodies) for node in _nodes(body))


def _nodes(body: Iterable[onnx.NodeProto]) -> Iterator[onnx.NodeProto]:
    for node in body:
        yield node
        for attribute in node.attribute:
            for graph in (attribute.g, *attribute.graphs):
                yield from _nodes(graph.node)
