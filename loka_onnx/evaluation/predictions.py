"""Outputs of an engine over a whole split, with the columns of its rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from loka_onnx.data import Batch
from loka_onnx.errors import DataError, EvaluationError
from loka_onnx.sessions.runner import map_in_order

Array = npt.NDArray[Any]
Run = Callable[[Mapping[str, Array]], Mapping[str, Array]]
"""Runs one batch: model inputs by name, the batch on axis 0, to outputs by name."""


@dataclass(frozen=True)
class Streams:
    """A function that `predict` calls from `count` threads; it returns new arrays each time."""

    run: Run
    count: int

    def __call__(self, inputs: Mapping[str, Array]) -> Mapping[str, Array]:
        """Run one batch."""
        return self.run(inputs)


def any_size(run: Run, least: int) -> Run:
    """Let an engine of at least `least` rows run any batch: a short one repeats rows, which are dropped."""

    def run_padded(inputs: Mapping[str, Array]) -> Mapping[str, Array]:
        rows = min((len(values) for values in inputs.values()), default=least)
        if not 0 < rows < least:
            return run(inputs)
        places = np.arange(least) % rows
        outputs = run({name: values[places] for name, values in inputs.items()})
        # An output without a batch axis is unchanged.
        return {
            name: values[:rows] if np.shape(values)[:1] == (least,) else values
            for name, values in outputs.items()
        }

    return run_padded


@dataclass(frozen=True)
class Predictions:
    """Outputs (rows,) or (rows, n) and columns (rows,) of a split, in the order of its rows."""

    outputs: dict[str, Array]
    columns: dict[str, Array]
    rows: int


def predict(
    run: Run,
    batches: Iterable[Batch],
    outputs: tuple[str, ...],
    columns: tuple[str, ...] = (),
    progress: Callable[[int], None] = lambda done: None,
) -> Predictions:
    """Run an engine over every batch, one at a time or in `Streams`, and keep the named outputs and columns.

    Outputs are copied, because an engine may reuse its buffers. Trailing axes of length 1 are dropped.
    `progress` is called after each batch with the number of rows done. Raises EvaluationError for an output
    that is not (rows,) or (rows, n), DataError for a missing column or no rows.
    """
    kept_outputs: dict[str, list[Array]] = {name: [] for name in outputs}
    kept_columns: dict[str, list[Array]] = {name: [] for name in columns}
    done = 0

    def answered(batch: Batch) -> tuple[Batch, Mapping[str, Array]]:
        return batch, run(batch.inputs)

    streams = run.count if isinstance(run, Streams) else 0
    # Engines of one stream may belong to this thread.
    answers = map_in_order(answered, batches, streams) if streams else map(answered, batches)
    for batch, values in answers:
        rows = batch.rows
        for name, parts in kept_outputs.items():
            parts.append(_output(values, name, rows))
            if parts[-1].shape[1:] != parts[0].shape[1:]:
                raise EvaluationError(
                    f"E1011 output '{name}' changes its width from batch to batch",
                    evidence=f"{parts[0].shape[1:]} in the first, {parts[-1].shape[1:]} after row {done}",
                )
        for name, parts in kept_columns.items():
            if name not in batch.columns:
                raise DataError(
                    f"E1012 the batches carry no column '{name}'",
                    evidence=f"they carry: {', '.join(sorted(batch.columns)) or 'none'}",
                    remedy="name a column of the data under `outputs` or `data`",
                )
            parts.append(batch.columns[name])
        done += rows
        progress(done)
    if done == 0:
        raise DataError("E1013 there are no rows to predict", remedy="check the split and its filters")
    return Predictions(
        {name: np.concatenate(parts) for name, parts in kept_outputs.items()},
        {name: np.concatenate(parts) for name, parts in kept_columns.items()},
        done,
    )


def _output(values: Mapping[str, Array], name: str, rows: int) -> Array:
    if name not in values:
        raise EvaluationError(
            f"E1014 the engine gave no output '{name}'",
            evidence=f"it gave: {', '.join(sorted(values)) or 'none'}",
        )
    array = np.array(values[name])
    if array.ndim == 0 or array.shape[0] != rows:
        raise EvaluationError(
            f"E1015 the first axis of output '{name}' is not the batch",
            evidence=f"shape {array.shape} for a batch of {rows} rows",
            remedy="judge an output with one value per row, or give the model a dynamic batch on axis 0",
        )
    while array.ndim > 1 and array.shape[-1] == 1:
        array = array[..., 0]
    if array.ndim > 2:
        raise EvaluationError(
            f"E1016 output '{name}' holds a tensor per row",
            evidence=f"shape {array.shape}: (rows,) or (rows, n) fit",
        )
    return array
