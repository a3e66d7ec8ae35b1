"""The last table of a run: how fast the emitted engines are."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from rich.table import Table
from rich.text import Text

from loka_onnx.core.evaluation import Latency, TargetChoice
from loka_onnx.core.formats import Precision
from loka_onnx.numerics.medians import is_tie, quartiles
from loka_onnx.report import ReportData, numbers
from loka_onnx.report.summary import plain_table

REFERENCES = (Precision.FP32.value, Precision.BF16.value)
"""Plans whose latency that of the chosen engine is compared with."""


def latency_table(data: ReportData) -> Table | None:
    """One row per target and batch size: median latency, and how many times faster than in FP32 and BF16.

    None where no engine that was chosen was timed on its target.
    """
    rows = [row for choice in data.choice.targets for row in _timed(data, choice)]
    if not any(row.latency is not None for row in rows):
        return None
    table = plain_table("Latency of what was chosen")
    table.add_column("target", overflow="fold")
    for heading in ("batch", "p50", *(f"over {plan.upper()}" for plan in REFERENCES)):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("plan", overflow="fold")
    target = ""
    for row in rows:
        p50 = numbers.NOT_MEASURED if row.latency is None else numbers.latency(row.latency.p50_us)
        cells = [Text(row.target if row.target != target else ""), Text(numbers.count(row.batch)), Text(p50)]
        table.add_row(*cells, *(Text(_times(row, plan)) for plan in REFERENCES), Text(row.plan))
        target = row.target
    return table


@dataclass(frozen=True)
class _Row:
    """A batch size of a target."""

    target: str
    batch: int
    plan: str
    latency: Latency | None
    references: dict[str, Latency]


def _timed(data: ReportData, choice: TargetChoice) -> Iterator[_Row]:
    found: dict[str, dict[int, Latency]] = {}
    for evaluation in data.evaluations.evaluations:
        if evaluation.target == choice.target:
            counts = {latency.batch: latency for latency in evaluation.latencies if latency.counts_for_choice}
            found.setdefault(evaluation.engine, {}).update(counts)
    plans = {engine.id: engine.plan for engine in data.engines}
    for batch in sorted({batch for latencies in found.values() for batch in latencies}):
        references: dict[str, Latency] = {}
        for engine, latencies in found.items():
            plan = plans.get(engine, "")
            if plan in REFERENCES and batch in latencies:
                known = references.get(plan, latencies[batch])
                references[plan] = min(known, latencies[batch], key=lambda latency: latency.p50_us)
        engine = choice.route(batch)
        chosen = found.get(engine, {}).get(batch)
        yield _Row(choice.target, batch, plans.get(engine, choice.plan), chosen, references)


def _times(row: _Row, plan: str) -> str:
    """Latency of the plan over that of the chosen engine; a dash where one of them was not measured.

    A tie where the quartiles of their loads overlap.
    """
    if row.latency is None or plan not in row.references:
        return numbers.NONE
    other, ours = row.references[plan], row.latency
    if other.loads_us and ours.loads_us and is_tie(quartiles(other.loads_us), quartiles(ours.loads_us)):
        return "1×" if other == ours else "tie"
    return f"{other.p50_us / ours.p50_us:.2f}×"
