"""Merge nodes that compute the same: of the same operator, attributes and inputs.

Exporters that work module by module leave such twins: a Transpose in front of every linear layer that reads
one tensor, which hides that they are parallel (`merge_parallel_linears`). Sites stay (each has its name and
decision), and so do Q/DQ, random operators, control flow, and nodes whose result leaves the graph.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from loka_onnx.core.rewrite import Applied, Declined
from loka_onnx.graph.model import GraphModel, Node, Tensor, is_constant, values_of
from loka_onnx.graph.sites import is_site
from loka_onnx.transforms.base import Mod
from loka_onnx.transforms.tidying.fold_constants import NEVER_FOLDED

SMALL_ELEMENTS = 64
"""Larger constants are compared by identity: exporters share them."""
_ALONE = NEVER_FOLDED | {"Dropout"}


@dataclass(frozen=True)
class Twins:
    """Two nodes that compute the same; readers of `second` will read `first`."""

    first: Node
    second: Node


class ShareDuplicates(Mod[Twins]):
    """Nodes that compute the same → one of them."""

    name = "share-duplicates"

    def _find(self, model: GraphModel) -> Iterator[Twins | Declined]:
        """Compare nodes in topological order, each as if earlier twins were merged."""
        first_of: dict[Hashable, Node] = {}
        shared: dict[int, Tensor] = {}
        for node in model.sorted_nodes():
            key = _key(node, shared)
            first = node if key is None else first_of.setdefault(key, node)
            if first is node:
                continue
            if is_site(node):
                yield Declined(node.name, f"computes what '{first.name}' does, but is a site")
            elif any(map(model.is_output, node.outputs)):
                yield Declined(node.name, f"computes what '{first.name}' does, but leaves the graph")
            else:
                yield Twins(first, node)
                shared |= {id(b): a for a, b in zip(first.outputs, node.outputs, strict=True)}

    def rewrite(self, model: GraphModel, match: Twins) -> Applied:
        """Let the readers of the second node read the first."""
        for kept, gone in zip(match.first.outputs, match.second.outputs, strict=True):
            model.replace_uses(gone, kept)
        return Applied(match.second.name, f"computes what '{match.first.name}' does: read that")


def _key(node: Node, shared: dict[int, Tensor]) -> Hashable | None:
    """Return a key of equal results; None for a node that is never merged."""
    attributes = tuple((name, _plain(value)) for name, value in sorted(node.attrs.items()))
    if node.op in _ALONE or any(plain is None for _, plain in attributes):
        return None
    inputs = tuple(_input_key(shared.get(id(tensor), tensor)) for tensor in node.inputs)
    return (node.domain or "", node.op, inputs, attributes, len(node.outputs))


def _plain(value: Any) -> Hashable | None:
    """Return an attribute that compares by value; None for tensors and graphs."""
    if isinstance(value, int | float | str | bytes):
        return value
    if isinstance(value, list | tuple | np.ndarray) and all(
        isinstance(v, int | float | str | np.number) for v in value
    ):
        return tuple(value)
    return None


def _input_key(tensor: Tensor) -> Hashable:
    if not tensor.name:
        return "absent"
    if is_constant(tensor) and (values := values_of(tensor)).size <= SMALL_ELEMENTS:
        return (str(values.dtype), values.shape, values.tobytes())
    return id(tensor)
