"""What the shape mods gain on a GPU: the figures that their rules come from.

PyTorch's own kernels in BF16, replayed as a CUDA graph, without a compiler that could fuse what is compared::

    python -m benchmarks.micro.site_shapes

Each row is the microseconds of one form beside those of another, on random data: layers apart or merged
(their parts read in place or copied), an odd K or N or one that is padded (by a Pad, a Slice, or for
nothing), the linear layer of a concatenation or the sum of its parts, 26 lookups or one, X·Xᵀ·Y in either
order.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

REPEATS, REPLAYS = 20, 15
BATCHES = (256, 2048)
ALIGNMENT = 16


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16) * 0.05


def time_us(form: Callable[[], Any]) -> float:
    """Median of one call among many in a CUDA graph."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            form()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(REPEATS):
            form()
    for _ in range(3):
        graph.replay()
    times = []
    for _ in range(REPLAYS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / REPEATS)
    return round(sorted(times)[REPLAYS // 2], 2)


def merged(m: int, k: int, parts: int, n: int) -> dict[str, float]:
    """Layers with a ReLU, each in front of a layer of its own."""
    layer = torch._addmm_activation
    x, joined, bias = random(m, k), random(k, n * parts), random(n * parts)
    weights, after = [random(k, n) for _ in range(parts)], [random(n, 64) for _ in range(parts)]

    def apart() -> None:
        for weight, second in zip(weights, after, strict=True):
            layer(bias[:n], x, weight) @ second

    def together() -> None:
        for part, second in zip(layer(bias, x, joined).split(n, 1), after, strict=True):
            part @ second

    def copied() -> None:
        for part, second in zip(layer(bias, x, joined).split(n, 1), after, strict=True):
            part.contiguous() @ second

    return {"apart": time_us(apart), "merged": time_us(together), "merged_copied": time_us(copied)}


def padded(m: int, k: int, n: int) -> dict[str, float]:
    """One layer of odd K or N."""
    wide_k, wide_n = (-(-d // ALIGNMENT) * ALIGNMENT for d in (k, n))
    x, weight = random(m, k), random(k, n)
    wide_x = functional.pad(x, (0, wide_k - k))
    wide = functional.pad(weight, (0, wide_n - n, 0, wide_k - k))

    def copied() -> Tensor:
        y = (functional.pad(x, (0, wide_k - k)) if wide_k > k else x) @ wide
        return y[:, :n].contiguous() if wide_n > n else y

    return {
        "odd": time_us(lambda: x @ weight),
        "padded_by_copy": time_us(copied),
        "padded_for_nothing": time_us(lambda: wide_x @ wide),
    }


def concatenated(m: int, parts: int, k: int, n: int) -> dict[str, float]:
    """A layer that reads parts of k columns each."""
    x, weights = [random(m, k) for _ in range(parts)], [random(k, n) for _ in range(parts)]
    whole, bias = torch.cat(weights), random(n)

    def summed() -> Tensor:
        y = torch.addmm(bias, x[0], weights[0])
        for part, weight in zip(x[1:], weights[1:], strict=True):
            y = torch.addmm(y, part, weight)
        return y

    return {"concat": time_us(lambda: torch.addmm(bias, torch.cat(x, 1), whole)), "sum": time_us(summed)}


def looked_up(m: int, columns: int, width: int) -> dict[str, float]:
    """Columns of ids, tables of 10,000 rows, the rows stacked."""
    tables = [random(10_000, width) for _ in range(columns)]
    stacked, ids = torch.cat(tables), torch.randint(0, 10_000, (m, columns), device="cuda")
    offsets = torch.arange(columns, device="cuda") * 10_000

    def apart() -> Tensor:
        return torch.stack([functional.embedding(ids[:, i], table) for i, table in enumerate(tables)], 1)

    return {"apart": time_us(apart), "one": time_us(lambda: functional.embedding(ids + offsets, stacked))}


def associated(m: int, n: int, d: int, k: int) -> dict[str, float]:
    """X (n, d) for each example, Y (n, k) for all of them."""
    x, y = random(m, n, d), random(n, k)
    turned, each = x.transpose(1, 2), y.expand(m, n, k)
    return {
        "x_xt_first": time_us(lambda: torch.bmm(x, turned) @ y),
        "xt_y_first": time_us(lambda: torch.bmm(x, torch.bmm(turned, each))),
    }


ODD_K = ((53, 512), (429, 512), (1013, 1024), (3453, 1024), (18, 64), (200, 256), (1000, 4096), (1004, 1024))
ODD_N = ((512, 53), (512, 250), (512, 1013), (1024, 1004), (1024, 3453), (256, 18), (4096, 1013))
TOKENS = ((27, 128, 16), (64, 128, 32), (64, 64, 16), (128, 128, 64), (128, 64, 16), (256, 64, 32))
TABLES: dict[Callable[..., dict[str, float]], tuple[tuple[str, ...], list[tuple[int, ...]]]] = {
    merged: (("k", "parts", "n"), list(product((256, 1024), (2, 4, 8), (8, 64, 256, 1024)))),
    padded: (("k", "n"), [*ODD_K, *ODD_N]),
    concatenated: (("parts", "k", "n"), list(product((2, 4), (64, 512, 2048), (1, 64, 512)))),
    looked_up: (("columns", "width"), [(26, 16), (26, 128)]),
    associated: (("n", "d", "k"), list(TOKENS)),
}


def measure(table: Callable[..., dict[str, float]]) -> list[dict[str, float]]:
    """One row for each batch and shape."""
    names, shapes = TABLES[table]
    return [
        {"m": m, **dict(zip(names, shape, strict=True)), **table(m, *shape)}
        for m in BATCHES
        for shape in shapes
    ]


def main() -> None:
    """Measure, print and record."""
    if not torch.cuda.is_available():
        print("benchmarks.micro.site_shapes: not run, it needs a CUDA GPU")
        return
    figures = {table.__name__: measure(table) for table in TABLES}
    for name, rows in figures.items():
        print(name, *rows[0])
        for row in rows:
            print(*row.values())
    from benchmarks.recording import write_record

    settings = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "dtype": "bfloat16"}
    print(write_record("site_shapes", figures, settings))


if __name__ == "__main__":
    main()
