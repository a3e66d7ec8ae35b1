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
from collections.abc import Iterator, Sequence

import numpy as np

from loka_onnx.core.rewrite import Applied, Declined
from loka_onnx.graph.model import GraphModel, Node, Tensor, is_constant, values_of
from loka_onnx.graph.naming import merged_name
from loka_onnx.transforms.base import Found, Mod, find
from loka_onnx.transforms.linears.pattern import Linear, is_candidate, read_linear

WIDEST = 1024
"""Largest N that is merged."""

ParallelLinears = tuple[Linear, ...]
"""Two or more layers that read one tensor, with the weight on the same side."""


class MergeParallelLinears(Mod[ParallelLinears]):
    """Parallel linears whose largest |weight| differ by `spread` at most → one linear and a Split."""

    name = "merge-parallel-linears"

    def __init__(self, spread: float = 64.0) -> None:
        self._spread = spread

    def _find(self, model: GraphModel) -> Iterator[ParallelLinears | Declined]:
        reading: defaultdict[int, list[Node]] = defaultdict(list)
        for node in filter(is_candidate, model.nodes):
            reading[id(node.inputs[1 if is_constant(node.inputs[0]) else 0])].append(node)
        for nodes in (nodes for nodes in reading.values() if len(nodes) > 1):
            groups: defaultdict[tuple[bool, str], list[Linear]] = defaultdict(list)
            read = Found.of(find(nodes, lambda node: read_linear(model, node)))
            yield from read.declined
            for layer in read.matches:
                groups[layer.on_left, str(values_of(layer.weight).dtype)].append(layer)
            for layers in groups.values():
                if len(layers) > 1:
                    yield from self._mergeable(model, layers)

    def _mergeable(self, model: GraphModel, layers: list[Linear]) -> Iterator[ParallelLinears | Declined]:
        """Decline layers that stay apart, and return the others, if there are two."""
        narrow: list[Linear] = []
        for layer in layers:
            if layer.n > WIDEST:
                reason = f"N = {layer.n} fills a device by itself: layers of N ≤ {WIDEST} are merged"
                yield Declined(layer.node.name, reason)
            elif model.is_output(layer.result):
                reason = "its result leaves the graph: a head keeps a product of its own"
                yield Declined(layer.node.name, reason)
            else:
                narrow.append(layer)
        ranges = [float(np.abs(values_of(layer.weight)).max(initial=0.0)) for layer in narrow]
        largest = max(ranges, default=0.0)
        kept: list[Linear] = []
        for layer, reached in zip(narrow, ranges, strict=True):
            if 0 < reached < largest / self._spread:
                other = narrow[ranges.index(largest)].node.name
                reason = (
                    f"its weights reach {reached:.3g}, those of '{other}' {largest:.3g}: one scale for both"
                )
                yield Declined(layer.node.name, f"{reason} would cost precision")
            else:
                kept.append(layer)
        if len(kept) > 1:
            yield tuple(kept)

    def rewrite(self, model: GraphModel, match: ParallelLinears) -> Applied:
        """Replace the layers by one product and a Split, whose parts their readers read."""
        names = tuple(layer.node.name for layer in match)
        product = _merged_product(model, match, merged_name(names))
        site: Node = product.inputs[0]
        model.rename(site, merged_name(names))
        widths = [layer.n for layer in match]
        parts = model.split(product, widths, match[0].channel_axis, f"{site.name}/split")
        for layer, part in zip(match, parts, strict=True):
            result = part
            if site.op == "MatMul" and layer.node.op == "Gemm" and layer.bias is not None:
                result = model.add("Add", [part, layer.bias], f"{layer.node.name}/add")
            model.hand_over(layer.node.outputs[0], result)
        what = f"{len(match)} linears of K = {match[0].k} → one of N = {' + '.join(map(str, widths))}"
        return Applied(site.name, what, {site.name: names})


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
