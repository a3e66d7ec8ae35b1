"""Concatenation of two matrices, rounded to BF16 or FP16 and quantized, in one pass.

With A (M, a) and B (M, b)::

    X    =  concat(A, B)     rounded to BF16 or FP16, (M, a + b)
    out  =  X and X / s in E4M3FN, or only the latter

A program computes a tile of X. Where a is a multiple of its columns, the whole tile comes from one operand.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import triton_op, wrap_triton

from loka_onnx.engines.inductor.kernels.triton_common import to_float8

ROWS, COLUMNS, WARPS = 16, 128, 4


@triton.jit  # type: ignore[untyped-decorator]
def _loka_concat_quantize_kernel(  # type: ignore[no-untyped-def]
    a_ptr,
    b_ptr,
    wide_ptr,
    narrow_ptr,
    M,
    inverse_scale,
    WA: tl.constexpr,
    WB: tl.constexpr,
    BF16: tl.constexpr,
    WIDE: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    N: tl.constexpr = WA + WB
    HALF: tl.constexpr = tl.bfloat16 if BF16 else tl.float16
    start = tl.program_id(1) * BN
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    n = start + tl.arange(0, BN)
    row = m.to(tl.int64)[:, None]
    inside = (m[:, None] < M) & (n[None, :] < N)
    if WA % BN == 0:
        if start < WA:
            x = tl.load(a_ptr + row * WA + n[None, :], mask=inside, other=0.0).to(HALF)
        else:
            x = tl.load(b_ptr + row * WB + (n - WA)[None, :], mask=inside, other=0.0).to(HALF)
    else:
        first = inside & (n[None, :] < WA)
        left = tl.load(a_ptr + row * WA + n[None, :], mask=first, other=0.0).to(HALF)
        second = inside & (n[None, :] >= WA)
        right = tl.load(b_ptr + row * WB + (n - WA)[None, :], mask=second, other=0.0).to(HALF)
        x = tl.where(n[None, :] < WA, left, right)
    place = row * N + n[None, :]
    if WIDE:
        tl.store(wide_ptr + place, x, mask=inside)
    tl.store(narrow_ptr + place, to_float8(x, inverse_scale), mask=inside)


@triton_op("loka::concat_quantize", mutates_args={})
def concat_quantize(
    a: Tensor, b: Tensor, inverse_scale: float, half: torch.dtype, wide: bool
) -> list[Tensor]:
    """Round a and b, contiguous in FP32, BF16 or FP16, to `half`, join their columns, and quantize.

    Returns X (M, a + b) where `wide` asks for it, then the same in E4M3FN, times `inverse_scale`.
    """
    (m, first), second = a.shape, b.shape[1]
    n = first + second
    high = torch.empty((m, n), dtype=half, device=a.device) if wide else None
    low = torch.empty((m, n), dtype=torch.float8_e4m3fn, device=a.device)
    wrap_triton(_loka_concat_quantize_kernel)[(triton.cdiv(m, ROWS), triton.cdiv(n, COLUMNS))](
        a,
        b,
        # An unused pointer must be valid.
        low if high is None else high,
        low,
        m,
        inverse_scale,
        WA=first,
        WB=second,
        BF16=half is torch.bfloat16,
        WIDE=wide,
        BM=ROWS,
        BN=COLUMNS,
        num_warps=WARPS,
    )
    return [low] if high is None else [high, low]
