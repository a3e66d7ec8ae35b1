"""Sites: nodes of a model whose precision a plan decides; and the matrix products that are none."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

LEAST_FP8 = 16
"""Least K and N of a product in "FP8-able FLOPs"."""
HIGH_ERROR = ".loud"
"""Suffix of the product of a site's high-error channels (`split_high_error_channels`)."""


class SiteKind(StrEnum):
    """Kind of a site."""

    LINEAR = "linear"
    """A matrix product with one constant operand."""
    INTERACTION = "interaction"
    """A matrix product of two activations."""
    NORM = "norm"
    """A normalization, which may run in high or base precision."""


@dataclass(frozen=True)
class Operand:
    """Operand of a site, in place `index` among the node's inputs; `constant` if it is an initializer.

    The product sums over `contracting_axis` of the stored shape (None for a norm); dynamic sizes are None.
    """

    tensor: str
    index: int
    constant: bool
    contracting_axis: int | None
    shape: tuple[int | None, ...]


@dataclass(frozen=True)
class Site:
    """A matrix product that could run in FP8, or a normalization.

    Attributes:
        name: Stable name, also of its node in the graph; holds the module path of the original model.
        operands: The activation first, then the weight for a linear; both activations for an interaction.
        k: Length of the contraction (of the normalized axis for a norm); `n` columns, 0 for a norm.
        rows: Rows of the product for each example of the batch.
        merged_from: Sites of the exported model that this one replaces; its own where operands hold others.
    """

    name: str
    kind: SiteKind
    op_type: str
    operands: tuple[Operand, ...]
    output: str
    k: int
    n: int
    rows: int
    merged_from: tuple[str, ...] = ()

    @property
    def activation(self) -> Operand:
        """The first operand that is not constant."""
        return next(o for o in self.operands if not o.constant)

    @property
    def weight(self) -> Operand | None:
        """The constant operand of a linear site, None otherwise."""
        return next((o for o in self.operands if o.constant), None)

    @property
    def flops_per_example(self) -> int:
        """2·M·N·K of one example; 0 for a norm."""
        return 2 * self.rows * self.n * self.k

    @property
    def is_fp8_able(self) -> bool:
        """True if it counts in "FP8-able FLOPs": linear with K, N ≥ 16."""
        return self.kind is SiteKind.LINEAR and min(self.k, self.n) >= LEAST_FP8


def high_error_parts(sites: Iterable[Site]) -> dict[str, str]:
    """Sites whose high-error channels are a product of their own, each with the name of that product."""
    names = {site.name for site in sites}
    return {name: f"{name}{HIGH_ERROR}" for name in sorted(names) if f"{name}{HIGH_ERROR}" in names}


@dataclass(frozen=True)
class OtherProduct:
    """A matrix product that is no site, so no plan decides its precision; 2·M·N·K of one example if known."""

    name: str
    op_type: str
    reason: str
    flops_per_example: int | None


def product_flops(sites: Iterable[Site], others: Iterable[OtherProduct]) -> int:
    """Return 2·M·N·K per example over sites and other products, as far as shapes are known."""
    of_sites = sum(site.flops_per_example for site in sites if site.kind is not SiteKind.NORM)
    return of_sites + sum(other.flops_per_example or 0 for other in others)
