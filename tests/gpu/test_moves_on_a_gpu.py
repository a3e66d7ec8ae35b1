"""Moves of a request in a CUDA graph: by a kernel on pinned memory, by a copy node what is large."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs torch: pip install 'loka-onnx[export]'")

from loka_onnx.engines.inductor.gpu import Gpu  # noqa: E402
from loka_onnx.sessions.cuda import list_cuda_devices  # noqa: E402


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(3,), (5, 1), (2048, 19), (1 << 20, 3)])
@pytest.mark.parametrize("dtype", ["bool", "float16", "float32", "int64"])
def test_a_graph_moves_bytes_between_pinned_memory_and_the_device(dtype: str, shape: tuple[int, ...]) -> None:
    if not list_cuda_devices() or not torch.cuda.is_available():
        pytest.skip("needs a GPU: CUDA graphs are captured and replayed")
    gpu, kind = Gpu(torch, 0), getattr(torch, dtype)
    arriving, leaving = gpu.pinned(shape, kind), gpu.pinned(shape, kind)
    on_device = torch.zeros(shape, dtype=kind, device=gpu.device)
    moves = gpu.moving(on_device, arriving), gpu.moving(leaving, on_device)

    def work() -> Sequence[Any]:
        for move in moves:
            move()
        return ()

    with gpu.active():
        captured = gpu.capture(work, warm_ups=1)
    gpu.activate()
    for seed in (1, 2):
        values = np.random.default_rng(seed).integers(0, 2**11, shape).astype(dtype)
        arriving.numpy()[...] = values
        captured.replay()
        gpu.synchronize()
        np.testing.assert_array_equal(leaving.numpy(), values)
    captured.reset()
    gpu.close()


@pytest.mark.gpu
@pytest.mark.parametrize("count", [1, 6, 19 * 2048, 3 << 20])
def test_a_graph_widens_ids_on_their_way(count: int) -> None:
    if not list_cuda_devices() or not torch.cuda.is_available():
        pytest.skip("needs a GPU: CUDA graphs are captured and replayed")
    gpu = Gpu(torch, 0)
    arriving = gpu.pinned((4 * count,), torch.uint8)[: 4 * count].view(torch.int32)
    leaving = gpu.pinned((count,), torch.int64)
    on_device = torch.zeros((8 * count,), dtype=torch.uint8, device=gpu.device).view(torch.int64)
    moves = gpu.moving(on_device, arriving), gpu.moving(leaving, on_device)

    def work() -> Sequence[Any]:
        for move in moves:
            move()
        return ()

    with gpu.active():
        captured = gpu.capture(work, warm_ups=1)
    gpu.activate()
    ids = np.random.default_rng(0).integers(-(2**31), 2**31, count)
    arriving.numpy()[...] = ids
    captured.replay()
    gpu.synchronize()
    np.testing.assert_array_equal(leaving.numpy(), ids)
    captured.reset()
    gpu.close()
