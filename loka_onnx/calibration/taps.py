"""Reductions that the graph itself computes, so that a batch costs a few numbers a site.

Sums run in FP32 along the last axis, at most a few thousand elements, and in DOUBLE beyond: a reduction
in FP32 throughout was seen to be off by 2e-4 at 8192 × 512.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import onnx

from loka_onnx.calibration.arithmetic import NORM_PRECISION, bfloat16_norm, quantized_product
from loka_onnx.core.formats import FLOAT8_SPECS
from loka_onnx.core.profile import ErrorStats, RangeStats
from loka_onnx.core.recipe import Recipe
from loka_onnx.core.site import Site, SiteKind
from loka_onnx.graph.fake_quantize import FakeQuantized
from loka_onnx.graph.model import GraphModel, Tensor

STATISTICS = "loka_statistics"
"""Name of the graph output that holds every statistic of a batch."""

Rows = npt.NDArray[np.float64]


class Taps:
    """Collects scalars of a graph into one DOUBLE vector output."""

    def __init__(self, model: GraphModel) -> None:
        self.model = model
        self._scalars: list[Tensor] = []
        self._one = model.constant("loka.one", np.array([1], dtype=np.int64))
        self._last = model.constant("loka.last", np.array([-1], dtype=np.int64))

    def total(self, tensor: Tensor, name: str, reduction: str = "ReduceSum") -> int:
        """Tap the sum (or another reduction) over all elements; returns its position in the vector."""
        rows = self.model.add(reduction, [tensor, self._last], f"{name}.rows", np.float32, {"keepdims": 1})
        wide = self.model.add("Cast", [rows], f"{name}.wide", np.float64, {"to": onnx.TensorProto.DOUBLE})
        return self._append(self.model.add("ReduceSum", [wide], name, np.float64, {"keepdims": 0}), name)

    def extreme(self, tensor: Tensor, name: str, reduction: str) -> int:
        """Tap ReduceMax or ReduceMin over all elements; returns its position in the vector."""
        value = self.model.add(reduction, [tensor], name, np.float32, {"keepdims": 0})
        wide = self.model.add("Cast", [value], f"{name}.wide", np.float64, {"to": onnx.TensorProto.DOUBLE})
        return self._append(wide, name)

    def size(self, tensor: Tensor, name: str) -> int:
        """Tap the number of elements; returns its position in the vector."""
        count = self.model.add("Size", [tensor], name, np.int64)
        wide = self.model.add("Cast", [count], f"{name}.wide", np.float64, {"to": onnx.TensorProto.DOUBLE})
        return self._append(wide, name)

    def share(self, condition: Tensor, name: str) -> int:
        """Tap how many elements of a BOOL tensor are true; returns its position in the vector."""
        as_float = self.model.add(
            "Cast", [condition], f"{name}.float", np.float32, {"to": onnx.TensorProto.FLOAT}
        )
        return self.total(as_float, name)

    def finish(self) -> None:
        """Make the vector the only output of the graph."""
        vector = self.model.add("Concat", self._scalars, "loka.statistics", np.float64, {"axis": 0})
        vector.name = STATISTICS
        self.model.graph.outputs = []
        self.model.add_output(vector, np.float64, [len(self._scalars)])

    def _append(self, scalar: Tensor, name: str) -> int:
        self._scalars.append(self.model.add("Reshape", [scalar, self._one], f"{name}.flat", np.float64))
        return len(self._scalars) - 1


@dataclass(frozen=True)
class RangeTap:
    """Positions of one tensor's range in the statistics vector."""

    tensor: str
    site: str
    positions: tuple[int, int, int, int, int]

    def read(self, statistics: Rows) -> RangeStats:
        """The range of one batch."""
        count, low, high, total, squares = (float(statistics[p]) for p in self.positions)
        return RangeStats(int(count), max(abs(low), abs(high)), low, high, total, squares)


def tap_ranges(model: GraphModel, sites: Sequence[Site]) -> tuple[RangeTap, ...]:
    """Add range statistics of every activation that a site reads; tensors in common are tapped once."""
    taps = Taps(model)
    found: dict[str, RangeTap] = {}
    for site in sites:
        node = model.node(site.name)
        for operand in site.operands:
            if operand.constant or operand.tensor in found:
                continue
            tensor, name = node.inputs[operand.index], f"{site.name}.range{operand.index}"
            found[operand.tensor] = RangeTap(
                operand.tensor,
                site.name,
                (
                    taps.size(tensor, f"{name}.size"),
                    taps.extreme(tensor, f"{name}.min", "ReduceMin"),
                    taps.extreme(tensor, f"{name}.max", "ReduceMax"),
                    taps.total(tensor, f"{name}.sum"),
                    taps.total(tensor, f"{name}.squares", "ReduceSumSquare"),
                ),
            )
    taps.finish()
    return tuple(found.values())


@dataclass(frozen=True)
class ErrorTap:
    """Positions of one site's error under one recipe in the statistics vector.

    Attributes:
        site: Name of the site.
        recipe: Id of the recipe, or the precision of a norm.
        activation_scale: Scale of the first activation; None for a norm.
        output: Positions of count, signal, quantized signal and noise.
        activation: Positions of count, saturated and underflowed elements; None for a norm.
    """

    site: str
    recipe: str
    activation_scale: float | None
    output: tuple[int, int, int, int]
    activation: tuple[int, int, int] | None

    def read(self, statistics: Rows) -> ErrorStats:
        """The error of one batch."""
        count, signal, quantized, noise = (float(statistics[p]) for p in self.output)
        seen, saturated, underflowed = (
            (int(statistics[p]) for p in self.activation) if self.activation else (0, 0, 0)
        )
        return ErrorStats(
            recipe=self.recipe,
            activation_scale=self.activation_scale,
            count=int(count),
            signal=signal,
            noise=noise,
            # 2⟨q, y⟩ = ‖q‖² + ‖y‖² − ‖q − y‖²
            cross=(signal + quantized - noise) / 2.0,
            quantized=quantized,
            activation_count=seen,
            saturated=saturated,
            underflowed=underflowed,
        )


class ErrorTapBuilder:
    """Adds the error of sites under recipes to a graph; what sites share is computed once."""

    def __init__(self, model: GraphModel, scales: dict[str, dict[str, float]]) -> None:
        """Start.

        Args:
            model: The graph to add to.
            scales: Activation scales by format name and tensor name.
        """
        self.model = model
        self.scales = scales
        self.taps = Taps(model)
        self.found: list[ErrorTap] = []
        self._shared: dict[str, dict[str, FakeQuantized]] = {}
        self._shares: dict[tuple[str, str], tuple[int, int, int]] = {}
        self._exact: dict[str, tuple[int, int]] = {}

    def add_product(self, site: Site, recipe: Recipe) -> None:
        """Tap a linear or interaction site under a recipe."""
        shared = self._shared.setdefault(recipe.format, {})
        scales = self.scales[recipe.format]
        product = quantized_product(self.model, site, recipe, scales, shared)
        name = f"{site.name}.{recipe.id}"
        tensor = site.activation.tensor
        self.found.append(
            ErrorTap(
                site.name,
                recipe.id,
                scales[tensor],
                self._errors(site, product.output, name),
                self._activation_shares(tensor, recipe, shared[tensor], name),
            )
        )

    def add_norm(self, site: Site) -> None:
        """Tap a norm in BF16."""
        name = f"{site.name}.{NORM_PRECISION}"
        output = bfloat16_norm(self.model, site)
        self.found.append(ErrorTap(site.name, NORM_PRECISION, None, self._errors(site, output, name), None))

    def _errors(self, site: Site, quantized: Tensor, name: str) -> tuple[int, int, int, int]:
        exact = self.model.node(site.name).outputs[0]
        if site.name not in self._exact:
            self._exact[site.name] = (
                self.taps.size(exact, f"{site.name}.size"),
                self.taps.total(exact, f"{site.name}.signal", "ReduceSumSquare"),
            )
        difference = self.model.add("Sub", [quantized, exact], f"{name}.difference")
        return (
            *self._exact[site.name],
            self.taps.total(quantized, f"{name}.quantized", "ReduceSumSquare"),
            self.taps.total(difference, f"{name}.noise", "ReduceSumSquare"),
        )

    def _activation_shares(
        self, tensor: str, recipe: Recipe, quantized: FakeQuantized, name: str
    ) -> tuple[int, int, int]:
        key = (recipe.format, tensor)
        if key not in self._shares:
            spec = FLOAT8_SPECS[recipe.format]
            model = self.model

            def compare(op: str, bound: float, label: str) -> Tensor:
                limit = model.constant(f"{name}.{label}", np.array(bound, dtype=np.float32))
                return model.add(op, [quantized.magnitude, limit], f"{name}.is_{label}", np.bool_)

            vanishes = compare("LessOrEqual", spec.min_subnormal / 2, "vanishing")
            nonzero = compare("Greater", 0.0, "nonzero")
            underflowed = model.add("And", [vanishes, nonzero], f"{name}.is_underflowed", np.bool_)
            self._shares[key] = (
                self.taps.size(quantized.magnitude, f"{name}.activation"),
                self.taps.share(compare("Greater", spec.max, "saturated"), f"{name}.saturated"),
                self.taps.share(underflowed, f"{name}.underflowed"),
            )
        return self._shares[key]


def tap_errors(
    model: GraphModel,
    sites: Sequence[Site],
    recipes: Sequence[Recipe],
    scales: dict[str, dict[str, float]],
) -> tuple[ErrorTap, ...]:
    """Add the output error of every site under every recipe that applies to it."""
    builder = ErrorTapBuilder(model, scales)
    for site in sites:
        if site.kind is SiteKind.NORM:
            builder.add_norm(site)
            continue
        for recipe in recipes_for(site, recipes):
            builder.add_product(site, recipe)
    builder.taps.finish()
    return tuple(builder.found)


def recipes_for(site: Site, recipes: Sequence[Recipe]) -> tuple[Recipe, ...]:
    """Recipes that make sense at a site: only one with output channels can have a scale for each."""
    if site.kind is SiteKind.INTERACTION or (site.weight is not None and len(site.weight.shape) < 2):
        return tuple(r for r in recipes if r.weight == "per_tensor")
    return tuple(recipes)
