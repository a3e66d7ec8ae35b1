"""Judging the engines of a run: accuracy on the splits that are for it, latency on this machine."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import cached_property, partial
from itertools import count
from math import inf
from pathlib import Path

from loka_onnx.core.engine import BuildStatus, EngineArtifact, EngineSet
from loka_onnx.core.evaluation import Evaluation, EvaluationSet, Latency
from loka_onnx.core.plan import EIGHT_BITS
from loka_onnx.core.progress import JoinedProgress
from loka_onnx.core.rewrite import ModelSplit, Part, SharedUsers
from loka_onnx.engines.device_lock import device_alone
from loka_onnx.engines.registry import get_backend
from loka_onnx.errors import InternalError, StageError
from loka_onnx.evaluation.engines import Split, judge_engine, judge_reference, with_latencies
from loka_onnx.evaluation.latency import (
    Interleaved,
    LatencyOptions,
    MakeInputs,
    Prepare,
    from_host,
    measure_interleaved,
    over_loads,
    prepared,
)
from loka_onnx.evaluation.predictions import Run, any_size
from loka_onnx.pipeline.context import Context
from loka_onnx.pipeline.directory import DocumentStage
from loka_onnx.pipeline.job_results import ElsewhereRuns
from loka_onnx.pipeline.jobs import JOBS, SplitRows
from loka_onnx.pipeline.splitting import LOOKUP, beside_lookup
from loka_onnx.planning.choice import NOISE
from loka_onnx.planning.speed import FIRST_LOADS, LOADS, LOOKS_APART, MOST_LOADS, contenders
from loka_onnx.sessions.host_devices import device_of_architecture, is_target
from loka_onnx.sessions.onnx_session import OnnxSession, SessionOptions
from loka_onnx.sessions.runner import Arrays, Runner, SplitRunner, to_users

PER_LOAD = LatencyOptions(warmup=3, min_repeats=3, max_repeats=30, max_seconds=0.6 / LOADS)
"""Limits of timing one engine at one batch size in one load; 0.6 seconds over the first `LOADS`."""
PATIENCE = 60.0
"""After so many seconds of timing the engines of a kind, none is loaded more than `LOADS` times."""
EVALUATE = DocumentStage("evaluate", "evaluation.json", EvaluationSet)
JOB_TIMED_BYTES = 1 << 26
"""Most bytes of the generated rows that a build job carries for latencies; rows repeat beyond."""


@dataclass(frozen=True)
class Judging:
    """Judges the engines of one run; they may take looked-up rows (`split`) or requests (`users`)."""

    context: Context
    split: ModelSplit | None
    users: SharedUsers | None = None

    @cached_property
    def elsewhere(self) -> ElsewhereRuns:
        """Results of engines on other hosts."""
        return ElsewhereRuns(self.context.path(JOBS))

    def evaluate(self, engines: EngineSet, known: EvaluationSet) -> EvaluationSet:
        """Judge on selection and certification, and time → `evaluation.json`; `known` is not repeated."""
        context = self.context
        reads = {
            **self.reads(engines),
            "elsewhere": self.elsewhere.key(engines.engines),
            "data": [context.splits.selection, context.splits.certification],
            "looks": context.looks,
        }
        return context.directory.document(
            EVALUATE,
            reads,
            lambda: EvaluationSet(self.judge_attempt(engines.engines, 0, known), f"{datetime.now(UTC):%F}"),
            again=lambda earlier: can_be_timed_on_target(earlier.evaluations, engines.engines),
        )

    def reads(self, engines: EngineSet) -> dict[str, object]:
        """Inputs and settings that the evaluation of engines depends on."""
        config = self.context.config
        return {
            "exported": self.context.exported,
            "engines": [[e.id, e.status, e.digest or e.detail] for e in engines.engines],
            "split": () if self.split is None else self.split.digests,
            "data.request": [config.data.request, self.context.candidates],
            "outputs": config.outputs,
            "data.group": config.data.group,
            "data.slices": config.data.slices,
            "batch": config.batch,
            "serving.inputs": config.serving.inputs,
        }

    def judge_attempt(
        self, engines: Sequence[EngineArtifact], number: int, known: EvaluationSet | None = None
    ) -> tuple[Evaluation, ...]:
        """Judge the reference and engines on selection and an attempt's certification, with latencies."""
        splits = (self.context.selection, self.context.attempt(number))
        judged = [evaluation for split in splits for evaluation in self.judge(split, engines, known)]
        beyond = {e.engine for e in judged if e.split == splits[0].name and not e.is_within_budget}
        timed = self.time_engines(engines, beyond)
        timed.latencies.update(self.elsewhere.latencies(engines))
        return tuple(with_latencies(evaluation, timed) for evaluation in judged)

    def judge(
        self, split: Split, engines: Sequence[EngineArtifact], known: EvaluationSet | None = None
    ) -> list[Evaluation]:
        """Judge the reference on a split, then each engine, without latencies; `known` is not repeated."""
        specs, rows = self.context.specs, split.data.rows
        earlier = {e.engine: e for e in (known.evaluations if known else ()) if e.split == split.name}
        run = [e for e in engines if e.was_run and e.id not in earlier]
        progress = JoinedProgress(self.context.progress, (1 + len(run)) * rows)
        reference = self.context.reference(split, progress)
        evaluations = [judge_reference(split, reference, specs)]
        for engine in engines:
            if engine.id in earlier:
                evaluations.append(earlier[engine.id])
                continue
            progress.skip_to_next(rows if engine.was_run else 0)
            with ExitStack() as stack:
                opener = self.elsewhere.opener(engine, split.name) or partial(self.open_engine, engine, stack)
                evaluations.append(judge_engine(engine, split, reference, specs, opener, progress))
        return evaluations

    def open_engine(self, engine: EngineArtifact, stack: ExitStack) -> Run:
        """Load an engine until the stack closes; its inputs are the model's, in batches of any size.

        An ONNX session shares no operator of a batch between threads, and runs several batches instead.
        """
        runner = stack.enter_context(self.open_alone(engine))
        is_streamed = isinstance(runner, OnnxSession)
        if is_streamed:
            runner.close()
            place = self.context.directory.path / (engine.path or Path())
            runner = stack.enter_context(OnnxSession(place, SessionOptions(threads=1)))
        if engine.part is Part.DENSE:
            runner = SplitRunner(stack.enter_context(self.open_lookup()), runner)
        run = any_size(runner.run, self.context.config.batch.min)
        return self.context.in_streams(run) if is_streamed else run

    def open_alone(self, engine: EngineArtifact) -> Runner:
        """Load an engine without the lookup before it."""
        return get_backend(engine.backend).open(engine, self.context.directory.path / (engine.path or Path()))

    def open_lookup(self) -> OnnxSession:
        """Load the lookup half; an InternalError where there is none."""
        if self.split is None or self.split.halves is None:
            raise InternalError("an engine takes looked-up rows, and the model was not cut")
        return OnnxSession(self.split.halves.lookup.path, SessionOptions(threads=self.context.threads))

    @property
    def shared(self) -> tuple[str, ...]:
        """Inputs of engines in request form that have a row for each user; empty where there are none."""
        return () if self.users is None or not self.users.is_used else self.users.inputs

    def taken_by_engines(self, inputs: Arrays, part: Part = Part.WHOLE) -> Arrays:
        """Engine inputs for model inputs: looked-up rows after a cut, users for a part in request form."""
        if part is Part.REQUEST:
            return to_users(inputs, self.shared)
        if self.split is None or self.split.halves is None:
            return inputs
        looked_up = self.open_lookup().run(inputs)
        return {**{name: inputs[name] for name in self.split.halves.passed}, **looked_up}

    def time_engines(self, engines: Sequence[EngineArtifact], beyond: Collection[str] = ()) -> Interleaved:
        """Measure the latency of every engine that runs here, in turns with the others of its kind.

        Where the model was cut, each engine is timed alone, on looked-up rows, and the lookup beside them.
        On another device of the target's architecture it is timed as well, and that does not count. Engines
        `beyond` the budget cannot be chosen, and get no further loads. Failures are of engines that do not
        open or fail, or whose lookup does.
        """
        # The most exact first: they win ties.
        ready = [engine for engine in engines if engine.status is BuildStatus.READY]
        ready.sort(key=lambda engine: sum(site.planned in EIGHT_BITS for site in engine.sites))
        kinds = sorted({_kind(e) for e in ready}, key=str)
        sizes, done = len(kinds) * FIRST_LOADS * len(self.context.config.batch.serve), count(1)
        progress = self.context.progress
        options = replace(PER_LOAD, on_batch=lambda: progress("latency", min(next(done), sizes), sizes))
        progress("latency", 0, sizes)
        merged = Interleaved({}, {})
        for kind in kinds:
            timed = self._time_kind([e for e in ready if _kind(e) == kind], kind, options, beyond)
            merged.latencies.update(beside_lookup(timed.latencies))
            merged.failures.update(timed.failures)
        return merged

    def _time_kind(
        self, engines: Sequence[EngineArtifact], kind: _Kind, options: LatencyOptions, beyond: Collection[str]
    ) -> Interleaved:
        """Time all engines in the first loads, and then those between which the choice is open."""
        serving = self.context.config.serving
        margin = serving.margin if serving.by_batch else inf
        loads: dict[str, list[tuple[Latency, ...]]] = {}
        failures: dict[str, str] = {}
        left, began = list(engines), time.monotonic()
        with device_alone(engines[0].architecture):
            for index in range(MOST_LOADS if kind.counts else FIRST_LOADS):
                if index in {FIRST_LOADS, LOADS}:
                    known = {name: over_loads(each) for name, each in loads.items() if name != LOOKUP}
                    able = {engine.id: known[engine.id] for engine in left if engine.id not in beyond}
                    close = contenders(able, NOISE, margin, LOOKS_APART if index == LOADS else 0.0)
                    is_late = index == LOADS and time.monotonic() - began > PATIENCE
                    left = [engine for engine in left if engine.id in close and not is_late]
                if not left:
                    break
                # Engines take turns in being loaded first, with more memory left.
                turned = [*left[index % len(left) :], *left[: index % len(left)]]
                timed = self._load(turned, kind, options)
                failures |= timed.failures
                for name, latencies in timed.latencies.items():
                    loads.setdefault(name, []).append(latencies)
                left = [engine for engine in left if engine.id not in failures]
        return Interleaved({name: over_loads(each) for name, each in loads.items()}, failures)

    def _load(self, engines: Sequence[EngineArtifact], kind: _Kind, options: LatencyOptions) -> Interleaved:
        """Load engines once and time them in turns; one that does not open costs that engine its latency."""
        failures: dict[str, str] = {}
        subjects: dict[str, Prepare] = {}
        make_inputs: MakeInputs = self.context.requests.generated
        with ExitStack() as stack:
            for engine in engines:
                try:
                    runner = stack.enter_context(self.open_alone(engine))
                    shared = self.shared if engine.part is Part.REQUEST else ()
                    subjects[engine.id] = prepared(runner, self.context.config.serving.inputs, shared)
                except StageError as error:
                    failures[engine.id] = f"it does not open: {error}"
            if subjects and engines[0].part is Part.DENSE:
                try:
                    lookup = stack.enter_context(self.open_lookup())
                except StageError as error:
                    failure = f"the lookup before it does not open: {error}"
                    return Interleaved({}, failures | dict.fromkeys(subjects, failure))
                subjects[LOOKUP] = from_host(lookup.run)
                make_inputs = partial(self._looked_up, lookup)
            if not subjects:
                return Interleaved({}, failures)
            sizes, device = self.context.config.batch.serve, kind.device
            timed = measure_interleaved(subjects, make_inputs, sizes, options, device, kind.counts)
        if LOOKUP in timed.failures:
            failures |= dict.fromkeys(subjects, f"the lookup before it failed {timed.failures[LOOKUP]}")
        failures |= timed.failures
        failures.pop(LOOKUP, None)
        return Interleaved(timed.latencies, failures)

    def _looked_up(self, lookup: Runner, rows: int) -> Arrays:
        inputs = self.context.requests.generated(rows)
        return {**inputs, **lookup.run(inputs)}

    def job_rows(self) -> tuple[SplitRows, ...]:
        """Return selection and certification rows for a build job, ids looked up after a cut."""

        def batches(split: Split) -> Iterator[Arrays]:
            return (self.taken_by_engines(dict(b.inputs)) for b in split.data.batches(split.batch_size))

        return tuple(
            SplitRows(s.name, s.data.rows, s.batch_size, partial(batches, s), s.data.digest)
            for s in (self.context.selection, self.context.attempt(0))
        )

    def timed_rows(self) -> SplitRows:
        """Generated engine inputs for latencies of build jobs: no row repeats, below `JOB_TIMED_BYTES`."""

        def sample(rows: int) -> Arrays:
            return self.taken_by_engines(self.context.requests.sample(rows))

        room = JOB_TIMED_BYTES // max(1, sum(values.nbytes for values in sample(1).values()))
        wanted = LatencyOptions().input_sets * max(self.context.config.batch.serve)
        rows = max(1, min(wanted, room))
        return SplitRows("timed", rows, rows, lambda: iter([sample(rows)]))


def can_be_timed_on_target(evaluations: Sequence[Evaluation], engines: Sequence[EngineArtifact]) -> bool:
    """True if this machine has the target of engines that were timed on a device of another full name."""
    # Run files name an H100 PCIe and an H100 80GB HBM3 alike; a time belongs to one of them.
    timed = {e.engine: {latency.device for latency in e.latencies} for e in evaluations if e.latencies}
    return any(
        device_of_architecture(engine.architecture)
        and is_target(engine.target, engine.architecture)
        and timed[engine.id] != {device_of_architecture(engine.architecture)}
        for engine in engines
        if engine.id in timed and engine.status is BuildStatus.READY and not engine.simulated
    )


@dataclass(frozen=True)
class _Kind:
    """Engines that are timed in turns: of one target, on one device."""

    target: str
    device: str
    is_target: bool
    is_simulated: bool

    @property
    def counts(self) -> bool:
        """True if latencies are those of the target: its own device, nothing simulated."""
        return self.is_target and not self.is_simulated


def _kind(engine: EngineArtifact) -> _Kind:
    device = device_of_architecture(engine.architecture) or engine.target
    return _Kind(engine.target, device, is_target(engine.target, engine.architecture), engine.simulated)
