"""Tables of the sites: the effect of FP8 on each, and its precision in each plan."""

from __future__ import annotations

from dataclasses import dataclass

from loka_onnx.core.formats import Precision
from loka_onnx.core.intervals import Interval
from loka_onnx.core.plan import Decision, PrecisionPlan, Verdict
from loka_onnx.core.profile import Profile, SiteProfile
from loka_onnx.core.ratio_moments import RatioMoments
from loka_onnx.core.sensitivity import ENTROPY, LOSS, Sensitivity, SiteGroup
from loka_onnx.core.site import Site, SiteKind
from loka_onnx.core.statistics import ErrorStats
from loka_onnx.report import numbers
from loka_onnx.report.data import ReportData
from loka_onnx.report.document import Cell, Column, Section, Table, Tone, cell
from loka_onnx.report.figures import (
    Figure,
    Place,
    Told,
    at,
    derive,
    formed,
    joined,
    percent_interval,
    shown,
    told,
)
from loka_onnx.report.histograms import activation_table
from loka_onnx.report.quadrants import SAFE_PLAN, SPEED_TONES, speed_texts
from loka_onnx.report.speed_tables import speed_tables

_MOST_NAMED = 6

_COLUMNS = (
    Column("Site"),
    Column("Kind"),
    Column("K", numeric=True),
    Column("N", numeric=True),
    Column("Rows", numeric=True),
    Column("FLOP share", numeric=True),
    Column("Precision", is_choice=True),
    Column("Verdict", is_choice=True),
    Column("Speed", is_choice=True),
    Column("Relative error", numeric=True),
    Column("KL", numeric=True),
    Column("KL over draws", numeric=True),
    Column("Labelled", numeric=True),
    Column("Rows measured", numeric=True),
    Column("Recipe measured"),
    Column("Reason", prose=True),
)
_VERDICT_TONES = {
    Verdict.SAFE: Tone.GOOD,
    Verdict.UNSAFE: Tone.BAD,
    Verdict.UNDECIDED: Tone.WARN,
    Verdict.NOT_JUDGED: Tone.MUTED,
}


def sites_section(data: ReportData) -> Section:
    """Return calibration results and decisions for each site."""
    plan = shown_plan(data)
    tables: list[Table] = []
    paragraphs = [
        "Relative error is that of the site's own output under the recipe. KL is the label-free part of the "
        "loss increase and labelled its first-order part, both relative to "
        f"{_denominators(data)}, for this site alone. FLOP share is of the FP8-able FLOPs of the model after "
        "mods, what mods pad with zeros included; the FP8 share of a plan leaves that out.",
        "KL decides on a site, with the corrected bound that its reason gives. The labelled part is judged "
        "on whole plans: of one site it is mostly noise, and where it is not, it calls for another cure (a "
        "correction of the output, not more precision).",
        _intervals(data),
    ]
    if plan is not None:
        emitted = tuple(dict.fromkeys(name for t in data.choice.targets for name in t.plans))
        if plan.id not in emitted:
            paragraphs.insert(
                0,
                f"The emitted engine runs plan {', '.join(emitted)}. Precision, verdict and reason below are "
                f"those of plan {plan.id}, in which the sites were judged.",
            )
        tables.append(_site_table(data, plan))
    if data.profile.sites:
        tables.append(activation_table(data, plan))
    if data.profile.groups:
        tables.append(_group_table(data))
    if len(data.plans.plans) > 1:
        tables.append(_plan_table(data))
    if any(plan.wide for plan in data.plans.plans):
        tables.append(_wide_table(data))
    tables += speed_tables(data, data.plan(SAFE_PLAN) or plan)
    paragraphs += [
        f"Plan {p.id} is based on {p.base}: {p.base_reason}." for p in data.plans.plans if p.base_reason
    ]
    paragraphs += [f"{note}." for note in data.plans.notes]
    return Section("sites", "Sites", tuple(paragraphs), tuple(open_sites(data.profile)), tuple(tables))


def calibration_facts(profile: Profile) -> list[str]:
    """Return the rows behind each part of a profile, and why no more."""
    sampling = profile.sampling
    facts: list[str] = [
        told(
            "Ranges: {} rows; errors: {} rows; sensitivities: {} rows",
            shown(numbers.count, profile, "rows"),
            shown(numbers.count, profile, "error_rows"),
            shown(numbers.count, sampling, "rows"),
        )
    ]
    if sampling.may_stop_early and not sampling.undecided:
        facts.append("Sensitivities stopped where the verdict of every site was reached")
    digests = profile.data_digest.split("+")
    if len(digests) > 1:
        added = ", ".join(numbers.digest(digest) for digest in digests[1:])
        facts.append(f"Calibration rows were added to those of the split: digest {added}")
    return facts


def open_sites(profile: Profile) -> list[str]:
    """Return sites whose verdict needs more rows; empty for none, or where it was not requested."""
    sites = profile.sampling.undecided
    if not sites:
        return []
    rows = shown(numbers.count, profile.sampling, "rows")
    return [
        told("Undecided when the rows ended, after {}: {}. More rows may decide them", rows, ", ".join(sites))
    ]


def _denominators(data: ReportData) -> str:
    found = {s.denominator for site in data.profile.sites for s in site.sensitivities}
    words = {LOSS: "the loss", ENTROPY: "the mean entropy of the predictions (no labels)"}
    return " or ".join(text for name, text in words.items() if name in (found or {LOSS}))


def _intervals(data: ReportData) -> str:
    sequential = " at every number of rows at once, because rows were added until verdicts were reached"
    return (
        f"Each interval holds with 95 %{sequential if data.profile.sampling.is_sequential else ''}. It says "
        "nothing of other draws of the rounding noise: those are the KL of some rows under scales that were "
        "moved a little."
    )


def shown_plan(data: ReportData) -> PrecisionPlan | None:
    """Return the plan whose reasons are shown: the selected one if it has FP8, else fp8-safe, else any with
    FP8.
    """
    emitted = [data.plan(name) for t in data.choice.targets for name in t.plans]
    candidates = [*emitted, data.plan(SAFE_PLAN), *data.plans.plans]
    known = [p for p in candidates if p is not None]
    return next((p for p in known if p.fp8_sites), known[0] if known else None)


def _site_table(data: ReportData, plan: PrecisionPlan) -> Table:
    able = derive("fp8_able_flops", Place(data.modified, "sites"))
    known = _Known(
        {decision.site: decision for decision in plan.decisions},
        {profile.site: profile for profile in data.profile.sites},
        speed_texts(data),
    )
    rows = tuple(_site_row(data, plan, site, able, known) for site in data.modified.sites)
    rows_measured = shown(numbers.count, data.profile, "rows")
    caption = told("Sites in plan {}, measured on {} calibration rows", plan.id, rows_measured)
    return Table(caption, _COLUMNS, rows)


@dataclass(frozen=True)
class _Known:
    """Known facts of sites, by name."""

    decisions: dict[str, Decision]
    profiles: dict[str, SiteProfile]
    speeds: dict[str, str]


def _site_row(
    data: ReportData, plan: PrecisionPlan, site: Site, able: Figure, known: _Known
) -> tuple[Cell, ...]:
    decision, profile = known.decisions.get(site.name), known.profiles.get(site.name)
    recipe = _recipe(decision, profile)
    error = next((e for e in profile.errors if e.recipe == recipe), None) if profile else None
    sensitivities = tuple(s for s in profile.sensitivities if s.recipe == recipe) if profile else ()
    verdict = decision.verdict if decision is not None else Verdict.NOT_JUDGED
    reason = decision.reason if decision is not None else f"plan {plan.id} does not name it"
    if set(site.merged_from) - {site.name}:
        reason = f"{reason} (merged from {', '.join(site.merged_from)})"
    return (
        cell(site.name),
        cell(f"{site.kind} ({site.op_type})"),
        cell(shown(numbers.count, site, "k")),
        cell(shown(numbers.count, site, "n") if site.n else numbers.NONE),
        cell(shown(numbers.count, site, "rows")),
        cell(_flop_share(site, able)),
        cell(decision.precision if decision is not None else plan.base, _precision_tone(decision)),
        cell(verdict, _VERDICT_TONES[verdict]),
        _speed(site, known),
        cell(_relative_error(error)),
        cell(_joined(data, [(s, _kl(data, s)) for s in sensitivities])),
        cell(_joined(data, [(s, _draws(s)) for s in sensitivities])),
        cell(_joined(data, [(s, _labelled(data, s)) for s in sensitivities])),
        cell(_rows_measured(sensitivities)),
        cell(recipe or numbers.NONE),
        cell(reason),
    )


def _speed(site: Site, known: _Known) -> Cell:
    if site.kind is SiteKind.NORM:
        return cell(numbers.NONE)
    text = known.speeds.get(site.name, numbers.NOT_MEASURED)
    return cell(text, SPEED_TONES.get(text, Tone.MUTED if text == numbers.NOT_MEASURED else Tone.PLAIN))


def _recipe(decision: Decision | None, profile: SiteProfile | None) -> str | None:
    if decision is not None and decision.recipe is not None:
        return decision.recipe.id
    # A site outside FP8 has no recipe: the one of its verdict is shown, by name.
    return profile.judged_recipe if profile is not None else None


def _flop_share(site: Site, able: Figure) -> Told:
    """Return the share of the FP8-able FLOPs of the listed model, as in the quadrants."""
    if not site.is_fp8_able or not able.value:
        return Told(numbers.NONE)
    return formed(numbers.share, derive("ratio", derive("flops", Place(site)), able))


def _relative_error(error: ErrorStats | None) -> Told:
    if error is None:
        return Told(numbers.NOT_MEASURED)
    return formed(numbers.error_percent, derive("relative_error", Place(error)))


def _rows_measured(sensitivities: tuple[Sensitivity, ...]) -> Told:
    if not sensitivities:
        return Told(numbers.NONE)
    return formed(numbers.count, derive("max", *(at(s.kl_moments, "rows") for s in sensitivities)))


def _kl(data: ReportData, found: Sensitivity) -> Told:
    return _interval(data, found.kl_moments, found.kl)


def _labelled(data: ReportData, found: Sensitivity) -> Told:
    if found.labelled_moments is None or found.labelled is None:
        return Told(numbers.NONE)
    return _interval(data, found.labelled_moments, found.labelled)


def _interval(data: ReportData, moments: RatioMoments, fixed: Interval) -> Told:
    """Return the interval valid for how rows were added; `fixed` is that of a number fixed beforehand."""
    sampling = data.profile.sampling
    if not sampling.is_sequential:
        return percent_interval(fixed)
    places = (Place(moments), Place(sampling))
    ends = [derive(f"interval_{end}", *places) for end in ("value", "lower", "upper")]
    return Told(numbers.percent_interval(sampling.interval_of(moments)), ends)


def _draws(sensitivity: Sensitivity) -> Told:
    draws = sensitivity.draws
    if draws is None:
        return Told(numbers.NONE)
    return told(
        "{} to {} ({})",
        shown(numbers.error_percent, draws, "kl_low"),
        shown(numbers.error_percent, draws, "kl_high"),
        shown(numbers.count, draws, "count"),
    )


def _joined(data: ReportData, values: list[tuple[Sensitivity, Told]]) -> Told:
    if not values:
        return Told(numbers.NOT_MEASURED)
    if len({s.output for s, _ in values}) == 1 and len(data.profile.baseline_loss) <= 1:
        return values[0][1]
    return joined("; ", [told("{}: {}", s.output, text) for s, text in values])


def _precision_tone(decision: Decision | None) -> Tone:
    return Tone.GOOD if decision is not None and decision.precision is Precision.FP8 else Tone.PLAIN


def _group_table(data: ReportData) -> Table:
    columns = (
        Column("Tensor"),
        Column("Output"),
        Column("KL together", numeric=True),
        Column("Sum of each alone", numeric=True),
        Column("KL over draws", numeric=True),
        Column("Labelled together", numeric=True),
        Column("Sites", prose=True),
    )
    rows = tuple(
        (
            cell(group.tensor),
            cell(item.output),
            cell(_kl(data, item)),
            cell(formed(numbers.error_percent, _sum_alone(data, group, item.output))),
            cell(_draws(item)),
            cell(_labelled(data, item)),
            cell(", ".join(group.sites)),
        )
        for group in data.profile.groups
        for item in group.sensitivities
    )
    return Table("Sites that share a quantized tensor, measured together", columns, rows, keys=2)


def _sum_alone(data: ReportData, group: SiteGroup, output: str) -> Figure:
    firsts = (
        next(item for item in data.profile.site(name).sensitivities if item.output == output)
        for name in group.sites
    )
    return derive("sum", *(at(item.kl, "value") for item in firsts))


def _plan_table(data: ReportData) -> Table:
    columns = (Column("Site"), *(Column(plan.id) for plan in data.plans.plans))
    decided = [(plan, {d.site: d.precision for d in plan.decisions}) for plan in data.plans.plans]
    rows = [
        (cell(site.name), *(_precision_cell(found.get(site.name, plan.base)) for plan, found in decided))
        for site in data.modified.sites
    ]
    shares = (cell(shown(numbers.share, plan, "fp8_share")) for plan in data.plans.plans)
    rows.append((cell("FP8 share of FP8-able FLOPs"), *shares))
    if data.plans.able_share is not None:
        of_all = (
            formed(numbers.share, derive("product", at(plan, "fp8_share"), at(data.plans, "able_share")))
            for plan in data.plans.plans
        )
        rows.append((cell("FP8 share of the FLOPs of all products"), *map(cell, of_all)))
    return Table("Precision of each site in each plan", columns, tuple(rows))


def _wide_table(data: ReportData) -> Table:
    """Return non-site nodes that stay in FP32, one row for each reason."""
    found: dict[str, tuple[dict[str, None], dict[str, None]]] = {}
    for plan in data.plans.plans:
        for wide in plan.wide:
            nodes, plans = found.setdefault(wide.reason, ({}, {}))
            nodes[wide.node] = plans[plan.id] = None
    columns = (Column("Reason"), Column("Plans"), Column("Nodes", prose=True))
    rows = (
        (cell(reason), cell(", ".join(plans)), cell(_some(list(nodes))))
        for reason, (nodes, plans) in found.items()
    )
    return Table("What stays in FP32 beside sites", columns, tuple(rows))


def _some(names: list[str]) -> str:
    more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    return f"{', '.join(names[:_MOST_NAMED])}{more}"


def _precision_cell(precision: Precision) -> Cell:
    return cell(precision, Tone.GOOD if precision is Precision.FP8 else Tone.PLAIN)
