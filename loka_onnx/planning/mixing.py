"""Format of each site in the plan `mixed`: of FP8 and INT8 the faster one that the error budget allows.

Sites that read one tensor share its rounded values and their quantize step: such a unit has one format. With
c_p the KL of a unit in the format p, as a part of what the outputs allow all products together (on the output
where it is largest), and w the unit's part of the floating-point operations, the formats with c_p ≤ w are
inside its share. Of these the unit gets the one that saves the most time by kernel times; formats whose times
are within one another's errors, or not known, count as equally fast, and the smaller c_p decides, as it does
where no format is inside the share. Which of the units then run in eight bits is a matter of the ladder.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import fsum, hypot, inf

from loka_onnx.core.artifact import OutputSpec
from loka_onnx.core.formats import Precision
from loka_onnx.core.site import Site, SiteKind
from loka_onnx.graph.layout import layout_root
from loka_onnx.graph.model import GraphModel, values_of
from loka_onnx.planning.costs import Costs, allowed_kl
from loka_onnx.planning.judging import percent
from loka_onnx.planning.site_speed import SiteSpeeds


@dataclass(frozen=True)
class Mixture:
    """The format of each site, and why not the other: empty where nothing else could multiply it."""

    formats: Mapping[str, Precision]
    reasons: Mapping[str, str]


@dataclass(frozen=True)
class _Candidate:
    """A unit in one format: `cost` is a part of what is allowed; nanoseconds per row that it saves."""

    precision: Precision
    cost: float
    saved: float = 0.0
    error: float = 0.0

    def words(self, *, is_timed: bool) -> str:
        time = f", {self.saved:.3g} ns a row saved" if is_timed else ""
        return f"{self.precision.upper()} (a KL of {percent(self.cost)} of what is allowed{time})"


def mix_formats(
    graph: GraphModel,
    sites: Sequence[Site],
    outputs: Sequence[OutputSpec],
    costs: Mapping[Precision, Costs],
    speeds: Mapping[Precision, SiteSpeeds],
) -> Mixture:
    """Return the format of every product; `costs` are of each format, `speeds` of one device, or empty."""
    units: dict[str, list[Site]] = {}
    for site in sites:
        if site.kind is not SiteKind.NORM:
            root = layout_root(graph.node(site.name).inputs[site.activation.index]).tensor.name
            units.setdefault(root if site.is_fp8_able else f"site {site.name}", []).append(site)
    whole = sum(site.flops_per_example for site in sites if site.is_fp8_able) or 1
    formats: dict[str, Precision] = {}
    reasons: dict[str, str] = {}
    for unit in units.values():
        names = [site.name for site in unit]
        is_timed = len(speeds) == len(costs) and all({*names} <= {*each.known} for each in speeds.values())
        able = [
            _candidate(names, precision, of, outputs, speeds[precision] if is_timed else None)
            for precision, of in costs.items()
            if precision is not Precision.INT8 or not any(why_no_integers(graph, site) for site in unit)
        ]
        first, *others = _ranked(able, sum(site.flops_per_example for site in unit) / whole)
        why = f"{first.words(is_timed=is_timed)} rather than " if others else ""
        why += " or ".join(other.words(is_timed=is_timed) for other in others)
        formats |= dict.fromkeys(names, first.precision)
        reasons |= dict.fromkeys(names, why)
    return Mixture(formats, reasons)


def why_no_integers(graph: GraphModel, site: Site) -> str:
    """Return why no backend multiplies a site in INT8, as a prefix; empty where one does."""
    weight = site.weight
    if weight is None:
        return ""
    if weight.index == 0 and site.op_type in {"MatMul", "Gemm"}:
        return "its weight is the left factor: no INT8 kernel has a scale for each of its rows; "
    axes = values_of(graph.node(site.name).inputs[weight.index]).ndim
    if axes > 2 and site.op_type == "MatMul":
        return f"its weight has {axes} axes: no INT8 kernel has a scale for each channel of it; "
    return ""


def _candidate(
    names: Sequence[str],
    precision: Precision,
    costs: Costs,
    outputs: Sequence[OutputSpec],
    speeds: SiteSpeeds | None,
) -> _Candidate:
    parts = ((costs.predicted(names, spec), allowed_kl(spec)) for spec in outputs)
    cost = max(kl / allowed if allowed > 0.0 else inf for kl, allowed in parts)
    if speeds is None:
        return _Candidate(precision, cost)
    saved = fsum(speeds.saved_per_row(name) for name in names) - speeds.quantize_per_row(names[0])
    return _Candidate(precision, cost, saved, hypot(*map(speeds.error_per_row, names)))


def _ranked(candidates: Sequence[_Candidate], share: float) -> list[_Candidate]:
    """Return candidates, the best one first and the others by their cost."""
    rest = sorted(candidates, key=lambda each: each.cost)
    inside = [each for each in rest if each.cost <= share] or rest[:1]
    fastest = max(inside, key=lambda each: each.saved)
    best = next(e for e in inside if fastest.saved - e.saved <= hypot(fastest.error, e.error))
    return [best, *(each for each in rest if each is not best)]
