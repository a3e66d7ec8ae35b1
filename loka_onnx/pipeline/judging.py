"""Judging the engines of a run: accuracy on the splits that are for it, latency on this machine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path

from loka_onnx.core.engine import EngineArtifact, EngineSet
from loka_onnx.core.evaluation import Evaluation, EvaluationSet
from loka_onnx.core.progress import Joined
from loka_onnx.core.split import ModelSplit, Part
from loka_onnx.engines.registry import get_backend
from loka_onnx.errors import InternalError
from loka_onnx.evaluation.engines import Split, judge_engine, judge_reference, with_latencies
from loka_onnx.evaluation.latency import Interleaved, LatencyOptions
from loka_onnx.evaluation.predictions import Run, padded
from loka_onnx.pipeline.context import Context
from loka_onnx.pipeline.directory import Stage
from loka_onnx.pipeline.engine_times import TimingBench, counts_here
from loka_onnx.pipeline.job_results import ElsewhereRuns
from loka_onnx.pipeline.jobs import JOBS, SplitRows
from loka_onnx.sessions.onnx_session import OnnxSession, SessionOptions
from loka_onnx.sessions.runner import Arrays, Runner
from loka_onnx.sessions.split_runner import SplitRunner

EVALUATE = Stage("evaluate", "evaluation.json", EvaluationSet)
JOB_TIMED_BYTES = 1 << 26
"""Most bytes of the generated rows that a build job carries for latencies; rows repeat beyond."""


@dataclass(frozen=True)
class Judging:
    """Judges the engines of one run, those of this host and those that ran elsewhere.

    Where the model was cut at its embeddings (`split`), its engines take looked-up rows.
    """

    context: Context
    split: ModelSplit | None

    @cached_property
    def elsewhere(self) -> ElsewhereRuns:
        """Results of engines on other hosts."""
        return ElsewhereRuns(self.context.path(JOBS))

    def evaluate(self, engines: EngineSet, known: EvaluationSet) -> EvaluationSet:
        """Judge on selection and certification, and time per batch size → `evaluation.json`.

        Args:
            known: Earlier evaluations, which are not repeated.
        """
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
            lambda: EvaluationSet(self.judge_attempt(engines.engines, 0, known)),
            again=lambda earlier: counts_here(earlier.evaluations, engines.engines),
        )

    def reads(self, engines: EngineSet) -> dict[str, object]:
        """Inputs and settings that the evaluation of engines depends on."""
        config = self.context.config
        return {
            "exported": self.context.exported,
            "engines": [[e.id, e.status, e.digest or e.detail] for e in engines.engines],
            "split": () if self.split is None else self.split.digests,
            "outputs": config.outputs,
            "group": config.data.group,
            "slices": config.data.slices,
            "batch": config.batch,
            "inputs": config.serving.inputs,
        }

    def judge_attempt(
        self, engines: Sequence[EngineArtifact], number: int, known: EvaluationSet | None = None
    ) -> tuple[Evaluation, ...]:
        """Judge the reference and engines on selection and on an attempt's certification, and time them.

        Args:
            known: Earlier evaluations, which are not repeated.
        """
        timed = self.time_engines(engines)
        timed.latencies.update(self.elsewhere.latencies(engines))
        splits = (self.context.selection, self.context.attempt(number))
        judged = (evaluation for split in splits for evaluation in self.judge(split, engines, known))
        return tuple(with_latencies(evaluation, timed) for evaluation in judged)

    def judge(
        self, split: Split, engines: Sequence[EngineArtifact], known: EvaluationSet | None = None
    ) -> list[Evaluation]:
        """Judge the reference on a split, then each engine, without latencies; `known` is not repeated."""
        specs, rows = self.context.specs, split.data.rows
        earlier = {e.engine: e for e in (known.evaluations if known else ()) if e.split == split.name}
        run = [e for e in engines if e.was_run and e.id not in earlier]
        progress = Joined(self.context.progress, (1 + len(run)) * rows)
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
        """Load an engine until the stack closes; its inputs are the model's, in batches of any size."""
        runner = stack.enter_context(self.open_alone(engine))
        if engine.part is Part.DENSE:
            runner = SplitRunner(stack.enter_context(self.open_lookup()), runner)
        return padded(runner.run, self.context.config.batch.min)

    def open_alone(self, engine: EngineArtifact) -> Runner:
        """Load an engine without the lookup before it."""
        place = self.context.directory.path / (engine.path or Path())
        return get_backend(engine.backend).open(engine, place)

    def open_lookup(self) -> OnnxSession:
        """Load the lookup half; an InternalError where there is none."""
        if self.split is None or self.split.halves is None:
            raise InternalError("an engine takes looked-up rows, and the model was not cut")
        return OnnxSession(self.split.halves.lookup.path, SessionOptions(threads=self.context.threads))

    def taken_by_engines(self, inputs: Arrays) -> Arrays:
        """Engine inputs for model inputs: looked-up rows in place of ids if the model was cut."""
        if self.split is None or self.split.halves is None:
            return inputs
        looked_up = self.open_lookup().run(inputs)
        return {**{name: inputs[name] for name in self.split.halves.passed}, **looked_up}

    def time_engines(self, engines: Sequence[EngineArtifact]) -> Interleaved:
        """Measure the latency of every engine that runs here, in turns; see `TimingBench.time`."""
        context, generated = self.context, self.context.requests.generated
        opens = (self.open_alone, self.open_lookup)
        return TimingBench(context.config, context.progress, *opens, generated).time(engines)

    def job_rows(self) -> tuple[SplitRows, ...]:
        """Engine inputs of the judged rows."""

        def batches(split: Split) -> Iterator[Arrays]:
            return (self.taken_by_engines(dict(b.inputs)) for b in split.data.batches(split.batch_size))

        return tuple(
            SplitRows(s.name, s.data.rows, s.batch_size, partial(batches, s), s.data.digest)
            for s in (self.context.selection, self.context.attempt(0))
        )

    def timed_rows(self) -> SplitRows:
        """Generated engine inputs that latencies of build jobs are measured on.

        As many as the largest requests take in turns, so that no row repeats, below `JOB_TIMED_BYTES`.
        """

        def sample(rows: int) -> Arrays:
            return self.taken_by_engines(self.context.requests.sample(rows))

        room = JOB_TIMED_BYTES // max(1, sum(values.nbytes for values in sample(1).values()))
        wanted = LatencyOptions().input_sets * max(self.context.config.batch.serve)
        rows = max(1, min(wanted, room))
        return SplitRows("timed", rows, rows, lambda: iter([sample(rows)]))
