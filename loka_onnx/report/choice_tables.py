"""Tables of the choice (routes, rejections) and of refining: every plan built and timed."""

from __future__ import annotations

from collections.abc import Iterator

from loka_onnx.core.evaluation import Rejection, Route, TargetChoice, Why
from loka_onnx.core.intervals import Interval
from loka_onnx.core.refinement import HardwareRefinement, Origin, Step
from loka_onnx.report import numbers
from loka_onnx.report.data import ReportData
from loka_onnx.report.document import Field, Section, Table, Tone, cell, fact, number, prose, table_of, text
from loka_onnx.report.figures import (
    Place,
    Told,
    at,
    counted,
    derive,
    ends,
    formed,
    shown,
    told,
)

_TONES = {Why.BEYOND: Tone.BAD, Why.NOT_CERTIFIED: Tone.BAD, Why.FAILED: Tone.BAD} | dict.fromkeys(
    (Why.UNDECIDED, Why.NOT_RUN, Why.NO_SPEED, Why.OTHER_DEVICE), Tone.WARN
)


def choice_sections(data: ReportData) -> tuple[Section, ...]:
    """Return the choice and its rejections; empty with one candidate only."""
    tables = tuple(_tables(data))
    items = tuple(not_predicted_text(engine, why) for engine, why in data.choice.not_predicted.items())
    if not tables and not items:
        return ()
    paragraphs: list[str] = [
        "The fastest engine whose upper bound is inside the budget is emitted. One that is faster by no more "
        "than the measurement leaves open loses to one in higher precision."
    ]
    if data.choice.median_prediction_error is not None:
        error = shown(numbers.error_percent, data.choice, "median_prediction_error")
        paragraphs.append(
            told("Median error of {} latencies predicted: {}.", counted(data.choice, "predictions"), error)
        )
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


def refinement_sections(data: ReportData) -> tuple[Section, ...]:
    """Return every step of refining; empty without refining."""
    refined = [hardware for hardware in data.refinement.hardware if hardware.anchor]
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
                counted(data.refinement, "predictions"),
            )
        )
    items = [_summary(hardware) for hardware in refined]
    items += [
        not_predicted_text(step.plan, step.not_predicted)
        for hardware in refined
        for step in hardware.steps
        if step.not_predicted
    ]
    tables = tuple(map(_steps, refined))
    return (Section("refinement", "Refinement", tuple(paragraphs), tuple(items), tables),)


def _summary(hardware: HardwareRefinement) -> str:
    best = f"'{hardware.best}' is the fastest" if hardware.best else "none is"
    rounds = derive("max", *(at(step, "round") for step in hardware.steps)) if hardware.steps else None
    return told(
        "{}, {} {}: {} rounds in {}, ended because {}; {} inside the budget. Anchor: {}",
        hardware.target,
        hardware.backend,
        hardware.architecture,
        "no" if rounds is None else formed(numbers.count, rounds),
        shown(numbers.seconds, hardware, "seconds"),
        hardware.ended,
        best,
        hardware.anchor,
    )


def _steps(hardware: HardwareRefinement) -> Table:
    def upper_tone(step: Step) -> Tone:
        return Tone.PLAIN if step.upper is None else Tone.GOOD if step.is_within else Tone.BAD

    fields: tuple[Field[Step], ...] = (
        fact("Round", "round", numbers.count),
        text("Plan", "plan"),
        text("From", _origin),
        fact("FP8 share of FLOPs", "fp8_share", numbers.share),
        number("Latency over the anchor's", lambda step: times_text(step.times)),
        number("Upper bound over budget", lambda step: cell(upper_text(step), upper_tone(step))),
        text("On the front", lambda step: cell("yes") if step.is_on_front else cell("no", Tone.MUTED)),
        fact("Build", "build_seconds", numbers.seconds),
        prose("Outcome", lambda step: step.detail or step.engine),
    )
    caption = f"Plans tried on {hardware.target}"
    return table_of(caption, fields, hardware.steps, lambda step: step.plan == hardware.best)


def _origin(step: Step) -> str:
    if step.origin is Origin.GIVEN_BACK:
        given_back = derive("sum", *(derive("count", Place(each, "sites")) for each in step.returned))
        return told("{}, {} given back", step.parent, formed(numbers.count, given_back))
    return step.origin
