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

import numpy as np
import numpy.typing as npt

from loka_onnx.core.rewrite import Applied, Declined
from loka_onnx.graph.model import GraphModel, Node, Tensor, is_constant, values_of
from loka_onnx.graph.naming import merged_name
from loka_onnx.transforms.base import Found, Mod, find
from loka_onnx.transforms.linears.pattern import Linear, is_bias, is_candidate, read_linear

WIDEST = 1024
"""Largest N that is merged."""
_ACTIVATIONS = frozenset(
    {"Elu", "Gelu", "HardSigmoid", "LeakyRelu", "PRelu", "Relu", "Selu", "Sigmoid", "Softplus", "Tanh"}
)
_ARITHMETIC = frozenset({"Add", "Div", "Mul", "Sub"})
_UNLIKE = "no other layer that reads its input has its activation, an epilogue of the product"

ParallelLinears = tuple[Linear, ...]
"""Two or more layers that read one tensor, with the weight on the same side and the same activation."""


class MergeParallelLinears(Mod[ParallelLinears]):
    """Parallel linears whose largest |weight| differ at most `spread`-fold → one linear and a Split."""

    name = "merge-parallel-linears"

    def __init__(self, spread: float = 64.0) -> None:
        self._spread = spread

    def _find(self, model: GraphModel) -> Iterator[ParallelLinears | Declined]:
        reading: defaultdict[int, list[Node]] = defaultdict(list)
        for node in filter(is_candidate, model.nodes):
            reading[id(node.inputs[1 if is_constant(node.inputs[0]) else 0])].append(node)
        for nodes in (nodes for nodes in reading.values() if len(nodes) > 1):
            groups: defaultdict[tuple[bool, str, str], list[Linear]] = defaultdict(list)
            read = Found.of(find(nodes, lambda node: read_linear(model, node)))
            yield from read.declined
            for layer in read.matches:
                kind = str(values_of(layer.weight).dtype)
                groups[layer.on_left, kind, _form(_following(model, layer))].append(layer)
            for key, layers in groups.items():
                if len(layers) > 1:
                    yield from self._mergeable(model, layers)
                elif any(other[:2] == key[:2] for other in groups if other != key):
                    yield Declined(layers[0].node.name, _UNLIKE)

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
                reason = f"its weights reach {reached:.3g}, those of '{other}' {largest:.3g}: one scale"
                yield Declined(layer.node.name, f"{reason} for both would cost precision")
            else:
                kept.append(layer)
        if len(kept) > 1:
            yield tuple(kept)

    def rewrite(self, model: GraphModel, match: ParallelLinears) -> Applied:
        """Replace the layers by one product and a Split, whose parts their readers read."""
        names = tuple(layer.node.name for layer in match)
        result = _merged_product(model, match, merged_name(names))
        site: Node = result.inputs[0]
        model.rename(site, merged_name(names))
        widths = [layer.n for layer in match]
        following = [_following(model, layer) for layer in match]
        if any(following) and site.op == "MatMul" and any(layer.bias is not None for layer in match):
            bias = model.constant(f"{site.name}.bias", np.concatenate([layer.bias_n() for layer in match]))
            result = model.add("Add", [result, bias], f"{site.name}/add")
        for steps in zip(*following, strict=True):
            op = steps[0].op.lower()
            operands = zip(*(step.inputs for step in steps), strict=True)
            inputs = [
                model.constant(f"{site.name}.{op}", _side_by_side(each, widths))
                if is_constant(each[0])
                else result
                for each in operands
            ]
            result = model.add_like(steps[0], inputs, f"{site.name}/{op}")
        parts = model.split(result, widths, match[0].channel_axis, f"{site.name}/split")
        for layer, chain, part in zip(match, following, parts, strict=True):
            if chain or site.op == "Gemm" or layer.node.op == "MatMul" or layer.bias is None:
                model.hand_over((chain or [layer.node])[-1].outputs[0], part)
            else:
                biased = model.add("Add", [part, layer.bias], f"{layer.node.name}/add")
                model.hand_over(layer.node.outputs[0], biased)
        activation = f" with {following[0][-1].op}" if following[0] else ""
        what = f"{len(match)} linears of K = {match[0].k} → one of N = {' + '.join(map(str, widths))}"
        return Applied(site.name, f"{what}{activation}", {site.name: names})


def _following(model: GraphModel, layer: Linear) -> list[Node]:
    """Return elementwise nodes behind a layer, with constants of its channels at most, to its activation."""
    steps: list[Node] = []
    last, tensor = 0, layer.result
    while not layer.on_left and (node := model.only_reader(tensor)) is not None:
        others = [each for each in node.inputs if each is not tensor]
        is_elementwise = node.op in _ACTIVATIONS | _ARITHMETIC and all(
            is_bias(each, layer.n) for each in others
        )
        if not is_elementwise or model.is_output(node.outputs[0]):
            break
        steps.append(node)
        last = len(steps) if node.op in _ACTIVATIONS else last
        tensor = node.outputs[0]
    return steps[:last]


def _form(steps: Sequence[Node]) -> str:
    """Return what layers have in common that are activated together."""
    return repr([(s.op, sorted(s.attrs.items()), [is_constant(t) for t in s.inputs]) for s in steps])


def _side_by_side(constants: Sequence[Tensor], widths: Sequence[int]) -> npt.NDArray[np.floating]:
    rows = (values_of(each).reshape(-1) for each in constants)
    return np.concatenate([np.broadcast_to(row, (n,)) for row, n in zip(rows, widths, strict=True)])


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
