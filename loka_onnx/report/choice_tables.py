"""Tables of the choice: who takes which requests, why the others do not, what was predicted."""

from __future__ import annotations

from collections.abc import Iterator

from loka_onnx.core.evaluation import Loser, PredictedTime, TargetChoice, Why
from loka_onnx.core.intervals import Interval
from loka_onnx.report import numbers
from loka_onnx.report.data import ReportData
from loka_onnx.report.document import (
    Cell,
    Column,
    Field,
    Section,
    Table,
    Tone,
    cell,
    number,
    prose,
    table_of,
    text,
)

_TONES = {
    Why.BEYOND: Tone.BAD,
    Why.UNDECIDED: Tone.WARN,
    Why.NOT_CERTIFIED: Tone.BAD,
    Why.FAILED: Tone.BAD,
    Why.NOT_RUN: Tone.WARN,
    Why.NO_SPEED: Tone.WARN,
    Why.OTHER_DEVICE: Tone.WARN,
}


def choice_sections(data: ReportData) -> tuple[Section, ...]:
    """The choice and its losers; nothing where there was one candidate only."""
    tables = (*_routes_tables(data), *_losers_tables(data), *_predictions_tables(data))
    items = tuple(not_predicted_text(engine, why) for engine, why in data.choice.not_predicted.items())
    if not tables and not items:
        return ()
    paragraphs = [
        "The fastest engine whose upper bound is inside the budget is emitted. One that is faster by no more "
        "than the measurement leaves open loses to one in higher precision."
    ]
    if any(target.routes for target in data.choice.targets):
        paragraphs.append(
            "Batch sizes have engines of their own where the whole interval of the gain is above the margin "
            "of the run file. A request between two sizes goes to the engine of the larger."
        )
    return (Section("choice", "Choice", tuple(paragraphs), items, tables),)


def not_predicted_text(name: str, why: str) -> str:
    """Why there is no predicted latency of an engine or plan."""
    return f"No latency is predicted of '{name}': {why}."


def times_text(times: Interval | None) -> str:
    """A ratio of latencies with its interval, ``1.234× [1.200, 1.270]``."""
    if times is None:
        return numbers.NOT_MEASURED
    text = f"{times.value:.3f}×"
    return text if times.lower == times.upper else f"{text} [{times.lower:.3f}, {times.upper:.3f}]"


def upper_text(upper: float | None) -> str:
    """An upper bound over the budget, ``0.42×``."""
    return numbers.NOT_MEASURED if upper is None else f"{upper:.2f}×"


def _routes_tables(data: ReportData) -> Iterator[Table]:
    columns = (
        Column("Rows", numeric=True),
        Column("Engine"),
        Column("Plan"),
        Column("Latency of the main engine over this one's", numeric=True),
    )
    for target in data.choice.targets:
        if target.routes:
            yield Table(f"Which engine takes which requests on {target.target}", columns, _routes(target))


def _routes(target: TargetChoice) -> tuple[tuple[Cell, ...], ...]:
    rows, above = [], 0
    for route in target.routes:
        is_last = route is target.routes[-1]
        size = (
            f"{numbers.count(above + 1)} and more"
            if is_last
            else f"{numbers.count(above + 1)} to {numbers.count(route.batch)}"
        )
        gain = numbers.NONE if route.times is None else times_text(route.times)
        rows.append((cell(size), cell(route.engine), cell(route.plan), cell(gain)))
        above = route.batch
    return tuple(rows)


_LOSER_FIELDS: tuple[Field[Loser], ...] = (
    text("Engine", lambda loser: loser.engine),
    text("Not chosen because", lambda loser: cell(loser.why, _TONES.get(loser.why, Tone.MUTED))),
    number("Latency over that of the chosen", lambda loser: times_text(loser.times)),
    number("Upper bound over budget", lambda loser: upper_text(loser.upper)),
    prose("In full", lambda loser: loser.reason),
)


def _losers_tables(data: ReportData) -> Iterator[Table]:
    for target in data.choice.targets:
        if target.losers:
            caption = f"Why the others were not chosen for {target.target}"
            yield table_of(caption, _LOSER_FIELDS, target.losers)


def _predictions_tables(data: ReportData) -> Iterator[Table]:
    table = predictions_table(data.choice.predictions, data.choice.median_prediction_error)
    if table is not None:
        yield table


_PREDICTION_FIELDS: tuple[Field[PredictedTime], ...] = (
    text("Engine", lambda prediction: prediction.engine),
    number("Batch", lambda prediction: numbers.count(prediction.batch)),
    number("Predicted", lambda prediction: numbers.latency(prediction.predicted_us)),
    number("Measured", lambda prediction: numbers.latency(prediction.measured_us)),
    number("Error", lambda prediction: numbers.signed_percent(prediction.error, 1)),
)


def predictions_table(predictions: tuple[PredictedTime, ...], median_error: float | None) -> Table | None:
    """Predicted against measured times; None where nothing was predicted."""
    if not predictions or median_error is None:
        return None
    caption = f"Predicted and measured latency, median error {numbers.error_percent(median_error)}"
    return table_of(caption, _PREDICTION_FIELDS, predictions, keys=2)
