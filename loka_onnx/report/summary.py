"""Summary of a run in the terminal."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from rich.table import Table
from rich.text import Text

from loka_onnx.core.engine import EngineArtifact
from loka_onnx.core.evaluation import DELTA_NE_NAME, KL_NAME, OutputEvaluation
from loka_onnx.report import numbers
from loka_onnx.report.data import SELECTION, ReportData, confidence_text
from loka_onnx.report.document import Tone
from loka_onnx.report.engine_tables import (
    STATUS_TONES,
    delta_heading,
    delta_text,
    delta_tone,
    fp8_share,
    fp8_sites,
    label_free_outputs,
)
from loka_onnx.report.sections import SYNTHETIC_BANNER
from loka_onnx.report.verdict import NO_LABELS

# The caption has the other words: the table fits 80 columns.
_HEADINGS = {KL_NAME: "KL", f"{DELTA_NE_NAME} or {KL_NAME}": "ΔNE or KL"}
_STYLES = {Tone.GOOD: "green", Tone.BAD: "red", Tone.WARN: "yellow", Tone.MUTED: "dim", Tone.PLAIN: ""}


@dataclass(frozen=True)
class _Shape:
    """Columns needed to distinguish the rows."""

    split: str
    with_target: bool
    with_backend: bool
    with_output: bool

    def names(self, engine: EngineArtifact | None, plan: Text, output: str) -> list[Text]:
        """Return the cells that name a row."""
        cells = [Text(engine.target if engine else "")] if self.with_target else []
        cells += [Text(engine.backend if engine else "")] if self.with_backend else []
        return [*cells, plan, *([Text(output)] if self.with_output else [])]


_LONGEST_WORD = len("undecided,")


def summary_table(data: ReportData, split: str | None = None) -> Table:
    """Return one row per engine and output, the reference first; selected engines are marked with ``*``.

    Args:
        split: Split of the accuracy; when None selection, on which every candidate was judged.
    """
    judged = delta_heading(data)
    shape = _shape(data, split or (SELECTION if SELECTION in data.splits else next(iter(data.splits), "")))
    table = Table(
        title=Text(f"{data.title}: {shape.split or numbers.NOT_MEASURED}"),
        caption="\n".join(_caption(data)),
        caption_style="bold red" if data.is_synthetic else "dim",
        title_justify="left",
        caption_justify="left",
        box=None,
        pad_edge=False,
        padding=(0, 1, 0, 0),
    )
    for heading, wanted in (
        ("target", shape.with_target),
        ("backend", shape.with_backend),
        ("plan", True),
        ("output", shape.with_output),
    ):
        if wanted:
            table.add_column(heading, overflow="fold", no_wrap=heading in {"plan", "output"})
    for heading, is_rigid in (
        ("NE", True),
        ("AUC", True),
        (f"{_HEADINGS.get(judged, judged)}, {confidence_text(data, shape.split)}", True),
        ("KL", True),
        ("ΔAUC", True),
        ("FP8 sites", False),
        ("FP8 FLOPs", False),
        ("size", True),
    ):
        table.add_column(heading, justify="right", no_wrap=is_rigid)
    table.add_column("status", overflow="fold", min_width=_LONGEST_WORD)
    for reference in data.references:
        evaluation = data.evaluation(reference, shape.split)
        for output in evaluation.outputs if evaluation is not None else ():
            names = shape.names(None, Text("FP32"), output.output)
            table.add_row(*names, *_scores(output), *[numbers.NONE] * 5, "reference")
    for engine in data.engines:
        _add_engine(table, data, engine, shape)
    return table


def _caption(data: ReportData) -> Iterator[str]:
    yield "* emitted"
    if label_free_outputs(data):
        yield NO_LABELS
    if data.is_synthetic:
        yield SYNTHETIC_BANNER


def _shape(data: ReportData, split: str) -> _Shape:
    targets = {e.target for e in data.engines}
    backends = {(e.target, e.backend) for e in data.engines}
    outputs = {o.output for e in data.evaluations.evaluations for o in e.outputs}
    return _Shape(split, len(targets) > 1, len(backends) > len(targets), len(outputs) > 1)


def _add_engine(table: Table, data: ReportData, engine: EngineArtifact, shape: _Shape) -> None:
    evaluation = data.evaluation(engine.id, shape.split)
    is_chosen = data.chosen(engine.id) is not None
    # Text, not str: rich reads [brackets] in a string as markup.
    plan = Text(f"{engine.plan} *" if is_chosen else engine.plan, style="bold" if is_chosen else "")
    simulated = ", simulated" if engine.simulated else ""
    size = numbers.size(engine.bytes) if engine.path is not None else numbers.NONE
    build = (fp8_sites(data, engine), fp8_share(data, engine), size)
    if evaluation is None or not evaluation.outputs:
        status = Text(f"{engine.status}{simulated}", style=_STYLES[STATUS_TONES[engine.status]])
        missing = Text(numbers.NOT_MEASURED, style="dim")
        names = shape.names(engine, plan, numbers.NONE)
        table.add_row(*names, numbers.NONE, numbers.NONE, missing, *[numbers.NONE] * 2, *build, status)
        return
    for output in evaluation.outputs:
        status = Text(f"{output.verdict}{simulated}", style=_STYLES[delta_tone(output)])
        names = shape.names(engine, plan, output.output)
        table.add_row(*names, *_scores(output), *beside(output), *build, status)


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
