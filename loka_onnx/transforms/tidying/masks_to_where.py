"""Write one value at the positions of a mask elementwise, as `x[mask] = value` is exported.

Exporters list the positions, how many depends on the data, and scatter as many copies of the value. Compilers
for GPUs take no such shapes::

    ScatterND(x, Transpose(NonZero(m)), (v, …, v))   =   Where(m, v, x)        m (d₁, …, dₖ), x (d₁, …, dₙ)

Booleans, of which ONNX Runtime has no Where, become (m ∧ v) ∨ (¬m ∧ x).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

import numpy as np
import onnx

from loka_onnx.core.rewrite import Applied, Declined
from loka_onnx.graph.model import GraphModel, Node, Tensor, element_type, is_constant, producer, values_of
from loka_onnx.graph.shape_values import dimensions, static_shape
from loka_onnx.transforms.base import Mod, NotRewritten, find
from loka_onnx.transforms.linears.pattern import made_by

_REPEATING = {"Expand", "Identity", "Reshape", "Squeeze", "Tile", "Unsqueeze"}
"""Operators that keep or repeat the elements of their first input."""
_BOOL = onnx.TensorProto.BOOL


@dataclass(frozen=True)
class MaskedValue:
    """A ScatterND that writes the one element of `value` where `mask` is not zero."""

    node: Node
    mask: Tensor
    value: Tensor


class MasksToWhere(Mod[MaskedValue]):
    """ScatterND of equal values at the positions of a NonZero → Where."""

    name = "masks-to-where"

    def _find(self, model: GraphModel) -> Iterator[MaskedValue | Declined]:
        return find((node for node in model.nodes if node.op == "ScatterND"), _read)

    def rewrite(self, model: GraphModel, match: MaskedValue) -> Applied:
        """Replace the ScatterND; what listed the positions is removed where nothing else reads it."""
        node, data, mask, name = match.node, match.node.inputs[0], match.mask, str(match.node.name)
        if element_type(mask.dtype) != _BOOL:
            mask = model.add("Cast", [mask], f"{name}/mask", np.bool_, {"to": _BOOL})
        axes = range(len(match.mask.shape or ()), len(data.shape or ()))
        if axes:
            inner = model.constant(f"{name}/axes", np.array(axes, np.int64))
            mask = model.add("Unsqueeze", [mask, inner], f"{name}/rows")
        value = _scalar(model, match.value, f"{name}/value")
        if element_type(data.dtype) == _BOOL:
            chosen = model.add("And", [mask, value], f"{name}/chosen")
            kept = model.add("And", [model.add("Not", [mask], f"{name}/not"), data], f"{name}/kept")
            result = model.add("Or", [chosen, kept], f"{name}/where")
        else:
            result = model.add("Where", [mask, value, data], f"{name}/where", data.dtype)
        model.hand_over(node.outputs[0], result)
        return Applied(name, "values at the positions of a mask → elementwise")


def _read(node: Node) -> MaskedValue | None:
    data, indices, updates = node.inputs
    listed = made_by(indices, "Transpose")
    found = None if listed is None else made_by(listed.inputs[0], "NonZero")
    if listed is None or found is None or list(listed.attrs.get("perm", (1, 0))) != [1, 0]:
        return None
    mask = found.inputs[0]
    lengths, masked = dimensions(data), dimensions(mask)
    if lengths is None or not masked or masked != lengths[: len(masked)]:
        raise NotRewritten("shapes of the mask and of what it masks are not known to agree")
    value = _one_value(updates)
    if value is None or node.attrs.get("reduction", "none") != "none":
        raise NotRewritten("the values at the positions of a mask are not one value")
    return MaskedValue(node, mask, value)


def _scalar(model: GraphModel, value: Tensor, name: str) -> Tensor:
    """Return a tensor of one element as one of rank 0, which broadcasts against any."""
    if is_constant(value):
        return value if value.shape == () else model.constant(name, values_of(value).reshape(()))
    return model.add("Reshape", [value, model.constant(f"{name}/shape", np.zeros(0, np.int64))], name)


def _one_value(tensor: Tensor) -> Tensor | None:
    """Return the tensor of one element that another repeats; None where there is none."""
    while True:
        if is_constant(tensor):
            return tensor if values_of(tensor).size == 1 else None
        if tensor.shape is not None and prod(n or 0 for n in static_shape(tensor)) == 1:
            return tensor
        maker = producer(tensor)
        if maker is None or maker.op not in _REPEATING:
            return None
        tensor = maker.inputs[0]
