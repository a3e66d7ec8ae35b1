"""Which of the kernels that were timed is compiled in."""

from __future__ import annotations

import pytest

pytest.importorskip("torch", reason="needs torch: pip install 'loka-onnx[export]'")

import torch

from loka_onnx.engines.inductor.choosing import TILES, Chosen, Measured, candidates
from loka_onnx.engines.inductor.compile import compiled_sites
from loka_onnx.engines.inductor.kernels.products import TiledProduct
from loka_onnx.engines.inductor.lowering.strategies import (
    FloatProduct,
    LoweredSite,
    PerSite,
    ScaledMatMul,
    multiply_floats,
)

SMALL, LARGE = TiledProduct(TILES[-1]), TiledProduct(TILES[0])
FP8 = torch.float8_e4m3fn


def chosen(*measured: Measured) -> Chosen:
    tried = {("fc", "small"): SMALL, ("fc", "large"): LARGE, ("other", "small"): SMALL}
    return Chosen(measured, tried, ScaledMatMul())


def choices(found: Chosen, *sizes: int) -> dict[str, object]:
    products = found.products(sizes)
    assert isinstance(products, PerSite)
    return dict(products.choices)


def test_a_program_gets_the_kernel_that_is_fastest_at_the_sizes_it_takes() -> None:
    found = chosen(
        Measured("fc", "small", {256: 3.0, 2048: 20.0}, 0.0),
        Measured("fc", "large", {256: 9.0, 2048: 12.0}, 0.0),
    )
    assert choices(found, 256) == {"fc": SMALL}
    assert choices(found, 2048) == {"fc": LARGE}
    assert choices(found, 256, 2048) == {"fc": LARGE}


def test_a_kernel_that_is_too_inexact_or_failed_is_never_taken() -> None:
    found = chosen(
        Measured("fc", "small", {}, 0.5, "error 0.5, at most 0.002 is allowed"),
        Measured("fc", "large", {256: 9.0}, 0.0),
        Measured("other", "small", {}, float("nan"), "OutOfResources"),
    )
    assert choices(found, 256) == {"fc": LARGE}


def product(dtype: torch.dtype) -> FloatProduct:
    one = torch.ones(())
    a, b = torch.randn(8, 32).to(dtype), torch.randn(16, 32).to(dtype).t()
    wide = torch.bfloat16 if dtype is FP8 else dtype
    return FloatProduct("fc", a, one, b, one, torch.randn(16).to(wide), wide)


def test_tiles_of_wider_factors_are_as_many_bytes_deep() -> None:
    narrow, half = candidates(product(FP8)), candidates(product(torch.bfloat16))
    assert {"cublas", "cublas-fast"} < set(narrow)
    assert [each.tile.depth for each in narrow.values() if isinstance(each, TiledProduct)] == [
        tile.depth for tile in TILES
    ]
    assert [each.tile.depth * 2 for each in half.values() if isinstance(each, TiledProduct)] == [
        tile.depth for tile in TILES
    ]
    # Fast accumulation is about FP8.
    assert [name for name in half if not name.startswith("triton")] == ["library"]


def test_exact_sums_are_left_to_the_library() -> None:
    assert list(candidates(product(FP8), fast_accumulation=False)) == ["cublas"]


def test_factors_that_are_not_quantized_are_multiplied_as_they_are() -> None:
    given = product(torch.bfloat16)
    done = ScaledMatMul().multiply(given)
    assert (done.kernel, done.operands, done.engaged) == ("dense", ("bfloat16", "bfloat16"), False)
    exact = given.a.double() @ given.b.double() + given.bias.double()  # type: ignore[union-attr]
    torch.testing.assert_close(multiply_floats(given).values.double(), exact, rtol=2.0**-7, atol=0.05)


def test_a_site_is_fp8_where_every_program_multiplies_fp8() -> None:
    fp8 = LoweredSite("fc", "Gemm", "triton a", ("float8_e4m3fn",) * 2, engaged=True)
    other = LoweredSite("fc", "Gemm", "triton b", ("float8_e4m3fn",) * 2, engaged=True)
    wide = LoweredSite("fc", "Gemm", "dequantized", ("bfloat16",) * 2, engaged=False, reason="K 13")
    (both,) = compiled_sites([{"fc": fp8}, {"fc": other}])
    assert (both.kernel, both.engaged) == ("triton a, triton b", True)
    (mixed,) = compiled_sites([{"fc": fp8}, {"fc": wide}])
    assert (mixed.engaged, mixed.reason) == (False, "K 13")
