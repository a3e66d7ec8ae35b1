"""Compare two models except for the values of their weights.

Models of the same structure have the same nodes between the same tensors, of the same types and shapes. Only
floating-point constants may differ, which training changes; integer constants are shapes, axes and the like.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

import onnx
from onnx import helper, numpy_helper
from onnx.external_data_helper import uses_external_data

from loka_onnx.graph.storage import read_proto

MOST = 8
"""Most differences that are reported."""
_LONGEST = 200
_FEW = 16


def differences(one: Path, other: Path) -> tuple[str, ...]:
    """Return at most `MOST` differences between two models, in words; ModelError if one cannot be read."""
    before, after = (dict(_parts(read_proto(path).graph)) for path in (one, other))
    changes = list[str]()
    for part in dict.fromkeys((*before, *after)):
        was, now = before.get(part), after.get(part)
        if was is None or now is None:
            changes.append(f"{part} is {'new' if was is None else 'gone'}")
        elif was != now:
            changes.append(f"{part} was {was[:_LONGEST]} and is {now[:_LONGEST]}")
    return tuple(changes[:MOST])


def _parts(graph: onnx.GraphProto, place: str = "") -> Iterator[tuple[str, str]]:
    """Yield the name and description of each part of a graph, and of the branches and bodies of its nodes."""
    for kind, values in (("input", graph.input), ("output", graph.output)):
        for value in values:
            yield f"{kind} '{value.name}'{place}", _typed(value)
    for tensor in graph.initializer:
        yield f"weight '{tensor.name}'{place}", _constant(tensor)
    for position, node in enumerate(graph.node):
        name = node.name or f"{position} ({node.op_type})"
        attributes = ", ".join(sorted(f"{a.name}={_value(a)}" for a in node.attribute))
        ends = f"({', '.join(node.input)}) to ({', '.join(node.output)})"
        yield f"node '{name}'{place}", f"{node.op_type}<{attributes}> from {ends}"
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.GRAPH:
                yield from _parts(attribute.g, f" in {attribute.name} of '{name}'{place}")


def _typed(value: onnx.ValueInfoProto) -> str:
    tensor = value.type.tensor_type
    dims = [str(d.dim_value) if d.HasField("dim_value") else "?" for d in tensor.shape.dim]
    return f"{helper.tensor_dtype_to_string(tensor.elem_type)}[{', '.join(dims)}]"


def _constant(tensor: onnx.TensorProto) -> str:
    """Describe a constant: type, shape, and values that training does not change."""
    shaped = f"{helper.tensor_dtype_to_string(tensor.data_type)}{list(tensor.dims)}"
    if helper.tensor_dtype_to_np_dtype(tensor.data_type).kind not in "iub" or uses_external_data(tensor):
        return shaped
    values = numpy_helper.to_array(tensor)
    if values.size > _FEW:
        return f"{shaped} of SHA-256 {hashlib.sha256(values.tobytes()).hexdigest()}"
    return f"{shaped} {values.reshape(-1).tolist()}"


def _value(attribute: onnx.AttributeProto) -> str:
    if attribute.type == onnx.AttributeProto.GRAPH:
        return "a graph"
    if attribute.type == onnx.AttributeProto.TENSOR:
        return _constant(attribute.t)
    return str(helper.get_attribute_value(attribute))
