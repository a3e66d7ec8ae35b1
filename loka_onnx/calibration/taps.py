"""What the graph is asked to measure: ranges of activations, and errors of sites under recipes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx

from loka_onnx.calibration.arithmetic import (
    NORM_PRECISION,
    ActivationQuantizer,
    bfloat16_norm,
    quantized_product,
)
from loka_onnx.calibration.reductions import Count, Outputs, Reductions, Slot
from loka_onnx.calibration.sampling import SampleTap, add_sample
from loka_onnx.core.formats import FLOAT8_SPECS
from loka_onnx.core.recipe import Recipe
from loka_onnx.core.site import Site, SiteKind
from loka_onnx.core.statistics import ErrorStats, RangeStats
from loka_onnx.graph.fake_quantize import TINY, FakeQuantized
from loka_onnx.graph.layout import layout_root
from loka_onnx.graph.model import GraphModel, Tensor


@dataclass(frozen=True)
class RangeSlots:
    """Where the range of one tensor is found."""

    count: Count
    minimum: Slot
    maximum: Slot
    total: Slot
    squares: Slot
    sample: SampleTap


@dataclass(frozen=True)
class RangeTap:
    """The range of one activation.

    Attributes:
        tensor: Name of the activation.
        site: The first site that reads it.
        slots: Where it is found.
        is_layout: Whether the activation is a layout of the tensor that was tapped, so that its last axis is
            another one.
    """

    tensor: str
    site: str
    slots: RangeSlots
    is_layout: bool

    def read(self, outputs: Outputs, rows: int) -> RangeStats:
        """The range of one batch, without its magnitudes: those add up in place (`MagnitudeTotals`)."""
        low, high = self.slots.minimum.read(outputs), self.slots.maximum.read(outputs)
        return RangeStats(
            count=self.slots.count.read(outputs, rows),
            amax=max(abs(low), abs(high)),
            minimum=low,
            maximum=high,
            total=self.slots.total.read(outputs),
            total_squares=self.slots.squares.read(outputs),
        )


def tap_ranges(model: GraphModel, sites: Sequence[Site], stride: int = 1) -> tuple[RangeTap, ...]:
    """Add range statistics of every activation that a site reads.

    Tensors in common are tapped once, and so are layouts of one tensor.

    Args:
        model: The graph; its outputs become the statistics.
        sites: Sites whose activations are tapped.
        stride: Every how many rows one is handed out for the histogram.
    """
    reductions = Reductions(model)
    found: dict[str, RangeTap] = {}
    roots: dict[str, RangeSlots] = {}
    for site in sites:
        node = model.node(site.name)
        for operand in site.operands:
            if operand.constant or operand.tensor in found:
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
            found[operand.tensor] = RangeTap(operand.tensor, site.name, roots[root.name], root is not tensor)
    reductions.finish()
    return tuple(found.values())


@dataclass(frozen=True)
class OutputSlots:
    """Where the exact and the quantized output of a site are found."""

    count: Count
    signal: Slot
    quantized: Slot
    noise: Slot


@dataclass(frozen=True)
class ActivationSlots:
    """Where the fate of an activation's elements is found.

    Attributes:
        count: Elements.
        saturated: Elements beyond the format's range; None where the range shows that there are none.
        nonzero: Nonzero elements, as multiples of `TINY`.
        survived: Elements that are still nonzero after rounding, as multiples of the smallest subnormal.
        smallest: The smallest subnormal.
    """

    count: Count
    saturated: Slot | None
    nonzero: Slot
    survived: Slot
    smallest: float

    def nonzeros(self, outputs: Outputs) -> int:
        """Elements that are not zero."""
        return round(self.nonzero.read(outputs) / TINY)

    def underflowed(self, outputs: Outputs) -> int:
        """Nonzero elements that became zero."""
        return self.nonzeros(outputs) - round(self.survived.read(outputs) / self.smallest)


@dataclass(frozen=True)
class ErrorTap:
    """The error of one site under one recipe.

    Attributes:
        site: Name of the site.
        recipe: Id of the recipe, or the precision of a norm.
        activation_scale: Scale of the first activation; None for a norm.
        output: Where its outputs are found.
        activation: Where the fate of its first activation is found; None for a norm.
    """

    site: str
    recipe: str
    activation_scale: float | None
    output: OutputSlots
    activation: ActivationSlots | None

    def read(self, outputs: Outputs, rows: int) -> ErrorStats:
        """The error of one batch."""
        signal, quantized = self.output.signal.read(outputs), self.output.quantized.read(outputs)
        noise, activation = self.output.noise.read(outputs), self.activation
        saturated = activation.saturated if activation is not None else None
        elements = activation.count.read(outputs, rows) if activation is not None else 0
        return ErrorStats(
            recipe=self.recipe,
            activation_scale=self.activation_scale,
            count=self.output.count.read(outputs, rows),
            signal=signal,
            noise=noise,
            # 2⟨q, y⟩ = ‖q‖² + ‖y‖² − ‖q − y‖²
            cross=(signal + quantized - noise) / 2.0,
            quantized=quantized,
            activation_count=elements,
            saturated=round(saturated.read(outputs)) if saturated is not None else 0,
            underflowed=activation.underflowed(outputs) if activation is not None else 0,
            zeros=elements - activation.nonzeros(outputs) if activation is not None else 0,
        )


class ErrorTapBuilder:
    """Adds the error of sites under recipes to a graph; what sites share is computed once.

    Args:
        model: The graph to add to.
        scales: Activation scales by `Recipe.activation_id` and tensor name.
        ranges: Range of each activation over the same rows.
    """

    def __init__(
        self, model: GraphModel, scales: dict[str, dict[str, float]], ranges: Mapping[str, RangeStats]
    ) -> None:
        self.model, self.scales, self.ranges = model, scales, ranges
        self.reductions = Reductions(model)
        self.found: list[ErrorTap] = []
        self._quantizers: dict[str, ActivationQuantizer] = {}
        self._activations: dict[tuple[str, str], ActivationSlots] = {}
        self._exact: dict[str, tuple[Count, Slot]] = {}

    def add_product(self, site: Site, recipe: Recipe) -> None:
        """Tap a linear or interaction site under a recipe."""
        rounding = recipe.activation_id
        scales = self.scales[rounding]
        if rounding not in self._quantizers:
            self._quantizers[rounding] = ActivationQuantizer(self.model, recipe.format, scales, self.ranges)
        product = quantized_product(self._quantizers[rounding], site, recipe)
        name = f"{site.name}.{recipe.id}"
        self.found.append(
            ErrorTap(
                site.name,
                recipe.id,
                scales[site.activation.tensor],
                self._output(site, product, name),
                self._activation(site, recipe, name),
            )
        )

    def add_norm(self, site: Site) -> None:
        """Tap a norm in BF16."""
        name = f"{site.name}.{NORM_PRECISION}"
        output = bfloat16_norm(self.model, site)
        self.found.append(ErrorTap(site.name, NORM_PRECISION, None, self._output(site, output, name), None))

    def _output(self, site: Site, quantized: Tensor, name: str) -> OutputSlots:
        exact = self.model.node(site.name).outputs[0]
        if site.name not in self._exact:
            self._exact[site.name] = (
                self.reductions.count(exact, site.name),
                self.reductions.squares(exact, f"{site.name}.signal"),
            )
        difference = self.model.add("Sub", [quantized, exact], f"{name}.difference")
        difference.shape = quantized.shape = exact.shape
        return OutputSlots(
            *self._exact[site.name],
            self.reductions.squares(quantized, f"{name}.quantized"),
            self.reductions.squares(difference, f"{name}.noise"),
        )

    def _activation(self, site: Site, recipe: Recipe, name: str) -> ActivationSlots:
        tensor = self.model.node(site.name).inputs[site.activation.index]
        quantized = self._quantizers[recipe.activation_id].root(
            tensor, f"{site.name}.in{site.activation.index}"
        )
        key = (recipe.activation_id, quantized.magnitude.name)
        if key not in self._activations:
            smallest = FLOAT8_SPECS[recipe.format].min_subnormal
            self._activations[key] = ActivationSlots(
                self.reductions.count(quantized.magnitude, f"{name}.activation"),
                self._saturated(quantized, recipe, name) if quantized.is_clipped else None,
                self._capped(quantized.magnitude, TINY, f"{name}.nonzero"),
                self._capped(quantized.rounded, smallest, f"{name}.survived"),
                smallest,
            )
        return self._activations[key]

    def _capped(self, magnitude: Tensor, cap: float, name: str) -> Slot:
        """Sum of min(magnitude, cap): `cap` times the number of elements that are at least `cap`, exactly."""
        bounds = [self.model.constant(f"{name}.bound", np.array(b, dtype=np.float32)) for b in (0.0, cap)]
        capped = self.model.add("Clip", [magnitude, *bounds], f"{name}.capped")
        capped.shape = magnitude.shape
        return self.reductions.total(capped, name)

    def _saturated(self, quantized: FakeQuantized, recipe: Recipe, name: str) -> Slot:
        largest = np.array(FLOAT8_SPECS[recipe.format].max, dtype=np.float32)
        limit = self.model.constant(f"{name}.limit", largest)
        beyond = self.model.add("Greater", [quantized.magnitude, limit], f"{name}.is_saturated", np.bool_)
        as_float = self.model.add(
            "Cast", [beyond], f"{name}.as_float", np.float32, {"to": onnx.TensorProto.FLOAT}
        )
        as_float.shape = quantized.magnitude.shape
        return self.reductions.total(as_float, f"{name}.saturated")


def tap_errors(
    model: GraphModel,
    sites: Sequence[Site],
    recipes: Sequence[Recipe],
    scales: dict[str, dict[str, float]],
    ranges: Mapping[str, RangeStats],
) -> tuple[ErrorTap, ...]:
    """Add the output error of every site under every recipe that applies to it.

    Where two scale rules come to the same scales, the first of them is measured.
    """
    builder = ErrorTapBuilder(model, scales, ranges)
    for site in sites:
        if site.kind is SiteKind.NORM:
            builder.add_norm(site)
            continue
        for recipe in _distinct(site, recipes_for(site, recipes), scales):
            builder.add_product(site, recipe)
    builder.reductions.finish()
    return tuple(builder.found)


def recipes_for(site: Site, recipes: Sequence[Recipe]) -> tuple[Recipe, ...]:
    """Recipes that make sense at a site: only one with output channels can have a scale for each."""
    if site.kind is SiteKind.INTERACTION or (site.weight is not None and len(site.weight.shape) < 2):
        return tuple(r for r in recipes if r.weight == "per_tensor")
    return tuple(recipes)


def _distinct(
    site: Site, recipes: Sequence[Recipe], scales: Mapping[str, Mapping[str, float]]
) -> tuple[Recipe, ...]:
    """Recipes that differ at a site: one for each format, granularity and scales of its activations."""
    activations = [operand.tensor for operand in site.operands if not operand.constant]
    found: dict[tuple[object, ...], Recipe] = {}
    for recipe in recipes:
        known = scales[recipe.activation_id]
        key = (recipe.format, recipe.activation, recipe.weight, *(known[tensor] for tensor in activations))
        found.setdefault(key, recipe)
    return tuple(found.values())
