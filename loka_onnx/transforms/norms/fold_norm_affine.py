"""Fold the scale and shift of a norm into the linears behind it.

A norm computes γ·z + β with the normalized value z. Where only linears read it (weights on the left alike)::

    (γ·z + β) · W + b   =   z · (diag(γ) W) + (b + β W)

The norm keeps a scale of ones and no bias. z is quantized then, and its range follows from the operator:
|z| ≤ √(K−1) for a norm of K elements that subtracts the mean, √K for one that does not. Layout operators may
stand in between as long as each weight row meets one channel of the norm (`channel_paths`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from loka_onnx.core.rewrite import Applied, Declined
from loka_onnx.graph.model import GraphModel, Node, is_constant, values_of
from loka_onnx.transforms.base import Mod, NotRewritten, find
from loka_onnx.transforms.linears.channel_paths import (
    NORMS_WITH_SCALE,
    Reader,
    channel_axes,
    linear_readers,
    numbered,
)
from loka_onnx.transforms.linears.pattern import Vector, absorb_before


@dataclass(frozen=True)
class ScaledNorm:
    """A norm that only linears read, with γ and β of each channel; β is None for zeros."""

    node: Node
    scale: Vector
    shift: Vector | None
    readers: tuple[Reader, ...]


class FoldNormAffine(Mod[ScaledNorm]):
    """Norm with scale and shift → norm without, and linears that take them over."""

    name = "fold-norm-affine"

    def _find(self, model: GraphModel) -> Iterator[ScaledNorm | Declined]:
        norms = (node for node in model.nodes if node.op in NORMS_WITH_SCALE and not _is_plain(node))
        return find(norms, lambda node: _read(model, node))

    def rewrite(self, model: GraphModel, match: ScaledNorm) -> Applied:
        """Multiply γ into the weights of the readers and add β·W to their biases, in place; the norm keeps a
        scale of ones, and no bias or zeros. NotRewritten if a reader is no linear any more.
        """
        for reader in match.readers:
            shift = None if match.shift is None else match.shift[reader.channels]
            absorb_before(model, reader.node, match.scale[reader.channels], shift)
        node = match.node
        ones = np.ones_like(values_of(node.inputs[1]))
        node.inputs[1] = model.constant(f"{node.name}.ones", ones)
        if len(node.inputs) > 2 and node.op == "LayerNormalization":
            node.inputs = node.inputs[:2]
        elif len(node.inputs) > 2:
            node.inputs[2] = model.constant(f"{node.name}.zeros", np.zeros_like(ones))
        sites = [reader.node.name for reader in match.readers]
        names = ", ".join(f"'{site}'" for site in sites)
        what = "scale" if match.shift is None else "scale and shift"
        return Applied(node.name, f"its {what} moved into {names}", {site: (site,) for site in sites})


def _is_plain(node: Node) -> bool:
    """Return whether a norm has no shift and scales by powers of two, as smoothing (not training) leaves."""
    scale, *rest = (tensor for tensor in node.inputs[1:3] if tensor.name)
    if not is_constant(scale) or not all(map(is_constant, rest)):
        return False
    mantissas, _ = np.frexp(values_of(scale))
    return bool(np.all(mantissas == 0.5) and all(np.all(values_of(bias) == 0) for bias in rest))


def _read(model: GraphModel, node: Node) -> ScaledNorm:
    try:
        constants = [tensor for tensor in node.inputs[1:3] if tensor.name]
        if not all(map(is_constant, constants)):
            raise NotRewritten("they are not constant")
        if any(output.outputs or model.is_output(output) for output in node.outputs[1:]):
            raise NotRewritten("its statistics are read as well")
        axes = channel_axes(node)
        numbers = numbered(node.inputs[0], axes)
        readers = linear_readers(model, node.outputs[0], numbers)
    except NotRewritten as reason:
        raise NotRewritten(f"its scale and shift stay: {reason}") from reason
    lengths = [numbers.shape[axis] for axis in axes]
    scale, *shift = (
        np.broadcast_to(values_of(tensor), lengths).astype(np.float64).reshape(-1) for tensor in constants
    )
    return ScaledNorm(node, scale, shift[0] if shift and shift[0].any() else None, readers)
