"""Types and branches that onnx-graphsurgeon 0.6.1 loses, kept beside it.

- It knows only tensors: copies of sequences become tensors, optionals and maps are not written at all. Such a
  value is a `Typed`, which carries the type of its message, and so do its copies.
- A node of a branch or body is linked to outer tensors like any other reader. `mark_branches` notes the outer
  node that holds it, and `reader` finds that.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnx_graphsurgeon as gs

_RANDOM = ("RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike")
DRAWING = frozenset({"Bernoulli", "Dropout", "Multinomial", *_RANDOM})
"""Operators with random outputs."""
_FNUZ = np.dtype(ml_dtypes.float8_e4m3fnuz)


class Typed(gs.Variable):  # type: ignore[misc]
    """A value that is no tensor: a sequence, an optional, a map, or a sparse tensor."""

    def __init__(self, name: str, proto: onnx.TypeProto) -> None:
        super().__init__(name)
        self.proto = proto

    def copy(self) -> Typed:
        """A copy without producer and readers."""
        return Typed(self.name, self.proto)


def keep_types(graph: gs.Graph, proto: onnx.GraphProto) -> None:
    """Make values that are no tensors `Typed`; edits the graph, which was imported from the message."""
    others = {
        info.name: info.type
        for info in (*proto.value_info, *proto.input, *proto.output)
        if info.type.WhichOneof("value") not in {None, "tensor_type"}
    }
    for name, tensor in graph.tensors().items():
        if name in others and isinstance(tensor, gs.Variable):
            tensor.__class__ = Typed
            tensor.dtype, tensor.shape, tensor.type = None, None, "tensor_type"
            tensor.proto = others[name]
    for inner, written in _branches(graph, proto):
        keep_types(inner, written)


def write_types(graph: gs.Graph, proto: onnx.GraphProto) -> None:
    """Write types that onnx-graphsurgeon leaves out: `Typed` values, E4M3FNUZ tensors; edits the message."""
    tensors = graph.tensors()
    for tensor in proto.initializer:
        if tensors[tensor.name].dtype == _FNUZ:
            tensor.data_type = onnx.TensorProto.FLOAT8E4M3FNUZ
    for info in (*proto.input, *proto.output, *proto.value_info):
        known = tensors.get(info.name)
        if isinstance(known, Typed):
            info.type.CopyFrom(known.proto)
        elif known is not None and known.dtype == _FNUZ:
            info.type.tensor_type.elem_type = onnx.TensorProto.FLOAT8E4M3FNUZ
    for inner, written in _branches(graph, proto):
        write_types(inner, written)


def mark_branches(graph: gs.Graph) -> gs.Graph:
    """Note at each node of a branch or body the graph node that holds it; edits and returns the graph."""
    for node in graph.nodes:
        vars(node).pop("held_by", None)  # it may come from a branch
        for part in node.subgraphs(recursive=True):
            for inner in part.nodes:
                inner.held_by = node
    return graph


def reader(node: Any) -> Any:
    """Return the main-graph node that reads for a node: itself, or the one whose branch it is in."""
    return getattr(node, "held_by", node)


def is_no_constant(node: Any) -> bool:
    """Return whether a node without inputs is no constant: it is random, or makes no tensor."""
    return node.op in DRAWING or any(isinstance(value, Typed) for value in node.outputs)


def _branches(graph: gs.Graph, proto: onnx.GraphProto) -> Iterator[tuple[gs.Graph, onnx.GraphProto]]:
    for node, written in zip(graph.nodes, proto.node, strict=True):
        for attribute in written.attribute:
            if attribute.type == onnx.AttributeProto.GRAPH:
                yield node.attrs[attribute.name], attribute.g
