"""Trace channels from the node that makes a tensor to the linear layers that read it.

A factor for each channel of a tensor can move into its readers when all of them are linears and each weight
row meets one channel. Operators between the two may move elements (Transpose, Reshape, …), satisfy
f(s·x) = s·f(x) for positive factors (Relu), or take and join parts (Slice, Split, Gather, Concat). The
operators are run on an array of channel numbers, with `FOREIGN` for elements of other tensors, which shows
the channel that each row meets. A dynamic batch counts as 3.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from loka_onnx.graph.layout import LAYOUT_OPS
from loka_onnx.graph.model import GraphModel, Node, Tensor, consumers
from loka_onnx.graph.moves import Numbers, move, taken_axes
from loka_onnx.graph.shape_values import dimensions
from loka_onnx.transforms.base import NotRewritten
from loka_onnx.transforms.linears.pattern import is_candidate, read_linear

HOMOGENEOUS = frozenset({"Relu", "LeakyRelu"})
"""Elementwise operators with f(s·x) = s·f(x) for s > 0."""
NORMS_WITH_SCALE = frozenset(
    {"LayerNormalization", "RMSNormalization", "GroupNormalization", "InstanceNormalization"}
)
PARTS = frozenset({"Slice", "Split", "Gather", "Concat"})
"""Operators that take or join parts of tensors."""
FOREIGN = -1
"""Channel number of an element of another tensor."""
_BATCH = 3
"""Rarely a layer's length, so that no axis is mistaken for the batch."""
_LARGEST = 1 << 22
"""Most elements of an array of channel numbers; larger tensors are not traced."""


@dataclass(frozen=True)
class Reader:
    """A linear, and the channel that each weight row meets, (K,); `FOREIGN` for one of another tensor."""

    node: Node
    channels: Numbers

    def of_rows(self, factors: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Return a factor for each weight row, (K,), from one for each channel, 1 for foreign rows."""
        return np.where(self.channels == FOREIGN, 1.0, factors[self.channels])


def numbered(tensor: Tensor, axes: tuple[int, ...]) -> Numbers:
    """Return channel numbers in a tensor's shape, counted along `axes`, last one fastest; or NotRewritten."""
    sizes = dimensions(tensor)
    if sizes is None:
        raise NotRewritten(f"the rank of '{tensor.name}' is not known")
    if any(not -len(sizes) <= axis < len(sizes) for axis in axes):
        raise NotRewritten(f"'{tensor.name}' has {len(sizes)} axes, and no channels")
    names = list(dict.fromkeys(size for size in sizes if isinstance(size, str)))
    if len(names) > 1:
        raise NotRewritten(f"the length of axis '{names[1]}' is not known")
    lengths = [_BATCH if isinstance(size, str) else size for size in sizes]
    if np.prod(lengths, dtype=np.int64) > _LARGEST:
        raise NotRewritten(f"'{tensor.name}' is too large to follow")
    kept = [axis % len(lengths) for axis in axes]
    channels = np.arange(np.prod([lengths[axis] for axis in kept], dtype=np.int64))
    ones = [length if axis in kept else 1 for axis, length in enumerate(lengths)]
    return np.broadcast_to(channels.reshape(ones), lengths)


def channel_axes(norm: Node) -> tuple[int, ...]:
    """Return axes that the scale of a norm varies along; NotRewritten if the rank is unknown."""
    shape = norm.inputs[0].shape
    if shape is None:
        raise NotRewritten("the rank of what it normalizes is not known")
    if norm.op not in {"LayerNormalization", "RMSNormalization"}:
        return (1,)
    return tuple(range(int(norm.attrs.get("axis", -1)) % len(shape), len(shape)))


def linear_readers(
    model: GraphModel,
    tensor: Tensor,
    numbers: Numbers,
    between: frozenset[str] = frozenset(),
    first: Sequence[Node] | None = None,
) -> tuple[Reader, ...]:
    """Return every linear that reads a tensor, directly or behind layout operators and those of `between`.

    `between` may hold elementwise operators and those of `PARTS`; `first` are the readers to follow, None for
    all. Raises NotRewritten if another node reads it, an output of the model holds it, or nothing reads it.
    """
    readers: list[Reader] = []
    if first is None and model.is_output(tensor):
        raise NotRewritten(f"'{tensor.name}' is an output of the model")
    pending = [(tensor, numbers, consumers(tensor) if first is None else first)]
    while pending:
        tensor, numbers, nodes = pending.pop()
        for node in nodes:
            if node.op in between or (node.op in LAYOUT_OPS and node.inputs[0] is tensor):
                for output, onward in _behind(node, tensor, numbers):
                    if model.is_output(output):
                        raise NotRewritten(f"'{output.name}' is an output of the model")
                    pending.append((output, onward, consumers(output)))
            else:
                readers.append(_reader(model, node, tensor, numbers))
    if not readers:
        raise NotRewritten("nothing reads it")
    return tuple(readers)


def _behind(node: Node, tensor: Tensor, numbers: Numbers) -> list[tuple[Tensor, Numbers]]:
    """Return outputs that hold elements of the tensor, with their channel numbers."""
    if node.op not in PARTS | LAYOUT_OPS:
        return [(node.outputs[0], numbers)]
    parts = moved(node, tensor, numbers)
    return [
        (output, part)
        for output, part in zip(node.outputs, parts, strict=True)
        if (part != FOREIGN).any() and (consumers(output) or len(parts) == 1)
    ]


def moved(node: Node, tensor: Tensor, numbers: Numbers) -> list[Numbers]:
    """Return the channel numbers of a node's outputs; NotRewritten where they are not known."""
    sizes = dimensions(tensor) or ()
    try:
        if any(isinstance(sizes[axis], str) for axis in taken_axes(node)):
            raise ValueError("it takes a part of the batch")
        return move(node, tensor, numbers, {}, FOREIGN)
    except (ValueError, IndexError) as error:
        raise NotRewritten(f"'{node.name}', a {node.op}, is not followed: {error}") from error


def _along(numbers: Numbers, axis: int) -> Numbers:
    """Return the channel of each position along an axis."""
    first = np.moveaxis(numbers, axis, -1).reshape(-1, numbers.shape[axis])
    if not (first == first[0]).all():
        raise NotRewritten("a row of a weight meets several channels")
    return np.asarray(first[0])


def by_channel(numbers: Numbers, values: npt.NDArray[np.floating], channels: int) -> npt.NDArray[np.float64]:
    """Return a constant's value for each channel, (channels,); NotRewritten if it varies within one."""
    if values.ndim > numbers.ndim:
        raise NotRewritten("a constant adds axes to the tensor")
    try:
        spread = np.broadcast_to(values.astype(np.float64), numbers.shape)
    except ValueError as error:
        raise NotRewritten("a constant widens the tensor") from error
    result = np.zeros(channels)
    result[numbers.reshape(-1)] = spread.reshape(-1)
    if not (result[numbers] == spread).all():
        raise NotRewritten("a constant varies within a channel")
    return result


def _reader(model: GraphModel, node: Node, tensor: Tensor, numbers: Numbers) -> Reader:
    if not is_candidate(node):
        raise NotRewritten(f"'{node.name}' reads it, a {node.op}")
    try:
        linear = read_linear(model, node)
    except NotRewritten as reason:
        raise NotRewritten(f"'{node.name}' reads it: {reason}") from reason
    if linear.source is not tensor:
        raise NotRewritten(f"'{node.name}' reads it as its bias")
    return Reader(node, _along(numbers, linear.channel_axis))
