"""Activations of every site against the range of the FP8 format, as a table and as histograms.

A histogram is that of the sampled rows; saturated and underflowed elements and zeros were counted over all
rows that errors were measured on (`core.statistics.ErrorStats`), and are not read off the bins.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import isfinite, log2
from typing import Any

from loka_onnx.core.formats import NumberFormat
from loka_onnx.core.plan import Decision, PrecisionPlan, Verdict
from loka_onnx.core.profile import SiteProfile
from loka_onnx.core.recipe import Recipe
from loka_onnx.core.site import Site
from loka_onnx.core.statistics import ErrorStats, RangeStats
from loka_onnx.report import numbers
from loka_onnx.report.data import ReportData
from loka_onnx.report.document import Cell, Field, Table, Tone, cell, number, table_of, text
from loka_onnx.report.figures import Figure, Place, Told, at, derive, formed, shown


@dataclass(frozen=True)
class Activation:
    """One activation of one site, with the format of the site's recipe.

    Attributes:
        stats: Its range and histogram.
        recipe: None where none was measured (of a norm).
        scale: Scale under the recipe; without a number where there is none.
        error: Counts under the recipe; None for a second activation, which is not counted.
    """

    site: str
    tensor: str
    stats: RangeStats
    recipe: Recipe | None
    scale: Figure
    error: ErrorStats | None

    @property
    def spec(self) -> NumberFormat | None:
        """Constants of the format; None without a rounding scale."""
        scale = self.scale.value
        if self.recipe is None or scale is None or not isfinite(scale) or scale <= 0:
            return None
        return self.recipe.format

    @property
    def bounds(self) -> tuple[float, float, float] | None:
        """Upper ends of magnitudes that round to zero, are subnormal, do not saturate; None without a
        scale.
        """
        if self.spec is None or self.scale.value is None:
            return None
        scale = self.scale.value
        # Half of the smallest number is a tie, and ties go to even: to zero.
        return (
            self.spec.smallest / 2 * scale,
            self.spec.min_normal * scale,
            self.spec.max * scale,
        )

    def counted(self, elements: str) -> Told:
        """Return the share of elements of a kind, as counted by the error pass: ``saturated``, ``zeros``."""
        if self.error is None or not self.error.activation_count:
            return Told(numbers.NOT_MEASURED)
        share = derive("ratio", at(self.error, elements), at(self.error, "activation_count"))
        return formed(numbers.error_percent, share)


def activations(data: ReportData, plan: PrecisionPlan | None) -> tuple[Activation, ...]:
    """Return every activation of every calibrated site, in model order.

    Args:
        plan: Plan of the recipes; a site outside FP8 has that of its verdict.
    """
    profiles = {entry.site: entry for entry in data.profile.sites}
    decisions = {d.site: d for d in plan.decisions} if plan is not None else {}
    return tuple(
        found
        for site in data.modified.sites
        if site.name in profiles
        for found in _of_site(data, site, profiles[site.name], decisions.get(site.name))
    )


def _of_site(
    data: ReportData, site: Site, profile: SiteProfile, decision: Decision | None
) -> Iterator[Activation]:
    error = _measured(profile, decision)
    recipe = _recipe(error)
    counted = error
    for operand in site.operands:
        if operand.constant or operand.tensor not in profile.operands:
            continue
        stats = profile.operands[operand.tensor]
        scale = _scale(data, recipe, operand.tensor, counted)
        yield Activation(site.name, operand.tensor, stats, recipe, scale, counted)
        # Of an interaction, only the first activation was counted.
        counted = None


def _scale(data: ReportData, recipe: Recipe | None, tensor: str, counted: ErrorStats | None) -> Figure:
    scales = data.profile.scales.get(recipe.activation_id, {}) if recipe is not None else {}
    if tensor in scales:
        return at(scales, tensor)
    return at(counted, "activation_scale") if counted is not None else Figure(None, Place(data))


def _measured(profile: SiteProfile, decision: Decision | None) -> ErrorStats | None:
    recipe = decision.recipe if decision is not None else None
    wanted = recipe.id if recipe is not None else profile.judged_recipe
    return next((e for e in profile.errors if e.recipe == wanted), None)


def _recipe(error: ErrorStats | None) -> Recipe | None:
    try:
        return Recipe.of_id(error.recipe) if error is not None else None
    except ValueError:
        # A norm is measured under a precision.
        return None


def _alarming(found: Activation, elements: str) -> Cell:
    is_any = found.error is not None and getattr(found.error, elements) > 0
    return cell(found.counted(elements), Tone.WARN if is_any else Tone.PLAIN)


_FIELDS: tuple[Field[Activation], ...] = (
    text("Site", lambda found: found.site),
    text("Activation", lambda found: found.tensor),
    text("Format", lambda found: found.recipe.format.name if found.recipe is not None else numbers.NONE),
    number("amax", lambda found: shown(numbers.scientific, found.stats, "amax")),
    number("Scale", lambda found: formed(numbers.scientific, found.scale)),
    number("Zeros", lambda found: found.counted("zeros")),
    number("Underflowed to zero", lambda found: found.counted("underflowed")),
    number("Saturated", lambda found: _alarming(found, "saturated")),
)


def activation_table(data: ReportData, plan: PrecisionPlan | None) -> Table:
    """Return shares of each activation where the format is coarse or ends."""
    return table_of("Activations and the range of the format", _FIELDS, activations(data, plan), keys=2)


def histogram_data(data: ReportData, plan: PrecisionPlan | None) -> dict[str, Any]:
    """Return histogram data of the page: each tensor once, and overlays by site.

    Magnitudes are logarithms to base 2. Bins are those of `core.histogram`.
    """
    tensors: dict[str, dict[str, Any]] = {}
    sites: dict[str, list[dict[str, Any]]] = {site.name: [] for site in data.modified.sites}
    for found in activations(data, plan):
        histogram = found.stats.histogram
        tensors[found.tensor] = {
            "first": histogram.first,
            "counts": histogram.counts,
            "total": histogram.total,
        }
        sites[found.site].append(
            {
                "tensor": found.tensor,
                "bounds": [log2(bound) for bound in found.bounds] if found.bounds is not None else None,
                "facts": [[f.column.title, _text(f.show(found))] for f in _FIELDS[1:]],
            }
        )
    decisions = {d.site: d for d in plan.decisions} if plan is not None else {}
    return {
        "tensors": tensors,
        "sites": [
            {"name": name, "activations": shown, **_decided(decisions.get(name))}
            for name, shown in sites.items()
        ],
    }


def _text(said: Cell | str) -> str:
    return str(said.text if isinstance(said, Cell) else said)


def _decided(decision: Decision | None) -> dict[str, str]:
    if decision is None:
        return {"verdict": Verdict.NOT_JUDGED, "precision": numbers.NONE, "reason": ""}
    return {"verdict": decision.verdict, "precision": decision.precision, "reason": decision.reason}
