"""Find tensors that can get more columns without a copy, for `pad_sites`.

- a layer's N, when only layers behind elementwise operators read its result: their K takes the columns. A
  norm reads the width, so it ends the search;
- a layer's N in front of a Split: one more part that nobody reads;
- columns of a Gather with constant positions, alone or in a Concat (the pairs of a DLRM): one position is
  gathered again and meets rows of zeros.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from loka_onnx.graph.model import GraphModel, Node, Tensor, consumers, is_constant, shape_of, values_of
from loka_onnx.transforms.linears.pattern import Linear, made_by, only_reader, static_dim

# fmt: off
FINITE_AT_ZERO = frozenset({
    "Relu", "LeakyRelu", "ThresholdedRelu", "Elu", "Selu", "Celu", "Gelu", "Mish", "Swish", "HardSwish",
    "Tanh", "Sigmoid", "HardSigmoid", "Softplus", "Softsign", "Clip", "Erf", "Identity", "Abs", "Neg",
})
# fmt: on
"""Elementwise operators of one activation that map zeros to a finite number."""
OF_TWO = frozenset({"Mul", "Add", "Sub"})
"""Elementwise operators of two tensors of one shape; finite inputs give finite outputs."""


@dataclass(frozen=True)
class Widened:
    """A tensor that gets columns, its maker and its takers.

    Attributes:
        tensor: The result of `maker`, or the source of the layers.
        maker: The layer whose N is padded, or None.
        gather: The Gather of which one position is repeated, or None; with neither there is a Pad.
        between: Computed tensors that become wider with it.
        takers: The layers whose K takes the columns, at the row `position` of their weights.
        split: The Split that gets one more part, or None. Without takers and Split there is a Slice.
    """

    tensor: Tensor
    width: int
    added: int
    maker: Linear | None = None
    gather: Node | None = None
    between: tuple[Tensor, ...] = ()
    takers: tuple[Linear, ...] = ()
    position: int = 0
    split: Node | None = None

    @property
    def letter(self) -> str:
        """K or N: the padded dimension of the site."""
        return "K" if self.maker is None else "N"

    @property
    def site(self) -> str:
        """Name of the site that is padded first."""
        layer = self.takers[0] if self.maker is None else self.maker
        return str(layer.node.name)

    @property
    def how(self) -> str:
        """Source or use of the new columns, in words."""
        names = ", ".join(f"'{taker.node.name}'" for taker in self.takers)
        if self.gather is not None:
            return f"a position of '{self.gather.name}' is gathered again"
        if self.maker is None:
            return f"a Pad in front of {names}"
        if self.takers:
            return f"taken up by the K of {names}"
        return "one more part of the Split" if self.split is not None else "a Slice behind it"


def widened_readers(
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
    return Widened(tensor, layer.n, added, layer, between=wide, takers=by, position=layer.n)


def _is_elementwise(node: Node, tensor: Tensor) -> bool:
    return (
        node.op in FINITE_AT_ZERO
        and node.inputs[0] is tensor
        and all(
            not other.name or (is_constant(other) and values_of(other).size == 1) for other in node.inputs[1:]
        )
    )


def split_behind(model: GraphModel, tensor: Tensor) -> Node | None:
    """Return the last-axis Split by constant sizes that alone reads a tensor."""
    node = only_reader(model, tensor)
    if node is None or node.op != "Split" or tensor.shape is None:
        return None
    is_last = int(node.attrs.get("axis", 0)) in (-1, len(tensor.shape) - 1)
    return node if is_last and len(node.inputs) > 1 and is_constant(node.inputs[1]) else None


def widened_gather(model: GraphModel, layer: Linear, added: int) -> Widened | None:
    """Widen the source of a layer by columns that are gathered again, unseen by other readers."""
    source = layer.source
    if only_reader(model, source) is not layer.node:
        return None
    widened = Widened(source, layer.k, added, takers=(layer,))
    if _is_column_gather(source):
        return replace(widened, gather=source.inputs[0], between=(source,), position=layer.k)
    concat = made_by(source, "Concat")
    if concat is None or int(concat.attrs["axis"]) not in (-1, len(shape_of(source)) - 1):
        return None
    position = 0
    for part in concat.inputs:
        width = static_dim(part, -1)
        if width is None:
            return None
        position += width
        if _is_column_gather(part) and only_reader(model, part) is concat:
            return replace(widened, gather=part.inputs[0], between=(part, source), position=position)
    return None


def _is_column_gather(tensor: Tensor) -> bool:
    node = made_by(tensor, "Gather")
    if node is None or tensor.shape is None or is_constant(node.inputs[0]) or not is_constant(node.inputs[1]):
        return False
    positions = values_of(node.inputs[1])
    is_last = int(node.attrs.get("axis", 0)) in (-1, len(tensor.shape) - 1)
    return positions.ndim == 1 and positions.size > 0 and is_last


def widened_shape(tensor: Tensor, added: int) -> list[int | str] | None:
    """Return the shape with more columns; None where it is unknown."""
    if tensor.shape is None or not isinstance(tensor.shape[-1], int):
        return None
    return [*tensor.shape[:-1], tensor.shape[-1] + added]
