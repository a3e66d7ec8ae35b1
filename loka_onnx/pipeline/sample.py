"""Generated model inputs: for first inferences in build processes, for latencies, for the sample in a bundle.

Rows of the user's data never leave the run directory. Ids are drawn below the bounds that the embedding
tables set, numbers from a standard normal distribution; the values are for agreement between engines, and
no accuracy is ever measured on them.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from loka_onnx.core.artifact import TensorSpec
from loka_onnx.core.split import ModelSplit
from loka_onnx.data import InputBinding
from loka_onnx.pipeline.splitting import taken_by_engines

Arrays = dict[str, npt.NDArray[Any]]


class Requests:
    """Generated inputs of a model, and what engines take of any.

    Args:
        inputs: What the model takes.
        bindings: How that is made of columns, with the bounds of ids.
        threads: Of the lookup in front of engines; 0 for as many as there are cores.

    Attributes:
        split: The model cut at its embeddings, where it was; engines then take looked-up rows.
    """

    def __init__(self, inputs: Sequence[TensorSpec], bindings: Sequence[InputBinding], threads: int) -> None:
        self.split: ModelSplit | None = None
        self._inputs, self._bindings, self._threads = inputs, bindings, threads
        self._seeds = count(1)

    def generated(self, rows: int) -> Arrays:
        """Generated model inputs, others at every call; no row of the user's data."""
        return generated_rows(self._inputs, self._bindings, rows, next(self._seeds))

    def sample(self, rows: int) -> Arrays:
        """Generated model inputs, the same ones however often the run was resumed."""
        return generated_rows(self._inputs, self._bindings, rows)

    def taken_by_engines(self, inputs: Arrays) -> Arrays:
        """What engines take for these inputs of the model."""
        return taken_by_engines(inputs, self.split, self._threads)


def generated_rows(
    inputs: Sequence[TensorSpec], bindings: Sequence[InputBinding], rows: int, seed: int = 0
) -> Arrays:
    """Inputs of every kind that the model takes, (rows,) or (rows, columns)."""
    generator = np.random.default_rng(seed)
    by_name = {binding.input: binding for binding in bindings}
    return {spec.name: _draw(spec, by_name[spec.name], rows, generator) for spec in inputs}


def write_sample(sample: Arrays, path: Path) -> Path:
    """Write the rows as npz."""
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez(path, **sample)  # type: ignore[arg-type]
    return path


def _draw(
    spec: TensorSpec, binding: InputBinding, rows: int, generator: np.random.Generator
) -> npt.NDArray[Any]:
    width = spec.shape[1] if len(spec.shape) == 2 and spec.shape[1] is not None else len(binding.columns)
    dtype = np.dtype(spec.dtype)
    values: npt.NDArray[Any]
    if np.issubdtype(dtype, np.floating):
        values = generator.standard_normal((rows, width))
    elif dtype == np.bool_:
        values = generator.random((rows, width)) < 0.5
    else:
        # Without a known table only id 0 is certain to exist.
        bounds = [binding.upper_of(i) or 1 for i in range(len(binding.columns))]
        upper = bounds if len(bounds) == width else [min(bounds)] * width
        values = generator.integers(0, np.array(upper), size=(rows, width))
    return np.ascontiguousarray(values[:, 0] if len(spec.shape) == 1 else values, dtype=dtype)
