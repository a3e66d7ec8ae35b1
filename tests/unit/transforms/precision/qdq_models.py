"""Models with every spelling of a matrix product, and plans that quantize them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import onnx
from rewrite_models import Arrays, parse

from loka_onnx.core.artifact import ModelArtifact
from loka_onnx.core.formats import Precision
from loka_onnx.core.plan import Decision, PrecisionPlan, Verdict
from loka_onnx.core.recipe import Recipe, Scaling
from loka_onnx.core.site import Site
from loka_onnx.graph.model import GraphModel, values_of
from loka_onnx.graph.sites import channel_axis
from loka_onnx.numerics.scales import range_scaling, weight_scales

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
    """One site ``fc`` between x and y.

    Attributes:
        body: Graph text.
        weights: Constants.
        shape: Of x, without the batch.
        output: Of y, without the batch.
        channel_axis: Output-channel axis of the weight ``w``.
    """

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


def quantizing_plan(
    model: ModelArtifact,
    rows: Arrays,
    recipe: Recipe,
    *,
    base: Precision = Precision.FP32,
    fp8: tuple[str, ...] | None = None,
    fp32: tuple[str, ...] = (),
) -> PrecisionPlan:
    """A plan that quantizes sites (all products when `fp8` is None) with scales of these rows."""
    graph = GraphModel.load(model.path)
    chosen = {s.name for s in model.sites if s.n} if fp8 is None else set(fp8)

    def decide(site: Site) -> Decision:
        if site.name not in chosen:
            precision = Precision.FP32 if site.name in fp32 else base
            return Decision(site.name, precision, None, Verdict.NOT_JUDGED, "test")
        first = site.activation
        other = next(operand for operand in site.operands if operand is not first)
        scaling = scaling_of(rows[first.tensor], recipe)
        decision = Decision(site.name, recipe.precision, recipe, Verdict.SAFE, "test", scaling.scale)
        decision = replace(decision, activation_zero_point=scaling.zero_point)
        if not other.constant:
            second = scaling_of(rows[other.tensor], recipe)
            return replace(decision, weight_scale=(second.scale,), weight_zero_point=second.zero_point)
        values = values_of(graph.node(site.name).inputs[other.index])
        scales = weight_scales(values, recipe.weight, channel_axis(other), recipe.format.of_weights)
        return replace(decision, weight_scale=tuple(float(scale) for scale in scales.reshape(-1)))

    return PrecisionPlan("test", model.digest, base, tuple(decide(s) for s in model.sites), {}, 1.0)


def scaling_of(values: np.ndarray[Any, Any], recipe: Recipe) -> Scaling:
    return range_scaling(float(values.min()), float(values.max()), recipe.format)
