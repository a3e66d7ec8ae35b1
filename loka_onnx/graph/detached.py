"""Headers of detached weights: tensors of a protobuf message without their values.

Protobuf copies the bytes of a tensor whenever a message with it is made, nested, parsed or serialized, and a
graph goes through half a dozen messages on its way into a file. A header has everything but the values;
instead it has their number among the detached weights.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx

Array = npt.NDArray[Any]

_T = onnx.TensorProto
# fmt: off
DETACHABLE_TYPES = frozenset({
    _T.FLOAT, _T.DOUBLE, _T.FLOAT16, _T.BFLOAT16, _T.FLOAT8E4M3FN, _T.FLOAT8E4M3FNUZ, _T.FLOAT8E5M2,
    _T.FLOAT8E5M2FNUZ, _T.INT8, _T.UINT8,
})
# fmt: on
"""Types of whole bytes that no shape or axis has: inference reads the values of those."""

TOKEN = secrets.token_bytes(16)
"""Prefix of a header's `raw_data`. Another in each process: no file can refer to detached weights."""


def hold(header: onnx.TensorProto, number: int) -> None:
    """Let a header refer to values; edits it."""
    header.raw_data = TOKEN + number.to_bytes(8, "little")


def number_of(tensor: onnx.TensorProto) -> int | None:
    """Return the number of a tensor's detached values; None when it has its own."""
    raw_data = tensor.raw_data
    return int.from_bytes(raw_data[len(TOKEN) :], "little") if raw_data.startswith(TOKEN) else None


def fill(tensor: onnx.TensorProto, detached: Sequence[Array]) -> None:
    """Give a tensor its detached values, if any; edits it."""
    number = number_of(tensor)
    if number is not None:
        tensor.raw_data = detached[number].tobytes()


def bytes_of(array: Array) -> memoryview:
    """Return the bytes of an array in C order, without a copy where possible."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
