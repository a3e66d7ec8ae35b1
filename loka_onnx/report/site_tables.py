"""Tables of the sites: what FP8 does to each, and the precision that each plan gives it."""

from __future__ import annotations

from loka_onnx.core.formats import Precision
from loka_onnx.core.plan import PrecisionPlan, Verdict
from loka_onnx.core.profile import Profile, SiteProfile
from loka_onnx.core.ratio_moments import RatioMoments
from loka_onnx.core.sensitivity import ENTROPY, LOSS, Sensitivity, SiteGroup
from loka_onnx.core.site import Site
from loka_onnx.core.statistics import ErrorStats
from loka_onnx.report import numbers
from loka_onnx.report.data import ReportData
from loka_onnx.report.document import Cell, Column, Section, Table, Tone, cell
from loka_onnx.report.speed_tables import speed_tables

SAFE_PLAN = "fp8-safe"
_MOST_NAMED = 6

_COLUMNS = (
    Column("Site"),
    Column("Kind"),
    Column("K", numeric=True),
    Column("N", numeric=True),
    Column("Rows", numeric=True),
    Column("FLOP share", numeric=True),
    Column("Precision"),
    Column("Verdict"),
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
    """What calibration learned of each site, and what the plans make of it."""
    plan = shown_plan(data)
    tables: list[Table] = []
    paragraphs = [
        "Relative error is that of the site's own output under the recipe. KL is the label-free part of the "
        "loss increase and labelled its first-order part, both relative to "
        f"{_denominators(data)}, for this site alone. FLOP share is of the FP8-able FLOPs.",
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
    """How many rows each part of a profile comes from, and why no more."""
    sampling = profile.sampling
    facts = [
        f"Ranges: {numbers.count(profile.rows)} rows; errors: {numbers.count(profile.error_rows)} rows; "
        f"sensitivities: {numbers.count(sampling.rows)} rows"
    ]
    if sampling.may_stop_early and not sampling.undecided:
        facts.append("Sensitivities stopped where the verdict of every site was reached")
    digests = profile.data_digest.split("+")
    if len(digests) > 1:
        added = ", ".join(numbers.digest(digest) for digest in digests[1:])
        facts.append(f"Calibration rows were added to those of the split: SHA-256 {added}")
    return facts


def open_sites(profile: Profile) -> list[str]:
    """Which verdicts the rows did not suffice for; nothing where they did, or where nobody asked."""
    sites = profile.sampling.undecided
    if not sites:
        return []
    rows = numbers.count(profile.sampling.rows)
    return [f"Undecided when the rows ended, after {rows}: {', '.join(sites)}. More rows may decide them"]


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
    """The plan whose reasons are shown: the emitted one if it has FP8, else fp8-safe, else any with FP8."""
    emitted = [data.plan(name) for t in data.choice.targets for name in t.plans]
    candidates = [*emitted, data.plan(SAFE_PLAN), *data.plans.plans]
    known = [p for p in candidates if p is not None]
    return next((p for p in known if p.fp8_sites), known[0] if known else None)


def _site_table(data: ReportData, plan: PrecisionPlan) -> Table:
    rows = tuple(_site_row(data, plan, site) for site in data.modified.sites)
    caption = f"Sites in plan {plan.id}, measured on {numbers.count(data.profile.rows)} calibration rows"
    return Table(caption, _COLUMNS, rows)


def _site_row(data: ReportData, plan: PrecisionPlan, site: Site) -> tuple[Cell, ...]:
    decision = next((d for d in plan.decisions if d.site == site.name), None)
    profile = next((p for p in data.profile.sites if p.site == site.name), None)
    recipe = decision.recipe.id if decision is not None and decision.recipe is not None else None
    error = _error(profile, recipe)
    recipe = recipe or (error.recipe if error is not None else None)
    sensitivities = tuple(s for s in profile.sensitivities if s.recipe == recipe) if profile else ()
    able = data.exported.fp8_able_flops
    share = numbers.share(site.flops_per_example / able) if site.is_fp8_able and able else numbers.NONE
    verdict = decision.verdict if decision is not None else Verdict.NOT_JUDGED
    reason = decision.reason if decision is not None else f"plan {plan.id} does not name it"
    if set(site.merged_from) - {site.name}:
        reason = f"{reason} (merged from {', '.join(site.merged_from)})"
    return (
        cell(site.name),
        cell(f"{site.kind} ({site.op_type})"),
        cell(numbers.count(site.k)),
        cell(numbers.count(site.n) if site.n else numbers.NONE),
        cell(numbers.count(site.rows)),
        cell(share),
        cell(decision.precision if decision is not None else plan.base, _precision_tone(plan, site)),
        cell(verdict, _VERDICT_TONES[verdict]),
        cell(numbers.error_percent(error.relative_error if error is not None else None)),
        cell(_joined(data, [(s, _interval(data, s.kl_moments)) for s in sensitivities])),
        cell(_joined(data, [(s, _draws(s)) for s in sensitivities])),
        cell(_joined(data, [(s, _interval(data, s.labelled_moments)) for s in sensitivities])),
        cell(numbers.count(max((s.kl_moments.rows for s in sensitivities), default=0))),
        cell(recipe or numbers.NONE),
        cell(reason),
    )


def _error(profile: SiteProfile | None, recipe: str | None) -> ErrorStats | None:
    if profile is None:
        return None
    # A site that is kept has no recipe of its own: the first that was measured on it is shown, by name.
    return next((e for e in profile.errors if recipe in {None, e.recipe}), None)


def _interval(data: ReportData, moments: RatioMoments | None) -> str:
    if moments is None:
        return numbers.NONE
    return numbers.percent_interval(data.profile.sampling.interval_of(moments))


def _draws(sensitivity: Sensitivity) -> str:
    draws = sensitivity.draws
    if draws is None:
        return numbers.NONE
    return f"{numbers.error_percent(draws.kl_low)} to {numbers.error_percent(draws.kl_high)} ({draws.count})"


def _joined(data: ReportData, values: list[tuple[Sensitivity, str]]) -> str:
    if not values:
        return numbers.NOT_MEASURED
    if len({s.output for s, _ in values}) == 1 and len(data.profile.baseline_loss) <= 1:
        return values[0][1]
    return "; ".join(f"{s.output}: {text}" for s, text in values)


def _precision_tone(plan: PrecisionPlan, site: Site) -> Tone:
    return Tone.GOOD if site.name in plan.fp8_sites else Tone.PLAIN


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
            cell(_interval(data, item.kl_moments)),
            cell(numbers.error_percent(_sum_alone(data, group, item.output))),
            cell(_draws(item)),
            cell(_interval(data, item.labelled_moments)),
            cell(", ".join(group.sites)),
        )
        for group in data.profile.groups
        for item in group.sensitivities
    )
    return Table("Sites that share a quantized tensor, measured together", columns, rows, keys=2)


def _sum_alone(data: ReportData, group: SiteGroup, output: str) -> float:
    firsts = (
        next(item for item in data.profile.site(name).sensitivities if item.output == output)
        for name in group.sites
    )
    return sum(item.kl_moments.value for item in firsts)


def _plan_table(data: ReportData) -> Table:
    columns = (Column("Site"), *(Column(plan.id) for plan in data.plans.plans))
    rows = [
        (cell(site.name), *(_precision_cell(plan, site.name) for plan in data.plans.plans))
        for site in data.modified.sites
    ]
    shares = (cell(numbers.share(plan.fp8_share)) for plan in data.plans.plans)
    rows.append((cell("FP8 share of FP8-able FLOPs"), *shares))
    return Table("Precision of each site in each plan", columns, tuple(rows))


def _wide_table(data: ReportData) -> Table:
    """Nodes beside the sites that stay in FP32, those with one reason in one row."""
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


def _precision_cell(plan: PrecisionPlan, site: str) -> Cell:
    decision = next((d for d in plan.decisions if d.site == site), None)
    precision = decision.precision if decision is not None else plan.base
    return cell(precision, Tone.GOOD if precision is Precision.FP8 else Tone.PLAIN)
