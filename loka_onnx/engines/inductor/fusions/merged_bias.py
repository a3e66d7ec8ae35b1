"""Biases behind the Split of a merged product, moved in front of it, into the product's kernel.

For linears merged into one product (`transforms.linears.merge_parallel_linears`), each with its own bias::

    [Z₁, …, Zₙ] = Split(A · W),   Yᵢ = Zᵢ + bᵢ      =      [Y₁, …, Yₙ] = Split(A · W + concat(b₁, …, bₙ))

with the same sums. Behind the Split, every part is read and written again only for its bias; in front of it,
the parts are views of the product's output, which `kernels.triton_attention` reads directly. Not timed on a
GPU yet.
"""

from __future__ import annotations

import numpy as np

from loka_onnx.engines.inductor.fusions.base import Findings, Fused, only_reader
from loka_onnx.engines.inductor.fusions.epilogue import is_plain
from loka_onnx.engines.inductor.fusions.planned import Node, PlannedGraph, Tensor


def fuse_merged_bias(graph: PlannedGraph) -> Findings:
    """Move the biases added behind the Split of each merged product to before the Split; declines nothing."""
    found = Findings([], [])
    for node in list(graph.nodes):
        adds = _biased(graph, node) if node.op == "Split" and not node.domain and node.outputs else []
        if adds:
            found.fused.append(_fuse(graph, node, adds))
    return found


def _biased(graph: PlannedGraph, split: Node) -> list[Node]:
    """Nodes that add a bias to each part of a product without one; empty unless all parts match."""
    whole = split.reads(0)
    product, shape = whole.producer, whole.shape
    if product is None or shape is None or not is_plain(product) or product.has(2):
        return []
    if only_reader(graph, whole) is not split or split.attrs.get("axis", 0) not in {-1, len(shape) - 1}:
        return []
    # A Split may omit an output.
    widths = [None if part.shape is None else part.shape[-1] for part in split.outputs]
    if None in widths or sum(width or 0 for width in widths) != shape[-1]:
        return []
    adds = [add for part in split.outputs if (add := only_reader(graph, part)) is not None]
    if len(adds) < len(split.outputs) or any(add.op != "Add" or add.domain for add in adds):
        return []
    pairs = zip(split.outputs, adds, strict=True)
    return adds if all(_bias(add, part) is not None for part, add in pairs) else []


def _bias(add: Node, part: Tensor) -> Tensor | None:
    """The added constant, if it is one number per column."""
    (bias,) = [each for each in add.inputs if each is not part] or [None]
    if bias is None or not bias.is_read or part.shape is None or bias.kind != part.kind:
        return None
    shape = bias.shape or ()
    is_row = shape[-1:] == part.shape[-1:] and all(length == 1 for length in shape[:-1])
    return bias if is_row and len(shape) <= len(part.shape) else None


def _fuse(graph: PlannedGraph, split: Node, adds: list[Node]) -> Fused:
    whole = split.reads(0)
    biases = [_bias(add, part) for part, add in zip(split.outputs, adds, strict=True)]
    rows = [bias.values.reshape(-1) for bias in biases if bias is not None]
    bias = graph.constant(f"{split.name}.bias", np.concatenate(rows))
    biased = Tensor(graph.fresh_name(f"{whole.name}.biased"), whole.kind, whole.shape)
    name = graph.fresh_name(f"{split.name}/biased")
    results = [add.outputs[0] for add in adds]
    # The old Split would count as a reader of the product.
    split.outputs = []
    graph.replace("::Add", graph.fresh_name(f"{split.name}/bias"), [whole, bias], [biased], {})
    graph.replace("::Split", name, [biased, *split.inputs[1:]], results, split.attrs)
    return Fused(name)
