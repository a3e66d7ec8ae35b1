"""Arguments of the Triton kernels, drawn at random, and their results in float64; on a CPU or a GPU.

The kernels round an inner product to the base precision, as the graph does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

FP8 = torch.float8_e4m3fn
ENDS = ("plain", "bias", "bias, relu", "bias, relu, leaky", "bias, cross", "bias, first cross")
"""Epilogues of products."""


@dataclass(frozen=True)
class Draw:
    """Random tensors of a type on a device."""

    base: Any
    device: str = "cuda"

    def __call__(self, *shape: int, scale: float = 1.0, base: Any = None) -> Any:
        return (torch.randn(*shape, device=self.device) * scale).to(base or self.base)


def layer_norm(z: Any, gamma: Any, beta: Any) -> Any:
    centred = z - z.mean(-1, keepdim=True)
    return centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt() * gamma.double() + beta.double()


def interaction(draw: Draw, shape: tuple[int, int, int], batch: int = 7) -> tuple[tuple[Any, ...], Any]:
    n, d, k = shape
    x, y = draw(batch, n, d), draw(n, k, scale=n**-0.5)
    gamma, beta = draw(n * k), draw(n * k)
    p = torch.einsum("bnd,nk->bdk", x.double(), y.double()).to(draw.base).double()
    s = torch.einsum("bnd,bdk->bnk", x.double(), p).reshape(batch, -1)
    return (x, y, gamma, beta), layer_norm(s, gamma, beta)


def residual(draw: Draw, shape: tuple[int, int, int], batch: int = 7) -> tuple[tuple[Any, ...], Any]:
    n, d, later = shape
    x, f, w = draw(batch, n, d), draw(batch, n - later, d), draw(later, n, scale=n**-0.5)
    gamma, beta = draw(d), draw(d)
    mix = torch.einsum("ln,bnd->bld", w.double(), x.double())
    return (x, f, w, gamma, beta), layer_norm(torch.cat([f.double(), mix], 1) + x.double(), gamma, beta)


def tokens(draw: Draw, sizes: tuple[int, int, int, int], mix_first: bool, batch: int = 7) -> tuple[Any, Any]:
    """X is in FP32, which the kernel rounds as it is read; without other tokens F is None."""
    n, m, others, d = sizes
    x, w, f = draw(batch, n, d, base=torch.float32), draw(m, n, scale=n**-0.5), draw(batch, others, d)
    mix = torch.matmul(w.double(), x.to(draw.base).double())
    exact = torch.cat([mix, f.double()] if mix_first else [f.double(), mix], dim=1)
    return (x, w, f if others else None), exact


@dataclass(frozen=True)
class Product:
    """Factors, scale, bias, x0 and x of a product."""

    arguments: tuple[Any, ...]
    exact: Any
    slope: float | None
    base: Any

    @classmethod
    def of(
        cls, draw: Draw, shape: tuple[int, int, int], ends: str, *, float8: bool = True, integer: bool = False
    ) -> Product:
        m, n, k = shape
        a, b, scale = draw(m, k), draw(n, k, scale=k**-0.5), None
        if float8:
            a, b = draw(m, k, scale=60.0, base=FP8), draw(n, k, scale=60.0, base=FP8)
            scale = (torch.rand(n, device=draw.device) + 1.0) / (60 * 60 * k**0.5)
        if integer:
            a, b = (
                torch.randint(-128, 128, (rows, k), dtype=torch.int8, device=draw.device) for rows in (m, n)
            )
            scale = (torch.rand(n, device=draw.device) + 1.0) / (74 * 74 * k**0.5)
        bias = draw(n) if "bias" in ends else None
        x0 = draw(m, n) if "cross" in ends else None
        x = None if "first" in ends or x0 is None else draw(m, n)
        z = a.double() @ b.double().t()
        z = z if scale is None else z * scale.double()
        z = z if bias is None else z + bias.double()
        slope = None if "relu" not in ends else 0.25 if "leaky" in ends else 0.0
        z = z if slope is None else torch.where(z > 0, z, z * slope)
        z = z if x0 is None else x0.double() * z + (x0 if x is None else x).double()
        return cls((a, b, scale, bias, x0, x), z, slope, draw.base)

    def run(
        self,
        kernel: Callable[..., Any],
        tile: Any,
        inverse_scale: float = 0.0,
        *,
        wide: bool = True,
        narrow: Any = FP8,
    ) -> Any:
        relu = (self.slope is not None, self.slope or 0.0)
        ends = (inverse_scale, *relu, self.base if wide else None, narrow, list(tile))
        return kernel(*self.arguments, *ends)


def heads_of_one_product(draw: Draw, sizes: tuple[int, int, int, int], batch: int) -> tuple[Any, Any, Any]:
    """Q, Kᵀ and V as views of one tensor, as a merged projection leaves them; the first tokens ask."""
    heads, queries, keys, d = sizes
    merged = draw(batch, max(queries, keys), 3 * heads * d)
    q, k, v = (part.unflatten(2, (heads, d)).transpose(1, 2) for part in merged.chunk(3, 2))
    return q[:, :, :queries], k[:, :, :keys].transpose(2, 3), v[:, :, :keys]
