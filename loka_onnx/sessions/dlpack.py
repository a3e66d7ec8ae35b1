"""Borrowed arrays of other libraries, through DLPack, without importing those libraries.

`borrow` reads the description that a capsule of ``__dlpack__`` points to, and keeps the capsule without
consuming it: its own destructor frees the memory after the last view is gone. Sources: dmlc/dlpack,
`include/dlpack/dlpack.h` (``DLTensor``), and https://dmlc.github.io/dlpack/latest/python_spec.html.
"""

from __future__ import annotations

import ctypes
import sys
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from loka_onnx.errors import DataError

CPU, CUDA, CUDA_HOST, ROCM = 1, 2, 3, 10
"""Members of ``DLDeviceType``: host memory, a CUDA device, page-locked host memory, a ROCm device (which
PyTorch also calls a CUDA device)."""
_TYPES: dict[tuple[int, int], np.dtype[Any]] = {
    (code, bits): np.dtype(f"{name}{bits}")
    for code, name in enumerate(("int", "uint", "float"))
    for bits in ((16, 32, 64) if name == "float" else (8, 16, 32, 64))
}
# NumPy knows the name of BF16, too, once ml_dtypes is imported.
_TYPES |= {(4, 16): np.dtype(ml_dtypes.bfloat16), (6, 8): np.dtype("bool")}
"""NumPy type of each ``DLDataTypeCode`` and number of bits."""
DTYPES = frozenset(dtype.name for dtype in _TYPES.values())
"""Types that requests and answers may have."""


class _Tensor(ctypes.Structure):
    """``DLTensor``, the first member of ``DLManagedTensor``."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


_pointer_of = ctypes.pythonapi.PyCapsule_GetPointer
_pointer_of.restype, _pointer_of.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)


@dataclass(frozen=True)
class Borrowed:
    """An array of another library, in C order; `capsule` keeps its memory alive for one other consumer."""

    address: int
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    device_type: int
    device: int
    capsule: Any
    source: Any

    @property
    def nbytes(self) -> int:
        """Size of its elements in bytes."""
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize

    def as_numpy(self) -> npt.NDArray[Any]:
        """View host memory as a writable array that keeps it alive; a `DataError` for memory on a device."""
        if self.device_type not in {CPU, CUDA_HOST}:
            raise DataError(
                "E0911 an array lies on a device", evidence=f"device type {self.device_type} of DLPack"
            )
        if not self.nbytes:
            return np.empty(self.shape, self.dtype)
        memory = (ctypes.c_byte * self.nbytes).from_address(self.address)
        memory.owner = self  # type: ignore[attr-defined]
        return np.frombuffer(memoryview(memory), np.byte).view(self.dtype).reshape(self.shape)


def device_of(value: Any) -> tuple[int, int]:
    """Return the ``DLDeviceType`` and number of an array's device; a `DataError` where it lacks DLPack."""
    try:
        kind, number = value.__dlpack_device__()
        # PyTorch returns an enumeration, whose arithmetic is slow.
        return int(kind), int(number)
    except Exception as error:
        # Libraries raise errors of any type.
        raise DataError(
            f"E0912 a {type(value).__name__} is no array",
            evidence=str(error)[:200],
            remedy="send arrays of NumPy, or of a library that speaks DLPack (PyTorch, CuPy)",
        ) from error


def borrow(value: Any, stream: int | None = None) -> Borrowed:
    """Borrow an array for a CUDA stream, after the work on it that its library has queued; None is the host.
    Raises DataError if it cannot be exported, is not in C order, or has a type that NumPy lacks.
    """
    kind, number = device_of(value)
    value = _settled(value)
    try:
        capsule = value.__dlpack__() if kind != CUDA else value.__dlpack__(stream=stream)
        tensor = _Tensor.from_address(int(_pointer_of(capsule, b"dltensor") or 0))
    except Exception as error:
        # Libraries raise BufferError, or another error for an array that they cannot export.
        raise DataError(
            f"E0913 a {type(value).__name__} cannot be read",
            evidence=f"{type(error).__name__}: {str(error)[:200]}",
            remedy="detach it from a gradient tape, and move it to a device that it can be read from",
        ) from error
    shape = tuple(tensor.shape[axis] for axis in range(tensor.ndim))
    dtype = _TYPES.get((tensor.code, tensor.bits)) if tensor.lanes == 1 else None
    if dtype is None:
        raise DataError(
            f"E0914 a {type(value).__name__} has a type that NumPy lacks",
            evidence=f"type code {tensor.code} of {tensor.bits} bits, {tensor.lanes} lanes",
            remedy="convert it to the type of the model's input",
        )
    if tensor.strides and not _in_c_order(shape, tuple(tensor.strides[a] for a in range(tensor.ndim))):
        raise DataError(
            f"E0915 a {type(value).__name__} is not in C order",
            evidence=f"shape {shape}",
            remedy="make it contiguous",
        )
    address = int(tensor.data or 0) + int(tensor.byte_offset)
    return Borrowed(address, shape, dtype, kind, number, capsule, value)


def on_host(value: Any) -> npt.NDArray[Any]:
    """View an array in host memory as a NumPy array, without a copy; a `DataError` as of `borrow`."""
    value = _settled(value)
    try:
        array: npt.NDArray[Any] = np.from_dlpack(value)
    except (RuntimeError, BufferError, ValueError, TypeError, AttributeError):
        # NumPy's DLPack lacks BF16, and its errors do not tell why.
        return borrow(value).as_numpy()
    return array


def _settled(value: Any) -> Any:
    """Resolve a PyTorch tensor that is the negative or conjugate of its memory, as DLPack cannot say."""
    kind = getattr(sys.modules.get("torch"), "Tensor", ())
    return value.resolve_conj().resolve_neg() if isinstance(value, kind) else value


def _in_c_order(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    expected = 1
    for extent, stride in zip(reversed(shape), reversed(strides), strict=True):
        if extent not in {0, 1} and stride != expected:
            return False
        expected *= extent
    return True
