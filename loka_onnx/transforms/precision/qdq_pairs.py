"""Q/DQ pairs of activations, as `insert_qdq` writes them: one scale for the whole tensor.

A Q of an initializer is part of a weight and no pair.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from loka_onnx.core.formats import FORMATS
from loka_onnx.core.rewrite import Declined
from loka_onnx.graph.model import GraphModel, Node, Tensor, consumers, is_constant, values_of

MOVEMENTS = frozenset(
    {
        *("Concat", "Expand", "Flatten", "Gather", "Identity", "Reshape", "Slice", "Split", "Squeeze"),
        *("Tile", "Transpose", "Unsqueeze"),
    }
)
"""Operators that move or repeat unchanged values: of all inputs for Concat, else of the first."""
SELECTIONS = frozenset({"Gather", "Slice"})
"""Movements that may drop values."""
VIEWS = frozenset({"Flatten", "Identity", "Reshape", "Squeeze", "Unsqueeze"})
"""Movements that keep the values in place in memory."""
_STORED = {format.storage: format for format in FORMATS.values()}


@dataclass(frozen=True)
class Key:
    """Rounding of a tensor; pairs of one key round equal values to equal values."""

    scale: float
    format: str
    zero_point: float = 0.0

    def __str__(self) -> str:
        zero = f", zero point {self.zero_point:g}" if self.zero_point else ""
        return f"scale {self.scale:.6g}, {self.format}{zero}"


@dataclass(frozen=True)
class Pair:
    """A Q and the one or more DQ that read it."""

    q: Node
    dqs: tuple[Node, ...]
    key: Key

    @property
    def name(self) -> str:
        """Site and operand that the pair was written for: ``<site>/in<index>``."""
        return str(self.q.name).removesuffix("/q")

    @property
    def source(self) -> Tensor:
        """The tensor that is quantized."""
        return self.q.inputs[0]

    @property
    def rounded(self) -> Tensor:
        """Its values after rounding."""
        return self.dqs[0].outputs[0]


@dataclass(frozen=True)
class Pairs:
    """All pairs of a graph in node order, and each Q that is in none."""

    found: tuple[Pair, ...]
    declined: tuple[Declined, ...]


def find_pairs(model: GraphModel, nodes: Sequence[Node]) -> Pairs:
    """Find the pairs among the nodes of the main graph."""
    found: list[Pair] = []
    declined: list[Declined] = []
    for node in nodes:
        if node.op != "QuantizeLinear" or is_constant(node.inputs[0]):
            continue
        key, dqs = _key(node), consumers(node.outputs[0])
        if key is None:
            declined.append(Declined(node.name, "it is not one scale, known beforehand, for the tensor"))
        elif not dqs or any(_key(dq) != key or dq.op != "DequantizeLinear" for dq in dqs):
            declined.append(
                Declined(node.name, "something besides a DQ of its scale reads its quantized values")
            )
        elif any(model.is_output(tensor) for tensor in (node.outputs[0], *(dq.outputs[0] for dq in dqs))):
            declined.append(Declined(node.name, "its values leave the graph"))
        else:
            found.append(Pair(node, tuple(dqs), key))
    return Pairs(tuple(found), tuple(declined))


def _key(node: Node) -> Key | None:
    """Return the key of a Q or a DQ; None for another form."""
    if len(node.inputs) < 3 or not all(is_constant(tensor) for tensor in node.inputs[1:3]):
        return None
    scale, zero = (values_of(tensor) for tensor in node.inputs[1:3])
    format = _STORED.get(str(zero.dtype))
    if scale.ndim or zero.ndim or format is None or (float(zero) and not format.has_zero_point):
        return None
    is_plain = node.attrs.get("saturate", 1) == 1 and not node.attrs.get("block_size", 0)
    return Key(float(scale), format.storage, float(zero)) if is_plain else None


def moved(node: Node, movements: frozenset[str] = MOVEMENTS) -> tuple[Tensor, ...]:
    """Return the distinct tensors whose values a node moves; empty for another node."""
    if node.op not in movements or node.domain not in {None, "", "ai.onnx"}:
        return ()
    if node.op == "Concat":
        return tuple({id(tensor): tensor for tensor in node.inputs}.values())
    if is_constant(node.inputs[0]) or (node.op == "Gather" and not is_constant(node.inputs[1])):
        return ()
    return (node.inputs[0],)


def add_pair(model: GraphModel, source: Tensor, like: Pair) -> Pair:
    """Append a pair over another tensor with the same rounding."""
    constants = like.q.inputs[1:3]
    narrow = model.add("QuantizeLinear", [source, *constants], f"{like.name}/q", like.q.outputs[0].dtype)
    wide = model.add("DequantizeLinear", [narrow, *constants], f"{like.name}/dq", source.dtype or np.float32)
    narrow.shape = wide.shape = source.shape
    return Pair(narrow.inputs[0], (wide.inputs[0],), like.key)


def move_pair(pair: Pair, source: Tensor) -> None:
    """Let a pair quantize another tensor."""
    pair.q.inputs[0] = source
    for tensor in (pair.q.outputs[0], *(dq.outputs[0] for dq in pair.dqs)):
        tensor.shape = source.shape


def bypass_pair(model: GraphModel, pair: Pair, instead: Tensor) -> tuple[Node, ...]:
    """Let readers of the rounded values read another tensor that holds them; return the unused nodes."""
    for dq in pair.dqs:
        model.replace_uses(dq.outputs[0], instead, consumers(dq.outputs[0]))
    return (pair.q, *pair.dqs)
