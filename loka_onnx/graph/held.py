"""Headers of large weights: tensors of a protobuf message whose values stand beside it.

Protobuf copies the bytes of a tensor whenever a message that holds it is made, put into another, parsed or
serialized, and a graph goes through half a dozen messages on its way into a file. A header has everything
but the values; in their place is their number among those that are held.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx

Array = npt.NDArray[Any]

HELD_TYPES = frozenset(
    {
        onnx.TensorProto.FLOAT,
        onnx.TensorProto.DOUBLE,
        onnx.TensorProto.FLOAT16,
        onnx.TensorProto.BFLOAT16,
        onnx.TensorProto.FLOAT8E4M3FN,
        onnx.TensorProto.FLOAT8E4M3FNUZ,
        onnx.TensorProto.FLOAT8E5M2,
        onnx.TensorProto.FLOAT8E5M2FNUZ,
        onnx.TensorProto.INT8,
        onnx.TensorProto.UINT8,
    }
)
"""Types of whole bytes of which no shape and no axis is made: inference reads the values of those."""

TOKEN = secrets.token_bytes(16)
"""What the `raw_data` of a header begins with. Another in each process: no file that is read refers to what
is held."""


def hold(header: onnx.TensorProto, number: int) -> None:
    """Let a header refer to values; edits it."""
    header.raw_data = TOKEN + number.to_bytes(8, "little")


def number_in(raw_data: bytes) -> int | None:
    """Number of the values among those that are held; None where the bytes are values themselves."""
    return int.from_bytes(raw_data[len(TOKEN) :], "little") if raw_data.startswith(TOKEN) else None


def number_of(tensor: onnx.TensorProto) -> int | None:
    """Number of a tensor's values among those that are held; None when it has its own."""
    return number_in(tensor.raw_data)


def fill(tensor: onnx.TensorProto, held: Sequence[Array]) -> None:
    """Give a tensor its values if they are held; edits it."""
    number = number_of(tensor)
    if number is not None:
        tensor.raw_data = held[number].tobytes()


def bytes_of(array: Array) -> memoryview:
    """The bytes of an array in C order, not copied where it has that order."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
