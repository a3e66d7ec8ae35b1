"""Products by the Triton kernel, and FP8 products by operators of other packages (`operator_packages`).

With A (M, K), B (K, N), scales sₐ of A or of its rows and s_b of B or of its columns, and a bias c, a
package's operator with a scale for each row and column computes ``(A B)·sₐ·s_b + c`` from A, Bᵀ and the rest;
one with a single scale takes the product sₐ·s_b, and c is added to its result. Both give BF16.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from loka_onnx.engines.inductor.lowering.strategies import (
    MULTIPLE,
    Epilogue,
    FloatProduct,
    Multiplied,
    ProductStrategy,
    ScaledMatMul,
)
from loka_onnx.engines.inductor.lowering.types import short_name
from loka_onnx.engines.inductor.operator_packages import FoundPackage, PackageOperator

DEPTHS, COLUMNS = 16, 8
"""Required divisors of K and N of packages' kernels, which read 16 bytes of FP8 along K and write 16 bytes of
BF16 along N."""


@dataclass(frozen=True)
class Tile:
    """Division of a matrix product into programs.

    Attributes:
        depth: Part of K in one step.
        stages: Steps that are loaded ahead.
        is_exact: Whether FP8 sums move to FP32 registers after each step: Hopper's tensor cores keep fewer
            bits.
        split: Parts of K, each multiplied by its own program.
    """

    rows: int
    columns: int
    depth: int
    stages: int
    warps: int
    is_exact: bool = False
    split: int = 1

    def __str__(self) -> str:
        parts = f"/{self.split}" if self.split > 1 else ""
        size = f"{self.rows}x{self.columns}x{self.depth}{parts}-{self.stages}-{self.warps}"
        return f"{size}-exact" if self.is_exact else size

    def numbers(self) -> list[int]:
        """Return the numbers that the kernel takes."""
        how = [int(self.is_exact), self.split]
        return [self.rows, self.columns, self.depth, self.stages, self.warps, *how]


@dataclass(frozen=True)
class TiledProduct(ProductStrategy):
    """The Triton kernel with its epilogue (`triton_product`), or the library; for CUDA."""

    fuses_epilogue: ClassVar[bool] = True
    tile: Tile

    def multiply(self, product: FloatProduct) -> Multiplied:
        """Multiply by the library: there is no epilogue."""
        return ScaledMatMul().multiply(product)

    def multiply_with(self, product: FloatProduct, epilogue: Epilogue) -> Multiplied:
        """See `ProductStrategy.multiply_with`."""
        if not product.a.is_cuda or any(length % MULTIPLE for length in product.b.shape):
            return super().multiply_with(product, epilogue)
        from loka_onnx.engines.inductor.kernels import triton_product as kernel

        k, n = product.b.shape
        lead, tile = product.a.shape[:-1], self.tile
        read = epilogue.cross[:1] if epilogue.is_first else epilogue.cross
        x0, x = (*(each.reshape(-1, n).contiguous() for each in read), None, None)[:2]
        outputs = kernel.product(
            product.a.reshape(-1, k).contiguous(),
            # Free, unless a tied weight is stored in the other layout.
            product.b.t().contiguous(),
            product.column_scale() if product.is_float8 else None,
            epilogue.bias,
            x0,
            x,
            0.0 if epilogue.scale is None else 1.0 / epilogue.scale,
            epilogue.relu,
            product.dtype if epilogue.is_wide else None,
            tile.numbers(),
        )
        operands = (short_name(product.a.dtype), short_name(product.b.dtype))
        shaped = tuple(each.reshape(*lead, n) for each in outputs)
        return Multiplied(shaped, f"triton {tile}", operands, engaged=product.is_float8)


@dataclass(frozen=True)
class PackageProduct(ProductStrategy):
    """An operator of a package; the library for products that it does not take."""

    found: FoundPackage
    operator: PackageOperator
    fast_accumulation: bool

    @property
    def name(self) -> str:
        """PyTorch's name of the operator."""
        return f"{self.found.package.namespace}::{self.operator.name}"

    def multiply(self, product: FloatProduct) -> Multiplied:
        """See `ProductStrategy.multiply`."""
        if self.why_not(product):
            return ScaledMatMul().multiply(product)
        k, n = product.b.shape
        rows = product.a.reshape(-1, k).contiguous()
        values = self._call(product, rows, product.b.t().contiguous())
        return Multiplied.of(
            values.reshape(*product.a.shape[:-1], n), self.name, product.a, product.b, engaged=True
        )

    def _call(self, product: FloatProduct, rows: Tensor, weight: Tensor) -> Tensor:
        operators = getattr(torch.ops, self.found.package.namespace)
        operator = getattr(operators, self.operator.name).default
        bias, fast = product.bias, self.fast_accumulation
        values: Tensor
        if not self.operator.per_channel:
            values = operator(rows, weight, product.scale_a * product.scale_b, fast)
            return values if bias is None else values + bias
        # The kernels read contiguous scales for rows and columns, and a bias in FP32.
        row_scales = product.scale_a.expand(rows.shape[0]).contiguous()
        column_scales = product.scale_b.expand(weight.shape[0]).contiguous()
        wide = None if bias is None else bias.to(torch.float32)
        values = operator(rows, weight, row_scales, column_scales, wide, fast)
        return values

    def why_not(self, product: FloatProduct) -> str:
        """Reason why the operator does not take a product; empty when it does."""
        if self.found.obstacle:
            return self.found.obstacle
        if product.b.dim() != 2 or product.a.dim() < 2:
            return f"{self.name} multiplies by a matrix, of ranks {product.a.dim()} and {product.b.dim()}"
        if any(factor.dtype is not torch.float8_e4m3fn for factor in (product.a, product.b)):
            return f"{self.name} multiplies E4M3FN only"
        if product.dtype is not torch.bfloat16:
            return f"{self.name} gives BF16, the result is {short_name(product.dtype)}"
        k, n = product.b.shape
        if k % DEPTHS or n % COLUMNS:
            return f"K {k} is no multiple of {DEPTHS}, or N {n} none of {COLUMNS}"
        return self._why_not_scales(product) or self._why_not_device(product)

    def _why_not_scales(self, product: FloatProduct) -> str:
        if not self.operator.per_channel and (product.scale_a.dim() or product.scale_b.dim()):
            return f"{self.name} takes one scale for each factor"
        if product.scale_a.dim() and product.a.dim() > 2:
            return f"{self.name} takes a scale for each row of a matrix, not of a stack"
        return ""

    def _why_not_device(self, product: FloatProduct) -> str:
        if not product.a.is_cuda:
            return ""
        major, minor = torch.cuda.get_device_capability(product.a.device)
        if 10 * major + minor in self.operator.capabilities:
            return ""
        known = ", ".join(f"sm{each}" for each in self.operator.capabilities)
        return f"{self.name} has kernels for {known}, here is sm{10 * major + minor}"
