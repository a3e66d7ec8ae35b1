"""Strategies that compute the FP8 and INT8 products and the fused products of a lowered graph.

With one activation scale sₐ, and a weight scale s_b for all columns or for each::

    (A·sₐ)(B·s_b) + c = (A B)·sₐ·s_b + c

A product of the FP8 values, summed in FP32 and multiplied by the scales, therefore equals the product of the
dequantized factors; only the order of sums differs. INT8 values are summed in INT32, exactly.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from loka_onnx.engines.inductor.fusions.products import MULTIPLE
from loka_onnx.engines.inductor.lowering.values import along_axis, saturated, short_name
from loka_onnx.engines.inductor.package import CompiledSite
from loka_onnx.engines.tuned_kernels import integer_sums, simulated_mm

_OUTPUTS = (torch.float32, torch.bfloat16, torch.float16)


LONGEST_K = 1 << 17
"""K from which a sum of products of INT8 may exceed INT32: 2³¹ / (128 · 128)."""


def quantized(value: Tensor, scale: float, target: torch.dtype) -> Tensor:
    """Value over scale in eight bits (ONNX QuantizeLinear, but for a tie that 1/scale moves)."""
    return saturated(value.to(torch.float32) * (1.0 / scale), target)


@dataclass(frozen=True, eq=False)
class Factors:
    """A product of FP8 or INT8 factors, or of two factors of the result's type; `site` names its node.

    `a` is (…, M, K) and `b` (…, K, N); a weight has contiguous columns, as cuBLASLt needs. Their FP32 scales
    have rank 0, or are (M,) for each row and (N,) for each column; 1 for a factor that is not quantized.
    `bias` (N,), if any, is added to the result and has its type, `dtype`. `scale` (N,) is the product of both
    scales for each column, where it is precomputed.
    """

    site: str
    a: Tensor
    scale_a: Tensor
    b: Tensor
    scale_b: Tensor
    bias: Tensor | None
    dtype: torch.dtype
    scale: Tensor | None = None

    def column_scale(self) -> Tensor:
        """Product of both scales for each column, (N,) contiguous; the left factor must have one scale."""
        if self.scale is not None:
            return self.scale
        return (self.scale_a * self.scale_b).expand(self.b.shape[1]).contiguous()

    @property
    def is_quantized(self) -> bool:
        """True if both factors have eight bits."""
        return self.a.element_size() == self.b.element_size() == 1

    @property
    def is_integer(self) -> bool:
        """True if both factors are INT8."""
        return self.a.dtype == self.b.dtype == torch.int8

    @property
    def may_overflow(self) -> bool:
        """True if INT32 may not hold a sum of INT8 products."""
        return self.is_integer and self.b.shape[-2] >= LONGEST_K

    def swapped(self) -> Factors:
        """Transposed product Bᵀ Aᵀ, without the bias, which would belong to the rows."""
        a, b = self.b.transpose(-1, -2), self.a.transpose(-1, -2)
        return replace(self, a=a, scale_a=self.scale_b, b=b, scale_b=self.scale_a, bias=None, scale=None)


@dataclass(frozen=True, eq=False)
class Epilogue:
    """Elementwise operators behind a product and its bias: with `relu`, negative values become 0, or `slope`
    times the value; `cross` are x0 and x of a cross layer, with the shape of the product, one tensor in the
    first layer. Outputs are in the base precision if `is_wide`, and in `narrow` if it has a `scale`.
    """

    cross: tuple[Tensor, ...] = ()
    relu: bool = False
    slope: float = 0.0
    scale: float | None = None
    narrow: torch.dtype = torch.float8_e4m3fn
    is_wide: bool = True

    def apply(self, value: Tensor) -> tuple[Tensor, ...]:
        """Apply it, for the compiler to fuse; the output in the base precision comes first."""
        if self.relu:
            value = functional.leaky_relu(value, self.slope) if self.slope else torch.relu(value)
        if self.cross:
            value = value * self.cross[0] + self.cross[1]
        wide = (value,) if self.is_wide else ()
        return wide if self.scale is None else (*wide, quantized(value, self.scale, self.narrow))

    @property
    def is_first(self) -> bool:
        """True if x is x0."""
        return len(self.cross) > 0 and self.cross[0] is self.cross[1]

    @property
    def follows(self) -> bool:
        """True if there is more than the bias."""
        return self.relu or bool(self.cross) or self.scale is not None


class Multiplied(NamedTuple):
    """A computed product: outputs of its epilogue, or the result (…, M, N) alone, and how it was computed."""

    outputs: tuple[Tensor, ...]
    site: CompiledSite

    @property
    def values(self) -> Tensor:
        """The first output."""
        return self.outputs[0]


def compiled_site(
    site: str, kernel: str, *factors: Tensor, engaged: bool = False, reason: str = ""
) -> CompiledSite:
    """Describe a product of some factors."""
    return CompiledSite(site, kernel, tuple(short_name(each.dtype) for each in factors), engaged, reason)


class ProductStrategy(ABC):
    """Computes products of quantized factors; runs during tracing, so it must not read elements."""

    fuses_epilogue: ClassVar[bool] = False
    """True if one kernel computes the epilogue as well."""

    @abstractmethod
    def multiply(self, product: Factors, epilogue: Epilogue | None = None) -> Multiplied:
        """Compute a product and the epilogue of a fused one."""


@dataclass(frozen=True)
class PerSite(ProductStrategy):
    """Strategies of single sites, and one for all others."""

    choices: Mapping[str, ProductStrategy]
    otherwise: ProductStrategy

    def multiply(self, product: Factors, epilogue: Epilogue | None = None) -> Multiplied:
        """Compute a product by the strategy of its site."""
        return self.choices.get(product.site, self.otherwise).multiply(product, epilogue)


@dataclass(frozen=True)
class ScaledMatMul(ProductStrategy):
    """A library's product: `torch._scaled_mm` of FP8 and `torch._int_mm` of INT8 on CUDA, `simulated_mm` on
    the CPU; a dense product where nothing is quantized.

    The scales of a per-channel weight are multiplied in by the product (row-wise scales, (M, 1) and (1, N)),
    whose result is BF16 then, on CUDA; elsewhere behind a product whose result is FP32. With
    `fast_accumulation` (``use_fast_accum``) Hopper keeps fewer bits than FP32 of partial sums: faster, but
    less exact than the simulation that judged the plan.
    """

    fast_accumulation: bool = False

    def multiply(self, product: Factors, epilogue: Epilogue | None = None) -> Multiplied:
        """Compute a product, with the epilogue as PyTorch operators."""
        values, site = self._product(product)
        return Multiplied((values,) if epilogue is None else epilogue.apply(values), site)

    def _product(self, product: Factors) -> tuple[Tensor, CompiledSite]:
        """Compute a product; with the weight on the left, as its transpose (Bᵀ Aᵀ)ᵀ."""
        if not product.is_quantized:
            values = torch.nn.functional.linear(product.a, product.b.transpose(-1, -2), product.bias)
            return values, compiled_site(product.site, "dense", product.a, product.b)
        can_turn = product.a.dim() == 2 and product.scale_b.dim() == 0
        turned = can_turn and (product.b.dim() > 2 or product.scale_a.dim() > 0)
        oriented = product.swapped() if turned else product
        if reason := _why_not(oriented):
            return _multiply_dequantized(product, reason)
        k, n = oriented.b.shape
        rows = oriented.a.reshape(-1, k).contiguous()
        # K of (K, N) must be contiguous; weights are stored so, and are not copied.
        columns = oriented.b.t().contiguous().t()
        values = self._multiply_matrices(replace(oriented, a=rows, b=columns))
        values = values.reshape(*oriented.a.shape[:-1], n)
        if turned:
            values = values.transpose(-1, -2)
            values = values if product.bias is None else values + product.bias
        how = "weight on the left: the transposed product is computed" if turned else ""
        kernel = _call(product).removeprefix("torch._") if product.a.is_cuda else "simulated"
        site = compiled_site(product.site, kernel, product.a, product.b, engaged=True, reason=how)
        return values, site

    def _multiply_matrices(self, product: Factors) -> Tensor:
        """Product of (M, K) and (K, N) with scales and bias, (M, N)."""
        bias, dtype = product.bias, product.dtype
        if product.is_integer and product.a.is_cuda:
            values = integer_sums(product.a, product.b).to(torch.float32) * product.column_scale()
            return (values if bias is None else values + bias).to(dtype)
        if product.scale_b.dim() == 0:
            # cuBLASLt adds a bias of the result's type, unless that is FP32.
            fused = bias if dtype is not torch.float32 else None
            values = self._scaled_mm(product, dtype, fused)
            return values if bias is None or fused is not None else values + bias
        if self._is_row_wise(product):
            # Inductor turns a constant of rank 0 into a number, which it expands but does not reshape.
            scale_a = product.scale_a.expand(product.a.shape[0], 1).contiguous()
            scale_b = product.scale_b.reshape(1, product.b.shape[1])
            return self._scaled_mm(replace(product, scale_a=scale_a, scale_b=scale_b), dtype, bias)
        unscaled = replace(product, scale_b=torch.ones_like(product.scale_a))
        values = self._scaled_mm(unscaled, torch.float32, None) * product.scale_b
        return (values if bias is None else values + bias).to(dtype)

    def _is_row_wise(self, product: Factors) -> bool:
        return product.a.is_cuda and product.dtype is torch.bfloat16

    def _scaled_mm(self, product: Factors, dtype: torch.dtype, bias: Tensor | None) -> Tensor:
        operands = (product.a, product.b, product.scale_a, product.scale_b)
        if not product.a.is_cuda:
            return simulated_mm(*operands, bias, dtype)
        fast = self.fast_accumulation
        return torch._scaled_mm(*operands, bias=bias, out_dtype=dtype, use_fast_accum=fast)


def _multiply_dequantized(product: Factors, reason: str) -> tuple[Tensor, CompiledSite]:
    """Multiply ``values · scale`` of both factors as floats of the result's type."""
    a = product.a.to(torch.float32) * _beside(product.scale_a, product.a, -2)
    b = product.b.to(torch.float32) * _beside(product.scale_b, product.b, -1)
    a, b = a.to(product.dtype), b.to(product.dtype)
    values = torch.matmul(a, b)
    if product.bias is not None:
        values = values + product.bias
    return values, compiled_site(product.site, "dequantized", a, b, reason=reason)


def _beside(scale: Tensor, factor: Tensor, axis: int) -> Tensor:
    return scale if scale.dim() == 0 else along_axis(scale, axis % factor.dim(), factor.dim())


def _why_not(product: Factors) -> str:
    """Reason why the library's call cannot compute a product; empty when it can."""
    call, multiple = _call(product), 8 if product.is_integer else MULTIPLE
    if product.b.dim() != 2 or product.a.dim() < 2:
        ranks = f"ranks {product.a.dim()} and {product.b.dim()}"
        return f"{call} multiplies by a matrix, these factors have {ranks}"
    if product.scale_a.dim():
        return f"{call} takes one scale of a left factor that is not constant"
    k, n = product.b.shape
    if k % multiple or n % multiple or product.may_overflow:
        sums = f"sums of K {k} products may exceed INT32"
        return sums if product.may_overflow else f"K {k} and N {n} are not both multiples of {multiple}"
    kinds = {product.a.dtype, product.b.dtype}
    if kinds == {torch.float8_e5m2} or (torch.int8 in kinds and not product.is_integer):
        return f"{call} does not multiply {' by '.join(map(short_name, (product.a.dtype, product.b.dtype)))}"
    if product.dtype not in _OUTPUTS:
        return f"{call} gives no {short_name(product.dtype)}"
    return ""


def _call(product: Factors) -> str:
    return "torch._int_mm" if product.is_integer else "torch._scaled_mm"


@dataclass(frozen=True)
class Tile:
    """Division of a matrix product into programs: `depth` is the part of K in one step, `stages` the steps
    that are loaded ahead, `split` the parts of K, each multiplied by its own program. With `is_exact`, FP8
    sums move to FP32 registers after each step; Hopper's tensor cores round them.
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
        """The tile as the kernel takes it."""
        how = [int(self.is_exact), self.split]
        return [self.rows, self.columns, self.depth, self.stages, self.warps, *how]


@dataclass(frozen=True)
class TiledProduct(ProductStrategy):
    """The Triton kernel with its epilogue (`triton_product`), or the library; for CUDA."""

    fuses_epilogue: ClassVar[bool] = True
    tile: Tile

    def multiply(self, product: Factors, epilogue: Epilogue | None = None) -> Multiplied:
        """Compute a product with an epilogue by the kernel if its sizes allow; any other by the library."""
        is_multiple = not any(length * product.b.element_size() % MULTIPLE for length in product.b.shape)
        if epilogue is None or not product.a.is_cuda or not is_multiple or product.may_overflow:
            return ScaledMatMul().multiply(product, epilogue)
        from loka_onnx.engines.inductor.kernels import triton_product as kernel

        k, n = product.b.shape
        lead, tile = product.a.shape[:-1], self.tile
        read = epilogue.cross[:1] if epilogue.is_first else epilogue.cross
        x0, x = (*(each.reshape(-1, n).contiguous() for each in read), None, None)[:2]
        outputs = kernel.product(
            product.a.reshape(-1, k).contiguous(),
            # Free, unless a tied weight is stored in the other layout.
            product.b.t().contiguous(),
            product.column_scale() if product.is_quantized else None,
            product.bias,
            x0,
            x,
            0.0 if epilogue.scale is None else 1.0 / epilogue.scale,
            epilogue.relu,
            epilogue.slope,
            product.dtype if epilogue.is_wide else None,
            epilogue.narrow,
            tile.numbers(),
        )
        how, factors = f"triton {tile}", (product.a, product.b)
        site = compiled_site(product.site, how, *factors, engaged=product.is_quantized)
        return Multiplied(tuple(each.reshape(*lead, n) for each in outputs), site)
