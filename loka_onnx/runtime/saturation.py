"""Counts of values that an FP8 engine saturates, on a few requests.

An FP8 engine multiplies x / scale, cast to a format whose largest finite value is ``max``; the ONNX cast
saturates, so that every |x| > scale · max becomes that bound. Scales were chosen on calibration rows. Where
live rows exceed them, the engine's answers get worse, which shows here first.

Counted are values of the engine's *inputs and outputs*, on every n-th request in host memory, in its first
`MOST_ROWS` rows, which bounds the added latency. An input has a range where a site that the plan runs in FP8
reads it, directly or through operators that only move values; the smallest of these ranges counts.
Activations inside the engine are not seen: use `loka-onnx drift` on the rows for them. Integer inputs (ids)
are ignored.
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
from loka_onnx.core.manifest import EngineEntry, Manifest
from loka_onnx.core.plan import PlanSet
from loka_onnx.sessions.model_files import read_model

MOST_ROWS = 256
"""Most counted rows of a request."""

# Operators that only move values of their first input, or of all inputs for Concat.
_MOVES = frozenset(
    {"Identity", "Reshape", "Flatten", "Transpose", "Squeeze", "Unsqueeze", "Slice", "Split", "Concat"}
)


@dataclass(frozen=True)
class Look:
    """Counts of values of one tensor; `saturated` are finite and beyond the calibrated range, None without
    one.
    """

    values: int = 0
    nonfinite: int = 0
    saturated: int | None = None

    def merge(self, other: Look) -> Look:
        """Add the counts of both."""
        known = [count for count in (self.saturated, other.saturated) if count is not None]
        return Look(
            self.values + other.values, self.nonfinite + other.nonfinite, sum(known) if known else None
        )


def look_at(value: npt.NDArray[Any], limit: float | None = None) -> Look:
    """Count the values of a floating array; `limit` is the calibrated range, if any."""
    finite = np.isfinite(value)
    nonfinite = value.size - int(np.count_nonzero(finite))
    if limit is None:
        return Look(value.size, nonfinite)
    # In float64, because the array's type may not hold the limit.
    beyond = (np.abs(value.astype(np.float64)) > limit) & finite
    return Look(value.size, nonfinite, int(np.count_nonzero(beyond)))


class Sampler:
    """Counts values of every n-th request; `limits` are the largest magnitudes of each input's calibrated
    scale.
    """

    def __init__(self, limits: Mapping[str, float], every: int) -> None:
        self.limits, self.every = dict(limits), every
        self._count = itertools.count(1)

    def is_due(self) -> bool:
        """Count this request and return whether to sample it."""
        return next(self._count) % self.every == 0

    def look(
        self, inputs: Mapping[str, npt.NDArray[Any]], outputs: Mapping[str, npt.NDArray[Any]]
    ) -> dict[str, Look]:
        """Counts of a request and its answer, by tensor."""
        looks = {
            name: look_at(value[:MOST_ROWS], self.limits.get(name))
            for name, value in inputs.items()
            if _is_floating(value)
        }
        answers = {name: look_at(value[:MOST_ROWS]) for name, value in outputs.items() if _is_floating(value)}
        return looks | answers


def make_sampler(bundle: Path, manifest: Manifest, entry: EngineEntry, every: int) -> Sampler | None:
    """Make the sampler of an engine; None where its plan quantizes no activation, or `every` is 0."""
    if every < 1:
        return None
    scales = _largest_magnitudes(bundle, manifest, entry)
    if not scales:
        return None
    path = bundle / manifest.fallback.path
    graph = read_model(path).graph
    return Sampler(limits_of_inputs(graph, scales, manifest), every)


def _largest_magnitudes(bundle: Path, manifest: Manifest, entry: EngineEntry) -> dict[str, float]:
    """Largest magnitude of the activation scale of each FP8 site of the engine's plan."""
    plans = serde.read(PlanSet, bundle / manifest.plans)
    plan = next((plan for plan in plans.plans if plan.id == entry.plan), None)
    return {
        decision.site: decision.activation_scale * decision.recipe.format.max
        for decision in ([] if plan is None else plan.decisions)
        if decision.recipe is not None and decision.activation_scale is not None
    }


def limits_of_inputs(
    graph: onnx.GraphProto, magnitudes: Mapping[str, float], manifest: Manifest
) -> dict[str, float]:
    """Largest magnitude of each input that reaches a quantized site unchanged; cut tensors are inputs too."""
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
