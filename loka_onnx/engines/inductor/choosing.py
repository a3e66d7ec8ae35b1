"""Choice of the kernel for each product, timed on the device with the values that the site reads.

Candidates for each product of the fused graph: the library (for FP8: cuBLASLt with exact and with fast
accumulation, and the installed `kernels.packages`), with the epilogue fused by the compiler, and the Triton
kernel in several tiles (for FP8 with exact and fast accumulation), with the epilogue inside. Each is timed in
a CUDA graph at every served batch size. A program gets the kernel with the smallest sum over its sizes among
those whose arithmetic adds little to the quantization error: Hopper's tensor cores keep about 14 bits of an
FP8 sum (DeepSeek-V3, arXiv 2412.19437, section 3.3.2), while the simulation that judged the plan keeps 24.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import cycle
from typing import Any

import torch
from torch import Tensor

from loka_onnx.core.progress import Progress, silent
from loka_onnx.engines.inductor.kernels.packages import PackageProduct
from loka_onnx.engines.inductor.kernels.products import (
    Epilogue,
    EpilogueStrategy,
    Finished,
    Tile,
    TiledProduct,
    library_with,
)
from loka_onnx.engines.inductor.lowering.strategies import (
    FloatProduct,
    Multiplied,
    PerSite,
    ProductStrategy,
    ScaledMatMul,
)
from loka_onnx.engines.inductor.operator_packages import FoundPackage
from loka_onnx.engines.tuned_kernels import calls_in_turn, copies_in_turn

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
"""From this K on, splitting pays, and exact tiles are tried too because fast accumulation may exceed
`LARGEST_ERROR`: its error was .00044 at K = 512 and .0047 to .0068 at K = 3456 (DLRM-DCNv2 trained on
MovieLens 1M, H100)."""
LARGEST_ERROR = 2.0**-9
"""Largest root mean square error of a kernel relative to the exact product of the same values. Rounding both
factors to E4M3 gives about 2⁻⁵: this adds less than a hundredth of that energy."""
_LAUNCHES = 10
_REPLAYS = 15


@dataclass(frozen=True)
class Measured:
    """One candidate at one site.

    Attributes:
        us: Median latency by batch size, microseconds.
        error: Root mean square error relative to the exact product of the same values.
        obstacle: Reason why it was not measured or may not be chosen; empty otherwise.
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

    def products(self, sizes: Sequence[int]) -> ProductStrategy:
        """Return, for each site, the allowed candidate with the smallest sum over batch sizes.

        A site without an allowed candidate gets the library's exact product.
        """
        best: dict[str, tuple[float, str]] = {}
        for each in self.measured:
            if not each.obstacle:
                took = sum(each.us[size] for size in sizes)
                best[each.site] = min(best.get(each.site, (took, each.kernel)), (took, each.kernel))
        choices: dict[str, ProductStrategy] = {each.site: ScaledMatMul() for each in self.measured}
        choices |= {site: self.tried[site, kernel] for site, (_, kernel) in best.items()}
        return PerSite(choices, self.otherwise)


@dataclass(eq=False)
class Recorder(EpilogueStrategy):
    """Computes products by the library and keeps their operands."""

    library: ProductStrategy
    seen: dict[str, tuple[FloatProduct, Epilogue]] = field(default_factory=dict)

    def multiply(self, product: FloatProduct) -> Multiplied:
        """Multiply a product that no fusion took; there is nothing to choose."""
        return self.library.multiply(product)

    def multiply_with(self, product: FloatProduct, epilogue: Epilogue) -> Finished:
        """See `EpilogueStrategy.multiply_with`."""
        self.seen.setdefault(product.site, (product, epilogue))
        return library_with(self.library, product, epilogue)


def candidates(
    product: FloatProduct,
    *,
    fast_accumulation: bool = True,
    packages: Sequence[FoundPackage] = (),
    fewest_rows: int | None = None,
) -> dict[str, ProductStrategy]:
    """Return the candidates of a product by name.

    Args:
        fast_accumulation: Whether FP8 sums may keep fewer bits than FP32.
        fewest_rows: Rows of the product in the smallest served request; None: as in `product`.
    """
    exact = ScaledMatMul()
    tiles = (*TILES, *_split_tiles(product, fewest_rows))
    # Tiles first: their times decide whether to time the library's epilogue.
    if not product.is_float8:
        half = [replace(tile, depth=tile.depth // product.a.element_size()) for tile in tiles]
        return {**_tiled(half), "library": exact}
    slow = _tiled([replace(tile, is_exact=True) for tile in tiles])
    packaged = _packaged(packages, fast_accumulation=fast_accumulation)
    if not fast_accumulation:
        return {**slow, "cublas": exact, **packaged}
    both = _tiled(tiles) | (slow if product.b.shape[0] >= LONG_K else {})
    fast = replace(exact, fast_accumulation=True)
    return {**both, "cublas": exact, "cublas-fast": fast, **packaged}


def _split_tiles(product: FloatProduct, fewest_rows: int | None) -> tuple[Tile, ...]:
    k, n = product.b.shape
    if k < LONG_K:
        return ()
    rows = fewest_rows or product.a.numel() // k
    return tuple(tile for tile in SPLIT_TILES if -(-rows // tile.rows) * -(-n // tile.columns) < PROCESSORS)


def _packaged(packages: Sequence[FoundPackage], *, fast_accumulation: bool) -> dict[str, ProductStrategy]:
    made = [
        PackageProduct(found, operator, fast)
        for found in packages
        for operator in found.package.operators
        for fast in ((False, True) if fast_accumulation else (False,))
    ]
    return {f"{each.name}-fast" if each.fast_accumulation else each.name: each for each in made}


def _tiled(tiles: Sequence[Tile]) -> dict[str, ProductStrategy]:
    return {_name(tile): TiledProduct(tile) for tile in tiles}


def _name(tile: Tile) -> str:
    return f"triton {tile}"


def compile_candidates(
    seen: Mapping[str, tuple[FloatProduct, Epilogue]],
    batch: int,
    sizes: Sequence[int],
    *,
    fast_accumulation: bool = True,
) -> None:
    """Compile every tile of every product in parallel, ahead of timing. Compile errors surface when it is
    measured.
    """
    different = {_key(product, epilogue): (product, epilogue) for product, epilogue in seen.values()}

    def run(strategy: TiledProduct, product: FloatProduct, epilogue: Epilogue) -> None:
        # The current device and the grad mode are thread-local.
        with suppress(Exception), torch.cuda.device(product.a.device), torch.no_grad():
            strategy.multiply_with(product, epilogue)

    with ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as pool:
        for product, epilogue in different.values():
            fewest = _fewest_rows(product, batch, sizes)
            tried = candidates(product, fast_accumulation=fast_accumulation, fewest_rows=fewest)
            for strategy in tried.values():
                if isinstance(strategy, TiledProduct):
                    pool.submit(run, strategy, product, epilogue)
    torch.cuda.synchronize()


def _fewest_rows(product: FloatProduct, batch: int, sizes: Sequence[int]) -> int:
    """Rows of a product in the smallest served request."""
    rows = product.a.numel() // product.a.shape[-1]
    return rows if _batch_axis(product.a, batch) is None else rows * min(sizes) // batch


def _batch_axis(tensor: Tensor, batch: int) -> int | None:
    """The first axis that grows with the batch; None where no axis does."""
    return next((axis for axis, length in enumerate(tensor.shape[:-1]) if length % batch == 0), None)


def _key(product: FloatProduct, epilogue: Epilogue) -> tuple[object, ...]:
    """Key that is equal for products with equal latency."""
    shapes = (*product.a.shape, *product.b.shape, product.scale_b.dim())
    # Tiles read rows: a copy is timed with those that are not contiguous.
    layouts = (product.a.is_contiguous(), product.b.t().is_contiguous())
    return (*shapes, *layouts, product.a.dtype, product.dtype, epilogue.describe())


def choose_kernels(
    seen: Mapping[str, tuple[FloatProduct, Epilogue]],
    batch: int,
    sizes: Sequence[int],
    progress: Progress = silent,
    *,
    fast_accumulation: bool = True,
    packages: Sequence[FoundPackage] = (),
) -> Chosen:
    """Measure every candidate at every site.

    Args:
        seen: Product on real values and epilogue by site, on a GPU.
        batch: Rows of the request that the values come from.
        sizes: Served batch sizes.
    """
    strategies: dict[tuple[str, str], ProductStrategy] = {}
    measured: list[Measured] = []
    known: dict[tuple[object, ...], dict[str, dict[int, float]]] = {}
    for number, (site, (product, epilogue)) in enumerate(seen.items()):
        progress("kernels", number, len(seen))
        # Sites with equal keys share latencies; errors depend on the values.
        case = _Case(site, product, epilogue, batch, tuple(sizes))
        times = known.setdefault(_key(product, epilogue), {})
        fewest = _fewest_rows(product, batch, sizes)
        tried = candidates(
            product, fast_accumulation=fast_accumulation, packages=packages, fewest_rows=fewest
        )
        strategies |= {(site, name): strategy for name, strategy in tried.items()}
        here: list[Measured] = []
        for name, strategy in tried.items():
            if not _has_faster_twin(strategy, here):
                here.append(_measure(replace(case, before=tuple(here)), name, strategy, times))
        measured += here
    progress("kernels", len(seen), len(seen))
    others = ScaledMatMul(fast_accumulation=fast_accumulation)
    return Chosen(tuple(measured), strategies, others)


def _has_faster_twin(strategy: ProductStrategy, before: Sequence[Measured]) -> bool:
    """Tell whether a tile is exact and the same tile with fast accumulation is allowed."""
    if not isinstance(strategy, TiledProduct) or not strategy.tile.is_exact:
        return False
    twin = _name(replace(strategy.tile, is_exact=False))
    return any(each.kernel == twin and not each.obstacle for each in before)


@dataclass(frozen=True, eq=False)
class _Case:
    """A product on real values, the served batch sizes, and the candidates measured before."""

    site: str
    product: FloatProduct
    epilogue: Epilogue
    batch: int
    sizes: tuple[int, ...]
    before: tuple[Measured, ...] = ()

    def is_behind(self, us: Mapping[int, float]) -> bool:
        """Tell whether an allowed candidate is faster at every size, and so in every sum."""
        able = [each for each in self.before if not each.obstacle]
        return any(all(us[size] > each.us[size] for size in self.sizes) for each in able)

    def at(self, size: int) -> tuple[FloatProduct, Epilogue]:
        """The same product at another batch size; rows are repeated or cut."""
        axis = _batch_axis(self.product.a, self.batch)
        if axis is None:
            return self.product, self.epilogue
        rows = self.product.a.shape[axis] * size // self.batch
        cross = tuple(_repeated(each, rows, axis) for each in self.epilogue.cross)
        if self.epilogue.is_first:
            cross = (cross[0], cross[0])
        factor = _repeated(self.product.a, rows, axis)
        return replace(self.product, a=factor), replace(self.epilogue, cross=cross)


def _repeated(tensor: Tensor, rows: int, axis: int = 0) -> Tensor:
    """Repeat a tensor to `rows` along an axis in its own layout, because a kernel that needs another one pays
    for a copy.
    """
    times = -(-rows // tensor.shape[axis])
    # PyTorch cannot repeat FP8 tensors.
    raw = tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor
    counts = [times if each == axis else 1 for each in range(raw.dim())]
    made = raw.repeat(*counts).narrow(axis, 0, rows)
    slowest_first = sorted(range(made.dim()), key=tensor.stride, reverse=True)
    back = sorted(range(made.dim()), key=slowest_first.__getitem__)
    return made.permute(slowest_first).contiguous().permute(back).view(tensor.dtype)


def _measure(
    case: _Case, name: str, strategy: ProductStrategy, known: dict[str, dict[int, float]]
) -> Measured:
    site = case.site
    if isinstance(strategy, PackageProduct) and (reason := strategy.why_not(case.product)):
        return Measured(site, name, {}, float("nan"), reason)
    try:
        error = _error(strategy, case)
        if not error <= LARGEST_ERROR:
            return Measured(
                site, name, {}, error, f"error {error:.2g}, at most {LARGEST_ERROR:.2g} is allowed"
            )
        if name not in known:
            alone = {size: _time_product(strategy, case.at(size)) for size in case.sizes}
            if case.is_behind(alone) and not isinstance(strategy, EpilogueStrategy):
                return Measured(site, name, {}, error, "slower than another even without what follows")
            known[name] = {size: us + _time_behind(strategy, case.at(size)) for size, us in alone.items()}
    except Exception as failure:
        # A tile may need too much shared memory; the compiler then raises errors of several types.
        return Measured(site, name, {}, float("nan"), f"{type(failure).__name__}: {str(failure)[:200]}")
    return Measured(site, name, known[name], error)


def _time_product(strategy: ProductStrategy, given: tuple[FloatProduct, Epilogue]) -> float:
    """Microseconds of a product, including the epilogue where the same kernel computes it."""
    product, epilogue = given
    products = with_weights_in_turn(product)
    turns, launches = cycle(products), calls_in_turn(_LAUNCHES, len(products))
    if isinstance(strategy, EpilogueStrategy):
        return time_in_graph(lambda: strategy.multiply_with(next(turns), epilogue).outputs, launches)
    return time_in_graph(lambda: strategy.multiply(next(turns)).values, launches)


def with_weights_in_turn(product: FloatProduct) -> list[FloatProduct]:
    """Return the product with copies of its weight that together exceed the GPU's cache.

    In an engine a large weight is read from memory in every request. Timed with one weight again and again, a
    tile was chosen over the library's kernel (9.0 and 9.9 µs, Wukong small in BF16 at 256 on an H100) in an
    engine of 251 µs; an engine with the library's kernel had taken 227 µs in an earlier run.
    """
    weight = product.b.t().contiguous()
    copies = copies_in_turn(weight.numel() * weight.element_size())
    # PyTorch cannot clone FP8 tensors.
    raw = weight.view(torch.uint8)
    return [product, *(replace(product, b=raw.clone().view(weight.dtype).t()) for _ in range(copies - 1))]


def _time_behind(strategy: ProductStrategy, given: tuple[FloatProduct, Epilogue]) -> float:
    """Microseconds of the epilogue of a library's product, which the compiler makes one kernel in the
    engine.
    """
    product, epilogue = given
    if isinstance(strategy, EpilogueStrategy) or not epilogue.follows:
        return 0.0
    value = strategy.multiply(product).values

    def follow(value: Tensor, cross: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return replace(epilogue, cross=cross).apply(value)

    torch._dynamo.reset()
    compiled = torch.compile(follow, dynamic=False)
    return time_in_graph(lambda: compiled(value, epilogue.cross))


def _error(strategy: ProductStrategy, case: _Case) -> float:
    """Error of the product alone, in the base precision, without its epilogue."""
    plain = Epilogue(bias=None, is_wide=True)
    product = replace(case.product, bias=None)
    done = (
        strategy.multiply_with(product, plain)
        if isinstance(strategy, EpilogueStrategy)
        else library_with(strategy, product, plain)
    )
    found = done.outputs[0].to(torch.float64)
    exact = torch.matmul(product.a.to(torch.float64) * product.scale_a, product.b.to(torch.float64))
    exact = exact * product.scale_b
    rounded = exact.to(product.dtype).to(torch.float64)
    # A product of zeros has norm 0; a kernel that returns zeros is exact then.
    norm = exact.norm().clamp(min=torch.finfo(torch.float64).tiny)
    # Subtract the energy of rounding the result to its type.
    total, own = (found - exact).norm() / norm, (rounded - exact).norm() / norm
    return float(torch.sqrt(torch.clamp(total * total - own * own, min=0.0)))


def time_in_graph(run: Callable[[], object], launches: int = _LAUNCHES) -> float:
    """Median time of one launch in a CUDA graph, microseconds."""
    for _ in range(2):
        run()
    torch.cuda.synchronize()
    stream: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(launches):
            run()
    graph.replay()
    taken: list[float] = []
    for _ in range(_REPLAYS):
        begin, end = _event(), _event()
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        taken.append(begin.elapsed_time(end) * 1e3 / launches)
    return statistics.median(taken)


def _event() -> Any:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
