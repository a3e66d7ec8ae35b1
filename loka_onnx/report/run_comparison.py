"""Report that compares two runs: the same page, the same Markdown, a JSON of its own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from loka_onnx.core import serde
from loka_onnx.core.evaluation import BudgetStatus, InputPlace
from loka_onnx.core.model_changes import Change
from loka_onnx.core.run_comparison import (
    AccuracyChange,
    LatencyChange,
    OnHardware,
    RunComparison,
    TargetDifference,
)
from loka_onnx.report import numbers
from loka_onnx.report.data import CERTIFICATION
from loka_onnx.report.document import Document, Section, Stat, Tone, Verdict, cell
from loka_onnx.report.exhibits import Exhibits
from loka_onnx.report.figures import percent_interval, shown, told
from loka_onnx.report.markdown import to_markdown
from loka_onnx.report.provenance import Pointers, located
from loka_onnx.report.run_comparison_tables import (
    data_section,
    engines_section,
    plans_section,
    rewrites_section,
    routes_text,
    sites_section,
    surroundings_section,
)
from loka_onnx.report.webpage import to_html

_Change = TypeVar("_Change", bound=OnHardware)

JSON_NAME = "comparison.json"
MARKDOWN_NAME = "comparison.md"
HTML_NAME = "comparison.html"
_SYNTHETIC = "SYNTHETIC DATA: numbers of {} were measured on generated rows, not on yours"


def render_comparison(found: RunComparison, directory: Path) -> tuple[Path, ...]:
    """Write comparison.json, comparison.md and comparison.html, each atomically; return them in this order.

    Raises:
        OutputError: Writing fails.
    """
    document = comparison_document(found)
    texts = {
        JSON_NAME: serde.dumps(found),
        MARKDOWN_NAME: to_markdown(document),
        HTML_NAME: to_html(document, Exhibits()),
    }
    for name, text in texts.items():
        serde.write_text(text, directory / name)
    return tuple(directory / name for name in texts)


def comparison_document(found: RunComparison) -> Document:
    """Arrange the differences for reading: selected engines first, then reasons."""
    sections = (
        *(
            [Section("notes", "Notes", items=tuple(f"{note}." for note in found.notes))]
            if found.notes
            else []
        ),
        engines_section(found),
        sites_section(found),
        plans_section(found),
        rewrites_section(found),
        data_section(found),
        surroundings_section(found),
    )
    verdicts = tuple(_verdict(found, target) for target in found.targets)
    title = f"{found.old.title} against {found.new.title}: two runs"
    return located(Document(title, _banner(found), verdicts, sections), Pointers(found))


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
    """Return whether requests go to several engines in either run."""
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
    """Bad where something certainly got worse or is gone; good only where all is seen to hold."""
    costs, times = _of(found.accuracy, target), _of(found.latency, target)
    is_left = any(c.new is not None and c.new.status == BudgetStatus.BEYOND for c in costs)
    if is_left or any(c.is_worse for c in costs) or target.change is Change.VANISHED:
        return Tone.BAD
    holds = target.change is Change.SAME and all(map(_cost_holds, costs)) and all(map(_time_holds, times))
    return Tone.GOOD if holds else Tone.WARN


def _cost_holds(change: AccuracyChange) -> bool:
    """Return whether both costs are known, on the same rows and model, with the same status."""
    if change.old is None or change.new is None or change.difference is None:
        return False
    return change.is_same_basis and change.old.status == change.new.status


def _time_holds(change: LatencyChange) -> bool:
    """Return whether no known time got longer by more than noise, or unknown."""
    was_known = change.old is not None and change.old.counts_for_choice
    return not change.is_slower if change.is_slower is not None else not was_known


def _stats(found: RunComparison, target: TargetDifference) -> Iterator[Stat]:
    """Yield changes of the plan, of its cost on the last split that both judged, and of its time."""
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
    where = f"{change.output}, {change.split}{_engines(change) if is_routed else ''}"
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
    engines = _engines(change) if is_routed else ""
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


def _engines(change: AccuracyChange | LatencyChange) -> str:
    """Return the compared engines: ``, a then, b now``."""
    then, now = (None if side is None else side.engine for side in (change.old, change.new))
    if then == now:
        return f", {now}"
    return "".join(f", {name} {when}" for name, when in ((then, "then"), (now, "now")) if name is not None)
