"""Merge linear layers that read the same tensor into one.

Side by side along N, and along the rows for weights that stand on the left, ``W·x``::

    [x·W₁ + b₁, …, x·Wₘ + bₘ]   =   Split(x · [W₁ … Wₘ] + [b₁ … bₘ])

Experts and gates, towers, query, key and value, and the token mixers of a Wukong layer have this form. An
activation f, with constants for each channel at most, moves in front of the Split, where it is an epilogue of
the product; behind it, it is a kernel for each part. So layers with unlike activations stay apart::

    [f₁(y₁), …, fₘ(yₘ)]   =   Split(f([y₁ … yₘ]))        with the constants of f₁ … fₘ concatenated, too

Where no activation follows, a bias of its own Add stays behind the Split: TensorRT for RTX 1.7.1 splits a
merged query, key and value again when the bias comes first.

It pays for two to eight layers of N ≤ 1024: .41 to .94 of the time when the next operator reads the parts in
place (one H100, BF16, `benchmarks/micro/site_shapes.py`). Wider layers fill the device and stay apart, and so
do heads, which would be copied. Layers whose weight ranges differ by more than `spread` stay apart too: they
would share one per-tensor FP8 scale.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from loka_onnx.core.rewrite import Applied, Declined
from loka_onnx.graph.model import GraphModel, Node, Tensor, is_constant, values_of
from loka_onnx.graph.naming import merged_name
from loka_onnx.transforms.base import Found, Mod, find
from loka_onnx.transforms.linears.pattern import Linear, is_bias, is_candidate, only_reader, read_linear

WIDEST = 1024
"""Largest N that is merged."""
_ACTIVATIONS = frozenset(
    {
        "Relu",
        "Tanh",
        "Sigmoid",
        "LeakyRelu",
        "Elu",
        "Selu",
        "Gelu",
        "Softplus",
        "HardSigmoid",
        "PRelu",
        "Clip",
    }
)
_WITH_CONSTANT = frozenset({"Add", "Sub", "Mul", "Div", "PRelu"})

Following = tuple[Node, ...]
"""Elementwise nodes behind a layer, up to its last activation."""


@dataclass(frozen=True)
class ParallelLinears:
    """Two or more layers that read one tensor, with the weight on the same side, and what follows each."""

    layers: tuple[Linear, ...]
    following: tuple[Following, ...]


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
            groups: defaultdict[Any, list[Linear]] = defaultdict(list)
            read = Found.of(find(nodes, lambda node: read_linear(model, node)))
            yield from read.declined
            for layer in read.matches:
                kind = str(values_of(layer.weight).dtype)
                groups[layer.on_left, kind, _form(_following(model, layer))].append(layer)
            for key, layers in groups.items():
                if len(layers) > 1:
                    yield from self._mergeable(model, layers)
                elif any(other[:2] == key[:2] for other in groups if other != key):
                    reason = "no other layer that reads its input has its activation, an epilogue of"
                    yield Declined(layers[0].node.name, f"{reason} the product")

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
            yield ParallelLinears(tuple(kept), tuple(_following(model, layer) for layer in kept))

    def rewrite(self, model: GraphModel, match: ParallelLinears) -> Applied:
        """Replace the layers by one product and a Split, whose parts their readers read."""
        layers = match.layers
        names = tuple(layer.node.name for layer in layers)
        result = _merged_product(model, layers, merged_name(names))
        site: Node = result.inputs[0]
        model.rename(site, merged_name(names))
        widths = [layer.n for layer in layers]
        ends = [layer.node.outputs[0] for layer in layers]
        if any(match.following):
            result = _activated(model, match, result)
            ends = [steps[-1].outputs[0] for steps in match.following]
        parts = model.split(result, widths, layers[0].channel_axis, f"{site.name}/split")
        for layer, part, end in zip(layers, parts, ends, strict=True):
            is_added = any(match.following) or site.op == "Gemm" or layer.node.op == "MatMul"
            result = part
            if layer.bias is not None and not is_added:
                result = model.add("Add", [part, layer.bias], f"{layer.node.name}/add")
            model.hand_over(end, result)
        activation = f" with {match.following[0][-1].op}" if any(match.following) else ""
        what = f"{len(layers)} linears of K = {layers[0].k} → one of N = {' + '.join(map(str, widths))}"
        return Applied(site.name, f"{what}{activation}", {site.name: names})


def _activated(model: GraphModel, match: ParallelLinears, result: Tensor) -> Tensor:
    """Add the biases that the product does not, and what follows all layers."""
    layers, site = match.layers, result.inputs[0]
    if site.op == "MatMul" and any(layer.bias is not None for layer in layers):
        bias = model.constant(f"{site.name}.bias", np.concatenate([layer.bias_n() for layer in layers]))
        result = model.add("Add", [result, bias], f"{site.name}/add")
    for steps in zip(*match.following, strict=True):
        first: Node = steps[0]
        inputs = []
        for position, tensor in enumerate(first.inputs):
            read = [step.inputs[position] for step in steps]
            if not is_constant(tensor):
                inputs.append(result if tensor.name else tensor)
            elif first.op not in _WITH_CONSTANT or _are_equal(read):
                inputs.append(tensor)
            else:
                values = [
                    np.broadcast_to(values_of(one).reshape(-1), (layer.n,))
                    for one, layer in zip(read, layers, strict=True)
                ]
                inputs.append(model.constant(f"{site.name}.{first.op.lower()}", np.concatenate(values)))
        result = model.add_like(first, inputs, f"{site.name}/{first.op.lower()}")
    return result


def _following(model: GraphModel, layer: Linear) -> Following:
    """Return the elementwise nodes behind a layer, up to its last activation; none for `on_left`."""
    steps: list[Node] = []
    last = 0
    node = None if layer.on_left else only_reader(model, layer.result)
    tensor = layer.result
    while node is not None and _is_by_channel(node, tensor, layer.n) and not model.is_output(node.outputs[0]):
        steps.append(node)
        last = len(steps) if node.op in _ACTIVATIONS else last
        tensor = node.outputs[0]
        node = only_reader(model, tensor)
    return tuple(steps[:last])


def _is_by_channel(node: Node, tensor: Tensor, n: int) -> bool:
    """Return whether a node works element by element, with constants for each of N channels at most."""
    others = [other for other in node.inputs if other is not tensor and other.name]
    if node.op in _WITH_CONSTANT:
        return len(others) == 1 == len(node.inputs) - 1 and is_bias(others[0], n)
    return node.op in _ACTIVATIONS and all(
        is_constant(other) and not values_of(other).ndim for other in others
    )


def _form(steps: Following) -> str:
    """Describe what layers that are activated together have in common."""
    forms = []
    for step in steps:
        fixed = step.op not in _WITH_CONSTANT
        constants = [
            None if not is_constant(t) else float(values_of(t)) if fixed else "constant" for t in step.inputs
        ]
        forms.append((step.op, sorted(step.attrs.items()), constants))
    return repr(forms)


def _are_equal(tensors: Sequence[Tensor]) -> bool:
    """Return whether all are the same single number."""
    return all(values_of(t).size == 1 and values_of(t) == values_of(tensors[0]) for t in tensors)


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
