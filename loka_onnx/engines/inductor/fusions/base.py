"""What fusions share: their domain, their result, and how they look through casts and layouts."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import onnx

from loka_onnx.engines.inductor.fusions.planned import Node, PlannedGraph, Tensor

DOMAIN = "loka"
"""Of nodes that only the lowering of this backend knows."""
E4M3FN = onnx.TensorProto.FLOAT8E4M3FN
HALVES = frozenset({onnx.TensorProto.BFLOAT16, onnx.TensorProto.FLOAT16})
"""Types that the kernels multiply."""
MOST_ELEMENTS = 1 << 15
"""Of one operand of a kernel that holds a whole example in registers and shared memory."""


@dataclass(frozen=True)
class Fused:
    """One place that became one kernel.

    Attributes:
        name: Name of the new node.
        sites: Sites that the kernel computes.
    """

    name: str
    sites: tuple[str, ...] = ()


@dataclass(frozen=True)
class FusionReport:
    """Places that were fused, and those that looked alike and were not.

    Attributes:
        fused: By name of the fusion.
        declined: By name of the fusion, the node and the reason.
    """

    fused: dict[str, tuple[Fused, ...]]
    declined: dict[str, tuple[str, ...]]

    @property
    def joined(self) -> dict[str, str]:
        """The fusion of each site that a kernel computes together with others; FP8 there would part them."""
        return {
            site: name
            for name, places in self.fused.items()
            for each in places
            if len(each.sites) > 1
            for site in each.sites
        }


class DeclinedFusion(Exception):
    """A place that looks alike and cannot be fused; the reason is its message."""


@dataclass
class Findings:
    """Results of one fusion, as it goes along."""

    fused: list[Fused]
    declined: list[str]


Fusion = Callable[[PlannedGraph], Findings]


def fuse_each(places: Iterable[tuple[str, Callable[[], Fused]]]) -> Findings:
    """Fuse place after place, and note those that are declined.

    Args:
        places: Name of each place, and what fuses it; found one by one, because a fusion changes the graph
            that the next is looked for in.
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

    ``norm_type`` is what the plan gave the norm, which is computed in FP32 inside the kernel in any case.
    """
    return {
        "epsilon": float(norm.attrs.get("epsilon", 1e-5)),
        "products": list(products),
        "norm": norm.name,
        "norm_type": norm.outputs[0].kind,
    }


def padded(size: int) -> int:
    """Length of a tile's side that holds `size`: a power of two, at least 16 as matrix units want."""
    return max(16, 1 << (size - 1).bit_length())


def made_by(tensor: Tensor, op: str) -> Node | None:
    """The node of that kind which computes a tensor, seen through casts to FP32."""
    node = through_casts(tensor).producer
    return node if node is not None and node.op == op and not node.domain else None


def through_casts(tensor: Tensor) -> Tensor:
    """What a tensor is widened to FP32 from, which kernels do as they load; itself where it is not."""
    node = tensor.producer
    while node is not None and node.op == "Cast" and node.reads(0).kind in HALVES:
        if tensor.kind != onnx.TensorProto.FLOAT:
            break
        tensor = node.reads(0)
        node = tensor.producer
    return tensor


def only_reader(graph: PlannedGraph, tensor: Tensor) -> Node | None:
    """The one node that reads a tensor; None when there are several, or the graph hands it out."""
    readers = [node for node in tensor.readers if node.outputs]
    return readers[0] if len(readers) == 1 and not graph.is_output(tensor) else None


def static(tensor: Tensor, rank: int) -> tuple[int, ...] | None:
    """The lengths of all axes but the first; None when one is not known, or the rank is another."""
    shape = tensor.shape
    if shape is None or len(shape) != rank:
        return None
    lengths = tuple(length for length in shape[1:] if length is not None)
    return lengths if len(lengths) == rank - 1 else None


def unrounded(graph: PlannedGraph, tensor: Tensor) -> Tensor:
    """The FP32 values that a tensor is rounded from, in its shape: the kernel rounds as it reads.

    Itself where it is not rounded just before.
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
    """Whether a node is a saturating Q to E4M3FN with one constant scale."""
    return (
        node.op == "QuantizeLinear"
        and bool(node.outputs)
        and node.outputs[0].kind == E4M3FN
        and bool(node.attrs.get("saturate", 1))
        and node.reads(1).is_constant
        and node.reads(1).values.size == 1
    )


def normalizes_last_axis(norm: Node, shape: tuple[int | None, ...]) -> bool:
    """Whether a norm is over the last axis of a tensor of that shape (None for the batch), and no more."""
    read = norm.reads(0).shape or ()
    axis = norm.attrs.get("axis", -1)
    return len(norm.outputs) == 1 and read[1:] == shape[1:] and axis in {-1, len(shape) - 1}
