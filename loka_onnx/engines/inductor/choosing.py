"""Choice of the kernel for each product, timed on the device with the values that the site reads.

Candidates for each product of the fused graph are the library, with the epilogue fused by the compiler, and
the Triton kernel in several tiles, with the epilogue inside; for FP8 both with exact and fast accumulation.
Sums of INT8 are exact.
Each is timed in a CUDA graph at every served batch size. A program gets the kernel with the smallest sum over
its sizes among those whose arithmetic adds little to the quantization error: Hopper's tensor cores keep about
14 bits of an FP8 sum (DeepSeek-V3, arXiv 2412.19437, section 3.3.2), the simulation that judged the plan 24.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import cycle

import torch
from torch import Tensor

from loka_onnx.engines.inductor.lowering.strategies import (
    Epilogue,
    Factors,
    Multiplied,
    PerSite,
    ProductStrategy,
    ScaledMatMul,
    Tile,
    TiledProduct,
)
from loka_onnx.engines.tuned_kernels import calls_in_turn, copies_in_turn, weight_copies
from loka_onnx.engines.tuning import graph_timer

TILES = (
    Tile(128, 128, 128, 3, 8),
    Tile(64, 128, 128, 4, 4),
    Tile(64, 128, 128, 2, 4),
    Tile(128, 64, 128, 4, 4),
    Tile(64, 64, 128, 4, 4),
    Tile(64, 64, 128, 2, 4),
    Tile(64, 32, 256, 3, 4),
)
"""Tiles that were fastest at some shape on an H100 (`benchmarks`), for one-byte factors; two-byte factors use
half the depth, so that a step loads as many bytes."""
SPLIT_TILES = (
    Tile(64, 64, 128, 4, 4, split=2),
    Tile(64, 64, 128, 4, 4, split=4),
    Tile(64, 128, 128, 4, 4, split=4),
)
"""Tiles with split K, tried where the output has fewer tiles than `PROCESSORS`."""
PROCESSORS = 132
"""Streaming multiprocessors of an H100."""
LONG_K = 1024
"""From this K on, splitting pays, and exact tiles are tried as fast accumulation may exceed `LARGEST_ERROR`:
its error was .00044 at K = 512, .0047 to .0068 at 3456 (DLRM-DCNv2, MovieLens 1M, H100)."""
LARGEST_ERROR = 2.0**-9
"""Largest root mean square error of a kernel relative to the exact product of the same values. Rounding both
factors to E4M3 gives about 2⁻⁵: this adds less than a hundredth of that energy."""
_LAUNCHES = 10
_REPLAYS = 15


@dataclass(frozen=True)
class Measured:
    """One candidate at one site: median latency `us` by batch size, microseconds; `error`, the root mean
    square relative to the exact product of the same values; `obstacle`, the reason why it was not measured or
    may not be chosen, empty otherwise.
    """

    site: str
    kernel: str
    us: Mapping[int, float]
    error: float
    obstacle: str = ""


@dataclass(frozen=True)
class Chosen:
    """Measurements, and the choice that follows from them."""

    measured: tuple[Measured, ...]
    tried: Mapping[tuple[str, str], ProductStrategy]
    otherwise: ProductStrategy

    def strategy(self, sizes: Sequence[int]) -> PerSite:
        """Strategy of a program for `sizes`: each site's allowed candidate of the smallest sum over them, or
        the exact library.
        """
        choices: dict[str, ProductStrategy] = {each.site: ScaledMatMul() for each in self.measured}
        allowed = (each for each in self.measured if not each.obstacle)
        timed = sorted((sum(each.us[size] for size in sizes), each.kernel, each.site) for each in allowed)
        # The fastest comes last and stays.
        choices |= {site: self.tried[site, kernel] for _, kernel, site in reversed(timed)}
        return PerSite(choices, self.otherwise)


@dataclass(eq=False)
class Recorder(ProductStrategy):
    """Computes products by the library and keeps the operands of the fused ones, by site."""

    seen: dict[str, tuple[Factors, Epilogue]] = field(default_factory=dict)

    def multiply(self, product: Factors, epilogue: Epilogue | None = None) -> Multiplied:
        """See `ProductStrategy.multiply`."""
        if epilogue is not None:
            self.seen.setdefault(product.site, (product, epilogue))
        return ScaledMatMul().multiply(product, epilogue)


@dataclass(frozen=True)
class Chooser:
    """Compiles, times and compares candidates, on values of `batch` rows, for served batch sizes. With
    `fast_accumulation`, FP8 sums may keep fewer bits than FP32.
    """

    batch: int
    sizes: tuple[int, ...]
    fast_accumulation: bool = True

    def candidates(self, product: Factors) -> dict[str, ProductStrategy]:
        """Return the candidates of a product by name."""
        exact = ScaledMatMul()
        tiles = (*TILES, *self._split_tiles(product))
        # Tiles first: their times decide whether to time the library's epilogue.
        if product.is_integer:
            return {**_tiled(tiles), "int_mm": exact}
        if not product.is_quantized:
            half = [replace(tile, depth=tile.depth // product.a.element_size()) for tile in tiles]
            return {**_tiled(half), "library": exact}
        slow = _tiled([replace(tile, is_exact=True) for tile in tiles])
        if not self.fast_accumulation:
            return {**slow, "cublas": exact}
        both = _tiled(tiles) | (slow if product.b.shape[0] >= LONG_K else {})
        return {**both, "cublas": exact, "cublas-fast": ScaledMatMul(fast_accumulation=True)}

    def _split_tiles(self, product: Factors) -> tuple[Tile, ...]:
        k, n = product.b.shape
        if k < LONG_K:
            return ()
        rows = product.a.numel() // k
        if _batch_axis(product.a, self.batch) is not None:
            rows = rows * min(self.sizes) // self.batch
        return tuple(
            tile for tile in SPLIT_TILES if -(-rows // tile.rows) * -(-n // tile.columns) < PROCESSORS
        )

    def compile(self, seen: Mapping[str, tuple[Factors, Epilogue]]) -> None:
        """Compile every tile of every product in parallel; errors surface when a tile is timed."""
        different = {_key(product, epilogue): (product, epilogue) for product, epilogue in seen.values()}

        def run(strategy: TiledProduct, product: Factors, epilogue: Epilogue) -> None:
            # The current device and the grad mode are thread-local.
            with suppress(Exception), torch.cuda.device(product.a.device), torch.no_grad():
                strategy.multiply(product, epilogue)

        with ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as pool:
            for product, epilogue in different.values():
                for strategy in self.candidates(product).values():
                    if isinstance(strategy, TiledProduct):
                        pool.submit(run, strategy, product, epilogue)
        torch.cuda.synchronize()

    def choose(self, seen: Mapping[str, tuple[Factors, Epilogue]]) -> Chosen:
        """Measure every candidate at every site; `seen` are products on real values, on a GPU."""
        strategies: dict[tuple[str, str], ProductStrategy] = {}
        measured: list[Measured] = []
        known: dict[tuple[object, ...], dict[str, dict[int, float]]] = {}
        for site, (product, epilogue) in seen.items():
            # Sites with equal keys share latencies; errors depend on the values.
            times = known.setdefault(_key(product, epilogue), {})
            here: list[Measured] = []
            for name, strategy in self.candidates(product).items():
                strategies[site, name] = strategy
                if not _has_faster_twin(strategy, here):
                    here.append(self._measure(_Case(name, strategy, product, epilogue), times, here))
            measured += here
        return Chosen(tuple(measured), strategies, ScaledMatMul(self.fast_accumulation))

    def _measure(
        self, case: _Case, known: dict[str, dict[int, float]], before: Sequence[Measured]
    ) -> Measured:
        site, name = case.product.site, case.name
        try:
            error = _error(case.strategy, case.product)
            if not error <= LARGEST_ERROR:
                reason = f"error {error:.2g}, at most {LARGEST_ERROR:.2g} is allowed"
                return Measured(site, name, {}, error, reason)
            if name not in known:
                alone = {size: _time_product(case.at(size, self.batch)) for size in self.sizes}
                # Faster at every size is faster in every sum.
                allowed = [each.us for each in before if not each.obstacle]
                is_behind = any(all(alone[size] > us[size] for size in self.sizes) for us in allowed)
                if is_behind and not case.strategy.fuses_epilogue:
                    reason = "slower than another even without what follows"
                    return Measured(site, name, {}, error, reason)
                behind = {size: _time_behind(case.at(size, self.batch)) for size in self.sizes}
                known[name] = {size: us + behind[size] for size, us in alone.items()}
        except Exception as failure:
            # A tile may need too much shared memory; the compiler then raises errors of several types.
            return Measured(site, name, {}, float("nan"), f"{type(failure).__name__}: {str(failure)[:200]}")
        return Measured(site, name, known[name], error)


def _tiled(tiles: Sequence[Tile]) -> dict[str, ProductStrategy]:
    return {f"triton {tile}": TiledProduct(tile) for tile in tiles}


def _batch_axis(tensor: Tensor, batch: int) -> int | None:
    """The first axis that grows with the batch; None where no axis does."""
    return next((axis for axis, length in enumerate(tensor.shape[:-1]) if length % batch == 0), None)


def _key(product: Factors, epilogue: Epilogue) -> tuple[object, ...]:
    """Key that is equal for products with equal latency."""
    shapes = (*product.a.shape, *product.b.shape, product.scale_b.dim())
    # Tiles read rows: a copy is timed with those that are not contiguous.
    layouts = (product.a.is_contiguous(), product.b.t().is_contiguous())
    parts = (product.bias is None, epilogue.relu, len(epilogue.cross), epilogue.is_first)
    ends = (epilogue.is_wide, epilogue.scale is None, epilogue.narrow)
    return (*shapes, *layouts, product.a.dtype, product.dtype, *parts, *ends)


def _has_faster_twin(strategy: ProductStrategy, before: Sequence[Measured]) -> bool:
    """True if a tile is exact and the same tile with fast accumulation is allowed."""
    if not isinstance(strategy, TiledProduct) or not strategy.tile.is_exact:
        return False
    twin = f"triton {replace(strategy.tile, is_exact=False)}"
    return any(each.kernel == twin and not each.obstacle for each in before)


@dataclass(frozen=True, eq=False)
class _Case:
    """A candidate, and the product on real values that it is measured with."""

    name: str
    strategy: ProductStrategy
    product: Factors
    epilogue: Epilogue

    def at(self, size: int, batch: int) -> _Case:
        """Return the case, resized from `batch` to `size` by repeating or cutting rows."""
        axis = _batch_axis(self.product.a, batch)
        if axis is None:
            return self
        rows = self.product.a.shape[axis] * size // batch
        cross = tuple(_repeated(each, rows, axis) for each in self.epilogue.cross)
        if self.epilogue.is_first:
            cross = (cross[0], cross[0])
        product = replace(self.product, a=_repeated(self.product.a, rows, axis))
        return replace(self, product=product, epilogue=replace(self.epilogue, cross=cross))


def _repeated(tensor: Tensor, rows: int, axis: int = 0) -> Tensor:
    """Repeat a tensor to `rows` along an axis in its own layout: other layouts cost a copy."""
    times = -(-rows // tensor.shape[axis])
    # PyTorch cannot repeat FP8 tensors.
    raw = tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor
    counts = [times if each == axis else 1 for each in range(raw.dim())]
    repeated = raw.repeat(*counts).narrow(axis, 0, rows)
    slowest_first = sorted(range(raw.dim()), key=tensor.stride, reverse=True)
    back = sorted(range(raw.dim()), key=slowest_first.__getitem__)
    return repeated.permute(slowest_first).contiguous().permute(back).view(tensor.dtype)


def _time_product(case: _Case) -> float:
    """Microseconds of a product, including the epilogue where the same kernel computes it."""
    products = with_weights_in_turn(case.product)
    turns, launches = cycle(products), calls_in_turn(_LAUNCHES, len(products))
    epilogue = case.epilogue if case.strategy.fuses_epilogue else None
    return time_in_graph(lambda: case.strategy.multiply(next(turns), epilogue), launches)


def with_weights_in_turn(product: Factors) -> list[Factors]:
    """Return the product with copies of its weight that together exceed the GPU's cache, as an engine reads a
    large weight from memory in every request. Timed with one weight, a tile was chosen over the library's
    kernel, which made a faster engine (227 for 251 µs: Wukong small in BF16 at 256, H100).
    """
    weight = product.b.t().contiguous()
    weights = weight_copies(weight, copies_in_turn(weight.numel() * weight.element_size()))
    return [product, *(replace(product, b=each.t()) for each in weights[1:])]


def _time_behind(case: _Case) -> float:
    """Microseconds of the epilogue of a library's product, one kernel of the compiler."""
    if case.strategy.fuses_epilogue or not case.epilogue.follows:
        return 0.0
    value = case.strategy.multiply(case.product).values

    def follow(value: Tensor, cross: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return replace(case.epilogue, cross=cross).apply(value)

    torch._dynamo.reset()
    compiled = torch.compile(follow, dynamic=False)
    return time_in_graph(lambda: compiled(value, case.epilogue.cross))


def _error(strategy: ProductStrategy, product: Factors) -> float:
    """Error of the product alone, in the base precision, without its epilogue."""
    product = replace(product, bias=None)
    values = strategy.multiply(product, Epilogue()).values.to(torch.float64)
    exact = torch.matmul(product.a.to(torch.float64) * product.scale_a, product.b.to(torch.float64))
    exact = exact * product.scale_b
    rounded = exact.to(product.dtype).to(torch.float64)
    # A product of zeros has norm 0; a kernel that returns zeros is exact then.
    norm = exact.norm().clamp(min=torch.finfo(torch.float64).tiny)
    # Subtract the energy of rounding the result to its type.
    total, own = (values - exact).norm() / norm, (rounded - exact).norm() / norm
    return float(torch.sqrt(torch.clamp(total * total - own * own, min=0.0)))


def time_in_graph(run: Callable[[], object], launches: int = _LAUNCHES) -> float:
    """Median time of one launch in a CUDA graph, microseconds."""
    replay = graph_timer(run, launches)
    return statistics.median(replay() for _ in range(_REPLAYS))
