"""Sample rows of the activations that a model's linears read."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from loka_onnx.graph.model import GraphModel
from loka_onnx.graph.shape_values import static_shape
from loka_onnx.sessions.onnx_session import OnnxSession, SessionOptions
from loka_onnx.transforms.linears.pattern import Linear

Arrays = Mapping[str, npt.NDArray[Any]]
Doubles = npt.NDArray[np.float64]

_ELEMENTS = 1 << 25
"""Most elements of all activations together (FP32, 128 MB)."""
_MOST_VECTORS = 512
_FEWEST_VECTORS = 64
_WEIGHTS = 1 << 20
"""Most elements of a weight that are measured."""
_PRODUCTS = 1 << 26
"""Multiplications in one measurement of one product, as far as the fewest vectors allow."""


@dataclass(frozen=True)
class SiteRows:
    """Rows that a linear reads: amax by channel (K,), and sampled vectors of both halves, (M, K) each."""

    amax: Doubles
    halves: tuple[Doubles, Doubles]


def read_rows(
    model: GraphModel, linears: Mapping[str, Linear], rows: Sequence[Arrays], scratch: Path
) -> dict[str, SiteRows]:
    """Run a copy of a model on one batch or more, halved in order; sample each linear's input, by site."""
    feeds = {name: np.concatenate([batch[name] for batch in rows]) for name in rows[0]}
    count = max(len(values) for values in feeds.values())
    wanted = {linear.source.name for linear in linears.values()} - {tensor.name for tensor in model.inputs}
    # An unknown length counts as one.
    per_row = sum(prod(size or 1 for size in static_shape(linear.source)) for linear in linears.values())
    step = int(np.clip(_ELEMENTS // max(per_row, 1), 1, 512))
    limits = _limits(linears)
    kept = {site: _Kept(linear) for site, linear in linears.items()}
    with tempfile.TemporaryDirectory(dir=scratch) as folder:
        path = Path(folder) / "activations.onnx"
        _with_outputs(model, wanted).save(path)
        session = OnnxSession(path, SessionOptions(optimize=False))
        for half, (begin, end) in enumerate(((0, count // 2), (count // 2, count))):
            for start in range(begin, end, step):
                stop = min(start + step, end)
                batch = {name: values[start:stop] for name, values in feeds.items()}
                activations = {**batch, **(session.run(batch, sorted(wanted)) if wanted else {})}
                for site, part in kept.items():
                    share = (stop - start) / (end - begin)
                    part.add(activations[part.linear.source.name], half, int(np.ceil(limits[site] * share)))
    return {
        site: SiteRows(part.amax, (np.concatenate(part.halves[0]), np.concatenate(part.halves[1])))
        for site, part in kept.items()
    }


def measured_columns(linear: Linear) -> npt.NDArray[np.int64]:
    """Return the output channels that are measured: all, or evenly spaced ones of a large layer."""
    most = max(_WEIGHTS // linear.k, 16)
    return np.unique(np.linspace(0, linear.n - 1, min(linear.n, most)).astype(np.int64))


class _Kept:
    """Sample of one linear's input."""

    def __init__(self, linear: Linear) -> None:
        self.linear, self.amax = linear, np.zeros(linear.k)
        self.halves: tuple[list[Doubles], list[Doubles]] = ([], [])

    def add(self, values: npt.NDArray[Any], half: int, wanted: int) -> None:
        """Add evenly spaced vectors of a batch, and the range of all of them."""
        vectors = np.moveaxis(values, self.linear.channel_axis, -1).reshape(-1, self.linear.k)
        self.amax = np.maximum(self.amax, np.abs(vectors).max(axis=0, initial=0.0))
        places = np.linspace(0, len(vectors) - 1, min(wanted, len(vectors))).astype(np.int64)
        self.halves[half].append(vectors[places].astype(np.float64))


def _limits(linears: Mapping[str, Linear]) -> dict[str, int]:
    """Return vectors of each half, by site."""
    shared = _ELEMENTS // max(2 * sum(linear.k for linear in linears.values()), 1)
    limits = {}
    for site, linear in linears.items():
        most = min(shared, _PRODUCTS // (linear.k * len(measured_columns(linear))))
        limits[site] = int(np.clip(most, _FEWEST_VECTORS, _MOST_VECTORS))
    return limits


def _with_outputs(model: GraphModel, wanted: set[str]) -> GraphModel:
    copy = model.copy()
    tensors = copy.tensors()
    for name in sorted(wanted - {tensor.name for tensor in copy.outputs}):
        copy.add_output(tensors[name], tensors[name].dtype, tensors[name].shape)
    return copy
