"""Tables of what was tried: the choice (routes, rejections), refining, corrections, throughput."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from loka_onnx.core.correction import OutputCorrection, PlanCorrections, Trial, Variant
from loka_onnx.core.evaluation import Rejection, Route, TargetChoice, Why
from loka_onnx.core.intervals import Interval
from loka_onnx.core.refinement import HardwareRefinement, Origin, Step
from loka_onnx.core.throughput import Throughput, ThroughputSet
from loka_onnx.report import numbers
from loka_onnx.report.data import ReportData
from loka_onnx.report.document import Cell, Column, Section, Table, Tone, fact, number, prose, table_of, text
from loka_onnx.report.figures import Place, Told, counted, derive, ends, formed, percent_interval, shown, told

_TONES = {Why.BEYOND: Tone.BAD, Why.NOT_CERTIFIED: Tone.BAD, Why.FAILED: Tone.BAD} | dict.fromkeys(
    (Why.UNDECIDED, Why.NOT_RUN, Why.NO_SPEED, Why.OTHER_DEVICE), Tone.WARN
)


def choice_sections(data: ReportData) -> tuple[Section, ...]:
    """Return the section on the choice, rejections and predicted latencies; none with nothing to tell."""
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


def times_text(times: Interval | None, missing: str = numbers.NOT_MEASURED) -> Told:
    """Return a ratio of latencies with its interval, ``1.234× [1.200, 1.270]``."""
    if times is None:
        return Told(missing)
    text = f"{times.value:.3f}×"
    if times.lower == times.upper:
        return Told(text, ends(times)[:1])
    return Told(f"{text} [{times.lower:.3f}, {times.upper:.3f}]", ends(times))


def upper_text(judged: Rejection | Step) -> Told:
    """The upper bound over the budget, ``0.42×``."""
    return formed("{:.2f}×".format, Place(judged, "upper"), numbers.NOT_MEASURED)


def _tables(data: ReportData) -> Iterator[Table]:
    route_columns: tuple[Column[tuple[TargetChoice, int, Route]], ...] = (
        number("Rows", lambda row: _sizes(*row[:2])),
        text("Engine", lambda row: row[2].engine),
        text("Plan", lambda row: row[2].plan),
        number(
            "Latency of the main engine over this one's", lambda row: times_text(row[2].times, numbers.NONE)
        ),
    )
    loser_columns: tuple[Column[Rejection], ...] = (
        text("Engine", "engine"),
        text("Not chosen because", lambda loser: Cell(loser.why, _TONES.get(loser.why, Tone.MUTED))),
        number("Latency over that of the chosen", lambda loser: times_text(loser.times)),
        number("Upper bound over budget", upper_text),
        prose("In full", "reason"),
    )
    for target in data.choice.targets:
        if target.routes:
            caption = f"Which engine takes which requests on {target.target}"
            rows = ((target, place, route) for place, route in enumerate(target.routes))
            yield table_of(caption, route_columns, rows)
    for target in data.choice.targets:
        if target.losers:
            caption = f"Why the others were not chosen for {target.target}"
            yield table_of(caption, loser_columns, target.losers)


def _sizes(target: TargetChoice, index: int) -> str:
    """Return the request sizes of a route: ``up to 8``, ``9 to 64``, ``65 and more``."""
    most = shown(numbers.count, target.routes[index], "batch")
    is_last = index == len(target.routes) - 1
    if index == 0:
        return "every size" if is_last else told("up to {}", most)
    least = formed(numbers.count, derive("next", Place(target.routes[index - 1], "batch")))
    return told("{} and more", least) if is_last else told("{} to {}", least, most)


def refinement_sections(data: ReportData) -> tuple[Section, ...]:
    """Return every step of refining; empty without refining."""
    refined = [hardware for hardware in data.refinement.hardware if hardware.anchor]
    if not refined:
        return ()
    paragraphs = [
        "Plans built and measured in rounds, on the selection split. Latencies are relative to the fastest "
        "engine without FP8, the anchor, which was timed in turns with them. On the front is what no other "
        "engine beats in both latency and upper bound."
    ]
    if data.refinement.median_prediction_error is not None:
        template = (
            "Predicted against measured latency of every plan tried: median error {}, {} times. A prediction "
            "starts from the measured engine with the nearest plan, and adds what kernel times say of the "
            "sites that differ."
        )
        error = shown(numbers.error_percent, data.refinement, "median_prediction_error")
        paragraphs.append(told(template, error, counted(data.refinement, "predictions")))
    steps = (step for hardware in refined for step in hardware.steps if step.not_predicted)
    items = [_summary(hardware) for hardware in refined]
    items += [not_predicted_text(step.plan, step.not_predicted) for step in steps]
    tables = tuple(map(_steps, refined))
    return (Section("refinement", "Refinement", tuple(paragraphs), tuple(items), tables),)


def _summary(hardware: HardwareRefinement) -> str:
    best = f"'{hardware.best}' is the fastest" if hardware.best else "none is"
    rounds = derive("max", *(Place(step, "round") for step in hardware.steps)) if hardware.steps else None
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

    columns: tuple[Column[Step], ...] = (
        fact("Round", "round", numbers.count),
        text("Plan", "plan"),
        text("From", _origin),
        fact("FP8 share of FLOPs", "fp8_share", numbers.share),
        number("Latency over the anchor's", lambda step: times_text(step.times)),
        number("Upper bound over budget", lambda step: Cell(upper_text(step), upper_tone(step))),
        text("On the front", lambda step: Cell("yes") if step.is_on_front else Cell("no", Tone.MUTED)),
        fact("Build", "build_seconds", numbers.seconds),
        prose("Outcome", lambda step: step.detail or step.engine),
    )
    caption = f"Plans tried on {hardware.target}"
    return table_of(caption, columns, hardware.steps, lambda step: step.plan == hardware.best)


def _origin(step: Step) -> str:
    if step.origin is Origin.GIVEN_BACK:
        given_back = derive("sum", *(derive("count", Place(each, "sites")) for each in step.returned))
        return told("{}, {} given back", step.parent, formed(numbers.count, given_back))
    return step.origin


# Corrections ------------------------------------------------------------------------------------------

_Tried = tuple[PlanCorrections, OutputCorrection, Trial]


def corrections_sections(data: ReportData) -> tuple[Section, ...]:
    """Return the corrections of each quantized plan, with their effect on selection; empty without any."""
    plans = data.corrections.plans
    if not plans:
        return ()
    paragraphs = (
        "Constants that are fitted to a plan: the mean error of each site, taken out of the bias behind it, "
        "and what restores the FP32 model's mean on an output. They are kept where they help on the "
        "selection split, in simulation; the tables of engines say what they did to the engine. report.json "
        "has the constant of each channel.",
    )
    rows = [(plan, output, trial) for plan in plans for output in plan.outputs for trial in output.trials]
    judged: Column[_Tried] = number(
        "ΔNE on selection [95 % interval]", lambda row: percent_interval(row[2].delta_ne)
    )

    def constant(row: _Tried) -> str:
        return shown("{:+.4g}".format, row[2], "constant") if row[2].variant.has_constant else numbers.NONE

    columns: tuple[Column[_Tried], ...] = (
        text("Plan", lambda row: row[0].plan),
        text("Output", lambda row: row[1].output),
        text("Corrected", lambda row: row[2].variant),
        text("Kept", lambda row: Cell("yes", Tone.GOOD) if _is_kept(row) else Cell("no", Tone.MUTED)),
        number("Constant", constant),
        number("Mean change of the output", lambda row: shown("{:+.3g}".format, row[2], "mean_error")),
        *((judged,) if any(trial.delta_ne is not None for _, _, trial in rows) else ()),
        number("KL, label-free part", lambda row: percent_interval(row[2].kl)),
        # One sentence for each output: it weighs all variants.
        prose("Why", lambda row: row[1].reason if row[2].variant is Variant.NONE else ""),
    )
    table = table_of("What was tried on each output", columns, rows, _is_kept)
    return (Section("corrections", "Corrections", paragraphs, tuple(_left_alone(plans)), (table,)),)


def _is_kept(row: _Tried) -> bool:
    return row[2].variant is row[1].accepted


def _left_alone(plans: tuple[PlanCorrections, ...]) -> Iterator[str]:
    for plan in plans:
        if plan.failure:
            yield f"{plan.plan} has no corrections, because {plan.failure}"
        for site, reason in plan.left_alone.items():
            yield f"{plan.plan}: {site} has no corrected bias: {reason}"


# Throughput -------------------------------------------------------------------------------------------


def throughput_sections(data: ReportData) -> tuple[Section, ...]:
    """Return every engine under load; empty for none."""
    measurements = data.throughput.measurements
    if not measurements:
        return ()
    paragraphs = (
        "The highest rate of requests whose 99th percentile of latency is under the limit. Requests arrive "
        "at random times (Poisson), whether or not earlier ones are answered, and latency counts from the "
        "arrival that was intended, so that what waits in the queue is in it. The share over the limit is "
        "held under 1 % by its upper end, and the rate was confirmed under other arrivals.",
    )
    items: list[str] = [
        told("{} at batch {}: {}", m.engine, shown(numbers.count, m, "batch"), m.failure)
        for m in measurements
        if m.failure
    ]
    items += _gains(data.throughput)
    table = table_of("Throughput", _COLUMNS, measurements)
    return (Section("throughput", "Throughput", paragraphs, tuple(items), (table,)),)


def _there(name: str, form: Callable[[float], str]) -> Callable[[Throughput], str]:
    """Show a number of the trial at the highest rate."""
    return lambda measured: numbers.NONE if measured.best is None else shown(form, measured.best, name)


def _rate(measured: Throughput) -> Cell:
    answered = shown("{:,.1f}".format, measured, "requests_per_s")
    if not measured.requests_per_s:
        answered = told(numbers.NOT_MEASURED if measured.failure else "none is low enough")
    return Cell(answered, Tone.WARN if measured.best is None else Tone.PLAIN)


def _rows(measured: Throughput) -> str:
    rows = derive("product", Place(measured, "requests_per_s"), Place(measured, "batch"))
    return formed("{:,.0f}".format, rows) if measured.requests_per_s else numbers.NONE


_COLUMNS: tuple[Column[Throughput], ...] = (
    text("Engine", "engine"),
    fact("Batch", "batch", numbers.count),
    text("Is", "role"),
    text("Inputs", lambda measured: f"on the {measured.inputs}"),
    fact("Streams", "streams", numbers.count),
    fact("p99 limit", "p99_limit_us", numbers.latency),
    number("Requests/s", _rate),
    number("Rows/s", _rows),
    number("p50 there", _there("p50_us", numbers.latency)),
    number("p99 there", _there("p99_us", numbers.latency)),
    number("Over the limit, upper end", _there("over_upper", lambda share: f"{100 * share:.2f} %")),
    fact("Without pause", "capacity_per_s", "{:,.1f}".format),
    number("Of the generator, p99", _there("late_us", numbers.latency)),
)


def _gains(throughput: ThroughputSet) -> Iterator[str]:
    by_name = {(m.engine, m.batch): m for m in throughput.measurements}
    for gain in throughput.gains:
        ours, other = (by_name[engine, gain.batch] for engine in (gain.engine, gain.other))
        yield told(
            "{} at batch {}: the chosen engine answers {}× the requests of {}",
            gain.target,
            shown(numbers.count, ours, "batch"),
            formed(
                "{:.2f}".format,
                derive("ratio", Place(ours, "requests_per_s"), Place(other, "requests_per_s")),
            ),
            gain.other,
        )
