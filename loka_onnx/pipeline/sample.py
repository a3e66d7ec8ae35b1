"""Generated model inputs: for first inferences in build processes, for latencies, for the sample in a bundle.

Rows of the user's data never leave the run directory. Ids are drawn below the bounds that the embedding
tables set, or below the largest id that was seen; numbers from a standard normal distribution, without their
signs where a model answers those with NaN or infinity (a logarithm of counts). The values are for agreement
between engines, and no accuracy is ever measured on them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

import numpy as np
import numpy.typing as npt

from loka_onnx.core.artifact import TensorSpec
from loka_onnx.data import InputBinding

Arrays = dict[str, npt.NDArray[Any]]


@dataclass(frozen=True)
class Requests:
    """Generated inputs of a model.

    Attributes:
        bindings: How inputs are made of columns, with the bounds of ids.
        unsigned: Whether numbers are drawn without their signs.
    """

    inputs: Sequence[TensorSpec]
    bindings: Sequence[InputBinding]
    unsigned: bool = False
    _seeds: Iterator[int] = field(default_factory=lambda: count(1), repr=False)

    def generated(self, rows: int) -> Arrays:
        """Generated model inputs, others at every call; no row of the user's data."""
        return self.sample(rows, next(self._seeds))

    def sample(self, rows: int, seed: int = 0) -> Arrays:
        """Generated model inputs, the same ones however often the run was resumed."""
        drawn = generated_rows(self.inputs, self.bindings, rows, seed)
        if self.unsigned:
            drawn |= {name: np.abs(values) for name, values in drawn.items() if values.dtype.kind == "f"}
        return drawn


def generated_rows(
    inputs: Sequence[TensorSpec], bindings: Sequence[InputBinding], rows: int, seed: int = 0
) -> Arrays:
    """Inputs of every kind that the model takes, (rows,) or (rows, columns)."""
    generator = np.random.default_rng(seed)
    by_name = {binding.input: binding for binding in bindings}
    return {spec.name: _draw(spec, by_name[spec.name], rows, generator) for spec in inputs}


def bounded_by(binding: InputBinding, rows: npt.NDArray[Any]) -> InputBinding:
    """A binding in which the largest id of some rows bounds the columns that no table does."""
    if not rows.size or not np.issubdtype(np.dtype(binding.dtype), np.integer):
        return binding
    tables = binding.ids or (None,) * len(binding.columns)
    largest = rows.reshape(len(rows), -1).max(axis=0) if len(tables) > 1 else [rows.max()]
    seen = (max(int(value), 0) + 1 for value in largest)
    ids = (table or range(rows) for table, rows in zip(tables, seen, strict=True))
    return replace(binding, ids=tuple(ids))


def _draw(
    spec: TensorSpec, binding: InputBinding, rows: int, generator: np.random.Generator
) -> npt.NDArray[Any]:
    width = spec.shape[1] if len(spec.shape) == 2 and spec.shape[1] is not None else len(binding.columns)
    dtype = np.dtype(spec.dtype)
    values: npt.NDArray[Any]
    if np.issubdtype(dtype, np.floating):
        values = generator.standard_normal((rows, width))
        for column, ids in enumerate(binding.ids or ()):
            if ids is not None:
                values[:, column] = generator.integers(ids.start, ids.stop, size=rows)
    elif dtype == np.bool_:
        values = generator.random((rows, width)) < 0.5
    else:
        # Where neither a table nor rows are known, only id 0 is certain to exist.
        known = [ids or range(1) for ids in binding.ids or (None,)]
        # The lower half counts from the end of the table, and an id below 0 is unusual.
        first = [
            ids.start if ids.start >= 0 else min(max((ids.start + ids.stop) // 2, 0), ids.stop - 1)
            for ids in known
        ]
        values = generator.integers(first, [ids.stop for ids in known], size=(rows, width))
    return np.ascontiguousarray(values[:, 0] if len(spec.shape) == 1 else values, dtype=dtype)
