"""Activations of every site against the range of the FP8 format, as a table and as histograms.

A histogram is that of the sampled rows; saturated and underflowed elements and zeros were counted over all
rows that errors were measured on (`core.statistics.ErrorStats`), and are not read off the bins.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import isfinite, log2
from typing import Any

from loka_onnx.core.plan import Decision, PrecisionPlan, Verdict, quantized_precisions
from loka_onnx.core.profile import Sensitivity, SiteProfile
from loka_onnx.core.recipe import Recipe
from loka_onnx.core.site import Site
from loka_onnx.core.statistics import ErrorStats, RangeStats
from loka_onnx.report import numbers
from loka_onnx.report.data import ReportData
from loka_onnx.report.document import Cell, Column, Table, Tone, number, table_of, text
from loka_onnx.report.figures import Figure, Place, Told, derive, formed, shown


@dataclass(frozen=True)
class Activation:
    """One activation of one site under the site's recipe, which a norm lacks; a second one has no counts."""

    site: str
    tensor: str
    stats: RangeStats
    recipe: Recipe | None
    scale: Figure
    error: ErrorStats | None

    @property
    def bounds(self) -> tuple[float, float, float] | None:
        """Upper ends of magnitudes that round to zero, are subnormal, do not saturate; None without a scale.

        Also None for integers: no number is subnormal, and with a zero point each sign ends elsewhere.
        """
        scale, spec = self.scale.value, self.recipe.format if self.recipe is not None else None
        if spec is None or not spec.is_float or scale is None or not isfinite(scale) or scale <= 0:
            return None
        # Half of the smallest number is a tie, and ties go to even: to zero.
        return spec.smallest / 2 * scale, spec.min_normal * scale, spec.max * scale

    def counted(self, elements: str) -> Told:
        """Return the share of elements of a kind, as counted by the error pass: ``saturated``, ``zeros``."""
        if self.error is None or not self.error.activation_count:
            return Told(numbers.NOT_MEASURED)
        share = derive("ratio", Place(self.error, elements), Place(self.error, "activation_count"))
        return formed(numbers.error_percent, share)


@dataclass(frozen=True)
class SiteRow:
    """One site with its decision in a plan, and what was measured under the recipe of that."""

    site: Site
    decision: Decision | None
    profile: SiteProfile | None

    @property
    def recipe(self) -> str | None:
        """Id of the recipe of the decision; of a site outside FP8 that of its verdict."""
        if self.decision is not None and self.decision.recipe is not None:
            return self.decision.recipe.id
        return self.profile.judged_recipe if self.profile is not None else None

    @property
    def error(self) -> ErrorStats | None:
        """Error under that recipe."""
        errors = self.profile.errors if self.profile is not None else ()
        return next((error for error in errors if error.recipe == self.recipe), None)

    @property
    def sensitivities(self) -> tuple[Sensitivity, ...]:
        """Sensitivities under that recipe."""
        known = self.profile.sensitivities if self.profile is not None else ()
        return tuple(sensitivity for sensitivity in known if sensitivity.recipe == self.recipe)


def site_rows(data: ReportData, plan: PrecisionPlan | None) -> Iterator[SiteRow]:
    """Yield every site in model order."""
    decisions = {} if plan is None else {decision.site: decision for decision in plan.decisions}
    profile = data.profile
    if plan is not None and (low := plan.precisions or quantized_precisions(plan.id)):
        profile = profile.of(plan.formats or low[0])
    profiles = {entry.site: entry for entry in profile.sites}
    for site in data.modified.sites:
        yield SiteRow(site, decisions.get(site.name), profiles.get(site.name))


def activations(data: ReportData, plan: PrecisionPlan | None) -> Iterator[Activation]:
    """Yield every activation of every calibrated site under the recipes of a plan, in model order."""
    for row in site_rows(data, plan):
        error, recipe = row.error, _recipe(row.error)
        ranges = row.profile.operands if row.profile is not None else {}
        tensors = (operand.tensor for operand in row.site.operands if not operand.constant)
        for tensor in (name for name in tensors if name in ranges):
            scale = _scale(data, recipe, tensor, error)
            yield Activation(row.site.name, tensor, ranges[tensor], recipe, scale, error)
            # Of an interaction, only the first activation was counted.
            error = None


def _scale(data: ReportData, recipe: Recipe | None, tensor: str, error: ErrorStats | None) -> Figure:
    scales = data.profile.scales.get(recipe.activation_id, {}) if recipe is not None else {}
    if tensor in scales:
        return Place(scales, tensor)
    return Place(error, "activation_scale") if error is not None else Place(None)


def _recipe(error: ErrorStats | None) -> Recipe | None:
    try:
        return Recipe.of_id(error.recipe) if error is not None else None
    except ValueError:
        # A norm is measured under a precision.
        return None


def _saturated(activation: Activation) -> Cell:
    is_any = activation.error is not None and activation.error.saturated > 0
    return Cell(activation.counted("saturated"), Tone.WARN if is_any else Tone.PLAIN)


_COLUMNS: tuple[Column[Activation], ...] = (
    text("Site", "site"),
    text("Activation", "tensor"),
    text("Format", lambda item: item.recipe.format.name if item.recipe is not None else numbers.NONE),
    number("amax", lambda item: shown(numbers.scientific, item.stats, "amax")),
    number("Scale", lambda item: formed(numbers.scientific, item.scale)),
    number("Zeros", lambda item: item.counted("zeros")),
    number("Underflowed to zero", lambda item: item.counted("underflowed")),
    number("Saturated", _saturated),
)


def activation_table(data: ReportData, plan: PrecisionPlan | None) -> Table:
    """Return shares of each activation where the format is coarse or ends."""
    return table_of("Activations and the range of the format", _COLUMNS, activations(data, plan))


def histogram_data(data: ReportData, plan: PrecisionPlan | None) -> dict[str, Any]:
    """Return the page's histograms by tensor (bounds as logarithms to base 2), and overlays by site."""
    tensors: dict[str, dict[str, Any]] = {}
    sites: dict[str, list[dict[str, Any]]] = {site.name: [] for site in data.modified.sites}
    for item in activations(data, plan):
        histogram = item.stats.histogram
        tensors[item.tensor] = {name: getattr(histogram, name) for name in ("first", "counts", "total")}
        bounds = None if item.bounds is None else [log2(bound) for bound in item.bounds]
        facts = ((column.title, column.show(item)) for column in _COLUMNS[1:])
        texts = [[title, str(getattr(fact, "text", fact))] for title, fact in facts]
        sites[item.site].append({"tensor": item.tensor, "bounds": bounds, "facts": texts})
    decided = {"verdict": Verdict.NOT_JUDGED.value, "precision": numbers.NONE, "reason": ""}
    overlays = [
        {"name": row.site.name, "activations": sites[row.site.name]}
        | {key: getattr(row.decision, key, default) for key, default in decided.items()}
        for row in site_rows(data, plan)
    ]
    return {"tensors": tensors, "sites": overlays}
