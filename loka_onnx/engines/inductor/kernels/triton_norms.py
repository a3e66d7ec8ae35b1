"""Mixes of tokens and the norm behind them, in one pass over the tokens; a program holds one example.

The interaction half of a factorization machine block, with tokens X (n, d), learned Y (n, k), γ and β::

    S   =   X · (Xᵀ · Y)                                (n, k)
    out =   (S − mean S) / √(var S + ε) · γ + β         over all n·k values of the example

A compiler makes three batched products, a transposed copy of X for two of them and a reduction; this kernel
reads X once and writes only `out`, quantized where Q follows.

A residual block over tokens, with own tokens F (n_F, d), a learned W (n_L, n), n_F + n_L = n, γ and β of d::

    Z    =   concat(F, W · X) + X                            (n, d)
    out  =   (Z − mean Z) / √(var Z + ε) · γ + β             over the d values of each token

A compiler writes the concatenation, and a transposed X for W · X. This kernel reads X and F once and writes
`out` once, the least memory traffic.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import triton_op, wrap_triton

from loka_onnx.engines.inductor.fusions.base import tiled
from loka_onnx.engines.inductor.kernels.triton_product import to_eight_bits


@triton.jit  # type: ignore[untyped-decorator]
def _loka_factorization_norm_kernel(  # type: ignore[no-untyped-def]
    x_ptr, y_ptr, gamma_ptr, beta_ptr, out_ptr, inverse_scale, epsilon,
    N: tl.constexpr, D: tl.constexpr, K: tl.constexpr,
    N2: tl.constexpr, D2: tl.constexpr, K2: tl.constexpr, NARROW: tl.constexpr,
):  # fmt: skip
    example = tl.program_id(0).to(tl.int64)
    tokens, columns, ranks = tl.arange(0, N2), tl.arange(0, D2), tl.arange(0, K2)
    in_x = (tokens[:, None] < N) & (columns[None, :] < D)
    in_s = (tokens[:, None] < N) & (ranks[None, :] < K)
    flat = tokens[:, None] * K + ranks[None, :]
    x = tl.load(x_ptr + example * N * D + tokens[:, None] * D + columns[None, :], mask=in_x, other=0.0)
    y = tl.load(y_ptr + flat, mask=in_s, other=0.0)
    # The graph also rounds this product to the type of its operands.
    p = tl.dot(tl.trans(x), y).to(x.dtype)
    s = tl.dot(x, p)
    centred = tl.where(in_s, s - tl.sum(s) / (N * K), 0.0)
    deviation = tl.rsqrt(tl.sum(centred * centred) / (N * K) + tl.cast(epsilon, tl.float32))
    gamma = tl.load(gamma_ptr + flat, mask=in_s, other=0.0).to(tl.float32)
    beta = tl.load(beta_ptr + flat, mask=in_s, other=0.0).to(tl.float32)
    out = centred * deviation * gamma + beta
    place = out_ptr + example * N * K + flat
    if NARROW:
        tl.store(place, to_eight_bits(out, inverse_scale, out_ptr.dtype.element_ty), mask=in_s)
    else:
        tl.store(place, out.to(x.dtype), mask=in_s)


@triton_op("loka::factorization_norm", mutates_args={})
def factorization_norm(
    x: Tensor,
    y: Tensor,
    gamma: Tensor,
    beta: Tensor,
    epsilon: float,
    inverse_scale: float,
    narrow: torch.dtype | None,
) -> Tensor:
    """Compute the interaction and its norm of x (batch, n, d) and y (n, k), BF16 or FP16, contiguous. Returns
    (batch, n·k) in the type of x; with `narrow`, E4M3FN or INT8, in that, times `inverse_scale`.
    """
    batch, n, d = x.shape
    k = y.shape[1]
    out = torch.empty((batch, n * k), dtype=narrow or x.dtype, device=x.device)
    sizes = {"N": n, "D": d, "K": k, "N2": tiled(n), "D2": tiled(d), "K2": tiled(k)}
    wrap_triton(_loka_factorization_norm_kernel)[(batch,)](
        x, y, gamma, beta, out, inverse_scale, epsilon, **sizes, NARROW=narrow is not None, num_warps=4
    )
    return out


@triton.jit  # type: ignore[untyped-decorator]
def _normalized(z, inside, gamma, beta, epsilon, D: tl.constexpr):  # type: ignore[no-untyped-def]
    centred = tl.where(inside, z - (tl.sum(z, 1) / D)[:, None], 0.0)
    deviation = tl.rsqrt(tl.sum(centred * centred, 1) / D + tl.cast(epsilon, tl.float32))
    return centred * deviation[:, None] * gamma + beta


@triton.jit  # type: ignore[untyped-decorator]
def _loka_token_residual_norm_kernel(  # type: ignore[no-untyped-def]
    x_ptr, f_ptr, w_ptr, gamma_ptr, beta_ptr, out_ptr, epsilon,
    N: tl.constexpr, NF: tl.constexpr, NL: tl.constexpr, D: tl.constexpr,
    N2: tl.constexpr, NF2: tl.constexpr, NL2: tl.constexpr, D2: tl.constexpr,
):  # fmt: skip
    example = tl.program_id(0).to(tl.int64)
    tokens, columns = tl.arange(0, N2), tl.arange(0, D2)
    first, later = tl.arange(0, NF2), tl.arange(0, NL2)
    in_d = columns[None, :] < D
    x_ptr += example * N * D
    out_ptr += example * N * D
    x = tl.load(x_ptr + tokens[:, None] * D + columns[None, :], mask=(tokens[:, None] < N) & in_d, other=0.0)
    w = tl.load(
        w_ptr + later[:, None] * N + tokens[None, :],
        mask=(later[:, None] < NL) & (tokens[None, :] < N),
        other=0.0,
    )
    gamma = tl.load(gamma_ptr + columns, mask=columns < D, other=0.0).to(tl.float32)[None, :]
    beta = tl.load(beta_ptr + columns, mask=columns < D, other=0.0).to(tl.float32)[None, :]
    in_later = (later[:, None] < NL) & in_d
    place = (NF + later)[:, None] * D + columns[None, :]
    # The graph also rounds this product to the type of its operands.
    z = tl.dot(w, x).to(x.dtype).to(tl.float32) + tl.load(x_ptr + place, mask=in_later, other=0.0)
    tl.store(out_ptr + place, _normalized(z, in_later, gamma, beta, epsilon, D).to(x.dtype), mask=in_later)
    in_first = (first[:, None] < NF) & in_d
    place = first[:, None] * D + columns[None, :]
    z = tl.load(f_ptr + example * NF * D + place, mask=in_first, other=0.0).to(tl.float32)
    z += tl.load(x_ptr + place, mask=in_first, other=0.0)
    tl.store(out_ptr + place, _normalized(z, in_first, gamma, beta, epsilon, D).to(x.dtype), mask=in_first)


@triton_op("loka::token_residual_norm", mutates_args={})
def token_residual_norm(
    x: Tensor, f: Tensor, w: Tensor, gamma: Tensor, beta: Tensor, epsilon: float
) -> Tensor:
    """Compute LayerNorm(x + concat(f, w·x)) over d, in the type of x; f holds the first n_F tokens. x (batch,
    n, d), f (batch, n_F, d) and w (n_L, n) are contiguous, of one type, BF16 or FP16.
    """
    batch, n, d = x.shape
    later, first = w.shape[0], n - w.shape[0]
    out = torch.empty_like(x)
    sizes = {"N": n, "NF": first, "NL": later, "D": d, "N2": tiled(n), "NL2": tiled(later), "D2": tiled(d)}
    sizes["NF2"] = triton.next_power_of_2(first)
    wrap_triton(_loka_token_residual_norm_kernel)[(batch,)](
        x, f, w, gamma, beta, out, epsilon, **sizes, num_warps=8
    )
    return out
