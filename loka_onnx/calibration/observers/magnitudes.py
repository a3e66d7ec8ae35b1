"""Magnitudes of every floating-point tensor of a graph, which decide whether it fits FP16.

Observed are the largest and smallest element, without writing the absolute values. Layouts of one tensor
share its observer; constants need no data.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from onnx import TensorProto

from loka_onnx.calibration.observers.reductions import BatchTotals, Reductions, Slot
from loka_onnx.core.statistics import TensorRange
from loka_onnx.graph.layout import layout_root
from loka_onnx.graph.model import GraphModel, Tensor, element_type
from loka_onnx.graph.protected import divisors

LARGEST = float(np.finfo(np.float32).max)


@dataclass(frozen=True)
class MagnitudeObserver:
    """Slots of one tensor's smallest and largest element.

    `smallest` is the smallest nonzero magnitude, or `LARGEST`; None for a tensor that is no divisor.
    """

    tensor: str
    low: Slot
    high: Slot
    smallest: Slot | None

    def read(self, totals: BatchTotals) -> TensorRange:
        """Return the magnitudes over all batches."""
        amax = max(abs(totals.extreme(self.low)), abs(totals.extreme(self.high)))
        smallest = LARGEST if self.smallest is None else totals.extreme(self.smallest)
        return TensorRange(min(amax, LARGEST), None if smallest == LARGEST else smallest)


def observe_magnitudes(model: GraphModel) -> tuple[MagnitudeObserver, ...]:
    """Observe every non-constant FP32 tensor of the main graph; the graph's outputs become the magnitudes."""
    tensors = list(_tensors(model))
    divided_by = {divisor.tensor.name for divisor in divisors(model)}
    reductions = Reductions(model)
    extremes: dict[str, tuple[Slot, Slot]] = {}
    observers = []
    for position, tensor in enumerate(tensors):
        root, name = layout_root(tensor).tensor, f"magnitude{position}"
        if root.name not in extremes:
            extremes[root.name] = (
                reductions.minimum(root, f"{name}.min"),
                reductions.maximum(root, f"{name}.max"),
            )
        smallest = None
        if tensor.name in divided_by:
            smallest = reductions.minimum(_nonzero_magnitude(model, tensor, name), f"{name}.smallest")
        observers.append(MagnitudeObserver(tensor.name, *extremes[root.name], smallest))
    reductions.finish()
    return tuple(observers)


def _tensors(model: GraphModel) -> Iterator[Tensor]:
    computed = (tensor for node in model.sorted_nodes() for tensor in node.outputs)
    for tensor in (*model.inputs, *computed):
        if tensor.name and tensor.dtype is not None and element_type(tensor.dtype) == TensorProto.FLOAT:
            yield tensor


def _nonzero_magnitude(model: GraphModel, tensor: Tensor, name: str) -> Tensor:
    """Add the magnitudes of a tensor, with `LARGEST` in place of 0."""
    zero = model.constant(f"{name}.zero", np.array(0, np.float32))
    largest = model.constant(f"{name}.largest", np.array(LARGEST, np.float32))
    magnitude = model.add("Abs", [tensor], f"{name}.magnitude")
    is_zero = model.add("Equal", [magnitude, zero], f"{name}.is_zero", np.bool_)
    nonzero = model.add("Where", [is_zero, largest, magnitude], f"{name}.nonzero", np.float32)
    nonzero.shape = tensor.shape
    return nonzero
