"""Summary of a run in the terminal; it fits 80 columns."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import compress

from rich.table import Table
from rich.text import Text

from loka_onnx.core.engine import EngineArtifact
from loka_onnx.core.evaluation import DELTA_NE_NAME, KL_NAME, OutputEvaluation
from loka_onnx.report import numbers
from loka_onnx.report.data import ReportData, confidence_text
from loka_onnx.report.document import Tone
from loka_onnx.report.engine_tables import (
    STATUS_TONES,
    delta_heading,
    delta_text,
    delta_tone,
    label_free_outputs,
)
from loka_onnx.report.sections import SYNTHETIC_BANNER
from loka_onnx.report.verdict import NO_LABELS

# The caption has the other words.
_HEADINGS = {KL_NAME: "KL", f"{DELTA_NE_NAME} or {KL_NAME}": "ΔNE or KL"}
_STYLES = {Tone.GOOD: "green", Tone.BAD: "red", Tone.WARN: "yellow", Tone.MUTED: "dim", Tone.PLAIN: ""}
_LONGEST_WORD = len("undecided,")
_Cells = tuple[Text, ...]


def summary_table(data: ReportData, target: str, split: str) -> Table:
    """Return one row per engine of a target and output, the reference first; emitted engines have a ``*``."""
    judged = delta_heading(data)
    title = Text(f"{data.title}, {target}: {split or numbers.NOT_MEASURED}")
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, padding=(0, 1, 0, 0))
    table.min_width = len(title)
    is_said = (True, bool(label_free_outputs(data)), data.is_synthetic)
    caption = compress(("* emitted", NO_LABELS, SYNTHETIC_BANNER), is_said)
    table.caption, table.caption_justify = "\n".join(caption), "left"
    table.caption_style = "bold red" if data.is_synthetic else "dim"
    engines = [engine for engine in data.engines if engine.target == target]
    # Names that distinguish the rows only.
    outputs = {o.output for e in data.evaluations.evaluations for o in e.outputs}
    is_shown = (len({engine.backend for engine in engines}) > 1, True, len(outputs) > 1, True, True, True)
    for heading, wanted in zip(("backend", "plan", "output"), is_shown, strict=False):
        if wanted:
            table.add_column(heading, overflow="fold", no_wrap=heading != "backend")
    for heading in (f"{_HEADINGS.get(judged, judged)}, {confidence_text(data, split)}", "KL"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("status", overflow="fold", min_width=_LONGEST_WORD)
    for row in (*_reference_rows(data, split), *(r for e in engines for r in _engine_rows(data, e, split))):
        table.add_row(*compress(row, is_shown))
    return table


def _reference_rows(data: ReportData, split: str) -> Iterator[_Cells]:
    for output in (output for reference in data.references for output in data.outputs(reference, split)):
        # Text, not str: rich reads [brackets] in a string as markup.
        yield Text(), Text("FP32"), Text(output.output), *_changes(output), Text("reference")


def _engine_rows(data: ReportData, engine: EngineArtifact, split: str) -> Iterator[_Cells]:
    outputs, is_chosen = data.outputs(engine.id, split), data.chosen(engine.id) is not None
    plan = Text(f"{engine.plan} *" if is_chosen else engine.plan, style="bold" if is_chosen else "")
    simulated, none = ", simulated" if engine.simulated else "", Text(numbers.NONE)
    for output in outputs:
        status = Text(f"{output.verdict}{simulated}", style=_STYLES[delta_tone(output)])
        yield Text(engine.backend), plan, Text(output.output), *_changes(output), status
    if not outputs:
        status = Text(f"{engine.status}{simulated}", style=_STYLES[STATUS_TONES[engine.status]])
        yield Text(engine.backend), plan, none, Text(numbers.NOT_MEASURED, style="dim"), none, status


def _changes(output: OutputEvaluation) -> tuple[Text, Text]:
    """Return the judged change and KL, each with its interval on a second line."""
    change = output.difference
    kl = numbers.NONE if change is None else numbers.percent_interval(change.kl)
    judged = Text(_on_two_lines(delta_text(output)), style=_STYLES[delta_tone(output)])
    return judged, Text(_on_two_lines(kl))


def _on_two_lines(text: str) -> str:
    """Return an interval with one unit."""
    value, _, interval = text.partition(" [")
    return f"{value}\n[{interval.replace(' %', '')}" if interval else value
