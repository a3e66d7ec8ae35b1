"""What is switched to low precision together: a site alone, or sites that share a quantized tensor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from loka_onnx.calibration.effects.switchable import Switch
from loka_onnx.calibration.instruments.arithmetic import NORM_PRECISION
from loka_onnx.core.site import SiteKind
from loka_onnx.graph.layout import layout_root
from loka_onnx.graph.model import GraphModel


@dataclass(frozen=True)
class Unit:
    """Sites that are switched on together.

    Attributes:
        sites: Their names, in the model's order.
        recipe: Id of the recipe, or the precision for a norm; of several sites, how the tensor that they
            share is rounded (`Recipe.activation_id`).
        tensor: The tensor that several sites share, before layout operations; None for a site alone.
        has_scales: Whether its rounding depends on scales: that to BF16 does not.
    """

    sites: tuple[str, ...]
    recipe: str
    tensor: str | None = None
    has_scales: bool = True


def units_of(model: GraphModel, switches: Sequence[Switch]) -> tuple[Unit, ...]:
    """Each site alone, then the sites that share a quantized tensor.

    Only linear sites that a plan may run in FP8 are taken together: a norm is rounded otherwise, and a
    product that is too small for FP8 reads the exact tensor.

    Args:
        model: The exact graph.
        switches: Sites and recipes.
    """
    return (*(_alone(switch) for switch in switches), *_sharing(model, switches))


def _alone(switch: Switch) -> Unit:
    is_norm = switch.site.kind is SiteKind.NORM
    recipe = NORM_PRECISION if is_norm else switch.recipe.id
    return Unit((switch.site.name,), recipe, has_scales=not is_norm)


def _sharing(model: GraphModel, switches: Sequence[Switch]) -> list[Unit]:
    readers: dict[tuple[str, str], list[str]] = {}
    for switch in switches:
        site = switch.site
        if site.is_fp8_able:
            tensor = layout_root(model.node(site.name).inputs[site.activation.index]).tensor
            readers.setdefault((tensor.name, switch.recipe.activation_id), []).append(site.name)
    return [
        Unit(tuple(sites), rounding, tensor)
        for (tensor, rounding), sites in readers.items()
        if len(sites) > 1
    ]
