"""Reductions that the graph itself computes, so that a batch leaves a few numbers per site.

A tensor is reduced over each example in FP32, at most some thousand elements, then over the batch in DOUBLE:
reduction in FP32 throughout was off by 2e-4 at 8192 × 512. The examples' values of all tensors form one
matrix, so a batch costs one DOUBLE reduction instead of one per tensor. Tensors whose first axis is not the
batch are reduced one by one.

`BatchTotals` adds the batches up. Sums are exact and extremes are by nature, so the result depends neither on
the order of batches nor on shards.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx

from loka_onnx.core.exact_sum import ExactSum
from loka_onnx.graph.model import GraphModel, Tensor
from loka_onnx.numerics.column_sums import ColumnSums

Outputs = Mapping[str, npt.NDArray[Any]]


class Reduction(StrEnum):
    """Reduction over all elements of a tensor."""

    SUM = "Sum"
    MAX = "Max"
    MIN = "Min"


@dataclass(frozen=True)
class Slot:
    """Position of a reduction in the vector that is the graph output `output`, one of `REDUCED`."""

    output: str
    position: int

    def read(self, outputs: Outputs) -> float:
        """Return the value of one batch."""
        return float(outputs[self.output][self.position])


@dataclass(frozen=True)
class Count:
    """Number of elements: `per_row` of one example, or a `slot` where only the graph knows."""

    per_row: int | None
    slot: Slot | None

    def read(self, outputs: Outputs, rows: int) -> int:
        """Return the number of elements in one batch."""
        if self.slot is not None:
            return round(self.slot.read(outputs))
        return (self.per_row or 0) * rows


class Reductions:
    """Collects reductions of a graph and makes them its outputs, in place of the model's own."""

    def __init__(self, model: GraphModel) -> None:
        self.model = model
        model.graph.outputs = []
        self._batch = model.inputs[0].shape[0] if model.inputs and model.inputs[0].shape else None
        self._columns: dict[Reduction, list[Tensor]] = {kind: [] for kind in Reduction}
        self._scalars: dict[Reduction, list[Tensor]] = {kind: [] for kind in Reduction}
        self._last = model.constant("loka.last_axis", np.array([1], dtype=np.int64))
        self._first = model.constant("loka.first_axis", np.array([0], dtype=np.int64))
        self._one = model.constant("loka.one", np.array([1], dtype=np.int64))

    def add_squares(self, tensor: Tensor, name: str) -> Slot:
        """Add to the graph the sum of squares of all elements; ReduceSumSquare is slower than two nodes."""
        square = self.model.add("Mul", [tensor, tensor], f"{name}.square")
        square.shape = tensor.shape
        return self.add(square, name)

    def add_count(self, tensor: Tensor, name: str) -> Count:
        """Add to the graph the number of elements, where their shape alone does not say it."""
        lengths = [d for d in (tensor.shape or ())[1:] if isinstance(d, int)]
        if self._is_batch_first(tensor) and len(lengths) == len(tensor.shape or ()) - 1:
            return Count(prod(lengths), None)
        size = self.model.add("Size", [tensor], f"{name}.size", np.int64)
        return Count(None, self._append_scalar(size, name, Reduction.SUM))

    def finish(self) -> None:
        """Make the collected reductions outputs of the graph."""
        for kind in Reduction:
            columns, scalars = self._columns[kind], self._scalars[kind]
            if columns:
                table = self.model.add("Concat", columns, f"loka.{kind}.table", np.float32, {"axis": 1})
                values = self.model.add(
                    f"Reduce{kind}",
                    [self._wide(table, f"loka.{kind}"), self._first],
                    f"loka.{kind}.vector",
                    np.float64,
                    {"keepdims": 0},
                )
                self._emit(values, _table_name(kind), len(columns))
            if scalars:
                values = self.model.add("Concat", scalars, f"loka.{kind}.scalars", np.float64, {"axis": 0})
                self._emit(values, _scalar_name(kind), len(scalars))

    def add(self, tensor: Tensor, name: str, kind: Reduction = Reduction.SUM) -> Slot:
        """Add a reduction over all elements."""
        if not self._is_batch_first(tensor):
            values = self.model.add(
                f"Reduce{kind}", [self._wide(tensor, name)], f"{name}.{kind}", np.float64, {"keepdims": 0}
            )
            return self._append_scalar(values, name, kind)
        flat = tensor
        if tensor.shape is None or len(tensor.shape) != 2:
            flat = self.model.add("Flatten", [tensor], f"{name}.flat", np.float32, {"axis": 1})
        column = self.model.add(
            f"Reduce{kind}", [flat, self._last], f"{name}.rows", np.float32, {"keepdims": 1}
        )
        self._columns[kind].append(column)
        return Slot(_table_name(kind), len(self._columns[kind]) - 1)

    def _append_scalar(self, value: Tensor, name: str, kind: Reduction) -> Slot:
        flat = self.model.add("Reshape", [self._wide(value, name), self._one], f"{name}.one", np.float64)
        self._scalars[kind].append(flat)
        return Slot(_scalar_name(kind), len(self._scalars[kind]) - 1)

    def _wide(self, tensor: Tensor, name: str) -> Tensor:
        return self.model.add("Cast", [tensor], f"{name}.wide", np.float64, {"to": onnx.TensorProto.DOUBLE})

    def _emit(self, values: Tensor, name: str, length: int) -> None:
        values.name = name
        self.model.add_output(values, np.float64, [length])

    def _is_batch_first(self, tensor: Tensor) -> bool:
        return (
            isinstance(self._batch, str)
            and tensor.shape is not None
            and len(tensor.shape) > 0
            and tensor.shape[0] == self._batch
        )


def _table_name(kind: Reduction) -> str:
    return f"loka_{kind.lower()}"


def _scalar_name(kind: Reduction) -> str:
    return f"loka_{kind.lower()}_scalars"


REDUCED = {name(kind): kind for kind in Reduction for name in (_table_name, _scalar_name)}
"""Reduction of each output that `Reductions` may add, by its name."""


def reduced_only(outputs: Outputs) -> dict[str, npt.NDArray[np.float64]]:
    """Return the outputs of `Reductions`, without any other."""
    return {name: outputs[name] for name in REDUCED if name in outputs}


def all_finite(outputs: Outputs) -> bool:
    """True if every reduction of a batch is finite."""
    return all(np.isfinite(outputs[name]).all() for name in REDUCED if name in outputs)


_EXTREMES = {Reduction.MAX: np.maximum, Reduction.MIN: np.minimum}


class BatchTotals:
    """Adds up the outputs of `Reductions`, in place; `rows` counts the rows."""

    def __init__(self) -> None:
        self.rows = 0
        self._sums: dict[str, ColumnSums] = {}
        self._extremes: dict[str, npt.NDArray[np.float64]] = {}

    def add(self, outputs: Outputs, rows: int) -> None:
        """Add one batch of `rows` rows; outputs must be finite (`all_finite`)."""
        self.rows += rows
        for name, kind in REDUCED.items():
            if name not in outputs:
                continue
            vector = outputs[name]
            if kind is Reduction.SUM:
                self._sums.setdefault(name, ColumnSums()).add(vector)
            else:
                known = self._extremes.get(name)
                self._extremes[name] = vector if known is None else _EXTREMES[kind](known, vector)

    def sum(self, slot: Slot) -> ExactSum:
        """Return the sum of a slot over all batches."""
        return self._sums[slot.output].sum(slot.position)

    def extreme(self, slot: Slot) -> float:
        """Return the largest or smallest value of a slot over all batches."""
        return float(self._extremes[slot.output][slot.position])

    def count(self, count: Count) -> int:
        """Return the elements over all batches."""
        if count.slot is not None:
            return round(self.sum(count.slot).value)
        return (count.per_row or 0) * self.rows
