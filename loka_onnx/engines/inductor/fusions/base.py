"""Common parts of fusions: matching through casts and layouts, token mixers, and ends of kernels.

X (batch, n, d) holds tokens. Exporters write a mixer of tokens as Xᵀ · W, with a learned W (n, m), and mods
merge several that read the same Xᵀ into one product with a Split behind it.

A kernel for a mixer holds whole operands, 2 bytes an element, in registers and shared memory. Their limit
`MOST_ELEMENTS` is set for the H100: two operands of 2¹⁵ are 128 KiB, and a block has at most 227 KB (CUDA C++
Programming Guide, "Technical Specifications per Compute Capability": 163 KB on sm80, 227 KB on sm90 and
sm100, 99 KB on sm89 and sm120). Where that is too much, Triton refuses the kernel and the build of the
candidate fails; sm89 and sm120 were not tried.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx

from loka_onnx.engines.inductor.fusions.planned import Node, PlannedGraph, Tensor

DOMAIN = "loka"
"""Domain of nodes that only this backend lowers."""
E4M3FN = onnx.TensorProto.FLOAT8E4M3FN
HALVES = frozenset({onnx.TensorProto.BFLOAT16, onnx.TensorProto.FLOAT16})
"""Types that the kernels multiply."""
MOST_ELEMENTS = 1 << 15


@dataclass(frozen=True)
class Fused:
    """A new node, and the sites that its kernel computes."""

    name: str
    sites: tuple[str, ...] = ()


class DeclinedFusion(Exception):
    """A match that cannot be fused; the message is the reason."""


Match = tuple[str, Callable[[], Fused]]
"""Name of a match, and the function that fuses it or raises `DeclinedFusion`."""


def padded(size: int) -> int:
    """Side of a tile that holds `size`: a power of two, at least 16 for matrix units."""
    return max(16, 1 << (size - 1).bit_length())


def made_by(tensor: Tensor, op: str) -> Node | None:
    """Return the node of operator `op` that computes a tensor, ignoring casts to FP32; or None."""
    node = through_casts(tensor).producer
    return node if node is not None and node.op == op and not node.domain else None


def through_casts(tensor: Tensor) -> Tensor:
    """Return the tensor from which this one is widened to FP32 (kernels widen as they load), or itself."""
    node = tensor.producer
    while node is not None and node.op == "Cast" and node.reads(0).kind in HALVES:
        if tensor.kind != onnx.TensorProto.FLOAT:
            break
        tensor = node.reads(0)
        node = tensor.producer
    return tensor


def only_reader(graph: PlannedGraph, tensor: Tensor) -> Node | None:
    """Return the only reader of a tensor; None for several readers or an output of the graph."""
    readers = [node for node in tensor.readers if node.outputs]
    return readers[0] if len(readers) == 1 and not graph.is_output(tensor) else None


def static(tensor: Tensor, rank: int) -> tuple[int, ...] | None:
    """Return the lengths of all axes but the first; None for an unknown length or another rank."""
    shape = tensor.shape
    if shape is None or len(shape) != rank:
        return None
    lengths = tuple(length for length in shape[1:] if length is not None)
    return lengths if len(lengths) == rank - 1 else None


def is_row(tensor: Tensor, end: Tensor) -> bool:
    """True if a tensor has one number for each column of another, in its type."""
    if end.shape is None or tensor.kind != end.kind:
        return False
    shape = tensor.shape or ()
    is_last = shape[-1:] == end.shape[-1:] and all(length == 1 for length in shape[:-1])
    return is_last and len(shape) <= len(end.shape)


def unrounded(graph: PlannedGraph, tensor: Tensor) -> Tensor:
    """Return the FP32 tensor that was just rounded to this one, in its shape; else itself."""
    node = tensor.producer
    if node is None or node.domain or node.op not in {"Cast", "Reshape"} or tensor.kind not in HALVES:
        return tensor
    source = node.reads(0)
    if node.op == "Cast":
        return source if source.kind == onnx.TensorProto.FLOAT else tensor
    wide = unrounded(graph, source)
    if wide is source:
        return tensor
    reshaped = Tensor(graph.fresh_name(f"{tensor.name}.float"), wide.kind, tensor.shape)
    name = graph.fresh_name(f"{node.name}/float")
    graph.replace("::Reshape", name, [wide, node.reads(1)], [reshaped], node.attrs)
    return reshaped


def is_float8_quantize(node: Node) -> bool:
    """True for a saturating Q to E4M3FN with one constant scale."""
    return (
        node.op == "QuantizeLinear"
        and bool(node.outputs)
        and node.outputs[0].kind == E4M3FN
        and bool(node.attrs.get("saturate", 1))
        and node.reads(1).is_constant
        and node.reads(1).values.size == 1
    )


@dataclass(frozen=True)
class Ends:
    """Outputs of a kernel: Z itself if `wide`, and that of `quantize` if there is one."""

    wide: bool
    quantize: Node | None

    @classmethod
    def of(cls, graph: PlannedGraph, end: Tensor) -> Ends:
        """Outputs for the readers of Z; of several Q with different scales, the kernel computes none."""
        readers = [reader for reader in end.readers if reader.outputs]
        quantized = [reader for reader in readers if is_float8_quantize(reader)]
        narrow = quantized[0] if len(quantized) == 1 else None
        return cls(narrow is None or len(readers) > 1 or graph.is_output(end), narrow)

    def replaced(self, end: Tensor) -> list[Tensor]:
        """Tensors that the kernel computes, Z first."""
        return ([end] if self.wide else []) + ([self.quantize.outputs[0]] if self.quantize else [])

    @property
    def scale(self) -> Tensor | None:
        """Scale of the Q."""
        return None if self.quantize is None else self.quantize.reads(1)


@dataclass(frozen=True)
class TokenMix:
    """Xᵀ · W: the tensor X, the weight W (n, m), and the node, perhaps merged with others."""

    x: Tensor
    weight: npt.NDArray[Any]
    product: Node


def token_mix(tensor: Tensor) -> TokenMix | None:
    """Match a tensor (batch, d, m) as Xᵀ · W; or None."""
    tensor = through_casts(tensor)
    node, columns = tensor.producer, slice(None)
    if node is not None and node.op == "Split":
        part = _part(node, tensor)
        if part is None:
            return None
        columns, node = part, node.reads(0).producer
    if node is None or node.op != "MatMul" or not node.reads(1).is_constant:
        return None
    weight = node.reads(1).values
    x = untransposed(node.reads(0))
    if x is None or weight.ndim != 2 or node.reads(1).kind != x.kind:
        return None
    return TokenMix(x, weight[:, columns], node)


def untransposed(tensor: Tensor) -> Tensor | None:
    """Return the tensor of rank 3 whose last two axes this one transposes; None where it is no transpose."""
    node = made_by(tensor, "Transpose")
    return None if node is None or not swaps_tokens(node) else through_casts(node.reads(0))


def swaps_tokens(node: Node) -> bool:
    """True if a node transposes (batch, n, d) to (batch, d, n)."""
    return node.op == "Transpose" and list(node.attrs.get("perm", ())) == [0, 2, 1]


def _part(split: Node, tensor: Tensor) -> slice | None:
    """Columns that one output of a Split along the last axis holds; or None."""
    if split.attrs.get("axis", 0) not in {-1, 2} or not split.has(1) or not split.reads(1).is_constant:
        return None
    if len(split.reads(1).values) != len(split.outputs):
        return None
    ends = np.cumsum(split.reads(1).values)
    position = next(i for i, output in enumerate(split.outputs) if output is tensor)
    return slice(int(ends[position - 1]) if position else 0, int(ends[position]))
