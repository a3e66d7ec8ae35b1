"""View of two runs as a `Difference`, and the files that `compare-runs` writes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from loka_onnx.core import serde
from loka_onnx.core.evaluation import BudgetStatus, InputPlace
from loka_onnx.core.intervals import Interval
from loka_onnx.operations.compare.difference import Difference, Row, Subject, page
from loka_onnx.operations.compare.run_document import (
    AccuracyChange,
    Change,
    EmittedEngine,
    GainChange,
    JudgedOutput,
    LatencyChange,
    MedianLatency,
    OnHardware,
    PlanChange,
    PlanSummary,
    RewriteChange,
    RunComparison,
    SiteChange,
    SiteDecision,
    SitePresence,
    SiteReshape,
    SiteShape,
    SplitChange,
    TargetDifference,
    ValueChange,
)
from loka_onnx.report import numbers
from loka_onnx.report.choice_tables import times_text
from loka_onnx.report.data import CERTIFICATION
from loka_onnx.report.document import Document, Stat, Tone, Verdict, cell
from loka_onnx.report.figures import Told, joined, percent_interval, shown, told
from loka_onnx.report.markdown import to_markdown
from loka_onnx.report.webpage import to_html

_Change = TypeVar("_Change", bound=OnHardware)

JSON_NAME = "comparison.json"
MARKDOWN_NAME = "comparison.md"
HTML_NAME = "comparison.html"
_SYNTHETIC = "SYNTHETIC DATA: numbers of {} were measured on generated rows, not on yours"
_CHANGES = {
    Change.SAME: Tone.MUTED,
    Change.CHANGED: Tone.WARN,
    Change.APPEARED: Tone.PLAIN,
    Change.VANISHED: Tone.WARN,
}
_BUDGETS = {"within": Tone.GOOD, "beyond": Tone.BAD, "undecided": Tone.WARN}
_COSTS_TEXT = (
    "Costs are those of each run's own engine against its own FP32 model. Intervals of the same rows are "
    "not independent: where they overlap, the costs may differ all the same. The command compare "
    "runs both deployments on the same rows."
)
_LATENCY_TEXT = (
    "Latencies were measured at different times, not in turns, and neither the clock rate nor the load "
    "of the machine is recorded; of a processor, not even its model. A ratio therefore has no interval; "
    "slower is said where it took longer by more than 1 % and than the median wandered in either run. "
    "A gain over an engine of the same run was timed in turns with it, and bears the comparison better."
)


def render_comparison(found: RunComparison, directory: Path) -> tuple[Path, ...]:
    """Write comparison.json, comparison.md and comparison.html, each atomically, and return their paths.

    Raises:
        OutputError: The place cannot be written.
    """
    document = comparison_document(found)
    texts = {
        JSON_NAME: serde.dumps(found),
        MARKDOWN_NAME: to_markdown(document),
        HTML_NAME: to_html(document),
    }
    for name, text in texts.items():
        serde.write_text(text, directory / name)
    return tuple(directory / name for name in texts)


def comparison_document(found: RunComparison) -> Document:
    """The page of two runs, with the place of every number in the JSON."""
    return page(runs_view(found), found)


def runs_view(found: RunComparison) -> Difference:
    """The difference of two runs: what is emitted first, then why."""
    subjects = (*_engines(found), *_sites(found), _plans(found), _rewrites(found), _splits(found))
    return Difference(
        f"{found.old.title} against {found.new.title}: two runs",
        (),
        (*subjects, *_surroundings(found)),
        found.notes,
        _banner(found),
        tuple(_verdict(found, target) for target in found.targets),
    )


# Rows ---------------------------------------------------------------------------------------------


def _engines(found: RunComparison) -> Iterator[Subject]:
    """Yield the emitted engines, their cost and their time."""
    section = "Engines"
    emitted = tuple(row for item in found.targets for row in _target(item))
    yield Subject("What is emitted for each target", emitted, section)
    old = _level(item.old.judged for item in found.accuracy if item.old is not None)
    new = _level(item.new.judged for item in found.accuracy if item.new is not None)
    yield Subject(
        "What the emitted engines cost",
        tuple(map(_accuracy, found.accuracy)),
        section,
        ("Target, output, split", f"Old cost [{old}]", f"New cost [{new}]", "New less old"),
        (_COSTS_TEXT,),
        numeric=True,
    )
    yield Subject(
        "Latency of the emitted engines",
        tuple(map(_latency, found.latency)),
        section,
        ("Target, batch, inputs", "Old p50, p99", "New p50, p99", "New over old"),
        (_LATENCY_TEXT,),
        numeric=True,
    )
    if found.gains:
        old, new = _level(item.old for item in found.gains), _level(item.new for item in found.gains)
        heads = ("Target, over", f"Old gain [{old}]", f"New gain [{new}]", "Intervals")
        rows = tuple(map(_gain, found.gains))
        yield Subject("Gain over engines of the same run", rows, section, heads, numeric=True)


def _target(item: TargetDifference) -> Iterator[Row]:
    """Rows of one target: its engine, and what is known of that."""
    old, new = map(_emitted, (item.old, item.new))
    change = cell(item.change, _CHANGES[item.change])
    yield Row(item.hardware, old.get("engine"), new.get("engine"), change, _both_routes(item))
    for name in ("maker", "FP8 share of FLOPs", "size", "SHA-256"):
        yield Row(f"{item.hardware}: {name}", old.get(name), new.get(name))


def _emitted(side: EmittedEngine | None) -> dict[str, str]:
    if side is None:
        return {}
    return {
        "engine": side.engine,
        "maker": f"{side.backend} {side.backend_version}".strip(),
        "FP8 share of FLOPs": shown(numbers.share, side, "fp8_share"),
        "size": shown(numbers.size, side, "bytes") if side.digest else numbers.NONE,
        "SHA-256": numbers.digest(side.digest),
    }


def routes_text(side: EmittedEngine | None) -> Told:
    """Which engine takes which requests: ``up to 8 rows: a; up to 64 rows: b; more: c``."""
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


def _level(intervals: Iterable[Interval | None]) -> str:
    """``95 % interval``; every confidence that the intervals have, down to a tenth of a percent."""
    found = sorted({interval.confidence for interval in intervals if interval is not None})
    levels = dict.fromkeys(f"{math.floor(1000 * level + 1e-6) / 10:g} %" for level in found)
    return f"{' or '.join(levels)} interval".lstrip()


def _judged(side: JudgedOutput | None) -> str:
    if side is None:
        return numbers.NOT_MEASURED
    return told(
        "{}{}; {}, budget {}; NE {}",
        side.name,
        "" if side.judged is None else told(" {}", percent_interval(side.judged, side.budget)),
        side.status,
        shown(numbers.budget_percent, side, "budget"),
        shown(numbers.metric, side, "normalized_entropy"),
    )


def _overlap(overlap: bool | None) -> str:
    return "" if overlap is None else f"intervals {'overlap' if overlap else 'do not overlap'}"


def _accuracy(item: AccuracyChange) -> Row:
    difference: str = numbers.NONE
    sides = [side.judged for side in (item.old, item.new) if side is not None and side.judged is not None]
    if item.difference is not None and len(sides) == 2:
        decimals = max(map(numbers.interval_decimals, sides))
        less = shown(lambda value: numbers.signed_percent(value, decimals), item, "difference")
        difference = told("{}; {}", less, _overlap(item.overlap))
    engines = _engines_of(item)[2:]
    # Where requests are routed, several pairs of engines are judged on one output and split.
    pair = "" if item.old and item.new and item.old.engine == item.new.engine else f" · {engines}"
    return Row(
        f"{item.hardware} · {item.output} · {item.split}{pair}",
        _judged(item.old),
        _judged(item.new),
        cell(difference, _BUDGETS.get("" if item.new is None else item.new.status, Tone.PLAIN)),
        item.remark if pair else _joined(engines, item.remark),
    )


def _latency(item: LatencyChange) -> Row:
    slower = {None: "", True: "; slower", False: "; not slower"}[item.is_slower]
    ratio = shown("{:.3f}×".format, item, "ratio")
    devices = dict.fromkeys(side.device for side in (item.old, item.new) if side is not None)
    return Row(
        told("{} · batch {} · on the {}", item.hardware, shown(numbers.count, item, "batch"), item.inputs),
        _times(item.old),
        _times(item.new),
        cell(told("{}{}", ratio, slower), Tone.WARN if item.is_slower else Tone.PLAIN),
        _joined(_engines_of(item)[2:], " → ".join(devices), item.remark),
    )


def _times(side: MedianLatency | None) -> str:
    if side is None:
        return numbers.NOT_MEASURED
    return told("{}, {}", shown(numbers.latency, side, "p50_us"), shown(numbers.latency, side, "p99_us"))


def _gain(item: GainChange) -> Row:
    name = f"{item.hardware} · {item.baseline}"
    return Row(name, times_text(item.old), times_text(item.new), cell(_overlap(item.overlap)), item.remark)


def _joined(*sentences: str) -> str:
    return "; ".join(sentence for sentence in sentences if sentence)


def _sites(found: RunComparison) -> Iterator[Subject]:
    """Sites that are treated differently, and those that only one model has."""
    section = "Site changes"
    counts = told(
        "The old model has {} sites, the new one {}.",
        shown(numbers.count, found.old, "sites"),
        shown(numbers.count, found.new, "sites"),
    )
    alike = (
        "Both models have the same sites, of the same kinds and sizes, and every plan that both runs "
        "have treats them alike."
    )
    if not (found.sites or found.presence or found.reshaped):
        yield Subject("", (), section, text=(counts, alike))
        return
    yield Subject("", (), section, text=(counts,))
    if found.sites:
        yield Subject("Sites with another precision or verdict", tuple(map(_site, found.sites)), section)
    if found.presence:
        yield Subject("Sites of one model only", tuple(map(_present, found.presence)), section, numeric=True)
    if found.reshaped:
        rows = tuple(map(_reshaped, found.reshaped))
        yield Subject("Sites of another kind or size", rows, section, numeric=True)


def _decision(decision: SiteDecision | None) -> str:
    if decision is None:
        return "not decided"
    recipe = f" ({decision.recipe})" if decision.recipe else ""
    return f"{decision.precision}{recipe}, {decision.verdict}"


def _site(item: SiteChange) -> Row:
    sides = (("then", item.old), ("now", item.new))
    reasons = "; ".join(f"{name}: {side.reason.rstrip('.')}" for name, side in sides if side is not None)
    return Row(f"{item.where} · {item.site}", _decision(item.old), _decision(item.new), remark=reasons)


def _shape(item: SitePresence | SiteShape) -> Told:
    sizes = (shown(numbers.count, item, name) if getattr(item, name) else numbers.NONE for name in ("k", "n"))
    return told("{}, K {}, N {}", item.kind, *sizes)


def _present(item: SitePresence) -> Row:
    merged = f"merged from {', '.join(item.merged_from)}" if item.merged_from else ""
    before, after = (_shape(item), None) if item.change is Change.VANISHED else (None, _shape(item))
    return Row(item.site, before, after, cell(item.change, _CHANGES[item.change]), merged)


def _reshaped(item: SiteReshape) -> Row:
    return Row(item.site, _shape(item.old), _shape(item.new))


def _plans(found: RunComparison) -> Subject:
    heads = ("Plan", "Old", "New", "Sites in another precision")
    return Subject("Plans", tuple(map(_plan, found.plans)), "Plans", heads, numeric=True)


def _plan(item: PlanChange) -> Row:
    moved = numbers.NONE if item.old is None or item.new is None else shown(numbers.count, item, "moved")
    return Row(item.plan, _summary(item.old), _summary(item.new), cell(moved))


def _summary(side: PlanSummary | None) -> str:
    if side is None:
        return "no such plan"
    sites, share = shown(numbers.count, side, "fp8_sites"), shown(numbers.share, side, "fp8_share")
    return told("{}, sites in FP8: {}, of the FLOPs {}", side.base, sites, share)


def _rewrites(found: RunComparison) -> Subject:
    """Places that transforms treated differently."""
    if not found.rewrites:
        return Subject("", (), "Rewrites", text=("Every transform did the same at every place.",))
    return Subject("Treated differently", tuple(map(_rewrite, found.rewrites)), "Rewrites")


def _rewrite(item: RewriteChange) -> Row:
    sides = (("then", item.old), ("now", item.new))
    return Row(
        f"{item.sequence} · {item.transform} · {item.at}",
        "not looked at" if item.old is None else item.old.outcome,
        "not looked at" if item.new is None else item.new.outcome,
        remark="; ".join(f"{name}: {side.what.rstrip('.')}" for name, side in sides if side is not None),
    )


def _splits(found: RunComparison) -> Subject:
    """True if both runs were measured on the same rows."""
    said = (
        "Both runs read the same rows."
        if found.has_same_rows
        else "Not every split is the same: where it is not, the file, the selection of its rows or the "
        "columns of the model's inputs differ, and costs may be of different rows."
    )
    heads = ("Split", "Old rows", "New rows", "Rows")
    return Subject("Splits", tuple(map(_split, found.splits)), "Data", heads, (said,), numeric=True)


def _split(item: SplitChange) -> Row:
    sides = [side for side in (item.old, item.new) if side is not None]
    sources = [f"{side.name}, {side.rule}, digest {numbers.digest(side.digest)}" for side in sides]
    sameness = cell("another file, selection or columns", Tone.WARN)
    if item.is_same:
        sameness = cell("the same", Tone.GOOD)
    elif len(sides) < 2:
        sameness = cell("read in one run only", Tone.WARN)
    before, after = (
        None if side is None else shown(numbers.count, side, "rows") for side in (item.old, item.new)
    )
    return Row(item.split, before, after, sameness, " → ".join(dict.fromkeys(sources)))


def _surroundings(found: RunComparison) -> Iterator[Subject]:
    """Models, versions and settings."""
    section = "Models, versions and settings"
    said = [
        f"The {name} run is '{run.title}' of {run.path}: SHA-256 of its report {numbers.digest(run.digest)}, "
        f"of the exported model {numbers.digest(run.model_digest)}, after mods "
        f"{numbers.digest(run.modified_digest)}."
        for name, run in (("old", found.old), ("new", found.new))
    ]
    if found.settings is None:
        said.append("Settings were not compared: they stand in run directories, and not both were given.")
    yield Subject("Versions that differ", _values(found.versions), section, text=tuple(said))
    if found.settings is not None:
        yield Subject("Settings that differ", _values(found.settings), section)


def _values(found: tuple[ValueChange, ...]) -> tuple[Row, ...]:
    return tuple(Row(item.name, item.old, item.new) for item in found)


# Verdicts -----------------------------------------------------------------------------------------


def _banner(found: RunComparison) -> str:
    synthetic = [name for name, run in (("old", found.old), ("new", found.new)) if run.synthetic]
    if not synthetic:
        return ""
    return _SYNTHETIC.format("both runs" if len(synthetic) == 2 else f"the {synthetic[0]} run")


def _verdict(found: RunComparison, target: TargetDifference) -> Verdict:
    facts = (
        *_sides(target),
        *(_cost(change, is_routed=_is_routed(target)) for change in _of(found.accuracy, target)),
        *(_time(change, is_routed=_is_routed(target)) for change in _of(found.latency, target)),
    )
    return Verdict(
        target.hardware, _headline(target), facts, _tone(found, target), tuple(_stats(found, target))
    )


def _of(changes: Sequence[_Change], target: TargetDifference) -> list[_Change]:
    """Return the changes on one piece of hardware."""
    return [change for change in changes if change.hardware == target.hardware]


def _is_routed(target: TargetDifference) -> bool:
    """True if requests go to several engines in either run."""
    return any(side is not None and side.routes for side in (target.old, target.new))


def _headline(target: TargetDifference) -> str:
    old, new, name = target.old, target.new, target.hardware
    if new is None:
        return f"{name}: only the old run emits an engine"
    if old is None:
        return f"{name}: only the new run emits an engine, {new.engine} (plan {new.plan})"
    beside = " and others by the size of requests" if new.routes else ""
    if target.change is Change.SAME:
        return f"{name}: both emit {new.engine} (plan {new.plan}){beside}"
    if old.engine == new.engine:
        return f"{name}: both emit {new.engine} (plan {new.plan}), and requests go to engines by another rule"
    return f"{name}: {new.engine} (plan {new.plan}){beside} in place of {old.engine} (plan {old.plan})"


def _tone(found: RunComparison, target: TargetDifference) -> Tone:
    """Bad where something got worse for certain or is gone; green only where all is seen to hold."""
    costs, times = _of(found.accuracy, target), _of(found.latency, target)
    is_left = any(c.new is not None and c.new.status == BudgetStatus.BEYOND for c in costs)
    if is_left or any(c.is_worse for c in costs) or target.change is Change.VANISHED:
        return Tone.BAD
    holds = target.change is Change.SAME and all(map(_cost_holds, costs)) and all(map(_time_holds, times))
    return Tone.GOOD if holds else Tone.WARN


def _cost_holds(change: AccuracyChange) -> bool:
    """True if both costs are known, of the same rows and model, and stand alike to the budget."""
    if change.old is None or change.new is None or change.difference is None:
        return False
    return change.is_same_basis and change.old.status == change.new.status


def _time_holds(change: LatencyChange) -> bool:
    """True if no time that was known got longer by more than noise, or is not known any more."""
    was_known = change.old is not None and change.old.counts_for_choice
    return not change.is_slower if change.is_slower is not None else not was_known


def _stats(found: RunComparison, target: TargetDifference) -> Iterator[Stat]:
    """Yield the changes of the plan, of its cost on the last split that both judged, and of its time."""
    if target.old is None or target.new is None:
        return
    yield Stat("Plan now", cell(target.new.plan), f"then {target.old.plan}")
    costs = [c for c in _of(found.accuracy, target) if c.difference is not None]
    worst = max(costs, key=lambda c: (c.split == CERTIFICATION, _over_budget(c)), default=None)
    if worst is not None:
        yield _cost_stat(worst)
    times = [c for c in _of(found.latency, target) if c.ratio is not None]
    if times:
        yield _time_stat(max(times, key=lambda c: (c.batch, c.inputs is InputPlace.HOST)))


def _over_budget(change: AccuracyChange) -> float:
    new = change.new
    return float("-inf") if new is None or new.judged is None else new.judged.upper - new.budget


def _cost_stat(change: AccuracyChange) -> Stat:
    new, old = change.new, change.old
    assert new is not None and old is not None and new.judged is not None and old.judged is not None
    now, then = percent_interval(new.judged, new.budget), percent_interval(old.judged, old.budget)
    where = f"{change.output} on {change.split}"
    return Stat(f"{new.name} now", cell(now), told("then {}; {}", then, where))


def _time_stat(change: LatencyChange) -> Stat:
    note = told(
        "of p50 at batch {}, inputs on the {}; no interval",
        shown(numbers.count, change, "batch"),
        change.inputs,
    )
    tone = Tone.WARN if change.is_slower else Tone.PLAIN
    return Stat("Time, new over old", cell(shown("{:.3f}×".format, change, "ratio"), tone), note)


def _sides(target: TargetDifference) -> Iterator[str]:
    for name, side in (("Old", target.old), ("New", target.new)):
        if side is None:
            continue
        yield told(
            "{}: {} of the FLOPs in FP8, sites: {}. Why: {}. Speed: {}.",
            name,
            shown(numbers.share, side, "fp8_share"),
            shown(numbers.count, side, "fp8_sites"),
            side.reason.rstrip("."),
            side.basis,
        )
        if side.routes:
            yield told("{}: requests by their size: {}.", name, routes_text(side))


def _cost(change: AccuracyChange, *, is_routed: bool) -> str:
    where = f"{change.output}, {change.split}{_engines_of(change) if is_routed else ''}"
    if change.old is None or change.new is None or change.old.judged is None or change.new.judged is None:
        return f"Cost ({where}): not compared, {change.remark}."
    old, new = change.old.judged, change.new.judged
    if change.overlap is None:
        return f"Cost ({where}): not compared, {change.remark}."
    remark = f"; {change.remark}" if change.remark else ""
    return told(
        "Cost ({}): {} {} then, {} now; the intervals {}{}.",
        where,
        change.new.name,
        percent_interval(old, change.old.budget),
        percent_interval(new, change.new.budget),
        "overlap" if change.overlap else "do not overlap",
        remark,
    )


def _time(change: LatencyChange, *, is_routed: bool) -> str:
    engines = _engines_of(change) if is_routed else ""
    batch = shown(numbers.count, change, "batch")
    where = told("batch {}, inputs on the {}{}", batch, change.inputs, engines)
    if change.old is None or change.new is None:
        return told("Latency p50 ({}): not compared, {}.", where, change.remark)
    sides = (shown(numbers.latency, change.old, "p50_us"), shown(numbers.latency, change.new, "p50_us"))
    if change.ratio is None:
        return told("Latency p50 ({}): {} then, {} now; {}.", where, *sides, change.remark)
    times = shown("{:.3f}×".format, change, "ratio")
    slower = "; slower by more than either measurement wandered" if change.is_slower else ""
    return told("Latency p50 ({}): {} then, {} now, {} the time{}.", where, *sides, times, slower)


def _engines_of(change: AccuracyChange | LatencyChange) -> str:
    """Which engines are compared: ``, a then, b now``."""
    then, now = (None if side is None else side.engine for side in (change.old, change.new))
    if then == now:
        return f", {now}"
    return "".join(f", {name} {when}" for name, when in ((then, "then"), (now, "now")) if name is not None)
