"""Products with their epilogue: bias, ReLU, a cross layer's sum, the next Q.

With A (M, K) and B (N, K) in E4M3FN or INT8 and a scale for each output column, or in BF16 or FP16 without
one, summed in FP32, INT8 in INT32::

    Z    =   relu?(A · Bᵀ · scale + bias)     negative values become 0, or a factor times the value
    Z    =   x0 ⊙ Z + x                      of a cross layer (arXiv 2008.13535, equation 1)
    out  =   Z in the base precision, Z / s in E4M3FN or INT8, or both

cuBLASLt writes Z in the base precision and another kernel reads it to quantize; here Z stays in registers.
Tiles run in L2 order as in Triton's matrix multiplication tutorial. `choosing` measures tiles.

Few rows and columns make fewer tiles than a GPU has processors, and a long K makes each slow. K may be split:
programs multiply a part of K each, and a second kernel adds their results in a fixed order and applies the
epilogue.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import triton_op, wrap_triton

from loka_onnx.engines.inductor.fusions.products import MULTIPLE

GROUP = 8
"""Rows of tiles that are computed together, so that shared operands stay in L2."""
SUM_ROWS, SUM_COLUMNS = 8, 128
"""Tile of the second kernel where K is split."""


@triton.jit  # type: ignore[untyped-decorator]
def to_eight_bits(value, inverse_scale, kind: tl.constexpr):  # type: ignore[no-untyped-def]
    """Divide by a scale, saturate and round to even in E4M3FN or INT8 (ONNX QuantizeLinear)."""
    # The caller's number may arrive as FP64, which has no conversion to FP8.
    scaled = value.to(tl.float32) * tl.cast(inverse_scale, tl.float32)
    if kind == tl.int8:
        # Casts to integers round to zero. FP32 numbers around 1.5 · 2**23 have the spacing 1.
        scaled = (tl.clamp(scaled, -128.0, 127.0) + 12582912.0) - 12582912.0
    else:
        # Without PROPAGATE, NaN would become a number; the cast keeps NaN.
        scaled = tl.clamp(scaled, -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL)
    return scaled.to(kind)


@triton.jit  # type: ignore[untyped-decorator]
def _loka_product_kernel(  # type: ignore[no-untyped-def]
    a_ptr, b_ptr, scale_ptr, bias_ptr, x0_ptr, x_ptr, wide_ptr, narrow_ptr, parts_ptr,
    M, N_UNITS, K_UNITS, inverse_scale, slope,
    UNIT: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP_M: tl.constexpr, SPLIT: tl.constexpr,
    SCALED: tl.constexpr, BIAS: tl.constexpr, RELU: tl.constexpr, CROSS: tl.constexpr, FIRST: tl.constexpr,
    WIDE: tl.constexpr, NARROW: tl.constexpr, WHOLE_K: tl.constexpr, IMPRECISE: tl.constexpr,
):  # fmt: skip
    # Counts of 16 bytes of a factor, so that the compiler knows that rows start at multiples of them.
    N, K = N_UNITS * UNIT, K_UNITS * UNIT
    program = tl.program_id(0)
    rows, columns = tl.cdiv(M, BM), tl.cdiv(N, BN)
    group = program // (GROUP_M * columns)
    height = min(rows - group * GROUP_M, GROUP_M)
    inside = program % (GROUP_M * columns)
    row, column = group * GROUP_M + inside % height, inside // height
    m = row * BM + tl.arange(0, BM)
    n = column * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    part = tl.program_id(1)
    steps = tl.cdiv(tl.cdiv(K, BK), SPLIT)
    first = part * steps * BK
    # Rows and columns past the end wrap around; their values are not stored.
    a = a_ptr + (m % M).to(tl.int64)[:, None] * K + first + k[None, :]
    b = b_ptr + (n % N).to(tl.int64)[None, :] * K + first + k[:, None]
    SUM: tl.constexpr = tl.int32 if a_ptr.dtype.element_ty == tl.int8 else tl.float32
    z = tl.zeros((BM, BN), dtype=SUM)
    for start in range(first, min(K, first + steps * BK), BK):
        if WHOLE_K:
            z = tl.dot(tl.load(a), tl.load(b), z, max_num_imprecise_acc=IMPRECISE, out_dtype=SUM)
        else:
            left = K - start
            z = tl.dot(
                tl.load(a, mask=k[None, :] < left, other=0.0),
                tl.load(b, mask=k[:, None] < left, other=0.0),
                z,
                max_num_imprecise_acc=IMPRECISE,
                out_dtype=SUM,
            )
        a += BK
        b += BK
    stored = (m[:, None] < M) & (n[None, :] < N)
    place = m.to(tl.int64)[:, None] * N + n[None, :]
    if SPLIT > 1:
        tl.store(parts_ptr + (part * M + m).to(tl.int64)[:, None] * N + n[None, :], z, mask=stored)
    else:
        _finish(
            z, m, n, N, place, stored,
            scale_ptr, bias_ptr, x0_ptr, x_ptr, wide_ptr, narrow_ptr, inverse_scale, slope,
            SCALED, BIAS, RELU, CROSS, FIRST, WIDE, NARROW,
        )  # fmt: skip


@triton.jit  # type: ignore[untyped-decorator]
def _finish(  # type: ignore[no-untyped-def]
    z, m, n, N, place, stored, scale_ptr, bias_ptr, x0_ptr, x_ptr, wide_ptr, narrow_ptr, inverse_scale, slope,
    SCALED: tl.constexpr, BIAS: tl.constexpr, RELU: tl.constexpr, CROSS: tl.constexpr, FIRST: tl.constexpr,
    WIDE: tl.constexpr, NARROW: tl.constexpr,
):  # fmt: skip
    """Apply the epilogue to a sum over K and store."""
    z = z.to(tl.float32)
    if SCALED:
        z *= tl.load(scale_ptr + n, mask=n < N, other=0.0)[None, :]
    if BIAS:
        z += tl.load(bias_ptr + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    if RELU == 1:
        z = tl.maximum(z, 0.0, propagate_nan=tl.PropagateNan.ALL)
    elif RELU == 2:
        z = tl.where(z > 0.0, z, z * slope)
    if CROSS:
        x0 = tl.load(x0_ptr + place, mask=stored, other=0.0).to(tl.float32)
        x = x0 if FIRST else tl.load(x_ptr + place, mask=stored, other=0.0).to(tl.float32)
        z = x0 * z + x
    if WIDE:
        tl.store(wide_ptr + place, z.to(wide_ptr.dtype.element_ty), mask=stored)
    if NARROW:
        tl.store(
            narrow_ptr + place, to_eight_bits(z, inverse_scale, narrow_ptr.dtype.element_ty), mask=stored
        )


@triton.jit  # type: ignore[untyped-decorator]
def _add_up_kernel(  # type: ignore[no-untyped-def]
    parts_ptr, scale_ptr, bias_ptr, x0_ptr, x_ptr, wide_ptr, narrow_ptr, M, N_UNITS, inverse_scale, slope,
    UNIT: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, SPLIT: tl.constexpr,
    SCALED: tl.constexpr, BIAS: tl.constexpr, RELU: tl.constexpr, CROSS: tl.constexpr, FIRST: tl.constexpr,
    WIDE: tl.constexpr, NARROW: tl.constexpr,
):  # fmt: skip
    """Add the sums of the parts of K and apply the epilogue."""
    N = N_UNITS * UNIT
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    stored = (m[:, None] < M) & (n[None, :] < N)
    place = m.to(tl.int64)[:, None] * N + n[None, :]
    z = tl.zeros((BM, BN), dtype=parts_ptr.dtype.element_ty)
    for part in tl.static_range(SPLIT):
        partial = (part * M + m).to(tl.int64)[:, None] * N + n[None, :]
        z += tl.load(parts_ptr + partial, mask=stored, other=0.0)
    _finish(
        z, m, n, N, place, stored,
        scale_ptr, bias_ptr, x0_ptr, x_ptr, wide_ptr, narrow_ptr, inverse_scale, slope,
        SCALED, BIAS, RELU, CROSS, FIRST, WIDE, NARROW,
    )  # fmt: skip


@triton_op("loka::product", mutates_args={})
def product(
    a: Tensor,
    b: Tensor,
    scale: Tensor | None,
    bias: Tensor | None,
    x0: Tensor | None,
    x: Tensor | None,
    inverse_scale: float,
    relu: bool,
    slope: float,
    wide: torch.dtype | None,
    narrow: torch.dtype,
    tile: list[int],
) -> list[Tensor]:
    """Multiply and apply the epilogue.

    a (M, K) and b (N, K), the transposed weight, are contiguous, in E4M3FN, INT8, BF16 or FP16; K and N are
    multiples of 16, of 8 in the last two.
    `scale` (N,), in FP32, is that of a times those of the weight's columns, None for factors
    that are not quantized. `bias` is (N,); x0 and x of a cross layer are (M, N), and x is None where it is
    x0. `tile` is `Tile.numbers`.

    Returns (M, N) in the type `wide`, unless that is None, then (M, N) in `narrow`, E4M3FN or INT8, times
    `inverse_scale`, unless that is 0. With `relu`, negative values are multiplied by `slope`.
    """
    (m, k), n = a.shape, b.shape[0]
    high = None if wide is None else torch.empty((m, n), dtype=wide, device=a.device)
    low = torch.empty((m, n), dtype=narrow, device=a.device) if inverse_scale else None
    bm, bn, bk, stages, warps, exact, split = tile
    sums = torch.int32 if a.dtype == torch.int8 else torch.float32
    parts = torch.empty((split, m, n), dtype=sums, device=a.device) if split > 1 else None
    # An unused pointer must be valid.
    read = [a if each is None else each for each in (scale, bias, x0, x, high, low)]
    follows: dict[str, int] = {"SCALED": scale is not None, "BIAS": bias is not None}
    follows |= {"RELU": int(relu) + int(relu and slope != 0.0), "CROSS": x0 is not None, "FIRST": x is None}
    follows |= {"WIDE": high is not None, "NARROW": low is not None}
    unit = MULTIPLE // a.element_size()
    tiles = {"UNIT": unit, "BM": bm, "BN": bn, "BK": bk, "GROUP_M": GROUP, "SPLIT": split}
    tiles["WHOLE_K"] = k % bk == 0
    # None is Triton's default: on Hopper, the whole sum in the tensor core's precision.
    imprecise = bk if exact and a.dtype == torch.float8_e4m3fn else None
    wrap_triton(_loka_product_kernel)[(triton.cdiv(m, bm) * triton.cdiv(n, bn), split)](
        a, b, *read, a if parts is None else parts, m, n // unit, k // unit, inverse_scale, slope,
        **tiles, **follows, IMPRECISE=imprecise, num_stages=stages, num_warps=warps,
    )  # fmt: skip
    if parts is not None:
        tiles = {"UNIT": unit, "BM": SUM_ROWS, "BN": SUM_COLUMNS, "SPLIT": split}
        wrap_triton(_add_up_kernel)[(triton.cdiv(m, SUM_ROWS), triton.cdiv(n, SUM_COLUMNS))](
            parts, *read, m, n // unit, inverse_scale, slope, **tiles, **follows, num_warps=4
        )
    return [output for output in (high, low) if output is not None]
