"""Engine in the loop: plans that follow from what engines on the device were measured to do.

Kernel times and sensitivities predict; an engine fuses, falls back and rounds in its own way. So a handful of
plans is built, timed and judged (everything in eight bits, everything safe, safe and fast), and further ones
follow from what was found, in rounds:

* Sites are given back where an engine is faster than the fastest one inside the budget and misses it
  (`planning.ladder`), until its upper bound fits.
* Plans that the search over kernel times proposes beside its best one are tried: they toggle what it is least
  sure of.

Before an engine is built, its latency is predicted from earlier measurements (`planning.expected_latency`).

Steps start on the Pareto front of time and upper bound (`expected_latency`). Times of rounds are compared
through an engine in high precision, the anchor, which is timed in turns with the others each time. Accuracy
is judged on the selection split, from the engines' own outputs; certification is not looked at here.

A refinement is built by the backend whose quantized engine is the fastest on that hardware: a build takes
minutes, and a few sites seldom change the order of backends.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, count
from math import inf

from loka_onnx.config.schema import RefineConfig
from loka_onnx.core.engine import BuildStatus, EngineArtifact
from loka_onnx.core.evaluation import Evaluation, EvaluationSet, median_error
from loka_onnx.core.formats import Precision
from loka_onnx.core.plan import MIXED, PlanSet, PrecisionPlan
from loka_onnx.core.refinement import (
    REFINED_NAME,
    HardwareRefinement,
    Origin,
    RefinedRun,
    Refinement,
    Returned,
    Step,
)
from loka_onnx.evaluation.engines import with_latencies
from loka_onnx.evaluation.latency import Interleaved
from loka_onnx.pipeline.candidates import Additions
from loka_onnx.pipeline.directory import DocumentStage
from loka_onnx.pipeline.emission import Results
from loka_onnx.pipeline.judging import Judging, can_be_timed_on_target
from loka_onnx.pipeline.ladder_stage import Climbing
from loka_onnx.pipeline.plans import search_plans
from loka_onnx.planning.choice import NOISE, group_by_hardware
from loka_onnx.planning.expected_latency import Known, Point, Prediction, front, predict_latency
from loka_onnx.planning.ladder import Ladder, Reverted
from loka_onnx.planning.speed import Speed


@dataclass(frozen=True)
class Rounds:
    """Every step of refining, and what it added to the run: engines with failures, evaluations of all."""

    document: Refinement
    added: RefinedRun


REFINE = DocumentStage("refine", {"document": "refinement.json", "added": REFINED_NAME}, Rounds)


def refine_engines(judging: Judging, results: Results) -> Results:
    """Rounds of further plans on devices here that run FP8 or INT8 → `refinement.json`, `refined.json`.

    The results have what was added, and what was judged of any engine on selection.
    """
    context, engines = judging.context, results.engines.engines
    settings = context.config.refine
    is_worth = any(
        engine.status is BuildStatus.READY
        and not engine.simulated
        and results.plans.plan(engine.plan).quantized_sites
        for engine in engines
    )
    if settings.rounds == 0 or not is_worth:
        context.directory.forget(REFINE.name)
        return results
    bench = Bench(judging, results)

    def make() -> Rounds:
        rounds = refine(engines, results.plans, bench, settings)
        return replace(rounds, added=bench.additions.completed(rounds.added))

    reads = {
        **judging.reads(results.engines),
        "plans": results.plans,
        "corrections": results.corrections,
        "data": [context.splits.calibration, context.splits.selection],
        "refine": settings,
        "plan": context.config.plan,
    }
    rounds = context.directory.document(
        REFINE,
        reads,
        make,
        lambda written: [*written, *bench.additions.files],
        # Plans that were refined on another device are refined again on a target's own.
        again=lambda earlier: can_be_timed_on_target(earlier.added.evaluations.evaluations, engines),
    )
    return replace(results.with_added(rounds.added), refinement=rounds.document)


class Bench:
    """Builds, times and judges engines with the means of a run, and finds further plans."""

    def __init__(self, judging: Judging, results: Results) -> None:
        self._judging, self._results = judging, results
        self.additions = Additions(judging, results.modified)

    def build(self, plans: Sequence[PrecisionPlan], like: EngineArtifact) -> Sequence[EngineArtifact]:
        """One engine for each plan, by the backend and for the architecture of another engine."""
        prefix = f"{like.target}-{like.backend}-{like.architecture}"
        built = self.additions.build(plans, [f"{prefix}-{plan.id}" for plan in plans])
        by_plan = {engine.plan: engine for engine in built}
        return [by_plan[plan.id] for plan in plans]

    def time(self, engines: Sequence[EngineArtifact]) -> Interleaved:
        """Latencies by engine id, all timed in turns, and what ended those that failed."""
        return self._judging.time_engines(engines)

    def judge(self, engines: Sequence[EngineArtifact]) -> Sequence[Evaluation]:
        """Each engine on the selection split, without latencies."""
        return self._judging.judge(self._judging.context.selection, engines)[1:]

    @cached_property
    def _searched(self) -> Sequence[PrecisionPlan]:
        return search_plans(self._judging.context, self._results.modified, self._results.profile)

    @cached_property
    def _ladders(self) -> dict[str, Ladder]:
        results = self._results
        climbing = Climbing(self._judging.context, results.modified, results.profile)
        mixed = {plan.kind for plan in results.plans.plans} & {MIXED}
        return {kind: climbing.start(kind).ladder for kind in (*results.profile.precisions, *mixed)}

    def from_search(self, target: str) -> Sequence[PrecisionPlan]:
        """Plans for a target that kernel times propose, the most telling first."""
        return [plan for plan in self._searched if plan.device == target]

    def revert_sites(self, plan: PrecisionPlan, evaluation: Evaluation, target: str) -> Reverted | None:
        """A plan with fewer quantized sites, for one whose engine misses the budget; None for none."""
        if not plan.quantized_sites:
            return None
        return self._ladders[plan.kind].revert_sites(plan, evaluation, target)


@dataclass(frozen=True)
class _Proposal:
    plan: PrecisionPlan
    origin: Origin = Origin.RUN_FILE
    parent: str = ""
    returned: tuple[Returned, ...] = ()


@dataclass
class _Trial:
    """An engine in the loop."""

    engine: EngineArtifact
    proposal: _Proposal
    round: int = 0
    predicted: Prediction | None = None
    speed: Speed | None = None
    anchor: Speed | None = None
    evaluation: Evaluation | None = None

    @property
    def plan(self) -> PrecisionPlan:
        return self.proposal.plan

    @property
    def is_quantized(self) -> bool:
        return bool(self.plan.quantized_sites)

    @property
    def per_row_us(self) -> float:
        return inf if self.speed is None else self.speed.per_row_us

    @property
    def time(self) -> float | None:
        """Time over that of the anchor."""
        return None if self.speed is None or self.anchor is None else self.speed.ratio(self.anchor)

    @property
    def is_within(self) -> bool:
        return self.evaluation is not None and self.evaluation.is_within_budget

    def step(self, pace: Mapping[int, float], is_on_front: bool) -> Step:
        engine, plan, speed, predicted = self.engine, self.plan, self.speed, self.predicted
        detail = engine.detail
        if self.evaluation is not None and not self.evaluation.outputs:
            detail = self.evaluation.status
        elif self.evaluation is not None and self.evaluation.latency_failure:
            detail = f"failed while it was timed: {self.evaluation.latency_failure}"
        predicted_us = {} if predicted is None else predicted.us
        return Step(
            round=self.round,
            plan=engine.plan,
            engine=engine.id,
            origin=self.proposal.origin,
            parent=self.proposal.parent,
            returned=self.proposal.returned,
            fp8_sites=len(plan.quantized_sites),
            fp8_share=plan.fp8_share,
            status=engine.status,
            detail=detail,
            build_seconds=engine.build_seconds,
            latency_us={} if speed is None else {str(b): item.p50_us for b, item in speed.latencies.items()},
            predicted_us={str(b): us * pace.get(b, 1.0) for b, us in predicted_us.items()},
            predicted_from="" if predicted is None else predicted.start,
            times=None if speed is None or self.anchor is None else speed.over(self.anchor),
            upper=None if self.evaluation is None else self.evaluation.upper,
            is_within=self.is_within,
            is_on_front=is_on_front,
            not_predicted="" if predicted is None else predicted.why_not,
        )


def refine(
    engines: Sequence[EngineArtifact],
    plans: PlanSet,
    bench: Bench,
    limits: RefineConfig,
    clock: Callable[[], float] = time.monotonic,
) -> Rounds:
    """Improve plans on every piece of hardware that is here and runs FP8 or INT8; `clock` tells seconds."""
    loops = [
        _Loop(rivals, plans, bench, limits, clock)
        for target in dict.fromkeys(engine.target for engine in engines)
        for rivals in group_by_hardware([engine for engine in engines if engine.target == target])
    ]
    # Ids of refined plans, over all hardware.
    taken = {plan.id for plan in plans.plans}
    names = (name for name in map("refined-{}".format, count(1)) if name not in taken)
    hardware = tuple(refined for loop in loops if (refined := loop.run(names)) is not None)
    added = [trial for loop in loops for trial in loop.trials if trial.round]
    judged = {t.engine.id: t.evaluation for loop in loops for t in loop.judged if t.evaluation is not None}
    predictions = tuple(each for part in hardware for step in part.steps for each in step.predictions)
    return Rounds(
        Refinement(hardware, predictions, median_error(predictions)),
        RefinedRun(
            tuple(trial.plan for trial in added),
            tuple(trial.engine for trial in added),
            evaluations=EvaluationSet(tuple(judged.values())),
        ),
    )


class _Loop:
    """The rounds on one piece of hardware."""

    def __init__(
        self,
        engines: Sequence[EngineArtifact],
        plans: PlanSet,
        bench: Bench,
        limits: RefineConfig,
        clock: Callable[[], float],
    ) -> None:
        self._bench, self._limits, self._clock = bench, limits, clock
        self._first: Speed | None = None
        self.trials = [_Trial(engine, _Proposal(plans.plan(engine.plan))) for engine in engines]
        self.judged: list[_Trial] = []

    def run(self, names: Iterator[str]) -> HardwareRefinement | None:
        """Time the engines, then run the rounds, if any; None where no engine of this hardware runs here."""
        here = [t for t in self.trials if t.engine.status is BuildStatus.READY]
        if not here:
            return None
        real = [t for t in here if not t.engine.simulated]
        target = here[0].engine.target
        if not any(t.is_quantized for t in real):
            return self._document(target, "no engine here runs FP8 or INT8 at a speed that counts")
        self._judge(real)
        if not self._has_prospects(real, target):
            return self._document(target, "no other plan may follow from these engines")
        self._time(real, None)
        exact = [t for t in here if t.speed is not None and not t.is_quantized]
        timed = [t for t in real if t.speed is not None and t.is_quantized]
        if not timed:
            return self._document(target, "no engine with FP8 or INT8 could be timed")
        if not exact:
            return self._document(target, "no engine in high precision was timed")
        anchor = min(exact, key=lambda t: t.per_row_us)
        self._first = anchor.speed
        for trial in self.trials:
            trial.anchor = None if trial.speed is None else self._first
        # Predicted from engines in high precision alone, because all were timed in turns.
        for trial in timed:
            trial.predicted = self._expected(trial.plan, trial.engine, exact)
        like = min(timed, key=lambda t: t.per_row_us).engine
        began = self._clock()
        ended = self._run_rounds(anchor, like, names, began)
        return self._document(target, ended, like, anchor.engine.id, self._clock() - began)

    def _run_rounds(self, anchor: _Trial, like: EngineArtifact, names: Iterator[str], began: float) -> str:
        """Round by round; returns why they ended."""
        for number in range(1, self._limits.rounds + 1):
            if self._clock() - began >= self._limits.seconds:
                return f"the time limit of {self._limits.seconds:g} s was reached"
            wanted = self._wanted(names, like.target)
            if not wanted:
                return "there is nothing left to try"
            known = [t for t in self.trials if t.anchor is not None]
            expected = [self._expected(proposal.plan, like, known) for proposal in wanted]
            built = self._bench.build([proposal.plan for proposal in wanted], like)
            parts = zip(built, wanted, expected, strict=True)
            new = [_Trial(engine, proposal, number, us) for engine, proposal, us in parts]
            self.trials += new
            ready = [t for t in new if t.engine.status is BuildStatus.READY and not t.engine.simulated]
            self._judge(ready)
            self._time(ready, anchor)
        return f"the limit of {self._limits.rounds} rounds was reached"

    def _has_prospects(self, trials: Sequence[_Trial], target: str) -> bool:
        """True if a new plan may follow: less than one that misses its budget, or one of the search."""
        seen = {_assignment(trial.plan) for trial in self.trials}
        reverted = (
            self._bench.revert_sites(trial.plan, trial.evaluation, target)
            for trial in trials
            if trial.evaluation is not None and trial.evaluation.upper is not None and not trial.is_within
        )
        plans = chain((each.plan for each in reverted if each is not None), self._bench.from_search(target))
        return any(plan.quantized_sites and _assignment(plan) not in seen for plan in plans)

    def _judge(self, trials: Sequence[_Trial]) -> None:
        if trials:
            evaluations = self._bench.judge([trial.engine for trial in trials])
            for trial, evaluation in zip(trials, evaluations, strict=True):
                trial.evaluation = evaluation
        self.judged += trials

    def _time(self, trials: Sequence[_Trial], anchor: _Trial | None) -> None:
        """Time judged engines, those of a later round beside the anchor."""
        if not trials:
            return
        engines = [trial.engine for trial in trials]
        timed = self._bench.time([*engines, *([] if anchor is None else [anchor.engine])])
        beside = None if anchor is None else _speed(timed, anchor.engine)
        for trial in trials:
            if trial.evaluation is not None:
                trial.evaluation = with_latencies(trial.evaluation, timed)
            trial.speed = _speed(timed, trial.engine)
            trial.anchor = None if trial.speed is None else beside

    def _wanted(self, names: Iterator[str], target: str) -> list[_Proposal]:
        """Plans worth building next, the most promising first; nothing that was tried before."""
        seen = {_assignment(trial.plan) for trial in self.trials}
        wanted: list[_Proposal] = []
        searched = (_Proposal(plan, Origin.SEARCH) for plan in self._bench.from_search(target))
        for proposal in (*self._given_back(target), *searched):
            if len(wanted) == self._limits.plans:
                break
            if proposal.plan.quantized_sites and _assignment(proposal.plan) not in seen:
                seen.add(_assignment(proposal.plan))
                wanted.append(replace(proposal, plan=replace(proposal.plan, id=next(names))))
        return wanted

    def _given_back(self, target: str) -> Iterator[_Proposal]:
        """From engines on the front that miss the budget and are faster than all that do not."""
        fastest = min((t.time for t in self.trials if t.is_within and t.time is not None), default=inf)
        by_name = {trial.engine.id: trial for trial in self.trials}
        for point in self._front():
            trial = by_name[point.name]
            too_slow = point.time >= fastest * (1.0 - NOISE)
            if too_slow or trial.is_within or not trial.is_quantized or trial.evaluation is None:
                continue
            if (reverted := self._bench.revert_sites(trial.plan, trial.evaluation, target)) is not None:
                yield _Proposal(reverted.plan, Origin.GIVEN_BACK, trial.plan.id, reverted.returned)

    def _expected(
        self, plan: PrecisionPlan, like: EngineArtifact, among: Iterable[_Trial]
    ) -> Prediction | None:
        """Latency of an engine, at the pace of the first round, from others of its maker and architecture."""
        known = []
        for trial in among:
            engine, pace = trial.engine, self._pace(trial)
            if trial.speed and (engine.backend, engine.architecture) == (like.backend, like.architecture):
                us = {b: x.p50_us / pace[b] for b, x in trial.speed.latencies.items() if b in pace}
                known.append(Known(engine.id, trial.plan, us))
        return predict_latency(plan, known, like.target)

    def _pace(self, trial: _Trial) -> Mapping[int, float]:
        """Anchor's time in the round of an engine over its time in the first round, by batch size."""
        if trial.anchor is None or self._first is None:
            return {}
        first = self._first.latencies
        return {b: x.p50_us / first[b].p50_us for b, x in trial.anchor.latencies.items() if b in first}

    def _front(self) -> tuple[Point, ...]:
        return front(
            [
                Point(trial.engine.id, trial.time, trial.evaluation.upper)
                for trial in self.trials
                if trial.time is not None
                and trial.evaluation is not None
                and trial.evaluation.upper is not None
            ]
        )

    def _document(
        self,
        target: str,
        ended: str,
        like: EngineArtifact | None = None,
        anchor: str = "",
        seconds: float = 0.0,
    ) -> HardwareRefinement:
        on_front = {point.name for point in self._front()}
        inside = [(t.time, t.plan.id) for t in self.trials if t.is_within and t.time is not None]
        return HardwareRefinement(
            target=target,
            architecture="" if like is None else like.architecture,
            backend="" if like is None else like.backend,
            anchor=anchor,
            steps=tuple(t.step(self._pace(t), t.engine.id in on_front) for t in self.trials),
            best=min(inside, key=lambda item: item[0], default=(0.0, ""))[1],
            ended=ended,
            seconds=seconds,
        )


def _speed(timed: Interleaved, engine: EngineArtifact) -> Speed | None:
    """Latencies of an engine; None if it failed at a batch size or was timed on another device."""
    latencies = timed.latencies.get(engine.id, ())
    if engine.id in timed.failures or not all(latency.counts_for_choice for latency in latencies):
        return None
    return Speed({latency.batch: latency for latency in latencies}) if latencies else None


def _assignment(plan: PrecisionPlan) -> tuple[frozenset[tuple[str, Precision]], str]:
    """Key that identifies a plan: quantized sites with their precisions, and base precision."""
    return frozenset((d.site, d.precision) for d in plan.decisions if d.precision.is_quantized), plan.base
