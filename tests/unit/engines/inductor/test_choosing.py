"""Which of the kernels that were timed is compiled in."""

from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs torch: pip install 'loka-onnx[export]'")

import torch

from loka_onnx.engines.inductor import choosing
from loka_onnx.engines.inductor.choosing import (
    PROCESSORS,
    SPLIT_TILES,
    TILES,
    Chooser,
    Chosen,
    Measured,
    with_weights_in_turn,
)
from loka_onnx.engines.inductor.compile import compiled_sites
from loka_onnx.engines.inductor.lowering.strategies import (
    Epilogue,
    Factors,
    ProductStrategy,
    ScaledMatMul,
    Tile,
    TiledProduct,
)
from loka_onnx.engines.inductor.package import CompiledSite
from loka_onnx.engines.tuned_kernels import CACHE_BYTES

SMALL, LARGE = TiledProduct(TILES[-1]), TiledProduct(TILES[0])
FP8 = torch.float8_e4m3fn
CHOOSER = Chooser(8, (8,))


def chosen(*measured: Measured) -> Chosen:
    tried = {("fc", "small"): SMALL, ("fc", "large"): LARGE, ("other", "small"): SMALL}
    return Chosen(measured, tried, ScaledMatMul(fast_accumulation=True))


def choices(found: Chosen, *sizes: int) -> dict[str, object]:
    return dict(found.strategy(sizes).choices)


def test_the_fastest_allowed_kernel_at_the_sizes_of_a_program_is_taken() -> None:
    small, large = {256: 3.0, 2048: 20.0}, {256: 9.0, 2048: 12.0}
    found = chosen(Measured("fc", "small", small, 0.0), Measured("fc", "large", large, 0.0))
    assert choices(found, 256) == {"fc": SMALL}
    assert choices(found, 2048) == {"fc": LARGE}
    assert choices(found, 256, 2048) == {"fc": LARGE}
    found = chosen(
        Measured("fc", "small", {}, 0.5, "error 0.5, at most 0.002 is allowed"),
        Measured("fc", "large", {256: 9.0}, 0.0),
        Measured("other", "small", {}, float("nan"), "OutOfResources"),
    )
    # Where none may be taken, the library's exact product is: fast accumulation is one of the refused.
    assert choices(found, 256) == {"fc": LARGE, "other": ScaledMatMul()}


def product(dtype: torch.dtype) -> Factors:
    one = torch.ones(())
    a, b = torch.randn(8, 32).to(dtype), torch.randn(16, 32).to(dtype).t()
    wide = torch.bfloat16 if dtype is FP8 else dtype
    return Factors("fc", a, one, b, one, torch.randn(16).to(wide), wide)


def long_product(dtype: torch.dtype) -> Factors:
    given = product(dtype)
    return replace(given, a=given.a.repeat(1, 64), b=given.b.repeat(64, 1))


def tiles_of(candidates: dict[str, ProductStrategy]) -> list[Tile]:
    return [each.tile for each in candidates.values() if isinstance(each, TiledProduct)]


TIMES = {
    # The library's product alone is behind the fastest at each size, and first in sum.
    str(TILES[0]): {8: 3.0, 64: 20.0},
    str(TILES[1]): {8: 12.0, 64: 9.0},
    "library": {8: 4.0, 64: 10.0},
}


def timed(monkeypatch: pytest.MonkeyPatch, errors: dict[str, float] | None = None) -> dict[str, Any]:
    """Measurements of one BF16 product; only the clock is replaced, which needs a GPU."""

    def name_of(strategy: ProductStrategy) -> str:
        if isinstance(strategy, TiledProduct):
            return str(replace(strategy.tile, depth=strategy.tile.depth * 2))
        return "library"

    def time_product(case: Any) -> float:
        return TIMES.get(name_of(case.strategy), {8: 99.0, 64: 99.0})[case.product.a.shape[0]]

    measure, errors = choosing._error, errors or {}
    monkeypatch.setattr(choosing, "_time_product", time_product)
    monkeypatch.setattr(choosing, "_time_behind", lambda case: 0.5)
    monkeypatch.setattr(choosing, "_error", lambda s, given: errors.get(name_of(s), measure(s, given)))
    seen = {"fc": (product(torch.bfloat16), Epilogue(relu=True))}
    found = Chooser(8, (8, 64)).choose(seen)
    return {"chosen": found, **{each.kernel: each for each in found.measured}}


def test_a_library_is_out_only_where_one_allowed_tile_is_faster_at_every_size(monkeypatch) -> None:
    found = timed(monkeypatch)
    assert found["library"].obstacle == ""
    assert found["library"].us == {8: 4.5, 64: 10.5}
    assert choices(found["chosen"], 8, 64) == {"fc": ScaledMatMul()}
    monkeypatch.setitem(TIMES, "library", {8: 4.0, 64: 21.0})
    assert timed(monkeypatch)["library"].obstacle == "slower than another even without what follows"
    monkeypatch.setitem(TIMES, "library", {8: 13.0, 64: 21.0})
    assert timed(monkeypatch)["library"].obstacle
    found = timed(monkeypatch, dict.fromkeys(map(str, TILES), 0.5))
    assert choices(found["chosen"], 8) == {"fc": ScaledMatMul()}
    assert found["library"].us == {8: 13.5, 64: 21.5}


def test_candidates_for_long_and_wide_factors() -> None:
    narrow, half = (CHOOSER.candidates(product(dtype)) for dtype in (FP8, torch.bfloat16))
    assert {"cublas", "cublas-fast"} < set(narrow)
    depths = [tile.depth for tile in TILES]
    assert [tile.depth for tile in tiles_of(narrow)] == depths
    assert [tile.depth * 2 for tile in tiles_of(half)] == depths
    # Fast accumulation is about FP8.
    assert [name for name in half if not name.startswith("triton")] == ["library"]
    assert not any(name.endswith("-exact") for name in CHOOSER.candidates(product(FP8)))
    long = long_product(FP8)
    assert long.b.shape[0] >= choosing.LONG_K
    names = [name.removesuffix("-exact") for name in CHOOSER.candidates(long) if name.endswith("-exact")]
    assert names == [f"triton {tile}" for tile in (*TILES, *SPLIT_TILES)]
    given = product(torch.bfloat16)
    assert choosing._error(ScaledMatMul(), replace(given, a=torch.zeros_like(given.a))) == 0.0


def test_k_is_split_where_there_are_few_tiles() -> None:
    def splits(which: Factors, rows: int = 8) -> list[int]:
        found = tiles_of(Chooser(8, (rows, 10 * rows)).candidates(which))
        return [tile.split for tile in found if tile.split > 1]

    long = long_product(torch.bfloat16)
    assert splits(product(torch.bfloat16)) == []
    assert splits(long) == [2, 4, 4]
    assert long.b.shape[1] <= 64
    # 64 rows a tile: one processor is left without one, and none.
    assert splits(long, 64 * (PROCESSORS - 1)) == [2, 4, 4]
    assert splits(long, 64 * PROCESSORS) == []


def test_an_exact_tile_is_timed_where_its_fast_sums_are_too_far_off(monkeypatch: pytest.MonkeyPatch) -> None:
    refused = f"triton {TILES[0]}"

    def error(strategy: ProductStrategy, given: Factors) -> float:
        return 0.5 if isinstance(strategy, TiledProduct) and f"triton {strategy.tile}" == refused else 1e-6

    monkeypatch.setattr(choosing, "_time_product", lambda case: 1.0)
    monkeypatch.setattr(choosing, "_time_behind", lambda case: 0.5)
    monkeypatch.setattr(choosing, "_error", error)
    found = CHOOSER.choose({"fc": (long_product(FP8), Epilogue())})
    assert [each.kernel for each in found.measured if each.kernel.endswith("-exact")] == [f"{refused}-exact"]
    assert [each.kernel for each in found.measured if each.obstacle] == [refused]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [FP8, torch.bfloat16])
def test_large_weights_are_timed_as_they_come_from_memory(dtype: torch.dtype) -> None:
    one, large = torch.ones(()), torch.randn(1024, 4096).to(dtype).t()
    given = Factors("fc", torch.randn(8, 4096).to(dtype), one, large, one, None, torch.bfloat16)
    turns = with_weights_in_turn(given)
    weights = [each.b for each in turns]
    assert len({weight.data_ptr() for weight in weights}) == len(weights) == CACHE_BYTES // large.nbytes
    for weight in weights:
        # Its columns stay contiguous, which is how kernels take it.
        assert weight.stride() == large.stride() and weight.dtype is dtype
        assert torch.equal(weight.float(), large.float())
    small = product(dtype)
    assert with_weights_in_turn(small) == [small]


def test_a_site_is_fp8_where_every_program_multiplies_fp8() -> None:
    fp8 = CompiledSite("fc", "triton a", ("float8_e4m3fn",) * 2, engaged=True)
    other = replace(fp8, kernel="triton b")
    wide = CompiledSite("fc", "dequantized", ("bfloat16",) * 2, engaged=False, reason="K 13")
    (both,) = compiled_sites([{"fc": fp8}, {"fc": other}])
    assert (both.kernel, both.engaged) == ("triton a, triton b", True)
    (mixed,) = compiled_sites([{"fc": fp8}, {"fc": wide}])
    assert (mixed.engaged, mixed.reason, mixed.operands) == (False, "K 13", ("bfloat16",) * 2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, FP8])
@pytest.mark.parametrize("order", [(0, 1, 2), (0, 2, 1), (1, 0, 2), (2, 1, 0)])
def test_rows_are_repeated_in_the_layout_they_have(order: tuple[int, ...], dtype: torch.dtype) -> None:
    lengths = [5, 3, 4]
    laid = torch.arange(60.0).to(dtype).reshape([lengths[axis] for axis in order])
    given = laid.permute(sorted(range(3), key=order.__getitem__))
    assert list(given.shape) == lengths
    found = choosing._repeated(given, 12)
    wanted = torch.cat([given.float()] * 3)[:12]
    torch.testing.assert_close(found.float(), wanted, rtol=0, atol=0)
    by_stride = sorted(range(3), key=found.stride, reverse=True)
    assert by_stride == list(order)


@pytest.mark.parametrize(
    ("shape", "smallest"),
    [
        ((64, 32), (1, 32)),
        ((192, 32), (3, 32)),
        ((64, 5, 32), (1, 5, 32)),
        # The batch on a later axis, as where a model takes sequences step by step.
        ((5, 64, 32), (5, 1, 32)),
        ((1, 192, 32), (1, 3, 32)),
        # The same for every request.
        ((5, 32), (5, 32)),
        ((32,), (32,)),
    ],
)
def test_rows_follow_the_batch_where_they_do(shape: tuple[int, ...], smallest: tuple[int, ...]) -> None:
    given = replace(product(torch.bfloat16), a=torch.randn(shape).bfloat16())
    case = choosing._Case("", ScaledMatMul(), given, Epilogue())
    at_one = case.at(1, 64).product
    assert at_one.a.shape == smallest
    assert torch.equal(at_one.a, given.a[tuple(slice(length) for length in smallest)])
    assert case.at(64, 64).product.a.shape == shape


def test_sites_of_another_layout_are_timed_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    timed_rows: list[bool] = []
    append = timed_rows.append
    monkeypatch.setattr(choosing, "_time_product", lambda case: append(case.product.a.is_contiguous()) or 1.0)
    monkeypatch.setattr(choosing, "_error", lambda strategy, given: 0.0)
    given = product(torch.bfloat16)
    turned = replace(given, a=given.a.t().contiguous().t())
    CHOOSER.choose({"fc": (given, Epilogue()), "other": (turned, Epilogue())})
    assert timed_rows.count(True) == timed_rows.count(False) == len(CHOOSER.candidates(given))
