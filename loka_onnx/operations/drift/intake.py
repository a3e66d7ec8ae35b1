"""Rows from a serving process: checked, and gathered into full batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from loka_onnx.core.artifact import TensorSpec
from loka_onnx.errors import DataError

Arrays = Mapping[str, npt.NDArray[Any]]


@dataclass(frozen=True)
class RowRules:
    """Inputs of a model, with the ids that each column of an input may hold (None: no bound)."""

    inputs: Sequence[TensorSpec]
    bounds: Mapping[str, tuple[range | None, ...]]

    def rows_of(self, arrays: Arrays) -> int:
        """Return the number of rows.

        Raises:
            DataError: They are not the inputs of the model, or of another shape or type.
        """
        names = [spec.name for spec in self.inputs]
        if set(arrays) != set(names):
            raise DataError(
                "E1620 what was fed are not the inputs of the model",
                evidence=f"fed {', '.join(sorted(arrays)) or 'nothing'}; the inputs are {', '.join(names)}",
                remedy="feed one array for each input, the rows on axis 0",
            )
        lengths = set[int]()
        for spec in self.inputs:
            array = arrays[spec.name]
            shape, wanted = tuple(array.shape), spec.shape[1:]
            if len(shape) != len(spec.shape) or any(
                d not in (None, n) for d, n in zip(wanted, shape[1:], strict=True)
            ):
                raise self._wrong(spec, f"its shape is {shape}")
            if not np.can_cast(array.dtype, np.dtype(spec.dtype), "same_kind"):
                raise self._wrong(spec, f"its type is {array.dtype}")
            lengths.add(shape[0])
        if len(lengths) != 1:
            raise DataError(
                "E1621 the arrays that were fed have different numbers of rows",
                evidence=f"{', '.join(map(str, sorted(lengths)))} rows",
                remedy="feed the same rows to every input",
            )
        return lengths.pop()

    def converted(self, arrays: Arrays, rows: npt.NDArray[np.int64]) -> dict[str, npt.NDArray[Any]]:
        """Copy some rows in the types of the model; numbers beyond a type become infinite."""
        with np.errstate(over="ignore"):
            return {spec.name: arrays[spec.name][rows].astype(spec.dtype) for spec in self.inputs}

    def usable(self, arrays: Arrays) -> npt.NDArray[np.bool_]:
        """Return (rows,): True if the numbers of a row are finite and its ids inside their tables."""
        usable = np.ones(len(arrays[self.inputs[0].name]), dtype=np.bool_)
        for spec in self.inputs:
            array = arrays[spec.name]
            if array.dtype.kind == "f":
                usable &= np.isfinite(array).all(axis=tuple(range(1, array.ndim)))
            for column, allowed in enumerate(self.bounds.get(spec.name, ())):
                if allowed is not None:
                    ids = array if array.ndim == 1 else array[:, column]
                    usable &= (ids >= allowed.start) & (ids < allowed.stop)
        return usable

    @staticmethod
    def _wrong(spec: TensorSpec, evidence: str) -> DataError:
        return DataError(
            f"E1622 what was fed to input '{spec.name}' does not fit",
            evidence=f"{evidence}; the model takes {spec.dtype} of shape {spec.shape}",
            remedy="feed what the model is fed",
        )


class BatchBuilder:
    """Gathers rows into batches of one size, in place; holds less than one batch. Not thread-safe."""

    def __init__(self, inputs: Sequence[TensorSpec], batch_rows: int) -> None:
        self._inputs, self._size = tuple(inputs), batch_rows
        self._pieces: list[Arrays] = []
        self.held = 0

    def add(self, arrays: Arrays) -> list[dict[str, npt.NDArray[Any]]]:
        """Keep rows that obey `RowRules`, in arrays that nobody else writes to; return full batches."""
        rows = len(arrays[self._inputs[0].name])
        if not rows:
            return []
        self._pieces.append(arrays)
        self.held += rows
        if self.held < self._size:
            return []
        whole = {
            spec.name: np.concatenate([piece[spec.name] for piece in self._pieces]) for spec in self._inputs
        }
        full = self.held - self.held % self._size
        self.held -= full
        self._pieces = [{name: array[full:].copy() for name, array in whole.items()}] if self.held else []
        return [
            {name: array[start : start + self._size] for name, array in whole.items()}
            for start in range(0, full, self._size)
        ]
