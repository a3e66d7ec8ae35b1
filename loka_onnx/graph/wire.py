"""Serialize a model with the values of its headers.

The serialized form of a message nests its parts, each behind a tag and a length (protobuf.dev, "Encoding").
Values replace their number, and the lengths around them grow: the bytes equal protobuf's of the whole model,
without its four copies of the weights.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from loka_onnx.graph.detached import TOKEN, Array, bytes_of, number_in

_GRAPH: dict[int, Mapping[int, Any]] = {}
_RAW_DATA: Mapping[int, Any] = {}
_GRAPH |= {1: {5: {6: _GRAPH, 11: _GRAPH}}, 5: {9: _RAW_DATA}}
_MODEL: Mapping[int, Any] = {7: _GRAPH}
"""Numbers of the fields between a model and the `raw_data` of its initializers: `ModelProto.graph`,
`GraphProto.node` and `initializer`, `NodeProto.attribute`, `AttributeProto.g` and `graphs`."""
_FIXED_BYTES = {1: 8, 5: 4}
"""Length of a value by its wire type."""


def spliced(model: bytes, detached: Sequence[Array]) -> list[bytes | memoryview]:
    """Return a serialized model of headers as parts with values; arrays are not copied."""
    return _expanded(model, _MODEL, detached)


def _expanded(data: bytes, inner: Mapping[int, Any], detached: Sequence[Array]) -> list[bytes | memoryview]:
    parts: list[bytes | memoryview] = []
    at = done = 0
    while at < len(data):
        start = at
        tag, at = _varint(data, at)
        field, kind = divmod(tag, 8)
        if kind in _FIXED_BYTES:
            at += _FIXED_BYTES[kind]
            continue
        value, at = _varint(data, at)
        if kind == 0:
            continue
        body, at = slice(at, at + value), at + value
        if field in inner and data.find(TOKEN, body.start, body.stop) >= 0:
            part = data[body]
            number = number_in(part)
            grown = (
                _expanded(part, inner[field], detached) if number is None else [bytes_of(detached[number])]
            )
            parts += [data[done:start], _as_varint(tag), _as_varint(sum(map(len, grown))), *grown]
            done = at
    return [*parts, data[done:]]


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """Return a number, seven bits a byte and the lowest first, and its end."""
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            return value, at


def _as_varint(value: int) -> bytes:
    found = bytearray()
    while value > 127:
        found.append(value & 127 | 128)
        value >>= 7
    return bytes([*found, value])
