"""Common parts of fusions: domain, results, and matching through casts and layouts."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import onnx

from loka_onnx.engines.inductor.fusions.planned import Node, PlannedGraph, Tensor

DOMAIN = "loka"
"""Domain of nodes that only this backend lowers."""
E4M3FN = onnx.TensorProto.FLOAT8E4M3FN
HALVES = frozenset({onnx.TensorProto.BFLOAT16, onnx.TensorProto.FLOAT16})
"""Types that the kernels multiply."""
MOST_ELEMENTS = 1 << 15
"""Most elements of an operand in a kernel that keeps a whole example in registers and shared memory."""


@dataclass(frozen=True)
class Fused:
    """A new node, and the sites that its kernel computes."""

    name: str
    sites: tuple[str, ...] = ()


@dataclass(frozen=True)
class FusionReport:
    """Fused matches by fusion, and declined ones with node and reason by fusion."""

    fused: dict[str, tuple[Fused, ...]]
    declined: dict[str, tuple[str, ...]]

    @property
    def joined(self) -> dict[str, str]:
        """Fusion of each site that shares a kernel with others; FP8 there would split the kernel."""
        return {
            site: name
            for name, places in self.fused.items()
            for each in places
            if len(each.sites) > 1
            for site in each.sites
        }


class DeclinedFusion(Exception):
    """A match that cannot be fused; the message is the reason."""


@dataclass
class Findings:
    """Results of one fusion while it runs."""

    fused: list[Fused]
    declined: list[str]


Fusion = Callable[[PlannedGraph], Findings]


def fuse_each(places: Iterable[tuple[str, Callable[[], Fused]]]) -> Findings:
    """Fuse match after match and collect the declined ones.

    Args:
        places: Name and fusing function of each match; lazy, because each fusion changes the graph in which
            the next match is searched.
    """
    found = Findings([], [])
    for name, fuse in places:
        try:
            found.fused.append(fuse())
        except DeclinedFusion as reason:
            found.declined.append(f"{name}: {reason}")
    return found


def attributes(norm: Node, products: tuple[str, ...]) -> dict[str, object]:
    """Attributes of a node that computes products and the norm behind them.

    ``norm_type`` is the planned type of the norm, although the kernel computes it in FP32.
    """
    return {
        "epsilon": float(norm.attrs.get("epsilon", 1e-5)),
        "products": list(products),
        "norm": norm.name,
        "norm_type": norm.outputs[0].kind,
    }


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


def unrounded(graph: PlannedGraph, tensor: Tensor) -> Tensor:
    """Return the FP32 tensor that was just rounded to this one, in its shape, because the kernel rounds on
    reading; the tensor itself where there is none.
    """
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
    graph.replace(
        "::Reshape", graph.fresh_name(f"{node.name}/float"), [wide, node.reads(1)], [reshaped], node.attrs
    )
    return reshaped


def is_float8_quantize(node: Node) -> bool:
    """Tell whether a node is a saturating Q to E4M3FN with one constant scale."""
    return (
        node.op == "QuantizeLinear"
        and bool(node.outputs)
        and node.outputs[0].kind == E4M3FN
        and bool(node.attrs.get("saturate", 1))
        and node.reads(1).is_constant
        and node.reads(1).values.size == 1
    )


def normalizes_last_axis(norm: Node, shape: tuple[int | None, ...]) -> bool:
    """Tell whether a norm is over exactly the last axis of a tensor of that shape (None for the batch)."""
    read = norm.reads(0).shape or ()
    axis = norm.attrs.get("axis", -1)
    return len(norm.outputs) == 1 and read[1:] == shape[1:] and axis in {-1, len(shape) - 1}
