"""Smoothing: move range from an activation's channels to the weights that multiply them.

SmoothQuant (Xiao et al., arXiv 2211.10438, equation 3), with a positive factor sₖ for each input channel::

    x · W   =   (x · diag(s)⁻¹) · (diag(s) W)

diag(s)⁻¹ moves on into whatever makes x, so that nothing is computed for it:

- the scale and bias of a norm in front of the linear: (γ·z + β) / s = (γ/s)·z + β/s;
- the output channels of a linear in front of it: (u·V + b) / s = u·(V diag(s)⁻¹) + b/s, through Relu too,
  which commutes with positive factors.

Every linear that reads x must agree on its factor, channel by channel. Factors are made by
`numerics.smoothing`, which says what may be hoped of them in FP8; which sites get them is decided by measured
error, before this mod is made.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from loka_onnx.core.rewrite import Applied, Declined
from loka_onnx.errors import TransformError
from loka_onnx.graph.layout import LAYOUT_OPS
from loka_onnx.graph.model import GraphModel, Node, Tensor, is_constant, producer, values_of
from loka_onnx.transforms.base import Found, Mod
from loka_onnx.transforms.channel_paths import (
    HOMOGENEOUS,
    NORMS_WITH_SCALE,
    NotFollowed,
    Numbers,
    Reader,
    channel_axes,
    linear_readers,
    numbered,
)
from loka_onnx.transforms.linear_pattern import NotLinear, is_candidate, read_linear
from loka_onnx.transforms.linear_scaling import Vector, absorb_before, absorb_behind


@dataclass(frozen=True)
class Smoothing:
    """What makes a tensor, the linears that read it, and the divisors of its channels.

    Attributes:
        maker: The norm, or the product of the linear.
        readers: The linears.
        divisors: s of each channel of the maker.
    """

    maker: Node
    readers: tuple[Reader, ...]
    divisors: Vector


class Smooth(Mod[Smoothing]):
    """Factors of input channels move from activations into weights.

    Args:
        factors: By name of a linear site, sₖ of each of its K input channels. A site that is not named has
        ones.

    Raises:
        TransformError: A factor is not a positive number.
    """

    name = "smooth"

    def __init__(self, factors: Mapping[str, npt.ArrayLike]) -> None:
        self._factors = {site: np.asarray(values, np.float64) for site, values in factors.items()}
        for site, values in self._factors.items():
            if values.ndim != 1 or not (np.isfinite(values) & (values > 0)).all():
                raise TransformError(
                    "a smoothing factor is not a positive number",
                    where=f"site '{site}'",
                    evidence=f"factors of shape {values.shape} from {values.min(initial=np.inf):.4g}",
                    remedy="leave channels that are zero throughout at 1",
                )

    def match(self, model: GraphModel) -> Found[Smoothing]:
        """Find what makes the activation of each site."""
        makers: dict[int, _Maker] = {}
        declined: list[Declined] = []
        named = {node.name: node for node in model.nodes if node.name in self._factors}
        for site in self._factors:
            try:
                if site not in named:
                    raise NotFollowed("there is no node of that name")
                if np.all(self._factors[site] == 1.0):
                    continue
                maker = _maker(model, named[site])
                makers.setdefault(id(maker.node), maker)
            except NotFollowed as reason:
                declined.append(Declined(site, str(reason)))
        matches: list[Smoothing] = []
        for maker in makers.values():
            try:
                matches.append(self._smoothing(model, maker))
            except NotFollowed as reason:
                declined.append(Declined(maker.node.name, f"its output is not smoothed: {reason}"))
        return Found(tuple(matches), tuple(declined))

    def rewrite(self, model: GraphModel, match: Smoothing) -> Applied:
        """Divide at the maker, multiply at the readers."""
        for reader in match.readers:
            absorb_before(model, reader.node, match.divisors[reader.channels])
        if match.maker.op in NORMS_WITH_SCALE:
            _divide_norm(model, match.maker, match.divisors)
        else:
            absorb_behind(model, match.maker, 1.0 / match.divisors)
        names = ", ".join(f"'{reader.node.name}'" for reader in match.readers)
        low, high = match.divisors.min(), match.divisors.max()
        return Applied(
            match.maker.name, f"divided by factors from {low:.3g} to {high:.3g}, which moved into {names}"
        )

    def _smoothing(self, model: GraphModel, maker: _Maker) -> Smoothing:
        readers = linear_readers(model, maker.result, maker.numbers, HOMOGENEOUS)
        divisors = np.full(int(maker.numbers.max()) + 1, np.nan)
        for reader in readers:
            factors = self._factors.get(reader.node.name, np.ones(len(reader.channels)))
            if factors.shape != reader.channels.shape:
                raise NotFollowed(
                    f"'{reader.node.name}' has {len(reader.channels)} channels, not {len(factors)}"
                )
            known = divisors[reader.channels]
            if not (np.isnan(known) | (known == factors)).all():
                raise NotFollowed(f"'{reader.node.name}' has other factors than another linear that reads it")
            divisors[reader.channels] = factors
            if not (divisors[reader.channels] == factors).all():
                raise NotFollowed(
                    f"'{reader.node.name}' reads a channel several times, with different factors"
                )
        return Smoothing(maker.node, readers, np.where(np.isnan(divisors), 1.0, divisors))


@dataclass(frozen=True)
class _Maker:
    """A norm or linear whose channels can be divided.

    Attributes:
        node: The norm, or the product of the linear.
        result: Its output, bias included.
        numbers: Numbers of its channels in the place of the elements of its output.
    """

    node: Node
    result: Tensor
    numbers: Numbers


def _maker(model: GraphModel, site: Node) -> _Maker:
    """What makes the activation of a site, behind operators that commute with positive factors."""
    if not is_candidate(site):
        raise NotFollowed("it is no product with one constant operand")
    tensor = site.inputs[1 if is_constant(site.inputs[0]) else 0]
    node = producer(tensor)
    while node is not None and node.op in LAYOUT_OPS | HOMOGENEOUS:
        tensor = node.inputs[0]
        node = producer(tensor)
    if node is None:
        raise NotFollowed(f"its activation comes from the input '{tensor.name}'")
    if node.op in NORMS_WITH_SCALE:
        return _norm(node)
    product = node
    if node.op == "Add":
        product = next((p for p in map(producer, node.inputs) if p is not None and is_candidate(p)), node)
    if not is_candidate(product):
        raise NotFollowed(f"its activation is made by '{node.name}', a {node.op}, which takes no factors")
    try:
        linear = read_linear(model, product)
    except NotLinear as reason:
        raise NotFollowed(f"its activation is made by '{product.name}': {reason}") from reason
    if linear.result is not tensor:
        raise NotFollowed(f"its activation is made by '{node.name}', a {node.op}, which takes no factors")
    return _Maker(product, tensor, numbered(tensor, (-2 if linear.on_left else -1,)))


def _norm(node: Node) -> _Maker:
    if not all(is_constant(tensor) for tensor in node.inputs[1:3] if tensor.name):
        raise NotFollowed(f"the scale of '{node.name}' is not constant")
    return _Maker(node, node.outputs[0], numbered(node.inputs[0], channel_axes(node)))


def _divide_norm(model: GraphModel, node: Node, divisors: Vector) -> None:
    lengths = [int(node.inputs[0].shape[axis]) for axis in channel_axes(node)]
    for position, label in ((1, "scale"), (2, "bias")):
        if position < len(node.inputs) and node.inputs[position].name:
            values = values_of(node.inputs[position])
            divided = values.astype(np.float64) / divisors.reshape(lengths)
            node.inputs[position] = model.constant(f"{node.name}.{label}", divided.astype(values.dtype))
