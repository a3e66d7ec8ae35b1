"""Remove operators that change nothing, and join layout operators that follow one another.

- Identity; Dropout outside training; a Cast to the present type, also over a wider one and back; a
  Concat, Sum, Max, Min or Mean of one tensor; a Pad by nothing; a Slice of everything;
- x·1, x/1, x + 0, x − 0, x¹, with a scalar that does not change the shape, and is not a layer's bias;
- a Transpose of a Transpose is one Transpose by the composed permutation, or nothing. With out₁ = x by p and
  out₂ = out₁ by q, axis i of out₂ is axis p[q[i]] of x;
- Reshape, Flatten, Squeeze and Unsqueeze keep the order of the elements. A Reshape behind others reads their
  input, unless its target copies a length (0) from them. Where the last one restores the first shape, all go.
  One length may be dynamic: the number of elements decides it.

No value moves, so the outputs keep their bits (x + 0 turns −0 into 0, which is equal).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import onnx

from loka_onnx.core.rewrite import Applied, Declined
from loka_onnx.graph.model import GraphModel, Node, Tensor, element_type
from loka_onnx.graph.shape_values import static_shape
from loka_onnx.transforms.base import Mod
from loka_onnx.transforms.linears.pattern import constant_at, made_by

_FIXED_ORDER = frozenset({"Reshape", "Flatten", "Squeeze", "Unsqueeze"})
_OF_ONE = frozenset({"Concat", "Sum", "Max", "Min", "Mean"})
_NEUTRAL = {"Mul": 1.0, "Div": 1.0, "Pow": 1.0, "Add": 0.0, "Sub": 0.0}
_COMMUTES = frozenset({"Mul", "Add"})
_T = onnx.TensorProto
_WIDER: dict[int, set[int]] = {
    _T.FLOAT: {_T.DOUBLE},
    _T.FLOAT16: {_T.FLOAT, _T.DOUBLE},
    _T.BFLOAT16: {_T.FLOAT, _T.DOUBLE},
    _T.INT32: {_T.INT64, _T.DOUBLE},
    _T.BOOL: {_T.INT32, _T.INT64},
}
"""Types that hold every value of a type."""
_TO_THE_END = 2**31 - 1


@dataclass(frozen=True)
class Redundant:
    """A node whose result equals `source`, or that reads `source` instead, a Transpose by `permutation`."""

    node: Node
    source: Tensor
    is_removed: bool = True
    permutation: tuple[int, ...] = ()


class RemoveNoOps(Mod[Redundant]):
    """Operators that change nothing → nothing."""

    name = "remove-no-ops"

    def _find(self, model: GraphModel) -> Iterator[Redundant | Declined]:
        """Match in topological order, each node as if earlier matches were gone."""
        walk = _Walk()
        for node in model.sorted_nodes():
            item = walk.visit(node)
            if item is None:
                continue
            if item.is_removed and model.is_output(node.outputs[0]):
                yield Declined(node.name, "it gives the graph's output its name")
                continue
            if item.is_removed:
                walk.equal[id(node.outputs[0])] = item.source
            yield item

    def rewrite(self, model: GraphModel, match: Redundant) -> Applied:
        """Let the readers of one node, or the node itself, read an earlier tensor, in place."""
        node = match.node
        if match.is_removed:
            model.replace_uses(node.outputs[0], match.source)
            return Applied(node.name, f"{node.op} changes nothing: readers read '{match.source.name}'")
        node.inputs[0] = match.source
        if match.permutation:
            node.attrs["perm"] = list(match.permutation)
        return Applied(node.name, f"reads '{match.source.name}', past the {node.op} before it")


class _Walk:
    """Equal earlier tensor of each tensor, and the layout operators between."""

    def __init__(self) -> None:
        self.equal: dict[int, Tensor] = {}
        self._permuted: dict[int, tuple[Tensor, tuple[int, ...]]] = {}
        self._ordered: dict[int, Tensor] = {}

    def visit(self, node: Node) -> Redundant | None:
        """Return how a node can be removed or simplified."""
        if not node.inputs or not node.inputs[0].name:
            return None
        source = _unchanged(node)
        if source is not None:
            return Redundant(node, self._before(source))
        direct = self._before(node.inputs[0])
        if node.op == "Transpose":
            return self._transpose(node, direct)
        if node.op in _FIXED_ORDER:
            return self._fixed_order(node, direct)
        if node.op == "Cast":
            return self._cast(node, direct)
        return None

    def _before(self, tensor: Tensor) -> Tensor:
        return self.equal.get(id(tensor), tensor)

    def _transpose(self, node: Node, direct: Tensor) -> Redundant | None:
        own = _permutation(node)
        if own is None:
            return None
        root, first = self._permuted.get(id(direct), (direct, tuple(range(len(own)))))
        permutation = tuple(first[axis] for axis in own)
        if permutation == tuple(range(len(own))):
            return Redundant(node, root)
        self._permuted[id(node.outputs[0])] = (root, permutation)
        if root is node.inputs[0]:
            return None
        return Redundant(node, root, is_removed=False, permutation=permutation)

    def _fixed_order(self, node: Node, direct: Tensor) -> Redundant | None:
        root = self._ordered.get(id(direct), direct)
        if _is_same_shape(root, node.outputs[0]):
            return Redundant(node, root)
        if _is_same_shape(direct, node.outputs[0]):
            return Redundant(node, direct)
        self._ordered[id(node.outputs[0])] = root
        if root is direct or node.op != "Reshape" or not _is_own_target(node):
            return None
        return Redundant(node, root, is_removed=False)

    def _cast(self, node: Node, direct: Tensor) -> Redundant | None:
        """Match a Cast to the present type, and ``Cast(Cast(x, wider), narrow)`` to the type of x."""
        target = int(node.attrs["to"])
        if direct.dtype is not None and element_type(direct.dtype) == target:
            return Redundant(node, direct)
        earlier = made_by(direct, "Cast")
        if earlier is None or earlier.inputs[0].dtype is None:
            return None
        first = self._before(earlier.inputs[0])
        if element_type(first.dtype) == target and int(earlier.attrs["to"]) in _WIDER.get(target, ()):
            return Redundant(node, first)
        return None


def _unchanged(node: Node) -> Tensor | None:
    """Return the input that a node returns unchanged; None when it may change it."""
    first = node.inputs[0]
    only_output = len(node.outputs) == 1 or not any(t.outputs for t in node.outputs[1:])
    if (
        node.op == "Identity"
        or (node.op in _OF_ONE and len(node.inputs) == 1)
        or (node.op == "Dropout" and only_output and _is_inference(node))
        or (node.op == "Pad" and (pads := constant_at(node, 1)) is not None and not np.any(pads))
        or (node.op == "Slice" and _is_everything(node))
    ):
        return first
    if node.op in _NEUTRAL:
        for position in (1, 0) if node.op in _COMMUTES else (1,):
            values, other = constant_at(node, position), node.inputs[1 - position]
            if (
                values is not None
                and values.size == 1
                and other.shape is not None
                and values.ndim <= len(other.shape)
                and float(values.reshape(-1)[0]) == _NEUTRAL[node.op]
                and not _is_bias(node, other)
            ):
                return other
    return None


def _is_bias(node: Node, source: Tensor) -> bool:
    """Return whether an Add is a layer's bias, which keeps its form when a mod moves it to zero."""
    return node.op == "Add" and made_by(source, "MatMul") is not None


def _is_inference(node: Node) -> bool:
    if len(node.inputs) < 3 or not node.inputs[2].name:
        return True
    training = constant_at(node, 2)
    return training is not None and not np.any(training)


def _is_everything(node: Node) -> bool:
    starts, ends = constant_at(node, 1), constant_at(node, 2)
    steps = constant_at(node, 4) if len(node.inputs) > 4 else np.ones(1)
    if starts is None or ends is None or steps is None:
        return False
    return not np.any(starts) and bool(np.all(ends >= _TO_THE_END)) and bool(np.all(steps == 1))


def _permutation(node: Node) -> tuple[int, ...] | None:
    if "perm" in node.attrs:
        return tuple(int(axis) for axis in node.attrs["perm"])
    shape = node.inputs[0].shape
    return None if shape is None else tuple(reversed(range(len(shape))))


def _is_same_shape(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors of the same ordered elements have one shape."""
    if one.shape is None or other.shape is None:
        return False
    lengths = static_shape(one)
    return lengths == static_shape(other) and lengths.count(None) <= 1


def _is_own_target(node: Node) -> bool:
    """Return whether a Reshape's target does not depend on the shape of its input."""
    target = constant_at(node, 1)
    return target is not None and (bool(node.attrs.get("allowzero", 0)) or bool(np.all(target != 0)))
