"""Tables of differences between two runs."""

from __future__ import annotations

import math
from collections.abc import Iterable

from loka_onnx.core.intervals import Interval
from loka_onnx.core.model_changes import (
    Change,
    PlanChange,
    PlanSummary,
    RewriteChange,
    RewriteOutcome,
    SiteChange,
    SiteDecision,
    SitePresence,
    SiteReshape,
    SplitChange,
    SplitRows,
    ValueChange,
)
from loka_onnx.core.run_comparison import (
    AccuracyChange,
    EmittedEngine,
    GainChange,
    JudgedOutput,
    LatencyChange,
    MedianLatency,
    RunComparison,
    TargetDifference,
)
from loka_onnx.report import numbers
from loka_onnx.report.choice_tables import times_text
from loka_onnx.report.document import (
    Cell,
    Field,
    Section,
    Table,
    Tone,
    cell,
    number,
    prose,
    table_of,
    text,
)
from loka_onnx.report.figures import Told, joined, percent_interval, shown, told

_CHANGES = {
    Change.SAME: Tone.MUTED,
    Change.CHANGED: Tone.WARN,
    Change.APPEARED: Tone.PLAIN,
    Change.VANISHED: Tone.WARN,
}
_BUDGETS = {"within": Tone.GOOD, "beyond": Tone.BAD, "undecided": Tone.WARN}


def engines_section(found: RunComparison) -> Section:
    """Return selected engines with cost and latency."""
    tables = [
        table_of("What is emitted for each target", _target_fields(found), found.targets),
        table_of("What the emitted engines cost", _accuracy_fields(found), found.accuracy, keys=3),
        table_of("Latency of the emitted engines", _LATENCY, found.latency, keys=3),
    ]
    if found.gains:
        tables.append(table_of("Gain over engines of the same run", _gain_fields(found), found.gains, keys=2))
    paragraphs = (
        "Costs are those of each run's own engine against its own FP32 model. Intervals of the same rows are "
        "not independent: where they overlap, the costs may differ all the same. The command compare "
        "asks both deployments for the same rows.",
        "Latencies were measured at different times, not in turns, and neither the clock rate nor the load "
        "of the machine is recorded; of a processor, not even its model. A ratio therefore has no interval; "
        "slower is said where it took longer by more than 1 % and than the median wandered in either run. "
        "A gain over an engine of the same run was timed in turns with it, and bears the comparison better.",
    )
    return Section("engines", "Engines", paragraphs, tables=tuple(tables))


def _engine(side: EmittedEngine | None) -> str:
    return numbers.NONE if side is None else side.engine


def _digest(side: EmittedEngine | None) -> str:
    return numbers.NONE if side is None else numbers.digest(side.digest)


def _maker(side: EmittedEngine | None) -> str:
    return numbers.NONE if side is None else f"{side.backend} {side.backend_version}".strip()


def _share(side: EmittedEngine | PlanSummary | None) -> Told:
    return Told(numbers.NONE) if side is None else shown(numbers.share, side, "fp8_share")


def _size(side: EmittedEngine | None) -> Told:
    return Told(numbers.NONE) if side is None or not side.digest else shown(numbers.size, side, "bytes")


def routes_text(side: EmittedEngine | None) -> Told:
    """Return the engine for each request size: ``up to 8 rows: a; up to 64 rows: b; more: c``."""
    if side is None:
        return Told(numbers.NONE)
    if not side.routes:
        return Told(f"all: {side.engine}")
    *smaller, last = side.routes
    parts = [told("up to {} rows: {}", shown(numbers.count, r, "batch"), r.engine) for r in smaller]
    return joined("; ", [*parts, f"{'more' if parts else 'all'}: {last.engine}"])


def _both_routes(item: TargetDifference) -> Told:
    if not any(side is not None and side.routes for side in (item.old, item.new)):
        return Told("")
    return told("requests by their size, then: {}; now: {}", routes_text(item.old), routes_text(item.new))


def _target_fields(found: RunComparison) -> tuple[Field[TargetDifference], ...]:
    """Return the fields, with the engine of each request size where any target has several."""
    is_routed = any(_both_routes(item) for item in found.targets)
    return (*_TARGETS, prose("Which requests go where", _both_routes)) if is_routed else _TARGETS


def _level(intervals: Iterable[Interval | None]) -> str:
    """Return ``95 % interval``; every confidence of the intervals, to a tenth of a percent."""
    found = sorted({interval.confidence for interval in intervals if interval is not None})
    levels = dict.fromkeys(f"{math.floor(1000 * level + 1e-6) / 10:g} %" for level in found)
    return f"{' or '.join(levels)} interval".lstrip()


_TARGETS: tuple[Field[TargetDifference], ...] = (
    text("Target", lambda item: item.hardware),
    text("Engine", lambda item: cell(item.change, _CHANGES[item.change])),
    text("Old", lambda item: _engine(item.old)),
    text("New", lambda item: _engine(item.new)),
    text("Old maker", lambda item: _maker(item.old)),
    text("New maker", lambda item: _maker(item.new)),
    number("Old FP8 share of FLOPs", lambda item: _share(item.old)),
    number("New FP8 share of FLOPs", lambda item: _share(item.new)),
    number("Old size", lambda item: _size(item.old)),
    number("New size", lambda item: _size(item.new)),
    text("Old SHA-256", lambda item: _digest(item.old)),
    text("New SHA-256", lambda item: _digest(item.new)),
)


def _judged(side: JudgedOutput | None) -> Cell:
    if side is None:
        return cell(numbers.NOT_MEASURED, Tone.MUTED)
    if side.judged is None:
        return cell(side.name, Tone.MUTED)
    return cell(percent_interval(side.judged, side.budget), _BUDGETS.get(side.status, Tone.PLAIN))


def _budget(side: JudgedOutput | None) -> Told:
    if side is None:
        return Told(numbers.NONE)
    return told("{}, {}", side.status, shown(numbers.budget_percent, side, "budget"))


def _entropy(side: JudgedOutput | None) -> Told:
    return Told(numbers.NONE) if side is None else shown(numbers.metric, side, "normalized_entropy")


def _name(item: AccuracyChange) -> str:
    return next((side.name for side in (item.new, item.old) if side is not None), numbers.NONE)


def _difference(item: AccuracyChange) -> Told:
    sides = [side.judged for side in (item.old, item.new) if side is not None and side.judged is not None]
    if item.difference is None or len(sides) < 2:
        return Told(numbers.NONE)
    decimals = max(map(numbers.interval_decimals, sides))
    return shown(lambda value: numbers.signed_percent(value, decimals), item, "difference")


def _overlap(overlap: bool | None) -> Cell:
    if overlap is None:
        return cell(numbers.NONE)
    return cell("yes", Tone.MUTED) if overlap else cell("no", Tone.WARN)


def _engine_of(side: JudgedOutput | MedianLatency | None) -> str:
    return numbers.NONE if side is None else side.engine


def _accuracy_fields(found: RunComparison) -> tuple[Field[AccuracyChange], ...]:
    """Return the fields with the intervals' confidence in the headings: it may differ between the runs."""
    old = _level(item.old.judged for item in found.accuracy if item.old is not None)
    new = _level(item.new.judged for item in found.accuracy if item.new is not None)
    return (
        text("Target", lambda item: item.hardware),
        text("Output", lambda item: item.output),
        text("Split", lambda item: item.split),
        text("Old engine", lambda item: _engine_of(item.old)),
        text("New engine", lambda item: _engine_of(item.new)),
        text("Judged", _name),
        number(f"Old cost [{old}]", lambda item: _judged(item.old)),
        number(f"New cost [{new}]", lambda item: _judged(item.new)),
        number("New less old", _difference),
        text("Intervals overlap", lambda item: _overlap(item.overlap)),
        text("Old budget", lambda item: _budget(item.old)),
        text("New budget", lambda item: _budget(item.new)),
        number("Old NE", lambda item: _entropy(item.old)),
        number("New NE", lambda item: _entropy(item.new)),
        prose("Remark", lambda item: item.remark),
    )


def _p50(side: MedianLatency | None) -> Told:
    return Told(numbers.NOT_MEASURED) if side is None else shown(numbers.latency, side, "p50_us")


def _p99(side: MedianLatency | None) -> Told:
    return Told(numbers.NONE) if side is None else shown(numbers.latency, side, "p99_us")


def _device(side: MedianLatency | None) -> str:
    return numbers.NONE if side is None else side.device


def _ratio(item: LatencyChange) -> Told:
    return shown("{:.3f}×".format, item, "ratio")


def _slower(item: LatencyChange) -> Cell:
    if item.is_slower is None:
        return cell(numbers.NONE)
    return cell("yes", Tone.WARN) if item.is_slower else cell("no", Tone.MUTED)


_LATENCY: tuple[Field[LatencyChange], ...] = (
    text("Target", lambda item: item.hardware),
    number("Batch", lambda item: shown(numbers.count, item, "batch")),
    text("Inputs", lambda item: f"on the {item.inputs}"),
    text("Old engine", lambda item: _engine_of(item.old)),
    text("New engine", lambda item: _engine_of(item.new)),
    number("Old p50", lambda item: _p50(item.old)),
    number("New p50", lambda item: _p50(item.new)),
    number("New over old", _ratio),
    text("Slower", _slower),
    number("Old p99", lambda item: _p99(item.old)),
    number("New p99", lambda item: _p99(item.new)),
    text("Old device", lambda item: _device(item.old)),
    text("New device", lambda item: _device(item.new)),
    prose("Remark", lambda item: item.remark),
)


def _gain_fields(found: RunComparison) -> tuple[Field[GainChange], ...]:
    return (
        text("Target", lambda item: item.hardware),
        text("Over", lambda item: item.baseline),
        number(f"Old gain [{_level(i.old for i in found.gains)}]", lambda item: times_text(item.old)),
        number(f"New gain [{_level(i.new for i in found.gains)}]", lambda item: times_text(item.new)),
        text("Intervals overlap", lambda item: _overlap(item.overlap)),
        prose("Remark", lambda item: item.remark),
    )


def sites_section(found: RunComparison) -> Section:
    """Return sites with another decision, and sites that only one model has."""
    tables = []
    if found.sites:
        tables.append(table_of("Sites with another precision or verdict", _SITES, found.sites, keys=2))
    if found.presence:
        tables.append(table_of("Sites of one model only", _PRESENCE, found.presence))
    if found.reshaped:
        tables.append(table_of("Sites of another kind or size", _RESHAPED, found.reshaped))
    paragraphs = [
        told(
            "The old model has {} sites, the new one {}.",
            shown(numbers.count, found.old, "sites"),
            shown(numbers.count, found.new, "sites"),
        )
    ]
    if not tables:
        paragraphs.append(
            Told(
                "Both models have the same sites, of the same kinds and sizes, and every plan that both runs "
                "have treats them alike."
            )
        )
    return Section("site-changes", "Sites", tuple(paragraphs), tables=tuple(tables))


def _decision(decision: SiteDecision | None) -> str:
    if decision is None:
        return "not decided"
    return f"{decision.precision} ({decision.recipe})" if decision.recipe else decision.precision


def _verdict(decision: SiteDecision | None) -> str:
    return numbers.NONE if decision is None else decision.verdict


def _both_reasons(item: SiteChange) -> str:
    sides = (("then", item.old), ("now", item.new))
    return "; ".join(f"{name}: {side.reason.rstrip('.')}" for name, side in sides if side is not None)


_SITES: tuple[Field[SiteChange], ...] = (
    text("In", lambda item: item.where),
    text("Site", lambda item: item.site),
    text("Old precision", lambda item: _decision(item.old)),
    text("New precision", lambda item: _decision(item.new)),
    text("Old verdict", lambda item: _verdict(item.old)),
    text("New verdict", lambda item: _verdict(item.new)),
    prose("Both reasons", _both_reasons),
)


def _size_of(name: str) -> Field[SitePresence]:
    return number(
        name.upper(), lambda item: shown(numbers.count, item, name) if getattr(item, name) else numbers.NONE
    )


_PRESENCE: tuple[Field[SitePresence], ...] = (
    text("Site", lambda item: item.site),
    text("What became of it", lambda item: cell(item.change, _CHANGES[item.change])),
    text("Kind", lambda item: item.kind),
    _size_of("k"),
    _size_of("n"),
    prose("Merged from", lambda item: ", ".join(item.merged_from)),
)


_RESHAPED: tuple[Field[SiteReshape], ...] = (
    text("Site", lambda item: item.site),
    text("Old kind", lambda item: item.old.kind),
    text("New kind", lambda item: item.new.kind),
    number("Old K", lambda item: shown(numbers.count, item.old, "k")),
    number("New K", lambda item: shown(numbers.count, item.new, "k")),
    number("Old N", lambda item: shown(numbers.count, item.old, "n")),
    number("New N", lambda item: shown(numbers.count, item.new, "n")),
)


def plans_section(found: RunComparison) -> Section:
    """Every plan of either run."""
    table = table_of("Plans", _PLANS, found.plans)
    return Section("plans", "Plans", tables=(table,))


def _fp8_sites(side: PlanSummary | None) -> Told:
    return Told("no such plan") if side is None else shown(numbers.count, side, "fp8_sites")


def _moved(item: PlanChange) -> Told:
    if item.old is None or item.new is None:
        return Told(numbers.NONE)
    return shown(numbers.count, item, "moved")


def _base(item: PlanChange) -> str:
    bases = dict.fromkeys(side.base for side in (item.old, item.new) if side is not None)
    return " → ".join(bases)


_PLANS: tuple[Field[PlanChange], ...] = (
    text("Plan", lambda item: item.plan),
    text("Base", _base),
    number("Old sites in FP8", lambda item: _fp8_sites(item.old)),
    number("New sites in FP8", lambda item: _fp8_sites(item.new)),
    number("Old share of FLOPs", lambda item: _share(item.old)),
    number("New share of FLOPs", lambda item: _share(item.new)),
    number("Sites in another precision", _moved),
)


def rewrites_section(found: RunComparison) -> Section:
    """Return places with another outcome of a transform."""
    if not found.rewrites:
        return Section("rewrites", "Rewrites", ("Every transform did the same at every place.",))
    return Section(
        "rewrites", "Rewrites", tables=(table_of("Treated differently", _REWRITES, found.rewrites, keys=3),)
    )


def _outcome(side: RewriteOutcome | None) -> str:
    return "not looked at" if side is None else side.outcome


def _both_outcomes(item: RewriteChange) -> str:
    sides = (("then", item.old), ("now", item.new))
    return "; ".join(f"{name}: {side.what.rstrip('.')}" for name, side in sides if side is not None)


_REWRITES: tuple[Field[RewriteChange], ...] = (
    text("Sequence", lambda item: item.sequence),
    text("Transform", lambda item: item.transform),
    text("At", lambda item: item.at),
    text("Old", lambda item: _outcome(item.old)),
    text("New", lambda item: _outcome(item.new)),
    prose("What, or why not", _both_outcomes),
)


def data_section(found: RunComparison) -> Section:
    """Return whether both runs were measured on the same rows."""
    said = (
        "Both runs read the same rows."
        if found.has_same_rows
        else "Not every split is the same: where it is not, the file, the selection of its rows or the "
        "columns of the model's inputs differ, and costs may be of different rows."
    )
    return Section("data", "Data", (said,), tables=(table_of("Splits", _SPLITS, found.splits),))


def _rows(side: SplitRows | None) -> Told:
    return Told(numbers.NONE) if side is None else shown(numbers.count, side, "rows")


def _rows_digest(side: SplitRows | None) -> str:
    return numbers.NONE if side is None else numbers.digest(side.digest)


def _sources(item: SplitChange) -> str:
    return " → ".join(
        dict.fromkeys(f"{side.name}, {side.rule}" for side in (item.old, item.new) if side is not None)
    )


def _sameness(item: SplitChange) -> Cell:
    if item.is_same:
        return cell("the same", Tone.GOOD)
    if item.old is None or item.new is None:
        return cell("read in one run only", Tone.WARN)
    return cell("another file, selection or columns", Tone.WARN)


_SPLITS: tuple[Field[SplitChange], ...] = (
    text("Split", lambda item: item.split),
    text("Rows", _sameness),
    number("Old rows", lambda item: _rows(item.old)),
    number("New rows", lambda item: _rows(item.new)),
    text("Old digest of what is read", lambda item: _rows_digest(item.old)),
    text("New digest of what is read", lambda item: _rows_digest(item.new)),
    prose("Which rows", _sources),
)


def surroundings_section(found: RunComparison) -> Section:
    """Models, versions and settings."""
    sides = (("old", found.old), ("new", found.new))
    items = tuple(
        f"The {name} run is '{run.title}' of {run.path}: SHA-256 of its report {numbers.digest(run.digest)}, "
        f"of the exported model {numbers.digest(run.model_digest)}, after mods "
        f"{numbers.digest(run.modified_digest)}."
        for name, run in sides
    )
    tables = [_values("Versions that differ", "Package", found.versions)]
    said: tuple[str, ...] = ()
    if found.settings is None:
        said = ("Settings were not compared: they stand in run directories, and not both were given.",)
    else:
        tables.append(_values("Settings that differ", "Setting", found.settings))
    return Section("surroundings", "Models, versions and settings", said, items, tuple(tables))


def _values(caption: str, name: str, found: tuple[ValueChange, ...]) -> Table:
    fields: tuple[Field[ValueChange], ...] = (
        text(name, lambda item: item.name),
        text("Old", lambda item: numbers.NONE if item.old is None else item.old),
        text("New", lambda item: numbers.NONE if item.new is None else item.new),
    )
    return table_of(caption, fields, found)
