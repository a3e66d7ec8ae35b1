"""Products of a model that are no site, and the operations of those that are."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from loka_onnx.core.serde import STRICT
from loka_onnx.core.site import Site, SiteKind


@dataclass(frozen=True)
class OtherProduct:
    """A node that multiplies matrices and is no site: no plan decides its precision.

    Attributes:
        name: Name of the node.
        op_type: ONNX operator.
        reason: Why it is no site.
        flops_per_example: 2·M·N·K of one example; None where its shapes do not say.
    """

    __pydantic_config__ = STRICT

    name: str
    op_type: str
    reason: str
    flops_per_example: int | None


def product_flops(sites: Iterable[Site], others: Iterable[OtherProduct]) -> int:
    """2·M·N·K per example over all products: sites that are products, and the others as far as is known."""
    of_sites = sum(site.flops_per_example for site in sites if site.kind is not SiteKind.NORM)
    return of_sites + sum(other.flops_per_example or 0 for other in others)
