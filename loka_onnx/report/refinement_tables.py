"""Tables of refining: every plan that was built and timed on a device, and what became of it."""

from __future__ import annotations

from collections.abc import Iterator

from loka_onnx.core.refinement import HardwareRefinement, Origin, Step
from loka_onnx.report import numbers
from loka_onnx.report.choice_tables import not_predicted_text, times_text, upper_text
from loka_onnx.report.data import ReportData
from loka_onnx.report.document import Cell, Column, Section, Table, Tone, cell

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
    """Every step of refining; nothing where no device here was refined for."""
    shown = [found for found in data.refinement.hardware if found.anchor]
    if not shown:
        return ()
    paragraphs = [
        "Plans built and measured in rounds, on the selection split. Latencies are relative to the fastest "
        "engine without FP8, the anchor, which was timed in turns with them. On the front is what no other "
        "engine beats in both latency and upper bound.",
    ]
    if data.refinement.median_prediction_error is not None:
        error = numbers.error_percent(data.refinement.median_prediction_error)
        paragraphs.append(
            f"Predicted against measured latency of every plan tried: median error {error}, "
            f"{len(data.refinement.predictions)} times. A prediction starts from the measured engine with "
            "the nearest plan, and adds what kernel times say of the sites that differ."
        )
    items = [_summary(found) for found in shown]
    items += [
        not_predicted_text(step.plan, step.not_predicted)
        for found in shown
        for step in found.steps
        if step.not_predicted
    ]
    tables = [
        *(Table(f"Plans tried on {f.target}", _COLUMNS, _rows(f), _emphasized(f), keys=2) for f in shown),
        *_predictions_tables(shown),
        *_returned_tables(shown),
    ]
    return (Section("refinement", "Refinement", tuple(paragraphs), tuple(items), tuple(tables)),)


def _summary(found: HardwareRefinement) -> str:
    best = f"'{found.best}' is the fastest inside the budget" if found.best else "none is inside the budget"
    rounds = max((step.round for step in found.steps), default=0)
    return (
        f"{found.target}, {found.backend} {found.architecture}: {rounds} rounds in "
        f"{numbers.seconds(found.seconds)}, ended because {found.ended}; {best}. Anchor: {found.anchor}"
    )


def _emphasized(found: HardwareRefinement) -> frozenset[int]:
    return frozenset(place for place, step in enumerate(found.steps) if step.plan == found.best)


def _rows(found: HardwareRefinement) -> tuple[tuple[Cell, ...], ...]:
    return tuple(
        (
            cell(str(step.round)),
            cell(step.plan),
            cell(_origin(step)),
            cell(numbers.share(step.fp8_share)),
            cell(times_text(step.times)),
            cell(
                upper_text(step.upper),
                Tone.PLAIN if step.upper is None else Tone.GOOD if step.is_within else Tone.BAD,
            ),
            cell("yes" if step.is_on_front else "no", Tone.PLAIN if step.is_on_front else Tone.MUTED),
            cell(numbers.seconds(step.build_seconds)),
            cell(step.detail or step.engine),
        )
        for step in found.steps
    )


def _origin(step: Step) -> str:
    if step.origin is Origin.GIVEN_BACK:
        count = sum(len(each.sites) for each in step.returned)
        return f"{step.parent}, {count} given back"
    return step.origin


def _predictions_tables(shown: list[HardwareRefinement]) -> Iterator[Table]:
    columns = (
        Column("Plan"),
        Column("Predicted from"),
        Column("Batch", numeric=True),
        Column("Predicted", numeric=True),
        Column("Measured", numeric=True),
        Column("Error", numeric=True),
    )
    for found in shown:
        rows = tuple(
            (
                cell(step.plan),
                cell(step.predicted_from),
                cell(numbers.count(each.batch)),
                cell(numbers.latency(each.predicted_us)),
                cell(numbers.latency(each.measured_us)),
                cell(numbers.signed_percent(each.error, 1)),
            )
            for step in found.steps
            for each in step.predictions
        )
        if rows:
            yield Table(f"Latency on {found.target}, predicted before it was measured", columns, rows, keys=2)


def _returned_tables(shown: list[HardwareRefinement]) -> Iterator[Table]:
    columns = (
        Column("Plan"),
        Column("Sites given back"),
        Column("KL of what is allowed", numeric=True),
        Column("Expected to save, a row", numeric=True),
    )
    for found in shown:
        rows = tuple(
            (
                cell(step.plan),
                cell(", ".join(each.sites)),
                cell(numbers.share(each.kl)),
                cell(numbers.NONE if each.saved_us is None else f"{1000 * each.saved_us:.3g} ns"),
            )
            for step in found.steps
            for each in step.returned
        )
        if rows:
            yield Table(f"Sites given back on {found.target}, worst first", columns, rows, keys=2)
