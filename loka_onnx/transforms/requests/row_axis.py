"""The axis of a node's result that holds rows, if the node computes every row by itself, from trials.

Rows may be taken before or behind such a node::

    take(f(x), i)   =   f(take(x, i))

for every i, which leaves rows out, repeats and reorders them. That is tried with the node, its constants and
random rows, in onnx's reference evaluator: no operator needs a rule of its own. The rows are those of a
batch, or the parts of a concatenation, along any axis.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx.reference import ReferenceEvaluator

from loka_onnx.graph.model import GraphModel, Node, Tensor, element_type, is_constant, values_of

_ROWS, _TAKEN = 3, ([0], [2], [1, 2, 2, 0, 1])
_OTHER = 2
"""Length of other dynamic axes, and rows of a table."""
_TOLERANCE = 1e-3
"""Relative: products of other batch sizes sum in another order, some in FP16."""


@dataclass(frozen=True)
class RowAxis:
    """Axis of the rows; `each` consecutive elements along it belong to one row."""

    axis: int
    each: int = 1

    def taken(self, rows: Sequence[int], array: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return the rows of an array with these numbers, in this order."""
        places = np.array(rows)[:, None] * self.each + np.arange(self.each)
        return np.take(array, places.reshape(-1), self.axis)


def row_axis(model: GraphModel, node: Node, axes: Mapping[int, RowAxis]) -> RowAxis | None:
    """Return the axis of the rows in all results of a node, given those of its inputs by position.

    None where rows are mixed, or a trial is not possible. Inputs without an axis are the same for every row.
    """
    try:
        return _tried(model, node, axes)
    except Exception:
        # What cannot be evaluated raises errors of any type.
        return None


def _tried(model: GraphModel, node: Node, axes: Mapping[int, RowAxis]) -> RowAxis | None:
    generator = np.random.default_rng(0)
    named = [(at, tensor) for at, tensor in enumerate(node.inputs) if tensor.name]
    whole = {tensor.name: _drawn(model, tensor, axes.get(at), generator) for at, tensor in named}
    rows = {tensor.name: axes[at] for at, tensor in named if at in axes}
    proto = model.node_proto(node)
    inputs, outputs = (
        [onnx.helper.make_empty_tensor_value_info(name) for name in names] for names in (whole, proto.output)
    )
    opsets = [onnx.helper.make_opsetid("", model.opset)]
    graph = onnx.helper.make_graph([proto], "node", inputs, outputs)
    evaluator = ReferenceEvaluator(onnx.helper.make_model(graph, opset_imports=opsets))
    results = [np.asarray(result) for result in evaluator.run(None, whole)]
    behind: RowAxis | None = None
    # The last trial has another number of rows: it shows the axis.
    for taken in reversed(_TAKEN):
        part = {name: rows[name].taken(taken, each) if name in rows else each for name, each in whole.items()}
        for before, after in zip(results, evaluator.run(None, part), strict=True):
            behind = behind or _grown(before.shape, after.shape)
            np.testing.assert_allclose(after, behind.taken(taken, before), _TOLERANCE, _TOLERANCE)
    return behind


def _grown(before: tuple[int, ...], after: tuple[int, ...]) -> RowAxis:
    """Return the one axis that other rows have made another length."""
    (axis,) = (at for at, (one, other) in enumerate(zip(before, after, strict=True)) if one != other)
    return RowAxis(axis, before[axis] // _ROWS)


def _drawn(
    model: GraphModel, tensor: Tensor, rows: RowAxis | None, generator: np.random.Generator
) -> npt.NDArray[Any]:
    """Return the values of a constant, or random ones; ids are 0 and 1."""
    if is_constant(tensor):
        return values_of(tensor)
    shape = [n if isinstance(n, int) else _OTHER for n in tensor.shape or ()]
    if model.is_table(tensor):
        shape[0] = _OTHER
    if rows is not None:
        shape[rows.axis] = _ROWS * rows.each
    dtype = np.dtype(onnx.helper.tensor_dtype_to_np_dtype(element_type(tensor.dtype)))
    if dtype.kind in "iub":
        # Neighbours differ.
        return np.asarray(np.indices(shape).sum(axis=0) % _OTHER, dtype)
    return np.asarray(generator.uniform(0.1, 0.9, shape), dtype)
