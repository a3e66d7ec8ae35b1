"""Common parts of fusions: results, readers and shapes of tensors, and ends of kernels."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx

from loka_onnx.engines.inductor.fusions.planned import Node, PlannedGraph, Tensor

DOMAIN = "loka"
"""Domain of nodes that only this backend lowers."""
EIGHT_BITS = frozenset({onnx.TensorProto.FLOAT8E4M3FN, onnx.TensorProto.INT8})
"""Types that the kernels multiply with a scale and zero point 0, and quantize to."""
HALVES = frozenset({onnx.TensorProto.BFLOAT16, onnx.TensorProto.FLOAT16})
"""Types that the kernels multiply without one."""


@dataclass(frozen=True)
class Fused:
    """A new node, and the sites that its kernel computes."""

    name: str
    sites: tuple[str, ...] = ()


class DeclinedFusion(Exception):
    """A match that cannot be fused, and the reason; `node` names it where the tried node does not."""

    def __init__(self, reason: str, node: Node | None = None) -> None:
        super().__init__(reason)
        self.node = node


def tiled(size: int) -> int:
    """Side of a tile that holds `size`: a power of two, at least 16 for matrix units."""
    return max(16, 1 << (size - 1).bit_length())


def only_reader(graph: PlannedGraph, tensor: Tensor) -> Node | None:
    """Return the only reader of a tensor; None for several readers or an output of the graph."""
    readers = tensor.readers
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
    """Return the FP32 tensor that was just cast to this BF16 or FP16 one, in its shape; else itself."""
    node = tensor.producer
    if node is None or node.op not in {"Cast", "Reshape"} or tensor.kind not in HALVES:
        return tensor
    source = node.reads(0)
    if node.op == "Cast":
        return source if source.kind == onnx.TensorProto.FLOAT else tensor
    wide = unrounded(graph, source)
    if wide is source:
        return tensor
    reshaped = Tensor(graph.fresh_name(f"{tensor.name}.float"), wide.kind, tensor.shape)
    name = graph.fresh_name(f"{node.name}/float")
    graph.replace("Reshape", name, [wide, node.reads(1)], [reshaped], node.attrs)
    return reshaped


def is_symmetric(node: Node) -> bool:
    """True for a Q or DQ without a zero point, or with the constant 0."""
    zero = node.reads(2) if node.has(2) else None
    return zero is None or (zero.is_constant and not zero.values.astype(np.float32).any())


def is_quantize(node: Node) -> bool:
    """True for a saturating Q to `EIGHT_BITS` with one constant scale and zero point 0."""
    return (
        node.op == "QuantizeLinear"
        and node.outputs[0].kind in EIGHT_BITS
        and is_symmetric(node)
        and bool(node.attrs.get("saturate", 1))
        and node.reads(1).is_constant
        and node.reads(1).values.size == 1
    )


@dataclass(frozen=True)
class KernelOutputs:
    """Outputs of a kernel: Z itself if `wide`, and that of `quantize` if there is one."""

    wide: bool
    quantize: Node | None

    @classmethod
    def of(cls, graph: PlannedGraph, end: Tensor) -> KernelOutputs:
        """Outputs for the readers of Z; of several Q with different scales, the kernel computes none."""
        readers = end.readers
        quantized = [reader for reader in readers if is_quantize(reader)]
        narrow = quantized[0] if len(quantized) == 1 else None
        return cls(narrow is None or len(readers) > 1 or graph.is_output(end), narrow)

    def replaced(self, end: Tensor) -> list[Tensor]:
        """Tensors that the kernel computes, Z first."""
        return ([end] if self.wide else []) + ([self.quantize.outputs[0]] if self.quantize else [])

    @property
    def attributes(self) -> dict[str, int]:
        """Attributes of the node: `wide` if it outputs Z, and the ONNX type of the Q's output."""
        narrow = {} if self.quantize is None else {"narrow": self.quantize.outputs[0].kind}
        return {"wide": int(self.wide), **narrow}

    @property
    def scale(self) -> Tensor | None:
        """Scale of the Q."""
        return None if self.quantize is None else self.quantize.reads(1)
