"""Tables of the choice: routes, rejections, predictions."""

from __future__ import annotations

from collections.abc import Iterator

from loka_onnx.core.evaluation import PredictedTime, Rejection, Route, TargetChoice, Why
from loka_onnx.core.intervals import Interval
from loka_onnx.core.refinement import Step
from loka_onnx.report import numbers
from loka_onnx.report.data import ReportData
from loka_onnx.report.document import Field, Section, Table, Tone, cell, fact, number, prose, table_of, text
from loka_onnx.report.figures import Figure, Told, at, derive, ends, formed, shown, told

_TONES = {Why.BEYOND: Tone.BAD, Why.NOT_CERTIFIED: Tone.BAD, Why.FAILED: Tone.BAD} | dict.fromkeys(
    (Why.UNDECIDED, Why.NOT_RUN, Why.NO_SPEED, Why.OTHER_DEVICE), Tone.WARN
)


def choice_sections(data: ReportData) -> tuple[Section, ...]:
    """Return the choice and its rejections; empty with one candidate only."""
    tables = tuple(_tables(data))
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
    return formed("{:.2f}×".format, at(judged, "upper"), numbers.NOT_MEASURED)


def error_text(predicted: Figure, measured: Figure) -> Told:
    """Return the error of a prediction, ``-5.0 %``."""
    return formed(lambda error: numbers.signed_percent(error, 1), derive("change", predicted, measured))


def _tables(data: ReportData) -> Iterator[Table]:
    loser_fields: tuple[Field[Rejection], ...] = (
        text("Engine", "engine"),
        text("Not chosen because", lambda loser: cell(loser.why, _TONES.get(loser.why, Tone.MUTED))),
        number("Latency over that of the chosen", lambda loser: times_text(loser.times)),
        number("Upper bound over budget", upper_text),
        prose("In full", "reason"),
    )
    for target in data.choice.targets:
        if target.routes:
            caption = f"Which engine takes which requests on {target.target}"
            yield table_of(caption, _route_fields(target), target.routes)
    for target in data.choice.targets:
        if target.losers:
            caption = f"Why the others were not chosen for {target.target}"
            yield table_of(caption, loser_fields, target.losers)
    prediction_fields: tuple[Field[PredictedTime], ...] = (
        text("Engine", "engine"),
        fact("Batch", "batch", numbers.count),
        fact("Predicted", "predicted_us", numbers.latency),
        fact("Measured", "measured_us", numbers.latency),
        number("Error", lambda item: error_text(at(item, "predicted_us"), at(item, "measured_us"))),
    )
    if data.choice.predictions and data.choice.median_prediction_error is not None:
        error = shown(numbers.error_percent, data.choice, "median_prediction_error")
        caption = told("Predicted and measured latency, median error {}", error)
        yield table_of(caption, prediction_fields, data.choice.predictions, keys=2)


def _route_fields(target: TargetChoice) -> tuple[Field[Route], ...]:
    def gain(route: Route) -> str:
        return numbers.NONE if route.times is None else times_text(route.times)

    return (
        number("Rows", lambda route: _sizes(target, target.routes.index(route))),
        text("Engine", "engine"),
        text("Plan", "plan"),
        number("Latency of the main engine over this one's", gain),
    )


def _sizes(target: TargetChoice, index: int) -> str:
    """Return the request sizes of a route: ``up to 8``, ``9 to 64``, ``65 and more``."""
    most = shown(numbers.count, target.routes[index], "batch")
    is_last = index == len(target.routes) - 1
    if index == 0:
        return "every size" if is_last else told("up to {}", most)
    least = formed(numbers.count, derive("next", at(target.routes[index - 1], "batch")))
    return told("{} and more", least) if is_last else told("{} to {}", least, most)
