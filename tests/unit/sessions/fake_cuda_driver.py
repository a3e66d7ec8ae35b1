"""The CUDA driver's functions that are used, done in host memory: what is queued really happens, in order.

A double for tests without a GPU. It refuses what the driver refuses: a wait while a stream is captured, a
size or an address that was never allocated, a buffer freed twice.
"""

import ctypes
from collections.abc import Callable
from typing import Any

STREAM = 7
INVALID_VALUE, CAPTURE_UNSUPPORTED, CAPTURE_INVALIDATED = 1, 900, 901


class FakeDriver:
    """Stands in for the loaded driver library.

    Args:
        devices: Name, and compute capability as major and minor, of each device.
    """

    def __init__(self, *devices: tuple[str, int, int]) -> None:
        self.devices = devices or (("NVIDIA H100 80GB HBM3", 9, 0),)
        self.buffers: dict[int, ctypes.Array[Any]] = {}
        self.graphs: dict[int, list[Callable[[], None]]] = {}
        self.calls: list[str] = []
        self.recorded: list[Callable[[], None]] | None = None
        self.is_invalid = False
        self.capturable = True
        self._next = 100

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"the driver has no function '{name}' in this test")

    def queue(self, work: Callable[[], None]) -> int:
        """What a kernel launch does: run, or be recorded."""
        if self.recorded is None:
            work()
        else:
            self.recorded.append(work)
        return 0

    def allocated(self, address: int, size: int) -> bool:
        return any(
            start <= address and address + size <= start + len(buffer)
            for start, buffer in self.buffers.items()
        )

    def _number(self) -> int:
        self._next += 1
        return self._next

    # Device and context.

    def cuInit(self, flags: int) -> int:
        return 0

    cuStreamDestroy_v2 = cuInit

    def cuDriverGetVersion(self, version: Any) -> int:
        version._obj.value = 12040
        return 0

    def cuGetErrorString(self, code: int, text: Any) -> int:
        text._obj.value = {CAPTURE_INVALIDATED: b"the capture was invalidated"}.get(code, b"invalid argument")
        return 0

    def cuDeviceGetCount(self, count: Any) -> int:
        count._obj.value = len(self.devices)
        return 0

    def cuDeviceGet(self, handle: Any, index: int) -> int:
        handle._obj.value = index
        return 0

    def cuDeviceGetName(self, name: Any, size: int, handle: Any) -> int:
        name.value = self.devices[handle.value][0].encode()
        return 0

    def cuDeviceGetAttribute(self, value: Any, attribute: int, handle: Any) -> int:
        value._obj.value = self.devices[handle.value][{75: 1, 76: 2}[attribute]]
        return 0

    def cuDevicePrimaryCtxRetain(self, context: Any, handle: Any) -> int:
        context._obj.value = 5
        self.calls.append(f"retain {handle.value}")
        return 0

    def cuDevicePrimaryCtxRelease_v2(self, handle: Any) -> int:
        self.calls.append("release")
        return 0

    def cuCtxSetCurrent(self, context: Any) -> int:
        self.calls.append("current")
        return 0

    # Streams and graphs.

    def cuStreamCreate(self, stream: Any, flags: int) -> int:
        stream._obj.value = STREAM
        return 0

    def cuStreamSynchronize(self, stream: Any) -> int:
        if self.recorded is not None:
            self.is_invalid = True
            return CAPTURE_UNSUPPORTED
        return 0

    def cuStreamBeginCapture_v2(self, stream: Any, mode: int) -> int:
        assert self.recorded is None
        self.recorded, self.is_invalid = [], not self.capturable
        return 0

    def cuStreamEndCapture(self, stream: Any, graph: Any) -> int:
        recorded, self.recorded = self.recorded, None
        if recorded is None or self.is_invalid:
            return CAPTURE_INVALIDATED
        graph._obj.value = self._number()
        self.graphs[graph._obj.value] = recorded
        return 0

    def cuGraphInstantiateWithFlags(self, executable: Any, graph: Any, flags: Any) -> int:
        executable._obj.value = self._number()
        self.graphs[executable._obj.value] = list(self.graphs[graph.value])
        return 0

    def cuGraphDestroy(self, graph: Any) -> int:
        del self.graphs[graph.value]
        return 0

    cuGraphExecDestroy = cuGraphDestroy

    def cuGraphLaunch(self, executable: Any, stream: Any) -> int:
        self.calls.append("launch")
        for work in self.graphs[executable.value]:
            work()
        return 0

    # Memory.

    def cuMemAlloc_v2(self, address: Any, size: Any) -> int:
        buffer = (ctypes.c_byte * size.value)()
        address._obj.value = ctypes.addressof(buffer)
        self.buffers[address._obj.value] = buffer
        return 0

    def cuMemFree_v2(self, address: Any) -> int:
        return 0 if self.buffers.pop(address.value, None) is not None else INVALID_VALUE

    def cuMemcpyHtoDAsync_v2(self, target: Any, source: Any, size: Any, stream: Any) -> int:
        to, origin, count = target.value, source.value, size.value
        if not (self.allocated(to, count) and self.allocated(origin, count)):
            return INVALID_VALUE
        self.calls.append("copy")
        return self.queue(lambda: void(ctypes.memmove(to, origin, count)))

    cuMemAllocHost_v2, cuMemFreeHost = cuMemAlloc_v2, cuMemFree_v2
    cuMemcpyDtoDAsync_v2 = cuMemcpyDtoHAsync_v2 = cuMemcpyHtoDAsync_v2


def void(value: object) -> None:
    """A call as a statement, for a lambda."""
