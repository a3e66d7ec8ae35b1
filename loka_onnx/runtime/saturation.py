"""Looking at the values of a few requests: what an FP8 engine would round to its largest value.

An FP8 engine multiplies x / scale, cast to a format whose largest finite value is ``max``; the ONNX cast
saturates, so that every |x| > scale · max becomes that bound. Scales were chosen on calibration rows. When
live rows lie beyond them, the engine answers, and answers worse: this is where that shows first.

What is measured: values of the engine's *inputs and outputs*, on every n-th request of host memory, in its
first `MOST_ROWS` rows, so that no request takes much longer for being looked at. An input
has a range where a site that the plan runs in FP8 reads it, directly or through operators that move values
without changing them; the least of these ranges counts. Activations inside of the engine are not seen: for
them there is `loka-onnx drift` on the rows themselves. Integer inputs (ids) are not looked at.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx

from loka_onnx.core import serde
from loka_onnx.core.formats import FLOAT8_SPECS
from loka_onnx.core.manifest import EngineEntry, Manifest
from loka_onnx.core.plan import PlanSet
from loka_onnx.sessions.model_files import read_model

MOST_ROWS = 256
"""Rows of a request that are looked at."""

# Operators whose output holds values of their inputs and no others: the first of these, or all for Concat.
_MOVES = frozenset(
    {"Identity", "Reshape", "Flatten", "Transpose", "Squeeze", "Unsqueeze", "Slice", "Split", "Concat"}
)


@dataclass(frozen=True)
class Look:
    """Counts of values of one tensor.

    Attributes:
        values: Looked at.
        nonfinite: NaN or infinite.
        saturated: Finite and beyond the calibrated range; None for a tensor that has none.
    """

    values: int = 0
    nonfinite: int = 0
    saturated: int | None = None

    def merge(self, other: Look) -> Look:
        """Both together."""
        known = [count for count in (self.saturated, other.saturated) if count is not None]
        return Look(
            self.values + other.values, self.nonfinite + other.nonfinite, sum(known) if known else None
        )


def look_at(value: npt.NDArray[Any], limit: float | None = None) -> Look:
    """Count the values of a floating array.

    Args:
        value: Any shape.
        limit: Largest magnitude that the calibrated scale represents; None where there is none.
    """
    finite = np.isfinite(value)
    nonfinite = value.size - int(np.count_nonzero(finite))
    if limit is None:
        return Look(value.size, nonfinite)
    # In float64: the limit need not be a number of the array's type.
    beyond = (np.abs(value.astype(np.float64)) > limit) & finite
    return Look(value.size, nonfinite, int(np.count_nonzero(beyond)))


class Sampler:
    """Looks at every n-th request.

    Args:
        limits: Largest magnitude that an input's calibrated scale represents, where there is one.
        every: Requests for each that is looked at.
    """

    def __init__(self, limits: Mapping[str, float], every: int) -> None:
        self.limits, self.every = dict(limits), every
        self._count = itertools.count(1)

    def is_due(self) -> bool:
        """Whether this request is to be looked at; counts it."""
        return next(self._count) % self.every == 0

    def look(
        self, inputs: Mapping[str, npt.NDArray[Any]], outputs: Mapping[str, npt.NDArray[Any]]
    ) -> dict[str, Look]:
        """What is seen in a request and its answer, by tensor."""
        looks = {
            name: look_at(value[:MOST_ROWS], self.limits.get(name))
            for name, value in inputs.items()
            if _is_floating(value)
        }
        answers = {name: look_at(value[:MOST_ROWS]) for name, value in outputs.items() if _is_floating(value)}
        return looks | answers


def make_sampler(bundle: Path, manifest: Manifest, entry: EngineEntry, every: int) -> Sampler | None:
    """The sampler of an engine; None where its plan quantizes no activation, or nothing is to be sampled.

    Args:
        bundle: A verified bundle.
        manifest: Its manifest.
        entry: The engine.
        every: Requests for each that is looked at; 0 for none.
    """
    if every < 1:
        return None
    scales = _largest_magnitudes(bundle, manifest, entry)
    if not scales:
        return None
    path = bundle / manifest.fallback.path
    graph = read_model(path).graph
    return Sampler(limits_of_inputs(graph, scales, manifest), every)


def _largest_magnitudes(bundle: Path, manifest: Manifest, entry: EngineEntry) -> dict[str, float]:
    """By site that the engine's plan runs in FP8, the largest magnitude that its activation scale represents.

    Raises:
        UserError: The plans of the bundle cannot be read.
    """
    plans = serde.read(PlanSet, bundle / manifest.plans)
    plan = next((plan for plan in plans.plans if plan.id == entry.plan), None)
    return {
        decision.site: decision.activation_scale * FLOAT8_SPECS[decision.recipe.format].max
        for decision in ([] if plan is None else plan.decisions)
        if decision.recipe is not None and decision.activation_scale is not None
    }


def limits_of_inputs(
    graph: onnx.GraphProto, magnitudes: Mapping[str, float], manifest: Manifest
) -> dict[str, float]:
    """Largest magnitude of each input that reaches a quantized site unchanged.

    Args:
        graph: The exported model; its nodes have the names of sites.
        magnitudes: By site, the largest magnitude that its activation scale represents.
        manifest: Where the model was cut, tensors of the graph are inputs as well.
    """
    names = {spec.name for spec in manifest.inputs}
    names |= set() if manifest.cut is None else {spec.name for spec in manifest.cut.tensors}
    makers = {output: node for node in graph.node for output in node.output}
    constants = {tensor.name for tensor in graph.initializer}
    limits: dict[str, float] = {}
    for node in graph.node:
        if node.name not in magnitudes:
            continue
        pending = [name for name in node.input[:2] if name not in constants][:1]
        while pending:
            name = pending.pop()
            maker = makers.get(name)
            if name in names:
                limits[name] = min(limits.get(name, np.inf), magnitudes[node.name])
            elif maker is not None and maker.op_type in _MOVES:
                pending.extend(maker.input if maker.op_type == "Concat" else maker.input[:1])
    return limits


def _is_floating(value: npt.NDArray[Any]) -> bool:
    return value.dtype.kind == "f" or value.dtype.name == "bfloat16"
