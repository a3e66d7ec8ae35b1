"""Kernels as Triton compiles them for Hopper, which takes no GPU."""

import re
from dataclasses import replace
from typing import Any

import pytest

triton = pytest.importorskip("triton", reason="needs triton: pip install --group dev")
pytest.importorskip("torch", reason="needs torch")

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from loka_onnx.engines.inductor.choosing import SPLIT_TILES, TILES  # noqa: E402
from loka_onnx.engines.inductor.kernels import triton_attention, triton_concats, triton_product  # noqa: E402
from loka_onnx.engines.inductor.lowering.strategies import Tile  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")]

HOPPER = GPUTarget("cuda", 90, 32)
SHARED_BYTES = 227 << 10
"""What a program may have (CUDA C++ Programming Guide, compute capabilities)."""
KINDS = dict.fromkeys(("a_ptr", "b_ptr", "narrow_ptr"), "*fp8e4nv")
KINDS |= {"scale_ptr": "*fp32", "parts_ptr": "*fp32", "inverse_scale": "fp32"}
INTEGERS = dict.fromkeys(("a_ptr", "b_ptr", "narrow_ptr"), "*i8") | {"parts_ptr": "*i32"}
AMPERE = GPUTarget("cuda", 80, 32)
AMPERE_SHARED_BYTES = 163 << 10
FOLLOWS = dict.fromkeys(("SCALED", "BIAS", "RELU", "FIRST", "WIDE", "NARROW"), True) | {"CROSS": False}


def compiled(kernel: Any, constants: dict[str, Any], **options: Any) -> Any:
    """A kernel of FP8 factors, where the option `kinds` does not say otherwise, and a BF16 result."""
    kinds, names = KINDS | options.pop("kinds", {}), kernel.arg_names
    target = options.pop("target", HOPPER)
    signature = {name: kinds.get(name, "*bf16" if name.endswith("_ptr") else "i32") for name in names}
    signature |= dict.fromkeys(constants, "constexpr")
    values = {(names.index(name),): value for name, value in constants.items()}
    aligned = {(at,): [["tt.divisibility", 16]] for at, name in enumerate(names) if name.endswith("_ptr")}
    return triton.compile(ASTSource(kernel, signature, values, aligned), target=target, options=options)


def product(tile: Tile, *, unit: int = 16, is_whole: bool = True, **how: Any) -> Any:
    sizes = {"UNIT": unit, "BM": tile.rows, "BN": tile.columns, "BK": tile.depth, "SPLIT": tile.split}
    exact = {"IMPRECISE": tile.depth if tile.is_exact else None}
    constants: dict[str, Any] = (
        FOLLOWS | sizes | exact | {"GROUP_M": triton_product.GROUP, "WHOLE_K": is_whole}
    )
    options = {"num_stages": tile.stages, "num_warps": tile.warps} | how
    return compiled(triton_product._loka_product_kernel, constants, **options)


@pytest.mark.parametrize("tile", (*TILES, *SPLIT_TILES), ids=str)
def test_a_tile_multiplies_fp8_on_tensor_cores(tile: Tile) -> None:
    made = product(tile)
    assert "wgmma.mma_async.sync.aligned" in made.asm["ptx"]
    assert "e4m3.e4m3" in made.asm["ptx"]
    assert made.metadata.shared <= SHARED_BYTES


@pytest.mark.parametrize("tile", (TILES[0], TILES[-2], SPLIT_TILES[1]), ids=str)
def test_a_tile_multiplies_int8_on_tensor_cores(tile: Tile) -> None:
    made = product(tile, kinds=INTEGERS)
    assert re.search(r"wgmma\.mma_async\.sync\.aligned\.m64n\d+k32\.s32\.s8\.s8", made.asm["ptx"])
    assert made.metadata.shared <= SHARED_BYTES
    on_ampere = product(tile, kinds=INTEGERS, target=AMPERE)
    assert re.search(r"mma\.sync\.aligned\.m16n8k32\.row\.col\S*\.s32\.s8\.s8\.s32", on_ampere.asm["ptx"])
    assert on_ampere.metadata.shared <= AMPERE_SHARED_BYTES


@pytest.mark.parametrize("is_whole", [True, False])
def test_factors_in_bf16_are_read_in_pieces_of_16_bytes(is_whole: bool) -> None:
    """K and N are multiples of 8 then; a mask for the end of K must not break the pieces up."""
    kinds = dict.fromkeys(("a_ptr", "b_ptr"), "*bf16")
    made = product(TILES[0], unit=8, is_whole=is_whole, kinds=kinds)
    assert "bf16.bf16" in made.asm["ptx"]
    assert {*re.findall(r"cp\.async\.\S+ \[.*?\], \[.*?\], (0x\w+)", made.asm["ptx"])} == {"0x10"}


@pytest.mark.parametrize("tile", (TILES[0], SPLIT_TILES[1]), ids=str)
def test_exact_tiles_add_in_fp32_once_a_step(tile: Tile) -> None:
    """What follows a sum adds as well: with a bias, a number of the result at least."""
    fast, exact = (product(each).asm["ptx"].count("add.f32") for each in (tile, replace(tile, is_exact=True)))
    numbers = tile.rows * tile.columns // (32 * tile.warps)
    assert exact - fast == numbers


@pytest.mark.parametrize("kinds", [{}, INTEGERS], ids=["fp8", "int8"])
def test_parts_are_added_up(kinds: dict[str, str]) -> None:
    constants = FOLLOWS | {
        "UNIT": 16,
        "BM": triton_product.SUM_ROWS,
        "BN": triton_product.SUM_COLUMNS,
        "SPLIT": 4,
    }
    made = compiled(triton_product._add_up_kernel, constants, kinds=kinds, num_warps=4)
    # Four numbers of a part at once.
    assert made.asm["ptx"].count("ld.global.v4") >= 4


@pytest.mark.parametrize("mix_first", [True, False])
@pytest.mark.parametrize("others", [0, 1])
def test_a_mix_of_tokens_is_read_along_its_rows(others: int, mix_first: bool) -> None:
    """MovieLens' eleven tokens, in FP32, to those of a DLRM-DCNv2."""
    constants = {"N": 11, "M": 26, "NF": others, "D": 128, "N2": 16, "M2": 32, "NF2": 1, "D2": 128}
    switches = {"MIX_FIRST": mix_first, "BF16": True, "WIDE": True, "NARROW": True}
    kernel = triton_concats._loka_token_concat_kernel
    made = compiled(kernel, constants | switches, kinds={"x_ptr": "*fp32"}, num_warps=4)
    # Four numbers of FP32 at once, and products on tensor cores.
    assert made.asm["ptx"].count("ld.global.v4") >= 4
    assert "mma" in made.asm["ptx"]


@pytest.mark.parametrize(("da", "db", "columns"), [(0, 128, 128), (64, 0, 64), (0, 32, 32), (0, 0, 128)])
def test_rows_of_a_table_are_read_in_wide_pieces(da: int, db: int, columns: int) -> None:
    """As the columns of a matrix are: 16 bytes at once; only ids are numbers on their own."""
    half = triton_concats.ROWS * triton_concats.COLUMNS // 2
    constants = {"WA": 3 * da or 128, "WB": 26 * db or 128, "DA": da, "DB": db, "BF16": True, "WIDE": True}
    constants |= {"BM": half // columns, "BN": columns}
    kinds = {"ids_ptr": "*i64", "a_ptr": "*bf16", "b_ptr": "*bf16"}
    made = compiled(triton_concats._loka_concat_quantize_kernel, constants, kinds=kinds, num_warps=4)
    assert made.asm["ptx"].count("ld.global.v4") >= 2
    assert made.asm["ptx"].count("st.global.v4") >= 1


def short_attention(queries: int, keys: int, width: int, heads: int = 8, **mask: Any) -> Any:
    """Of views of one product, with heads of a token beside each other."""
    shape, row = triton_attention.Tile.of(queries, keys, width), 3 * heads * width
    constants: dict[str, Any] = {}
    for name, axes in (("Q", "BHQD"), ("K", "BHDK"), ("V", "BHKD")):
        strides = {"B": 128 * row, "H": width, "D": 1}
        constants |= {f"{name}{axis}": strides.get(axis, row) for axis in axes}
    constants |= {"MB": 0, "MH": 0, "MQ": 0, "MK": 1, "ADDED": False, "KEEP": False, "DROP": False} | mask
    constants |= {"HEADS": heads, "QUERIES": queries, "KEYS": keys, "D": width}
    constants |= {"Q2": shape.queries, "K2": shape.keys, "D2": shape.width}
    kernel = triton_attention._loka_short_attention_kernel
    return compiled(kernel, constants, kinds={"scale": "fp64"}, num_warps=shape.warps)


@pytest.mark.parametrize(
    ("sizes", "product", "warps"),
    [
        ((104, 104, 16), "wgmma.mma_async", 4),
        ((2, 100, 16), "mma.sync.aligned.m16n8k16", 1),
        ((256, 128, 128), "wgmma.mma_async", 4),
        ((50, 50, 128), "wgmma.mma_async", 4),
        ((256, 256, 64), "mma.sync.aligned.m16n8k16", 4),
        ((2, 256, 64), "mma.sync.aligned.m16n8k16", 4),
    ],
)
def test_short_attention_is_computed_on_tensor_cores(sizes, product, warps) -> None:
    """InterFormer's sequence, and its pooling; the largest tiles of `is_short`."""
    made = short_attention(*sizes)
    ptx = made.asm["ptx"]
    assert product in ptx
    assert made.metadata.num_warps == warps
    # Two programs fit a multiprocessor; eight numbers are read at once from views.
    assert 2 * made.metadata.shared <= SHARED_BYTES
    assert len(re.findall(r"ld\.global\S*\.v4\.b32", ptx)) >= 3
    assert "ld.global.b16" not in ptx


@pytest.mark.parametrize("mask", [{"ADDED": True}, {"ADDED": True, "MQ": 104}], ids=str)
def test_a_mask_of_keys_is_read_once(mask: dict[str, Any]) -> None:
    loads = [len(re.findall("ld.global", short_attention(104, 104, 16, **m).asm["ptx"])) for m in ({}, mask)]
    assert 0 < loads[1] - loads[0] <= (64 if "MQ" in mask else 2)
