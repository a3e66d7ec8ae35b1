"""Kernels that are timed, and their operands.

They are those of the ``inductor`` backend's engines: `torch.matmul` in BF16, `torch._scaled_mm` in FP8
(cuBLASLt on NVIDIA, hipBLASLt on AMD), `torch._int_mm` in INT8 with the scaling of its sums (both
`simulated_mm` on the CPU), and the cast of an activation to either. Work that an engine does once at build
time is not timed: rounding weights, making K contiguous, and shaping scales for the library.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import cycle
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from loka_onnx.core.devices import CPU
from loka_onnx.core.formats import E4M3FN, E4M3FNUZ, INT8, NumberFormat, Precision
from loka_onnx.core.recipe import Granularity
from loka_onnx.core.timing import QUANTIZE, Kernel, Shape

if TYPE_CHECKING:
    import torch

BACKEND, ROW_WISE, FAST = "inductor", "scaled_mm-row_wise", "-fast"
"""Backend whose kernels are timed; product with scales (M, 1) and (1, N); suffix of kernels that may sum in
fewer bits than FP32 (``use_fast_accum``)."""
INTEGER = "int_mm"
"""INT8 product with scales (1, N)."""
LEAST_ROWS = 16
"""`torch._int_mm` takes more rows than this."""
CACHE_BYTES, SMALL_BYTES = 64 << 20, 1 << 20
"""Larger than a GPU's L2 cache (50 MB on an H100); weight that loads in a fraction of a microsecond."""

Run = Callable[[], "torch.Tensor"]


@dataclass(frozen=True)
class Operands:
    """FP32 operands (M, K) and (K, N) of a product; without a weight, the activation alone is quantized."""

    activation: npt.NDArray[np.float32]
    weight: npt.NDArray[np.float32] | None

    @classmethod
    def generated(cls, shape: Shape, seed: int) -> Operands:
        """Standard normal values; the weight is divided by √K, so that the product has variance 1."""
        random = np.random.default_rng([seed, shape.m, shape.n, shape.k])
        activation = random.standard_normal((shape.m, shape.k), dtype=np.float32)
        if shape.n == 0:
            return cls(activation, None)
        weight = random.standard_normal((shape.k, shape.n), dtype=np.float32)
        return cls(activation, weight * np.float32(shape.k**-0.5))

    @property
    def shape(self) -> Shape:
        """Of the product."""
        rows, k = self.activation.shape
        return Shape(rows, 0 if self.weight is None else self.weight.shape[1], k)


def copies_in_turn(weight_bytes: int) -> int:
    """Number of copies of a weight that exceed a GPU's cache; 1 for a small weight. An engine reads a large
    weight from memory in every request, while the activation was just written.
    """
    return 1 if weight_bytes < SMALL_BYTES else -(-CACHE_BYTES // weight_bytes)


def calls_in_turn(least: int, copies: int) -> int:
    """Number of calls in a CUDA graph: at least `least`, and equally many for each copy of the weight, so
    that no replay starts with copies that are still in the cache.
    """
    return copies * -(-least // copies)


def kernels_of(device: str) -> tuple[Kernel, ...]:
    """Kernels that are timed on a device (as run files name it); the quantize steps are last."""
    # The CPU always sums in FP32.
    endings = ("",) if device == CPU else ("", FAST)
    float8 = (
        Kernel(device, BACKEND, f"{name}{ending}", Precision.FP8, scales)
        for name, scales in (("scaled_mm", Granularity.PER_TENSOR), (ROW_WISE, Granularity.PER_CHANNEL))
        for ending in endings
    )
    wide = Kernel(device, BACKEND, "mm", Precision.BF16)
    integer = Kernel(device, BACKEND, INTEGER, Precision.INT8, Granularity.PER_CHANNEL)
    casts = (Kernel(device, BACKEND, QUANTIZE, precision) for precision in (Precision.INT8, Precision.FP8))
    return (wide, *float8, integer, *casts)


def turns_of(kernel: Kernel, shape: Shape, torch_device: str) -> int:
    """Calls until every copy of a kernel's weight was used (`copies_in_turn`); 1 on the CPU."""
    if kernel.name == QUANTIZE or torch_device == CPU:
        return 1
    return copies_in_turn((1 if kernel.precision.is_quantized else 2) * shape.k * shape.n)


class PreparedOperands:
    """Operands on a device of torch."""

    def __init__(self, operands: Operands, torch_device: str) -> None:
        import torch

        self.shape, self._device = operands.shape, torch_device
        self._activation = torch.tensor(operands.activation, device=torch_device)
        self._wide_activation = self._activation.bfloat16()
        self._stored = None if operands.weight is None else torch.tensor(operands.weight, device=torch_device)

    def run_of(self, kernel: Kernel) -> Run:
        """Return a function that calls a kernel once, with the next of `turns_of` copies of its weight."""
        import torch

        turns = turns_of(kernel, self.shape, self._device)
        if kernel.name == QUANTIZE:
            value, inverse = self._wide_activation, self._rounded_activation(kernel)[1].reciprocal()
            cast = _cast(self._device, self.shape.k, kernel.precision)
            if self._device != CPU:
                torch._dynamo.maybe_mark_dynamic(value, 0)
            return lambda: cast(value, inverse)
        if not kernel.precision.is_quantized:
            activation = self._wide_activation
            weights = cycle(weight_copies(self._weight.bfloat16(), turns))
            return lambda: torch.matmul(activation, next(weights))
        (a, scale_a), (b, scale_b) = self._rounded_activation(kernel), self._rounded_weight(kernel)
        weights = cycle(weight_copies(b, turns))
        if kernel.precision is Precision.INT8 and self._device != CPU:
            product, scale = _integer_product(*b.shape), scale_a * scale_b
            return lambda: product(a, next(weights), scale)
        if kernel.scales is Granularity.PER_CHANNEL:
            scale_a = scale_a.reshape(1, 1).expand(len(a), 1).contiguous()
            scale_b = scale_b.reshape(1, -1)
        if self._device == CPU:
            return lambda: simulated_mm(a, next(weights), scale_a, scale_b, None, torch.bfloat16)
        is_fast = kernel.name.endswith(FAST)
        return lambda: torch._scaled_mm(
            a, next(weights), scale_a, scale_b, out_dtype=torch.bfloat16, use_fast_accum=is_fast
        )

    def error(self, kernel: Kernel, result: torch.Tensor, rows: int) -> float:
        """RMS difference of the first rows from the float64 product of the rounded operands, over its RMS."""
        import torch

        wide = torch.float64
        if kernel.precision.is_quantized:
            (a, scale_a), (b, scale_b) = self._rounded_activation(kernel), self._rounded_weight(kernel)
            a, b = a[:rows].to(wide) * scale_a.to(wide), b.to(wide) * scale_b.to(wide)
        else:
            a, b = self._wide_activation[:rows].to(wide), self._weight.bfloat16().to(wide)
        exact = a @ b
        difference, size = (result[:rows].to(wide) - exact).square().mean(), exact.square().mean()
        return float((difference / size).sqrt()) if float(size) > 0.0 else 0.0

    @property
    def _weight(self) -> torch.Tensor:
        if self._stored is None:
            raise ValueError("there is no weight to multiply by")
        return self._stored

    def _rounded_activation(self, kernel: Kernel) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the activation in the kernel's format, and its scale."""
        scale = _scale(self._activation.abs().amax(), kernel.precision)
        return _rounded(self._activation, scale, kernel.precision), scale

    def _rounded_weight(self, kernel: Kernel) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the weight in the kernel's format, K contiguous, and its scale or scales."""
        magnitudes = self._weight.abs()
        amax = magnitudes.amax(dim=0) if kernel.scales is Granularity.PER_CHANNEL else magnitudes.amax()
        scale = _scale(amax, kernel.precision)
        return _rounded(self._weight, scale, kernel.precision).t().contiguous().t(), scale


def simulated_mm(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    """`torch._scaled_mm` in FP32: exact products of the FP8 values, FP32 sums, rounded once to `dtype`; INT8
    in FP64, exactly. On a CPU with AMX, `torch._scaled_mm` calls oneDNN, which has only its reference kernel
    (256 × 512 × 1024 takes 36 s; PyTorch 2.13), or none where its instructions are limited to AVX2.
    """
    import torch

    wide = torch.float64 if a.dtype == torch.int8 else torch.float32
    values = (a.to(wide) @ b.to(wide)).float() * (scale_a * scale_b)
    return (values if bias is None else values + bias).to(dtype)


def weight_copies(weight: torch.Tensor, number: int) -> list[torch.Tensor]:
    """Return a weight and copies of it, so many together."""
    import torch

    # PyTorch cannot clone FP8 tensors.
    raw = weight.view(torch.uint8) if weight.element_size() == 1 else weight
    return [weight, *(raw.clone().view(weight.dtype) for _ in range(number - 1))]


def integer_sums(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """INT32 product of INT8 matrices; too few rows for `torch._int_mm`, or unknown ones, are padded."""
    import torch

    rows = a.shape[0]
    is_enough = isinstance(rows, int) and rows > LEAST_ROWS
    padded = a if is_enough else torch.nn.functional.pad(a, (0, 0, 0, LEAST_ROWS))
    return torch._int_mm(padded, b)[:rows]


@cache
def _integer_product(k: int, n: int) -> Callable[..., torch.Tensor]:
    """Product of INT8 matrices and their scales (1, N), as in engines; compiled for each weight's shape."""
    import torch

    torch._dynamo.reset()
    return torch.compile(
        lambda a, b, scale: (integer_sums(a, b).to(torch.float32) * scale).to(torch.bfloat16), dynamic=False
    )


def _rounded(values: torch.Tensor, scale: torch.Tensor, precision: Precision) -> torch.Tensor:
    """Divide by a scale, saturate and round (ONNX QuantizeLinear)."""
    return _to_format(values / scale, _format(precision))


def _to_format(values: torch.Tensor, format: NumberFormat) -> torch.Tensor:
    """Saturate and round; a cast to an integer would truncate."""
    import torch

    inside = values.to(torch.float32).clamp(-format.max, format.max)
    kind: torch.dtype = getattr(torch, format.storage)
    return (inside if format.is_float else inside.round()).to(kind)


def _format(precision: Precision) -> NumberFormat:
    """INT8, or E4M3FN, or E4M3FNUZ where the matrix cores support only that (gfx94x)."""
    import torch

    if precision is Precision.INT8:
        return INT8
    if torch.version.hip and torch.cuda.is_available():
        architecture: str = torch.cuda.get_device_properties(0).gcnArchName
        if architecture.startswith("gfx94"):
            return E4M3FNUZ
    return E4M3FN


def _scale(amax: torch.Tensor, precision: Precision) -> torch.Tensor:
    """FP32 scale of a range; positive even for a range of 0."""
    import torch

    largest = _format(precision).max
    return (amax.to(torch.float32) / largest).clamp(min=torch.finfo(torch.float32).tiny)


@cache
def _cast(
    torch_device: str, length: int, precision: Precision
) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """Quantize step of values and an inverse scale, as in engines; compiled on an accelerator for each row
    length and any number of rows. Only for a known length can the compiler show that a thread's output is in
    one word; the reset keeps PyTorch from making it dynamic, which would discard earlier kernels.
    """
    import torch

    torch._dynamo.reset()
    format = _format(precision)

    def rounded(values: torch.Tensor, inverse: torch.Tensor) -> torch.Tensor:
        return _to_format(values.to(torch.float32) * inverse, format)

    return rounded if torch_device == CPU else torch.compile(rounded)
