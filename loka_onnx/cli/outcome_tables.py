"""The last tables of a run: what was chosen for each target, what it costs, and how fast it is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.measure import Measurement
from rich.table import Column, Table
from rich.text import Text

from loka_onnx.core.evaluation import KL_NAME, BudgetStatus, Latency, OutputEvaluation, TargetChoice
from loka_onnx.core.formats import Precision
from loka_onnx.numerics.medians import is_tie, quartiles
from loka_onnx.report import ReportData, numbers
from loka_onnx.report.data import CERTIFICATION, confidence_text
from loka_onnx.report.summary import beside, on_two_lines

_STYLES = {BudgetStatus.WITHIN: "green", BudgetStatus.BEYOND: "red", BudgetStatus.UNDECIDED: "yellow"}
_UNBOUNDED = 10_000
"""Columns of a terminal in which everything has room."""
REFERENCES = (Precision.FP32.value, Precision.BF16.value)
"""Plans whose latency that of the chosen engine is compared with."""


def decision_table(data: ReportData) -> Table:
    """One row per emitted engine and output: its plan, what it costs against the budget, the verdict."""
    outputs = {o.output for e in data.evaluations.evaluations for o in e.outputs}
    table = _table("Chosen")
    table.add_column("target", overflow="fold")
    table.add_column("backend", overflow="fold")
    table.add_column("plan", overflow="fold")
    if len(outputs) > 1:
        table.add_column("output", overflow="fold")
    table.add_column(f"ΔNE, {confidence_text(data, CERTIFICATION)}", justify="right", no_wrap=True)
    table.add_column("budget", justify="right", no_wrap=True)
    table.add_column("verdict", overflow="fold")
    for choice in data.choice.targets:
        for engine_id in choice.engines:
            engine = data.engine(engine_id)
            plan = choice.plan if engine is None else engine.plan
            names = [choice.target, "" if engine is None else engine.backend, plan]
            evaluation = data.evaluation(engine_id, CERTIFICATION)
            for number, output in enumerate(() if evaluation is None else evaluation.outputs):
                # The names of an engine stand once.
                cells = [Text(name if number == 0 else "") for name in names]
                cells += [Text(output.output)] if len(outputs) > 1 else []
                table.add_row(*cells, *_judged(output))
            if evaluation is None or not evaluation.outputs:
                missing = [Text(numbers.NONE)] if len(outputs) > 1 else []
                told = Text(numbers.NOT_MEASURED, style="dim")
                verdict = numbers.NONE if engine is None else engine.status
                table.add_row(*map(Text, names), *missing, told, Text(numbers.NONE), Text(verdict))
    return table


def latency_table(data: ReportData) -> Table | None:
    """One row per target and batch size: median latency, and how many times faster than in FP32 and BF16.

    None where no engine that was chosen was timed on its target.
    """
    rows = [row for choice in data.choice.targets for row in _timed(data, choice)]
    if not any(row.latency is not None for row in rows):
        return None
    table = _table("Latency of what was chosen")
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


def fitted(table: Table, console: Console, dispensable: Sequence[str]) -> Table:
    """A table without those dispensable columns that leave no room for the words of the others.

    Args:
        table: The table; not used any more.
        console: Where it is to be printed.
        dispensable: Headings of columns, the first to go first.
    """
    for heading in dispensable:
        if sum(_room(column, console) for column in table.columns) <= console.width:
            break
        table.columns = [column for column in table.columns if column.header != heading]
    for number, column in enumerate(table.columns):
        column._index = number
    if Measurement.get(console, console.options.update(max_width=_UNBOUNDED), table).maximum > console.width:
        # Rich would take from the words before it wraps a heading over numbers.
        for column in table.columns:
            if not _is_text(column):
                column.width = _room(column, console) - 1
    return table


def _is_text(column: Column) -> bool:
    return column.overflow == "fold" and not column.no_wrap


def _room(column: Column, console: Console) -> int:
    """Columns of the terminal that a column takes with the space behind it, no word cut and no number."""
    unbounded = console.options.update(max_width=_UNBOUNDED)
    heading, *cells = (Measurement.get(console, unbounded, cell) for cell in (column.header, *column.cells))
    inside = [cell.minimum if _is_text(column) else cell.maximum for cell in cells]
    return max(heading.maximum if column.no_wrap else heading.minimum, *inside) + 1


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


def _judged(output: OutputEvaluation) -> tuple[Text, Text, Text]:
    """What is judged with KL and the change of AUC below it, the budget, and the verdict."""
    style = _STYLES.get(output.budget_status, "")
    budget, change = Text(numbers.budget_percent(output.budget)), output.difference
    if change is None:
        return Text("reference"), budget, Text(numbers.NONE)
    name = "KL " if change.judged_name == KL_NAME else ""
    judged = name + on_two_lines(numbers.percent_interval(change.judged, output.budget))
    kl, auc = beside(output)
    below = [f"KL {kl}"] if not name else []
    below += [f"ΔAUC {auc}"] if change.delta_auc is not None else []
    cost = Text(judged, style=style).append("".join(f"\n{line}" for line in below))
    return cost, budget, Text(output.verdict, style=style)


def _table(title: str) -> Table:
    return Table(title=Text(title), title_justify="left", box=None, pad_edge=False, padding=(0, 1, 0, 0))
