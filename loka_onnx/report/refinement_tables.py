"""Tables of refining: every plan built and timed on a device, with its outcome."""

from __future__ import annotations

from collections.abc import Iterator

from loka_onnx.core.refinement import HardwareRefinement, Origin, Step
from loka_onnx.report import numbers
from loka_onnx.report.choice_tables import error_text, not_predicted_text, times_text, upper_text
from loka_onnx.report.data import ReportData
from loka_onnx.report.document import Cell, Column, Section, Table, Tone, cell
from loka_onnx.report.figures import Place, at, derive, formed, key, shown, told

_COLUMNS = (
    Column("Round", numeric=True),
    Column("Plan"),
    Column("From"),
    Column("FP8 share of FLOPs", numeric=True),
    Column("Latency over the anchor's", numeric=True),
    Column("Upper bound over budget", numeric=True),
    Column("On the front"),
    Column("Build", numeric=True),
    Column("Outcome", prose=True),
)


def refinement_sections(data: ReportData) -> tuple[Section, ...]:
    """Return every step of refining; empty without refining."""
    refined = [found for found in data.refinement.hardware if found.anchor]
    if not refined:
        return ()
    paragraphs = [
        "Plans built and measured in rounds, on the selection split. Latencies are relative to the fastest "
        "engine without FP8, the anchor, which was timed in turns with them. On the front is what no other "
        "engine beats in both latency and upper bound.",
    ]
    if data.refinement.median_prediction_error is not None:
        paragraphs.append(
            told(
                "Predicted against measured latency of every plan tried: median error {}, {} times. A "
                "prediction starts from the measured engine with the nearest plan, and adds what kernel "
                "times say of the sites that differ.",
                shown(numbers.error_percent, data.refinement, "median_prediction_error"),
                formed(numbers.count, derive("count", Place(data.refinement, "predictions"))),
            )
        )
    items = [_summary(found) for found in refined]
    items += [
        not_predicted_text(step.plan, step.not_predicted)
        for found in refined
        for step in found.steps
        if step.not_predicted
    ]
    tables = [
        *(Table(f"Plans tried on {f.target}", _COLUMNS, _rows(f), _emphasized(f), keys=2) for f in refined),
        *_predictions_tables(refined),
        *_returned_tables(refined),
    ]
    return (Section("refinement", "Refinement", tuple(paragraphs), tuple(items), tuple(tables)),)


def _summary(found: HardwareRefinement) -> str:
    best = f"'{found.best}' is the fastest inside the budget" if found.best else "none is inside the budget"
    rounds = derive("max", *(at(step, "round") for step in found.steps)) if found.steps else None
    return told(
        "{}, {} {}: {} rounds in {}, ended because {}; {}. Anchor: {}",
        found.target,
        found.backend,
        found.architecture,
        "no" if rounds is None else formed(numbers.count, rounds),
        shown(numbers.seconds, found, "seconds"),
        found.ended,
        best,
        found.anchor,
    )


def _emphasized(found: HardwareRefinement) -> frozenset[int]:
    return frozenset(place for place, step in enumerate(found.steps) if step.plan == found.best)


def _rows(found: HardwareRefinement) -> tuple[tuple[Cell, ...], ...]:
    return tuple(
        (
            cell(shown(numbers.count, step, "round")),
            cell(step.plan),
            cell(_origin(step)),
            cell(shown(numbers.share, step, "fp8_share")),
            cell(times_text(step.times)),
            cell(
                upper_text(step),
                Tone.PLAIN if step.upper is None else Tone.GOOD if step.is_within else Tone.BAD,
            ),
            cell("yes" if step.is_on_front else "no", Tone.PLAIN if step.is_on_front else Tone.MUTED),
            cell(shown(numbers.seconds, step, "build_seconds")),
            cell(step.detail or step.engine),
        )
        for step in found.steps
    )


def _origin(step: Step) -> str:
    if step.origin is Origin.GIVEN_BACK:
        given_back = derive("sum", *(derive("count", Place(each, "sites")) for each in step.returned))
        return told("{}, {} given back", step.parent, formed(numbers.count, given_back))
    return step.origin


def _predictions_tables(refined: list[HardwareRefinement]) -> Iterator[Table]:
    columns = (
        Column("Plan"),
        Column("Predicted from"),
        Column("Batch", numeric=True),
        Column("Predicted", numeric=True),
        Column("Measured", numeric=True),
        Column("Error", numeric=True),
    )
    for found in refined:
        rows = tuple(
            (
                cell(step.plan),
                cell(step.predicted_from),
                cell(formed(numbers.count, key(step.predicted_us, batch))),
                cell(shown(numbers.latency, step.predicted_us, batch)),
                cell(shown(numbers.latency, step.latency_us, batch)),
                cell(error_text(at(step.predicted_us, batch), at(step.latency_us, batch))),
            )
            for step in found.steps
            for batch in step.predicted_us
            if batch in step.latency_us
        )
        if rows:
            yield Table(f"Latency on {found.target}, predicted before it was measured", columns, rows, keys=2)


def _nanoseconds(value_us: float) -> str:
    return f"{1000 * value_us:.3g} ns"


def _returned_tables(refined: list[HardwareRefinement]) -> Iterator[Table]:
    columns = (
        Column("Plan"),
        Column("Sites given back"),
        Column("KL of what is allowed", numeric=True),
        Column("Expected to save, a row", numeric=True),
    )
    for found in refined:
        rows = tuple(
            (
                cell(step.plan),
                cell(", ".join(each.sites)),
                cell(shown(numbers.share, each, "kl")),
                cell(shown(_nanoseconds, each, "saved_us")),
            )
            for step in found.steps
            for each in step.returned
        )
        if rows:
            yield Table(f"Sites given back on {found.target}, worst first", columns, rows, keys=2)
