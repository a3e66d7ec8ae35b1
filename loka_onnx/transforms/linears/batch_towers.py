"""Compute towers that lie side by side as one batched product a layer.

A Split of X, (B, E·K), into E equal parts, each in front of a tower of the same layers, as
`merge_parallel_linears` leaves experts whose first layers it has merged::

    xₑ = X[:, e·K : (e+1)·K]        hₑ = f(xₑ)·Wₑ + bₑ        (and so on, layer by layer)

Stacked along a new first axis, with W of shape (E, K, N) and b of shape (E, 1, N)::

    X′ = Transpose(Reshape(X, (B, E, K)), (1, 0, 2))        H′ = f(X′)·W + b        hₑ = H′[e]
    [h₁, …, h_E]  =  Reshape(Transpose(H′, (1, 0, 2)), (B, E·N))

Row e of a batched product is the product of row e (ONNX operator set 13, MatMul, as `numpy.matmul`), and the
functions are elementwise, so every element is the same sum of the same products. Readers of the towers read
parts of a Split, as before.

E·L kernels become L and at most two copies, so it is done where L + 2 < E·L. Layers of one product share a
per-tensor FP8 scale, or per channel the scale of a column
(rank 1, along N): towers whose weight ranges differ by more than `spread` stay apart, and so do results that
leave the graph, because heads most often stay in high precision.

Not a default mod, because its gain on a GPU is not measured: pass it to `apply_mods` behind
`merge_parallel_linears`. Seen in the compiled graphs of TensorRT for RTX 1.7.1 (FP8, four towers of 64 × 32):
the transposition in front costs no kernel, the one behind is part of the bias kernel; rank-3 weights run in
FP8 with one scale or one for each column. A scale for each tower, or along K, makes it multiply in BF16.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from loka_onnx.core.rewrite import Applied, Declined
from loka_onnx.graph.model import GraphModel, Node, Tensor, values_of
from loka_onnx.graph.naming import merged_name
from loka_onnx.transforms.base import Found, Mod
from loka_onnx.transforms.linears.pattern import (
    Linear,
    NotLinear,
    is_candidate,
    only_reader,
    read_linear,
    static_dim,
)

ELEMENTWISE = frozenset(
    {
        *("Relu", "LeakyRelu", "Elu", "Selu", "Celu", "Gelu", "Mish", "HardSwish", "ThresholdedRelu"),
        *("Tanh", "Sigmoid", "HardSigmoid", "Softplus", "Softsign", "Erf", "Abs", "Neg", "Identity"),
    }
)
"""Elementwise functions of one tensor."""
_COPIES = 2
_IN_FRONT = [1, 0, 2]
"""Swaps the towers' axis and the batch's."""


@dataclass(frozen=True)
class Step:
    """Next step of every tower: a layer, or an elementwise function.

    Attributes:
        layers: Linears of equal K and N; empty for a function.
        functions: Nodes of one operator with equal attributes; empty for layers.
    """

    layers: tuple[Linear, ...] = ()
    functions: tuple[Node, ...] = ()

    @property
    def results(self) -> list[Tensor]:
        """Its output in each tower."""
        if self.layers:
            return [layer.result for layer in self.layers]
        return [node.outputs[0] for node in self.functions]


@dataclass(frozen=True)
class Towers:
    """A Split into equal parts, and the steps that all its towers share."""

    split: Node
    steps: tuple[Step, ...]

    @property
    def count(self) -> int:
        """Number of towers, E."""
        return len(self.split.outputs)

    @property
    def layers(self) -> tuple[tuple[Linear, ...], ...]:
        """Every layer, each with one linear for each tower."""
        return tuple(step.layers for step in self.steps if step.layers)


class BatchTowers(Mod[Towers]):
    """Equal towers behind a Split → one batched product a layer.

    Args:
        widest: Largest K and N of a batched layer; a wider one fills a device by itself.
        spread: Largest ratio of the largest |weight| of two linears in one product.
    """

    name = "batch-towers"

    def __init__(self, widest: int = 1024, spread: float = 64.0) -> None:
        self._widest, self._spread = widest, spread

    def match(self, model: GraphModel) -> Found[Towers]:
        """Match Splits whose parts go through equal layers."""
        matches: list[Towers] = []
        declined: list[Declined] = []
        for node in model.nodes:
            if node.op != "Split" or len(node.outputs) < 2:
                continue
            try:
                towers = Towers(node, _steps(model, node))
                if towers.layers:
                    self._check(towers)
                    matches.append(towers)
            except NotLinear as reason:
                declined.append(Declined(node.name, str(reason)))
        return Found(tuple(matches), tuple(declined))

    def rewrite(self, model: GraphModel, match: Towers) -> Applied:
        """Stack the parts, apply each step to all of them, and split the result."""
        split, count = match.split, match.count
        base = f"{split.name}/towers"
        stacked = _reshaped(model, split.inputs[0], [-1, count, match.layers[0][0].k], f"{base}/stack")
        current = model.add("Transpose", [stacked], f"{base}/in_front", attrs={"perm": _IN_FRONT})
        origins: dict[str, tuple[str, ...]] = {}
        for step in match.steps:
            if step.functions:
                current = model.add_like(step.functions[0], [current], step.functions[0].name)
                continue
            names = tuple(layer.node.name for layer in step.layers)
            product = _product(model, step.layers, current, merged_name(names))
            site: Node = product.inputs[0]
            origins[site.name] = names
            current = _biased(model, step.layers, product, site.name)
        width = match.layers[-1][0].n
        back = model.add("Transpose", [current], f"{base}/back", attrs={"perm": _IN_FRONT})
        flat = _reshaped(model, back, [-1, count * width], f"{base}/flat")
        parts = model.split(flat, [width] * count, -1, f"{base}/split")
        for result, part in zip(match.steps[-1].results, parts, strict=True):
            model.hand_over(result, part)
        depth = len(match.layers)
        return Applied(split.name, f"{count} towers of {_layers(depth)} → {depth} batched", origins)

    def _check(self, towers: Towers) -> None:
        """Raise NotLinear with the reason where batching does not pay."""
        depth = len(towers.layers)
        before, after = towers.count * depth, depth + _COPIES
        if after >= before:
            raise NotLinear(
                f"{towers.count} towers of {_layers(depth)}: {before} products would become {depth} and "
                f"{_COPIES} copies"
            )
        for layers in towers.layers:
            longest = max(layers[0].k, layers[0].n)
            if longest > self._widest:
                raise NotLinear(
                    f"'{layers[0].node.name}' of {layers[0].k} × {layers[0].n} fills a device by itself: "
                    f"layers up to {self._widest} are batched"
                )
            self._check_ranges(layers)

    def _check_ranges(self, layers: Sequence[Linear]) -> None:
        ranges = [float(np.abs(values_of(layer.weight)).max(initial=0.0)) for layer in layers]
        least, largest = min((r for r in ranges if r), default=0.0), max(ranges)
        if largest > self._spread * least:
            low, high = (layers[ranges.index(reached)].node.name for reached in (least, largest))
            raise NotLinear(
                f"the weights of '{low}' reach {least:.3g}, those of '{high}' {largest:.3g}: one scale for "
                "both would cost precision"
            )


def _layers(depth: int) -> str:
    return "1 layer" if depth == 1 else f"{depth} layers"


def _steps(model: GraphModel, split: Node) -> tuple[Step, ...]:
    """Return the common steps of all towers behind a Split; empty where there are no towers.

    Raises:
        NotLinear: Two or more parts lead to a linear layer, and they are not equal towers.
    """
    tensors = list(split.outputs)
    steps: list[Step] = []
    while True:
        readers = [only_reader(model, tensor) for tensor in tensors]
        step = _function(model, readers)
        if step is None and all(reader is not None and is_candidate(reader) for reader in readers):
            step = _read_layers(model, readers, tensors, is_first=not any(s.layers for s in steps))
        if step is None:
            break
        steps.append(step)
        tensors = step.results
    if not any(step.layers for step in steps):
        linear = sum(reader is not None and is_candidate(reader) for reader in readers)
        if 1 < linear < len(readers):
            raise NotLinear(f"{linear} of its {len(readers)} parts lead to a linear layer of their own")
        return ()
    _check_source(split, next(step.layers for step in steps if step.layers)[0].k)
    return tuple(steps)


def _function(model: GraphModel, readers: Sequence[Node | None]) -> Step | None:
    """Return the elementwise function that all towers apply."""
    first = readers[0]
    if first is None or first.op not in ELEMENTWISE or len(first.inputs) != 1:
        return None
    nodes = tuple(
        node for node in readers if node is not None and (node.op, node.attrs) == (first.op, first.attrs)
    )
    if len(nodes) < len(readers) or any(model.is_output(node.outputs[0]) for node in nodes):
        return None
    return Step(functions=nodes)


def _read_layers(
    model: GraphModel, readers: Sequence[Node | None], sources: Sequence[Tensor], *, is_first: bool
) -> Step | None:
    """Return the layer that all towers apply; None where a later one ends the towers.

    Raises:
        NotLinear: The first layers differ in form, shape or type.
    """
    try:
        layers = tuple(read_linear(model, reader) for reader in readers)
    except NotLinear:
        if is_first:
            raise
        return None
    shapes = sorted({(layer.k, layer.n) for layer in layers})
    dtypes = {str(values_of(layer.weight).dtype) for layer in layers}
    reason = ""
    if any(
        layer.on_left or layer.source is not source for layer, source in zip(layers, sources, strict=True)
    ):
        reason = "a weight of its towers stands on the left"
    elif len(shapes) > 1:
        reason = f"its towers begin with layers of K × N = {', '.join(f'{k} × {n}' for k, n in shapes)}"
    elif len(dtypes) > 1:
        reason = f"the weights of its towers are of types {', '.join(sorted(dtypes))}"
    elif any(model.is_output(layer.result) for layer in layers):
        reason = "a result of its towers leaves the graph: a head keeps a product of its own"
    if reason and is_first:
        raise NotLinear(reason)
    return None if reason else Step(layers=layers)


def _check_source(split: Node, k: int) -> None:
    source = split.inputs[0]
    rank, count = len(source.shape or ()), len(split.outputs)
    if rank != 2 or int(split.attrs.get("axis", 0)) % rank != 1:
        raise NotLinear(f"it splits a tensor of rank {rank}, not (batch, towers · K) along its last axis")
    if static_dim(source, 1) != count * k:
        raise NotLinear(f"the width of what it splits is not known to be {count} · {k}")


def _reshaped(model: GraphModel, tensor: Tensor, shape: list[int], name: str) -> Tensor:
    target = model.constant(f"{name}.shape", np.array(shape, np.int64))
    return model.add("Reshape", [tensor, target], name)


def _product(model: GraphModel, layers: Sequence[Linear], source: Tensor, name: str) -> Tensor:
    """(E, B, K) times the stacked weights."""
    weight = model.constant(f"{name}.weight", np.stack([layer.weight_kn() for layer in layers]))
    product = model.add("MatMul", [source, weight], name)
    model.rename(product.inputs[0], name)
    return product


def _biased(model: GraphModel, layers: Sequence[Linear], product: Tensor, name: str) -> Tensor:
    """(E, B, N) plus the stacked biases, where one of the layers has a bias."""
    if all(layer.bias is None for layer in layers):
        return product
    bias = np.stack([layer.bias_n()[None, :] for layer in layers])
    return model.add("Add", [product, model.constant(f"{name}.bias", bias)], f"{name}/add")
