"""Which kernel computes each product: measured on the device, on what the site really reads.

For each product of the fused graph the candidates are the library (for FP8 cuBLASLt with exact and with fast
accumulation) and, for FP8, other packages that are installed (`kernels.packages`), what follows them fused by
the compiler, and the Triton kernel in several tiles (for FP8 again with exact and with fast accumulation),
with what follows inside. Each is timed in a CUDA graph at every batch size that will be served, and the
fastest in sum over the sizes that a program takes is compiled into it, if its arithmetic adds little to what
quantization costs: Hopper's tensor cores keep about 14 bits of an FP8 sum (DeepSeek-V3, arXiv 2412.19437,
section 3.3.2), and a plan was judged by a simulation that keeps 24.
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
"""Tiles that were fastest at one shape or another on an H100 (`benchmarks`), by bytes of FP8: of wider
factors a step takes as many bytes, and half the depth."""
SPLIT_TILES = (
    Tile(64, 64, 128, 4, 4, split=2),
    Tile(64, 64, 128, 4, 4, split=4),
    Tile(64, 128, 128, 4, 4, split=4),
)
"""Tiles whose K is shared out, tried where there are fewer of them than `PROCESSORS`."""
PROCESSORS = 132
"""Of an H100: fewer programs leave some of them idle."""
LONG_K = 1024
"""From here on K is worth splitting, and fast accumulation may lose more than is allowed: it made .00044 at
K = 512 and .0047 to .0068 at K = 3456 (DLRM-DCNv2 trained on MovieLens 1M, H100), so that exact tiles are
tried as well."""
LARGEST_ERROR = 2.0**-9
"""Root mean square error of a kernel over that of the exact product of the same values. Rounding the two
factors to E4M3 makes about 2⁻⁵ of it: what is allowed here adds less than a hundredth of that energy."""
_LAUNCHES = 10
_REPLAYS = 15


@dataclass(frozen=True)
class Measured:
    """One candidate at one site.

    Attributes:
        site: The site.
        kernel: The candidate.
        us: Median time by batch size, microseconds.
        error: Root mean square error relative to the exact product of the same values.
        obstacle: Why it was not measured or may not be chosen; empty where it may.
    """

    site: str
    kernel: str
    us: Mapping[int, float]
    error: float
    obstacle: str = ""


@dataclass(frozen=True)
class Chosen:
    """Choice that the measurements lead to.

    Attributes:
        measured: Every candidate of every site.
        tried: By site and name, what the candidates are.
        otherwise: What computes every other product.
    """

    measured: tuple[Measured, ...]
    tried: Mapping[tuple[str, str], ProductStrategy]
    otherwise: ProductStrategy

    def products(self, sizes: Sequence[int]) -> ProductStrategy:
        """For each site the candidate that is fastest in sum over batch sizes, of those that may be chosen.

        Where none may, the library's exact product: fast accumulation was refused there like the others.
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
    """Computes products by the library, and keeps what each was given.

    Attributes:
        library: What computes them.
        seen: By site, the first product and what followed it.
    """

    library: ProductStrategy
    seen: dict[str, tuple[FloatProduct, Epilogue]] = field(default_factory=dict)

    def multiply(self, product: FloatProduct) -> Multiplied:
        """A product that no fusion took: nothing to choose."""
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
    """By name, what may compute a product.

    Args:
        product: The product.
        fast_accumulation: Whether sums of FP8 products may be kept in fewer bits than FP32.
        packages: Other packages that are installed.
        fewest_rows: Of the smallest request that is served; those of the product where None.
    """
    exact = ScaledMatMul()
    tiles = (*TILES, *_split_tiles(product, fewest_rows))
    # What a tile takes decides whether a library's product is worth more timing: tiles come first.
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
    """Compile every tile of every product, side by side: timing them one by one would wait for the compiler.

    What cannot be compiled says so when it is measured.

    Args:
        seen: By site, a product with what follows it, on a GPU.
        batch: As of `choose_kernels`.
        sizes: Likewise.
        fast_accumulation: As of `candidates`.
    """
    different = {_key(product, epilogue): (product, epilogue) for product, epilogue in seen.values()}

    def run(strategy: TiledProduct, product: FloatProduct, epilogue: Epilogue) -> None:
        # Neither the device nor the mode of this thread is that of another.
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
    """Rows of a product in the smallest request that is served."""
    rows = product.a.numel() // product.a.shape[-1]
    return rows if _batch_axis(product.a, batch) is None else rows * min(sizes) // batch


def _batch_axis(tensor: Tensor, batch: int) -> int | None:
    """The first axis that grows with the batch; None of a factor that is the same for every request."""
    return next((axis for axis, length in enumerate(tensor.shape[:-1]) if length % batch == 0), None)


def _key(product: FloatProduct, epilogue: Epilogue) -> tuple[object, ...]:
    """Alike for products that take equally long."""
    shapes = (*product.a.shape, *product.b.shape, product.scale_b.dim())
    # Tiles read rows: where these are not contiguous, a copy is timed with them.
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
        seen: By site, a product on real values with what follows it, on a GPU.
        batch: Rows of the request that these were read from.
        sizes: Batch sizes that will be served.
        progress: Called after each site.
        fast_accumulation: Whether cuBLASLt may keep its sums in fewer bits.
        packages: As of `candidates`.
    """
    strategies: dict[tuple[str, str], ProductStrategy] = {}
    measured: list[Measured] = []
    known: dict[tuple[object, ...], dict[str, dict[int, float]]] = {}
    for number, (site, (product, epilogue)) in enumerate(seen.items()):
        progress("kernels", number, len(seen))
        # Sites of one shape and one epilogue take equally long; how exact they are is up to their values.
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
    """Whether a tile is exact, and fast accumulation in the same tile may be chosen."""
    if not isinstance(strategy, TiledProduct) or not strategy.tile.is_exact:
        return False
    twin = _name(replace(strategy.tile, is_exact=False))
    return any(each.kernel == twin and not each.obstacle for each in before)


@dataclass(frozen=True, eq=False)
class _Case:
    """A product on real values, the batch sizes that it will see, and the candidates measured before."""

    site: str
    product: FloatProduct
    epilogue: Epilogue
    batch: int
    sizes: tuple[int, ...]
    before: tuple[Measured, ...] = ()

    def is_behind(self, us: Mapping[int, float]) -> bool:
        """Whether one candidate that may be chosen here is faster at every size, and so in every sum."""
        able = [each for each in self.before if not each.obstacle]
        return any(all(us[size] > each.us[size] for size in self.sizes) for each in able)

    def at(self, size: int) -> tuple[FloatProduct, Epilogue]:
        """The same with as many rows as a batch of that size has, the real ones over and over."""
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
    """So many rows along an axis, laid out as the tensor is: a kernel that wants another layout pays for the
    copy.
    """
    times = -(-rows // tensor.shape[axis])
    # FP8 tensors cannot be repeated as such.
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
        # A tile may need more shared memory than there is, and the compiler raises what it likes then.
        return Measured(site, name, {}, float("nan"), f"{type(failure).__name__}: {str(failure)[:200]}")
    return Measured(site, name, known[name], error)


def _time_product(strategy: ProductStrategy, given: tuple[FloatProduct, Epilogue]) -> float:
    """Microseconds of a product, with what follows it where the same kernel computes that."""
    product, epilogue = given
    products = with_weights_in_turn(product)
    turns, launches = cycle(products), calls_in_turn(_LAUNCHES, len(products))
    if isinstance(strategy, EpilogueStrategy):
        return time_in_graph(lambda: strategy.multiply_with(next(turns), epilogue).outputs, launches)
    return time_in_graph(lambda: strategy.multiply(next(turns)).values, launches)


def with_weights_in_turn(product: FloatProduct) -> list[FloatProduct]:
    """The same product with copies of its weight, that together do not fit into a GPU's cache.

    In an engine a large weight comes from memory in every request, while what it multiplies was written just
    before. Timed with one weight again and again, a tile was chosen over a library's kernel (9.0 and 9.9 µs,
    Wukong small in BF16 at 256 on an H100) in an engine that took 251 µs; one with the library's had taken
    227 in an earlier run.
    """
    weight = product.b.t().contiguous()
    copies = copies_in_turn(weight.numel() * weight.element_size())
    # FP8 tensors are copied as bytes.
    raw = weight.view(torch.uint8)
    return [product, *(replace(product, b=raw.clone().view(weight.dtype).t()) for _ in range(copies - 1))]


def _time_behind(strategy: ProductStrategy, given: tuple[FloatProduct, Epilogue]) -> float:
    """Microseconds of what follows a library's product, which is one kernel of the compiler in the engine."""
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
    """Of the product itself, wide, without what follows."""
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
    # Of a product that is all zeros on these rows, a kernel that gives zeros is exact.
    norm = exact.norm().clamp(min=torch.finfo(torch.float64).tiny)
    # What rounding the result to its type makes is not the kernel's.
    total, own = (found - exact).norm() / norm, (rounded - exact).norm() / norm
    return float(torch.sqrt(torch.clamp(total * total - own * own, min=0.0)))


def time_in_graph(run: Callable[[], object], launches: int = _LAUNCHES) -> float:
    """Median time of a launch among many in a CUDA graph, microseconds.

    Args:
        run: Launches it.
        launches: How many times in one graph.
    """
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
