"""Summary of a run in the terminal."""

from __future__ import annotations

from collections.abc import Iterator

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
    fp8_share,
    fp8_sites,
    label_free_outputs,
    size_text,
)
from loka_onnx.report.sections import SYNTHETIC_BANNER
from loka_onnx.report.verdict import NO_LABELS

# The caption has the other words: the table fits 80 columns.
_HEADINGS = {KL_NAME: "KL", f"{DELTA_NE_NAME} or {KL_NAME}": "ΔNE or KL"}
_STYLES = {Tone.GOOD: "green", Tone.BAD: "red", Tone.WARN: "yellow", Tone.MUTED: "dim", Tone.PLAIN: ""}
_LONGEST_WORD = len("undecided,")
_Row = tuple[tuple[str | Text, ...], tuple[str | Text, ...]]
"""Target, backend, plan and output, and all other cells."""


def summary_table(data: ReportData, split: str | None = None) -> Table:
    """Return one row per engine and output, the reference first; selected engines are marked with ``*``.

    The accuracy is that on `split`; when None on selection, on which every candidate was judged.
    """
    split = split or data.judged_split
    judged = delta_heading(data)
    table = Table(
        title=Text(f"{data.title}: {split or numbers.NOT_MEASURED}"),
        caption="\n".join(_caption(data)),
        caption_style="bold red" if data.is_synthetic else "dim",
        title_justify="left",
        caption_justify="left",
        box=None,
        pad_edge=False,
        padding=(0, 1, 0, 0),
    )
    # Columns that distinguish the rows only.
    targets = {e.target for e in data.engines}
    backends = {(e.target, e.backend) for e in data.engines}
    outputs = {o.output for e in data.evaluations.evaluations for o in e.outputs}
    is_shown = (len(targets) > 1, len(backends) > len(targets), True, len(outputs) > 1)
    for heading, wanted in zip(("target", "backend", "plan", "output"), is_shown, strict=True):
        if wanted:
            table.add_column(heading, overflow="fold", no_wrap=heading in {"plan", "output"})
    for heading in ("NE", "AUC", f"{_HEADINGS.get(judged, judged)}, {confidence_text(data, split)}"):
        table.add_column(heading, justify="right", no_wrap=True)
    for heading in ("KL", "ΔAUC", f"{data.plans.quantized} sites", f"{data.plans.quantized} FLOPs", "size"):
        table.add_column(heading, justify="right", no_wrap=not heading.endswith(("sites", "FLOPs")))
    table.add_column("status", overflow="fold", min_width=_LONGEST_WORD)
    for names, cells in _rows(data, split):
        table.add_row(*(name for name, wanted in zip(names, is_shown, strict=True) if wanted), *cells)
    return table


def _rows(data: ReportData, split: str) -> Iterator[_Row]:
    for reference in data.references:
        evaluation = data.evaluation(reference, split)
        for output in evaluation.outputs if evaluation is not None else ():
            # Text, not str: rich reads [brackets] in a string as markup.
            names = ("", "", "FP32", Text(output.output))
            yield names, (*_scores(output), *[numbers.NONE] * 5, "reference")
    for engine in data.engines:
        yield from _engine_rows(data, engine, split)


def _engine_rows(data: ReportData, engine: EngineArtifact, split: str) -> Iterator[_Row]:
    evaluation, is_chosen = data.evaluation(engine.id, split), data.chosen(engine.id) is not None
    plan = Text(f"{engine.plan} *" if is_chosen else engine.plan, style="bold" if is_chosen else "")
    where = (Text(engine.target), Text(engine.backend), plan)
    simulated = ", simulated" if engine.simulated else ""
    build = (fp8_sites(data, engine), fp8_share(data, engine), size_text(engine))
    if evaluation is None or not evaluation.outputs:
        status = Text(f"{engine.status}{simulated}", style=_STYLES[STATUS_TONES[engine.status]])
        missing = Text(numbers.NOT_MEASURED, style="dim")
        none = numbers.NONE
        yield (*where, Text(none)), (none, none, missing, none, none, *build, status)
        return
    for output in evaluation.outputs:
        status = Text(f"{output.verdict}{simulated}", style=_STYLES[delta_tone(output)])
        cells: tuple[str | Text, ...] = (*_scores(output), *beside(output), *build, status)
        yield (*where, Text(output.output)), cells


def _caption(data: ReportData) -> Iterator[str]:
    yield "* emitted"
    if label_free_outputs(data):
        yield NO_LABELS
    if data.is_synthetic:
        yield SYNTHETIC_BANNER


def beside(output: OutputEvaluation) -> tuple[Text, Text]:
    """Return KL and the change of AUC (in percent of an AUC of 1, which are points), each on two lines."""
    change = output.difference
    if change is None:
        return Text(numbers.NONE), Text(numbers.NONE)
    auc = numbers.NONE if change.delta_auc is None else numbers.percent_interval(change.delta_auc)
    return Text(on_two_lines(numbers.percent_interval(change.kl))), Text(on_two_lines(auc))


def on_two_lines(text: str) -> str:
    """Return an interval with one unit, so that the table fits 80 columns."""
    value, _, interval = text.partition(" [")
    return f"{value}\n[{interval.replace(' %', '')}" if interval else value


def _scores(output: OutputEvaluation) -> list[Text]:
    delta = on_two_lines(delta_text(output))
    return [
        Text(numbers.metric(output.metrics.normalized_entropy)),
        Text(numbers.metric(output.metrics.auc)),
        Text(delta, style=_STYLES[delta_tone(output)]),
    ]
