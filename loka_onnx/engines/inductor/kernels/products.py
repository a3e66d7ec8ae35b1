"""Products with their epilogues: by a library and the compiler, or in one kernel."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, field

import torch
from torch import Tensor

from loka_onnx.engines.inductor.lowering.strategies import (
    MULTIPLE,
    FloatProduct,
    Multiplied,
    ProductStrategy,
    ScaledMatMul,
)
from loka_onnx.engines.inductor.lowering.types import short_name

E4M3FN = torch.float8_e4m3fn
LIMIT = 448.0
"""Largest magnitude of E4M3FN."""


def to_float8(value: Tensor, scale: float) -> Tensor:
    """E4M3FN of value over scale, saturated (ONNX QuantizeLinear, but for a tie that 1/scale moves)."""
    return (value.to(torch.float32) * (1.0 / scale)).clamp(-LIMIT, LIMIT).to(E4M3FN)


@dataclass(frozen=True, eq=False)
class Epilogue:
    """Elementwise operators behind a product.

    Attributes:
        bias: Added first; a library adds it within the product.
        cross: x0 and x of a cross layer, with the shape of the product, or empty. Both are one tensor in the
            first layer.
        relu: Whether negative values become 0.
        scale: Scale of the quantized output; None: there is none.
        is_wide: Whether there is an output in the base precision.
    """

    bias: Tensor | None = None
    cross: tuple[Tensor, ...] = ()
    relu: bool = False
    scale: float | None = None
    is_wide: bool = True

    def apply(self, value: Tensor) -> tuple[Tensor, ...]:
        """Apply all but the bias, for the compiler to fuse; the output in the base precision comes first."""
        if self.relu:
            value = torch.relu(value)
        if self.cross:
            value = value * self.cross[0] + self.cross[1]
        wide = (value,) if self.is_wide else ()
        return wide if self.scale is None else (*wide, to_float8(value, self.scale))

    @property
    def is_first(self) -> bool:
        """Tell whether x is x0."""
        return len(self.cross) > 0 and self.cross[0] is self.cross[1]

    @property
    def follows(self) -> bool:
        """Tell whether there is more than the bias."""
        return self.relu or bool(self.cross) or self.scale is not None

    def describe(self) -> str:
        """Return a name for logs; equal for equal kernels."""
        parts = [
            "bias" if self.bias is not None else "",
            "relu" if self.relu else "",
            "" if not self.cross else "first cross" if self.is_first else "cross",
            "wide" if self.is_wide else "",
            "quantize" if self.scale is not None else "",
        ]
        return "+".join(filter(None, parts))


@dataclass(frozen=True, eq=False)
class Finished:
    """A computed product with its epilogue."""

    outputs: tuple[Tensor, ...]
    kernel: str
    operands: tuple[str, ...]
    engaged: bool
    reason: str = ""


class EpilogueStrategy(ProductStrategy):
    """A strategy that computes the epilogue as well."""

    @abstractmethod
    def multiply_with(self, product: FloatProduct, epilogue: Epilogue) -> Finished:
        """Compute a product and its epilogue."""


def library_with(library: ProductStrategy, product: FloatProduct, epilogue: Epilogue) -> Finished:
    """Multiply by a library and apply the epilogue as PyTorch operators."""
    done = library.multiply(product)
    return Finished(
        epilogue.apply(done.values), done.kernel, done.operands, engaged=done.engaged, reason=done.reason
    )


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
class TiledProduct(EpilogueStrategy):
    """The Triton kernel with the epilogue inside (`triton_product`), for CUDA; `otherwise` computes products
    that it does not take.
    """

    tile: Tile
    otherwise: ProductStrategy = field(default_factory=ScaledMatMul)

    def multiply(self, product: FloatProduct) -> Multiplied:
        """Multiply by the library: there is no epilogue."""
        return self.otherwise.multiply(product)

    def multiply_with(self, product: FloatProduct, epilogue: Epilogue) -> Finished:
        """See `EpilogueStrategy.multiply_with`."""
        if not product.a.is_cuda or any(length % MULTIPLE for length in product.b.shape):
            return library_with(self.otherwise, product, epilogue)
        from loka_onnx.engines.inductor.kernels import triton_product as kernel

        k, n = product.b.shape
        lead, tile = product.a.shape[:-1], self.tile
        read = epilogue.cross[:1] if epilogue.is_first else epilogue.cross
        x0, x = (*(each.reshape(-1, n).contiguous() for each in read), None, None)[:2]
        made = kernel.product(
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
        outputs = tuple(each.reshape(*lead, n) for each in made)
        operands = (short_name(product.a.dtype), short_name(product.b.dtype))
        return Finished(outputs, f"triton {tile}", operands, engaged=product.is_float8)
