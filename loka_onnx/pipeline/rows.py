"""Rows of a run: the three splits that its run file names, and generated inputs of its model.

Generated rows are for first inferences in build processes, for latencies and for the sample in a bundle: rows
of the user's data never leave the run directory. Ids are drawn below the bounds that embedding tables set,
or below the largest id that was seen; numbers from a standard normal distribution, without their signs where
a model answers those with NaN or infinity (a logarithm of counts). No accuracy is ever measured on them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from loka_onnx.config import RunConfig, SplitBy
from loka_onnx.core.artifact import TensorSpec
from loka_onnx.data import Dataset, InputBinding, SplitRule, Splits, open_dataset, split_file
from loka_onnx.errors import ConfigError, ModelError
from loka_onnx.sessions.runner import Arrays

IdBounds = Mapping[str, tuple[range | None, ...]]


def bind_columns(
    columns: Mapping[str, tuple[str, ...]], inputs: Sequence[TensorSpec], bounds: IdBounds | None = None
) -> tuple[InputBinding, ...]:
    """Bind each model input to its columns, or to that of its own name where `columns` leaves it out.

    `bounds` are the ids that lookups take, a range for each column. Raises ConfigError if an input is named
    that the model does not have, or the wrong number of columns; ModelError if one has more than two axes.
    """
    known = [spec.name for spec in inputs]
    for name in columns:
        if name not in known:
            raise ConfigError(
                f"E1526 the model has no input '{name}'",
                where="data.inputs",
                evidence=f"its inputs are {', '.join(known)}",
                remedy="correct the name",
            )
    return tuple(
        _bind(columns.get(spec.name, (spec.name,)), spec, (bounds or {}).get(spec.name)) for spec in inputs
    )


def _bind(
    columns: tuple[str, ...], spec: TensorSpec, bounds: tuple[range | None, ...] | None
) -> InputBinding:
    rank = len(spec.shape)
    if rank not in {1, 2}:
        raise ModelError(
            f"E1528 input '{spec.name}' has {rank} axes",
            evidence=f"shape {spec.shape}",
            remedy="a table feeds inputs of shape (batch,) or (batch, columns): reshape inside the model",
        )
    width = spec.shape[1] if rank == 2 else 1
    if width is not None and len(columns) not in {1, width}:
        raise ConfigError(
            f"E1529 input '{spec.name}' takes {width} columns, {len(columns)} are named",
            where=f"data.inputs.{spec.name}",
            evidence=f"its shape is {spec.shape}",
            remedy="name one column for each",
        )
    return InputBinding(spec.name, columns, spec.dtype, rank, bounds)


def fixed_widths(config: RunConfig, inputs: Sequence[TensorSpec]) -> dict[str, int]:
    """Width of each input, (batch, width), that is the same in all rows of a run's data."""
    data = config.data
    paths = (data.path, data.calibration, data.selection, data.certification)
    files = dict.fromkeys(filter(None, paths) if inputs else ())
    bindings = [_bind(data.inputs.get(spec.name, (spec.name,)), spec, None) for spec in inputs]
    first, *others = (open_dataset(path, bindings).widths() for path in files) if files else ({},)
    return {name: width for name, width in first.items() if all(w.get(name) == width for w in others)}


# The splits -----------------------------------------------------------------------------------------


def open_rows(config: RunConfig, path: Path, bindings: Sequence[InputBinding]) -> Dataset:
    """Open a whole file with the columns of a run file; errors as of `open_splits`."""
    return open_dataset(path, bindings, config.columns, None, config.nullable_columns, config.column_keys)


def open_splits(config: RunConfig, bindings: Sequence[InputBinding]) -> Splits:
    """Open the three splits; ConfigError if two share rows, DataError if a file or column is unusable."""
    data = config.data
    if data.path is not None and data.split is not None:
        shares = data.split.fractions.model_dump()
        rule = SplitRule(**shares, column=data.split.column, seed=data.split.seed)
        return split_file(
            data.path, rule, bindings, config.columns, config.nullable_columns, config.column_keys
        )
    if data.calibration is None or data.selection is None or data.certification is None:
        raise ConfigError("E1527 `data` names no rows", remedy="give three files, or `path` with `split`")
    files = (data.calibration, data.selection, data.certification)
    return Splits(*(open_rows(config, path, bindings) for path in files))


def split_rule(config: RunConfig) -> str:
    """Describe how the rows are split."""
    split = config.data.split
    if split is None:
        return "a file of its own"
    shares = split.fractions
    how = f"by a hash of '{split.column}'" if split.by is SplitBy.HASH else "in file order"
    return f"{how}: {shares.calibration:g} / {shares.selection:g} / {shares.certification:g}"


# Generated rows -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Requests:
    """Generated inputs of a model; rows of `shared` inputs are the same for so many `candidates` in turn."""

    inputs: Sequence[TensorSpec]
    bindings: Sequence[InputBinding]
    unsigned: bool = False
    shared: tuple[str, ...] = ()
    candidates: int = 1
    _seeds: Iterator[int] = field(default_factory=lambda: count(1), repr=False)

    def generated(self, rows: int) -> Arrays:
        """Generated model inputs, others at every call."""
        return self.sample(rows, next(self._seeds))

    def sample(self, rows: int, seed: int = 0) -> Arrays:
        """Generated model inputs, the same ones however often the run was resumed."""
        drawn = generated_rows(self.inputs, self.bindings, rows, seed)
        if self.unsigned:
            drawn |= {name: np.abs(values) for name, values in drawn.items() if values.dtype.kind == "f"}
        user = np.arange(rows) // self.candidates
        return drawn | {name: drawn[name][user] for name in self.shared}


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
