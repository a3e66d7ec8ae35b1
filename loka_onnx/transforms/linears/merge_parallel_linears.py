"""Merge linear layers that read the same tensor into one.

Side by side along N, and along the rows for weights that stand on the left, ``W·x``::

    [x·W₁ + b₁, …, x·Wₘ + bₘ]   =   Split(x · [W₁ … Wₘ] + [b₁ … bₘ])

Experts and gates, towers, query, key and value, and the token mixers of a Wukong layer have this form. What
follows each layer stays behind the Split, and so does a bias of its own Add: TensorRT for RTX 1.7.1 splits a
merged query, key and value again when the bias comes first.

It pays for two to eight layers of N ≤ 1024: .41 to .94 of the time when the next operator reads the parts in
place (one H100, BF16, `benchmarks/micro/site_shapes.py`). Wider layers fill the device and stay apart, and so
do heads, which would be copied. Layers whose weight ranges differ by more than `spread` stay apart too: they
would share one per-tensor FP8 scale.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from loka_onnx.core.rewrite import Applied, Declined
from loka_onnx.graph.model import GraphModel, Node, Tensor, is_constant, values_of
from loka_onnx.graph.naming import merged_name
from loka_onnx.transforms.base import Found, Mod, NotRewritten
from loka_onnx.transforms.linears.pattern import Linear, is_candidate, read_linear


@dataclass(frozen=True)
class ParallelLinears:
    """Two or more layers that read one tensor, with the weight on the same side."""

    layers: tuple[Linear, ...]


class MergeParallelLinears(Mod[ParallelLinears]):
    """Parallel linears of N ≤ `widest`, whose largest |weight| differ by `spread` at most → one linear and a
    Split.
    """

    name = "merge-parallel-linears"

    def __init__(self, widest: int = 1024, spread: float = 64.0) -> None:
        self._widest, self._spread = widest, spread

    def match(self, model: GraphModel) -> Found[ParallelLinears]:
        """Match tensors that several linears read."""
        declined: list[Declined] = []
        matches: list[ParallelLinears] = []
        for layers in _groups(model, declined):
            kept = [layer for layer in layers if not self._is_declined(model, layer, declined)]
            kept = self._of_one_range(kept, declined)
            if len(kept) > 1:
                matches.append(ParallelLinears(tuple(kept)))
        return Found(tuple(matches), tuple(declined))

    def rewrite(self, model: GraphModel, match: ParallelLinears) -> Applied:
        """Replace the layers by one product and a Split, whose parts their readers read."""
        layers = match.layers
        names = tuple(layer.node.name for layer in layers)
        product = _merged_product(model, layers, merged_name(names))
        site: Node = product.inputs[0]
        model.rename(site, merged_name(names))
        axis = -2 if layers[0].on_left else -1
        parts = model.split(product, [layer.n for layer in layers], axis, f"{site.name}/split")
        for layer, part in zip(layers, parts, strict=True):
            result = part
            if site.op == "MatMul" and layer.node.op == "Gemm" and layer.bias is not None:
                result = model.add("Add", [part, layer.bias], f"{layer.node.name}/add")
            model.hand_over(layer.node.outputs[0], result)
        widths = " + ".join(str(layer.n) for layer in layers)
        what = f"{len(layers)} linears of K = {layers[0].k} → one of N = {widths}"
        return Applied(site.name, what, {site.name: names})

    def _is_declined(self, model: GraphModel, layer: Linear, declined: list[Declined]) -> bool:
        reason = ""
        if layer.n > self._widest:
            reason = f"N = {layer.n} fills a device by itself: layers of N ≤ {self._widest} are merged"
        elif model.is_output(layer.result):
            reason = "its result leaves the graph: a head keeps a product of its own"
        if reason:
            declined.append(Declined(layer.node.name, reason))
        return bool(reason)

    def _of_one_range(self, layers: list[Linear], declined: list[Declined]) -> list[Linear]:
        """Return the layers whose weight range is within `spread` of the largest."""
        ranges = [float(np.abs(values_of(layer.weight)).max(initial=0.0)) for layer in layers]
        largest = max(ranges, default=0.0)
        kept = []
        for layer, reached in zip(layers, ranges, strict=True):
            if 0 < reached < largest / self._spread:
                other = layers[ranges.index(largest)].node.name
                reason = (
                    f"its weights reach {reached:.3g}, those of '{other}' {largest:.3g}: one scale for both "
                    "would cost precision"
                )
                declined.append(Declined(layer.node.name, reason))
            else:
                kept.append(layer)
        return kept


def _groups(model: GraphModel, declined: list[Declined]) -> list[list[Linear]]:
    """Group linears by the tensor they read; groups of two or more."""
    reading: defaultdict[int, list[Node]] = defaultdict(list)
    for node in model.nodes:
        if is_candidate(node):
            reading[id(node.inputs[1 if is_constant(node.inputs[0]) else 0])].append(node)
    groups: defaultdict[tuple[int, bool, str], list[Linear]] = defaultdict(list)
    for source, nodes in reading.items():
        for node in nodes if len(nodes) > 1 else ():
            try:
                layer = read_linear(model, node)
            except NotRewritten as reason:
                declined.append(Declined(node.name, str(reason)))
                continue
            groups[source, layer.on_left, str(values_of(layer.weight).dtype)].append(layer)
    return [layers for layers in groups.values() if len(layers) > 1]


def _merged_product(model: GraphModel, layers: Sequence[Linear], name: str) -> Tensor:
    """Return one product with every weight: a Gemm with biases where all were Gemms, else a MatMul."""
    first = layers[0]
    is_gemm = all(layer.node.op == "Gemm" for layer in layers)
    weight = first.stored(np.concatenate([layer.weight_kn() for layer in layers], axis=1))
    if first.is_transposed and not (is_gemm or first.on_left):
        weight = weight.T
    operands = [first.source, model.constant(f"{name}.weight", weight)]
    if not is_gemm:
        return model.add("MatMul", operands[::-1] if first.on_left else operands, name, first.source.dtype)
    if any(layer.bias is not None for layer in layers):
        bias = np.concatenate([layer.bias_n() for layer in layers])
        operands.append(model.constant(f"{name}.bias", bias))
    return model.add("Gemm", operands, name, first.source.dtype, {"transB": int(first.is_transposed)})
