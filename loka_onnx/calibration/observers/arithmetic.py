"""Low-precision sites in FP32 arithmetic, for the error pass and the sensitivity pass.

**Noise seeds.** A value's position on the grid depends on its scale, and the scale on the largest value of
some rows. Other rows would give another scale, and every error another sign and size. One profile shows one
seed of this noise, and an interval over rows says nothing of the others. So the first rows run again under
scales times 2^(1/5), 2^(2/5), ….

- A factor matters only by its fraction of an octave: a power of two moves no value on the grid (except at
  underflow). So the factors are evenly spaced inside one octave.
- Fifths, because errors under scales so far apart correlate least: for normal values up to .15 in E4M3 and
  .26 in E5M2 among four seeds (eighths: .29 and .44; quarters: .11 and .39).
- An integer grid has no octaves: a larger scale only makes it coarser. Its scales take the eighth root of the
  factors, so that the noise grows by less than a sixth; that moves all values of more than some six steps.
- Factors are above 1: below it, values beyond the format's range would saturate, which is another kind of
  error. The largest, 2^(4/5), costs less than one of E4M3's 18 binades.
- Moved scales are rounded up to BF16, like every scale (`numerics.scales`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from loka_onnx.core.formats import FORMATS, NumberFormat
from loka_onnx.core.recipe import ZERO_POINT, Granularity, Recipe, Scales, Scaling
from loka_onnx.core.site import Site, SiteKind
from loka_onnx.core.statistics import RangeStats
from loka_onnx.errors import ConfigError
from loka_onnx.graph.fake_quantize import Bounds, FakeQuantized, fake_quantize, round_to_bfloat16
from loka_onnx.graph.layout import layout_root, reapply
from loka_onnx.graph.model import GraphModel, Tensor, is_constant, values_of
from loka_onnx.graph.sites import channel_axis
from loka_onnx.numerics.rounding import fake_quantize as fake_quantize_array
from loka_onnx.numerics.scales import round_up_to_bfloat16, weight_scales

NORM_PRECISION = "bf16"
"""Precision that a norm is tried in: BF16 operands and results, FP32 statistics."""
DRAW_ROWS = 4096
"""Rows that are run under moved scales."""
STEPS_IN_OCTAVE = 5
UNIFORM_SHARE = 1 / 8
"""Exponent of the factors on an integer grid."""
MOST_DRAWS = 8
"""Scales of more noise seeds would be too close to each other."""

Array = npt.NDArray[Any]


@dataclass
class ActivationQuantizer:
    """Rounds activations of one graph to one format, each tensor and its layouts once.

    `scalings` are by tensor name; `ranges`, where known, over the very rows that the graph will see.
    """

    model: GraphModel
    format: NumberFormat
    scalings: Mapping[str, Scaling]
    ranges: Mapping[str, RangeStats] = field(default_factory=dict)
    _roots: dict[str, FakeQuantized] = field(default_factory=dict)
    _views: dict[str, Tensor] = field(default_factory=dict)

    def root(self, tensor: Tensor, name: str) -> FakeQuantized:
        """Add the rounding of the tensor that `tensor` is a layout of, once; `name` prefixes its nodes."""
        source = layout_root(tensor).tensor
        if source.name not in self._roots:
            scaling = self.scalings[tensor.name]
            self._roots[source.name] = fake_quantize(
                self.model, source, scaling, self.format, name, self._bounds(tensor, scaling)
            )
        return self._roots[source.name]

    def values(self, tensor: Tensor, name: str) -> Tensor:
        """Return the rounded tensor."""
        if tensor.name not in self._views:
            chain = layout_root(tensor).chain
            self._views[tensor.name] = reapply(self.model, chain, self.root(tensor, name).values, name)
        return self._views[tensor.name]

    def _bounds(self, tensor: Tensor, scaling: Scaling) -> Bounds:
        if tensor.name not in self.ranges:
            return Bounds()
        known = self.ranges[tensor.name]
        # The zero point is rounded, so the ends of the range may lie beyond.
        saturates = self.format.has_zero_point or known.amax > self.format.max * scaling.scale
        return Bounds(saturates, known.minimum < 0.0)


def quantized_product(
    quantizer: ActivationQuantizer, site: Site, recipe: Recipe, weight_factor: float = 1.0
) -> Tensor:
    """Add a product with both operands rounded, the weight's scales times a factor; return its output."""
    model = quantizer.model
    node = model.node(site.name)
    inputs = list(node.inputs)
    for operand in site.operands:
        tensor = node.inputs[operand.index]
        if not operand.constant:
            inputs[operand.index] = quantizer.values(tensor, f"{site.name}.in{operand.index}")
            continue
        weight, format = values_of(tensor).astype(np.float32), recipe.format.of_weights
        axis = channel_axis(operand)
        scales = moved_scales(weight_scales(weight, recipe.weight, axis, format), weight_factor, format)
        per_channel = axis if recipe.weight is Granularity.PER_CHANNEL else None
        rounded = fake_quantize_array(weight, scales, format, per_channel)
        inputs[operand.index] = model.constant(f"{site.name}.weight_quantized", rounded)
    return model.add_like(node, inputs, f"{site.name}.quantized")


def bfloat16_norm(model: GraphModel, site: Site) -> Tensor:
    """Add a norm with operands and results rounded to BF16 and FP32 statistics; return its output."""
    node = model.node(site.name)
    inputs = [
        model.constant(f"{site.name}.param_bf16", values_of(t).astype(ml_dtypes.bfloat16).astype(np.float32))
        if is_constant(t)
        else round_to_bfloat16(model, t, f"{site.name}.in")
        for t in node.inputs
    ]
    return round_to_bfloat16(model, model.add_like(node, inputs, f"{site.name}.norm"), f"{site.name}.out")


def low_precision(
    model: GraphModel, site: Site, recipe: Recipe, scales: Scales, weight_factor: float = 1.0
) -> Tensor:
    """Add the site in the low precision of its kind; return its output."""
    if site.kind is SiteKind.NORM:
        return bfloat16_norm(model, site)
    node = model.node(site.name)
    # The activation of a switched site has another name here than when its range was measured.
    present = {
        node.inputs[o.index].name: recipe.scaling(scales, o.tensor) for o in site.operands if not o.constant
    }
    quantizer = ActivationQuantizer(model, recipe.format, present)
    return quantized_product(quantizer, site, recipe, weight_factor)


def draw_factors(draws: int) -> tuple[float, ...]:
    """Return the scales' factor for each noise seed, the first 1; ConfigError unless 1 to `MOST_DRAWS`."""
    if not 1 <= draws <= MOST_DRAWS:
        raise ConfigError(
            f"E0503 rounding noise can be drawn 1 to {MOST_DRAWS} times",
            evidence=f"{draws} draws are asked for",
            remedy="1 measures under the profile's own scales only; 4 is the default",
        )
    return tuple(2.0 ** (step / max(draws, STEPS_IN_OCTAVE)) for step in range(draws))


def moved_scales(scales: Array, factor: float, format: NumberFormat) -> Array:
    """Return scales of any shape times a factor, on the BF16 grid; unchanged for the factor 1."""
    if factor == 1.0:
        return scales
    if not format.is_float:
        factor **= UNIFORM_SHARE
    return round_up_to_bfloat16(scales.astype(np.float64) * factor).astype(scales.dtype)


def moved_activations(scales: Scales, factor: float) -> dict[str, dict[str, float]]:
    """Return activation scales times a factor; zero points stay, as both ends of a range move."""

    def again(rounding: str, scale: float) -> float:
        if rounding.endswith(f"/{ZERO_POINT}"):
            return scale
        return float(moved_scales(np.array(scale), factor, FORMATS[rounding.partition("/")[0]]))

    return {
        rounding: {tensor: again(rounding, scale) for tensor, scale in known.items()}
        for rounding, known in scales.items()
    }
