"""The model as it travels through the stages."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import ClassVar

from loka_onnx.core.serde import STRICT, is_inside
from loka_onnx.core.site import OtherProduct, Site, SiteKind, product_flops
from loka_onnx.errors import ConfigError, UserError


class OutputKind(StrEnum):
    """Meaning of an output; decides its loss."""

    LOGIT = "logit"
    PROBABILITY = "probability"
    REGRESSION = "regression"


KL_PER_BUDGET = 5.0
"""Accepted KL, in budgets, without `OutputSpec.max_kl`: the labelled part may hide harm."""


@dataclass(frozen=True)
class OutputSpec:
    """One output that is judged.

    Attributes:
        kind: Logit, probability (clipped to [clip, 1-clip] and turned into a logit) or regression.
        label: Label column, or None: then judged on the label-free part of the loss change over the mean
            entropy of p. A regression has no entropy and needs one.
        weight: Column of per-row weights, or None.
        budget: Largest accepted relative loss increase (0.0002 is 0.02 %).
        max_kl: Largest accepted KL over the FP32 loss (or entropy); None for `KL_PER_BUDGET` budgets.
        max_auc_drop: Largest accepted decrease of AUC (0.0001 is .01 points); None for any.
    """

    name: str
    kind: OutputKind
    label: str | None
    weight: str | None = None
    budget: float = 0.0002
    clip: float = 1e-7
    max_kl: float | None = None
    max_auc_drop: float | None = None

    @property
    def kl_limit(self) -> float | None:
        """Largest accepted KL; None for a regression, whose squared change is no divergence."""
        if self.kind is OutputKind.REGRESSION:
            return None
        return KL_PER_BUDGET * self.budget if self.max_kl is None else self.max_kl

    def __post_init__(self) -> None:
        is_regression = self.kind is OutputKind.REGRESSION
        for key in ("max_kl", "max_auc_drop"):
            if is_regression and getattr(self, key) is not None:
                raise ConfigError(
                    f"E1801 `{key}` belongs to an output of kind 'logit' or 'probability'",
                    where=key,
                    evidence=f"output '{self.name}' is a regression",
                    remedy=f"remove `{key}`, or correct `kind`",
                )
        if self.label is None and is_regression:
            raise ConfigError(
                f"E1802 a regression needs a label, and output '{self.name}' has none",
                where="label",
                evidence="without labels a change is relative to the mean entropy of the predictions, which "
                "a regression does not have",
                remedy="name the column of its label, or remove this output from `outputs`",
            )
        if self.label is None and self.max_auc_drop is not None:
            raise ConfigError(
                f"E1803 `max_auc_drop` needs a label, and output '{self.name}' has none",
                where="max_auc_drop",
                evidence="AUC ranks rows by their labels",
                remedy="name the column of its label, or remove `max_auc_drop`",
            )


@dataclass(frozen=True)
class TensorSpec:
    """A graph input or output: NumPy's name of its type; sizes, None where dynamic, the batch on axis 0."""

    name: str
    dtype: str
    shape: tuple[int | None, ...]


@dataclass(frozen=True)
class Parity:
    """Absolute differences of the graph's outputs from those of its torch module, and their limit."""

    rows: int
    max_abs: float
    rms: float
    tolerance: float


@dataclass(frozen=True)
class ModelArtifact:
    """An ONNX model with named sites, in topological order.

    Attributes:
        path: The ``.onnx`` file, relative to the run directory in its document; absolute in a report.
        digest: SHA-256 over the graph and its external data.
        parity: Agreement with the torch module; None when the model entered as ONNX.
        notes: Conversions on the way in.
    """

    SCHEMA: ClassVar[str] = "model/2"
    __pydantic_config__ = STRICT

    path: Path
    digest: str
    opset: int
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    sites: tuple[Site, ...]
    producer: str
    parity: Parity | None = None
    notes: tuple[str, ...] = field(default=())
    other_products: tuple[OtherProduct, ...] = ()

    def placed(self, directory: Path) -> ModelArtifact:
        """Return the model with its path in a run directory; `UserError` if the path leaves it."""
        if not is_inside(self.path):
            raise UserError(
                "E1804 a document names a model outside of its run directory", evidence=f"'{self.path}'"
            )
        return replace(self, path=directory / self.path)

    def site(self, name: str) -> Site:
        """Return the site of that name."""
        return {site.name: site for site in self.sites}[name]

    @property
    def linear_sites(self) -> tuple[Site, ...]:
        """Sites with one constant operand."""
        return tuple(s for s in self.sites if s.kind is SiteKind.LINEAR)

    @property
    def fp8_able_flops(self) -> int:
        """2·M·N·K per example over the linear sites with K, N ≥ 16."""
        return sum(s.flops_per_example for s in self.sites if s.is_fp8_able)

    @property
    def product_flops(self) -> int:
        """2·M·N·K per example over every product, site or not, as far as shapes are known."""
        return product_flops(self.sites, self.other_products)
