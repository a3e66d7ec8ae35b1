"""Float models whose sites are quantized under scales that a test names, with and without placement."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from qdq_models import weight
from rewrite_models import Arrays, artifact

from loka_onnx.core.artifact import ModelArtifact
from loka_onnx.core.backends import Fusions
from loka_onnx.core.formats import Precision
from loka_onnx.core.plan import Decision, PrecisionPlan, Verdict
from loka_onnx.core.recipe import PER_CHANNEL_WEIGHT, Granularity
from loka_onnx.core.rewrite import RewriteRecord
from loka_onnx.core.site import Site
from loka_onnx.graph.model import GraphModel, values_of
from loka_onnx.graph.sites import channel_axis
from loka_onnx.numerics.scales import weight_scales
from loka_onnx.sessions.backends import fusions_of
from loka_onnx.transforms.precision.apply_plan import PlanForm, apply_plan

RTX = fusions_of("tensorrt_rtx")
Scales = Mapping[str, float | tuple[float, float]]
"""By site, the scale of the activation, or of both operands of an interaction."""


@dataclass(frozen=True)
class Placed:
    """One model, quantized with the pairs in front of their sites, and with the pairs placed."""

    before: onnx.ModelProto
    after: onnx.ModelProto
    record: RewriteRecord

    @property
    def applied(self) -> list[tuple[str, str]]:
        """What was moved or shared."""
        return [(a.at, a.what) for a in self.record.applied if not a.what.startswith("chain")]

    @property
    def chains(self) -> list[tuple[str, str]]:
        return [(a.at, a.what) for a in self.record.applied if a.what.startswith("chain")]

    @property
    def declined(self) -> list[tuple[str, str]]:
        return [(d.at, d.reason) for d in self.record.declined]


def plan_of(model: ModelArtifact, scales: Scales) -> PrecisionPlan:
    """A plan that quantizes exactly these sites."""
    graph = GraphModel.load(model.path)

    def decide(site: Site) -> Decision:
        if site.name not in scales:
            return Decision(site.name, Precision.FP32, None, Verdict.NOT_JUDGED, "test")
        given = scales[site.name]
        first, second = given if isinstance(given, tuple) else (given, given)
        weights: tuple[float, ...] = (second,)
        recipe = PER_CHANNEL_WEIGHT
        if site.weight is not None:
            values = values_of(graph.node(site.name).inputs[site.weight.index])
            found = weight_scales(values, Granularity.PER_CHANNEL, channel_axis(site.weight), recipe.format)
            weights = tuple(float(scale) for scale in found.reshape(-1))
        return Decision(site.name, Precision.FP8, recipe, Verdict.SAFE, "test", first, weights)

    decisions = tuple(decide(site) for site in model.sites)
    return PrecisionPlan("test", model.digest, Precision.FP32, decisions, {}, 1.0)


def place(model: onnx.ModelProto, scales: Scales, folder: Path, fusions: Fusions = RTX) -> Placed:
    """Quantize a float model twice; both models are checked."""
    source = artifact(model, folder / "source.onnx")
    plan = plan_of(source, scales)
    plain = apply_plan(source, plan, PlanForm(Precision.FP32), folder / "plain.onnx")
    placed = apply_plan(source, plan, PlanForm(Precision.FP32, fusions), folder / "placed.onnx")
    before, after = onnx.load(plain.path), onnx.load(placed.path)
    onnx.checker.check_model(after, full_check=True)
    record = next(record for record in placed.log.records if record.transform == "place-qdq")
    return Placed(before, after, record)


def run_basic(model: onnx.ModelProto, feeds: Arrays) -> Arrays:
    """Outputs by ONNX Runtime, optimized no further than it is for FP8, on the biases that the model has.

    ONNX Runtime 1.31.1 rounds the bias of a Gemm to INT32 wherever both factors come from a DQ directly, and
    so not behind a movement, unless it is told to leave Q and DQ alone.
    """
    settings = ort.SessionOptions()
    settings.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_BASIC
    settings.add_session_config_entry("session.disable_quant_qdq", "1")
    settings.log_severity_level = 3
    session = ort.InferenceSession(model.SerializeToString(), settings, providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(None, feeds), strict=True))


def assert_bit_equal(placed: Placed, feeds: Arrays) -> None:
    """Both models give the same bits, and rounding moves them at all."""
    expected, found = run_basic(placed.before, feeds), run_basic(placed.after, feeds)
    assert list(expected) == list(found)
    for name, values in expected.items():
        assert np.isfinite(values).all()
        assert values.tobytes() == found[name].tobytes(), name


def sources(model: onnx.ModelProto) -> dict[str, str]:
    """By name of a Q of an activation, the tensor that it reads."""
    return {node.name: node.input[0] for node in model.graph.node if node.op_type == "QuantizeLinear"}


def square(size: int, *names: str) -> dict[str, Any]:
    return {name: weight(size, size, seed=seed) for seed, name in enumerate(names)}
