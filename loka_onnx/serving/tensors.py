"""Tensors as the open inference protocol writes them, in JSON and as bytes.

Sources: kserve/open-inference-protocol, `specification/protocol/inference_rest.md`, sections Tensor Data and
Tensor Data Types; triton-inference-server/server, `docs/protocol/extension_binary_data.md`: bytes are
little-endian, row-major, without padding, and a BOOL is a byte of 0 or 1.
"""

from __future__ import annotations

import math
import reprlib
from itertools import chain
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from loka_onnx.core.artifact import TensorSpec
from loka_onnx.errors import ConfigError, DataError

_TYPES: dict[str, np.dtype[Any]] = {
    "BOOL": np.dtype(np.bool_),
    **{
        f"{kind}INT{bits}": np.dtype(f"{kind.lower()}int{bits}")
        for kind in ("", "U")
        for bits in (8, 16, 32, 64)
    },
    "FP16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "FP32": np.dtype(np.float32),
    "FP64": np.dtype(np.float64),
}
_NAMES = {dtype.name: name for name, dtype in _TYPES.items()}
_ELEMENTS: dict[str, tuple[type, ...]] = {"b": (bool,), "i": (int,), "u": (int,)}
"""Types of JSON elements by kind of the array; both kinds of number where none is listed."""


def datatype_of(spec: TensorSpec) -> str:
    """Return the name of a tensor's type in the protocol, ``FP32`` for example.

    Raises:
        ConfigError: The protocol has none.
    """
    try:
        return _NAMES[spec.dtype]
    except KeyError:
        raise ConfigError(
            f"the open inference protocol cannot carry '{spec.name}'",
            evidence=f"its type is {spec.dtype}, the protocol has {', '.join(_TYPES)}",
            remedy="call the bundle through `loka_onnx.load`",
        ) from None


def item_bytes(datatype: str) -> int:
    """Return the bytes of one element."""
    return _TYPES[datatype].itemsize


def from_bytes(raw: memoryview, datatype: str, shape: tuple[int, ...]) -> npt.NDArray[Any]:
    """Return a tensor of the binary extension; a copy, because its bytes in a request are not aligned.

    Raises:
        DataError: A BOOL is neither 0 nor 1.
    """
    dtype = _TYPES[datatype]
    stored = np.frombuffer(raw, f"<u{dtype.itemsize}").astype(f"=u{dtype.itemsize}")
    if dtype == np.bool_ and stored.size and stored.max() > 1:
        raise DataError("a BOOL is a byte of 0 or 1", evidence=f"a byte is {stored.max()}")
    return stored.view(dtype).reshape(shape)


def to_bytes(value: npt.NDArray[Any]) -> bytes:
    """Return the bytes of a tensor in the binary extension."""
    size = value.dtype.itemsize
    return np.ascontiguousarray(value).view(f"=u{size}").astype(f"<u{size}", copy=False).tobytes()


def from_json(data: Any, datatype: str, shape: tuple[int, ...]) -> npt.NDArray[Any]:
    """Return a tensor of a JSON array, flat or nested as its shape.

    Raises:
        DataError: Another number of elements, another nesting, or an element that the type cannot hold.
    """
    if datatype == "BF16":
        raise DataError("JSON cannot hold BF16 exactly", remedy="send it as binary data")
    elements = _flattened(data, shape)
    dtype = _TYPES[datatype]
    allowed = _ELEMENTS.get(dtype.kind, (int, float))
    # By their types, because a bool is an int to isinstance.
    wrong = {type(element) for element in elements} - set(allowed)
    if wrong:
        found = next(e for e in elements if type(e) in wrong)
        raise DataError(f"an element is no {datatype}", evidence=f"it is {reprlib.repr(found)}")
    if dtype.kind in "iu" and elements:
        # NumPy 1 wraps around instead.
        limits = np.iinfo(dtype)
        for found in (min(elements), max(elements)):
            if not limits.min <= found <= limits.max:
                raise _too_large(datatype, f"it is {reprlib.repr(found)}")
    try:
        with np.errstate(over="ignore"):
            value = np.array(elements, dtype)
    except OverflowError as error:
        raise _too_large(datatype, str(error)) from error
    if dtype.kind == "f" and not np.isfinite(value).all():
        raise _too_large(datatype, "it would become infinite")
    return value.reshape(shape)


def to_json(value: npt.NDArray[Any], name: str) -> list[Any]:
    """Return the elements of a tensor for JSON, flat; they read back as the same bits.

    Raises:
        DataError: An element is NaN or infinite, which JSON cannot hold.
    """
    # ml_dtypes gives its own scalars; every BF16 is an FP32.
    plain = value.astype(np.float32) if value.dtype == _TYPES["BF16"] else value
    if plain.dtype.kind == "f" and not np.isfinite(plain).all():
        count = int((~np.isfinite(plain)).sum())
        raise DataError(
            f"JSON cannot hold output '{name}'",
            evidence=f"{count} of its {plain.size} elements are NaN or infinite",
            remedy="ask for it as binary data: `binary_data` of the output, or `binary_data_output`",
        )
    elements: list[Any] = plain.ravel().tolist()
    return elements


def _flattened(data: Any, shape: tuple[int, ...]) -> list[Any]:
    if not isinstance(data, list):
        raise DataError("`data` is not an array", evidence=f"it is {reprlib.repr(data)}")
    level = data
    if data and isinstance(data[0], list):
        if (len(data),) != shape[:1]:
            raise _nesting(shape)
        for size in shape[1:]:
            if not all(isinstance(row, list) and len(row) == size for row in level):
                raise _nesting(shape)
            level = list(chain.from_iterable(level))
    if len(level) != math.prod(shape):
        raise DataError(
            "`data` does not fill the shape",
            evidence=f"{len(level)} elements, the shape {list(shape)} has {math.prod(shape)}",
        )
    return level


def _too_large(datatype: str, evidence: str) -> DataError:
    return DataError(f"an element is too large for {datatype}", evidence=evidence)


def _nesting(shape: tuple[int, ...]) -> DataError:
    return DataError("`data` is not nested as its shape", evidence=f"the shape is {list(shape)}")
