"""The interaction half of a factorization machine block, in one pass over the tokens.

For each example, with tokens X (n, d), learned Y (n, k), and γ, β of n·k::

    S   =   X · (Xᵀ · Y)                                (n, k)
    out =   (S − mean S) / √(var S + ε) · γ + β         over all n·k values of the example

A compiler makes three batched products, a transposed copy of X for two of them and a reduction; this kernel
reads X once and writes only `out`, quantized where Q follows. A program holds one example.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import triton_op, wrap_triton

from loka_onnx.engines.inductor.kernels.triton_common import to_float8

WARPS = 4


@triton.jit  # type: ignore[untyped-decorator]
def _loka_factorization_norm_kernel(  # type: ignore[no-untyped-def]
    x_ptr,
    y_ptr,
    gamma_ptr,
    beta_ptr,
    out_ptr,
    inverse_scale,
    epsilon,
    N: tl.constexpr,
    D: tl.constexpr,
    K: tl.constexpr,
    N2: tl.constexpr,
    D2: tl.constexpr,
    K2: tl.constexpr,
    FLOAT8: tl.constexpr,
):
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
    if FLOAT8:
        tl.store(place, to_float8(out, inverse_scale), mask=in_s)
    else:
        tl.store(place, out.to(x.dtype), mask=in_s)


@triton_op("loka::factorization_norm", mutates_args={})
def factorization_norm(
    x: Tensor, y: Tensor, gamma: Tensor, beta: Tensor, epsilon: float, inverse_scale: float, float8: bool
) -> Tensor:
    """Compute the interaction and its norm of x (batch, n, d) and y (n, k), BF16 or FP16, contiguous.

    Returns (batch, n·k) in the type of x; with `float8`, in E4M3FN, times `inverse_scale`.
    """
    batch, n, d = x.shape
    k = y.shape[1]
    out = torch.empty((batch, n * k), dtype=torch.float8_e4m3fn if float8 else x.dtype, device=x.device)
    wrap_triton(_loka_factorization_norm_kernel)[(batch,)](
        x,
        y,
        gamma,
        beta,
        out,
        inverse_scale,
        epsilon,
        N=n,
        D=d,
        K=k,
        N2=max(16, triton.next_power_of_2(n)),
        D2=max(16, triton.next_power_of_2(d)),
        K2=max(16, triton.next_power_of_2(k)),
        FLOAT8=float8,
        num_warps=WARPS,
    )
    return out
