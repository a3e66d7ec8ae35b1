"""Engine in the loop: plans that follow from what engines on the device were measured to do.

Kernel times and sensitivities predict; an engine fuses, falls back and rounds in its own way. So a handful of
plans is built, timed and judged (blanket FP8, everything safe, safe and fast), and further ones follow from
what was found, in rounds:

* Sites are given back where an engine is faster than the fastest one inside the budget and misses it
  (`planning.ladder`), until its upper bound fits.
* Plans that the search over kernel times proposes beside its best one are tried: they toggle what it is least
  sure of.

Before an engine is built, its latency is predicted from earlier measurements (`planning.expected_latency`).

What is worth a step is on the Pareto front of time and upper bound (`planning.pareto`). Times of rounds
are compared through an engine without FP8, the anchor, which is timed in turns with the others each time.
Accuracy is judged on the selection split, from the engines' own outputs; certification is not looked at here.

A refinement is built by the backend whose FP8 engine is the fastest on that hardware: a build takes minutes,
and a few sites seldom change the order of backends. Every step is in `refinement.json`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from math import inf
from typing import Protocol

from loka_onnx.core.engine import BuildStatus, EngineArtifact
from loka_onnx.core.evaluation import Evaluation, EvaluationSet, median_error
from loka_onnx.core.plan import PlanSet, PrecisionPlan
from loka_onnx.core.refinement import HardwareRefinement, Origin, Refinement, Returned, Step
from loka_onnx.evaluation.engines import with_latencies
from loka_onnx.evaluation.latency import Interleaved
from loka_onnx.planning.choice import group_by_hardware
from loka_onnx.planning.evidence import worst_upper
from loka_onnx.planning.expected_latency import Known, Prediction, predict
from loka_onnx.planning.ladder import Reverted
from loka_onnx.planning.pareto import Point, front
from loka_onnx.planning.speed import Speed


@dataclass(frozen=True)
class RefineLimits:
    """Limits of refining.

    Attributes:
        rounds: Most rounds on one piece of hardware.
        plans: Most plans of one round.
        seconds: No round begins after so much time in rounds, on one piece of hardware.
        noise: Relative difference of latency that counts for nothing.
        clock: Monotonic clock, seconds.
    """

    rounds: int
    plans: int
    seconds: float
    noise: float = 0.01
    clock: Callable[[], float] = field(default=time.monotonic, repr=False)


class Bench(Protocol):
    """Means to build, time and judge engines, and to find further plans."""

    def build(self, plans: Sequence[PrecisionPlan], like: EngineArtifact) -> Sequence[EngineArtifact]:
        """One engine for each plan, by the backend and for the architecture of another engine."""

    def time(self, engines: Sequence[EngineArtifact]) -> Interleaved:
        """Latencies by engine id, all timed in turns, and what ended those that failed."""

    def judge(self, engines: Sequence[EngineArtifact]) -> Sequence[Evaluation]:
        """Each engine on the selection split, without latencies."""

    def from_search(self, target: str) -> Sequence[PrecisionPlan]:
        """Plans for a target that kernel times propose, the most telling first."""

    def revert_sites(self, plan: PrecisionPlan, evaluation: Evaluation, target: str) -> Reverted | None:
        """A plan with fewer sites in FP8, for one whose engine misses the budget; None for none."""


@dataclass(frozen=True)
class Refined:
    """Added plans, their engines (failures included), every evaluation on selection, and all steps."""

    plans: tuple[PrecisionPlan, ...]
    engines: tuple[EngineArtifact, ...]
    evaluations: EvaluationSet
    document: Refinement


@dataclass(frozen=True)
class _Made:
    """A plan before its engine is built."""

    plan: PrecisionPlan
    origin: Origin
    parent: str = ""
    returned: tuple[Returned, ...] = ()


def refine(
    engines: Sequence[EngineArtifact],
    plans: PlanSet,
    bench: Bench,
    limits: RefineLimits,
) -> Refined:
    """Improve plans on every piece of hardware that is here and runs FP8."""
    loops = [
        _Loop(rivals, plans, bench, limits)
        for target in dict.fromkeys(engine.target for engine in engines)
        for rivals in group_by_hardware([engine for engine in engines if engine.target == target])
    ]
    # Ids of refined plans, over all hardware.
    taken = {plan.id for plan in plans.plans}
    names = (name for name in map("refined-{}".format, count(1)) if name not in taken)
    hardware = [refined for loop in loops if (refined := loop.run(names)) is not None]
    added = tuple(made.plan for loop in loops for made in loop.added)
    built = tuple(engine for loop in loops for engine in loop.built)
    judged: dict[str, Evaluation] = {}
    for loop in loops:
        judged.update(loop.judged)
    evaluations = EvaluationSet(tuple(judged.values()))
    predictions = tuple(
        each for each_hardware in hardware for step in each_hardware.steps for each in step.predictions
    )
    document = Refinement(tuple(hardware), predictions, median_error(predictions))
    return Refined(added, built, evaluations, document)


class _Loop:
    """The rounds on one piece of hardware."""

    def __init__(
        self,
        engines: Sequence[EngineArtifact],
        plans: PlanSet,
        bench: Bench,
        limits: RefineLimits,
    ) -> None:
        self._engines = list(engines)
        self._plans = {plan.id: plan for plan in plans.plans}
        self._bench, self._limits = bench, limits
        self._made = {engine.id: _Made(self._plans[engine.plan], Origin.RUN_FILE) for engine in self._engines}
        self._rounds = {engine.id: 0 for engine in self._engines}
        self._times: dict[str, Speed] = {}
        self._anchors: dict[str, Speed] = {}
        self._first: Speed | None = None
        self._predicted: dict[str, Prediction | None] = {}
        self.judged: dict[str, Evaluation] = {}
        self.added: list[_Made] = []
        self.built: list[EngineArtifact] = []

    def run(self, names: Iterator[str]) -> HardwareRefinement | None:
        """Time the engines, then run the rounds; None where no engine of this hardware runs here.

        The result may have no round, and says why.

        Args:
            names: Names of the plans that are added.
        """
        here = [e for e in self._engines if e.status is BuildStatus.READY]
        if not here:
            return None
        quantized = [e for e in here if self._has_fp8(e) and not e.simulated]
        if not quantized or self._limits.rounds == 0:
            reason = (
                "no round was asked for" if quantized else "no engine here runs FP8 at a speed that counts"
            )
            return self._document(here[0].target, None, None, reason, 0.0)
        self._measure([e for e in here if not e.simulated], None)
        exact = [e for e in here if e.id in self._times and not self._has_fp8(e)]
        timed = [e for e in quantized if e.id in self._times]
        if not exact or not timed:
            reason = "no engine without FP8 was timed" if timed else "no engine with FP8 could be timed"
            return self._document(here[0].target, None, None, reason, 0.0)
        anchor = min(exact, key=lambda e: self._times[e.id].per_row_us)
        self._first = self._times[anchor.id]
        self._anchors = dict.fromkeys(self._times, self._first)
        # They were timed in turns: what those with FP8 take must follow from those without.
        self._predicted = {e.id: self._expected(self._plans[e.plan], e, exact) for e in timed}
        like = min(timed, key=lambda e: self._times[e.id].per_row_us)
        began = self._limits.clock()
        ended = self._rounds_of(anchor, like, names, began)
        return self._document(like.target, like, anchor, ended, self._limits.clock() - began)

    def _rounds_of(
        self, anchor: EngineArtifact, like: EngineArtifact, names: Iterator[str], began: float
    ) -> str:
        """Round by round; returns why they ended."""
        for number in range(1, self._limits.rounds + 1):
            if self._limits.clock() - began >= self._limits.seconds:
                return f"the time limit of {self._limits.seconds:g} s was reached"
            wanted = self._wanted(names, like.target)
            if not wanted:
                return "there is nothing left to try"
            known = [e for e in self._engines if e.id in self._anchors]
            expected = [self._expected(made.plan, like, known) for made in wanted]
            built = list(self._bench.build([made.plan for made in wanted], like))
            for made, engine, us in zip(wanted, built, expected, strict=True):
                self._engines.append(engine)
                self._made[engine.id], self._rounds[engine.id] = made, number
                self._predicted[engine.id] = us
                self._plans[made.plan.id] = made.plan
                self.added.append(made)
                self.built.append(engine)
            self._measure([e for e in built if e.status is BuildStatus.READY and not e.simulated], anchor)
        return f"the limit of {self._limits.rounds} rounds was reached"

    def _measure(self, engines: Sequence[EngineArtifact], anchor: EngineArtifact | None) -> None:
        """Time and judge engines, those of a later round beside the anchor."""
        if not engines:
            return
        timed = self._bench.time([*engines, *([anchor] if anchor is not None else [])])
        beside = None if anchor is None else _speed(timed, anchor)
        for engine, evaluation in zip(engines, self._bench.judge(engines), strict=True):
            self.judged[engine.id] = with_latencies(evaluation, timed)
            speed = _speed(timed, engine)
            if speed is not None:
                self._times[engine.id] = speed
                if beside is not None:
                    self._anchors[engine.id] = beside

    # What to try -----------------------------------------------------------------------------------

    def _wanted(self, names: Iterator[str], target: str) -> list[_Made]:
        """Plans worth building next, the most promising first; nothing that was tried before."""
        seen = {_assignment(made.plan) for made in self._made.values()}
        found: list[_Made] = []
        searched = (_Made(plan, Origin.SEARCH) for plan in self._bench.from_search(target))
        for made in (*self._given_back(target), *searched):
            if len(found) == self._limits.plans:
                break
            if made.plan.fp8_sites and _assignment(made.plan) not in seen:
                seen.add(_assignment(made.plan))
                found.append(replace(made, plan=replace(made.plan, id=next(names))))
        return found

    def _given_back(self, target: str) -> Iterator[_Made]:
        """From engines on the front that miss the budget and are faster than all that do not."""
        fastest = min((self._time(e) for e in self._engines if self._is_within(e)), default=inf)
        by_name = {engine.id: engine for engine in self._engines}
        for point in self._front():
            engine = by_name[point.name]
            too_slow = point.time >= fastest * (1.0 - self._limits.noise)
            if too_slow or self._is_within(engine) or not self._has_fp8(engine):
                continue
            plan = self._plans[engine.plan]
            given = self._bench.revert_sites(plan, self.judged[engine.id], target)
            if given is not None:
                yield _Made(given.plan, Origin.GIVEN_BACK, plan.id, given.returned)

    # What was found --------------------------------------------------------------------------------

    def _has_fp8(self, engine: EngineArtifact) -> bool:
        return bool(self._plans[engine.plan].fp8_sites)

    def _is_within(self, engine: EngineArtifact) -> bool:
        evaluation = self.judged.get(engine.id)
        return evaluation is not None and evaluation.is_within_budget and engine.id in self._anchors

    def _time(self, engine: EngineArtifact) -> float:
        """Time over that of the anchor."""
        return self._times[engine.id].ratio(self._anchors[engine.id])

    def _expected(
        self, plan: PrecisionPlan, like: EngineArtifact, among: Iterable[EngineArtifact]
    ) -> Prediction | None:
        """Latency of an engine, at the pace of the first round, from others of its maker and architecture."""
        known = []
        for engine in among:
            if (engine.backend, engine.architecture) == (like.backend, like.architecture):
                pace = self._pace(engine.id)
                us = {b: x.p50_us / pace[b] for b, x in self._times[engine.id].latencies.items() if b in pace}
                known.append(Known(engine.id, self._plans[engine.plan], us))
        return predict(plan, known, like.target)

    def _pace(self, engine: str) -> Mapping[int, float]:
        """Anchor's time in the round of an engine over its time in the first round, by batch size."""
        beside = self._anchors.get(engine)
        if beside is None or self._first is None:
            return {}
        first = self._first.latencies
        return {b: x.p50_us / first[b].p50_us for b, x in beside.latencies.items() if b in first}

    def _front(self) -> tuple[Point, ...]:
        points = []
        for engine in self._engines:
            upper = worst_upper(self.judged.get(engine.id))
            if engine.id in self._anchors and engine.id in self._times and upper is not None:
                points.append(Point(engine.id, self._time(engine), upper))
        return front(points)

    def _document(
        self,
        target: str,
        like: EngineArtifact | None,
        anchor: EngineArtifact | None,
        ended: str,
        seconds: float,
    ) -> HardwareRefinement:
        on_front = {point.name for point in self._front()}
        inside = [engine for engine in self._engines if self._is_within(engine)]
        best = min(inside, key=self._time, default=None)
        return HardwareRefinement(
            target=target,
            architecture="" if like is None else like.architecture,
            backend="" if like is None else like.backend,
            anchor="" if anchor is None else anchor.id,
            steps=tuple(self._step(engine, engine.id in on_front) for engine in self._engines),
            best="" if best is None else best.plan,
            ended=ended,
            seconds=seconds,
        )

    def _step(self, engine: EngineArtifact, is_on_front: bool) -> Step:
        made, speed = self._made[engine.id], self._times.get(engine.id)
        predicted, pace = self._predicted.get(engine.id), self._pace(engine.id)
        evaluation = self.judged.get(engine.id)
        anchor = self._anchors.get(engine.id)
        detail = engine.detail
        if evaluation is not None and not evaluation.outputs:
            detail = evaluation.status
        elif evaluation is not None and evaluation.latency_failure:
            detail = f"failed while it was timed: {evaluation.latency_failure}"
        return Step(
            round=self._rounds[engine.id],
            plan=engine.plan,
            engine=engine.id,
            origin=made.origin,
            parent=made.parent,
            returned=made.returned,
            fp8_sites=len(made.plan.fp8_sites),
            fp8_share=made.plan.fp8_share,
            status=engine.status,
            detail=detail,
            build_seconds=engine.build_seconds,
            latency_us={} if speed is None else {str(b): item.p50_us for b, item in speed.latencies.items()},
            predicted_us={}
            if predicted is None
            else {str(b): us * pace.get(b, 1.0) for b, us in predicted.us.items()},
            predicted_from="" if predicted is None else predicted.start,
            times=None if speed is None or anchor is None else speed.over(anchor),
            upper=worst_upper(evaluation),
            is_within=evaluation is not None and evaluation.is_within_budget,
            is_on_front=is_on_front,
            not_predicted="" if predicted is None else predicted.why_not,
        )


def _speed(timed: Interleaved, engine: EngineArtifact) -> Speed | None:
    """Latencies of an engine; None if it failed at a batch size or was timed on another device."""
    latencies = timed.latencies.get(engine.id, ())
    if not latencies or engine.id in timed.failures:
        return None
    if not all(latency.counts_for_choice for latency in latencies):
        return None
    return Speed({latency.batch: latency for latency in latencies})


def _assignment(plan: PrecisionPlan) -> tuple[frozenset[str], str]:
    """Key that identifies a plan: sites in FP8 and base precision."""
    return frozenset(plan.fp8_sites), plan.base
