"""Values of a tensor in its own type."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, numpy_helper

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
