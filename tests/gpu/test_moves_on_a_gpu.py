"""Moves of a request in a CUDA graph: by a kernel on pinned memory, by a copy node what is large."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs torch: pip install 'loka-onnx[export]'")

from loka_onnx.engines.inductor.gpu import Gpu  # noqa: E402
from loka_onnx.sessions.cuda import list_cuda_devices  # noqa: E402


@pytest.fixture
def gpu() -> Iterator[Gpu]:
    if not list_cuda_devices() or not torch.cuda.is_available():
        pytest.skip("needs a GPU: CUDA graphs are captured and replayed")
    gpu = Gpu(torch, 0)
    yield gpu
    gpu.close()


def check_moves(gpu: Gpu, arriving: Any, on_device: Any, batches: Sequence[Any]) -> None:
    """A graph that moves pinned memory to the device and back hands on whatever lies there."""
    leaving = gpu.pinned(on_device.shape, on_device.dtype)
    moves = gpu.moving(on_device, arriving), gpu.moving(leaving, on_device)

    def work() -> Sequence[Any]:
        for move in moves:
            move()
        return ()

    with gpu.active():
        captured = gpu.capture(work, warm_ups=1)
    gpu.activate()
    for values in batches:
        arriving.numpy()[...] = values
        captured.replay()
        gpu.synchronize()
        np.testing.assert_array_equal(leaving.numpy(), values)
    captured.reset()


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(3,), (5, 1), (2048, 19), (1 << 20, 3)])
@pytest.mark.parametrize("dtype", ["bool", "float16", "float32", "int64"])
def test_a_graph_moves_bytes_between_pinned_memory_and_the_device(
    gpu: Gpu, dtype: str, shape: tuple[int, ...]
) -> None:
    kind = getattr(torch, dtype)
    on_device = torch.zeros(shape, dtype=kind, device=gpu.device)
    batches = [np.random.default_rng(seed).integers(0, 2**11, shape).astype(dtype) for seed in (1, 2)]
    check_moves(gpu, gpu.pinned(shape, kind), on_device, batches)


@pytest.mark.gpu
@pytest.mark.parametrize("count", [1, 6, 19 * 2048, 3 << 20])
def test_a_graph_widens_ids_on_their_way(gpu: Gpu, count: int) -> None:
    arriving = gpu.pinned((4 * count,), torch.uint8).view(torch.int32)
    on_device = torch.zeros((8 * count,), dtype=torch.uint8, device=gpu.device).view(torch.int64)
    check_moves(gpu, arriving, on_device, [np.random.default_rng(0).integers(-(2**31), 2**31, count)])
