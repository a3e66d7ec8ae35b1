"""Reasons why engines were not chosen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from loka_onnx.core.engine import BuildStatus, EngineArtifact
from loka_onnx.core.evaluation import BudgetStatus, Evaluation, Rejection, Why
from loka_onnx.core.intervals import Interval
from loka_onnx.planning.evidence import Evidence
from loka_onnx.planning.speed import Speed

_NOT_BUILT = {
    BuildStatus.DECLINED: Why.DECLINED,
    BuildStatus.FAILED: Why.FAILED,
    BuildStatus.WAITING: Why.NOT_RUN,
}
_ACCURACY = {
    BudgetStatus.WITHIN: "accuracy inside the budget",
    BudgetStatus.BEYOND: "accuracy beyond the budget",
    BudgetStatus.UNDECIDED: "accuracy undecided: the budget lies inside the interval",
}


@dataclass(frozen=True)
class Outcome:
    """The main winner on one piece of hardware, and all engines `chosen` with it.

    `missed` engines were selected and are not inside the budget on certification; `alike` ones are within
    noise of the fastest.
    """

    winner: EngineArtifact
    chosen: frozenset[str]
    missed: tuple[EngineArtifact, ...] = ()
    alike: frozenset[str] = frozenset()


def rejections(
    engines: Sequence[EngineArtifact], outcome: Outcome, speeds: Mapping[str, Speed], evidence: Evidence
) -> tuple[Rejection, ...]:
    """Return every engine of the hardware, unbuilt ones included, that is not emitted, with the reason."""
    return tuple(
        _rejection(engine, outcome, speeds, evidence) for engine in engines if engine.id not in outcome.chosen
    )


def not_built(engine: EngineArtifact) -> Rejection:
    """Reject an engine that has no file."""
    return Rejection(engine.id, _NOT_BUILT[engine.status], f"{engine.status}: {engine.detail}")


def accuracy(evaluation: Evaluation) -> str:
    """Describe an engine's accuracy, with the worst upper bound where it is not inside the budget."""
    status, upper = evaluation.worst_status, evaluation.upper
    if status == BudgetStatus.WITHIN:
        return _ACCURACY[status]
    because = dict.fromkeys(reason for output in evaluation.outputs for reason in output.because)
    said = f"accuracy {status}: {', '.join(because)}" if because else _ACCURACY[status]
    bound = "" if upper is None else f", upper bound {upper:.2f}× the {'limits' if because else 'budget'}"
    return f"{said}{bound}"


def _rejection(
    engine: EngineArtifact, outcome: Outcome, speeds: Mapping[str, Speed], evidence: Evidence
) -> Rejection:
    if not engine.is_built:
        return not_built(engine)
    evaluation = evidence.by_engine.get(engine.id)
    failure = evidence.failure(engine)
    if failure and (evaluation is None or not evaluation.outputs):
        return Rejection(engine.id, Why.FAILED, failure)
    if evaluation is None or not evaluation.outputs:
        why = Why.NOT_MEASURED if engine.was_run else Why.NOT_RUN
        # The detail of a cached engine is its origin, not a reason.
        judged = evaluation.status if engine.was_run and evaluation is not None else ""
        return Rejection(engine.id, why, f"not measured: {judged or engine.detail or engine.status}")
    ours, theirs = speeds.get(engine.id), speeds.get(outcome.winner.id)
    times, compared = None, ""
    if not (engine.simulated or ours is None or theirs is None):
        times = ours.over(theirs)
        compared = (
            f"{_in_percent(ours.ratio(theirs))} by its median, timed elsewhere than the chosen engine: how "
            "sure is not known"
            if times is None
            else _compared(times, ours, theirs)
        )
    if failure:
        why, said = Why.FAILED, f"{failure}; {accuracy(evaluation)}"
    elif engine in outcome.missed:
        certified = evidence.certified.get(engine.id)
        how = accuracy(certified) if certified else "not measured"
        if certified is not None and certified.is_within_budget:
            how += " alone, and not at the error that several engines share"
        why, said = Why.NOT_CERTIFIED, f"selected; on certification {how}"
    else:
        why, rest = _of_judged(engine, evaluation, outcome, compared, evidence)
        if why is Why.SLOWER and times is not None and len(outcome.chosen) > 1:
            rest += " over all batch sizes; at each of them another is as fast or faster"
        said = "; ".join(part for part in (accuracy(evaluation), rest) if part)
    return Rejection(engine.id, why, said, times, evidence.upper(engine))


def _of_judged(
    engine: EngineArtifact, evaluation: Evaluation, outcome: Outcome, compared: str, evidence: Evidence
) -> tuple[Why, str]:
    """Return why an engine was rejected whose accuracy was judged, and the words beside its accuracy."""
    if engine.simulated:
        return Why.SIMULATED, "FP8 is simulated here, its speed never counts"
    if not evaluation.is_within_budget:
        beyond = evaluation.worst_status == BudgetStatus.BEYOND
        return (Why.BEYOND if beyond else Why.UNDECIDED), compared
    if not compared:
        return _unknown_speed(evaluation, is_elsewhere=evidence.was_elsewhere(engine))
    if outcome.missed:
        return Why.NOT_SELECTED, f"{compared}; certification does not choose among the others"
    ours, best = evidence.exactness(engine), evidence.exactness(outcome.winner)
    if engine.id in outcome.alike and ours >= best:
        other = "in higher precision" if ours > best else "as exact, of a smaller median"
        return Why.WITHIN_NOISE, f"{compared}: within noise of an engine {other}"
    return Why.SLOWER, compared


def _unknown_speed(evaluation: Evaluation, *, is_elsewhere: bool) -> tuple[Why, str]:
    """Return why the speed of a judged engine is unknown."""
    if is_elsewhere:
        device = evaluation.latencies[0].device
        return Why.OTHER_DEVICE, f"timed on {device}, which is not the target: its speed does not count"
    counted = [latency.batch for latency in evaluation.latencies if latency.counts_for_choice]
    if not counted or len(counted) < len(evaluation.latencies):
        return Why.NO_SPEED, "its speed on the target was not measured"
    return Why.NO_SPEED, f"it was timed at batch {', '.join(map(str, counted))} only, and failed beyond"


def _in_percent(ratio: float) -> str:
    percent = 100.0 * (ratio - 1.0)
    return f"{'slower' if percent >= 0.0 else 'faster'} by {abs(percent):.1f} %"


def _compared(times: Interval, ours: Speed, theirs: Speed) -> str:
    """Format ``slower by 12.3 % (11.9 to 12.8)``; an interval around 0 has no such number."""
    if times.lower == times.upper:
        return _in_percent(times.value)
    low, high = (100.0 * (end - 1.0) for end in (times.lower, times.upper))
    if low * high >= 0.0:
        ends = sorted(map(abs, (low, high)))
        return f"{_in_percent(times.value)} ({ends[0]:.1f} to {ends[1]:.1f})"
    known = "speed not told apart from that of the chosen engine"
    if ours.looks_slower(theirs) or theirs.looks_slower(ours):
        known = f"{_in_percent(ours.typical_ratio(theirs))} by the median over loads, their mean"
    return f"{known} ({low:+.1f} to {high:+.1f} %)"
