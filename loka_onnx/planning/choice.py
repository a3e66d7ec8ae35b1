"""Choose the engine to emit: the fastest one whose accuracy is inside the budget.

Accuracy is judged by the upper end of its interval, speed by latencies on the target. The selection split
decides. Certification is used once, on rows that took no part in selection. An engine that misses there is
replaced by a lower rung of its own ladder, which selection fixed (`climbing`), then by the exact model; never
by the runner-up, which would make certification a second selection. An engine that is faster only by noise
loses to one in higher precision (`planning.speed`). Where no engine could run on this host, or only on
another device of the architecture, the choice is provisional and says so.

The fallback is the exact model in FP32. Where that was not built, it is the most exact engine without FP8, if
it is inside the budget on both splits. An engine seen outside the budget is never emitted.

**By batch size.** At one size another engine may be faster than the best over all sizes. It costs device
memory and a start, so a size gets its own only where the whole interval of the gain lies above a margin, or
the median over the most loads tells (`planning.speed`). A routed engine that misses on certification loses
its sizes to the main engine.

There is one choice per piece of hardware. A target is one piece, although backends name the device
differently (``cuda``, ``sm90``). Only where one backend builds a target for several architectures is there a
choice for each; an engine of another backend with none of those architectures competes in all of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf

from loka_onnx.core.engine import BuildStatus, EngineArtifact
from loka_onnx.core.evaluation import Choice, EvaluationSet, Rejection, Route, TargetChoice, Why, median_error
from loka_onnx.core.formats import Precision
from loka_onnx.core.plan import PlanSet
from loka_onnx.errors import PlanningError
from loka_onnx.planning.evidence import FASTER_FIRST, Evidence
from loka_onnx.planning.rejections import Outcome, not_built, rejections
from loka_onnx.planning.speed import Speed, not_slower

MEASURED = "measured on the target"
PROVISIONAL = "provisional: accuracy simulated here, speed not measured"
OTHER_DEVICE = "provisional: accuracy measured on another device of the architecture, speed not measured"

NOISE = 0.01
"""Relative difference of latency that is not worth precision, however certain it is."""
MOST_NAMED = 5
"""From so many engines on, a reason counts them."""
MARGIN = 0.03
"""Least gain at a batch size that is worth another engine."""


@dataclass(frozen=True)
class ChoiceOptions:
    """Options of choosing engines.

    With `by_batch` a batch size may get an engine of its own, for a relative gain of at least `margin`.
    Relative differences up to `noise` are ignored, in addition to the spread of the measurement.
    """

    by_batch: bool = True
    margin: float = MARGIN
    noise: float = NOISE


def choose(
    engines: Sequence[EngineArtifact],
    evaluations: EvaluationSet,
    plans: PlanSet,
    options: ChoiceOptions | None = None,
) -> Choice:
    """Choose an engine for each piece of hardware, or several by batch size; PlanningError without one."""
    evidence = Evidence(evaluations, plans)
    predictions, not_predicted = evidence.predictions(engines)
    targets = tuple(contest.choose() for contest in _contests(engines, evidence, options))
    return Choice(targets, predictions, median_error(predictions), not_predicted)


def not_certified(
    engines: Sequence[EngineArtifact],
    evaluations: EvaluationSet,
    plans: PlanSet,
    options: ChoiceOptions | None = None,
) -> tuple[EngineArtifact, ...]:
    """Return each hardware's last quantized attempt where none was certified; arguments as of `choose`."""
    evidence = Evidence(evaluations, plans)
    missed = (contest.missed() for contest in _contests(engines, evidence, options))
    return tuple(engine for engine in missed if engine is not None and evidence.is_quantized(engine))


def _contests(
    engines: Sequence[EngineArtifact], evidence: Evidence, options: ChoiceOptions | None
) -> Iterator[_Measured | _Provisional]:
    """Yield the choice on each piece of hardware, target by target."""
    for target in dict.fromkeys(engine.target for engine in engines):
        for rivals in group_by_hardware([e for e in engines if e.target == target]):
            judged = [e for e in rivals if e.is_built and e.was_run]
            was_elsewhere = any(map(evidence.was_elsewhere, judged))
            if judged and not (was_elsewhere and not any(map(evidence.speed, judged))):
                yield _Measured(rivals, evidence, options or ChoiceOptions())
            else:
                yield _Provisional(rivals, evidence, OTHER_DEVICE if was_elsewhere else PROVISIONAL)


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


class _Measured:
    """The choice on hardware that some engine ran on."""

    def __init__(self, engines: Sequence[EngineArtifact], evidence: Evidence, options: ChoiceOptions) -> None:
        self.engines, self.evidence, self.options = engines, evidence, options
        self.ready = [e for e in engines if e.was_run]
        self.speeds: Mapping[str, Speed] = evidence.speeds(self.ready)
        self.inside = [
            e
            for e in self.ready
            if e.id in self.speeds
            and evidence.is_within_budget(e)
            and not evidence.by_engine[e.id].latency_failure
        ]
        self.competing = [e for e in self.inside if evidence.competes(e)]

    def missed(self) -> EngineArtifact | None:
        """Return the last attempt where the selected engine missed and no lower rung passed."""
        if not self.competing:
            return None
        tried = self.evidence.attempts(self._selected()[0], self.ready)
        return None if any(map(self._holds, tried)) else tried[-1]

    def _holds(self, engine: EngineArtifact) -> bool:
        return engine in self.inside and self.evidence.is_certified(engine)

    def _alike(self, engines: Sequence[EngineArtifact], speeds: Mapping[str, Speed]) -> list[EngineArtifact]:
        """Return the fastest of one or more engines, then those not surely slower than any of them."""
        left = not_slower({engine.id: speeds[engine.id] for engine in engines}, self.options.noise)
        by_id = {engine.id: engine for engine in engines}
        return [by_id[name] for name in left]

    def _pick(self, engines: Sequence[EngineArtifact], speeds: Mapping[str, Speed]) -> EngineArtifact:
        """Return the fastest engine; of those within noise of it, the most exact."""
        alike = self._alike(engines, speeds)
        return min(alike, key=lambda e: (self.evidence.exactness(e), speeds[e.id].per_row_us))

    def _selected(self) -> tuple[EngineArtifact, tuple[Route, ...]]:
        """Return the main engine, and the routes by batch size where one engine does not serve all."""
        main = self._pick(self.competing, self.speeds)
        if not self.options.by_batch:
            return main, ()
        best = {}
        for batch in self.speeds[main.id].batches:
            at_size = {engine.id: self.speeds[engine.id].at(batch) for engine in self.competing}
            # An engine timed apart from the main one has no interval, and gets no size.
            beside = [e for e in self.competing if at_size[e.id].over(at_size[main.id]) is not None]
            best[batch] = self._pick(beside, at_size)
        table = self._table(main, best)
        serving = [engine for engine in self.competing if engine.id in {route.engine for route in table}]
        if not table or main in serving:
            return main, table
        # Beaten at every size: the best serving engine becomes the main one.
        other = self._pick(serving, self.speeds)
        table = self._table(other, best)
        return other if table else main, table

    def _table(self, main: EngineArtifact, best: Mapping[int, EngineArtifact]) -> tuple[Route, ...]:
        """Return the engine of each batch size; empty where the main one serves all."""
        table = []
        for batch, other in best.items():
            ours, theirs = self.speeds[main.id].at(batch), self.speeds[other.id].at(batch)
            gain, margin = ours.over(theirs), self.options.margin
            pays = gain is not None and (gain.lower > 1.0 + margin or ours.looks_slower(theirs, margin))
            if other is not main and pays:
                table.append(Route(batch, other.id, other.plan, gain))
            else:
                table.append(Route(batch, main.id, main.plan))
        return tuple(table) if any(route.engine != main.id for route in table) else ()

    def choose(self) -> TargetChoice:
        if self.competing:
            return self._fastest()
        winner = self._high_precision(self.ready)
        reason = f"no engine with a measured speed is inside the budget: the exact model, {winner.plan}"
        if self.evidence.plan(winner).base is not Precision.FP32:
            reason = (
                "no engine with a measured speed is inside the budget, and FP32 was not built: the most "
                f"exact engine, {winner.plan}, which is inside it"
            )
        return self._choice(Outcome(winner, frozenset({winner.id})), reason)

    def _fastest(self) -> TargetChoice:
        evidence, options = self.evidence, self.options
        winner, table = self._selected()
        same = self._alike(self.competing, self.speeds)
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
        count, fastest, evidence = len(self.competing), same[0], self.evidence
        if winner in same[1:]:
            reason = f"within noise of the fastest of {count} engines inside the budget, '{fastest.plan}'"
            reason += ", and more exact"
        elif count > 1:
            reason = f"fastest of {count} engines inside the budget"
        else:
            reason = "the only engine inside the budget whose speed counts"
        others = [e for e in self.competing if evidence.is_quantized(e)]
        if others and not evidence.is_quantized(winner):
            how = "not surely faster" if any(e in same for e in others) else "slower"
            precisions = dict.fromkeys(p.upper() for e in others for p in evidence.plan(e).precisions)
            reason += f"; {' and '.join(precisions)} {'are' if len(precisions) > 1 else 'is'} {how}"
        return "; ".join([reason, *self._not_competing()])

    def _not_competing(self) -> Iterator[str]:
        """Yield why the other candidates do not compete, those of one reason together."""
        groups: dict[str, list[str]] = {}
        is_one = len({engine.backend for engine in self.engines}) == 1
        for engine in self.engines:
            if engine not in self.competing and self.evidence.competes(engine):
                name = engine.plan if is_one else f"{engine.plan} ({engine.backend})"
                groups.setdefault(self._state(engine), []).append(name)
        for state, names in groups.items():
            yield f"{state}: {', '.join(names) if len(names) < MOST_NAMED else len(names)}"

    def _state(self, engine: EngineArtifact) -> str:
        if not engine.is_built:
            return str(engine.status)
        if not self.evidence.is_within_budget(engine):
            evaluation = self.evidence.by_engine.get(engine.id)
            is_judged = engine.was_run and evaluation is not None and evaluation.outputs
            return "not inside on selection" if is_judged else "not measured"
        if engine.id in self.evidence.certified and not self.evidence.is_certified(engine):
            return "inside on selection, but not on certification"
        return "inside but simulated" if engine.simulated else "inside, of unknown speed"

    def _fall_back(self, missed: EngineArtifact) -> TargetChoice:
        """Replace a selected engine that missed on certification by a lower rung, or by the exact model."""
        tried = self.evidence.attempts(missed, self.ready)
        winner = next((e for e in tried if self._holds(e)), None)
        if winner is not None:
            tried = tried[: tried.index(winner)]
        else:
            others = [e for e in self.ready if e is not missed or self.evidence.is_exact(e)]
            winner = self._high_precision(others)
        # Engines beyond the budget on selection were not compared with certification.
        judged = tuple(e for e in tried if e in self.inside)
        reason = f"{_missed_in_words(judged)}: {winner.plan} instead"
        outcome = Outcome(winner, frozenset({winner.id}), judged)
        return replace(self._choice(outcome, reason), missed=tuple(e.id for e in judged))

    def _high_precision(self, engines: Sequence[EngineArtifact]) -> EngineArtifact:
        """Return the engine in high precision that is closest to the exact model; the faster of two alike."""
        evidence = self.evidence

        def rank(engine: EngineArtifact) -> tuple[int, float]:
            speed = evidence.speed(engine)
            return (
                -FASTER_FIRST.index(evidence.plan(engine).base),
                inf if speed is None else speed.per_row_us,
            )

        able = [e for e in engines if not (evidence.is_quantized(e) or e.simulated or evidence.failure(e))]
        best = min(able, key=rank, default=None)
        # Certification does not select the engine; it only decides whether it passes.
        if best is not None and (
            evidence.is_exact(best) or (evidence.is_within_budget(best) and evidence.is_certified(best))
        ):
            return best
        raise _nothing_to_emit(self.ready, evidence, self.engines[0].target)

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


def check_built(engines: Sequence[EngineArtifact]) -> None:
    """Raise PlanningError for a target of which no engine is built, and none waits for its build job."""
    for target in dict.fromkeys(engine.target for engine in engines):
        mine = [engine for engine in engines if engine.target == target]
        if not any(engine.is_built or engine.status is BuildStatus.WAITING for engine in mine):
            raise _not_built(mine)


def _not_built(engines: Sequence[EngineArtifact]) -> PlanningError:
    reasons: dict[str, list[str]] = {}
    for engine in engines:
        reasons.setdefault(f"{engine.status}: {engine.detail}", []).append(engine.id)
    return PlanningError(
        f"E0702 no engine could be built for '{engines[0].target}'",
        evidence="; ".join(f"{', '.join(ids)} {reason}" for reason, ids in reasons.items()),
        remedy="`loka-onnx doctor` says what this machine can build",
    )


def _nothing_to_emit(engines: Sequence[EngineArtifact], evidence: Evidence, target: str) -> PlanningError:
    return PlanningError(
        f"E0703 no engine of '{target}' can be emitted: FP32 was not built or failed, and no other engine "
        "without FP8 is inside the budget",
        evidence="; ".join(f"{e.id}: {evidence.standing(e)}" for e in engines) or "no engine runs here",
        remedy="why the engine of fp32 was not built is in `engines.json`, how it failed in "
        "`evaluation.json`; mend that, or raise `outputs.budget` to accept what is outside of it",
    )


class _Provisional:
    """The choice by the accuracy of the same plans on this host."""

    def __init__(self, engines: Sequence[EngineArtifact], evidence: Evidence, basis: str) -> None:
        self.engines, self.evidence, self.basis = engines, evidence, basis
        self.built = [e for e in engines if e.is_built]
        # Simulated FP8 would not be fast on the device either.
        self.sound = [e for e in self.built if not e.simulated and not evidence.failure(e)]
        able = [e for e in self.sound if evidence.is_quantized(e) and evidence.plan_status(e.plan)]
        # More FP8 is expected to be faster; then fewer departures from the plan.
        selected = max(
            filter(evidence.competes, able),
            key=lambda e: (evidence.plan(e).fp8_share, -len(e.fallbacks)),
            default=None,
        )
        self.tried = [] if selected is None else evidence.attempts(selected, able)

    def missed(self) -> EngineArtifact | None:
        """Return the last attempt where none passed."""
        return self.tried[-1] if self.tried and all(map(self._has_missed, self.tried)) else None

    def _has_missed(self, engine: EngineArtifact) -> bool:
        return self.evidence.plan_status(engine.plan, "certification") is False

    def choose(self) -> TargetChoice:
        if not self.built:
            raise _not_built(self.engines)
        tried, is_measured = self.tried, self.basis == OTHER_DEVICE
        winner = next((e for e in tried if not self._has_missed(e)), None)
        if winner is not None:
            tried = tried[: tried.index(winner)]
            how = "measured" if is_measured else "simulated"
            reason = f"the {how} accuracy of '{winner.plan}' is inside the budget"
            reason += f"; {_missed_in_words(tried)}" if tried else ""
        else:
            winner = self._high_precision()
            # Another FP8 plan would be selected by the certification rows.
            none = f"no {self.evidence.plans.quantized} plan is inside the budget"
            reason = f"{_missed_in_words(tried) if tried else none}: high precision"
        reason += "; evaluate it on the device before deploying"
        others = tuple(self._rejection(e, winner) for e in self.engines if e is not winner)
        missed = tuple(e.id for e in tried)
        return TargetChoice(winner.target, winner.id, winner.plan, reason, self.basis, others, missed=missed)

    def _high_precision(self) -> EngineArtifact:
        """Return the engine in high precision expected to be fastest, of those not seen beyond the budget."""
        evidence = self.evidence
        able = [
            e
            for e in self.sound
            if evidence.is_exact(e)
            or not (evidence.is_quantized(e) or evidence.plan_status(e.plan) is False or self._has_missed(e))
        ]
        best = min(able, key=lambda e: FASTER_FIRST.index(evidence.plan(e).base), default=None)
        if best is None:
            raise _nothing_to_emit(self.built, evidence, self.engines[0].target)
        return best

    def _rejection(self, engine: EngineArtifact, winner: EngineArtifact) -> Rejection:
        if not engine.is_built:
            return not_built(engine)
        failure = self.evidence.failure(engine)
        if failure:
            return Rejection(engine.id, Why.FAILED, failure)
        why, known = Why.NOT_RUN, "built, not run"
        if engine.was_run:
            why, known = Why.OTHER_DEVICE, "run on another device"
            evaluation = self.evidence.by_engine.get(engine.id)
            if evaluation is not None and evaluation.latencies:
                known = f"run on {evaluation.latencies[0].device}, which is not the target"
        if engine.simulated:
            why = Why.SIMULATED
        reason = f"{known}: {self._why_not(engine, winner)}"
        return Rejection(engine.id, why, reason, upper=self.evidence.upper(engine))

    def _why_not(self, engine: EngineArtifact, winner: EngineArtifact) -> str:
        evidence = self.evidence
        if engine.simulated:
            return "its FP8 is simulated, its speed never counts"
        status = evidence.plan_status(engine.plan)
        if status is False:
            return "the accuracy of its plan on this host is not inside the budget"
        if evidence.is_quantized(engine) and status is None:
            return "the accuracy of its plan was not simulated"
        if engine.plan == winner.plan:
            return f"the same plan as '{winner.id}', which has no more fallbacks"
        if not evidence.is_quantized(winner):
            return f"{evidence.plan(winner).base} is expected to be faster"
        return f"'{winner.plan}' has no less in FP8, at an accuracy inside the budget"
