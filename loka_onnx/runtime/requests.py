"""Fast check of a request's layout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from loka_onnx.core.artifact import TensorSpec
from loka_onnx.core.manifest import BatchRange
from loka_onnx.errors import DataError

NOT_PLAIN = -1


class Layout:
    """Inputs of a request, prepared for comparison; `whose` names their owner in messages."""

    def __init__(self, specs: Sequence[TensorSpec], batch: BatchRange, whose: str) -> None:
        self._specs, self._batch, self._whose = tuple(specs), batch, whose
        # A tail without a dynamic axis is compared at once, others axis by axis in `rows_of`.
        self._names = {spec.name for spec in specs}
        self._quick = tuple(
            (spec.name, np.dtype(spec.dtype), len(spec.shape), tuple(spec.shape[1:])) for spec in specs
        )
        self._is_quick = bool(specs) and all(
            spec.shape and spec.shape[0] is None and None not in spec.shape[1:] for spec in specs
        )

    def plain_rows(self, inputs: Mapping[str, Any]) -> int:
        """Rows of a valid request of NumPy arrays; `NOT_PLAIN` where it needs the full check."""
        rows = NOT_PLAIN
        try:
            if not self._is_quick or len(inputs) != len(self._quick):
                return NOT_PLAIN
            for name, dtype, axes, tail in self._quick:
                value = inputs[name]
                if type(value) is not np.ndarray or value.dtype != dtype:
                    return NOT_PLAIN
                shape = value.shape
                if len(shape) != axes or shape[1:] != tail or (rows != NOT_PLAIN and shape[0] != rows):
                    return NOT_PLAIN
                rows = shape[0]
        except (KeyError, TypeError, IndexError):
            # An input is missing, or this is no mapping.
            return NOT_PLAIN
        return rows if self._batch.min <= rows <= self._batch.max else NOT_PLAIN

    def check_names(self, inputs: Mapping[str, Any]) -> None:
        """Check that a request is a mapping with exactly the inputs."""
        names = self._names
        if not isinstance(inputs, Mapping):
            raise DataError(
                "E1314 a request is a mapping of names to arrays",
                evidence=f"this is a {type(inputs).__name__}",
                remedy=f"send {{'{min(names, default='name')}': array, …}}",
            )
        if inputs.keys() != names:
            raise DataError(
                f"E1315 the request does not hold the {self._whose}'s inputs",
                evidence=f"missing {sorted(names - set(inputs))}, unknown {sorted(set(inputs) - names)}",
                remedy=f"send {', '.join(sorted(names))}",
            )

    def rows_of(self, inputs: Mapping[str, Any]) -> int:
        """Rows of a valid request of arrays with NumPy's ``dtype`` and ``shape``; `DataError` for another."""
        self.check_names(inputs)
        rows = {spec.name: _rows(inputs[spec.name], spec) for spec in self._specs}
        if len(set(rows.values())) != 1 or not self._batch.min <= min(rows.values()) <= self._batch.max:
            raise DataError(
                "E1316 the request is not a batch that the engine was built for",
                evidence=f"rows {rows}, batches of {self._batch.min} to {self._batch.max}",
                remedy="send equally many rows of every input, and split larger requests",
            )
        return min(rows.values())


def repeated(value: npt.NDArray[Any], rows: int) -> npt.NDArray[Any]:
    """Return `rows` rows of an array, repeated as often as needed."""
    return value[np.arange(rows) % len(value)]


def typed(arrays: Mapping[str, npt.NDArray[Any]], specs: Sequence[TensorSpec]) -> dict[str, npt.NDArray[Any]]:
    """Restore the type of BF16 arrays of a sample, which an npz stores as raw bytes."""
    restored = {}
    for spec in specs:
        value, dtype = arrays[spec.name], np.dtype(spec.dtype)
        is_raw = value.dtype.kind == "V" and value.dtype.itemsize == dtype.itemsize
        restored[spec.name] = value.view(dtype) if is_raw else value
    return restored


def _rows(value: Any, spec: TensorSpec) -> int:
    fits = (
        value.dtype == np.dtype(spec.dtype)
        and len(value.shape) == len(spec.shape)
        and len(value.shape) > 0
        and all(want in {None, got} for want, got in zip(spec.shape, value.shape, strict=True))
    )
    if not fits:
        raise DataError(
            f"E1317 input '{spec.name}' has another type or shape",
            evidence=f"{value.dtype}{tuple(value.shape)}, the model takes {spec.dtype}{spec.shape}",
            remedy="None is the batch or another dynamic dimension; convert the array",
        )
    return int(value.shape[0])
