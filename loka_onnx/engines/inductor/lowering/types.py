"""Element types: ONNX, NumPy (with ml_dtypes) and torch."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import torch
from onnx import TensorProto

Array = npt.NDArray[Any]

TORCH_TYPES: dict[int, torch.dtype] = {
    TensorProto.FLOAT: torch.float32,
    TensorProto.DOUBLE: torch.float64,
    TensorProto.FLOAT16: torch.float16,
    TensorProto.BFLOAT16: torch.bfloat16,
    TensorProto.FLOAT8E4M3FN: torch.float8_e4m3fn,
    TensorProto.FLOAT8E5M2: torch.float8_e5m2,
    TensorProto.INT64: torch.int64,
    TensorProto.INT32: torch.int32,
    TensorProto.INT16: torch.int16,
    TensorProto.INT8: torch.int8,
    TensorProto.UINT8: torch.uint8,
    TensorProto.UINT16: torch.uint16,
    TensorProto.UINT32: torch.uint32,
    TensorProto.UINT64: torch.uint64,
    TensorProto.BOOL: torch.bool,
}
"""Torch type of each ONNX element type that is lowered."""

FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)

_BITS: dict[np.dtype[Any], tuple[Any, torch.dtype]] = {
    np.dtype(ml_dtypes.bfloat16): (np.int16, torch.bfloat16),
    np.dtype(ml_dtypes.float8_e4m3fn): (np.uint8, torch.float8_e4m3fn),
    np.dtype(ml_dtypes.float8_e5m2): (np.uint8, torch.float8_e5m2),
}
"""Types that torch does not read from NumPy: the integers of their width, and their torch type."""


def type_name(onnx_type: int) -> str:
    """Name of an ONNX element type, for example ``FLOAT8E4M3FNUZ``."""
    return str(TensorProto.DataType.Name(onnx_type))


def short_name(dtype: torch.dtype) -> str:
    """A torch type without its package, for example ``float8_e4m3fn``."""
    return str(dtype).removeprefix("torch.")


def to_torch(array: Array) -> torch.Tensor:
    """A copy of an array as a tensor on the CPU."""
    bits = _BITS.get(array.dtype)
    if bits is None:
        return torch.from_numpy(np.array(array, order="C"))
    return torch.from_numpy(np.array(array.view(bits[0]), order="C")).view(bits[1])


def to_numpy(tensor: torch.Tensor) -> Array:
    """Convert a CPU tensor to an array of the same type."""
    tensor = tensor.contiguous()
    for numpy_type, (bits, torch_type) in _BITS.items():
        if tensor.dtype == torch_type:
            integers = torch.int16 if bits is np.int16 else torch.uint8
            return np.asarray(tensor.view(integers).numpy().view(numpy_type))
    return np.asarray(tensor.numpy())
