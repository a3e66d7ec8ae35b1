"""View of two deployments as a `Difference`."""

from __future__ import annotations

from collections.abc import Iterator

from loka_onnx.core.evaluation import BudgetStatus, Latency, OutputEvaluation, PairedDifference
from loka_onnx.operations.compare.deployment_document import (
    AccuracyDifference,
    Comparison,
    Deployment,
    EngineUsed,
    LatencyComparison,
    Moved,
    Ratio,
)
from loka_onnx.operations.compare.difference import Difference, Row, Subject
from loka_onnx.planning.choice import NOISE
from loka_onnx.report import numbers
from loka_onnx.report.document import Cell, Tone, cell
from loka_onnx.report.slice_tables import slice_name, slices_sentence
from loka_onnx.report.verdict import NO_LABELS

SLICES_SHOWN = 10
_WIDTH = 21
_TONES = {BudgetStatus.WITHIN: Tone.GOOD, BudgetStatus.BEYOND: Tone.BAD, BudgetStatus.UNDECIDED: Tone.WARN}


def deployments_view(found: Comparison) -> Difference:
    """Who answered, on which rows, and how B differs from A."""
    rows = found.rows
    together = f"rows of one '{rows.group}' belong together" if rows.group else "independent rows"
    sides = (
        *_side("A", found.a),
        *_side("B", found.b),
        f"{numbers.count(rows.rows)} rows of {rows.name} (sha256 {numbers.digest(rows.digest)}), {together}; "
        f"columns {rows.source}",
    )
    subjects = [_accuracy(pair, found) for pair in found.accuracy]
    if found.latency is not None:
        subjects.append(_latency(found.latency))
    return Difference("Two deployments", sides, tuple(subjects), found.notes)


def _side(name: str, side: Deployment) -> Iterator[str]:
    yield f"{name}  {side.kind} {side.path}, exported model {numbers.digest(side.model_digest)}"
    for engine in side.engines:
        sizes = [numbers.count(route.rows) for route in side.routes if route.engine == engine.id]
        served = f", requests to {' and '.join(sizes)} rows" if sizes else ""
        yield f"   {_engine(engine)}{served}"
    for passed in side.passed_over:
        yield f"   not used: {passed.engine}: {passed.reason.partition(chr(10))[0]}"


def _engine(engine: EngineUsed) -> str:
    words = [
        f"{engine.id}: {engine.backend} {engine.version} on {engine.device} ({engine.architecture})",
        f"plan {engine.plan}" if engine.plan else "",
        "FP8 simulated" if engine.simulated else "",
        "the FP32 fallback, because no emitted engine runs here" if engine.is_fallback else "",
    ]
    return ", ".join(word for word in words if word)


# Accuracy -----------------------------------------------------------------------------------------


def _accuracy(pair: AccuracyDifference, found: Comparison) -> Subject:
    title = f"{pair.engine_b} from {pair.engine_a}, in requests of {numbers.count(pair.request_rows)} rows"
    return Subject(title, tuple(_outputs(pair, found)), width=_WIDTH)


def _outputs(pair: AccuracyDifference, found: Comparison) -> Iterator[Row]:
    before = {output.output: output for output in pair.before}
    judged = {output.output: output for output in pair.outputs}
    for moved in pair.moved:
        output = judged.get(moved.output)
        if output is None or output.difference is None:
            yield Row(f"{moved.output}: not judged: {moved.reason}")
            yield Row(f"  {moved.unit} RMSE", after=_rmse(moved))
            continue
        yield Row(f"{output.output} ({output.kind}{'' if output.difference.delta_ne else ', no labels'})")
        yield from _judged(output, output.difference, found.budget_source)
        yield Row(f"  {moved.unit} RMSE", after=_rmse(moved))
        yield from _metrics(before[output.output], output)
        yield from _slices(output)


def _judged(output: OutputEvaluation, change: PairedDifference, source: str) -> Iterator[Row]:
    for remark in output.remarks:
        yield Row(f"  ! {remark}")
    budget = f"(budget {numbers.budget_percent(output.budget)}, {source})"
    verdict = cell(f"{output.verdict} {budget}", _TONES[output.budget_status])
    if change.delta_ne is None:
        yield Row(
            "  KL",
            after=numbers.percent_interval(change.kl, output.budget),
            judgement=verdict,
            remark=NO_LABELS,
        )
        return
    yield Row("  ΔNE", after=numbers.percent_interval(change.delta_ne, output.budget), judgement=verdict)
    if output.rows_to_decide is not None:
        yield Row("", after=f"about {numbers.count(output.rows_to_decide)} rows would decide it")
    yield Row("    KL, label-free", after=numbers.percent_interval(change.kl))
    if change.labelled is not None:
        yield Row("    labelled part", after=numbers.percent_interval(change.labelled))
    if change.delta_auc is not None:
        yield Row("  ΔAUC", after=numbers.metric_interval(change.delta_auc))
    yield Row("  Δprediction ratio", after=numbers.metric_interval(change.delta_prediction_ratio))


def _rmse(moved: Moved) -> str:
    rmse = moved.rmse
    value, low, high, most = map(numbers.scientific, (rmse.value, rmse.lower, rmse.upper, moved.max_abs))
    return f"{value} [{low}, {high}], largest {most}"


def _metrics(a: OutputEvaluation, b: OutputEvaluation) -> Iterator[Row]:
    names = (("NE", "normalized_entropy"), ("AUC", "auc"), ("prediction ratio", "prediction_ratio"))
    for name, field in names if b.metrics.loss is not None else ():
        before, after = getattr(a.metrics, field), getattr(b.metrics, field)
        if after is not None:
            yield Row(f"  {name}", numbers.metric(before), numbers.metric(after))


def _slices(output: OutputEvaluation) -> Iterator[Row]:
    if not output.slices:
        return
    yield Row("  slices", after=slices_sentence(output))
    for item in output.slices[:SLICES_SHOWN]:
        change = item.reason if item.judged is None else numbers.percent_interval(item.judged, output.budget)
        name = f"    {slice_name(item)}, {numbers.count(item.rows)} rows: "
        yield Row(name, after=change, judgement=cell(item.status, _TONES.get(item.status, Tone.MUTED)))
    if len(output.slices) > SLICES_SHOWN:
        yield Row(f"    … and {len(output.slices) - SLICES_SHOWN} more in the JSON")


# Latency ------------------------------------------------------------------------------------------


def _latency(latency: LatencyComparison) -> Subject:
    threads = f", threads: {latency.threads}" if latency.threads else ""
    loads = f"{latency.loads} loads of both" if latency.loads > 1 else "one load of both"
    rows = [
        Row(
            f"batch {numbers.count(each.batch)}",
            _times(each.a),
            _times(each.b),
            _ratio(each.ratio),
        )
        for each in latency.batches
    ]
    if latency.overall is not None and len(latency.batches) > 1:
        rows.append(Row("over all, per row", judgement=_ratio(latency.overall)))
    rows += [Row(f"{side} failed", after=failure) for side, failure in latency.failures.items()]
    rows += [Row(f"says nothing of a target: {doubt}") for doubt in latency.says_nothing]
    title = f"Latency, in turns, {loads}, inputs in host memory{threads}; A → B, B over A [interval]"
    return Subject(title, tuple(rows), width=_WIDTH)


def _times(side: Latency) -> str:
    return f"p50 {numbers.latency(side.p50_us)}, p99 {numbers.latency(side.p99_us)}"


def _ratio(ratio: Ratio | None) -> Cell:
    if ratio is None:
        return cell(numbers.NOT_MEASURED)
    found = ratio.interval
    if found is None:
        return cell(f"×{ratio.value:.3f}  too few loads for an interval")
    # Within `NOISE` two loads of one and the same engine differ for certain.
    pace = f"no difference beyond {100 * NOISE:g} %"
    if found.upper < 1.0 - NOISE:
        pace = "B is faster"
    elif found.lower > 1.0 + NOISE:
        pace = "B is slower"
    return cell(f"×{ratio.value:.3f} [{found.lower:.3f}, {found.upper:.3f}]  {pace}")
