"""Pad K and N of linear sites to multiples of 16 with zeros.

For a layer of K × N whose input x gains columns x′ and whose weight gains rows of zeros::

    [x  x′] · [W; 0]   =   x·W + x′·0   =   x·W          (x′ finite)
    x · [W  0] + [b  0]   =   [x·W + b   0]

`widening` finds tensors that can be widened without a copy. Otherwise there is a Pad in front of the layer or
a Slice behind it, where the copy costs less than it saves (one H100, `benchmarks/micro/site_shapes.py`): BF16
products whose K or N is not a multiple of 8 take 1.1 to 5.8 times as long as padded ones; the Pad costs more
than that below K·N = 2¹⁷, the Slice below 2¹⁴. FP8 needs 16, and gains more than the copy from 2²² on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from loka_onnx.core.rewrite import Applied
from loka_onnx.graph.model import GraphModel, Node, Tensor, consumers, is_constant, shape_of, values_of
from loka_onnx.transforms.base import Found, Mod, NotRewritten, find
from loka_onnx.transforms.linears.pattern import Linear, is_candidate, read_linear
from loka_onnx.transforms.linears.widening import (
    Widened,
    split_behind,
    widened_gather,
    widened_readers,
    widened_shape,
)

ALIGNMENT = 16


@dataclass(frozen=True)
class CopyRule:
    """The K·N from which a Pad or Slice is accepted; `float8` for widths that are a multiple of 8."""

    pad: int = 1 << 17
    slice: int = 1 << 14
    float8: int = 1 << 22

    def check(self, letter: str, width: int, products: int) -> None:
        """Decline a copy that does not pay for layers of so many products K·N."""
        limit = self.float8 if width % 8 == 0 else self.pad if letter == "K" else self.slice
        if products < limit:
            gains = "FP8 alone gains" if width % 8 == 0 else "it gains"
            raise NotRewritten(
                f"{letter} = {width} would need a copy, which costs more than {gains} below K·N = {limit}; "
                f"here it is {products}"
            )


class PadSites(Mod[Widened]):
    """K and N of linear sites → multiples of 16; widths below `smallest` stay."""

    name = "pad-sites"

    def __init__(self, rule: CopyRule | None = None, smallest: int = ALIGNMENT) -> None:
        self._rule, self._smallest = rule or CopyRule(), smallest

    def match(self, model: GraphModel) -> Found[Widened]:
        """Match tensors before and behind layers whose last axis is not a multiple of 16."""
        read = find(filter(is_candidate, model.nodes), lambda node: _read_layer(model, node))
        layers = {id(layer.node): layer for layer in read.matches}
        nodes = [layer.node for layer in read.matches]
        results = find(nodes, lambda node: self._widen_result(model, layers[id(node)], layers))
        fed = {id(taker.node) for match in results.matches for taker in match.takers}

        def widen_source(node: Node) -> Widened | None:
            layer = layers[id(node)]
            if layer.k % ALIGNMENT == 0 or id(node) in fed:
                return None
            match = self._widen_source(model, layer, layers)
            fed.update(id(taker.node) for taker in match.takers)
            return match

        sources = find(nodes, widen_source)
        declined = (*read.declined, *results.declined, *sources.declined)
        return Found((*results.matches, *sources.matches), declined)

    def rewrite(self, model: GraphModel, match: Widened) -> Applied:
        """Widen one tensor and the weights of its maker and takers."""
        width = match.width + match.added
        if match.maker is not None:
            _pad_n(model, match.maker, match.added)
        if match.gather is not None:
            positions = values_of(match.gather.inputs[1])
            longer = np.concatenate([positions, np.repeat(positions[-1:], match.added)])
            match.gather.inputs[1] = model.constant(f"{match.gather.name}.positions", longer)
        for tensor in match.between:
            tensor.shape = widened_shape(tensor, match.added)
        if match.takers:
            padded = _padded(model, match) if match.maker is None and match.gather is None else None
            for taker in match.takers:
                if padded is not None:
                    taker.node.inputs[0] = padded
                _pad_weight(model, taker, match.added, 0, match.position)
        elif match.split is not None:
            _add_part(model, match.split, match.added)
        elif match.maker is not None:
            _slice(model, match)
        return Applied(match.site, f"{match.letter} {match.width} → {width}: {match.how}")

    def _widen_result(self, model: GraphModel, layer: Linear, layers: dict[int, Linear]) -> Widened | None:
        """Return how the N of a layer is padded; None for an aligned one."""
        added = -layer.n % ALIGNMENT
        if not added:
            return None
        self._check_gain("N", layer.n, layer.k)
        widened = widened_readers(model, layer, layers, added)
        if widened is not None:
            return widened
        split = split_behind(model, layer.result)
        if split is not None:
            return Widened(layer.result, layer.n, added, layer, between=(layer.result,), split=split)
        self._rule.check("N", layer.n, layer.k * layer.n)
        return Widened(layer.result, layer.n, added, layer)

    def _widen_source(self, model: GraphModel, layer: Linear, layers: dict[int, Linear]) -> Widened:
        """Return how the K of a layer is padded."""
        self._check_gain("K", layer.k, layer.n)
        added = -layer.k % ALIGNMENT
        widened = widened_gather(model, layer, added)
        if widened is not None:
            return widened
        readers = (layers[id(node)] for node in consumers(layer.source) if id(node) in layers)
        takers = tuple(taker for taker in readers if taker.source is layer.source)
        self._rule.check("K", layer.k, sum(taker.k * taker.n for taker in takers))
        return Widened(layer.source, layer.k, added, takers=takers, position=layer.k)

    def _check_gain(self, letter: str, width: int, other: int) -> None:
        """Decline where even free columns gain nothing."""
        if width < self._smallest:
            raise NotRewritten(f"{letter} = {width} is under {self._smallest}")
        if width % 8 == 0 and other < ALIGNMENT:
            raise NotRewritten(
                f"{letter} = {width}: BF16 runs at full speed on multiples of 8, and FP8 is out for a site "
                f"of {'N' if letter == 'K' else 'K'} = {other}"
            )


def _read_layer(model: GraphModel, node: Node) -> Linear | None:
    """Return a layer whose weight may be padded; only unaligned ones are declined."""
    try:
        layer = read_linear(model, node)
        if len(layer.weight.outputs) > 1:
            raise NotRewritten("its weight has other readers, of which each would need a padded copy")
        if layer.on_left:
            raise NotRewritten("its weight stands on the left")
    except NotRewritten:
        shapes = [values_of(tensor).shape for tensor in node.inputs[:2] if is_constant(tensor)]
        if any(length % ALIGNMENT for shape in shapes for length in shape[-2:]):
            raise
        return None
    return layer


def _pad_n(model: GraphModel, layer: Linear, added: int) -> None:
    _pad_weight(model, layer, added, 1, layer.n)
    if layer.add is not None:
        product = layer.node.outputs[0]
        product.shape = widened_shape(product, added)
    if layer.bias is None:
        return
    wide = model.constant(f"{layer.node.name}.bias.padded", np.pad(layer.bias_n(), (0, added)))
    if layer.add is None:
        layer.node.inputs[2] = wide
    else:
        layer.add.inputs[next(i for i, t in enumerate(layer.add.inputs) if t is layer.bias)] = wide


def _pad_weight(model: GraphModel, layer: Linear, added: int, axis: int, position: int) -> None:
    """Insert zeros into the weight (K, N) that the node has by now; its other axis may be padded already."""
    values = values_of(layer.node.inputs[1])
    stored = 1 - axis if layer.is_transposed else axis
    zeros = np.zeros([added if i == stored else d for i, d in enumerate(values.shape)], values.dtype)
    head, tail = np.split(values, [position], axis=stored)
    name = f"{layer.node.name}.weight.padded"
    layer.node.inputs[1] = model.constant(name, np.concatenate([head, zeros, tail], axis=stored))


def _padded(model: GraphModel, match: Widened) -> Tensor:
    rank = len(shape_of(match.tensor))
    ends = np.zeros(2 * rank, np.int64)
    ends[-1] = match.added
    name = f"{match.takers[0].node.name}/pad"
    wide = model.add("Pad", [match.tensor, model.constant(f"{name}.ends", ends)], name)
    wide.shape = widened_shape(match.tensor, match.added)
    return wide


def _slice(model: GraphModel, match: Widened) -> None:
    name = f"{match.site}/slice"
    operands = [
        model.constant(f"{name}.{label}", np.array([value], np.int64))
        for label, value in (("start", 0), ("end", match.width), ("axis", -1))
    ]
    inner = model.insert_behind(match.tensor, "Slice", operands, name)
    inner.shape = widened_shape(match.tensor, match.added)


def _add_part(model: GraphModel, split: Node, added: int) -> None:
    """Replace a Split by one with one more part."""
    parts: Sequence[Tensor] = list(split.outputs)
    sizes = [int(size) for size in values_of(split.inputs[1])]
    split.outputs.clear()
    spare = model.split(split.inputs[0], [*sizes, added], -1, split.name)[-1]
    spare.inputs[0].outputs = [*parts, spare]
