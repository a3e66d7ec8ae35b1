"""Concatenations, rounded to BF16 or FP16 and quantized in one pass.

Of two matrices A (M, a) and B (M, b)::

    X    =  concat(A, B)     rounded to BF16 or FP16, (M, a + b)
    out  =  X and X / s in E4M3FN, or only the latter

A program computes a tile of X. Where a is a multiple of its columns, the whole tile comes from one operand.
Instead of one of the matrices, a table T (r, d) and ids (M, f) may be given: row i of the matrix is then
T[ids[i, 0]], …, T[ids[i, f − 1]]. For (2048, 128 + 26 · 128), Inductor's lookup and the join behind it took
19 and 7 µs; the join that looks up takes 7. For 8192 rows: 63 and 37, and 28 (H200, a table in L2).

Of a learned mix of tokens and other tokens. For each example, with tokens X (n, d), F (n_F, d) and W (m, n)::

    Z    =   concat(F, W · X)  or  concat(W · X, F), rounded to BF16 or FP16        (n_F + m, d)
    out  =   Z, Z / s in E4M3FN, or one of them

A program holds one example: it reads X and F once, in their own types, and writes Z once.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import triton_op, wrap_triton

from loka_onnx.engines.inductor.fusions.base import tiled
from loka_onnx.engines.inductor.kernels.triton_product import to_eight_bits

ROWS, COLUMNS = 16, 128
"""Tile of a program that joins matrices; one that looks up has half as many elements."""
WARPS, LARGE = 4, 1 << 14
"""Warps of a program, and the tile of tokens from which it has twice as many: four would spill registers."""


@triton.jit  # type: ignore[untyped-decorator]
def _columns(  # type: ignore[no-untyped-def]
    part_ptr, ids_ptr, length, M, m, start, inside, W: tl.constexpr, D: tl.constexpr, BN: tl.constexpr
):
    """Load columns of a matrix (M, W), or of a table's rows (length, D); NaN where an id names no row."""
    n = tl.arange(0, BN)[None, :]
    if D == 0:
        part = tl.load(part_ptr + m.to(tl.int64)[:, None] * W + start + n, mask=inside, other=0.0)
    else:
        ids = tl.load(ids_ptr + m.to(tl.int64) * (W // D) + start // D, mask=m < M, other=0)
        row = tl.where(ids < 0, ids + length, ids).to(tl.int64)
        exists = inside & ((row >= 0) & (row < length))[:, None]
        place = row[:, None] * D + start % D + n
        part = tl.load(part_ptr + place, mask=exists, other=float("nan"))
    return part


@triton.jit  # type: ignore[untyped-decorator]
def _loka_concat_quantize_kernel(  # type: ignore[no-untyped-def]
    a_ptr, b_ptr, ids_ptr, wide_ptr, narrow_ptr, M, length, inverse_scale,
    WA: tl.constexpr, WB: tl.constexpr, DA: tl.constexpr, DB: tl.constexpr,
    BF16: tl.constexpr, WIDE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    N: tl.constexpr = WA + WB
    HALF: tl.constexpr = tl.bfloat16 if BF16 else tl.float16
    start = tl.program_id(1) * BN
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    n = start + tl.arange(0, BN)
    row = m.to(tl.int64)[:, None]
    inside = (m[:, None] < M) & (n[None, :] < N)
    if WA % BN == 0:
        if start < WA:
            x = _columns(a_ptr, ids_ptr, length, M, m, start, inside, WA, DA, BN).to(HALF)
        else:
            x = _columns(b_ptr, ids_ptr, length, M, m, start - WA, inside, WB, DB, BN).to(HALF)
    else:
        first = inside & (n[None, :] < WA)
        left = tl.load(a_ptr + row * WA + n[None, :], mask=first, other=0.0).to(HALF)
        second = inside & (n[None, :] >= WA)
        right = tl.load(b_ptr + row * WB + (n - WA)[None, :], mask=second, other=0.0).to(HALF)
        x = tl.where(n[None, :] < WA, left, right)
    place = row * N + n[None, :]
    if WIDE:
        tl.store(wide_ptr + place, x, mask=inside)
    tl.store(narrow_ptr + place, to_eight_bits(x, inverse_scale, narrow_ptr.dtype.element_ty), mask=inside)


@triton_op("loka::concat_quantize", mutates_args={})
def concat_quantize(
    a: Tensor,
    b: Tensor,
    ids: Tensor | None,
    table: int,
    inverse_scale: float,
    half: torch.dtype,
    wide: bool,
    narrow: torch.dtype,
) -> list[Tensor]:
    """Round a and b, contiguous in FP32, BF16 or FP16, to `half`, join their columns, and quantize. Returns X
    (M, a + b) if `wide`, then X times `inverse_scale` in `narrow`, E4M3FN or INT8.

    With `ids` (M, f), integers as of ONNX Gather, operand `table` (0: a, 1: b) is the table (r, d) of
    M · f rows. An id that names no row makes NaN in place of a row. `fusions.products` says which sizes fit.
    """
    parts, depths = (a, b), [0, 0]
    widths = [a.shape[1], b.shape[1]]
    columns = COLUMNS
    if ids is not None:
        depths[table] = widths[table]
        widths[table] *= ids.shape[1]
        columns = math.gcd(COLUMNS, widths[0], depths[table])
    m, n = parts[1 - table].shape[0], sum(widths)
    high = torch.empty((m, n), dtype=half, device=a.device) if wide else None
    low = torch.empty((m, n), dtype=narrow, device=a.device)
    rows = ROWS if ids is None else ROWS * COLUMNS // (2 * columns)
    tile = {"WA": widths[0], "WB": widths[1], "DA": depths[0], "DB": depths[1], "BM": rows, "BN": columns}
    # An unused pointer must be valid.
    pointers = (a, b, low if ids is None else ids, low if high is None else high, low)
    wrap_triton(_loka_concat_quantize_kernel)[(triton.cdiv(m, rows), triton.cdiv(n, columns))](
        *pointers, m, parts[table].shape[0], inverse_scale,
        **tile, BF16=half is torch.bfloat16, WIDE=wide, num_warps=WARPS,
    )  # fmt: skip
    return [low] if high is None else [high, low]


@triton.jit  # type: ignore[untyped-decorator]
def _written(  # type: ignore[no-untyped-def]
    z, place, inside, wide_ptr, narrow_ptr, inverse_scale, WIDE: tl.constexpr, NARROW: tl.constexpr
):
    if WIDE:
        tl.store(wide_ptr + place, z, mask=inside)
    if NARROW:
        tl.store(
            narrow_ptr + place, to_eight_bits(z, inverse_scale, narrow_ptr.dtype.element_ty), mask=inside
        )


@triton.jit  # type: ignore[untyped-decorator]
def _loka_token_concat_kernel(  # type: ignore[no-untyped-def]
    x_ptr, w_ptr, f_ptr, wide_ptr, narrow_ptr, inverse_scale,
    N: tl.constexpr, M: tl.constexpr, NF: tl.constexpr, D: tl.constexpr,
    MIX_FIRST: tl.constexpr, BF16: tl.constexpr, WIDE: tl.constexpr, NARROW: tl.constexpr,
    N2: tl.constexpr, M2: tl.constexpr, NF2: tl.constexpr, D2: tl.constexpr,
):  # fmt: skip
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
    narrow: torch.dtype | None,
) -> list[Tensor]:
    """Mix, concatenate and quantize; f is None for the mix alone, else before it unless `mix_first`.

    x (batch, n, d) and f (batch, n_F, d) are contiguous, in FP32, BF16 or FP16, and rounded to the type
    `half` of w (m, n). Returns (batch, n_F + m, d) of that type if `wide`, then in `narrow`,
    E4M3FN or INT8, times `inverse_scale`, unless that is None.
    """
    (batch, n, d), m = x.shape, w.shape[0]
    others = 0 if f is None else f.shape[1]
    shape = (batch, others + m, d)
    rows = max(n, m, others)
    is_large = triton.next_power_of_2(rows) * triton.next_power_of_2(d) >= LARGE
    outputs = [torch.empty(shape, dtype=half, device=x.device)] if wide else []
    if narrow is not None:
        outputs.append(torch.empty(shape, dtype=narrow, device=x.device))
    sizes = {"N": n, "M": m, "NF": others, "D": d, "N2": tiled(n), "M2": tiled(m), "D2": tiled(d)}
    sizes["NF2"] = max(1, triton.next_power_of_2(others))
    how = {"MIX_FIRST": mix_first, "BF16": half is torch.bfloat16, "WIDE": wide}
    how["NARROW"] = narrow is not None
    # An unused pointer must be valid.
    read = (x, w, x if f is None else f)
    wrap_triton(_loka_token_concat_kernel)[(batch,)](
        *read,
        outputs[0],
        outputs[-1],
        inverse_scale,
        **sizes,
        **how,
        num_warps=2 * WARPS if is_large else WARPS,
    )
    return outputs
