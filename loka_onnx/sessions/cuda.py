"""The few calls of the CUDA driver that loading and running a TensorRT engine needs, without a CUDA package.

The driver library is the one thing that every host with an NVIDIA GPU has; binding it with `ctypes` keeps a
fleet host free of frameworks. Functions: CUDA Driver API reference, sections Device Management, Primary
Context Management, Memory Management and Stream Management.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from loka_onnx.errors import EngineError

LIBRARIES = ("libcuda.so.1", "nvcuda.dll")
CAPABILITY_MAJOR, CAPABILITY_MINOR = 75, 76
NAME_BYTES = 256


@dataclass(frozen=True)
class CudaDevice:
    """A GPU of this machine.

    Attributes:
        index: Number of the device.
        name: As the driver names it.
        architecture: Compute capability, for example ``sm89``.
    """

    index: int
    name: str
    architecture: str


def list_cuda_devices() -> tuple[CudaDevice, ...]:
    """GPUs that the driver offers; empty without a driver or a GPU."""
    try:
        driver = CudaDriver()
        count = ctypes.c_int()
        driver.call("cuDeviceGetCount", ctypes.byref(count))
        return tuple(driver.device(index) for index in range(count.value))
    except EngineError:
        return ()


class CudaDriver:
    """The CUDA driver, initialized.

    Raises:
        EngineError: There is no driver, or it finds no GPU.
    """

    def __init__(self) -> None:
        self._library = _load_library()
        self.call("cuInit", 0)

    def call(self, function: str, *arguments: Any) -> None:
        """Call a driver function.

        Raises:
            EngineError: It returns an error.
        """
        code = getattr(self._library, function)(*arguments)
        if code:
            text = ctypes.c_char_p()
            self._library.cuGetErrorString(code, ctypes.byref(text))
            reason = (text.value or b"unknown error").decode()
            raise EngineError(f"the CUDA driver failed in {function}", evidence=f"error {code}: {reason}")

    def device(self, index: int) -> CudaDevice:
        """Name and architecture of one device."""
        handle, name = ctypes.c_int(), ctypes.create_string_buffer(NAME_BYTES)
        self.call("cuDeviceGet", ctypes.byref(handle), index)
        self.call("cuDeviceGetName", name, NAME_BYTES, handle)
        parts = []
        for attribute in (CAPABILITY_MAJOR, CAPABILITY_MINOR):
            value = ctypes.c_int()
            self.call("cuDeviceGetAttribute", ctypes.byref(value), attribute, handle)
            parts.append(str(value.value))
        return CudaDevice(index, name.value.decode(errors="replace"), f"sm{''.join(parts)}")


class CudaContext:
    """The primary context of one device, with a stream and named buffers.

    It is current in the thread that made it; another thread must `activate` it before it calls anything else.

    Args:
        index: Number of the device.

    Raises:
        EngineError: The driver refuses.
    """

    def __init__(self, index: int = 0) -> None:
        self._driver = CudaDriver()
        self._handle = ctypes.c_int()
        self._driver.call("cuDeviceGet", ctypes.byref(self._handle), index)
        context = ctypes.c_void_p()
        self._driver.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), self._handle)
        self._context = context
        self.activate()
        self._stream = ctypes.c_void_p()
        self._driver.call("cuStreamCreate", ctypes.byref(self._stream), 1)
        self._buffers: dict[str, tuple[ctypes.c_uint64, int]] = {}

    def activate(self) -> None:
        """Make the context current in the calling thread."""
        self._driver.call("cuCtxSetCurrent", self._context)

    @property
    def stream(self) -> int:
        """Handle of the stream that everything runs on."""
        return int(self._stream.value or 0)

    def reserve(self, name: str, size: int) -> int:
        """Address of a device buffer of at least `size` bytes; kept and grown between calls."""
        address, capacity = self._buffers.get(name, (ctypes.c_uint64(), 0))
        if capacity < max(size, 1):
            if capacity:
                self._driver.call("cuMemFree_v2", address)
                del self._buffers[name]
            address, capacity = ctypes.c_uint64(), max(size, 1)
            self._driver.call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(capacity))
            self._buffers[name] = (address, capacity)
        return int(address.value)

    def upload(self, name: str, array: npt.NDArray[Any]) -> int:
        """Copy an array into the buffer of that name; returns its address."""
        values = np.ascontiguousarray(array)
        address = self.reserve(name, values.nbytes)
        if values.nbytes:
            pointer, size = values.ctypes.data_as(ctypes.c_void_p), ctypes.c_size_t(values.nbytes)
            # The copy from pageable memory has read the array when the call returns.
            self._driver.call("cuMemcpyHtoDAsync_v2", ctypes.c_uint64(address), pointer, size, self._stream)
        return address

    def download(self, name: str, shape: Sequence[int], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        """Copy the buffer of that name into a new array, after everything queued before."""
        values = np.empty(tuple(shape), dtype)
        if values.nbytes:
            address, _ = self._buffers[name]
            pointer, size = values.ctypes.data_as(ctypes.c_void_p), ctypes.c_size_t(values.nbytes)
            self._driver.call("cuMemcpyDtoHAsync_v2", pointer, address, size, self._stream)
        self.synchronize()
        return values

    def synchronize(self) -> None:
        """Wait for everything that was queued."""
        self._driver.call("cuStreamSynchronize", self._stream)

    def close(self) -> None:
        """Free the buffers, the stream and the hold on the context."""
        self.activate()
        for address, _ in self._buffers.values():
            self._driver.call("cuMemFree_v2", address)
        self._buffers.clear()
        self._driver.call("cuStreamDestroy_v2", self._stream)
        self._driver.call("cuDevicePrimaryCtxRelease_v2", self._handle)


def _load_library() -> ctypes.CDLL:
    for name in LIBRARIES:
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    raise EngineError(
        "there is no CUDA driver on this machine",
        evidence=f"none of {', '.join(LIBRARIES)} loads",
        remedy="install the NVIDIA driver, or run on a machine with an NVIDIA GPU",
    )
