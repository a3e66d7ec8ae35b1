"""Our Triton kernels, compiled for the GPU of this host, against float64 on it; replayed from CUDA graphs.

Tolerances are in units of the base precision's eps. The kernels round an inner product to it, as the graph
does, where float64 may stand on the other side of a tie: several eps of a normalized value.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs torch: pip install 'loka-onnx[export]'")
pytest.importorskip("triton", reason="needs triton: pip install --group dev")

sys.path.append(str(Path(__file__).parents[1] / "unit" / "engines" / "inductor"))

from kernel_cases import ENDS, FP8, Draw, Product, heads_of_one_product, interaction, residual, tokens  # noqa: E402

from loka_onnx.engines.inductor.choosing import SPLIT_TILES, TILES  # noqa: E402
from loka_onnx.engines.inductor.kernels.triton_attention import short_attention  # noqa: E402
from loka_onnx.engines.inductor.kernels.triton_concats import concat_quantize, token_concat  # noqa: E402
from loka_onnx.engines.inductor.kernels.triton_norms import factorization_norm, token_residual_norm  # noqa: E402
from loka_onnx.engines.inductor.kernels.triton_product import product  # noqa: E402
from loka_onnx.engines.inductor.lowering.strategies import Tile  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("float8_gpu")]

BASES = [torch.bfloat16, torch.float16]
ALL_TILES = (*TILES, *SPLIT_TILES)
LIMIT = 448.0
HALF_STEP = 2.0**-4
"""Rounding to E4M3 moves a value by at most this much of it, and near zero by `LEAST_STEP` / 2."""
LEAST_STEP = 2.0**-9
SHAPES = [(27, 16, 5), (64, 128, 32), (128, 128, 64)]
"""Tokens, their length, and columns: what needs masks, and both Wukong stacks."""
DRAW = Draw(torch.bfloat16)


def bits(value: Any) -> Any:
    return value.view(torch.uint8).clone()


def eps(base: Any) -> float:
    return float(torch.finfo(base).eps)


def assert_close(found: Any, exact: Any, *, relative: float, absolute: float) -> None:
    torch.testing.assert_close(found.double(), exact, rtol=relative, atol=absolute)


def assert_quantized(found: Any, exact: Any, *, relative: float, absolute: float) -> None:
    """Every value is one of E4M3 that is no farther from the exact one than rounding explains."""
    assert found.dtype is FP8
    exact = exact.clamp(-LIMIT, LIMIT)
    assert_close(found.float(), exact, relative=HALF_STEP + relative, absolute=LEAST_STEP / 2 + absolute)
    # It spans the format: not all of it is saturated, or zero.
    assert found.float().abs().max() > LIMIT / 16
    assert (found.float().abs() < LIMIT).any()


@pytest.mark.parametrize("base", BASES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_an_interaction_with_its_norm(shape: tuple[int, int, int], base: Any) -> None:
    arguments, exact = interaction(Draw(base), shape)
    unit = eps(base)
    found = factorization_norm(*arguments, 1e-5, 0.0, None)
    assert found.dtype is base
    assert_close(found, exact, relative=2 * unit, absolute=8 * unit)
    narrow = factorization_norm(*arguments, 1e-5, 64.0, FP8)
    assert_quantized(narrow, exact * 64, relative=4 * unit, absolute=64 * 8 * unit)


@pytest.mark.parametrize("base", BASES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_residual_block_with_its_norm(shape: tuple[int, int, int], base: Any) -> None:
    arguments, exact = residual(Draw(base), shape)
    found = token_residual_norm(*arguments, 1e-5)
    assert found.dtype is base
    assert_close(found, exact, relative=4 * eps(base), absolute=8 * eps(base))


# Products ---------------------------------------------------------------------------------------------


def tiles(element_size: int) -> list[list[int]]:
    """All that builds choose among."""
    return [replace(tile, depth=tile.depth // element_size).numbers() for tile in ALL_TILES]


def scale_for(exact: Any) -> float:
    """One over a scale that maps the largest value to the upper half of the format, unsaturated."""
    return float(2.0 ** (8 - round(float(exact.abs().max())).bit_length()))


def check_product(case: Product, tile: Sequence[int]) -> None:
    exact, unit = case.exact, eps(case.base)
    inverse_scale = scale_for(exact)
    wide, narrow = case.run(product, tile, inverse_scale)
    assert wide.dtype is case.base
    # Tensor cores keep some 14 bits of an FP8 sum (`choosing`), and may lose one unit with each 32 of K.
    a, _, scale, *_ = case.arguments
    lost = 2.0**-13 * -(-a.shape[1] // 32) if scale is not None else 2.0**-10
    slack = lost * float(exact.abs().max())
    assert_close(wide, exact, relative=unit, absolute=slack)
    assert_quantized(narrow, exact * inverse_scale, relative=unit, absolute=slack * inverse_scale)


@pytest.mark.parametrize("float8", [True, False], ids=["fp8", "base"])
@pytest.mark.parametrize("base", BASES, ids=str)
@pytest.mark.parametrize("ends", ENDS)
def test_a_product_with_what_follows(ends: str, base: Any, float8: bool) -> None:
    case = Product.of(Draw(base), (513, 256, 1024), ends, float8=float8)
    check_product(case, tiles(1 if float8 else 2)[len(TILES) - 2])


@pytest.mark.parametrize("tile", [TILES[-2], SPLIT_TILES[1]], ids=str)
@pytest.mark.parametrize("float8", [True, False], ids=["fp8", "base"])
@pytest.mark.parametrize("shape", [(21, 48, 80), (3, 32, 48), (1, 16, 16), (2048, 1024, 512)], ids=str)
def test_shapes_of_products(shape: tuple[int, int, int], float8: bool, tile: Tile) -> None:
    """Less than one tile, with K that no step divides, or has fewer steps than parts; sizes that Triton takes
    for constants; and many.
    """
    case = Product.of(DRAW, shape, "bias, cross", float8=float8)
    check_product(case, tiles(1 if float8 else 2)[ALL_TILES.index(tile)])


@pytest.mark.parametrize("tile", [TILES[-2], SPLIT_TILES[1]], ids=str)
@pytest.mark.parametrize("shape", [(21, 40, 88), (2048, 200, 184), (257, 24, 1032)], ids=str)
def test_products_that_are_not_quantized_take_multiples_of_8(shape: tuple[int, int, int], tile: Tile) -> None:
    case = Product.of(DRAW, shape, "bias, relu", float8=False)
    wide, exact = case.run(product, tiles(2)[ALL_TILES.index(tile)])[0], case.exact
    assert_close(wide, exact, relative=eps(case.base), absolute=2.0**-10 * float(exact.abs().max()))


@pytest.mark.parametrize("float8", [True, False], ids=["fp8", "base"])
@pytest.mark.parametrize("number", range(len(ALL_TILES)))
def test_every_tile(number: int, float8: bool) -> None:
    from triton.runtime.errors import OutOfResources

    case = Product.of(DRAW, (300, 272, 416), "bias, relu", float8=float8)
    try:
        check_product(case, tiles(1 if float8 else 2)[number])
    except OutOfResources as error:
        pytest.skip(f"needs a GPU with more shared memory: {error}")


@pytest.mark.parametrize("float8", [True, False], ids=["fp8", "base"])
def test_a_product_with_one_of_its_outputs(float8: bool) -> None:
    case = Product.of(DRAW, (513, 256, 1024), "bias, relu", float8=float8)
    tile, inverse_scale = tiles(1 if float8 else 2)[len(TILES) - 2], scale_for(case.exact)
    wide, narrow = case.run(product, tile, inverse_scale)
    (alone,) = case.run(product, tile)
    assert torch.equal(alone, wide)
    (alone,) = case.run(product, tile, inverse_scale, wide=False)
    assert torch.equal(bits(alone), bits(narrow))


@pytest.mark.parametrize("number", range(len(ALL_TILES)))
def test_exact_tiles_lose_no_more_than_one_step(number: int) -> None:
    from triton.runtime.errors import OutOfResources

    # Positive factors: what every addition loses is of one sign, and adds up.
    case = Product.of(Draw(torch.float32), (300, 272, 3456), "plain")
    a, b, scale, *rest = case.arguments
    a, b = (factor.float().abs().to(FP8) for factor in (a, b))
    case, exact = replace(case, arguments=(a, b, scale, *rest)), a.double() @ b.double().t() * scale.double()
    try:
        (fast,), (slow,) = (
            case.run(product, replace(ALL_TILES[number], is_exact=is_exact).numbers())
            for is_exact in (False, True)
        )
    except OutOfResources as error:
        pytest.skip(f"needs a GPU with more shared memory: {error}")
    lost = [float((each.double() - exact).norm() / exact.norm()) for each in (fast, slow)]
    # Tensor cores add 32 products at a time to what a step has so far, and keep 14 bits of it (DeepSeek-V3,
    # arXiv 2412.19437, section 3.3.2); an H100 lost .0006 in steps of 128 and .0019 in steps of 256.
    assert lost[1] < ALL_TILES[number].depth / 32 * 2.0**-12
    assert lost[0] > 2 * lost[1]


def test_nan_stays_and_infinity_saturates() -> None:
    case = Product.of(DRAW, (21, 48, 80), "bias, relu")
    a, _, _, bias, *_ = case.arguments
    a.view(torch.uint8)[3, 5] = 0x7F
    bias[7] = float("inf")
    wide, narrow = case.run(product, tiles(1)[len(TILES) - 2], 1.0)
    for each in (wide.float(), narrow.float()):
        assert each[3].isnan().all()
        assert not each[:3].isnan().any()
    assert (narrow.float()[:3, 7] == LIMIT).all()


# Concatenation ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("base", BASES, ids=str)
@pytest.mark.parametrize("rows", [1, 37])
@pytest.mark.parametrize("widths", [(128, 72), (200, 56)], ids=str)
def test_a_concatenation_with_its_q(widths: tuple[int, int], rows: int, base: Any) -> None:
    """With a first part that tiles divide, and one that they do not."""
    a, b = Draw(torch.float32)(rows, widths[0]), Draw(base)(rows, widths[1])
    wide, narrow = concat_quantize(a, b, None, 0, 64.0, base, True, FP8)
    assert torch.equal(wide, torch.cat([a.to(base), b], dim=1))
    assert_quantized(narrow, wide.double() * 64, relative=0.0, absolute=0.0)
    (alone,) = concat_quantize(a, b, None, 0, 64.0, base, False, FP8)
    assert torch.equal(bits(alone), bits(narrow))


@pytest.mark.parametrize("base", BASES, ids=str)
@pytest.mark.parametrize("d", [32, 128])
@pytest.mark.parametrize("table", [0, 1])
def test_a_concatenation_looks_rows_of_a_table_up(table: int, d: int, base: Any) -> None:
    """Ids count from its end, too; one of no row makes NaN in its row alone."""
    rows, beside = Draw(base)(11, d), Draw(torch.float32)(37, 64)
    ids = torch.randint(-11, 11, (37, 3), device=rows.device)
    given, parts = [beside, rows], [beside.to(base), rows[ids].flatten(1)]
    order = slice(None, None, -1 if table == 0 else 1)
    wide, narrow = concat_quantize(*given[order], ids, table, 64.0, base, True, FP8)
    assert torch.equal(wide, torch.cat(parts[order], dim=1))
    assert_quantized(narrow, wide.double() * 64, relative=0.0, absolute=0.0)
    ids[3, 1] = 11
    wide, _ = concat_quantize(*given[order], ids, table, 64.0, base, True, FP8)
    assert wide.isnan().any(1).nonzero().flatten().tolist() == [3]


# Mixes of tokens --------------------------------------------------------------------------------------


@pytest.mark.parametrize("base", BASES, ids=str)
@pytest.mark.parametrize("mix_first", [True, False])
@pytest.mark.parametrize("sizes", [(11, 26, 1, 128), (27, 5, 3, 24), (128, 64, 64, 128)], ids=str)
def test_a_mix_of_tokens_beside_others(sizes: tuple[int, int, int, int], mix_first: bool, base: Any) -> None:
    """MovieLens' tokens made those of a DLRM-DCNv2; what needs masks; those of a Wukong stack."""
    _, m, others, _ = sizes
    (x, w, f), exact = tokens(Draw(base), sizes, mix_first, 37)
    wide, narrow = token_concat(x, w, f, 64.0, base, mix_first, True, FP8)
    assert_close(wide, exact, relative=eps(base), absolute=eps(base))
    assert_quantized(narrow, wide.double() * 64, relative=0.0, absolute=0.0)
    (alone,) = token_concat(x, w, None, 64.0, base, mix_first, False, FP8)
    assert torch.equal(bits(alone), bits(narrow[:, :m] if mix_first else narrow[:, others:]))


# CUDA graphs ------------------------------------------------------------------------------------------


def replayed(name: str) -> tuple[Any, Callable[[], Any]]:
    """A tensor that a launch reads, and the launch."""
    if name == "interaction":
        case, _ = interaction(DRAW, (64, 128, 32))
        return case[0], lambda: factorization_norm(*case, 1e-5, 64.0, FP8)
    if name == "residual":
        block, _ = residual(DRAW, (64, 128, 32))
        return block[0], lambda: token_residual_norm(*block, 1e-5)
    if name == "mixed tokens":
        mix, _ = tokens(DRAW, (11, 26, 0, 128), True, 64)
        return mix[0], lambda: token_concat(*mix, 64.0, torch.bfloat16, True, False, FP8)[0]
    q, kt, v = heads_of_one_product(DRAW, (8, 104, 104, 16), 9)
    return q, lambda: short_attention(q, kt, v, None, 0.25, False)


def replayed_product(name: str) -> tuple[Any, Callable[[], Any]]:
    shape = (21, 256, 1152) if name == "split" else (513, 256, 1024)
    base, float8 = (torch.float16, False) if name == "half" else (torch.bfloat16, True)
    case = Product.of(Draw(base), shape, "bias, cross", float8=float8)
    tile = SPLIT_TILES[1].numbers() if name == "split" else tiles(1 if float8 else 2)[len(TILES) - 2]
    return case.arguments[4], lambda: case.run(product, tile, 4.0)[-1]


LAUNCHES = [("interaction", replayed), ("residual", replayed), ("mixed tokens", replayed)]
LAUNCHES += [("attention", replayed), *((name, replayed_product) for name in ("float8", "split", "half"))]


@pytest.mark.parametrize(("name", "make"), LAUNCHES, ids=[name for name, _ in LAUNCHES])
def test_a_replay_computes_what_a_launch_does(name: str, make: Callable[[str], Any]) -> None:
    read, launch = make(name)
    first = bits(launch())
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        launch()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = launch()
    graph.replay()
    assert torch.equal(bits(output), first)
    # Other values at the same address.
    read.copy_(torch.randn_like(read.float()).to(read.dtype))
    graph.replay()
    second = bits(output)
    assert not torch.equal(second, first)
    assert torch.equal(bits(launch()), second)
