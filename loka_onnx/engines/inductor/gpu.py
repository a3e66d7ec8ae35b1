"""Calls of PyTorch and the CUDA driver for sessions of Inductor engines: a stream and its CUDA graphs."""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

from loka_onnx.sessions.cuda import CudaDriver

Tensor = Any
"""`torch.Tensor`; torch is imported only when a session is opened."""
MOVED_BY_KERNELS = 1 << 21
"""Bytes up to which a kernel moves memory in a graph: a copy of less takes up to 7 µs longer (H100)."""
_CAPTURING = threading.Lock()
"""Held by the session that captures: PyTorch's allocator records for one graph at a time."""


@dataclass(frozen=True)
class Captured:
    """A CUDA graph; `outputs` are the same tensors in each replay, `replay` needs an `activated` thread."""

    replay: Callable[[], object]
    outputs: tuple[Tensor, ...]
    reset: Callable[[], object]


class Gpu:
    """One stream of a GPU, and the memory pool of the graphs captured on it. Graphs of a pool may share
    memory for tensors that nothing holds after the capture: they run in turn on one stream.
    """

    def __init__(self, torch: Any, index: int) -> None:
        self._torch = torch
        self.device = torch.device("cuda", index)
        self._stream = torch.cuda.Stream(self.device)
        self.stream = int(self._stream.cuda_stream)
        self._pool = torch.cuda.graph_pool_handle()
        self._driver, self._context = CudaDriver(), ctypes.c_void_p()
        self._handle = ctypes.c_void_p(self.stream)
        # PyTorch has made the primary context current in this thread.
        self._driver.call("cuCtxGetCurrent", ctypes.byref(self._context))

    def pinned(self, shape: Sequence[int], dtype: Any) -> Tensor:
        """Allocate page-locked host memory."""
        return self._torch.zeros(tuple(shape), dtype=dtype, pin_memory=True)

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Queue the work of PyTorch in the calling thread on this stream."""
        with self._torch.inference_mode(), self._torch.cuda.stream(self._stream):
            yield

    def activate(self) -> None:
        """Let the calling thread use the driver."""
        self._driver.call("cuCtxSetCurrent", self._context)

    def synchronize(self) -> None:
        """Wait for everything that was queued; in an activated thread."""
        self._driver.call("cuStreamSynchronize", self._handle)

    def copying(self, target: Tensor, source: Tensor) -> Callable[[], object]:
        """Return a function that queues a copy of a contiguous tensor between the device and pinned memory.
        It allocates nothing and holds neither tensor.
        """
        addresses = (ctypes.c_uint64(each.data_ptr()) for each in (target, source))
        size = ctypes.c_size_t(source.numel() * source.element_size())
        return partial(self._driver.call, "cuMemcpyAsync", *addresses, size, self._handle)

    def moving(self, target: Tensor, source: Tensor) -> Callable[[], object]:
        """Return a function that queues such a copy in a graph, by a kernel on pinned memory; large ones go
        through `copying`. Integers are widened to the target's type.
        """
        if source.dtype != target.dtype:
            return partial(self._torch.add, self._bytes(source).view(source.dtype), 0, out=target)
        if source.numel() * source.element_size() > MOVED_BY_KERNELS:
            return self.copying(target, source)
        target, source = self._bytes(target), self._bytes(source)
        if (target.data_ptr() | source.data_ptr() | len(source)) % 4 == 0:
            target, source = target.view(self._torch.int32), source.view(self._torch.int32)
        return partial(self._torch.add, source, 0, out=target)

    def _bytes(self, tensor: Tensor) -> Tensor:
        """View the bytes of a tensor; those of pinned memory have the same address on the device."""
        flat = tensor.reshape(-1).view(self._torch.uint8)
        if tensor.is_cuda:
            return flat
        place = {"shape": (len(flat),), "typestr": "|u1", "data": (flat.data_ptr(), False), "version": 3}
        holder = SimpleNamespace(__cuda_array_interface__=place, memory=tensor)
        return self._torch.as_tensor(holder, device=self.device)

    def capture(self, call: Callable[[], Sequence[Tensor]], *, warm_ups: int) -> Captured:
        """Capture the work of a call, after calls that load kernels and let libraries choose theirs."""
        for _ in range(warm_ups):
            call()
        self._stream.synchronize()
        graph = self._torch.cuda.CUDAGraph()
        # Only errors of this thread end the capture: others may use the GPU meanwhile, but not capture too.
        how = {"pool": self._pool, "stream": self._stream, "capture_error_mode": "thread_local"}
        with _CAPTURING, self._torch.cuda.graph(graph, **how):
            outputs = call()
        program = ctypes.c_void_p(graph.raw_cuda_graph_exec())
        replay = partial(self._driver.call, "cuGraphLaunch", program, self._handle)
        return Captured(replay, tuple(outputs), graph.reset)

    def close(self) -> None:
        """Return unused memory to the device."""
        self._stream.synchronize()
        self._torch.cuda.empty_cache()
