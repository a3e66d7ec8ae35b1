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
from typing import Any

import numpy as np
import numpy.typing as npt

from loka_onnx.graph.layout import LAYOUT_OPS
from loka_onnx.graph.model import GraphModel, Node, Tensor, consumers, is_constant, values_of
from loka_onnx.graph.shape_values import dimensions, read_dimensions
from loka_onnx.transforms.linears.pattern import NotLinear, is_candidate, read_linear

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
Numbers = npt.NDArray[np.int64]


class NotFollowed(Exception):
    """Channels cannot be traced to linears only; the message says why."""


@dataclass(frozen=True)
class Reader:
    """A linear that reads channels.

    Attributes:
        channels: Channel that each weight row meets, (K,); `FOREIGN` for an element of another tensor.
    """

    node: Node
    channels: Numbers

    def of_rows(self, values: npt.NDArray[np.float64], otherwise: float) -> npt.NDArray[np.float64]:
        """Return a value for each weight row, (K,), from one for each channel, `otherwise` for foreign."""
        return np.where(self.channels == FOREIGN, otherwise, values[self.channels])


def numbered(tensor: Tensor, axes: tuple[int, ...]) -> Numbers:
    """Return channel numbers in the shape of a tensor, counted along `axes`, the last one fastest."""
    sizes = dimensions(tensor)
    if sizes is None:
        raise NotFollowed(f"the rank of '{tensor.name}' is not known")
    if any(not -len(sizes) <= axis < len(sizes) for axis in axes):
        raise NotFollowed(f"'{tensor.name}' has {len(sizes)} axes, and no channels")
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
    """Return axes that the scale of a norm varies along."""
    shape = norm.inputs[0].shape
    if shape is None:
        raise NotFollowed("the rank of what it normalizes is not known")
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
    """Return every linear that reads a tensor, directly or behind layout operators.

    Args:
        numbers: Channel numbers in the shape of the tensor.
        between: Further operators that may stand in between: elementwise ones and those of `PARTS`.
        first: Readers of the tensor to follow; None for all.
    """
    found: list[Reader] = []
    if first is None and model.is_output(tensor):
        raise NotFollowed(f"'{tensor.name}' is an output of the model")
    pending = [(tensor, numbers, consumers(tensor) if first is None else first)]
    while pending:
        tensor, numbers, nodes = pending.pop()
        for node in nodes:
            if node.op in between or (node.op in LAYOUT_OPS and node.inputs[0] is tensor):
                for output, onward in _behind(node, tensor, numbers):
                    if model.is_output(output):
                        raise NotFollowed(f"'{output.name}' is an output of the model")
                    pending.append((output, onward, consumers(output)))
            else:
                found.append(_reader(model, node, tensor, numbers))
    if not found:
        raise NotFollowed("nothing reads it")
    return tuple(found)


def _behind(node: Node, tensor: Tensor, numbers: Numbers) -> list[tuple[Tensor, Numbers]]:
    """Return outputs that hold elements of the tensor, with their channel numbers."""
    if node.op not in PARTS:
        return [(node.outputs[0], moved(node, numbers) if node.op in LAYOUT_OPS else numbers)]
    try:
        parts = _taken(node, tensor, numbers)
    except ValueError as error:
        raise NotFollowed(f"'{node.name}', a {node.op}, is not followed: {error}") from error
    return [
        (output, part)
        for output, part in zip(node.outputs, parts, strict=True)
        if (part != FOREIGN).any() and (consumers(output) or len(parts) == 1)
    ]


def _taken(node: Node, tensor: Tensor, numbers: Numbers) -> list[Numbers]:
    if node.op == "Concat":
        joined = [numbers if part is tensor else _foreign(part) for part in node.inputs]
        axis = int(node.attrs["axis"])
        return [np.concatenate([np.asarray(part) for part in joined], axis=axis)]
    if node.inputs[0] is not tensor:
        raise ValueError("it does not stand in the first place")
    if not all(map(is_constant, node.inputs[1:])):
        raise ValueError("what it takes is not constant")
    constants = [values_of(operand) for operand in node.inputs[1:]]
    if node.op == "Slice":
        return [_sliced(node, tensor, numbers, constants)]
    axis = int(node.attrs.get("axis", 0)) % numbers.ndim
    _refuse_batch(tensor, (axis,))
    if node.op == "Gather":
        return [np.take(numbers, constants[0], axis=axis)]
    sizes = constants[0] if constants else None
    if sizes is None:
        # Equal parts; the last one may be smaller.
        step = -(-numbers.shape[axis] // len(node.outputs))
        return np.split(numbers, range(step, step * len(node.outputs), step), axis=axis)
    return np.split(numbers, np.cumsum(sizes)[:-1], axis=axis)


def _sliced(node: Node, tensor: Tensor, numbers: Numbers, constants: Sequence[npt.NDArray[Any]]) -> Numbers:
    starts, ends, *rest = ([int(value) for value in np.atleast_1d(values)] for values in constants)
    axes = rest[0] if rest else list(range(len(starts)))
    steps = rest[1] if len(rest) > 1 else [1] * len(starts)
    _refuse_batch(tensor, tuple(axis % numbers.ndim for axis in axes))
    if min(steps) < 1:
        raise ValueError("it goes backwards")
    for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
        index = [slice(None)] * numbers.ndim
        index[axis] = slice(start, end, step)
        numbers = numbers[tuple(index)]
    return numbers


def _refuse_batch(tensor: Tensor, axes: tuple[int, ...]) -> None:
    sizes = dimensions(tensor)
    if sizes is None or any(isinstance(sizes[axis], str) for axis in axes):
        raise ValueError("it takes a part of the batch")


def _foreign(tensor: Tensor) -> Numbers:
    """Return `FOREIGN` in the shape of a tensor."""
    sizes = dimensions(tensor)
    if sizes is None:
        raise ValueError(f"the rank of '{tensor.name}' is not known")
    lengths = [_BATCH if isinstance(size, str) else size for size in sizes]
    if np.prod(lengths, dtype=np.int64) > _LARGEST:
        raise ValueError(f"'{tensor.name}' is too large to follow")
    return np.broadcast_to(np.int64(FOREIGN), lengths)


def moved(node: Node, numbers: Numbers) -> Numbers:
    """Apply a layout operator to channel numbers."""
    try:
        return _moved(node, numbers)
    except ValueError as error:
        raise NotFollowed(f"'{node.name}' lays out its input in a way that is not known: {error}") from error


def along(numbers: Numbers, axis: int) -> Numbers:
    """Return the channel of each position along an axis."""
    first = np.moveaxis(numbers, axis, -1).reshape(-1, numbers.shape[axis])
    if not (first == first[0]).all():
        raise NotFollowed("a row of a weight meets several channels")
    return np.asarray(first[0])


def by_channel(numbers: Numbers, values: npt.NDArray[np.floating], channels: int) -> npt.NDArray[np.float64]:
    """Return one value for each channel from a constant that broadcasts against a tensor."""
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
