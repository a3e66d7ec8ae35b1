"""Tables of the sites: the effect of eight bits on each, and its precision in each plan."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

from loka_onnx.core.formats import Precision
from loka_onnx.core.intervals import Interval, RatioMoments
from loka_onnx.core.plan import PrecisionPlan, SiteSpeed, SpeedVerdict, Verdict
from loka_onnx.core.profile import ENTROPY, LOSS, Profile, Sampling, Sensitivity
from loka_onnx.core.site import SiteKind
from loka_onnx.report import numbers
from loka_onnx.report.data import ReportData
from loka_onnx.report.document import Cell, Column, Section, Table, Tone, number, prose, table_of, text
from loka_onnx.report.figures import Place, Told, derive, formed, joined, percent_interval, shown, told
from loka_onnx.report.histograms import SiteRow, activation_table, site_rows

_SAFE_PLANS = ("fp8-safe", "int8-safe", "mixed")
_VERDICT_TONES = {
    Verdict.SAFE: Tone.GOOD,
    Verdict.UNSAFE: Tone.BAD,
    Verdict.UNDECIDED: Tone.WARN,
    Verdict.NOT_JUDGED: Tone.MUTED,
}
_SPEED_TONES = {SpeedVerdict.FAST.value: Tone.GOOD, SpeedVerdict.SLOW.value: Tone.BAD}


def sites_section(data: ReportData) -> Section:
    """Return calibration results and decisions for each site."""
    plan = shown_plan(data)
    sequential = " at every number of rows at once, because rows were added until verdicts were reached"
    paragraphs = [
        "Relative error is that of the site's own output under the recipe. KL is the label-free part of the "
        "loss increase and labelled its first-order part, both relative to "
        f"{_denominators(data)}, for this site alone. FLOP share is of the FP8-able FLOPs of the model after "
        "mods, what mods pad with zeros included; the FP8 share of a plan leaves that out.",
        "KL decides on a site, with the corrected bound that its reason gives. The labelled part is judged "
        "on whole plans: of one site it is mostly noise, and where it is not, it calls for another cure (a "
        "correction of the output, not more precision).",
        f"Each interval holds with 95 %{sequential if data.profile.sampling.is_sequential else ''}. It says "
        "nothing of other draws of the rounding noise: those are the KL of some rows under scales that were "
        "moved a little.",
    ]
    emitted = tuple(dict.fromkeys(name for t in data.choice.targets for name in t.plans))
    if plan is not None and plan.id not in emitted:
        note = (
            f"The emitted engine runs plan {', '.join(emitted)}. Precision, verdict and reason below are "
            f"those of plan {plan.id}, in which the sites were judged."
        )
        paragraphs.insert(0, note)
    paragraphs += [
        f"Plan {p.id} is based on {p.base}: {p.base_reason}." for p in data.plans.plans if p.base_reason
    ]
    paragraphs += [f"{note}." for note in data.plans.notes]
    tables = tuple(_tables(data, plan))
    return Section("sites", "Sites", tuple(paragraphs), tuple(open_sites(data.profile)), tables)


def _tables(data: ReportData, plan: PrecisionPlan | None) -> Iterator[Table]:
    if plan is not None:
        yield _site_table(data, plan)
        safe = (other for name in _SAFE_PLANS if (other := data.plan(name)) is not None)
        others = (other for other in safe if other.precisions not in {(), plan.precisions})
        yield from (_site_table(data, other) for other in others)
    if data.profile.sites:
        yield activation_table(data, plan)
    if len(data.plans.plans) > 1:
        yield _plan_table(data)
    for device, low in dict.fromkeys((speed.device, speed.precision) for speed in data.plans.speeds):
        speeds = [s for s in data.plans.speeds if (s.device, s.precision) == (device, low)]
        caption = (
            f"What {low.upper()} saves on {device} by kernel times; sites of one tensor quantize it once"
        )
        yield table_of(caption, _speed_columns(speeds), speeds)


def calibration_facts(profile: Profile) -> list[str]:
    """Return the rows behind each part of a profile, and why no more."""
    sampling = profile.sampling
    counts = (
        shown(numbers.count, owner, name)
        for owner, name in ((profile, "rows"), (profile, "error_rows"), (sampling, "rows"))
    )
    facts: list[str] = [told("Ranges: {} rows; errors: {} rows; sensitivities: {} rows", *counts)]
    if sampling.may_stop_early and not sampling.undecided:
        facts.append("Sensitivities stopped where the verdict of every site was reached")
    if added := profile.data_digest.split("+")[1:]:
        digests = ", ".join(map(numbers.digest, added))
        facts.append(f"Calibration rows were added to those of the split: digest {digests}")
    return facts


def open_sites(profile: Profile) -> list[str]:
    """Return sites whose verdict needs more rows; empty for none, or where it was not requested."""
    sites = ", ".join(profile.sampling.undecided)
    rows = shown(numbers.count, profile.sampling, "rows")
    note = told("Undecided when the rows ended, after {}: {}. More rows may decide them", rows, sites)
    return [note] if sites else []


def _denominators(data: ReportData) -> str:
    used = {s.denominator for site in data.profile.sites for s in site.sensitivities} or {LOSS}
    words = {LOSS: "the loss", ENTROPY: "the mean entropy of the predictions (no labels)"}
    return " or ".join(text for name, text in words.items() if name in used)


def shown_plan(data: ReportData) -> PrecisionPlan | None:
    """Return the plan whose reasons are shown: the selected one if quantized, else a safe one, else any."""
    emitted = [data.plan(name) for t in data.choice.targets for name in t.plans]
    safe = map(data.plan, _SAFE_PLANS)
    known = [p for p in (*emitted, *safe, *data.plans.plans) if p is not None]
    return next((p for p in known if p.quantized_sites), known[0] if known else None)


def _site_table(data: ReportData, plan: PrecisionPlan) -> Table:
    able = derive("fp8_able_flops", Place(data.modified, "sites"))
    speeds, sampling = speed_texts(data), data.profile.sampling

    def size(title: str, name: str) -> Column[SiteRow]:
        return number(
            title, lambda row: shown(numbers.count, row.site, name) if getattr(row.site, name) else "–"
        )

    def relative_error(row: SiteRow) -> str:
        error = derive("relative_error", Place(row.error))
        return formed(numbers.error_percent, error, numbers.NOT_MEASURED)

    def flop_share(row: SiteRow) -> str:
        if not row.site.is_fp8_able or not able.value:
            return numbers.NONE
        return formed(numbers.share, derive("ratio", derive("flops", Place(row.site)), able))

    def verdict(row: SiteRow) -> Cell:
        judged = row.decision.verdict if row.decision is not None else Verdict.NOT_JUDGED
        return Cell(judged, _VERDICT_TONES[judged])

    def speed(row: SiteRow) -> Cell:
        if row.site.kind is SiteKind.NORM:
            return Cell(numbers.NONE)
        text = speeds.get(row.site.name, numbers.NOT_MEASURED)
        return Cell(text, _SPEED_TONES.get(text, Tone.MUTED if text == numbers.NOT_MEASURED else Tone.PLAIN))

    def reason(row: SiteRow) -> str:
        merged = row.site.merged_from
        why = row.decision.reason if row.decision is not None else f"plan {plan.id} does not name it"
        return f"{why} (merged from {', '.join(merged)})" if set(merged) - {row.site.name} else why

    def by_output(show: Callable[[Sensitivity], Told]) -> Callable[[SiteRow], Told]:
        def shown_of(row: SiteRow) -> Told:
            values = [(s.output, show(s)) for s in row.sensitivities]
            if not values:
                return Told(numbers.NOT_MEASURED)
            if len(dict(values)) == 1 and len(data.profile.baseline_loss) <= 1:
                return values[0][1]
            return joined("; ", [told("{}: {}", *value) for value in values])

        return shown_of

    columns: tuple[Column[SiteRow], ...] = (
        text("Site", "site.name"),
        text("Kind", lambda row: f"{row.site.kind} ({row.site.op_type})"),
        size("K", "k"),
        size("N", "n"),
        size("Rows", "rows"),
        number("FLOP share", flop_share),
        text(
            "Precision",
            lambda row: _precision_cell(row.decision.precision if row.decision is not None else plan.base),
            is_choice=True,
        ),
        text("Verdict", verdict, is_choice=True),
        text("Speed", speed, is_choice=True),
        number("Relative error", relative_error, bar=True),
        number("KL", by_output(lambda s: _interval(sampling, s.kl_moments, s.kl)), bar=True),
        number("KL over draws", by_output(_draws)),
        number("Labelled", by_output(lambda s: _interval(sampling, s.labelled_moments, s.labelled))),
        number("Rows measured", _rows_measured),
        text("Recipe measured", lambda row: row.recipe or numbers.NONE),
        prose("Reason", reason),
    )
    # Ranges are of selection rows too.
    rows_measured = shown(numbers.count, data.profile, "error_rows")
    caption = told("Sites in plan {}, measured on {} calibration rows", plan.id, rows_measured)
    return table_of(caption, columns, site_rows(data, plan))


def _rows_measured(row: SiteRow) -> str:
    if not row.sensitivities:
        return numbers.NONE
    return formed(numbers.count, derive("max", *(Place(s.kl_moments, "rows") for s in row.sensitivities)))


def _interval(sampling: Sampling, moments: RatioMoments | None, fixed: Interval | None) -> Told:
    """Return the interval valid for how rows were added; `fixed` is that of a number fixed beforehand."""
    if not sampling.is_sequential or moments is None:
        return percent_interval(fixed)
    places = (Place(moments), Place(sampling))
    ends = [derive(f"interval_{end}", *places) for end in ("value", "lower", "upper")]
    return Told(numbers.percent_interval(sampling.interval_of(moments)), ends)


def _draws(sensitivity: Sensitivity) -> Told:
    draws = sensitivity.draws
    if draws is None:
        return Told(numbers.NONE)
    low, high = (shown(numbers.error_percent, draws, end) for end in ("kl_low", "kl_high"))
    return told("{} to {} ({})", low, high, shown(numbers.count, draws, "count"))


def _plan_table(data: ReportData) -> Table:
    """Return the precisions, one row for each site, then the share of each plan."""
    plans = data.plans.plans
    rows: dict[str, list[Cell | str]] = {site.name: [] for site in data.modified.sites}
    for plan in plans:
        decided = {d.site: d.precision for d in plan.decisions}
        for name, cells in rows.items():
            cells.append(_precision_cell(decided.get(name, plan.base)))
    rows[f"{share_heading(data)} of FP8-able FLOPs"] = [
        shown(numbers.share, plan, "fp8_share") for plan in plans
    ]
    if data.plans.able_share is not None:
        able = Place(data.plans, "able_share")
        parts = (derive("product", Place(plan, "fp8_share"), able) for plan in plans)
        rows[f"{share_heading(data)} of the FLOPs of all products"] = [
            formed(numbers.share, part) for part in parts
        ]

    def of_plan(place: int) -> Column[tuple[str, list[Cell | str]]]:
        return text(plans[place].id, lambda row: row[1][place])

    columns = (text("Site", lambda row: row[0]), *map(of_plan, range(len(plans))))
    return table_of("Precision of each site in each plan", columns, rows.items())


def share_heading(data: ReportData) -> str:
    """Return the name of `PrecisionPlan.fp8_share`: ``FP8 share``, or ``Eight-bit share`` of several."""
    low = data.plans.quantized
    return f"{'Eight-bit' if ' ' in low else low} share"


def _precision_cell(precision: Precision) -> Cell:
    return Cell(precision, Tone.GOOD if precision.is_quantized else Tone.PLAIN)


# Speed: a verdict is never guessed; norms have none and are left out ------------------------------------


def speed_texts(data: ReportData) -> dict[str, str]:
    """Return the known speed of eight bits at each site, ``fast``; of several devices or formats, by name."""

    def place(speed: SiteSpeed) -> str:
        return speed.device if speed.precision is Precision.FP8 else f"{speed.device} in {speed.precision}"

    unknown, speeds = numbers.NOT_MEASURED, data.plans.speeds
    texts = {(s.site, place(s)): unknown if s.verdict is SpeedVerdict.UNKNOWN else s.verdict for s in speeds}
    devices = dict.fromkeys(map(place, speeds))
    form = "{1}" if len(devices) == 1 else "{0}: {1}"
    return {
        site: "; ".join(form.format(device, texts.get((site, device), unknown)) for device in devices)
        for site, _ in texts
    }


def _speed_columns(speeds: list[SiteSpeed]) -> tuple[Column[SiteSpeed], ...]:
    def us(title: str, name: str) -> Iterator[Column[SiteSpeed]]:
        for batch in dict.fromkeys(batch for speed in speeds for batch in speed.saved_us):
            yield number(f"{title} at {batch}, µs", partial(_us, name, batch), bar=name == "saved_us")

    def origin(speed: SiteSpeed) -> str:
        known = "measured" if speed.is_measured else "predicted"
        return numbers.NONE if speed.verdict is SpeedVerdict.UNKNOWN else known

    return (
        text("Site", "site"),
        text("Speed", lambda speed: Cell(speed.verdict, _SPEED_TONES.get(speed.verdict, Tone.MUTED))),
        *us("Product saves", "saved_us"),
        *us("Quantize", "quantize_us"),
        text("Tensor", "tensor"),
        text("Times", origin),
        prose("Reason", "reason"),
    )


def _us(name: str, batch: str, speed: SiteSpeed) -> str:
    times = getattr(speed, name)
    return shown("{:.2f}".format, times, batch) if batch in times else numbers.NONE
