"""A comparison of two deployments for a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.text import Text

from loka_onnx.core.evaluation import BudgetStatus, OutputEvaluation, PairedDifference
from loka_onnx.core.intervals import Interval
from loka_onnx.operations.compare.deployment_document import (
    AccuracyDifference,
    ComparedRows,
    Comparison,
    Deployment,
    EngineUsed,
    LatencyComparison,
    Moved,
    Ratio,
)
from loka_onnx.planning.choice import NOISE
from loka_onnx.report import numbers
from loka_onnx.report.slice_tables import slice_name, slices_sentence
from loka_onnx.report.verdict import NO_LABELS

SLICES_SHOWN = 10
_STYLES = {BudgetStatus.WITHIN: "green", BudgetStatus.BEYOND: "bold red", BudgetStatus.UNDECIDED: "yellow"}


def print_comparison(out: Console, found: Comparison) -> None:
    """Print who answered, on which rows, and how B differs from A."""
    for line in (*_side("A", found.a), *_side("B", found.b), *_rows(found.rows)):
        # soft_wrap: a path or id that is cut at the margin cannot be copied.
        out.print(line, soft_wrap=True)
    for note in found.notes:
        out.print(Text.assemble(("! ", "yellow"), note), soft_wrap=True)
    for pair in found.accuracy:
        out.print()
        for line in _accuracy(pair, found):
            out.print(line, soft_wrap=True)
    if found.latency is not None:
        out.print()
        _print_latency(out, found.latency)


# Who and on what ----------------------------------------------------------------------------------


def _side(name: str, side: Deployment) -> Iterator[Text]:
    digest = numbers.digest(side.model_digest)
    yield Text.assemble((f"{name}  ", "bold"), f"{side.kind} {side.path}, exported model {digest}")
    for engine in side.engines:
        sizes = [numbers.count(route.rows) for route in side.routes if route.engine == engine.id]
        served = f", requests to {' and '.join(sizes)} rows" if sizes else ""
        yield Text(f"   {_engine(engine)}{served}")
    for passed in side.passed_over:
        yield Text(f"   not used: {passed.engine}: {passed.reason.partition(chr(10))[0]}", style="dim")


def _engine(engine: EngineUsed) -> str:
    words = [
        f"{engine.id}: {engine.backend} {engine.version} on {engine.device} ({engine.architecture})",
        f"plan {engine.plan}" if engine.plan else "",
        "FP8 simulated" if engine.simulated else "",
        "the FP32 fallback, because no emitted engine runs here" if engine.is_fallback else "",
    ]
    return ", ".join(word for word in words if word)


def _rows(rows: ComparedRows) -> Iterator[Text]:
    together = f"rows of one '{rows.group}' belong together" if rows.group else "independent rows"
    yield Text(
        f"{numbers.count(rows.rows)} rows of {rows.name} (sha256 {numbers.digest(rows.digest)}), {together}; "
        f"columns {rows.source}"
    )


# Accuracy -----------------------------------------------------------------------------------------


def _accuracy(pair: AccuracyDifference, found: Comparison) -> Iterator[Text]:
    yield Text.assemble(
        (f"{pair.engine_b} from {pair.engine_a}", "bold"),
        f", in requests of {numbers.count(pair.request_rows)} rows",
    )
    before = {output.output: output for output in pair.before}
    judged = {output.output: output for output in pair.outputs}
    for moved in pair.moved:
        output = judged.get(moved.output)
        if output is None or output.difference is None:
            yield Text(f"  {moved.output}: not judged: {moved.reason}")
            yield _line(f"{moved.unit} RMSE", _rmse(moved))
            continue
        yield Text(f"  {output.output} ({output.kind}{'' if output.difference.delta_ne else ', no labels'})")
        yield from _judged(output, output.difference, found)
        yield _line(f"{moved.unit} RMSE", _rmse(moved))
        yield from _metrics(before[output.output], output)
        yield from _slices(output)


def _judged(output: OutputEvaluation, change: PairedDifference, found: Comparison) -> Iterator[Text]:
    verdict = Text.assemble(
        "  ",
        (output.verdict, _STYLES[output.budget_status]),
        f" (budget {numbers.budget_percent(output.budget)}, {found.budget_source})",
    )
    for remark in output.remarks:
        yield Text.assemble(("    ! ", "yellow"), remark)
    if change.delta_ne is None:
        line = _line("KL", numbers.percent_interval(change.kl, output.budget))
        yield line.append_text(verdict).append(f"; {NO_LABELS}")
        return
    yield _line("ΔNE", numbers.percent_interval(change.delta_ne, output.budget)).append_text(verdict)
    if output.rows_to_decide is not None:
        yield _line("", f"about {numbers.count(output.rows_to_decide)} rows would decide it")
    yield _line("  KL, label-free", numbers.percent_interval(change.kl))
    if change.labelled is not None:
        yield _line("  labelled part", numbers.percent_interval(change.labelled))
    if change.delta_auc is not None:
        yield _line("ΔAUC", numbers.metric_interval(change.delta_auc))
    yield _line("Δprediction ratio", numbers.metric_interval(change.delta_prediction_ratio))


def _rmse(moved: Moved) -> str:
    low, high = (numbers.scientific(end) for end in (moved.rmse.lower, moved.rmse.upper))
    largest = numbers.scientific(moved.max_abs)
    return f"{numbers.scientific(moved.rmse.value)} [{low}, {high}], largest {largest}"


def _metrics(a: OutputEvaluation, b: OutputEvaluation) -> Iterator[Text]:
    if b.metrics.loss is None:
        return
    names = (("NE", "normalized_entropy"), ("AUC", "auc"), ("prediction ratio", "prediction_ratio"))
    pairs = [
        f"{name} {numbers.metric(getattr(a.metrics, field))} → {numbers.metric(getattr(b.metrics, field))}"
        for name, field in names
        if getattr(b.metrics, field) is not None
    ]
    yield _line("A → B", ", ".join(pairs))


def _slices(output: OutputEvaluation) -> Iterator[Text]:
    if not output.slices:
        return
    yield _line("slices", slices_sentence(output))
    for item in output.slices[:SLICES_SHOWN]:
        change = item.reason if item.judged is None else numbers.percent_interval(item.judged, output.budget)
        style = _STYLES.get(item.status, "dim")
        yield Text.assemble(
            f"      {slice_name(item)}, {numbers.count(item.rows)} rows: {change}  ", (item.status, style)
        )
    rest = len(output.slices) - SLICES_SHOWN
    if rest > 0:
        yield Text(f"      … and {rest} more in the JSON")


def _line(name: str, value: str) -> Text:
    return Text(f"    {name:<19}{value}")


# Latency ------------------------------------------------------------------------------------------


def _print_latency(out: Console, latency: LatencyComparison) -> None:
    threads = f", threads: {latency.threads}" if latency.threads else ""
    loads = f"{latency.loads} loads of both" if latency.loads > 1 else "one load of both"
    out.print(Text(f"Latency, in turns, {loads}, inputs in host memory{threads}", style="bold"))
    rows: list[tuple[str, ...]] = [("batch", "A p50", "p99", "B p50", "p99", "B over A [interval]")]
    for each in latency.batches:
        times = (each.a.p50_us, each.a.p99_us, each.b.p50_us, each.b.p99_us)
        rows.append((numbers.count(each.batch), *map(numbers.latency, times), _ratio(each.ratio)))
    for line in _aligned(rows) if latency.batches else ():
        # Not a rich table: that cuts figures off where the terminal is narrow.
        out.print(line, soft_wrap=True)
    if latency.overall is not None and len(latency.batches) > 1:
        out.print(Text(f"over all, per row: {_ratio(latency.overall)}"))
    for side, failure in latency.failures.items():
        out.print(Text.assemble((f"{side} failed ", "red"), failure), soft_wrap=True)
    for doubt in latency.says_nothing:
        out.print(Text(f"says nothing of a target: {doubt}", style="yellow"), soft_wrap=True)


def _aligned(rows: Sequence[Sequence[str]]) -> Iterator[Text]:
    """Columns to the right but for the last one."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [text.rjust(width) for text, width in zip(row[:-1], widths, strict=False)]
        yield Text("  ".join((*cells, row[-1])))


def _ratio(ratio: Ratio | None) -> str:
    if ratio is None:
        return numbers.NOT_MEASURED
    found = ratio.interval
    if found is None:
        return f"×{ratio.value:.3f}  too few loads for an interval"
    return f"×{ratio.value:.3f} [{found.lower:.3f}, {found.upper:.3f}]  {_pace(found)}"


def _pace(ratio: Interval) -> str:
    """In words; within `NOISE` two loads of one and the same engine differ for certain."""
    if ratio.upper < 1.0 - NOISE:
        return "B is faster"
    if ratio.lower > 1.0 + NOISE:
        return "B is slower"
    return f"no difference beyond {100 * NOISE:g} %"
