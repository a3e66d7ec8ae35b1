"""Observers of sites: ranges of activations, and output errors under recipes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx

from loka_onnx.calibration.observers.arithmetic import (
    NORM_PRECISION,
    ActivationQuantizer,
    bfloat16_norm,
    quantized_product,
)
from loka_onnx.calibration.observers.reductions import BatchTotals, Count, Reductions, Slot
from loka_onnx.calibration.observers.sampling import SampleObserver, add_sample
from loka_onnx.core.recipe import Granularity, Recipe, Scales
from loka_onnx.core.site import Site, SiteKind
from loka_onnx.core.statistics import ErrorStats, RangeStats
from loka_onnx.errors import InternalError
from loka_onnx.graph.fake_quantize import TINY
from loka_onnx.graph.layout import layout_root
from loka_onnx.graph.model import GraphModel, Node, Tensor, is_constant, producer


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
    """Range of one activation; `site` is the first that reads it.

    `is_layout` if the activation is a layout of the observed tensor, so that its last axis is another.
    """

    tensor: str
    site: str
    slots: RangeSlots
    is_layout: bool

    def read(self, totals: BatchTotals) -> RangeStats:
        """Return the range over all batches, without magnitudes and spread, which are not `Reductions`."""
        low, high = totals.extreme(self.slots.minimum), totals.extreme(self.slots.maximum)
        return RangeStats(
            count=totals.count(self.slots.count),
            amax=max(abs(low), abs(high)),
            minimum=low,
            maximum=high,
            total=totals.sum(self.slots.total),
            total_squares=totals.sum(self.slots.squares),
        )


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
                    reductions.count(root, name),
                    reductions.minimum(root, f"{name}.min"),
                    reductions.maximum(root, f"{name}.max"),
                    reductions.total(root, f"{name}.sum"),
                    reductions.squares(root, f"{name}.squares"),
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
    quantized: Slot
    noise: Slot


@dataclass(frozen=True)
class ActivationSlots:
    """Slots of saturation and underflow of an activation's elements.

    Attributes:
        count: Elements.
        saturated: Elements beyond the format's range; None where the range shows that there are none.
        nonzero: Nonzero elements, as multiples of `TINY`.
        survived: Elements still nonzero after rounding, as multiples of `smallest`.
        smallest: The format's smallest magnitude.
    """

    count: Count
    saturated: Slot | None
    nonzero: Slot
    survived: Slot
    smallest: float

    def nonzeros(self, totals: BatchTotals) -> int:
        """Return the number of nonzero elements."""
        return round(totals.sum(self.nonzero).value / TINY)

    def underflowed(self, totals: BatchTotals) -> int:
        """Return the number of nonzero elements that became zero."""
        return self.nonzeros(totals) - round(totals.sum(self.survived).value / self.smallest)


@dataclass(frozen=True)
class ErrorObserver:
    """Error of one site under one recipe, or of a norm, which has a precision as
    `recipe` and no activation.
    """

    site: str
    recipe: str
    activation_scale: float | None
    output: OutputSlots
    activation: ActivationSlots | None

    def read(self, totals: BatchTotals) -> ErrorStats:
        """Return the error over all batches."""
        activation = self.activation
        saturated = activation.saturated if activation is not None else None
        elements = totals.count(activation.count) if activation is not None else 0
        return ErrorStats(
            recipe=self.recipe,
            activation_scale=self.activation_scale,
            count=totals.count(self.output.count),
            signal=totals.sum(self.output.signal),
            noise=totals.sum(self.output.noise),
            quantized=totals.sum(self.output.quantized),
            activation_count=elements,
            saturated=round(totals.sum(saturated).value) if saturated is not None else 0,
            underflowed=activation.underflowed(totals) if activation is not None else 0,
            zeros=elements - activation.nonzeros(totals) if activation is not None else 0,
        )


class ErrorObserverBuilder:
    """Adds error observers to a graph; tensors that sites share are computed once.

    `ranges` are of activations over the same rows.
    """

    def __init__(self, model: GraphModel, scales: Scales, ranges: Mapping[str, RangeStats]) -> None:
        self.model, self.scales, self.ranges = model, scales, ranges
        self.reductions = Reductions(model)
        self.found: list[ErrorObserver] = []
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
        name = f"{site.name}.{recipe.id}"
        self.found.append(
            ErrorObserver(
                site.name,
                recipe.id,
                scales[site.activation.tensor],
                self._output(site, product, name),
                self._activation(site, recipe, name),
            )
        )

    def add_norm(self, site: Site) -> None:
        """Observe a norm in BF16."""
        name = f"{site.name}.{NORM_PRECISION}"
        output = bfloat16_norm(self.model, site)
        self.found.append(
            ErrorObserver(site.name, NORM_PRECISION, None, self._output(site, output, name), None)
        )

    def _output(self, site: Site, quantized: Tensor, name: str) -> OutputSlots:
        exact = self.model.node(site.name).outputs[0]
        if site.name not in self._exact:
            self._exact[site.name] = (
                self.reductions.count(exact, site.name),
                self.reductions.squares(exact, f"{site.name}.signal"),
            )
        if site.kind is not SiteKind.NORM and _repeats_a_constant(self.model.node(site.name), site):
            difference = self._wide_difference(self.model.node(site.name), quantized, name)
        else:
            difference = self.model.add("Sub", [quantized, exact], f"{name}.difference")
        difference.shape = quantized.shape = exact.shape
        return OutputSlots(
            *self._exact[site.name],
            self.reductions.squares(quantized, f"{name}.quantized"),
            self.reductions.squares(difference, f"{name}.noise"),
        )

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
                self.reductions.count(quantized.scaled, f"{name}.activation"),
                None if quantized.clipping is None else self._changed(*quantized.clipping, name),
                self._capped(quantized.scaled, TINY, f"{name}.nonzero", is_signed),
                self._capped(quantized.rounded, smallest, f"{name}.survived", is_signed),
                smallest,
            )
        return self._activations[key]

    def _capped(self, values: Tensor, cap: float, name: str, is_signed: bool) -> Slot:
        """Add the sum of min(|values|, cap): `cap` times the number of elements that are at least `cap`,
        exactly.
        """
        magnitude = self._like(values, "Abs", [values], f"{name}.magnitude") if is_signed else values
        bounds = [self.model.constant(f"{name}.bound", np.array(b, dtype=np.float32)) for b in (0.0, cap)]
        capped = self._like(values, "Clip", [magnitude, *bounds], f"{name}.capped")
        return self.reductions.total(capped, name)

    def _changed(self, before: Tensor, after: Tensor, name: str) -> Slot:
        """Add the number of elements that clipping changes."""
        equal = self.model.add("Equal", [before, after], f"{name}.is_inside", np.bool_)
        beyond = self.model.add("Not", [equal], f"{name}.is_saturated", np.bool_)
        to = {"to": onnx.TensorProto.FLOAT}
        as_float = self.model.add("Cast", [beyond], f"{name}.as_float", np.float32, to)
        as_float.shape = before.shape
        return self.reductions.total(as_float, f"{name}.saturated")

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
    """Observe the output error of every site under every applicable recipe; of recipes with equal scales, the
    first.
    """
    builder = ErrorObserverBuilder(model, scales, ranges)
    for site in sites:
        if site.kind is SiteKind.NORM:
            builder.add_norm(site)
            continue
        for recipe in _distinct(site, recipes_for(site, recipes), scales):
            builder.add_product(site, recipe)
    builder.reductions.finish()
    return tuple(builder.found)


def recipes_for(site: Site, recipes: Sequence[Recipe]) -> tuple[Recipe, ...]:
    """Return the recipes that apply to a site: without output channels, only those with one weight scale."""
    if site.kind is SiteKind.INTERACTION or (site.weight is not None and len(site.weight.shape) < 2):
        return tuple(r for r in recipes if r.weight is Granularity.PER_TENSOR)
    return tuple(recipes)


def _repeats_a_constant(node: Node, site: Site) -> bool:
    """True if a site's activation is one parameter repeated for every example, as learned queries are."""
    source = producer(layout_root(node.inputs[site.activation.index]).tensor)
    return source is not None and source.op == "Expand" and is_constant(source.inputs[0])


def _distinct(site: Site, recipes: Sequence[Recipe], scales: Scales) -> tuple[Recipe, ...]:
    """Return recipes that differ at a site by their operands or by scales of its activations."""
    activations = [operand.tensor for operand in site.operands if not operand.constant]
    by_key: dict[tuple[object, ...], Recipe] = {}
    for recipe in recipes:
        known = (recipe.scaling(scales, tensor) for tensor in activations)
        key = (recipe.format, recipe.weight, *known)
        by_key.setdefault(key, recipe)
    return tuple(by_key.values())
