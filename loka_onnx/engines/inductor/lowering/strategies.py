"""Strategies that compute the FP8 products and the fused products of a lowered graph.

With one activation scale sₐ, and a weight scale s_b for all columns or for each::

    (A·sₐ)(B·s_b) + c = (A B)·sₐ·s_b + c

A product of the FP8 values, summed in FP32 and multiplied by the scales, therefore equals the product of the
dequantized factors; only the order of sums differs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from loka_onnx.engines.inductor.lowering.types import short_name
from loka_onnx.engines.inductor.lowering.values import along_axis

MULTIPLE = 16
"""Required divisor of K and N of cuBLASLt's FP8 products (`torch._scaled_mm`)."""
_OUTPUTS = (torch.float32, torch.bfloat16, torch.float16)
E4M3FN = torch.float8_e4m3fn
LIMIT = 448.0
"""Largest magnitude of E4M3FN."""


def to_float8(value: Tensor, scale: float) -> Tensor:
    """E4M3FN of value over scale, saturated (ONNX QuantizeLinear, but for a tie that 1/scale moves)."""
    return (value.to(torch.float32) * (1.0 / scale)).clamp(-LIMIT, LIMIT).to(E4M3FN)


@dataclass(frozen=True, eq=False)
class FloatProduct:
    """A product of FP8 factors, or of two factors of the result's type.

    Attributes:
        site: Name of the node.
        a: Left factor (…, M, K).
        scale_a: Its FP32 scale, of rank 0 or (M,) for each row; 1 for a factor that is not FP8.
        b: Right factor (…, K, N); a weight has contiguous columns, as cuBLASLt needs.
        scale_b: Its FP32 scale, of rank 0 or (N,) for each column.
        bias: Added to the result, (N,); or None.
        dtype: Element type of the result and the bias.
        scale: Product of both scales for each column, (N,), where it is precomputed.
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
    def is_float8(self) -> bool:
        """True if both factors are FP8."""
        return self.a.element_size() == self.b.element_size() == 1

    def swapped(self) -> FloatProduct:
        """Transposed product Bᵀ Aᵀ, without the bias, which would belong to the rows."""
        a, b = self.b.transpose(-1, -2), self.a.transpose(-1, -2)
        return replace(self, a=a, scale_a=self.scale_b, b=b, scale_b=self.scale_a, bias=None, scale=None)


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
        """True if x is x0."""
        return len(self.cross) > 0 and self.cross[0] is self.cross[1]

    @property
    def follows(self) -> bool:
        """True if there is more than the bias."""
        return self.relu or bool(self.cross) or self.scale is not None


@dataclass(frozen=True, eq=False)
class Multiplied:
    """A computed product.

    Attributes:
        outputs: The result, (…, M, N), or what its epilogue gives.
        kernel: ``scaled_mm`` or a strategy's own name; ``dequantized`` for FP8 factors multiplied as floats,
            ``dense`` for float factors.
        operands: Types of both factors.
        engaged: Whether these are FP8.
        reason: Reason why they are not although a factor is FP8, or a remark on how they are.
    """

    outputs: tuple[Tensor, ...]
    kernel: str
    operands: tuple[str, ...]
    engaged: bool
    reason: str = ""

    @classmethod
    def of(
        cls, values: Tensor, kernel: str, *factors: Tensor, engaged: bool = False, reason: str = ""
    ) -> Multiplied:
        """A product of some factors without an epilogue."""
        return cls((values,), kernel, tuple(short_name(each.dtype) for each in factors), engaged, reason)

    @property
    def values(self) -> Tensor:
        """The first output."""
        return self.outputs[0]


class ProductStrategy(ABC):
    """Computes products of FP8 factors; runs during tracing, so it must not read elements."""

    fuses_epilogue: ClassVar[bool] = False
    """True if one kernel computes the epilogue as well."""

    @abstractmethod
    def multiply(self, product: FloatProduct) -> Multiplied:
        """Compute a product, or fall back to `multiply_dequantized` with the reason."""

    def multiply_with(self, product: FloatProduct, epilogue: Epilogue) -> Multiplied:
        """Compute a product and its epilogue; by default as PyTorch operators."""
        done = self.multiply(product)
        return replace(done, outputs=epilogue.apply(done.values))


@dataclass(frozen=True)
class PerSite(ProductStrategy):
    """Strategies of single sites, and one for all others."""

    choices: Mapping[str, ProductStrategy]
    otherwise: ProductStrategy

    def multiply(self, product: FloatProduct) -> Multiplied:
        """Compute a product by the strategy of its site."""
        return self.choices.get(product.site, self.otherwise).multiply(product)

    def multiply_with(self, product: FloatProduct, epilogue: Epilogue) -> Multiplied:
        """Compute a product and its epilogue by the strategy of its site."""
        return self.choices.get(product.site, self.otherwise).multiply_with(product, epilogue)


@dataclass(frozen=True)
class ScaledMatMul(ProductStrategy):
    """`torch._scaled_mm`: cuBLASLt on CUDA, oneDNN on the CPU; `multiply_floats` where nothing is FP8.

    The scales of a per-channel weight are multiplied in by the product (row-wise scales, (M, 1) and (1, N)),
    whose result is BF16 then, on CUDA; elsewhere behind a product whose result is FP32.

    Attributes:
        fast_accumulation: Whether Hopper may keep fewer bits than FP32 of partial sums (``use_fast_accum``):
            faster, but less exact than the simulation that judged the plan.
    """

    fast_accumulation: bool = False

    def multiply(self, product: FloatProduct) -> Multiplied:
        """Compute a product; with the weight on the left, as its transpose (Bᵀ Aᵀ)ᵀ."""
        if not product.is_float8:
            return multiply_floats(product)
        turned = (
            product.a.dim() == 2
            and (product.b.dim() > 2 or product.scale_a.dim() > 0)
            and product.scale_b.dim() == 0
        )
        oriented = product.swapped() if turned else product
        reason = _why_not(oriented)
        if reason:
            return multiply_dequantized(product, reason)
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
        return Multiplied.of(values, "scaled_mm", product.a, product.b, engaged=True, reason=how)

    def _multiply_matrices(self, product: FloatProduct) -> Tensor:
        """Product of (M, K) and (K, N) with scales and bias, (M, N)."""
        bias, dtype = product.bias, product.dtype
        if product.scale_b.dim() == 0:
            # cuBLASLt adds a bias of the result's type, unless that is FP32.
            fused = bias if dtype is not torch.float32 else None
            values = self._scaled_mm(product, dtype, fused)
            return values if bias is None or fused is not None else values + bias
        if self._is_row_wise(product):
            m, n = product.a.shape[0], product.b.shape[1]
            spread = replace(
                product,
                # Inductor turns a constant of rank 0 into a number, which it expands but does not reshape.
                scale_a=product.scale_a.expand(m, 1).contiguous(),
                scale_b=product.scale_b.reshape(1, n),
            )
            return self._scaled_mm(spread, dtype, bias)
        unscaled = replace(product, scale_b=torch.ones_like(product.scale_a))
        values = self._scaled_mm(unscaled, torch.float32, None) * product.scale_b
        return (values if bias is None else values + bias).to(dtype)

    def _is_row_wise(self, product: FloatProduct) -> bool:
        return product.a.device.type == "cuda" and product.dtype is torch.bfloat16

    def _scaled_mm(self, product: FloatProduct, dtype: torch.dtype, bias: Tensor | None) -> Tensor:
        # Only cuBLASLt reads the flag; the CPU sums in FP32.
        fast = self.fast_accumulation and product.a.device.type == "cuda"
        return torch._scaled_mm(
            product.a,
            product.b,
            product.scale_a,
            product.scale_b,
            bias=bias,
            out_dtype=dtype,
            use_fast_accum=fast,
        )


def multiply_floats(product: FloatProduct) -> Multiplied:
    """Multiply factors of the result's type and add the bias."""
    values = torch.nn.functional.linear(product.a, product.b.transpose(-1, -2), product.bias)
    return Multiplied.of(values, "dense", product.a, product.b)


def multiply_dequantized(product: FloatProduct, reason: str) -> Multiplied:
    """Multiply ``values · scale`` of both factors as floats of the result's type."""
    a = product.a.to(torch.float32) * _beside(product.scale_a, product.a, -2)
    b = product.b.to(torch.float32) * _beside(product.scale_b, product.b, -1)
    a, b = a.to(product.dtype), b.to(product.dtype)
    values = torch.matmul(a, b)
    if product.bias is not None:
        values = values + product.bias
    return Multiplied.of(values, "dequantized", a, b, reason=reason)


def _beside(scale: Tensor, factor: Tensor, axis: int) -> Tensor:
    return scale if scale.dim() == 0 else along_axis(scale, axis % factor.dim(), factor.dim())


def _why_not(product: FloatProduct) -> str:
    """Reason why `torch._scaled_mm` cannot compute a product; empty when it can."""
    if product.b.dim() != 2 or product.a.dim() < 2:
        ranks = f"ranks {product.a.dim()} and {product.b.dim()}"
        return f"torch._scaled_mm multiplies by a matrix, these factors have {ranks}"
    if product.scale_a.dim():
        return "torch._scaled_mm takes one scale of a left factor that is not constant"
    k, n = product.b.shape
    if k % MULTIPLE or n % MULTIPLE:
        return f"K {k} and N {n} are not both multiples of {MULTIPLE}"
    if product.a.dtype == product.b.dtype == torch.float8_e5m2:
        return "torch._scaled_mm does not multiply E5M2 by E5M2"
    if product.dtype not in _OUTPUTS:
        return f"torch._scaled_mm gives no {short_name(product.dtype)}"
    return ""
