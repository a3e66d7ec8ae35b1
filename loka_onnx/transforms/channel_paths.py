"""Following channels from where a tensor is made to the linear layers that read it.

A factor for each channel of a tensor can move into the linears that read it when nothing else does, and every
element that a weight row multiplies belongs to one channel. Between the two may stand operators that move
elements (Transpose, Reshape, …) and, for positive factors, operators f with f(s·x) = s·f(x) (Relu). Which
channel each row meets is not reasoned out but seen: the layout operators are run on an array that holds, in
place of values, the number of the channel. The batch, which has no length yet, is taken to be 3 there.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from loka_onnx.graph.layout import LAYOUT_OPS
from loka_onnx.graph.model import GraphModel, Node, Tensor, is_constant, values_of
from loka_onnx.graph.shape_values import dimensions, read_dimensions
from loka_onnx.transforms.linear_pattern import NotLinear, is_candidate, read_linear

HOMOGENEOUS = frozenset({"Relu", "LeakyRelu"})
"""Operators with f(s·x) = s·f(x) for s > 0, element by element."""
NORMS_WITH_SCALE = frozenset(
    {"LayerNormalization", "RMSNormalization", "GroupNormalization", "InstanceNormalization"}
)
_BATCH = 3
"""A length that layers rarely have, so that an axis is not mistaken for the batch."""
_LARGEST = 1 << 22
"""Elements of an array of channel numbers; a tensor that is larger for three examples is not followed."""
Numbers = npt.NDArray[np.int64]


class NotFollowed(Exception):
    """Channels cannot be followed to linears only; the message says what stands in the way."""


@dataclass(frozen=True)
class Reader:
    """A linear that reads channels.

    Attributes:
        node: Its Gemm or MatMul.
        channels: Number of the channel that each row of its weight meets, (K,).
    """

    node: Node
    channels: Numbers


def numbered(tensor: Tensor, axes: tuple[int, ...]) -> Numbers:
    """Channel numbers in the place of a tensor's elements: counted along some axes, the last one fastest.

    Raises:
        NotFollowed: More than one dimension is not known.
    """
    sizes = dimensions(tensor)
    if sizes is None:
        raise NotFollowed(f"the rank of '{tensor.name}' is not known")
    names = list(dict.fromkeys(size for size in sizes if isinstance(size, str)))
    if len(names) > 1:
        raise NotFollowed(f"the length of axis '{names[1]}' is not known")
    lengths = [_BATCH if isinstance(size, str) else size for size in sizes]
    if np.prod(lengths, dtype=np.int64) > _LARGEST:
        raise NotFollowed(f"'{tensor.name}' is too large to follow")
    kept = [axis % len(lengths) for axis in axes]
    channels = np.arange(np.prod([lengths[axis] for axis in kept], dtype=np.int64))
    ones = [length if axis in kept else 1 for axis, length in enumerate(lengths)]
    return np.broadcast_to(channels.reshape(ones), lengths)


def channel_axes(norm: Node) -> tuple[int, ...]:
    """Axes that the scale of a norm varies along.

    Raises:
        NotFollowed: The rank of what it normalizes is not known.
    """
    shape = norm.inputs[0].shape
    if shape is None:
        raise NotFollowed("the rank of what it normalizes is not known")
    if norm.op not in {"LayerNormalization", "RMSNormalization"}:
        return (1,)
    return tuple(range(int(norm.attrs.get("axis", -1)) % len(shape), len(shape)))


def linear_readers(
    model: GraphModel, tensor: Tensor, numbers: Numbers, between: frozenset[str] = frozenset()
) -> tuple[Reader, ...]:
    """Every linear that reads a tensor, behind layout operators.

    Args:
        model: The graph.
        tensor: The tensor.
        numbers: Channel numbers in the place of its elements.
        between: Elementwise operators that may stand in between as well.

    Raises:
        NotFollowed: Something else reads it, or a row of a weight meets several channels.
    """
    found: list[Reader] = []
    pending = [(tensor, numbers)]
    while pending:
        tensor, numbers = pending.pop()
        if model.is_output(tensor):
            raise NotFollowed(f"'{tensor.name}' is an output of the model")
        for node in {id(reader): reader for reader in tensor.outputs}.values():
            if node.op in between:
                pending.append((node.outputs[0], numbers))
            elif node.op in LAYOUT_OPS and node.inputs[0] is tensor:
                pending.append((node.outputs[0], moved(node, numbers)))
            else:
                found.append(_reader(model, node, tensor, numbers))
    if not found:
        raise NotFollowed("nothing reads it")
    return tuple(found)


def moved(node: Node, numbers: Numbers) -> Numbers:
    """An array after a layout operator.

    Raises:
        NotFollowed: What the operator does to a batch of that length is not known.
    """
    try:
        return _moved(node, numbers)
    except ValueError as error:
        raise NotFollowed(f"'{node.name}' lays out its input in a way that is not known: {error}") from error


def along(numbers: Numbers, axis: int) -> Numbers:
    """Channel number of each place along an axis.

    Raises:
        NotFollowed: Places along another axis belong to another channel.
    """
    first = np.moveaxis(numbers, axis, -1).reshape(-1, numbers.shape[axis])
    if not (first == first[0]).all():
        raise NotFollowed("a row of a weight meets several channels")
    return np.asarray(first[0])


def by_channel(numbers: Numbers, values: npt.NDArray[np.floating], channels: int) -> npt.NDArray[np.float64]:
    """Values of a constant that broadcasts against a tensor, one for each channel of the tensor.

    Args:
        numbers: Channel numbers in the place of the tensor's elements.
        values: The constant.
        channels: How many channels there are.

    Raises:
        NotFollowed: It varies within a channel, or adds axes to the tensor.
    """
    if values.ndim > numbers.ndim:
        raise NotFollowed("a constant adds axes to the tensor")
    try:
        spread = np.broadcast_to(values.astype(np.float64), numbers.shape)
    except ValueError as error:
        raise NotFollowed("a constant widens the tensor") from error
    result = np.zeros(channels)
    result[numbers.reshape(-1)] = spread.reshape(-1)
    if not (result[numbers] == spread).all():
        raise NotFollowed("a constant varies within a channel")
    return result


def _reader(model: GraphModel, node: Node, tensor: Tensor, numbers: Numbers) -> Reader:
    if not is_candidate(node):
        raise NotFollowed(f"'{node.name}' reads it, a {node.op}")
    try:
        linear = read_linear(model, node)
    except NotLinear as reason:
        raise NotFollowed(f"'{node.name}' reads it: {reason}") from reason
    if linear.source is not tensor:
        raise NotFollowed(f"'{node.name}' reads it as its bias")
    return Reader(node, along(numbers, -2 if linear.on_left else -1))


def _moved(node: Node, numbers: Numbers) -> Numbers:
    if node.op == "Identity":
        return numbers
    if node.op == "Transpose":
        return numbers.transpose(node.attrs.get("perm"))
    if node.op == "Flatten":
        axis = int(node.attrs.get("axis", 1)) % (numbers.ndim + 1)
        return numbers.reshape(int(np.prod(numbers.shape[:axis], dtype=np.int64)), -1)
    if node.op == "Reshape":
        return numbers.reshape(_target(node, numbers))
    axes = _axes(node, numbers)
    if node.op == "Squeeze":
        return np.squeeze(numbers, axes)
    if axes is None:
        raise ValueError("its axes are not constant")
    return np.expand_dims(numbers, axes)


def _target(node: Node, numbers: Numbers) -> list[int]:
    target = read_dimensions(node.inputs[1])
    if target is None:
        raise ValueError("its target is not known")
    sizes = dimensions(node.inputs[0]) or ()
    zero_copies = not node.attrs.get("allowzero", 0)
    lengths = []
    for axis, entry in enumerate(target):
        if entry == 0 and zero_copies:
            lengths.append(numbers.shape[axis])
        elif isinstance(entry, int):
            lengths.append(entry)
        elif entry in sizes:
            lengths.append(numbers.shape[sizes.index(entry)])
        else:
            raise ValueError(f"its target holds the dimension '{entry}'")
    return lengths


def _axes(node: Node, numbers: Numbers) -> tuple[int, ...] | None:
    if "axes" in node.attrs:
        return tuple(int(axis) for axis in node.attrs["axes"])
    if len(node.inputs) < 2:
        return None
    if not is_constant(node.inputs[1]):
        raise ValueError("its axes are not constant")
    return tuple(int(axis) for axis in np.atleast_1d(values_of(node.inputs[1])))
