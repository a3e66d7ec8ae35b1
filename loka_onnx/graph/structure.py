"""Compare two models except for the values of their weights.

Models of the same structure have the same nodes between the same tensors, of the same types and shapes. Only
floating-point constants may differ, which training changes; integer constants are shapes, axes and the like.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import onnx
from onnx import helper, numpy_helper
from onnx.external_data_helper import uses_external_data

from loka_onnx.graph.storage import read_proto

MOST = 8
"""Most differences that are reported."""


def differences(one: Path, other: Path) -> tuple[str, ...]:
    """Return at most `MOST` differences between two models except the values of their weights, in words.

    Raises:
        ModelError: One of them cannot be read.
    """
    found: list[str] = []
    for difference in _of_graphs(read_proto(one).graph, read_proto(other).graph):
        found.append(difference)
        if len(found) == MOST:
            break
    return tuple(found)


def _of_graphs(one: onnx.GraphProto, other: onnx.GraphProto) -> Iterator[str]:
    for what, a, b in (("input", one.input, other.input), ("output", one.output, other.output)):
        yield from _of_named(what, {v.name: _typed(v) for v in a}, {v.name: _typed(v) for v in b})
    weights = ({t.name: t for t in graph.initializer} for graph in (one, other))
    yield from _of_weights(*weights)
    nodes = ({_named(n, i): n for i, n in enumerate(graph.node)} for graph in (one, other))
    yield from _of_nodes(*nodes)


def _of_named(what: str, one: Mapping[str, str], other: Mapping[str, str]) -> Iterator[str]:
    for name in one:
        if name not in other:
            yield f"{what} '{name}' is gone"
        elif one[name] != other[name]:
            yield f"{what} '{name}' was {one[name]} and is {other[name]}"
    for name in other:
        if name not in one:
            yield f"{what} '{name}' is new"


def _of_weights(one: Mapping[str, onnx.TensorProto], other: Mapping[str, onnx.TensorProto]) -> Iterator[str]:
    yield from _of_named(
        "weight", {n: _shaped(t) for n, t in one.items()}, {n: _shaped(t) for n, t in other.items()}
    )
    for name in one:
        if name in other and _fixed(one[name]) != _fixed(other[name]):
            yield f"constant '{name}' holds other integers"


def _of_nodes(one: Mapping[str, onnx.NodeProto], other: Mapping[str, onnx.NodeProto]) -> Iterator[str]:
    yield from _of_named(
        "node", {n: v.op_type for n, v in one.items()}, {n: v.op_type for n, v in other.items()}
    )
    for name, node in one.items():
        if name not in other or other[name].op_type != node.op_type:
            continue
        twin = other[name]
        if (list(node.input), list(node.output)) != (list(twin.input), list(twin.output)):
            yield f"node '{name}' was between {_ends(node)} and is between {_ends(twin)}"
        attributes = {a.name: _plain(a) for a in node.attribute}
        others = {a.name: _plain(a) for a in twin.attribute}
        for key in sorted({*attributes, *others}):
            if attributes.get(key) != others.get(key):
                yield f"attribute '{key}' of node '{name}' was {attributes.get(key)} and is {others.get(key)}"
        bodies = {a.name: a.g for a in twin.attribute if a.type == onnx.AttributeProto.GRAPH}
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.GRAPH and attribute.name in bodies:
                yield from _of_graphs(attribute.g, bodies[attribute.name])


def _named(node: onnx.NodeProto, position: int) -> str:
    return node.name or f"{position} ({node.op_type})"


def _ends(node: onnx.NodeProto) -> str:
    return f"({', '.join(node.input)}) and ({', '.join(node.output)})"


def _typed(value: onnx.ValueInfoProto) -> str:
    tensor = value.type.tensor_type
    dims = [str(d.dim_value) if d.HasField("dim_value") else "?" for d in tensor.shape.dim]
    return f"{helper.tensor_dtype_to_string(tensor.elem_type)}[{', '.join(dims)}]"


def _shaped(tensor: onnx.TensorProto) -> str:
    return f"{helper.tensor_dtype_to_string(tensor.data_type)}{list(tensor.dims)}"


def _fixed(tensor: onnx.TensorProto) -> list[Any] | None:
    """Return the values of a constant that training does not change; None for others."""
    kind = helper.tensor_dtype_to_np_dtype(tensor.data_type).kind
    if kind not in "iub" or uses_external_data(tensor):
        return None
    values: list[Any] = numpy_helper.to_array(tensor).reshape(-1).tolist()
    return values


def _plain(attribute: onnx.AttributeProto) -> Any:
    """Return the value of an attribute; of a tensor its type and shape, of a graph that it is one."""
    if attribute.type == onnx.AttributeProto.GRAPH:
        return "a graph"
    if attribute.type == onnx.AttributeProto.TENSOR:
        return _fixed(attribute.t) or _shaped(attribute.t)
    return helper.get_attribute_value(attribute)
