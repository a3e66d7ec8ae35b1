"""Observers of sites: ranges of activations, and output errors under recipes; magnitudes of all tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto

from loka_onnx.calibration.observers.arithmetic import (
    NORM_PRECISION,
    ActivationQuantizer,
    bfloat16_norm,
    quantized_product,
)
from loka_onnx.calibration.observers.reductions import BatchTotals, Count, Reduction, Reductions, Slot
from loka_onnx.calibration.observers.sampling import SampleObserver, add_sample
from loka_onnx.core.recipe import Granularity, Recipe, Scales
from loka_onnx.core.site import Site, SiteKind
from loka_onnx.core.statistics import ErrorStats, RangeStats, TensorRange
from loka_onnx.errors import InternalError
from loka_onnx.graph.fake_quantize import TINY
from loka_onnx.graph.layout import layout_root
from loka_onnx.graph.model import GraphModel, Node, Tensor, element_type, is_constant, producer
from loka_onnx.graph.protected import divisors


@dataclass(frozen=True)
class RangeSlots:
    """Slots of the range of one tensor."""

    count: Count
    minimum: Slot
    maximum: Slot
    total: Slot
    squares: Slot
    sample: SampleObserver


@dataclass(frozen=True)
class RangeObserver:
    """Range of one activation; `site` is its first reader.

    With `is_layout` the activation is a layout of the observed `tensor`: its last axis is another.
    """

    tensor: str
    site: str
    slots: RangeSlots
    is_layout: bool


def observe_ranges(model: GraphModel, sites: Sequence[Site], stride: int = 1) -> tuple[RangeObserver, ...]:
    """Observe the range of every activation that a site reads; layouts of one tensor share an observer.

    The graph's outputs become the statistics; every `stride`-th row is output for the histogram.
    """
    reductions = Reductions(model)
    observers: dict[str, RangeObserver] = {}
    roots: dict[str, RangeSlots] = {}
    for site in sites:
        node = model.node(site.name)
        for operand in site.operands:
            if operand.constant or operand.tensor in observers:
                continue
            tensor, name = node.inputs[operand.index], f"{site.name}.range{operand.index}"
            root = layout_root(tensor).tensor
            if root.name not in roots:
                roots[root.name] = RangeSlots(
                    reductions.add_count(root, name),
                    reductions.add(root, f"{name}.min", Reduction.MIN),
                    reductions.add(root, f"{name}.max", Reduction.MAX),
                    reductions.add(root, f"{name}.sum"),
                    reductions.add_squares(root, f"{name}.squares"),
                    add_sample(model, root, stride, name),
                )
            observers[operand.tensor] = RangeObserver(
                operand.tensor, site.name, roots[root.name], root is not tensor
            )
    reductions.finish()
    return tuple(observers.values())


@dataclass(frozen=True)
class OutputSlots:
    """Slots of the exact and the quantized output of a site."""

    count: Count
    signal: Slot
    noise: Slot


@dataclass(frozen=True)
class ActivationSlots:
    """Slots of saturation and underflow; `saturated` is None if the range shows that there is none.

    `nonzero` ones are multiples of `TINY`; `survived` are those still nonzero after rounding, as multiples of
    `smallest`.
    """

    count: Count
    saturated: Slot | None
    nonzero: Slot
    survived: Slot
    smallest: float


@dataclass(frozen=True)
class ErrorObserver:
    """Error of one site under one recipe; a norm has a precision as `recipe`, and no activation."""

    site: str
    recipe: str
    activation_scale: float | None
    output: OutputSlots
    activation: ActivationSlots | None

    def read(self, totals: BatchTotals) -> ErrorStats:
        """Return the error over all batches."""
        saturated = elements = nonzero = survived = 0
        if (activation := self.activation) is not None:
            elements = totals.count(activation.count)
            nonzero = round(totals.sum(activation.nonzero).value / TINY)
            survived = round(totals.sum(activation.survived).value / activation.smallest)
            if activation.saturated is not None:
                saturated = round(totals.sum(activation.saturated).value)
        return ErrorStats(
            recipe=self.recipe,
            activation_scale=self.activation_scale,
            count=totals.count(self.output.count),
            signal=totals.sum(self.output.signal),
            noise=totals.sum(self.output.noise),
            activation_count=elements,
            saturated=saturated,
            underflowed=nonzero - survived,
            zeros=elements - nonzero,
        )


class ErrorObserverBuilder:
    """Adds error observers to a graph, once for tensors that sites share; `ranges` are over the same rows."""

    def __init__(self, model: GraphModel, scales: Scales, ranges: Mapping[str, RangeStats]) -> None:
        self.model, self.scales, self.ranges = model, scales, ranges
        self.reductions = Reductions(model)
        self.observers: list[ErrorObserver] = []
        self._quantizers: dict[str, ActivationQuantizer] = {}
        self._activations: dict[tuple[str, str], ActivationSlots] = {}
        self._exact: dict[str, tuple[Count, Slot]] = {}

    def add_product(self, site: Site, recipe: Recipe) -> None:
        """Observe a linear or interaction site under a recipe."""
        rounding = recipe.activation_id
        scales = self.scales[rounding]
        if rounding not in self._quantizers:
            scalings = {tensor: recipe.scaling(self.scales, tensor) for tensor in scales}
            self._quantizers[rounding] = ActivationQuantizer(self.model, recipe.format, scalings, self.ranges)
        product = quantized_product(self._quantizers[rounding], site, recipe)
        name, scale = f"{site.name}.{recipe.id}", scales[site.activation.tensor]
        output, activation = self._output(site, product, name), self._activation(site, recipe, name)
        self.observers.append(ErrorObserver(site.name, recipe.id, scale, output, activation))

    def add_norm(self, site: Site) -> None:
        """Observe a norm in BF16."""
        output = self._output(site, bfloat16_norm(self.model, site), f"{site.name}.{NORM_PRECISION}")
        self.observers.append(ErrorObserver(site.name, NORM_PRECISION, None, output, None))

    def _output(self, site: Site, quantized: Tensor, name: str) -> OutputSlots:
        exact = self.model.node(site.name).outputs[0]
        if site.name not in self._exact:
            self._exact[site.name] = (
                self.reductions.add_count(exact, site.name),
                self.reductions.add_squares(exact, f"{site.name}.signal"),
            )
        node = self.model.node(site.name)
        source = producer(layout_root(node.inputs[site.activation.index]).tensor)
        is_repeated = source is not None and source.op == "Expand" and is_constant(source.inputs[0])
        if site.kind is not SiteKind.NORM and is_repeated:
            # One parameter for every example, as learned queries are.
            difference = self._wide_difference(node, quantized, name)
        else:
            difference = self.model.add("Sub", [quantized, exact], f"{name}.difference")
        difference.shape = quantized.shape = exact.shape
        return OutputSlots(*self._exact[site.name], self.reductions.add_squares(difference, f"{name}.noise"))

    def _wide_difference(self, node: Node, quantized: Tensor, name: str) -> Tensor:
        """Add quantized less exact product, both computed in DOUBLE.

        In FP32 the noise energy of one example is off by some 1e-6, which averages out over examples unless
        all are the same.
        """
        low = producer(quantized)
        if low is None:
            raise InternalError("a quantized product has no node", evidence=f"site '{node.name}'")
        wide = [
            self.model.add(
                each.op, [self._cast(i, np.float64, name) for i in each.inputs], name, None, each.attrs
            )
            for each in (low, node)
        ]
        return self._cast(self.model.add("Sub", wide, f"{name}.wide_difference"), np.float32, name)

    def _cast(self, tensor: Tensor, dtype: type[np.floating[Any]], name: str) -> Tensor:
        if not tensor.name:  # an omitted optional input
            return tensor
        to = onnx.TensorProto.DOUBLE if dtype is np.float64 else onnx.TensorProto.FLOAT
        return self.model.add("Cast", [tensor], f"{name}.cast", dtype, {"to": to})

    def _activation(self, site: Site, recipe: Recipe, name: str) -> ActivationSlots:
        tensor = self.model.node(site.name).inputs[site.activation.index]
        quantized = self._quantizers[recipe.activation_id].root(
            tensor, f"{site.name}.in{site.activation.index}"
        )
        key = (recipe.activation_id, quantized.scaled.name)
        if key not in self._activations:
            smallest, is_signed = recipe.format.smallest, not recipe.format.is_float
            self._activations[key] = ActivationSlots(
                self.reductions.add_count(quantized.scaled, f"{name}.activation"),
                None if quantized.clipping is None else self._changed(*quantized.clipping, name),
                self._capped(quantized.scaled, TINY, f"{name}.nonzero", is_signed),
                self._capped(quantized.rounded, smallest, f"{name}.survived", is_signed),
                smallest,
            )
        return self._activations[key]

    def _capped(self, values: Tensor, cap: float, name: str, is_signed: bool) -> Slot:
        """Add the sum of min(|values|, cap): exactly `cap` times the number of elements of at least `cap`."""
        magnitude = self._like(values, "Abs", [values], f"{name}.magnitude") if is_signed else values
        bounds = [self.model.constant(f"{name}.bound", np.array(b, dtype=np.float32)) for b in (0.0, cap)]
        capped = self._like(values, "Clip", [magnitude, *bounds], f"{name}.capped")
        return self.reductions.add(capped, name)

    def _changed(self, before: Tensor, after: Tensor, name: str) -> Slot:
        """Add the number of elements that clipping changes."""
        equal = self.model.add("Equal", [before, after], f"{name}.is_inside", np.bool_)
        beyond = self.model.add("Not", [equal], f"{name}.is_saturated", np.bool_)
        to = {"to": onnx.TensorProto.FLOAT}
        as_float = self.model.add("Cast", [beyond], f"{name}.as_float", np.float32, to)
        as_float.shape = before.shape
        return self.reductions.add(as_float, f"{name}.saturated")

    def _like(self, tensor: Tensor, op: str, inputs: list[Tensor], name: str) -> Tensor:
        result = self.model.add(op, inputs, name)
        result.shape = tensor.shape
        return result


def observe_errors(
    model: GraphModel,
    sites: Sequence[Site],
    recipes: Sequence[Recipe],
    scales: Scales,
    ranges: Mapping[str, RangeStats],
) -> tuple[ErrorObserver, ...]:
    """Observe the error of every site under every applicable recipe; of equal recipes, the first."""
    builder = ErrorObserverBuilder(model, scales, ranges)
    for site in sites:
        if site.kind is SiteKind.NORM:
            builder.add_norm(site)
            continue
        activations = [operand.tensor for operand in site.operands if not operand.constant]
        distinct: dict[tuple[object, ...], Recipe] = {}
        for recipe in recipes_for(site, recipes):
            known = (recipe.scaling(scales, tensor) for tensor in activations)
            distinct.setdefault((recipe.format, recipe.weight, *known), recipe)
        for recipe in distinct.values():
            builder.add_product(site, recipe)
    builder.reductions.finish()
    return tuple(builder.observers)


def recipes_for(site: Site, recipes: Sequence[Recipe]) -> tuple[Recipe, ...]:
    """Return the recipes that apply to a site: without output channels, only those with one weight scale."""
    if site.kind is SiteKind.INTERACTION or (site.weight is not None and len(site.weight.shape) < 2):
        return tuple(r for r in recipes if r.weight is Granularity.PER_TENSOR)
    return tuple(recipes)


LARGEST = float(np.finfo(np.float32).max)


@dataclass(frozen=True)
class MagnitudeObserver:
    """Slots of a tensor's extremes, and of a divisor's smallest nonzero magnitude (`LARGEST` for none)."""

    tensor: str
    low: Slot
    high: Slot
    smallest: Slot | None

    def read(self, totals: BatchTotals) -> TensorRange:
        """Return the magnitudes over all batches."""
        amax = max(abs(totals.extreme(self.low)), abs(totals.extreme(self.high)))
        smallest = LARGEST if self.smallest is None else totals.extreme(self.smallest)
        return TensorRange(min(amax, LARGEST), None if smallest == LARGEST else smallest)


def observe_magnitudes(model: GraphModel) -> tuple[MagnitudeObserver, ...]:
    """Observe every non-constant FP32 tensor of the main graph, which decide whether it fits FP16.

    The graph's outputs become the largest and smallest element; layouts of one tensor share its observer.
    """
    tensors = list(_tensors(model))
    divided_by = {divisor.tensor.name for divisor in divisors(model)}
    reductions = Reductions(model)
    extremes: dict[str, tuple[Slot, Slot]] = {}
    observers = []
    for position, tensor in enumerate(tensors):
        root, name = layout_root(tensor).tensor, f"magnitude{position}"
        if root.name not in extremes:
            extremes[root.name] = (
                reductions.add(root, f"{name}.min", Reduction.MIN),
                reductions.add(root, f"{name}.max", Reduction.MAX),
            )
        smallest = None
        if tensor.name in divided_by:
            magnitudes = _nonzero_magnitude(model, tensor, name)
            smallest = reductions.add(magnitudes, f"{name}.smallest", Reduction.MIN)
        observers.append(MagnitudeObserver(tensor.name, *extremes[root.name], smallest))
    reductions.finish()
    return tuple(observers)


def _tensors(model: GraphModel) -> Iterator[Tensor]:
    computed = (tensor for node in model.sorted_nodes() for tensor in node.outputs)
    for tensor in (*model.inputs, *computed):
        if tensor.name and tensor.dtype is not None and element_type(tensor.dtype) == TensorProto.FLOAT:
            yield tensor


def _nonzero_magnitude(model: GraphModel, tensor: Tensor, name: str) -> Tensor:
    """Add the magnitudes of a tensor, with `LARGEST` in place of 0."""
    zero = model.constant(f"{name}.zero", np.array(0, np.float32))
    largest = model.constant(f"{name}.largest", np.array(LARGEST, np.float32))
    magnitude = model.add("Abs", [tensor], f"{name}.magnitude")
    is_zero = model.add("Equal", [magnitude, zero], f"{name}.is_zero", np.bool_)
    nonzero = model.add("Where", [is_zero, largest, magnitude], f"{name}.nonzero", np.float32)
    nonzero.shape = tensor.shape
    return nonzero
