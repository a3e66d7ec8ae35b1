"""A residual block over tokens, in one pass.

For each example, with tokens X (n, d), the block's own tokens F (n_F, d), a learned mix W (n_L, n) with
n_F + n_L = n, and γ, β of d::

    Z    =   concat(F, W · X) + X                            (n, d)
    out  =   (Z − mean Z) / √(var Z + ε) · γ + β             over the d values of each token

A compiler writes the concatenation, and a transposed X for W · X. This kernel reads X and F once and writes
`out` once, the least memory traffic. A program holds one example.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import triton_op, wrap_triton

WARPS = 8


@triton.jit  # type: ignore[untyped-decorator]
def _normalized(z, inside, gamma, beta, epsilon, D: tl.constexpr):  # type: ignore[no-untyped-def]
    centred = tl.where(inside, z - (tl.sum(z, 1) / D)[:, None], 0.0)
    deviation = tl.rsqrt(tl.sum(centred * centred, 1) / D + tl.cast(epsilon, tl.float32))
    return centred * deviation[:, None] * gamma + beta


@triton.jit  # type: ignore[untyped-decorator]
def _loka_token_residual_norm_kernel(  # type: ignore[no-untyped-def]
    x_ptr,
    f_ptr,
    w_ptr,
    gamma_ptr,
    beta_ptr,
    out_ptr,
    epsilon,
    N: tl.constexpr,
    NF: tl.constexpr,
    NL: tl.constexpr,
    D: tl.constexpr,
    N2: tl.constexpr,
    NF2: tl.constexpr,
    NL2: tl.constexpr,
    D2: tl.constexpr,
):
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
    """Compute LayerNorm(x + concat(f, w·x)) over d, in the type of x; f holds the first n_F tokens.

    x (batch, n, d), f (batch, n_F, d) and w (n_L, n) are contiguous, of one type, BF16 or FP16.
    """
    batch, n, d = x.shape
    later, first = w.shape[0], n - w.shape[0]
    out = torch.empty_like(x)
    wrap_triton(_loka_token_residual_norm_kernel)[(batch,)](
        x,
        f,
        w,
        gamma,
        beta,
        out,
        epsilon,
        N=n,
        NF=first,
        NL=later,
        D=d,
        N2=max(16, triton.next_power_of_2(n)),
        NF2=triton.next_power_of_2(first),
        NL2=max(16, triton.next_power_of_2(later)),
        D2=max(16, triton.next_power_of_2(d)),
        num_warps=WARPS,
    )
    return out
