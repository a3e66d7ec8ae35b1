"""Values that represent ONNX tensors during lowering, and their element types: ONNX, NumPy and torch.

Most are torch tensors. Three other kinds last until an operator needs their elements:

- a `Constant` is known before the module runs; most become buffers;
- a `ShapeValue` is a few numbers that come from shapes. `torch.export` makes them symbols, so that a Reshape
  to a computed shape follows the batch;
- a `Dequantized` is FP8 or INT8 values with their scale. A matrix product of two of them multiplies these;
  every other operator reads ``values · scale``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import torch
from onnx.helper import np_dtype_to_tensor_dtype

Array = npt.NDArray[Any]
MOST_NUMBERS = 4096
"""Most elements of a constant that are kept beside its buffer: a Split may have hundreds of sizes."""
Number = int | float | bool | torch.SymInt | torch.SymFloat | torch.SymBool
_NOT_IN_NUMPY = ("bfloat16", "float8_e4m3fn", "float8_e5m2")
"""Types that torch exchanges with NumPy only as integers; torch and ml_dtypes give them one name."""
_NAMES = "float16 float32 float64 int8 int16 int32 int64 uint8 uint16 uint32 uint64 bool"
TORCH_TYPES: dict[int, torch.dtype] = {
    int(np_dtype_to_tensor_dtype(np.dtype(getattr(ml_dtypes, name, name)))): getattr(torch, name)
    for name in (*_NAMES.split(), *_NOT_IN_NUMPY)
}
"""Torch type of each ONNX element type that is lowered."""
FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
EIGHT_BITS = (*FLOAT8, torch.int8)
"""Types that products multiply with a scale, and zero point 0."""


def short_name(dtype: torch.dtype) -> str:
    """A torch type without its package, for example ``float8_e4m3fn``."""
    return str(dtype).removeprefix("torch.")


def to_torch(array: Array) -> torch.Tensor:
    """A copy of an array as a tensor on the CPU."""
    name = array.dtype.name
    if name not in _NOT_IN_NUMPY:
        return torch.from_numpy(np.array(array, order="C"))
    integers = np.array(array.view(f"int{8 * array.itemsize}"), order="C")
    return torch.from_numpy(integers).view(getattr(torch, name))


def to_numpy(tensor: torch.Tensor) -> Array:
    """Convert a CPU tensor to an array of the same type."""
    tensor, name = tensor.contiguous(), short_name(tensor.dtype)
    if name not in _NOT_IN_NUMPY:
        return np.asarray(tensor.numpy())
    integers = tensor.view(torch.int16 if tensor.element_size() == 2 else torch.int8)
    return np.asarray(integers.numpy().view(getattr(ml_dtypes, name)))


@dataclass(frozen=True, eq=False)
class Constant:
    """An initializer or a folded result, of the graph's element type `dtype`; its buffer may be wider.
    `array` is None where only the buffer holds the values.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    array: Array | None


@dataclass(frozen=True)
class ShapeValue:
    """Numbers, plain or symbolic, of a tensor of rank 0 if `scalar`, else of shape (len(entries),)."""

    entries: tuple[Number, ...]
    dtype: torch.dtype = torch.int64
    scalar: bool = False

    def materialize(self, device: torch.device) -> torch.Tensor:
        """Convert the numbers to a tensor."""
        # Unlike tensor, full takes symbols and leaves no constant of another device in an exported program.
        entries: tuple[Any, ...] = self.entries
        parts = [torch.full((), entry, dtype=self.dtype, device=device) for entry in entries]
        if self.scalar:
            return parts[0]
        return torch.stack(parts) if parts else torch.empty((0,), dtype=self.dtype, device=device)


@dataclass(frozen=True, eq=False)
class Dequantized:
    """FP8 or INT8 values that represent ``values · scale``, of type `dtype` in the graph. `scale` is FP32, of
    rank 0, or (channels,) along `axis`, counted from 0; `origin` is the scale if it is constant.
    """

    values: torch.Tensor
    scale: torch.Tensor
    dtype: torch.dtype
    axis: int | None
    origin: Constant | None

    def materialize(self) -> torch.Tensor:
        """Compute ``values · scale``, rounded once to `dtype`: eight-bit values are exact in FP32."""
        scale = self.scale
        if self.axis is not None:
            scale = along_axis(scale, self.axis, self.values.dim())
        return (self.values.to(torch.float32) * scale).to(self.dtype)

    def permuted(self, order: list[int]) -> Dequantized:
        """The same with permuted axes."""
        axis = None if self.axis is None else order.index(self.axis)
        return replace(self, values=self.values.permute(order), axis=axis)

    def has_scale_of(self, other: Dequantized) -> bool:
        """True if both have one type, and the same constant scale for all of their elements."""
        mine, theirs = self.origin, other.origin
        if self.values.dtype != other.values.dtype or mine is None or theirs is None:
            return False
        if self.axis is not None or other.axis is not None:
            return False
        return mine is theirs or (
            mine.array is not None and theirs.array is not None and np.array_equal(mine.array, theirs.array)
        )


Value = torch.Tensor | Constant | ShapeValue | Dequantized | None
"""None stands for an omitted optional input or output."""


def along_axis(vector: torch.Tensor, axis: int, rank: int) -> torch.Tensor:
    """Reshape a vector (n,) to a rank, with n on one axis and 1 on the others."""
    return vector.reshape([-1 if position == axis else 1 for position in range(rank)])


def saturated(values: torch.Tensor, target: torch.dtype) -> torch.Tensor:
    """Round to FP8 or INT8, ties to even; values beyond its range become its limits, FP8 keeps NaN."""
    bounds = torch.finfo(target) if target.is_floating_point else torch.iinfo(target)
    rounded = values if target.is_floating_point else torch.round(values)
    return rounded.clamp(bounds.min, bounds.max).to(target)


def numbers_of(constant: Constant) -> ShapeValue | None:
    """Numbers of a short constant of rank 0 or 1; None for any other."""
    array = constant.array
    if array is None or array.ndim > 1 or array.size > MOST_NUMBERS:
        return None
    plain = array.astype(np.float64) if constant.dtype.is_floating_point else array
    return ShapeValue(tuple(plain.reshape(-1).tolist()), constant.dtype, array.ndim == 0)
