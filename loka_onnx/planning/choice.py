"""Choose the engine to emit: the fastest one whose accuracy is inside the budget.

Accuracy is judged by the upper end of its interval, speed by latencies on the target. The selection split
decides. Certification is used once, on rows that took no part in selection. An engine that misses there is
replaced by a lower rung of its own ladder, which selection fixed (`climbing`: at most three certification
attempts, which share its error), then by the exact model; never by the runner-up, which would make
certification a second selection. High precision always competes: where FP8 is slower or outside the budget,
the best high-precision engine is emitted, and FP32 when nothing is inside. An engine that is faster only by
noise loses to one in higher precision (`planning.speed`). Where no engine could run on this host, or only on
another device of the architecture, the choice is provisional and says so.

The fallback is the exact model in FP32. Where that was not built, it is the most exact engine without FP8, if
it is inside the budget on both splits. An engine seen outside the budget is never emitted: a user accepts it
with a larger budget.

Where different engines are fastest at different batch sizes, by more than a margin, each size gets its own
(`planning.routing`). The main engine is the best over all sizes. A routed engine that misses on certification
loses its sizes to the main engine; this was fixed before certification, so nothing is selected there.

There is one choice per piece of hardware. A target is one piece, on which all its engines compete, although
backends name the device differently (``cuda``, ``sm90``). Only where one backend builds a target for several
architectures is there a choice for each; an engine of another backend with none of those architectures
competes in all of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from loka_onnx.core.engine import EngineArtifact
from loka_onnx.core.evaluation import Choice, EvaluationSet, Rejection, Route, TargetChoice, Why, median_error
from loka_onnx.core.formats import Precision
from loka_onnx.core.plan import PlanSet
from loka_onnx.errors import PlanningError
from loka_onnx.planning.evidence import FASTER_FIRST, Evidence
from loka_onnx.planning.rejections import Outcome, not_built, rejections
from loka_onnx.planning.routing import alike, main_of, pick, routes
from loka_onnx.planning.speed import Speed

MEASURED = "measured on the target"
PROVISIONAL = "provisional: accuracy simulated here, speed not measured"
OTHER_DEVICE = "provisional: accuracy measured on another device of the architecture, speed not measured"

NOISE = 0.01
"""Relative difference of latency that is not worth precision, however surely it was measured."""
MARGIN = 0.03
"""Least gain at a batch size that is worth another engine."""


@dataclass(frozen=True)
class ChoiceOptions:
    """Options of choosing engines; a negative margin is a ValueError.

    Attributes:
        by_batch: Whether batch sizes may get engines of their own.
        margin: Least relative gain at a batch size that is worth another engine.
        noise: Relative difference that counts for nothing, beside the spread of the measurement.
    """

    by_batch: bool = True
    margin: float = MARGIN
    noise: float = NOISE

    def __post_init__(self) -> None:
        if self.margin < 0.0 or self.noise < 0.0:
            raise ValueError(f"margins are at least 0: {self}")


def choose(
    engines: Sequence[EngineArtifact],
    evaluations: EvaluationSet,
    plans: PlanSet,
    options: ChoiceOptions | None = None,
) -> Choice:
    """Choose one engine for each piece of hardware, or several by batch size.

    `engines` are all candidates, declined and failed ones included. Raises PlanningError if a target has no
    engine that could be emitted.
    """
    evidence, options = Evidence(evaluations, plans), options or ChoiceOptions()
    predictions = evidence.predictions(engines)
    targets = tuple(_choose_one(rivals, evidence, options) for rivals in _contests(engines))
    return Choice(targets, predictions, median_error(predictions), evidence.not_predicted(engines))


def not_certified(
    engines: Sequence[EngineArtifact],
    evaluations: EvaluationSet,
    plans: PlanSet,
    options: ChoiceOptions | None = None,
) -> tuple[EngineArtifact, ...]:
    """Return, per piece of hardware, the last certification attempt with FP8 where no attempt passed.

    Arguments are those of `choose`.
    """
    evidence, options = Evidence(evaluations, plans), options or ChoiceOptions()
    missed: list[EngineArtifact | None] = []
    for rivals in _contests(engines):
        if _was_measured(rivals, evidence):
            missed.append(_Measured(rivals, evidence, options).missed())
            continue
        tried = _provisional_attempts([e for e in rivals if e.is_built], evidence)
        is_missed = tried and all(evidence.certified_status(e.plan) is False for e in tried)
        missed.append(tried[-1] if is_missed else None)
    return tuple(engine for engine in missed if engine is not None and evidence.has_fp8(engine))


def _contests(engines: Sequence[EngineArtifact]) -> Iterator[list[EngineArtifact]]:
    """Yield the engines that compete, target by target and one group per piece of hardware."""
    for target in dict.fromkeys(engine.target for engine in engines):
        yield from group_by_hardware([e for e in engines if e.target == target])


def _was_measured(engines: Sequence[EngineArtifact], evidence: Evidence) -> bool:
    """True if some engine ran here, on the target or with nothing known of another device."""
    judged = [e for e in engines if e.is_built and e.was_run]
    was_elsewhere = any(map(evidence.was_elsewhere, judged))
    return bool(judged) and not (was_elsewhere and not any(map(evidence.speed, judged)))


def group_by_hardware(engines: Sequence[EngineArtifact]) -> list[list[EngineArtifact]]:
    """Return the engines of one target in groups that compete, one group per piece of hardware."""
    architectures: dict[str, dict[str, None]] = {}
    for engine in engines:
        architectures.setdefault(engine.backend, {})[engine.architecture] = None
    hardware = dict.fromkeys(name for names in architectures.values() if len(names) > 1 for name in names)
    if not hardware:
        return [list(engines)]
    return [
        [e for e in engines if e.architecture == name or e.architecture not in hardware] for name in hardware
    ]


def _choose_one(
    engines: Sequence[EngineArtifact], evidence: Evidence, options: ChoiceOptions
) -> TargetChoice:
    built = [e for e in engines if e.is_built]
    if not built:
        raise PlanningError(
            f"E0702 no engine could be built for '{engines[0].target}'",
            evidence="; ".join(f"{e.id} {e.status}: {e.detail}" for e in engines),
            remedy="`loka-onnx doctor` says what this machine can build",
        )
    if _was_measured(engines, evidence):
        return _Measured(engines, evidence, options).choose()
    was_elsewhere = any(evidence.was_elsewhere(e) for e in built if e.was_run)
    return _choose_provisional(engines, built, evidence, OTHER_DEVICE if was_elsewhere else PROVISIONAL)


class _Measured:
    """The choice on hardware that some engine ran on."""

    def __init__(self, engines: Sequence[EngineArtifact], evidence: Evidence, options: ChoiceOptions) -> None:
        self.engines, self.evidence, self.options = engines, evidence, options
        self.ready = [e for e in engines if e.was_run]
        self.speeds: Mapping[str, Speed] = evidence.speeds(self.ready)
        self.inside = [
            e
            for e in self.ready
            if e.id in self.speeds and evidence.is_within_budget(e) and not evidence.timing_failure(e)
        ]
        self.competing = [e for e in self.inside if evidence.competes(e)]

    def missed(self) -> EngineArtifact | None:
        """Return the last attempt where the selected engine missed on certification
        and no lower rung passed.
        """
        if not self.competing:
            return None
        tried = self.evidence.attempts(self._selected()[0], self.ready)
        return None if any(map(self._holds, tried)) else tried[-1]

    def _holds(self, engine: EngineArtifact) -> bool:
        return engine in self.inside and self.evidence.is_certified(engine)

    def _selected(self) -> tuple[EngineArtifact, tuple[Route, ...]]:
        """Return the main engine, and the routes by batch size where one engine does not serve all."""
        evidence, options = self.evidence, self.options
        table: tuple[Route, ...] = ()
        if options.by_batch:
            table = routes(self.competing, self.speeds, evidence, options.noise, options.margin)
        if table:
            main = main_of(table)
            return next(e for e in self.competing if e.id == main), table
        return pick(self.competing, self.speeds, evidence, options.noise), table

    def choose(self) -> TargetChoice:
        if self.competing:
            return self._fastest()
        winner = _high_precision(self.ready, self.evidence, self.engines[0].target)
        reason = f"no engine with a measured speed is inside the budget: the exact model, {winner.plan}"
        if self.evidence.base(winner) is not Precision.FP32:
            reason = (
                "no engine with a measured speed is inside the budget, and FP32 was not built: the most "
                f"exact engine, {winner.plan}, which is inside it"
            )
        return self._choice(Outcome(winner, frozenset({winner.id})), reason)

    def _fastest(self) -> TargetChoice:
        evidence, options = self.evidence, self.options
        winner, table = self._selected()
        same = alike(self.competing, self.speeds, options.noise)
        by_id = {engine.id: engine for engine in self.competing}
        if not evidence.is_certified(winner):
            return self._fall_back(winner)
        # All emitted engines share the error of one certificate; the main engine alone has all of it.
        routed = dict.fromkeys(by_id[route.engine] for route in table)
        together = len(routed)
        if not evidence.is_certified(winner, together):
            missed = tuple(engine for engine in routed if engine is not winner)
        else:
            missed = tuple(engine for engine in routed if not evidence.is_certified(engine, together))
        table = _revert_routes(table, winner, missed)
        reason = self._reason(winner, same)
        if table:
            count = len({route.engine for route in table})
            gain = f"{100 * options.margin:g} %"
            reason += f"; {count} engines by batch size, each faster there by more than {gain}"
        reason += "".join(
            f"; '{engine.plan}' gave its batch sizes back: it is not inside the budget on certification"
            f"{f' at the error that {together} engines share' if evidence.is_certified(engine) else ''}"
            for engine in missed
        )
        chosen = frozenset({winner.id, *(route.engine for route in table)})
        # With routes, the main engine need not be among the fastest over all sizes.
        close = frozenset(e.id for e in same) if winner in same else frozenset()
        return self._choice(Outcome(winner, chosen, missed, close), reason, table)

    def _reason(self, winner: EngineArtifact, same: Sequence[EngineArtifact]) -> str:
        count = f"{len(self.competing)} engines whose upper bound is inside the budget"
        fastest, evidence = same[0], self.evidence
        if winner in same[1:]:
            reason = f"within noise of the fastest of {count}, '{fastest.plan}', and more exact"
        elif len(self.competing) > 1:
            reason = f"fastest of {count}"
        else:
            reason = "the only engine whose upper bound is inside the budget"
        fp8 = [e for e in self.competing if evidence.has_fp8(e)]
        if not fp8:
            return f"{reason}; none of them runs {evidence.plans.quantized}"
        if evidence.has_fp8(winner):
            return reason
        how = "no faster" if any(e in same for e in fp8) else "slower"
        return f"{reason}; {evidence.plans.quantized} is {how}"

    def _fall_back(self, missed: EngineArtifact) -> TargetChoice:
        """Replace a selected engine that missed on certification by a lower rung, or by the exact model."""
        tried = self.evidence.attempts(missed, self.ready)
        winner = next((e for e in tried if self._holds(e)), None)
        if winner is not None:
            tried = tried[: tried.index(winner)]
        else:
            others = [e for e in self.ready if e is not missed or self.evidence.is_exact(e)]
            winner = _high_precision(others, self.evidence, missed.target, missed)
        # Engines beyond the budget on selection were not compared with certification.
        judged = tuple(e for e in tried if e in self.inside)
        reason = f"{_missed_in_words(judged)}: {winner.plan} instead"
        outcome = Outcome(winner, frozenset({winner.id}), judged)
        return replace(self._choice(outcome, reason), missed=tuple(e.id for e in judged))

    def _choice(self, outcome: Outcome, reason: str, table: tuple[Route, ...] = ()) -> TargetChoice:
        winner = outcome.winner
        others = rejections(self.engines, outcome, self.speeds, self.evidence)
        return TargetChoice(winner.target, winner.id, winner.plan, reason, MEASURED, others, table)


def _missed_in_words(missed: Sequence[EngineArtifact]) -> str:
    selected, *lower = (f"'{engine.plan}'" for engine in missed)
    also = f", nor {'is' if len(lower) == 1 else 'are'} {' and '.join(lower)}" if lower else ""
    return f"{selected} was selected and is not inside the budget on certification{also}"


def _revert_routes(
    table: tuple[Route, ...], main: EngineArtifact, missed: Sequence[EngineArtifact]
) -> tuple[Route, ...]:
    """Return the routes with missed engines replaced by the main one; empty where one engine is left."""
    gone = {engine.id for engine in missed}
    kept = tuple(
        replace(r, engine=main.id, plan=main.plan, times=None) if r.engine in gone else r for r in table
    )
    return kept if any(route.engine != main.id for route in kept) else ()


def _high_precision(
    engines: Sequence[EngineArtifact], evidence: Evidence, target: str, missed: EngineArtifact | None = None
) -> EngineArtifact:
    """Return the engine without FP8 that is closest to the exact model; the faster of two alike.

    `missed` is the selected engine that missed on certification. Raises PlanningError if every candidate was
    seen outside the budget.
    """

    def rank(engine: EngineArtifact) -> tuple[int, float]:
        speed = evidence.speed(engine)
        precision = FASTER_FIRST.index(evidence.base(engine))
        return (-precision, float("inf") if speed is None else speed.per_row_us)

    able = [e for e in engines if not evidence.has_fp8(e) and not e.simulated and not evidence.failure(e)]
    best = min(able, key=rank, default=None)
    # Certification does not select the engine; it only decides whether it passes.
    if best is not None and (
        evidence.is_exact(best) or (evidence.is_within_budget(best) and evidence.is_certified(best))
    ):
        return best
    seen = {engine.id: engine for engine in (*engines, *([missed] if missed is not None else []))}
    raise _nothing_to_emit(seen.values(), evidence, target)


def _nothing_to_emit(engines: Iterable[EngineArtifact], evidence: Evidence, target: str) -> PlanningError:
    return PlanningError(
        f"E0703 no engine of '{target}' can be emitted: FP32 was not built or failed, and no other engine "
        "without FP8 is inside the budget",
        evidence="; ".join(f"{e.id}: {evidence.standing(e)}" for e in engines) or "no engine runs here",
        remedy="why the engine of fp32 was not built is in `engines.json`, how it failed in "
        "`evaluation.json`; mend that, or raise `outputs.budget` to accept what is outside of it",
    )


def _choose_provisional(
    engines: Sequence[EngineArtifact], built: Sequence[EngineArtifact], evidence: Evidence, basis: str
) -> TargetChoice:
    """Choose by the accuracy of the same plans on this host."""
    sound = _sound(built, evidence)
    tried = _provisional_attempts(built, evidence)
    selected = tried[0] if tried else None
    how = "measured" if basis == OTHER_DEVICE else "simulated"
    holding = next((e for e in tried if evidence.certified_status(e.plan) is not False), None)
    if holding is not None:
        winner, tried = holding, tried[: tried.index(holding)]
        reason = f"the {how} accuracy of '{winner.plan}' is inside the budget"
        reason += f"; {_missed_in_words(tried)}" if tried else ""
    else:
        able = [e for e in sound if not evidence.has_fp8(e) and not _is_outside(e, evidence)]
        # None was seen outside the budget, except possibly the exact model, which comes last.
        best = min(able, key=lambda e: FASTER_FIRST.index(evidence.base(e)), default=None)
        if best is None:
            raise _nothing_to_emit(built, evidence, engines[0].target)
        winner = best
        # Another FP8 plan would be selected by the certification rows.
        reason = (
            f"no {evidence.plans.quantized} plan is inside the budget "
            f"{'as measured' if how == 'measured' else 'in simulation'}: high precision"
            if selected is None
            else f"{_missed_in_words(tried)}: high precision"
        )
    reason += "; evaluate it on the device before deploying"
    others = tuple(_provisional_rejection(e, winner, evidence) for e in engines if e is not winner)
    missed = tuple(e.id for e in tried)
    return TargetChoice(winner.target, winner.id, winner.plan, reason, basis, others, missed=missed)


def _provisional_attempts(built: Sequence[EngineArtifact], evidence: Evidence) -> list[EngineArtifact]:
    """Return the selected engine and its replacements, among engines that cannot run here."""
    sound = _sound(built, evidence)
    fp8 = [e for e in sound if evidence.has_fp8(e) and evidence.plan_status(e.plan)]
    competing = (e for e in fp8 if evidence.competes(e))
    # More FP8 is expected to be faster; then fewer departures from the plan.
    selected = max(competing, key=lambda e: (evidence.fp8_share(e), -len(e.fallbacks)), default=None)
    return [] if selected is None else evidence.attempts(selected, fp8)


def _sound(built: Sequence[EngineArtifact], evidence: Evidence) -> list[EngineArtifact]:
    """Return engines without failure or simulated FP8, which would not be fast on the device either."""
    return [e for e in built if not e.simulated and not evidence.failure(e)]


def _is_outside(engine: EngineArtifact, evidence: Evidence) -> bool:
    """True if a plan other than the exact model's was seen outside the budget."""
    if evidence.is_exact(engine):
        return False
    return evidence.plan_status(engine.plan) is False or evidence.certified_status(engine.plan) is False


def _provisional_rejection(engine: EngineArtifact, winner: EngineArtifact, evidence: Evidence) -> Rejection:
    if not engine.is_built:
        return not_built(engine)
    failure = evidence.failure(engine)
    if failure:
        return Rejection(engine.id, Why.FAILED, failure)
    why, known = Why.NOT_RUN, "built, not run"
    if engine.was_run:
        why, known = Why.OTHER_DEVICE, "run on another device"
        evaluation = evidence.by_engine.get(engine.id)
        if evaluation is not None and evaluation.latencies:
            known = f"run on {evaluation.latencies[0].device}, which is not the target"
    if engine.simulated:
        why = Why.SIMULATED
    reason = f"{known}: {_why_not_provisional(engine, winner, evidence)}"
    return Rejection(engine.id, why, reason, upper=evidence.upper(engine))


def _why_not_provisional(engine: EngineArtifact, winner: EngineArtifact, evidence: Evidence) -> str:
    if engine.simulated:
        return "its FP8 is simulated, its speed never counts"
    status = evidence.plan_status(engine.plan)
    if status is False:
        return "the accuracy of its plan on this host is not inside the budget"
    if evidence.has_fp8(engine) and status is None:
        return "the accuracy of its plan was not simulated"
    if engine.plan == winner.plan:
        return f"the same plan as '{winner.id}', which has no more fallbacks"
    if not evidence.has_fp8(winner):
        return f"{evidence.base(winner)} is expected to be faster"
    return f"'{winner.plan}' has no less in FP8, at an accuracy inside the budget"
