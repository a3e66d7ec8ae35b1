"""Summary of a run: a sentence for each target, tables for the terminal (80 columns), rows for programs."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import compress
from typing import Any

from rich.table import Table
from rich.text import Text

from loka_onnx.core.engine import EngineArtifact
from loka_onnx.core.evaluation import DELTA_NE_NAME, KL_NAME
from loka_onnx.core.intervals import Interval
from loka_onnx.core.tables import Rows
from loka_onnx.report import numbers
from loka_onnx.report.data import SELECTION, ReportData, confidence_text
from loka_onnx.report.document import Tone
from loka_onnx.report.engine_tables import STATUS_TONES, delta_heading, delta_tone, label_free_outputs
from loka_onnx.report.figures import plus_minus
from loka_onnx.report.sections import SYNTHETIC_BANNER
from loka_onnx.report.verdict import NO_LABELS, baseline, busy, sentence

# The caption has the other words.
_HEADINGS = {KL_NAME: "KL", f"{DELTA_NE_NAME} or {KL_NAME}": "ΔNE or KL"}
_STYLES = {Tone.GOOD: "green", Tone.BAD: "red", Tone.WARN: "yellow", Tone.MUTED: "dim", Tone.PLAIN: ""}
_LONGEST_WORD = len("undecided,")
_Cells = tuple[Text, ...]


def summary_table(data: ReportData, target: str, split: str) -> Table:
    """Return one row per engine of a target and output; emitted engines have a ``*``.

    An engine that was not judged on the split has what it was on selection, and says so.
    """
    judged, names = delta_heading(data), short_names(data)
    engines = [engine for engine in data.engines if engine.target == target]
    title = Text(f"{data.title}, {target}: {split or numbers.NOT_MEASURED}")
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.min_width = len(title)
    timed = [latency for engine in engines for latency in data.target_latencies(engine)]
    loads = [latency.host_load or 0.0 for latency in timed if busy(latency)]
    said = f"latencies of a busy host: load {max(loads):.1f} a core" if loads else ""
    notes = (said, NO_LABELS if label_free_outputs(data) else "", SYNTHETIC_BANNER * data.is_synthetic)
    table.caption, table.caption_justify = "\n".join(filter(None, ("* emitted", *notes))), "left"
    table.caption_style = "bold red" if data.is_synthetic else "dim"
    outputs = {o.output for e in data.evaluations.evaluations for o in e.outputs}
    batch = max((latency.batch for latency in timed), default=None)
    change = f"{_HEADINGS.get(judged, judged)}, {confidence_text(data, split)}"
    words: dict[str, Any] = {"overflow": "fold"}
    figures: dict[str, Any] = {"justify": "right", "no_wrap": True}
    columns = (
        ("engine", True, words),
        ("output", len(outputs) > 1, words),
        (change, True, figures),
        ("KL", judged == DELTA_NE_NAME, figures),
        (f"p50 at {batch or 0:,}", batch is not None, figures),
        ("status", True, words | {"min_width": _LONGEST_WORD}),
    )
    is_shown = [is_shown for _, is_shown, _ in columns]
    for heading, _, style in compress(columns, is_shown):
        table.add_column(heading, **style)
    for row in (r for e in engines for r in _engine_rows(data, e, split, names[e.id], batch)):
        table.add_row(*compress(row, is_shown))
    return table


def short_names(data: ReportData) -> dict[str, str]:
    """Return names of engines that are unique on their target: the plan, and what tells two of it apart."""
    names = {}
    for engine in data.engines:
        same = [e for e in data.engines if (e.target, e.plan) == (engine.target, engine.plan)]
        apart = ("backend", engine.backend), ("architecture", engine.architecture)
        told = [value for key, value in apart if len({getattr(e, key) for e in same}) > 1]
        names[engine.id] = f"{engine.plan} ({' '.join(told)})" if told else engine.plan
    return names


def _engine_rows(
    data: ReportData, engine: EngineArtifact, split: str, name: str, batch: int | None
) -> Iterator[_Cells]:
    is_chosen = data.chosen(engine.id) is not None
    plan = Text(f"{name} *" if is_chosen else name, style="bold" if is_chosen else "")
    remark, none = ", simulated" if engine.simulated else "", Text(numbers.NONE)
    p50 = next((x for x in data.target_latencies(engine) if x.batch == batch), None)
    latency = none if p50 is None else Text(numbers.latency(p50.p50_us))
    outputs = data.outputs(engine.id, split)
    if not outputs and (outputs := data.outputs(engine.id, SELECTION)):
        remark += ", on selection"
    for output in outputs:
        status = Text(f"{output.verdict}{remark}", style=_STYLES[delta_tone(output)])
        change = output.difference
        judged = "reference" if change is None else plus_minus(change.judged, output.budget)
        # Text, not str: rich reads [brackets] in a string as markup.
        kl = none if change is None else Text(numbers.plus_minus(change.kl, output.budget).partition(" ±")[0])
        yield plan, Text(output.output), Text(judged, style=_STYLES[delta_tone(output)]), kl, latency, status
        plan = latency = Text()
    if not outputs:
        status = Text(f"{engine.status}{remark}", style=_STYLES[STATUS_TONES[engine.status]])
        yield plan, none, none, none, latency, status


def target_rows(data: ReportData) -> Rows:
    """Return the result on each target as plain values: fractions, microseconds, ids."""
    rows = []
    for choice in data.choice.targets:
        before = baseline(data, choice)
        engine = data.engine(choice.engine)
        rows.append(
            {
                "target": choice.target,
                "sentence": str(sentence(data, choice)),
                "engines": list(choice.engines),
                "plans": list(choice.plans),
                "reason": choice.reason,
                "basis": choice.basis,
                "baseline": before and before.engine,
                "times": before and _ends(before.times),
                "p50_us": {x.batch: x.p50_us for x in data.target_latencies(engine)} if engine else {},
            }
        )
    return rows


def engine_rows(data: ReportData) -> Rows:
    """Return every candidate and output on the last split that it was judged on, as plain values."""
    rows = []
    for engine in data.engines:
        evaluation = next(iter(data.evaluations_of(engine.id)), None)
        for output in (evaluation.outputs if evaluation else ()) or (None,):
            change = output.difference if output else None
            rows.append(
                {
                    "target": engine.target,
                    "engine": engine.id,
                    "plan": engine.plan,
                    "backend": engine.backend,
                    "is_emitted": data.chosen(engine.id) is not None,
                    "status": str(engine.status),
                    "is_simulated": engine.simulated,
                    "split": evaluation and evaluation.split,
                    "output": output and output.output,
                    "judged": change and change.judged_name,
                    "change": change and _ends(change.judged),
                    "kl": change and _ends(change.kl),
                    "budget": output and output.budget,
                    "verdict": output and output.verdict,
                    "p50_us": {x.batch: x.p50_us for x in data.target_latencies(engine)},
                    "bytes": engine.bytes,
                }
            )
    return rows


def _ends(interval: Interval | None) -> list[float] | None:
    return None if interval is None else [interval.value, interval.lower, interval.upper]


def measured_targets(data: ReportData) -> tuple[str, ...]:
    """Return targets with an engine that was judged."""
    judged = {e.engine for e in data.evaluations.evaluations if e.outputs}
    return tuple(dict.fromkeys(engine.target for engine in data.engines if engine.id in judged))
