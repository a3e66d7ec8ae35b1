"""Products whose epilogue does what follows: bias, ReLU, a cross layer's sum, the next Q.

With A (M, K) and B (N, K) in E4M3FN and a scale for each output column, or in BF16 or FP16 without one::

    Z    =   relu?(A · Bᵀ · scale + bias)
    Z    =   x0 ⊙ Z + x                      of a cross layer (arXiv 2008.13535, equation 1)
    out  =   Z in the base precision, Z / s in E4M3FN, or both

cuBLASLt writes Z in the base precision, and another kernel reads it to quantize; here Z never leaves the
registers. Tiles in L2 order as in Triton's matrix multiplication tutorial. Which tile is fastest depends on
the shape and is measured (`choosing`).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import triton_op, wrap_triton

from loka_onnx.engines.inductor.kernels.triton_common import to_float8

MULTIPLE = 16
"""What N and K must be multiples of."""
GROUP = 8
"""Rows of tiles that are computed together, so that what they share stays in L2."""


@triton.jit  # type: ignore[untyped-decorator]
def _loka_product_kernel(  # type: ignore[no-untyped-def]
    a_ptr,
    b_ptr,
    scale_ptr,
    bias_ptr,
    x0_ptr,
    x_ptr,
    wide_ptr,
    narrow_ptr,
    M,
    N16,
    K16,
    inverse_scale,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    GROUP_M: tl.constexpr,
    SCALED: tl.constexpr,
    BIAS: tl.constexpr,
    RELU: tl.constexpr,
    CROSS: tl.constexpr,
    FIRST: tl.constexpr,
    WIDE: tl.constexpr,
    NARROW: tl.constexpr,
    WHOLE_K: tl.constexpr,
    IMPRECISE: tl.constexpr,
):
    # Sixteens, so that the compiler knows that rows begin at multiples of 16 bytes.
    N, K = N16 * 16, K16 * 16
    program = tl.program_id(0)
    rows, columns = tl.cdiv(M, BM), tl.cdiv(N, BN)
    group = program // (GROUP_M * columns)
    height = min(rows - group * GROUP_M, GROUP_M)
    inside = program % (GROUP_M * columns)
    row, column = group * GROUP_M + inside % height, inside // height
    m = row * BM + tl.arange(0, BM)
    n = column * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    # Rows and columns past the end wrap around: their values are never stored.
    a = a_ptr + (m % M).to(tl.int64)[:, None] * K + k[None, :]
    b = b_ptr + (n % N).to(tl.int64)[None, :] * K + k[:, None]
    z = tl.zeros((BM, BN), dtype=tl.float32)
    for start in range(0, K, BK):
        if WHOLE_K:
            z = tl.dot(tl.load(a), tl.load(b), z, max_num_imprecise_acc=IMPRECISE)
        else:
            left = K - start
            z = tl.dot(
                tl.load(a, mask=k[None, :] < left, other=0.0),
                tl.load(b, mask=k[:, None] < left, other=0.0),
                z,
                max_num_imprecise_acc=IMPRECISE,
            )
        a += BK
        b += BK
    stored = (m[:, None] < M) & (n[None, :] < N)
    place = m.to(tl.int64)[:, None] * N + n[None, :]
    if SCALED:
        z *= tl.load(scale_ptr + n, mask=n < N, other=0.0)[None, :]
    if BIAS:
        z += tl.load(bias_ptr + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    if RELU:
        z = tl.maximum(z, 0.0, propagate_nan=tl.PropagateNan.ALL)
    if CROSS:
        x0 = tl.load(x0_ptr + place, mask=stored, other=0.0).to(tl.float32)
        x = x0 if FIRST else tl.load(x_ptr + place, mask=stored, other=0.0).to(tl.float32)
        z = x0 * z + x
    if WIDE:
        tl.store(wide_ptr + place, z.to(wide_ptr.dtype.element_ty), mask=stored)
    if NARROW:
        tl.store(narrow_ptr + place, to_float8(z, inverse_scale), mask=stored)


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
    wide: torch.dtype | None,
    tile: list[int],
) -> list[Tensor]:
    """Launch it.

    Args:
        a: (M, K) in E4M3FN, BF16 or FP16, contiguous; K a multiple of 16.
        b: (N, K) in the same type, contiguous: the transposed weight; N a multiple of 16.
        scale: (N,) FP32, of a times that of each column of the weight; None where they are not quantized.
        bias: (N,), or None.
        x0: (M, N), of a cross layer, or None.
        x: (M, N), likewise; None where it is x0, as in the first layer.
        inverse_scale: One over the scale of the quantized output; 0 where nothing is quantized.
        relu: Whether negative values become 0.
        wide: Type of the output that is not quantized; None where there is none.
        tile: Rows, columns and depth of a tile, pipeline stages, warps, and whether sums of FP8 products move
            to FP32 registers after each step (1) or stay in the tensor core's bits (0).

    Returns:
        (M, N) not quantized, then (M, N) in E4M3FN; each only where it is asked for.
    """
    (m, k), n = a.shape, b.shape[0]
    high = None if wide is None else torch.empty((m, n), dtype=wide, device=a.device)
    low = torch.empty((m, n), dtype=torch.float8_e4m3fn, device=a.device) if inverse_scale else None
    bm, bn, bk, stages, warps, exact = tile
    wrap_triton(_loka_product_kernel)[(triton.cdiv(m, bm) * triton.cdiv(n, bn),)](
        a,
        b,
        # A pointer that is not used still has to point somewhere.
        *(a if each is None else each for each in (scale, bias, x0, x, high, low)),
        m,
        n // MULTIPLE,
        k // MULTIPLE,
        inverse_scale,
        BM=bm,
        BN=bn,
        BK=bk,
        GROUP_M=GROUP,
        SCALED=scale is not None,
        BIAS=bias is not None,
        RELU=relu,
        CROSS=x0 is not None,
        FIRST=x is None,
        WIDE=high is not None,
        NARROW=low is not None,
        WHOLE_K=k % bk == 0,
        # None is what Triton does by itself: on Hopper, all of K in the tensor core's bits.
        IMPRECISE=bk if exact and scale is not None else None,
        num_stages=stages,
        num_warps=warps,
    )
    return [made for made in (high, low) if made is not None]
