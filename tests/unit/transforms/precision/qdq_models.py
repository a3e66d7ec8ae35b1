"""Models with every spelling of a matrix product, plans that quantize them, and placement of the pairs."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from planned import quantized_site
from rewrite_models import Arrays, artifact, parse

from loka_onnx.core.artifact import ModelArtifact
from loka_onnx.core.backends import Fusions
from loka_onnx.core.formats import Precision
from loka_onnx.core.plan import Decision, PrecisionPlan, Verdict
from loka_onnx.core.recipe import PER_CHANNEL_WEIGHT, Recipe, Scaling
from loka_onnx.core.rewrite import RewriteRecord
from loka_onnx.core.site import Site
from loka_onnx.graph.model import GraphModel
from loka_onnx.numerics.scales import range_scaling
from loka_onnx.sessions.backends import fusions_of
from loka_onnx.transforms.precision.apply_plan import PlanForm, apply_plan

K, N = 24, 16


def weight(*shape: int, seed: int = 3) -> np.ndarray[Any, Any]:
    """Columns (and rows) of sizes from 1 to 30, so that scales of the wrong axis show."""
    values = np.random.default_rng(seed).normal(size=shape)
    for axis, length in enumerate(shape[-2:], start=len(shape) - 2):
        spread = np.geomspace(1, 5.5, length)
        values = values * np.expand_dims(spread, tuple(a for a in range(len(shape)) if a != axis))
    return (values / np.abs(values).max()).astype(np.float32)


@dataclass(frozen=True)
class Product:
    """One site ``fc`` between x and y, whose shapes are without the batch; the weight is ``w``."""

    body: str
    weights: Mapping[str, Any]
    shape: tuple[int, ...]
    output: tuple[int, ...]
    channel_axis: int

    def model(self) -> onnx.ModelProto:
        shape, output = (",".join(map(str, dims)) for dims in (self.shape, self.output))
        return parse(
            self.body, self.weights, inputs=f"float[batch,{shape}] x", outputs=f"float[batch,{output}] y"
        )


BIAS = np.linspace(-1, 1, N, dtype=np.float32)
PRODUCTS = {
    "gemm": Product("[fc] y = Gemm(x, w, b)", {"w": weight(K, N), "b": BIAS}, (K,), (N,), 1),
    "gemm_transb": Product("[fc] y = Gemm<transB=1>(x, w, b)", {"w": weight(N, K), "b": BIAS}, (K,), (N,), 0),
    "matmul": Product("[fc] y = MatMul(x, w)", {"w": weight(K, N)}, (K,), (N,), 1),
    "matmul_rank3": Product("[fc] y = MatMul(x, w)", {"w": weight(K, N)}, (5, K), (5, N), 1),
    "batched_weight": Product("[fc] y = MatMul(x, w)", {"w": weight(5, K, N)}, (5, 2, K), (5, 2, N), 2),
    "weight_on_the_left": Product("[fc] y = MatMul(w, x)", {"w": weight(N, K)}, (K, 7), (N, 7), 0),
    "one_column": Product("[fc] y = MatMul(x, w)", {"w": weight(K, 1)}, (K,), (1,), 1),
}
INTERACTION = Product("t = Transpose<perm=[0,2,1]>(x) [fc] y = MatMul(x, t)", {}, (5, K), (5, 5), 0)


def quantizing_plan(model, rows, recipe, *, base=Precision.FP32, fp8=None, fp32=()):
    """A plan that quantizes sites (all products when `fp8` is None) with scales of these rows."""
    graph = GraphModel.load(model.path)
    chosen = {s.name for s in model.sites if s.n} if fp8 is None else set(fp8)

    def decide(site: Site) -> Decision:
        if site.name not in chosen:
            precision = Precision.FP32 if site.name in fp32 else base
            return Decision(site.name, precision, None, Verdict.NOT_JUDGED, "test")
        scalings = {o: scaling_of(rows[o.tensor], recipe) for o in site.operands if not o.constant}
        first = scalings.pop(site.activation)
        second = next(iter(scalings.values()), first)
        decision = quantized_site(graph, site, recipe, first.scale, second.scale)
        zero_points = {"activation_zero_point": first.zero_point}
        return replace(
            decision, **zero_points | ({"weight_zero_point": second.zero_point} if scalings else {})
        )

    return PrecisionPlan("test", model.digest, base, tuple(decide(s) for s in model.sites), {}, 1.0)


def scaling_of(values: np.ndarray[Any, Any], recipe: Recipe) -> Scaling:
    return range_scaling(float(values.min()), float(values.max()), recipe.format)


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
        return [(a.at, a.what) for a in self.record.applied if not a.what.startswith("chain")]

    @property
    def chains(self) -> list[tuple[str, str]]:
        return [(a.at, a.what) for a in self.record.applied if a.what.startswith("chain")]

    @property
    def declined(self) -> list[tuple[str, str]]:
        return [(d.at, d.reason) for d in self.record.declined]


def plan_of(model: ModelArtifact, scales: Scales) -> PrecisionPlan:
    graph = GraphModel.load(model.path)

    def decide(site: Site) -> Decision:
        if site.name not in scales:
            return Decision(site.name, Precision.FP32, None, Verdict.NOT_JUDGED, "test")
        given = scales[site.name]
        first, second = given if isinstance(given, tuple) else (given, given)
        return quantized_site(graph, site, PER_CHANNEL_WEIGHT, first, second)

    decisions = tuple(decide(site) for site in model.sites)
    return PrecisionPlan("test", model.digest, Precision.FP32, decisions, {}, 1.0)


def place(model: onnx.ModelProto, scales: Scales, folder: Path, fusions: Fusions = RTX) -> Placed:
    """Quantize a float model twice; both models are checked."""
    return place_source(artifact(model, folder / "source.onnx"), scales, folder, fusions)


def place_source(source: ModelArtifact, scales: Scales, folder: Path, fusions: Fusions = RTX) -> Placed:
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
