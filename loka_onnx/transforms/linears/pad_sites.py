"""Pad K and N of linear sites to multiples of 16 with zeros.

For a layer of K × N whose input x gains columns x′ and whose weight gains rows of zeros::

    [x  x′] · [W; 0]   =   x·W + x′·0   =   x·W          (x′ finite)
    x · [W  0] + [b  0]   =   [x·W + b   0]

No copy is needed

- where only layers behind elementwise operators read the result: their K takes its columns (a norm reads the
  width, so it ends the search);
- in front of a Split, or elementwise operators and a Split, which gets one more part that nobody reads;
- behind a Gather with constant positions, alone or in a Concat (the pairs of a DLRM): one position is
  gathered again and meets rows of zeros;
- behind a Concat that only layers read, which copies its parts anyway, where K is no multiple of 8: its
  narrowest part gets a Pad.

Otherwise there is a Pad in front of the layer or a Slice behind it, where the copy costs less than it saves
(one H100, `benchmarks/micro/site_shapes.py`): BF16 products whose K or N is not a multiple of 8 take 1.1 to
5.8 times as long as padded ones; the Pad costs more than that below K·N = 2¹⁷, the Slice below 2¹⁴. FP8 needs
16, and gains more than the copy from 2²² on.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np

from loka_onnx.core.rewrite import Applied, Declined
from loka_onnx.graph.model import GraphModel, Node, Tensor, consumers, is_constant, shape_of, values_of
from loka_onnx.transforms.base import Found, Mod, NotRewritten, find
from loka_onnx.transforms.linears.pattern import (
    Linear,
    is_along_last,
    is_candidate,
    made_by,
    read_linear,
    static_dim,
)

ALIGNMENT = 16

FINITE_AT_ZERO = frozenset(
    {"Relu", "LeakyRelu", "ThresholdedRelu", "Elu", "Selu", "Celu", "Gelu", "Mish", "Swish", "HardSwish"}
    | {"Tanh", "Sigmoid", "HardSigmoid", "Softplus", "Softsign", "Clip", "Erf", "Identity", "Abs", "Neg"}
)
"""Elementwise operators of one activation that map zeros to a finite number."""
OF_TWO = frozenset({"Mul", "Add", "Sub"})
"""Elementwise operators of two tensors of one shape; finite inputs give finite outputs."""


@dataclass(frozen=True)
class Widened:
    """A tensor that gets columns: the result of `maker`, whose N is padded, or the source of layers.

    Attributes:
        gather: The Gather of which one position is repeated; without it and a maker there is a Pad.
        part: The Concat, and the number of its part, whose Pad that is; None for a Pad of `tensor`.
        between: Computed tensors that become wider with it.
        takers: The layers whose K takes the columns, at the row `position` of their weights.
        split: The Split that gets one more part. Without takers and Split there is a Slice.
    """

    tensor: Tensor
    added: int
    maker: Linear | None = None
    gather: Node | None = None
    part: tuple[Node, int] | None = None
    between: tuple[Tensor, ...] = ()
    takers: tuple[Linear, ...] = ()
    position: int = 0
    split: Node | None = None

    @property
    def letter(self) -> str:
        """K or N: the padded dimension of the site."""
        return "K" if self.maker is None else "N"

    @property
    def width(self) -> int:
        """The present number of columns."""
        return self.takers[0].k if self.maker is None else self.maker.n

    @property
    def site(self) -> str:
        """Name of the site that is padded first."""
        return str((self.maker or self.takers[0]).node.name)

    @property
    def how(self) -> str:
        """Source or use of the new columns, in words."""
        names = ", ".join(f"'{taker.node.name}'" for taker in self.takers)
        if self.gather is not None:
            return f"a position of '{self.gather.name}' is gathered again"
        if self.maker is None:
            where = f"in front of {names}" if self.part is None else f"of a part of '{self.part[0].name}'"
            return f"a Pad {where}"
        if self.takers:
            return f"taken up by the K of {names}"
        return "one more part of the Split" if self.split is not None else "a Slice behind it"


@dataclass(frozen=True)
class CopyRule:
    """The K·N from which a Pad or Slice is accepted; `float8` for widths that are a multiple of 8."""

    pad: int = 1 << 17
    slice: int = 1 << 14
    float8: int = 1 << 22

    def check(self, letter: str, width: int, products: int) -> None:
        """Raise NotRewritten if a copy, to pad `width` (K or N), does not pay for this many products K·N."""
        limit = self.float8 if width % 8 == 0 else self.pad if letter == "K" else self.slice
        if products < limit:
            gains = "FP8 alone gains" if width % 8 == 0 else "it gains"
            raise NotRewritten(
                f"{letter} = {width} would need a copy, which costs more than {gains} below K·N = {limit}; "
                f"here it is {products}"
            )


class PadSites(Mod[Widened]):
    """K and N of linear sites → multiples of 16; widths below 16 stay."""

    name = "pad-sites"

    def __init__(self, rule: CopyRule | None = None) -> None:
        self._rule = rule or CopyRule()

    def _find(self, model: GraphModel) -> Iterator[Widened | Declined]:
        read = Found.of(find(filter(is_candidate, model.nodes), lambda node: _read_layer(model, node)))
        yield from read.declined
        layers = {id(layer.node): layer for layer in read.matches}
        nodes = [layer.node for layer in read.matches]
        fed: set[int] = set()
        unfed = (node for node in nodes if layers[id(node)].k % ALIGNMENT and id(node) not in fed)
        results = find(nodes, lambda node: self._widen_result(model, layers[id(node)], layers))
        sources = find(unfed, lambda node: self._widen_source(model, layers[id(node)], layers))
        for item in chain(results, sources):
            if isinstance(item, Widened):
                fed |= {id(taker.node) for taker in item.takers}
            yield item

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
            if match.part is not None:
                concat, at = match.part
                concat.inputs[at] = _padded(model, match, concat.inputs[at])
            is_padded = match.maker is None and match.gather is None and match.part is None
            padded = _padded(model, match, match.tensor) if is_padded else None
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
        widened = _widened_readers(model, layer, layers, added)
        if widened is not None:
            return widened
        split, between = _split_behind(model, layer.result)
        if split is not None:
            return Widened(layer.result, added, layer, between=between, split=split)
        self._rule.check("N", layer.n, layer.k * layer.n)
        return Widened(layer.result, added, layer)

    def _widen_source(self, model: GraphModel, layer: Linear, layers: dict[int, Linear]) -> Widened:
        """Return how the K of a layer is padded."""
        self._check_gain("K", layer.k, layer.n)
        added = -layer.k % ALIGNMENT
        readers = (layers[id(node)] for node in consumers(layer.source) if id(node) in layers)
        takers = tuple(taker for taker in readers if taker.source is layer.source)
        widened = _widened_gather(model, layer, added)
        if widened is None and layer.k % 8:
            widened = _widened_concat(model, takers, added)
        if widened is not None:
            return widened
        self._rule.check("K", layer.k, sum(taker.k * taker.n for taker in takers))
        return Widened(layer.source, added, takers=takers, position=layer.k)

    def _check_gain(self, letter: str, width: int, other: int) -> None:
        """Decline where even free columns gain nothing."""
        if width < ALIGNMENT:
            raise NotRewritten(f"{letter} = {width} is under {ALIGNMENT}")
        if width % 8 == 0 and other < ALIGNMENT:
            raise NotRewritten(
                f"{letter} = {width}: BF16 runs at full speed on multiples of 8, and FP8 is out for a site "
                f"of {'N' if letter == 'K' else 'K'} = {other}"
            )


def _widened_readers(
    model: GraphModel, layer: Linear, layers: Mapping[int, Linear], added: int
) -> Widened | None:
    """Widen the result of a layer for the layers behind it; None where any other operator reads it."""
    tensor = layer.result
    between: dict[int, Tensor] = {id(tensor): tensor}
    takers: dict[int, Linear] = {}
    half_widened: set[int] = set()
    pending = [tensor]
    while pending:
        current = pending.pop()
        if model.is_output(current):
            return None
        for node in consumers(current):
            taker = layers.get(id(node))
            if taker is not None and taker.source is current:
                takers[id(node)] = taker
                continue
            is_whole = node.op in OF_TWO and all(id(other) in between for other in node.inputs)
            if is_whole or _is_elementwise(node, current):
                half_widened.discard(id(node))
                if id(node.outputs[0]) not in between:
                    between[id(node.outputs[0])] = node.outputs[0]
                    pending.append(node.outputs[0])
            elif node.op in OF_TWO:
                half_widened.add(id(node))
            else:
                return None
    if not takers or half_widened:
        return None
    wide, by = tuple(between.values()), tuple(takers.values())
    return Widened(tensor, added, layer, between=wide, takers=by, position=layer.n)


def _is_elementwise(node: Node, tensor: Tensor) -> bool:
    return (
        node.op in FINITE_AT_ZERO
        and node.inputs[0] is tensor
        and all(
            not other.name or (is_constant(other) and values_of(other).size == 1) for other in node.inputs[1:]
        )
    )


def _split_behind(model: GraphModel, tensor: Tensor) -> tuple[Node | None, tuple[Tensor, ...]]:
    """Return the last-axis Split by constant sizes behind elementwise readers, and the tensors up to it."""
    between = [tensor]
    node = model.only_reader(tensor)
    while node is not None and _is_elementwise(node, between[-1]):
        between.append(node.outputs[0])
        node = model.only_reader(between[-1])
    if node is None or node.op != "Split" or not is_along_last(node, between[-1]):
        return None, ()
    has_sizes = len(node.inputs) > 1 and is_constant(node.inputs[1])
    return (node, tuple(between)) if has_sizes else (None, ())


def _widened_gather(model: GraphModel, layer: Linear, added: int) -> Widened | None:
    """Widen the source of a layer by columns that are gathered again, unseen by other readers."""
    source = layer.source
    if model.only_reader(source) is not layer.node:
        return None
    widened = Widened(source, added, takers=(layer,))
    if _is_column_gather(source):
        return replace(widened, gather=source.inputs[0], between=(source,), position=layer.k)
    concat = made_by(source, "Concat")
    if concat is None or not is_along_last(concat, source):
        return None
    position = 0
    for part in concat.inputs:
        width = static_dim(part, -1)
        if width is None:
            return None
        position += width
        if _is_column_gather(part) and model.only_reader(part) is concat:
            return replace(widened, gather=part.inputs[0], between=(part, source), position=position)
    return None


def _widened_concat(model: GraphModel, takers: tuple[Linear, ...], added: int) -> Widened | None:
    """Return how the narrowest part of a Concat is padded that only these layers read; None if it is not."""
    source = takers[0].source
    concat = made_by(source, "Concat")
    if concat is None or not is_along_last(concat, source) or model.is_output(source):
        return None
    widths = {at: static_dim(part, -1) for at, part in enumerate(concat.inputs)}
    computed = {at: width or 0 for at, width in widths.items() if not is_constant(concat.inputs[at])}
    if len(consumers(source)) != len(takers) or None in widths.values() or not computed:
        return None
    at = min(computed, key=computed.__getitem__)
    position = sum(width or 0 for width in list(widths.values())[: at + 1])
    return Widened(source, added, part=(concat, at), between=(source,), takers=takers, position=position)


def _is_column_gather(tensor: Tensor) -> bool:
    node = made_by(tensor, "Gather")
    if node is None or is_constant(node.inputs[0]) or not is_constant(node.inputs[1]):
        return False
    positions = values_of(node.inputs[1])
    return positions.ndim == 1 and positions.size > 0 and is_along_last(node, tensor)


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


def _padded(model: GraphModel, match: Widened, tensor: Tensor) -> Tensor:
    rank = len(shape_of(tensor))
    ends = np.zeros(2 * rank, np.int64)
    ends[-1] = match.added
    name = f"{match.takers[0].node.name}/pad"
    wide = model.add("Pad", [tensor, model.constant(f"{name}.ends", ends)], name)
    wide.shape = widened_shape(tensor, match.added)
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
    parts: Sequence[Tensor] = list(split.outputs)
    sizes = [int(size) for size in values_of(split.inputs[1])]
    split.outputs.clear()
    spare = model.split(split.inputs[0], [*sizes, added], -1, split.name)[-1]
    spare.inputs[0].outputs = [*parts, spare]


def widened_shape(tensor: Tensor, added: int) -> list[int | str] | None:
    """Return the shape with more columns; None where it, or the last length, is unknown."""
    if tensor.shape is None or not isinstance(tensor.shape[-1], int):
        return None
    return [*tensor.shape[:-1], tensor.shape[-1] + added]
