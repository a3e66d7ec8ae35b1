"""Runs the Triton kernels in Triton's interpreter, on the CPU; in a process of its own: importing decides.

FP16 throughout: the interpreter (Triton 3.9) multiplies BF16 as if its bits were integers. It also loses the
carry where rounding to FP8 reaches the next power of two, so that a few quantized values are half of what
they should be; a GPU does neither.
"""

from __future__ import annotations

import sys

import torch

from loka_onnx.engines.inductor.kernels import (
    triton_attention,
    triton_concat,
    triton_factorization,
    triton_product,
    triton_token_concat,
    triton_token_norm,
)

HALF, FP8 = torch.float16, torch.float8_e4m3fn
ULP = 2.0**-10
SMALL_TILE = [16, 16, 16, 2, 4, 0, 1]


def random(*shape: int, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(*shape) * scale).to(HALF)


def layer_norm(z: torch.Tensor, gamma: torch.Tensor, beta: torch.Tensor) -> torch.Tensor:
    z = z.double()
    centred = z - z.mean(-1, keepdim=True)
    return centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt() * gamma.double() + beta.double()


def close(found: torch.Tensor, expected: torch.Tensor, relative: float, absolute: float) -> None:
    torch.testing.assert_close(found.double(), expected.double(), rtol=relative, atol=absolute)


def quantized(found: torch.Tensor, exact: torch.Tensor, relative: float, absolute: float) -> None:
    """All but the few that the interpreter gets wrong."""
    assert found.dtype is FP8
    exact = exact.clamp(-448, 448)
    off = (found.to(torch.float64) - exact).abs() > absolute + relative * exact.abs()
    assert off.double().mean() < 0.05


def factorization() -> None:
    """Sizes that are no powers of two, so that masks matter."""
    for n, d, k in ((12, 16, 8), (16, 24, 16), (27, 16, 5)):
        x, y = random(3, n, d), random(n, k, scale=n**-0.5)
        gamma, beta = random(n * k), random(n * k)
        p = torch.einsum("bnd,nk->bdk", x.double(), y.double()).to(HALF).double()
        expected = layer_norm(torch.einsum("bnd,bdk->bnk", x.double(), p).reshape(3, -1), gamma, beta)
        found = triton_factorization.factorization_norm(x, y, gamma, beta, 1e-5, 0.0, False)
        close(found, expected, 2 * ULP, 8 * ULP)
        narrow = triton_factorization.factorization_norm(x, y, gamma, beta, 1e-5, 64.0, True)
        quantized(narrow, expected * 64, 2.0**-4 + 4 * ULP, 64 * 8 * ULP)


def token_norm() -> None:
    for n, later, d in ((16, 6, 16), (12, 5, 24), (32, 16, 16)):
        x, f, w = random(3, n, d), random(3, n - later, d), random(later, n, scale=n**-0.5)
        gamma, beta = random(d), random(d)
        mix = torch.einsum("ln,bnd->bld", w.double(), x.double())
        expected = layer_norm(torch.cat([f.double(), mix], 1) + x.double(), gamma, beta)
        found = triton_token_norm.token_residual_norm(x, f, w, gamma, beta, 1e-5)
        close(found, expected, 4 * ULP, 8 * ULP)


def product() -> None:
    m, n, k = 21, 48, 80
    a, b = (torch.randn(m, k) * 60).to(FP8), (torch.randn(n, k) * 60).to(FP8)
    scale = torch.rand(n) * 1e-4 + 1e-4
    exact = (a.double() @ b.double().t()) * scale.double()
    bias, x0, x = random(n), random(m, n), random(m, n)
    # K of one part, of two of unlike length, and of more parts than there are steps.
    for tile in (
        SMALL_TILE, [32, 16, 32, 2, 4, 1, 1], [16, 16, 16, 2, 4, 0, 2], [16, 32, 32, 2, 4, 1, 4],
    ):  # fmt: skip
        for relu, has_bias, cross in ((False, False, False), (True, True, False), (False, True, True)):
            z = exact + (bias.double() if has_bias else 0.0)
            z = z.clamp(min=0) if relu else z
            z = x0.double() * z + x.double() if cross else z
            wide, narrow = triton_product.product(
                a, b, scale, bias if has_bias else None, x0 if cross else None, x if cross else None,
                16.0, relu, HALF, tile,
            )  # fmt: skip
            close(wide, z, 2 * ULP, 4 * ULP * float(z.abs().max()))
            quantized(narrow, z * 16, 2.0**-4 + ULP, 2.0**-9)
    (only,) = triton_product.product(a, b, scale, None, None, None, 0.0, False, HALF, SMALL_TILE)
    close(only, exact, 2 * ULP, 4 * ULP * float(exact.abs().max()))
    assert only.dtype is HALF
    # In the first cross layer x is x0, which the kernel reads once.
    (first,) = triton_product.product(a, b, scale, bias, x0, None, 0.0, False, HALF, SMALL_TILE)
    z = x0.double() * (exact + bias.double()) + x0.double()
    close(first, z, 2 * ULP, 4 * ULP * float(z.abs().max()))


def half_product() -> None:
    """Factors that are not quantized have no scale."""
    m, n, k = 21, 48, 80
    a, b, bias = random(m, k), random(n, k, scale=k**-0.5), random(n)
    z = (a.double() @ b.double().t() + bias.double()).clamp(min=0)
    wide, narrow = triton_product.product(a, b, None, bias, None, None, 64.0, True, HALF, SMALL_TILE)
    close(wide, z, 2 * ULP, 4 * ULP * float(z.max()))
    quantized(narrow, z * 64, 2.0**-4 + ULP, 2.0**-9)


def concat() -> None:
    """Widths that programs divide, and that they do not; FP32 is rounded as it is read."""
    for m, first, second in ((21, 128, 256), (40, 48, 100), (3, 128, 70)):
        a, b = random(m, first), torch.randn(m, second)
        exact = torch.cat([a, b.to(HALF)], dim=1)
        wide, narrow = triton_concat.concat_quantize(a, b, 64.0, HALF, True)
        torch.testing.assert_close(wide, exact, rtol=0, atol=0)
        quantized(narrow, exact.double() * 64, 2.0**-4, 2.0**-9)
        (only,) = triton_concat.concat_quantize(a, b, 64.0, HALF, False)
        assert torch.equal(only.view(torch.uint8), narrow.view(torch.uint8))


def token_concat() -> None:
    """On either side of other tokens, and alone; FP32 is rounded as it is read."""
    for n, m, others, d in ((11, 26, 1, 24), (18, 5, 3, 16), (16, 16, 0, 16)):
        x, w, f = torch.randn(3, n, d), random(m, n, scale=n**-0.5), random(3, others, d)
        mix = torch.matmul(w.double(), x.to(HALF).double())
        for mix_first in (True, False):
            exact = torch.cat([mix, f.double()] if mix_first else [f.double(), mix], dim=1)
            beside = f if others else None
            wide, narrow = triton_token_concat.token_concat(x, w, beside, 64.0, HALF, mix_first, True, True)
            close(wide, exact, 2 * ULP, 4 * ULP)
            quantized(narrow, wide.double() * 64, 2.0**-4, 2.0**-9)
            (only,) = triton_token_concat.token_concat(x, w, beside, 0.0, HALF, mix_first, True, False)
            assert torch.equal(only, wide)
            (only,) = triton_token_concat.token_concat(x, w, beside, 64.0, HALF, mix_first, False, True)
            assert torch.equal(only.view(torch.uint8), narrow.view(torch.uint8))


def heads_of_one_product(
    sizes: tuple[int, int, int, int], batch: int = 2
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Q, Kᵀ and V as views of one tensor, as a merged projection leaves them; the first tokens ask."""
    heads, queries, keys, d = sizes
    tokens = max(queries, keys)
    merged = random(batch, tokens, 3 * heads * d)
    q, k, v = (part.unflatten(2, (heads, d)).transpose(1, 2) for part in merged.chunk(3, 2))
    return q[:, :, :queries], k[:, :, :keys].transpose(2, 3), v[:, :, :keys]


def attended(
    q: torch.Tensor, kt: torch.Tensor, v: torch.Tensor, added: torch.Tensor | float, scale: float
) -> torch.Tensor:
    """In float64, (batch, queries, heads, width); rows masked throughout are 0."""
    shares = torch.softmax(q.double() @ kt.double() * scale + added, dim=-1).nan_to_num(0.0)
    return (shares.to(HALF).double() @ v.double()).transpose(1, 2)


def attention() -> None:
    """Views of one product, and tensors whose last axis is not contiguous; tiles with and without padding."""
    for sizes in ((2, 2, 20, 16), (3, 70, 17, 24), (1, 16, 16, 16)):
        q, kt, v = heads_of_one_product(sizes)
        for given in ((q, kt, v), (q, kt.contiguous(), v.transpose(2, 3).contiguous().transpose(2, 3))):
            found = triton_attention.short_attention(*given, None, 0.3, False)
            assert found.is_contiguous()
            close(found, attended(q, kt, v, 0.0, 0.3), 2 * ULP, 4 * ULP)


def attention_masks() -> None:
    """Of keys and of every product, of one head or all; the second example is masked throughout."""
    batch, (heads, queries, keys, d) = 2, (2, 3, 20, 16)
    q, kt, v = heads_of_one_product((heads, queries, keys, d), batch)
    for shape in ((batch, 1, 1, keys), (1, heads, queries, keys), (batch, heads, queries, keys)):
        drop = torch.rand(shape) < 0.4
        drop[-1, ..., -1, :] = True
        lowest = torch.zeros(shape).masked_fill(drop, float("-inf"))
        exact = attended(q, kt, v, lowest.double(), 0.3)
        assert not exact[-1, -1].any() and exact[0, 0].abs().max() > 0.1
        for mask, is_dropped in ((drop, True), (~drop, False), (lowest.to(HALF), False)):
            found = triton_attention.short_attention(q, kt, v, mask, 0.3, is_dropped)
            close(found, exact, 2 * ULP, 4 * ULP)
        added = torch.randn(shape).to(HALF)
        found = triton_attention.short_attention(q, kt, v, added, 0.3, False)
        close(found, attended(q, kt, v, added.double(), 0.3), 2 * ULP, 4 * ULP)
    # The least number of BF16 swallows the products, so that such rows are uniform.
    least = torch.zeros(batch, 1, 1, keys, dtype=torch.float32)
    least[-1] = torch.finfo(torch.bfloat16).min
    found = triton_attention.short_attention(q, kt, v, least, 0.3, False)
    close(found[-1], v[-1].double().mean(1)[None].expand(queries, heads, d), 2 * ULP, 4 * ULP)


if __name__ == "__main__":
    torch.manual_seed(5)
    globals()[sys.argv[1]]()
