"""Fuse a decomposed GroupNorm into GroupNormalization.

With x of shape (N, C, …) and the C channels in G groups (ONNX operator set 21; Wu and He, arXiv 1803.08494,
equations 1 to 3)::

    z = Reshape(x, (N, G, …))    z′ = (z − mean(z)) / sqrt(var(z) + ε), over everything behind the first two
    axes Reshape(z′, shape(x)) · γ + β   =   GroupNormalization(x, γ, β; num_groups = G, ε)

γ and β have one element for each channel, and may be absent. z′ is an InstanceNormalization with unit scale
or primitives. The operator takes inputs of rank 3 and up with channels second; for others, the part between
the two reshapes is a LayerNorm (`fuse`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from loka_onnx.core.rewrite import Applied
from loka_onnx.graph.model import (
    GraphModel,
    Node,
    Tensor,
    consumers,
    is_constant,
    producer,
    shape_of,
    values_of,
)
from loka_onnx.graph.shape_values import Dim, dimensions, read_dimensions, reshaped
from loka_onnx.transforms.norms.fuse import FuseNorm, put_in_place
from loka_onnx.transforms.norms.pattern import DecomposedNorm, NotFused, extended, module_of, nodes_between
from loka_onnx.transforms.norms.reading import read_norm
from loka_onnx.transforms.norms.walk import NotANorm

_OP = "GroupNormalization"
Channels = npt.NDArray[np.floating]


@dataclass(frozen=True)
class GroupedNorm(DecomposedNorm):
    """A norm over groups of channels, with factor and summand of each channel, (C,), or None.

    `site` is the InstanceNormalization between the reshapes, which keeps its name; None for primitives.
    """

    groups: int = 1
    channel_scale: Channels | None = None
    channel_bias: Channels | None = None
    site: Node | None = None


class FuseGroupNorm(FuseNorm[GroupedNorm]):
    """Decomposed GroupNorm → GroupNormalization."""

    name = "fuse-group-norm"
    op = _OP

    def read(self, node: Node) -> GroupedNorm:
        """Read the norm between a Reshape into groups and the Reshape back, or its scale and shift."""
        return _read(node)

    def rewrite(self, model: GraphModel, match: GroupedNorm) -> Applied:
        """Replace the primitives by one node."""
        channels, base = int(shape_of(match.source)[1]), match.module or _OP.lower()
        scale = np.ones(channels) if match.channel_scale is None else match.channel_scale
        bias = np.zeros(channels) if match.channel_bias is None else match.channel_bias
        inputs = [
            match.source,
            model.constant(f"{base}.scale", scale.astype(np.float32)),
            model.constant(f"{base}.bias", bias.astype(np.float32)),
        ]
        epsilon = float(np.float32(match.epsilon))
        attrs = {"num_groups": match.groups, "epsilon": epsilon, "stash_type": 1}
        what = f"{len(match.inner)} nodes → {_OP}(num_groups={match.groups}, epsilon={epsilon:.3g})"
        if match.site is None:
            name = put_in_place(model, match, model.add(_OP, inputs, base, match.result.dtype, attrs))
            return Applied(name, what)
        site = match.site
        site.op, site.inputs, site.attrs = _OP, inputs, attrs
        model.hand_over(match.result, model.renew_output(site))
        return Applied(site.name, what)


@dataclass(frozen=True)
class _Core:
    """The part between the two reshapes; scale and bias broadcast against its source."""

    source: Tensor
    axes: tuple[int, ...]
    epsilon: float
    scale: Channels | None
    bias: Channels | None
    module: str
    site: Node | None = None


def _read(node: Node) -> GroupedNorm:
    last = producer(node.inputs[0]) if node.op == "Reshape" else None
    if last is None:
        raise NotANorm("no reshape of a result")
    core = _read_instance_norm(last) if last.op == "InstanceNormalization" else _read_primitives(last)
    split = producer(core.source)
    before = dimensions(split.inputs[0]) if split is not None and split.op == "Reshape" else None
    sizes = _after(split, before)
    if split is None or before is None or sizes is None or _after(node, sizes) != before:
        raise NotANorm("the second reshape does not undo the first")
    source, result = split.inputs[0], node.outputs[0]
    axes = tuple(range(1 - len(before), 0))
    inner = nodes_between(source, result)
    norm = GroupedNorm(source, axes, core.epsilon, True, True, None, None, result, core.module, inner)
    groups = _groups(before, sizes)
    if groups is None or core.axes != tuple(range(2 - len(sizes), 0)):
        raise NotANorm("no groups of channels")
    if len(before) < 3:
        raise NotFused(f"{_OP} takes inputs of rank 3 and up, this one has rank {len(before)}", norm)
    channels = int(before[1])
    norm = replace(
        norm,
        groups=groups,
        site=core.site,
        channel_scale=_in_groups(core.scale, sizes, channels, norm),
        channel_bias=_in_groups(core.bias, sizes, channels, norm),
    )
    return _with_affine(norm, channels)


def _after(reshape: Node | None, before: tuple[Dim, ...] | None) -> tuple[Dim, ...] | None:
    """Return dimensions after a Reshape; None where they are unknown."""
    target = None if reshape is None or before is None else read_dimensions(reshape.inputs[1])
    if reshape is None or before is None or target is None:
        return None
    return reshaped(before, target, zero_copies=not reshape.attrs.get("allowzero", 0))


def _groups(before: tuple[Dim, ...], sizes: tuple[Dim, ...]) -> int | None:
    """Return the number of groups that a reshape makes of the channels; None for another reshape."""
    if len(before) < 2 or len(sizes) < 3 or before[0] != sizes[0]:
        return None
    channels, groups = before[1], sizes[1]
    if not isinstance(channels, int) or not isinstance(groups, int) or not groups or channels % groups:
        return None
    return groups


def _read_instance_norm(node: Node) -> _Core:
    source, scale, bias = node.inputs
    if source.shape is None or not is_constant(scale) or not is_constant(bias):
        raise NotANorm("an InstanceNormalization whose scale is not constant")
    rank = len(source.shape)
    ones = (1,) * (rank - 2)
    return _Core(
        source,
        tuple(range(2 - rank, 0)),
        float(node.attrs.get("epsilon", 1e-5)),
        None if np.all(values_of(scale) == 1) else values_of(scale).reshape(-1, *ones),
        None if np.all(values_of(bias) == 0) else values_of(bias).reshape(-1, *ones),
        module_of(node),
        node,
    )


def _read_primitives(node: Node) -> _Core:
    """Read a LayerNorm with its scale and shift before the Reshape back."""
    steps: list[Channels | None] = []
    for op in ("Add", "Mul"):
        constants = [tensor for tensor in node.inputs if is_constant(tensor)] if node.op == op else []
        steps.append(values_of(constants[0]) if len(constants) == 1 else None)
        if len(constants) == 1:
            maker = producer(next(tensor for tensor in node.inputs if tensor is not constants[0]))
            if maker is None:
                raise NotANorm("a constant or input")
            node = maker
    norm = read_norm(node)
    bias, scale = steps
    if not norm.is_centred or not norm.is_mean:
        raise NotANorm("another norm")
    if (norm.scale is not None and scale is not None) or (
        norm.bias is not None and (bias is not None or scale is not None)
    ):
        raise NotANorm("scaled or shifted twice")
    scale = values_of(norm.scale) if norm.scale is not None else scale
    bias = values_of(norm.bias) if norm.bias is not None else bias
    return _Core(norm.source, norm.axes, norm.epsilon, scale, bias, norm.module)


def _in_groups(
    values: Channels | None, sizes: tuple[Dim, ...], channels: int, norm: GroupedNorm
) -> Channels | None:
    """Return one element for each channel of a constant that broadcasts against the grouped channels."""
    if values is None:
        return None
    groups = int(sizes[1])
    padded = values.reshape((1,) * (len(sizes) - values.ndim) + values.shape)
    has_channels = len(sizes) > 3 and sizes[2] == channels // groups
    rest = padded.shape[3 if has_channels else 2 :]
    if padded.ndim != len(sizes) or padded.shape[0] != 1 or any(length != 1 for length in rest):
        raise NotFused("its scale or bias does not vary along its channels", norm)
    return np.broadcast_to(padded.reshape(padded.shape[1], -1), (groups, channels // groups)).reshape(-1)


def _with_affine(norm: GroupedNorm, channels: int) -> GroupedNorm:
    """Take in a constant scale, then a bias, of channels that alone reads the result."""
    if norm.channel_bias is not None:
        return norm
    step = None if norm.channel_scale is not None else _channel_step(norm, "Mul", channels)
    if step is not None:
        norm = replace(extended(norm, step[0]), channel_scale=step[1])
    step = _channel_step(norm, "Add", channels)
    return norm if step is None else replace(extended(norm, step[0]), channel_bias=step[1])


def _channel_step(norm: GroupedNorm, op: str, channels: int) -> tuple[Node, Channels] | None:
    """Return a node that combines the result with one number for each channel, and these."""
    readers = consumers(norm.result)
    if len(readers) != 1 or readers[0].op != op:
        return None
    constants = [tensor for tensor in readers[0].inputs if is_constant(tensor)]
    rank = len(shape_of(norm.source))
    if len(constants) != 1 or values_of(constants[0]).ndim > rank:
        return None
    values = values_of(constants[0])
    padded = (1,) * (rank - values.ndim) + values.shape
    if any(length != 1 for axis, length in enumerate(padded) if axis != 1) or padded[1] not in (1, channels):
        return None
    return readers[0], np.broadcast_to(values.reshape(-1), (channels,))
