"""How much arithmetic of the exported model a site does."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from loka_onnx.core.artifact import ModelArtifact
from loka_onnx.core.site import Site
from loka_onnx.errors import InternalError
from loka_onnx.graph.model import GraphModel, values_of


def useful_flops(graph: GraphModel, site: Site) -> int:
    """Return 2·M·N·K of one example over the nonzero rows and columns of a linear site's weight.

    Mods pad with zeros, and put them where they split channels off; shares count only the exported model's
    arithmetic.
    """
    if site.weight is None:
        raise InternalError(f"site '{site.name}' has no weight")
    used = values_of(graph.node(site.name).inputs[site.weight.index]) != 0
    # K and N are the last two axes of a weight, in either order.
    return round(site.flops_per_example * float(used.any(axis=-1).mean()) * float(used.any(axis=-2).mean()))


def share_of(sites: Iterable[str], flops: Mapping[str, int]) -> float:
    """Return the part of the FP8-able operations that sites make."""
    able = sum(flops.values())
    return sum(flops.get(site, 0) for site in sites) / able if able else 0.0


def able_share(model: ModelArtifact, useful: int) -> float:
    """Return the part of all products' operations, sites or not, made by FP8-able sites, whose `useful_flops`
    sum to `useful`.
    """
    others = model.product_flops - model.fp8_able_flops
    return useful / (useful + others) if useful else 0.0
