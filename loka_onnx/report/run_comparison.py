"""The report that holds two runs against one another: the same page, the same Markdown, a JSON of its own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from loka_onnx.core import serde
from loka_onnx.core.evaluation import InputPlace
from loka_onnx.core.run_comparison import (
    AccuracyChange,
    Change,
    LatencyChange,
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
    sites_section,
    surroundings_section,
)
from loka_onnx.report.webpage import to_html

JSON_NAME = "comparison.json"
MARKDOWN_NAME = "comparison.md"
HTML_NAME = "comparison.html"
_SYNTHETIC = "SYNTHETIC DATA: numbers of {} were measured on generated rows, not on yours"


def render_comparison(found: RunComparison, directory: Path) -> tuple[Path, ...]:
    """Writes comparison.json, comparison.md and comparison.html, each atomically.

    Args:
        found: What differs.
        directory: Where the files go; created if need be.

    Returns:
        The files written, in the order above.

    Raises:
        OutputError: The place cannot be written.
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
    """Arranges what differs for reading: what is emitted first, then why."""
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
        *(_cost(change) for change in found.accuracy if change.target == target.target),
        *(_time(change) for change in found.latency if change.target == target.target),
    )
    return Verdict(
        target.target, _headline(target), facts, _tone(found, target), tuple(_stats(found, target))
    )


def _headline(target: TargetDifference) -> str:
    old, new = target.old, target.new
    if new is None:
        return f"{target.target}: only the old run emits an engine"
    if old is None:
        return f"{target.target}: only the new run emits an engine, {new.engine} (plan {new.plan})"
    if target.change is Change.SAME:
        return f"{target.target}: both emit {new.engine} (plan {new.plan})"
    return f"{target.target}: {new.engine} (plan {new.plan}) in place of {old.engine} (plan {old.plan})"


def _tone(found: RunComparison, target: TargetDifference) -> Tone:
    """A warning where something got worse for certain, or an engine is gone; green where nothing moved."""
    costs = [c for c in found.accuracy if c.target == target.target]
    is_worse = any(c.overlap is False and (c.difference or 0.0) > 0.0 for c in costs)
    is_left = any(c.new is not None and c.new.status == "beyond" for c in costs)
    if is_worse or is_left or target.change is Change.VANISHED:
        return Tone.BAD
    return Tone.GOOD if target.change is Change.SAME else Tone.WARN


def _stats(found: RunComparison, target: TargetDifference) -> Iterator[Stat]:
    """What became of the plan, of its cost on the last split that both judged, and of its time."""
    if target.old is None or target.new is None:
        return
    yield Stat("Plan now", cell(target.new.plan), f"then {target.old.plan}")
    costs = [c for c in found.accuracy if c.target == target.target and c.difference is not None]
    worst = max(costs, key=lambda c: (c.split == CERTIFICATION, _over_budget(c)), default=None)
    if worst is not None:
        yield _cost_stat(worst)
    times = [c for c in found.latency if c.target == target.target and c.ratio is not None]
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
    return Stat("Time, new over old", cell(shown("{:.3f}×".format, change, "ratio")), note)


def _sides(target: TargetDifference) -> Iterator[str]:
    for name, side in (("Old", target.old), ("New", target.new)):
        if side is not None:
            yield told(
                "{}: {} of the FLOPs in FP8, sites: {}. Why: {}. Speed: {}.",
                name,
                shown(numbers.share, side, "fp8_share"),
                shown(numbers.count, side, "fp8_sites"),
                side.reason.rstrip("."),
                side.basis,
            )


def _cost(change: AccuracyChange) -> str:
    where = f"{change.output}, {change.split}"
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


def _time(change: LatencyChange) -> str:
    where = told("batch {}, inputs on the {}", shown(numbers.count, change, "batch"), change.inputs)
    if change.old is None or change.new is None:
        return told("Latency p50 ({}): not compared, {}.", where, change.remark)
    sides = (shown(numbers.latency, change.old, "p50_us"), shown(numbers.latency, change.new, "p50_us"))
    if change.ratio is None:
        return told("Latency p50 ({}): {} then, {} now; {}.", where, *sides, change.remark)
    times = shown("{:.3f}×".format, change, "ratio")
    return told("Latency p50 ({}): {} then, {} now, {} the time.", where, *sides, times)
