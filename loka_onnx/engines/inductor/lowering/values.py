"""What stands for an ONNX tensor while a graph is lowered.

Most tensors are torch tensors. Three kinds are kept back for as long as no operator asks for their elements:

- a `Constant` is known before anything runs; most are buffers of the module;
- a `ShapeValue` is a handful of numbers that come from shapes. Under `torch.export` they are symbols, so that
  a Reshape to a computed shape follows the batch;
- a `Dequantized` is FP8 values and their scale. A matrix product of two of them multiplies the FP8 values;
  everything else gets ``values · scale``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from loka_onnx.engines.inductor.lowering.types import Array

MOST_NUMBERS = 4096
"""Elements of a constant whose values are kept beside its buffer: the sizes of a Split may be hundreds."""
Number = int | float | bool | torch.SymInt | torch.SymFloat | torch.SymBool


@dataclass(frozen=True, eq=False)
class Constant:
    """An initializer, or what was folded from some.

    Attributes:
        name: Tensor of the graph.
        dtype: Its element type in the graph; its buffer may be wider.
        shape: Its shape in the graph.
        array: Its values; None where they are many and live in a buffer alone.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    array: Array | None

    @property
    def is_number(self) -> bool:
        """Whether it is one number of rank 0, the value of which is known."""
        return not self.shape and self.array is not None


@dataclass(frozen=True)
class ShapeValue:
    """A few numbers, each of them plain or a symbol.

    Attributes:
        entries: The numbers.
        dtype: Element type of the tensor they stand for.
        scalar: Whether that tensor has rank 0; its shape is (len(entries),) otherwise.
    """

    entries: tuple[Number, ...]
    dtype: torch.dtype = torch.int64
    scalar: bool = False

    def materialize(self, device: torch.device) -> torch.Tensor:
        """The tensor that the numbers stand for."""
        # full, unlike tensor, takes symbols and leaves no constant of another device in an exported program.
        entries: tuple[Any, ...] = self.entries
        parts = [torch.full((), entry, dtype=self.dtype, device=device) for entry in entries]
        if self.scalar:
            return parts[0]
        return torch.stack(parts) if parts else torch.empty((0,), dtype=self.dtype, device=device)


@dataclass(frozen=True, eq=False)
class Dequantized:
    """FP8 values that stand for ``values · scale``.

    Attributes:
        values: FP8 tensor.
        scale: In FP32; of rank 0, or (channels,) for one scale per index of `axis`.
        dtype: Element type of the product in the graph.
        axis: Channel axis, counted from 0; None for one scale.
        origin: The scale as a constant of the graph; None where it is computed.
    """

    values: torch.Tensor
    scale: torch.Tensor
    dtype: torch.dtype
    axis: int | None
    origin: Constant | None

    def materialize(self) -> torch.Tensor:
        """``values · scale``, rounded once to `dtype`: FP8 values are exact in FP32."""
        scale = self.scale
        if self.axis is not None:
            scale = along_axis(scale, self.axis, self.values.dim())
        return (self.values.to(torch.float32) * scale).to(self.dtype)

    def has_scale_of(self, other: Dequantized) -> bool:
        """Whether both have one and the same constant scale, for all of their elements."""
        mine, theirs = self.origin, other.origin
        if self.axis is not None or other.axis is not None or mine is None or theirs is None:
            return False
        return mine is theirs or (
            mine.array is not None and theirs.array is not None and np.array_equal(mine.array, theirs.array)
        )


Value = torch.Tensor | Constant | ShapeValue | Dequantized | None
"""None is an optional input or output that is left out."""
Loader = Callable[[Constant], torch.Tensor]


def along_axis(vector: torch.Tensor, axis: int, rank: int) -> torch.Tensor:
    """A vector (n,) as a tensor of a rank with n on one axis and 1 on the others."""
    return vector.reshape([-1 if position == axis else 1 for position in range(rank)])


def numbers_of(constant: Constant) -> ShapeValue | None:
    """A short constant of rank 0 or 1 as numbers; None for any other."""
    array = constant.array
    if array is None or array.ndim > 1 or array.size > MOST_NUMBERS:
        return None
    plain = array.astype(np.float64) if constant.dtype.is_floating_point else array
    return ShapeValue(tuple(plain.reshape(-1).tolist()), constant.dtype, array.ndim == 0)
