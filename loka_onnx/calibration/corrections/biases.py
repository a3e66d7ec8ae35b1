"""Mean error that quantization adds at a site, by output channel.

A planned site computes ŷ = x̂·Ŵ + b where the model computes y = x·W + b. The product is linear in the
activation, so its mean needs only the means of x and x̂ along K::

    E[ŷ − y] = E[x̂]·Ŵ − E[x]·W

Means are over rows and over all other axes that the product does not sum; separate axes of the weight
(experts) are kept. The correction is −E[ŷ − y], one constant for each output channel.

The error is **local**: x is the exact model's value, x̂ that value rounded. The effect of earlier rounding
through nonlinear functions stays, about half of the mean error of deep sites; the constant on the output
takes it. Restoring the means in the quantized model instead, with a pass for each site, was no better (Wukong
on MovieLens 1M, every site in FP8, selection rows: ΔNE .361 % against .370 %). Source: Nagel et al.,
"Data-Free Quantization Through Weight Equalization and Bias Correction" (arXiv 1906.04721), section 4.2, with
measured means in place of those derived from BatchNorm, and with the rounding of activations too.

A product of two activations has no such bias: the mean of its error is no product of means.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from loka_onnx.calibration.corrections.means import MeanObservers, MeanRows, Means, Values
from loka_onnx.calibration.observers.arithmetic import ActivationQuantizer
from loka_onnx.core.artifact import ModelArtifact, OutputSpec
from loka_onnx.core.formats import NumberFormat
from loka_onnx.core.plan import Decision, PrecisionPlan
from loka_onnx.core.recipe import Granularity, Recipe, Scaling
from loka_onnx.core.site import Operand, Site, SiteKind
from loka_onnx.errors import InternalError
from loka_onnx.graph.biases import biased
from loka_onnx.graph.model import GraphModel, Node, shape_of, values_of
from loka_onnx.graph.sites import channel_axis
from loka_onnx.numerics.rounding import fake_quantize


@dataclass(frozen=True)
class FittedBiases:
    """Biases to add behind the sites of one plan, by site, broadcasting to its output: (1, N) and the like.

    `left_alone` has the reason why a quantized site has none, by its name.
    """

    values: dict[str, Values]
    left_alone: dict[str, str]


@dataclass(frozen=True)
class Fit:
    """Biases of every plan by id, and the FP32 means of sites that they restore, in the same shapes."""

    plans: dict[str, FittedBiases]
    exact: Means


def fit_biases(
    model: ModelArtifact,
    plans: Sequence[PrecisionPlan],
    specs: Sequence[OutputSpec],
    rows: MeanRows,
    path: Path,
) -> Fit:
    """Return bias corrections (minus the mean error) by plan, from one FP32 pass of a model at `path`."""
    graph = GraphModel.load(model.path)
    planned = {name for plan in plans for name in plan.quantized_sites}
    products: dict[str, _Product] = {}
    left_alone: dict[str, str] = {}
    for site in model.sites:
        if site.name not in planned:
            continue
        try:
            products[site.name] = _Product.of(graph, site)
        except _NoBias as reason:
            left_alone[site.name] = str(reason)
    observers = MeanObservers(graph, specs)
    outputs = {
        name: observers.mean(biased(graph, p.node), p.output_axes(graph)) for name, p in products.items()
    }
    exact = {name: observers.mean(p.source, p.axes) for name, p in products.items()}
    rounded = _observe_rounded(observers, plans, products)
    means = observers.measure(rows, path, "mean of sites")

    def correction(plan: PrecisionPlan, name: str) -> Values:
        product, decision = products[name], plan.decision(name)
        recipe = _recipe_of(decision)
        axis = channel_axis(product.operand) if recipe.weight is Granularity.PER_CHANNEL else None
        scales = np.array(decision.weight_scale if axis is not None else decision.weight_scale[0], np.float32)
        weight = fake_quantize(product.weight, scales, recipe.format.of_weights, axis)
        low = product.times(means.tensors[rounded[plan.id, name]], weight)
        high = product.times(means.tensors[exact[name]], product.weight)
        return np.asarray(high - low)

    fitted = {
        plan.id: FittedBiases(
            {name: correction(plan, name) for name in products if name in plan.quantized_sites},
            {name: reason for name, reason in left_alone.items() if name in plan.quantized_sites},
        )
        for plan in plans
    }
    return Fit(fitted, means.named(outputs))


def observe(
    path: Path, shapes: Mapping[str, tuple[int, ...]], specs: Sequence[OutputSpec], rows: MeanRows
) -> Means:
    """Return the means of sites' outputs in a planned FP32 model, corrected or not, on the rows of the fit.

    `shapes` are those of the corrections by site; the instrumented model is written beside `path`.
    """
    graph = GraphModel.load(path)
    nodes = {name: graph.node(name) for name in shapes}
    observers = MeanObservers(graph, specs)
    outputs = {
        name: observers.mean(biased(graph, node), _axes_of(graph, node, shapes[name]))
        for name, node in nodes.items()
    }
    means = observers.measure(rows, path.with_suffix(".means.onnx"), "mean of the planned model")
    return means.named(outputs)


class _NoBias(Exception):
    """The site has no mean error that a bias could remove; the message says why."""


@dataclass(frozen=True)
class _Product:
    """A linear site in a form whose mean is known; `axes` of the activation `source` are averaged over."""

    node: Node
    operand: Operand
    source: Any
    weight: npt.NDArray[np.float32]
    axes: tuple[int, ...]

    @classmethod
    def of(cls, graph: GraphModel, site: Site) -> _Product:
        """Read a site; _NoBias if it is no product of an activation with a weight, or its rank is unknown."""
        if site.kind is not SiteKind.LINEAR or site.weight is None:
            raise _NoBias("a product of two activations has no bias")
        node = graph.node(site.name)
        source, contracting = node.inputs[site.activation.index], site.activation.contracting_axis
        if source.shape is None or len(source.shape) < 2 or contracting is None:
            raise _NoBias("the rank of its activation is unknown or below 2")
        if biased(graph, node).shape is None:
            raise _NoBias("the rank of its output is unknown")
        weight = values_of(node.inputs[site.weight.index]).astype(np.float32)
        rank = len(source.shape)
        own = {
            rank - back
            for back in range(3, min(rank, weight.ndim) + 1)
            if weight.shape[weight.ndim - back] > 1
        }
        axes = tuple(axis for axis in range(rank) if axis != contracting and axis not in own)
        return cls(node, site.weight, source, weight, axes)

    def times(self, mean: Values, weight: npt.NDArray[np.float32]) -> Values:
        """Return the mean activation times a weight, in float64."""
        factors = [mean, weight.astype(np.float64)]
        if self.operand.index == 0:
            factors.reverse()
        left, right = factors
        if self.node.op != "Gemm":
            return np.asarray(np.matmul(left, right))
        left = left.T if self.node.attrs.get("transA", 0) else left
        right = right.T if self.node.attrs.get("transB", 0) else right
        return np.asarray(float(self.node.attrs.get("alpha", 1.0)) * (left @ right))

    def output_axes(self, graph: GraphModel) -> tuple[int, ...]:
        """Return the axes of the output that are averaged over."""
        lengths = [1 if axis in self.axes else d for axis, d in enumerate(self.source.shape)]
        k = self.operand.contracting_axis
        whole = [self.weight.shape[k or 0] if not isinstance(d, int) else d for d in lengths]
        return _axes_of(graph, self.node, self.times(np.zeros(whole), self.weight).shape)


def _axes_of(graph: GraphModel, node: Node, shape: Sequence[int]) -> tuple[int, ...]:
    """Return the axes of a site's output along which a correction of that shape is constant."""
    rank = len(shape_of(biased(graph, node)))
    padded = [1] * (rank - len(shape)) + list(shape)
    return tuple(axis for axis, length in enumerate(padded) if length == 1)


def _observe_rounded(
    observers: MeanObservers, plans: Iterable[PrecisionPlan], products: Mapping[str, _Product]
) -> dict[tuple[str, str], str]:
    """Return the observer's name of each planned activation after rounding, by plan and site."""
    quantizers: dict[tuple[NumberFormat, Scaling], ActivationQuantizer] = {}
    names: dict[tuple[str, str], str] = {}
    for plan in plans:
        for name, product in products.items():
            if name not in plan.quantized_sites:
                continue
            decision = plan.decision(name)
            scaling, source = decision.activation_scaling, product.source
            if scaling is None:
                raise InternalError(f"the plan gives site '{name}' no scale", evidence=f"plan '{plan.id}'")
            key = (_recipe_of(decision).format, scaling)
            if key not in quantizers:
                tensors = {p.source.name: scaling for p in products.values()}
                quantizers[key] = ActivationQuantizer(observers.model, key[0], tensors)
            names[plan.id, name] = observers.mean(
                quantizers[key].values(source, f"{name}.rounded"), product.axes
            )
    return names


def _recipe_of(decision: Decision) -> Recipe:
    if decision.recipe is None:
        raise InternalError(f"the plan gives site '{decision.site}' no recipe")
    return decision.recipe
