"""Makers of tensors that linears read, and smoothing: dividing each channel at its maker.

SmoothQuant (Xiao et al., arXiv 2211.10438, equation 3), with a positive factor sₖ for each input channel::

    x · W   =   (x · diag(s)⁻¹) · (diag(s) W)

diag(s)⁻¹ moves on into the maker of x:

- A norm: (γ·z + β) / s = (γ/s)·z + β/s.
- The product of a linear: (u·V + b) / s = u·(V diag(s)⁻¹) + b/s.
- A product with constants, as in models that normalize their features themselves: (x·c) / s = x·(c/s).
- An input of the model: a Mul by 1/s is put behind it. Readers that cannot take part go on reading the input.

Only the last one adds an operation. Between maker and linears may stand layout operators, Relu, LeakyRelu,
Slice, Split, Gather and Concat; all readers of the maker but an input must be linears. `numerics.smoothing`
computes factors.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from loka_onnx.core.rewrite import Applied, Declined
from loka_onnx.graph.model import GraphModel, Node, Tensor, consumers, is_constant, shape_of, values_of
from loka_onnx.graph.moves import Numbers
from loka_onnx.transforms.base import NotRewritten
from loka_onnx.transforms.linears.channel_paths import (
    HOMOGENEOUS,
    NORMS_WITH_SCALE,
    PARTS,
    Reader,
    by_channel,
    channel_axes,
    linear_readers,
    numbered,
)
from loka_onnx.transforms.linears.pattern import (
    Vector,
    absorb_before,
    absorb_behind,
    is_candidate,
    read_linear,
    static_dim,
)

_BETWEEN = HOMOGENEOUS | PARTS


@dataclass(frozen=True)
class Maker:
    """Maker of a tensor, a norm, product or input, with the linears that take its factors.

    `readers` repeats a linear for each position where it reads a channel; `taking` are, for an input, its
    readers that lead to these linears.
    """

    name: str
    node: Node | None
    tensor: Tensor
    channels: int
    readers: tuple[Reader, ...]
    taking: tuple[Node, ...] = ()

    @property
    def is_linear(self) -> bool:
        """True if it is a linear, whose weight is divided."""
        return self.node is not None and is_candidate(self.node)


def find_makers(model: GraphModel) -> Iterator[Maker | Declined]:
    """Yield makers of linears' inputs that can be divided channel by channel, inputs of the model first, then
    in topological order; and `Declined` for others that a linear reads.
    """
    for tensor in model.inputs:
        # Without a linear reader there is nothing to report.
        if any(is_candidate(node) for node in _soon_behind(tensor)):
            yield from _of_input(model, tensor)
    for node in model.sorted_nodes():
        if node.op not in NORMS_WITH_SCALE | {"Mul", "Div"} and not is_candidate(node):
            continue
        tensor = node.outputs[0]
        try:
            tensor, numbers = _made_by(model, node)
            readers = linear_readers(model, tensor, numbers, _BETWEEN)
            yield Maker(node.name, node, tensor, int(numbers.max()) + 1, readers)
        except NotRewritten as reason:
            if any(is_candidate(reader) for reader in _soon_behind(tensor)):
                yield Declined(node.name, f"its output is not smoothed: {reason}")


def smooth(model: GraphModel, maker: Maker, divisors: Vector, why: str = "") -> Applied:
    """Divide channels by `divisors` at a maker, multiply at its readers, in place; `why` ends the log."""
    for reader in maker.readers:
        absorb_before(model, reader.node, reader.of_rows(divisors))
    if maker.node is None:
        _divide_input(model, maker, divisors)
    elif maker.is_linear:
        absorb_behind(model, maker.node, 1.0 / divisors)
    elif maker.node.op in NORMS_WITH_SCALE:
        _divide_norm(model, maker.node, divisors)
    else:
        _divide_product(model, maker.node, divisors)
    sites = list(dict.fromkeys(reader.node.name for reader in maker.readers))
    names = ", ".join(f"'{site}'" for site in sites)
    low, high = divisors.min(), divisors.max()
    what = f"divided by factors from {low:.3g} to {high:.3g}, which moved into {names}{why}"
    # Their operands hold other values now: they are calibrated again.
    changed = [*sites, maker.name] if maker.is_linear else sites
    return Applied(maker.name, what, {site: (site,) for site in changed})


def _made_by(model: GraphModel, node: Node) -> tuple[Tensor, Numbers]:
    """Return the result of a node, bias included, and the channel numbers of its elements."""
    if node.op in NORMS_WITH_SCALE:
        if not all(is_constant(tensor) for tensor in node.inputs[1:3] if tensor.name):
            raise NotRewritten(f"the scale of '{node.name}' is not constant")
        return node.outputs[0], numbered(node.inputs[0], channel_axes(node))
    if is_candidate(node):
        linear = read_linear(model, node)
        return linear.result, numbered(linear.result, (linear.channel_axis,))
    position = _constant_of(node)
    if position is None:
        raise NotRewritten("it multiplies with no constant")
    numbers = _features(node.outputs[0])
    by_channel(numbers, values_of(node.inputs[position]), numbers.shape[-1])
    return node.outputs[0], numbers


def _features(tensor: Tensor) -> Numbers:
    """Return the channel numbers of a tensor with a last axis of known length."""
    numbers = numbered(tensor, (-1,))
    if numbers.ndim < 2 or static_dim(tensor, -1) is None:
        raise NotRewritten("it has no channels")
    return numbers


def _constant_of(node: Node) -> int | None:
    """Return the position of a product's or quotient's constant; None for none."""
    positions = (1,) if node.op == "Div" else (0, 1)
    constants = [i for i in positions if is_constant(node.inputs[i]) and not is_constant(node.inputs[1 - i])]
    return constants[0] if constants else None


def _of_input(model: GraphModel, tensor: Tensor) -> Iterator[Maker | Declined]:
    readers: list[Reader] = []
    taking: list[Node] = []
    try:
        if np.dtype(tensor.dtype).kind != "f":
            raise NotRewritten(f"it holds {np.dtype(tensor.dtype).name}, not features")
        numbers = _features(tensor)
    except NotRewritten as reason:
        yield Declined(tensor.name, f"the input is not scaled: {reason}")
        return
    for node in consumers(tensor):
        try:
            readers += linear_readers(model, tensor, numbers, _BETWEEN, [node])
            taking.append(node)
        except NotRewritten as reason:
            yield Declined(tensor.name, f"'{node.name}' reads the input without scales: {reason}")
    if readers and any(node.name == tensor.name for node in model.nodes):
        yield Declined(tensor.name, "the input is not scaled: a node has the same name")
    elif readers:
        yield Maker(tensor.name, None, tensor, numbers.shape[-1], tuple(readers), tuple(taking))


def _soon_behind(tensor: Tensor) -> Iterator[Node]:
    """Return readers of a tensor, and readers of one-input operators behind it."""
    for node in consumers(tensor):
        yield node
        for output in node.outputs:
            yield from consumers(output)


def _divide_input(model: GraphModel, maker: Maker, divisors: Vector) -> None:
    factors = model.constant(f"{maker.name}.factors", (1.0 / divisors).astype(maker.tensor.dtype))
    scaled = model.add("Mul", [maker.tensor, factors], f"{maker.name}.scaled")
    scaled.shape = maker.tensor.shape
    model.replace_uses(maker.tensor, scaled, maker.taking)


def _divide_norm(model: GraphModel, node: Node, divisors: Vector) -> None:
    lengths = [int(shape_of(node.inputs[0])[axis]) for axis in channel_axes(node)]
    for position, label in ((1, "scale"), (2, "bias")):
        if position < len(node.inputs) and node.inputs[position].name:
            values = values_of(node.inputs[position])
            divided = values.astype(np.float64) / divisors.reshape(lengths)
            node.inputs[position] = model.constant(f"{node.name}.{label}", divided.astype(values.dtype))


def _divide_product(model: GraphModel, node: Node, divisors: Vector) -> None:
    position = _constant_of(node)
    if position is not None:
        values = values_of(node.inputs[position])
        exact = values.astype(np.float64)
        changed = exact * divisors if node.op == "Div" else exact / divisors
        node.inputs[position] = model.constant(f"{node.name}.factors", changed.astype(values.dtype))
