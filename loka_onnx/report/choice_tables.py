"""Tables of the choice: routes, rejections, predictions."""

from __future__ import annotations

from collections.abc import Iterator

from loka_onnx.core.evaluation import PredictedTime, Rejection, TargetChoice, Why
from loka_onnx.core.intervals import Interval
from loka_onnx.core.refinement import Step
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
from loka_onnx.report.figures import Figure, Told, at, derive, ends, formed, shown, told

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
    """Return the choice and its rejections; empty with one candidate only."""
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
    """Return why an engine or plan has no predicted latency."""
    return f"No latency is predicted of '{name}': {why}."


def times_text(times: Interval | None) -> Told:
    """Return a ratio of latencies with its interval, ``1.234× [1.200, 1.270]``."""
    if times is None:
        return Told(numbers.NOT_MEASURED)
    text = f"{times.value:.3f}×"
    if times.lower == times.upper:
        return Told(text, ends(times)[:1])
    return Told(f"{text} [{times.lower:.3f}, {times.upper:.3f}]", ends(times))


def upper_text(judged: Rejection | Step) -> Told:
    """The upper bound over the budget, ``0.42×``."""
    return formed(lambda upper: f"{upper:.2f}×", at(judged, "upper"), numbers.NOT_MEASURED)


def error_text(predicted: Figure, measured: Figure) -> Told:
    """Return the error of a prediction, ``-5.0 %``."""
    return formed(lambda error: numbers.signed_percent(error, 1), derive("change", predicted, measured))


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
    rows = []
    for place, route in enumerate(target.routes):
        gain = numbers.NONE if route.times is None else times_text(route.times)
        rows.append((cell(_sizes(target, place)), cell(route.engine), cell(route.plan), cell(gain)))
    return tuple(rows)


def _sizes(target: TargetChoice, place: int) -> str:
    """Return the request sizes of a route: ``up to 8``, ``9 to 64``, ``65 and more``."""
    most = shown(numbers.count, target.routes[place], "batch")
    is_last = place == len(target.routes) - 1
    if place == 0:
        return "every size" if is_last else told("up to {}", most)
    least = formed(numbers.count, derive("next", at(target.routes[place - 1], "batch")))
    return told("{} and more", least) if is_last else told("{} to {}", least, most)


_LOSER_FIELDS: tuple[Field[Rejection], ...] = (
    text("Engine", lambda loser: loser.engine),
    text("Not chosen because", lambda loser: cell(loser.why, _TONES.get(loser.why, Tone.MUTED))),
    number("Latency over that of the chosen", lambda loser: times_text(loser.times)),
    number("Upper bound over budget", upper_text),
    prose("In full", lambda loser: loser.reason),
)


def _losers_tables(data: ReportData) -> Iterator[Table]:
    for target in data.choice.targets:
        if target.losers:
            caption = f"Why the others were not chosen for {target.target}"
            yield table_of(caption, _LOSER_FIELDS, target.losers)


def _predictions_tables(data: ReportData) -> Iterator[Table]:
    if data.choice.predictions and data.choice.median_prediction_error is not None:
        error = shown(numbers.error_percent, data.choice, "median_prediction_error")
        caption = told("Predicted and measured latency, median error {}", error)
        yield table_of(caption, _PREDICTION_FIELDS, data.choice.predictions, keys=2)


_PREDICTION_FIELDS: tuple[Field[PredictedTime], ...] = (
    text("Engine", lambda prediction: prediction.engine),
    number("Batch", lambda prediction: shown(numbers.count, prediction, "batch")),
    number("Predicted", lambda prediction: shown(numbers.latency, prediction, "predicted_us")),
    number("Measured", lambda prediction: shown(numbers.latency, prediction, "measured_us")),
    number("Error", lambda item: error_text(at(item, "predicted_us"), at(item, "measured_us"))),
)
