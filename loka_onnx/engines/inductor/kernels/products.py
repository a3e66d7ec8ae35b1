"""Products together with what follows them: by a library and the compiler, or in one kernel."""

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
    """What follows a product and needs no other element of it.

    Attributes:
        bias: Added first; part of the product where a library computes that.
        cross: x0 and x of a cross layer, of the shape of the product; none otherwise. In the first layer they
            are one tensor.
        relu: Whether negative values become 0.
        scale: Of the quantized output; None where there is none.
        is_wide: Whether there is an output that is not quantized.
    """

    bias: Tensor | None = None
    cross: tuple[Tensor, ...] = ()
    relu: bool = False
    scale: float | None = None
    is_wide: bool = True

    def apply(self, value: Tensor) -> tuple[Tensor, ...]:
        """All of it but the bias, for the compiler to fuse; the output that is not quantized comes first."""
        if self.relu:
            value = torch.relu(value)
        if self.cross:
            value = value * self.cross[0] + self.cross[1]
        wide = (value,) if self.is_wide else ()
        return wide if self.scale is None else (*wide, to_float8(value, self.scale))

    @property
    def is_first(self) -> bool:
        """Whether x is x0."""
        return len(self.cross) > 0 and self.cross[0] is self.cross[1]

    @property
    def follows(self) -> bool:
        """Whether anything follows but the bias."""
        return self.relu or bool(self.cross) or self.scale is not None

    def describe(self) -> str:
        """What it does, for a log; alike for alike kernels."""
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
    """A product and what follows it, computed.

    Attributes:
        outputs: As of `Epilogue.apply`.
        kernel: What computed it (`LoweredSite.kernel`).
        operands: Element types that were multiplied.
        engaged: Whether these are FP8.
        reason: Why not.
    """

    outputs: tuple[Tensor, ...]
    kernel: str
    operands: tuple[str, ...]
    engaged: bool
    reason: str = ""


class EpilogueStrategy(ProductStrategy):
    """A strategy that takes what follows a product along."""

    @abstractmethod
    def multiply_with(self, product: FloatProduct, epilogue: Epilogue) -> Finished:
        """Compute a product and what follows it."""


def library_with(library: ProductStrategy, product: FloatProduct, epilogue: Epilogue) -> Finished:
    """A product by a library, and what follows it as operators of PyTorch."""
    done = library.multiply(product)
    return Finished(
        epilogue.apply(done.values), done.kernel, done.operands, engaged=done.engaged, reason=done.reason
    )


@dataclass(frozen=True)
class Tile:
    """Division of a matrix product into programs.

    Attributes:
        rows: Rows of the output in one program.
        columns: Columns likewise.
        depth: Part of K in one step.
        stages: Steps that are loaded ahead.
        warps: Warps of one program.
        is_exact: Whether sums of FP8 products move to FP32 registers after each step: Hopper's tensor cores
            keep fewer bits of them.
        split: Parts of K that programs of their own multiply.
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
        """As the kernel takes it."""
        how = [int(self.is_exact), self.split]
        return [self.rows, self.columns, self.depth, self.stages, self.warps, *how]


@dataclass(frozen=True)
class TiledProduct(EpilogueStrategy):
    """The Triton kernel with the epilogue inside (`triton_product`); for CUDA.

    Attributes:
        tile: How it is cut.
        otherwise: What computes a product that the kernel does not take.
    """

    tile: Tile
    otherwise: ProductStrategy = field(default_factory=ScaledMatMul)

    def multiply(self, product: FloatProduct) -> Multiplied:
        """A product with nothing behind it that could be taken along: the library's."""
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
            # A tied weight may be stored the other way round; else this is free.
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
