"""Find sites that feed another site in FP8.

A Q directly behind an operator whose kernel can quantize costs no pass over memory. Where such operators
lead back to a product in FP8, with no tensor between that another node reads, one site hands its result to
the other in FP8: bias, activation function, gate and norm run inside a kernel.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from loka_onnx.core.backends import Fusions
from loka_onnx.core.rewrite import Applied, Declined
from loka_onnx.graph.model import GraphModel, Node, Tensor, consumers, is_constant, producer
from loka_onnx.graph.sites import PRODUCT_OPS
from loka_onnx.transforms.precision.qdq_pairs import MOVEMENTS, VIEWS, Pair, moved

_SILENT = MOVEMENTS | PRODUCT_OPS
"""Not reported: data movement (its pair is reported elsewhere) and exact products."""


@dataclass(frozen=True)
class Chains:
    """Chains behind the pairs, and reasons where there is none."""

    applied: tuple[Applied, ...]
    declined: tuple[Declined, ...]


def find_chains(
    model: GraphModel, pairs: Sequence[Pair], quantized_sites: Collection[str], fusions: Fusions
) -> Chains:
    """Trace every pair back to the sites that feed it."""
    applied: list[Applied] = []
    declined: list[Declined] = []
    if not fusions.quantized_in_place:
        return Chains((), ())
    readers = _readers(model, quantized_sites)
    outputs = {id(tensor) for tensor in model.outputs}
    for pair in pairs:
        maker = producer(pair.source)
        if maker is None:
            continue
        if not _may_quantize(maker, quantized_sites, fusions):
            if maker.op not in _SILENT:
                reason = f"no kernel is known that computes {maker.op} '{maker.name}' and quantizes it"
                declined.append(Declined(pair.name, reason))
            continue
        found = _feeding(maker, outputs, quantized_sites, fusions)
        if found.sites:
            names = " and ".join(f"'{name}'" for name in found.sites)
            through = f" through {', '.join(found.through)}" if found.through else ""
            to = ", ".join(f"'{name}'" for name in readers.get(id(pair.rounded), ()))
            applied.append(Applied(pair.name, f"chain: {names} feeds {to or 'it'} in FP8{through}"))
    return Chains(tuple(applied), tuple(declined))


def _may_quantize(node: Node, quantized_sites: Collection[str], fusions: Fusions) -> bool:
    """Return whether a kernel of the backend can end with this node and a Q, or pass on one that does."""
    return (
        node.name in quantized_sites
        or node.op in fusions.quantized_in_place
        or node.op in VIEWS & fusions.moved_in_float8
    )


@dataclass(frozen=True)
class _Feeding:
    """Sites at the start of a chain, and the operators between."""

    sites: tuple[str, ...]
    through: tuple[str, ...]


def _feeding(
    maker: Node, outputs: Collection[int], quantized_sites: Collection[str], fusions: Fusions
) -> _Feeding:
    """Trace operators of one kernel back; a tensor with outside readers is in memory."""
    sites: dict[str, None] = {}
    through: dict[str, None] = {}
    waiting: dict[int, int] = {}
    pending = [maker]
    while pending:
        node = pending.pop()
        if node.name in quantized_sites:
            sites[node.name] = None
            continue
        if not _may_quantize(node, quantized_sites, fusions):
            continue
        through[node.op] = None
        for tensor in {id(t): t for t in node.inputs if not is_constant(t)}.values():
            left = waiting.get(id(tensor), len(consumers(tensor))) - 1
            waiting[id(tensor)] = left
            earlier = producer(tensor)
            if not left and id(tensor) not in outputs and earlier is not None:
                pending.append(earlier)
    return _Feeding(tuple(sites), tuple(reversed(through)))


def _readers(model: GraphModel, quantized_sites: Collection[str]) -> dict[int, tuple[str, ...]]:
    """Return the FP8 sites that read a tensor's values, moved or not, by identity of the tensor."""
    found: dict[int, tuple[str, ...]] = {}

    def of(tensor: Tensor) -> tuple[str, ...]:
        names: dict[str, None] = {}
        for node in consumers(tensor):
            if node.name in quantized_sites:
                names[node.name] = None
            elif any(tensor is read for read in moved(node)):
                names |= {name: None for output in node.outputs for name in found.get(id(output), ())}
        return tuple(names)

    for node in reversed(model.sorted_nodes()):
        if moved(node) or node.op == "DequantizeLinear":
            found |= {id(tensor): of(tensor) for tensor in node.outputs}
    return found
