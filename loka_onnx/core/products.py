"""Matrix products that are no sites, and operations of all products."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from loka_onnx.core.serde import STRICT
from loka_onnx.core.site import Site, SiteKind


@dataclass(frozen=True)
class OtherProduct:
    """A matrix product that is no site: no plan decides its precision.

    Attributes:
        flops_per_example: 2·M·N·K of one example; None where shapes are unknown.
    """

    __pydantic_config__ = STRICT

    name: str
    op_type: str
    reason: str
    flops_per_example: int | None


def product_flops(sites: Iterable[Site], others: Iterable[OtherProduct]) -> int:
    """Return 2·M·N·K per example over sites and other products, as far as shapes are known."""
    of_sites = sum(site.flops_per_example for site in sites if site.kind is not SiteKind.NORM)
    return of_sites + sum(other.flops_per_example or 0 for other in others)
