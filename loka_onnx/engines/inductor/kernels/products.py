"""Products by the Triton kernel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from loka_onnx.engines.inductor.lowering.strategies import (
    MULTIPLE,
    Epilogue,
    FloatProduct,
    Multiplied,
    ProductStrategy,
    ScaledMatMul,
)
from loka_onnx.engines.inductor.lowering.types import short_name


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
