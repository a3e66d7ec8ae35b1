"""Messages without large weights: headers in place of values, and inference on the rest.

Protobuf copies the bytes of a tensor whenever a message with it is made, nested, parsed or serialized, half a
dozen times on the way into a file; beyond 2 GiB that fails. A header has all but the values; instead it has
their number among the detached weights.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Sequence
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, numpy_helper
from onnx.external_data_helper import uses_external_data

Array = npt.NDArray[Any]

_DETACHABLE = "FLOAT DOUBLE FLOAT16 BFLOAT16 FLOAT8E4M3FN FLOAT8E4M3FNUZ FLOAT8E5M2 FLOAT8E5M2FNUZ INT8 UINT8"
DETACHABLE_TYPES = frozenset(map(TensorProto.DataType.Value, _DETACHABLE.split()))
"""Types of whole bytes that no shape or axis has: inference reads the values of those."""

TOKEN = secrets.token_bytes(16)
"""Prefix of a header's `raw_data`. Another in each process: no file can refer to detached weights."""


def hold(header: onnx.TensorProto, number: int) -> None:
    """Let a header refer to the detached array of a number; edits it."""
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


STRIP_BYTES = 4096
"""Larger initializers are weights, never a shape or an axis."""


def info_of(tensor: onnx.TensorProto) -> onnx.ValueInfoProto:
    """Return name, type and shape of an initializer."""
    return onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, list(tensor.dims))


def refill(field: Any, values: Iterable[Any]) -> None:
    """Replace the entries of a repeated field of a message."""
    del field[:]
    field.extend(values)


def without_weights(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return a copy of a model: large or external initializers become inputs, where they are not yet."""
    light = onnx.ModelProto()
    light.ir_version = model.ir_version
    light.opset_import.extend(model.opset_import)
    light.functions.extend(model.functions)
    graph = light.graph
    graph.name = model.graph.name or "main"
    graph.node.extend(model.graph.node)
    graph.input.extend(model.graph.input)
    graph.output.extend(model.graph.output)
    graph.value_info.extend(model.graph.value_info)
    inputs = {i.name for i in model.graph.input}
    for tensor in model.graph.initializer:
        is_large = number_of(tensor) is not None or len(tensor.raw_data) > STRIP_BYTES
        is_large |= uses_external_data(tensor)
        if is_large and tensor.name not in inputs:
            graph.input.append(info_of(tensor))
        else:
            graph.initializer.append(tensor)
    return light


def add_inferred_shapes(model: onnx.ModelProto) -> None:
    """Infer types and shapes of inner tensors and outputs, as far as possible; edits the model."""
    light = without_weights(model)
    inferred = onnx.shape_inference.infer_shapes(light, strict_mode=False, data_prop=True)
    weights = {tensor.name for tensor in model.graph.initializer}
    refill(model.graph.value_info, [v for v in inferred.graph.value_info if v.name not in weights])
    refill(model.graph.output, inferred.graph.output)


_NARROW: dict[int, Any] = {
    TensorProto.BFLOAT16: ml_dtypes.bfloat16,
    TensorProto.FLOAT8E4M3FN: ml_dtypes.float8_e4m3fn,
    TensorProto.FLOAT8E5M2: ml_dtypes.float8_e5m2,
}
"""Types that older versions of onnx read as FP32."""


def read_array(tensor: onnx.TensorProto) -> npt.NDArray[Any]:
    """Return the values of an inline tensor in its own type, from ml_dtypes where NumPy has none."""
    array = numpy_helper.to_array(tensor)
    expected = _NARROW.get(tensor.data_type)
    return array if expected is None or array.dtype == np.dtype(expected) else array.astype(expected)
