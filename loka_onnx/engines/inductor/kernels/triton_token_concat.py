"""A learned mix of tokens, concatenated with other tokens, rounded and quantized in one pass.

For each example, with tokens X (n, d), F (n_F, d) and W (m, n)::

    Z    =   concat(F, W · X)  or  concat(W · X, F), rounded to BF16 or FP16        (n_F + m, d)
    out  =   Z, Z / s in E4M3FN, or one of them

X and F are read once, in their own types, and Z is written once. A program holds one example.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import triton_op, wrap_triton

from loka_onnx.engines.inductor.kernels.triton_common import to_float8

WARPS, LARGE = 4, 1 << 14
"""Warps of a program, and the tile size from which it has twice as many: four warps would spill registers."""


@triton.jit  # type: ignore[untyped-decorator]
def _written(  # type: ignore[no-untyped-def]
    z, place, inside, wide_ptr, narrow_ptr, inverse_scale, WIDE: tl.constexpr, NARROW: tl.constexpr
):
    if WIDE:
        tl.store(wide_ptr + place, z, mask=inside)
    if NARROW:
        tl.store(narrow_ptr + place, to_float8(z, inverse_scale), mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _loka_token_concat_kernel(  # type: ignore[no-untyped-def]
    x_ptr,
    w_ptr,
    f_ptr,
    wide_ptr,
    narrow_ptr,
    inverse_scale,
    N: tl.constexpr,
    M: tl.constexpr,
    NF: tl.constexpr,
    D: tl.constexpr,
    MIX_FIRST: tl.constexpr,
    BF16: tl.constexpr,
    WIDE: tl.constexpr,
    NARROW: tl.constexpr,
    N2: tl.constexpr,
    M2: tl.constexpr,
    NF2: tl.constexpr,
    D2: tl.constexpr,
):
    HALF: tl.constexpr = tl.bfloat16 if BF16 else tl.float16
    example = tl.program_id(0).to(tl.int64)
    tokens, mixed, columns = tl.arange(0, N2), tl.arange(0, M2), tl.arange(0, D2)
    in_d = columns[None, :] < D
    place = tokens[:, None] * D + columns[None, :]
    x = tl.load(x_ptr + example * N * D + place, mask=(tokens[:, None] < N) & in_d, other=0.0).to(HALF)
    inside = (mixed[:, None] < M) & (tokens[None, :] < N)
    w = tl.load(w_ptr + mixed[:, None] * N + tokens[None, :], mask=inside, other=0.0)
    z = tl.dot(w, x).to(HALF)
    start = example * (M + NF) * D
    place = start + (0 if MIX_FIRST else NF * D) + mixed[:, None] * D + columns[None, :]
    _written(z, place, (mixed[:, None] < M) & in_d, wide_ptr, narrow_ptr, inverse_scale, WIDE, NARROW)
    if NF > 0:
        others = tl.arange(0, NF2)
        place = others[:, None] * D + columns[None, :]
        inside = (others[:, None] < NF) & in_d
        f = tl.load(f_ptr + example * NF * D + place, mask=inside, other=0.0).to(HALF)
        place += start + (M * D if MIX_FIRST else 0)
        _written(f, place, inside, wide_ptr, narrow_ptr, inverse_scale, WIDE, NARROW)


@triton_op("loka::token_concat", mutates_args={})
def token_concat(
    x: Tensor,
    w: Tensor,
    f: Tensor | None,
    inverse_scale: float,
    half: torch.dtype,
    mix_first: bool,
    wide: bool,
    narrow: bool,
) -> list[Tensor]:
    """Mix, concatenate and quantize; f is None for the mix alone, else before it unless `mix_first`.

    x (batch, n, d) and f (batch, n_F, d) are contiguous, in FP32, BF16 or FP16, and rounded to the type
    `half` of w (m, n). Returns (batch, n_F + m, d) of that type if `wide`, then in E4M3FN, times
    `inverse_scale`, if `narrow`.
    """
    (batch, n, d), m = x.shape, w.shape[0]
    others = 0 if f is None else f.shape[1]
    shape = (batch, others + m, d)
    rows = max(n, m, others)
    is_large = triton.next_power_of_2(rows) * triton.next_power_of_2(d) >= LARGE
    made = [torch.empty(shape, dtype=half, device=x.device)] if wide else []
    if narrow:
        made.append(torch.empty(shape, dtype=torch.float8_e4m3fn, device=x.device))
    wrap_triton(_loka_token_concat_kernel)[(batch,)](
        x,
        w,
        # An unused pointer must be valid.
        x if f is None else f,
        made[0],
        made[-1],
        inverse_scale,
        N=n,
        M=m,
        NF=others,
        D=d,
        MIX_FIRST=mix_first,
        BF16=half is torch.bfloat16,
        WIDE=wide,
        NARROW=narrow,
        N2=max(16, triton.next_power_of_2(n)),
        M2=max(16, triton.next_power_of_2(m)),
        NF2=max(1, triton.next_power_of_2(others)),
        D2=max(16, triton.next_power_of_2(d)),
        num_warps=2 * WARPS if is_large else WARPS,
    )
    return made
