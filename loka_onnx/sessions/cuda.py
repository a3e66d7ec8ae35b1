"""CUDA driver calls for loading and running a TensorRT engine, without a CUDA package.

Every host with an NVIDIA GPU has the driver library; binding it with `ctypes` keeps frameworks off a fleet
host. Functions: CUDA Driver API reference, Device, Primary Context, Memory, Stream and Graph Management.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from loka_onnx.errors import EngineError

LIBRARIES = ("libcuda.so.1", "nvcuda.dll")
CAPABILITY_MAJOR, CAPABILITY_MINOR = 75, 76
NAME_BYTES = 256
STREAM_NON_BLOCKING, CAPTURE_THIS_THREAD = 1, 1
"""CU_STREAM_CAPTURE_MODE_THREAD_LOCAL: calls of other threads do not end the capture."""
_MEMORY = {"device": ("cuMemAlloc_v2", "cuMemFree_v2"), "host": ("cuMemAllocHost_v2", "cuMemFreeHost")}
"""Functions that allocate and free."""


@dataclass(frozen=True)
class CudaDevice:
    """A GPU of this machine; `architecture` is its compute capability, for example ``sm89``."""

    index: int
    name: str
    architecture: str


def list_cuda_devices() -> tuple[CudaDevice, ...]:
    """List the GPUs of the driver; empty without a driver or a GPU."""
    try:
        driver = CudaDriver()
        count = ctypes.c_int()
        driver.call("cuDeviceGetCount", ctypes.byref(count))
        return tuple(driver.device(index) for index in range(count.value))
    except EngineError:
        return ()


def driver_version() -> str:
    """Latest CUDA version that the driver supports, for example ``12.4``; empty without a driver."""
    version = ctypes.c_int()
    try:
        CudaDriver().call("cuDriverGetVersion", ctypes.byref(version))
    except EngineError:
        return ""
    return f"{version.value // 1000}.{version.value % 1000 // 10}"


class CudaDriver:
    """The CUDA driver, initialized; an `EngineError` where there is none, or it finds no GPU."""

    def __init__(self) -> None:
        self._library = _load_library()
        self.call("cuInit", 0)

    def call(self, function: str, *arguments: Any) -> None:
        """Call a driver function; its error is an `EngineError`."""
        code = getattr(self._library, function)(*arguments)
        if code:
            text = ctypes.c_char_p()
            self._library.cuGetErrorString(code, ctypes.byref(text))
            reason = (text.value or b"unknown error").decode()
            raise EngineError(
                f"E0908 the CUDA driver failed in {function}", evidence=f"error {code}: {reason}"
            )

    def device(self, index: int) -> CudaDevice:
        """Name and architecture of one device."""
        handle, name = ctypes.c_int(), ctypes.create_string_buffer(NAME_BYTES)
        self.call("cuDeviceGet", ctypes.byref(handle), index)
        self.call("cuDeviceGetName", name, NAME_BYTES, handle)
        major, minor = ctypes.c_int(), ctypes.c_int()
        for value, attribute in ((major, CAPABILITY_MAJOR), (minor, CAPABILITY_MINOR)):
            self.call("cuDeviceGetAttribute", ctypes.byref(value), attribute, handle)
        return CudaDevice(index, name.value.decode(errors="replace"), f"sm{major.value}{minor.value}")


class CudaGraph:
    """A captured CUDA graph on a stream; owns the handle of the graph."""

    def __init__(self, driver: CudaDriver, graph: ctypes.c_void_p, stream: ctypes.c_void_p) -> None:
        self._driver, self._stream = driver, stream
        self._executable = ctypes.c_void_p()
        try:
            driver.call(
                "cuGraphInstantiateWithFlags", ctypes.byref(self._executable), graph, ctypes.c_ulonglong(0)
            )
        finally:
            driver.call("cuGraphDestroy", graph)

    def launch(self) -> None:
        """Queue the captured work."""
        self._driver.call("cuGraphLaunch", self._executable, self._stream)

    def close(self) -> None:
        """Free the graph; queued work must have finished."""
        self._driver.call("cuGraphExecDestroy", self._executable)


class CudaContext:
    """The primary context of one device, with a stream and named buffers.

    Each name has a buffer on the device and one in page-locked host memory, because only copies from such
    memory are asynchronous and can be captured into a graph. The context is current in the thread that made
    it; another thread must `activate` it first. Errors of the driver are `EngineError`.
    """

    def __init__(self, index: int = 0) -> None:
        self._driver = CudaDriver()
        self._handle = ctypes.c_int()
        self._driver.call("cuDeviceGet", ctypes.byref(self._handle), index)
        self._context = ctypes.c_void_p()
        self._driver.call("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), self._handle)
        self.activate()
        self._stream = ctypes.c_void_p()
        self._driver.call("cuStreamCreate", ctypes.byref(self._stream), STREAM_NON_BLOCKING)
        self.stream = int(self._stream.value or 0)
        """Handle of the stream."""
        self._buffers: dict[tuple[str, str], tuple[ctypes.c_uint64, int]] = {}
        self.moves = 0
        """Number of buffer reallocations: graphs captured before the last one are stale."""

    def activate(self) -> None:
        """Make the context current in the calling thread."""
        self._driver.call("cuCtxSetCurrent", self._context)

    def _buffer(self, place: str, name: str, size: int) -> tuple[ctypes.c_uint64, int]:
        """Address and capacity of a buffer of at least `size` bytes; kept and grown between calls."""
        allocate, free = _MEMORY[place]
        address, capacity = self._buffers.get((place, name), (ctypes.c_uint64(), 0))
        if capacity < max(size, 1):
            if capacity:
                del self._buffers[place, name]
                self._driver.call(free, address)
            address, capacity = ctypes.c_uint64(), max(size, 1)
            self._driver.call(allocate, ctypes.byref(address), ctypes.c_size_t(capacity))
            self._buffers[place, name] = (address, capacity)
            self.moves += 1
        return address, capacity

    def reserve(self, name: str, size: int) -> int:
        """Address of a device buffer of at least `size` bytes; kept and grown between calls."""
        return int(self._buffer("device", name, size)[0].value)

    def staging(self, name: str, shape: Sequence[int], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        """Page-locked buffer of that name as an array; the next batch overwrites it."""
        kind = np.dtype(dtype)
        size = int(np.prod(shape, dtype=np.int64)) * kind.itemsize
        address, capacity = self._buffer("host", name, size)
        memory = (ctypes.c_byte * capacity).from_address(int(address.value))
        values: npt.NDArray[Any] = np.frombuffer(memoryview(memory), np.byte, size).view(kind)
        return values.reshape(tuple(shape))

    def upload(self, name: str, size: int) -> None:
        """Queue a copy of the first `size` bytes of the staging buffer to the device."""
        device, host = (self._buffers[place, name][0] for place in ("device", "host"))
        self._queue_copy("cuMemcpyHtoDAsync_v2", device, host, size)

    def download(self, name: str, size: int) -> None:
        """Queue a copy of the first `size` bytes on the device into the staging buffer."""
        device, host = (self._buffers[place, name][0] for place in ("device", "host"))
        self._queue_copy("cuMemcpyDtoHAsync_v2", host, device, size)

    def copy(self, target: int, source: int, size: int) -> None:
        """Queue a copy of `size` bytes between two addresses on the device."""
        self._queue_copy("cuMemcpyDtoDAsync_v2", ctypes.c_uint64(target), ctypes.c_uint64(source), size)

    def _queue_copy(self, function: str, target: ctypes.c_uint64, source: ctypes.c_uint64, size: int) -> None:
        if size:
            self._driver.call(function, target, source, ctypes.c_size_t(size), self._stream)

    def copy_padded(self, target: int, source: int, row_bytes: int, rows: int, size: int) -> None:
        """Queue a copy of rows on the device, with the last one repeated up to `size` rows."""
        self.copy(target, source, row_bytes * rows)
        first, done = target + row_bytes * (rows - 1), 1
        while done < size - rows + 1:
            more = min(done, size - rows + 1 - done)
            self.copy(first + row_bytes * done, first, row_bytes * more)
            done += more

    def capture(self, work: Callable[[], None]) -> CudaGraph:
        """Record the work that `work` queues, without running it; a failure leaves the stream usable."""
        graph = ctypes.c_void_p()
        self._driver.call("cuStreamBeginCapture_v2", self._stream, CAPTURE_THIS_THREAD)
        try:
            work()
        except BaseException:
            # End the capture mode of the stream; that it yields no graph is expected.
            with suppress(EngineError):
                self._driver.call("cuStreamEndCapture", self._stream, ctypes.byref(graph))
            if graph.value:
                self._driver.call("cuGraphDestroy", graph)
            raise
        self._driver.call("cuStreamEndCapture", self._stream, ctypes.byref(graph))
        return CudaGraph(self._driver, graph, self._stream)

    def synchronize(self) -> None:
        """Wait for everything that was queued."""
        self._driver.call("cuStreamSynchronize", self._stream)

    def close(self) -> None:
        """Free the buffers, the stream and the reference to the context."""
        self.activate()
        for (place, _), (address, _) in self._buffers.items():
            self._driver.call(_MEMORY[place][1], address)
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
        "E0909 there is no CUDA driver on this machine",
        evidence=f"none of {', '.join(LIBRARIES)} loads",
        remedy="install the NVIDIA driver, or run on a machine with an NVIDIA GPU",
    )


def why_no_gpu(architecture: str) -> str:
    """Reason why this host cannot run an engine for an architecture; empty when it has such a GPU."""
    devices = list_cuda_devices()
    if any(device.architecture == architecture for device in devices):
        return ""
    here = ", ".join(f"{device.name} ({device.architecture})" for device in devices) or "no NVIDIA GPU"
    return f"the engine is for {architecture} and this host has {here}"


def first_gpu(architecture: str) -> CudaDevice:
    """The first GPU of an architecture; an `EngineError` where there is none."""
    for device in list_cuda_devices():
        if device.architecture == architecture:
            return device
    raise EngineError(f"E0910 cannot run here: {why_no_gpu(architecture)}")
