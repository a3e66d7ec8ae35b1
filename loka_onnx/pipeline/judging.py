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
from loka_onnx.core.rewrite import ModelSplit, Part
from loka_onnx.engines.registry import get_backend
from loka_onnx.evaluation.engines import Split, judge_engine, judge_reference, with_latencies
from loka_onnx.evaluation.latency import Interleaved, LatencyOptions
from loka_onnx.evaluation.predictions import Run, padded
from loka_onnx.pipeline.context import Context
from loka_onnx.pipeline.directory import Stage
from loka_onnx.pipeline.engine_times import TimingBench, counts_here
from loka_onnx.pipeline.job_results import ElsewhereRuns
from loka_onnx.pipeline.jobs import SplitRows
from loka_onnx.pipeline.sample import Arrays
from loka_onnx.pipeline.splitting import open_lookup, taken_by_engines, with_lookup
from loka_onnx.sessions.runner import Runner

EVALUATE = Stage("evaluate", "evaluation.json", EvaluationSet)
JOB_TIMED_BYTES = 1 << 26
"""Most bytes of the generated rows that a build job carries for latencies; rows repeat beyond."""


@dataclass(frozen=True)
class Judging:
    """Judges the engines of one run, those of this host and those that ran elsewhere.

    Attributes:
        split: The model cut at its embeddings, where it was: its engines take looked-up rows.
    """

    context: Context
    split: ModelSplit | None

    @cached_property
    def elsewhere(self) -> ElsewhereRuns:
        """Results of engines on other hosts."""
        return ElsewhereRuns(self.context.directory.path)

    def evaluate(self, engines: EngineSet, known: EvaluationSet) -> EvaluationSet:
        """Judge on selection and certification, and time per batch size → `evaluation.json`.

        Args:
            known: Earlier evaluations, which are not repeated.
        """
        context = self.context

        def judge() -> EvaluationSet:
            return EvaluationSet(
                self._timed((context.selection, context.attempt(0)), engines.engines, known=known)
            )

        reads = {
            **self.reads(engines),
            "elsewhere": self.elsewhere.key(engines.engines),
            "data": [context.splits.selection, context.splits.certification],
            "looks": context.looks,
        }
        return context.directory.document(
            EVALUATE, reads, judge, again=lambda earlier: counts_here(earlier.evaluations, engines.engines)
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

    def judge_attempt(self, engines: Sequence[EngineArtifact], number: int) -> tuple[Evaluation, ...]:
        """Judge the engines of an attempt (from 0) on selection and certification, and time them."""
        splits = (self.context.selection, self.context.attempt(number))
        return tuple(e for e in self._timed(splits, engines) if e.engine in {item.id for item in engines})

    def _timed(
        self, splits: Sequence[Split], engines: Sequence[EngineArtifact], known: EvaluationSet | None = None
    ) -> tuple[Evaluation, ...]:
        timed = self.time_engines(engines)
        timed.latencies.update(self.elsewhere.latencies(engines))
        return tuple(
            with_latencies(evaluation, timed)
            for split in splits
            for evaluation in self.judge(split, engines, known)
        )

    def judge_on_selection(self, engines: Sequence[EngineArtifact]) -> list[Evaluation]:
        """Judge each engine on the selection split, without latencies."""
        return self.judge(self.context.selection, engines)[1:]

    def judge(
        self, split: Split, engines: Sequence[EngineArtifact], known: EvaluationSet | None = None
    ) -> list[Evaluation]:
        """Judge the reference on a split, then each engine, without latencies.

        Args:
            known: Earlier evaluations, which are not repeated.
        """
        specs, rows = self.context.specs, split.data.rows
        earlier = {(e.engine, e.split): e for e in (known.evaluations if known is not None else ())}
        run = [e for e in engines if e.was_run and (e.id, split.name) not in earlier]
        progress = Joined(self.context.progress, (1 + len(run)) * rows)
        reference = self.context.reference(split, progress)
        evaluations = [judge_reference(split, reference, specs)]
        for engine in engines:
            if (engine.id, split.name) in earlier:
                evaluations.append(earlier[engine.id, split.name])
                continue
            progress.skip_to_next(rows if engine.was_run else 0)
            with ExitStack() as stack:
                opener = self.elsewhere.opener(engine, split.name) or partial(self.open_engine, engine, stack)
                evaluations.append(judge_engine(engine, split, reference, specs, opener, progress))
        return evaluations

    def open_engine(self, engine: EngineArtifact, stack: ExitStack) -> Run:
        """Load an engine until the stack closes; its inputs are the model's, in batches of any size."""
        runner = self.open_alone(engine)
        if engine.part is Part.DENSE:
            runner = with_lookup(runner, self.split, self.context.threads)
        return padded(stack.enter_context(runner).run, self.context.config.batch.min)

    def open_alone(self, engine: EngineArtifact) -> Runner:
        """Load an engine without the lookup before it."""
        place = self.context.directory.path / (engine.path or Path())
        return get_backend(engine.backend).open(engine, place)

    def time_engines(self, engines: Sequence[EngineArtifact]) -> Interleaved:
        """Measure the latency of every engine that runs here, in turns; see `TimingBench.time`."""
        context = self.context
        bench = TimingBench(
            context.config,
            context.progress,
            self.open_alone,
            partial(open_lookup, self.split, context.threads),
            context.requests.generated,
        )
        return bench.time(engines)

    # Rows of build jobs ----------------------------------------------------------------------------

    def taken_by_engines(self, inputs: Arrays) -> Arrays:
        """Engine inputs for model inputs: looked-up rows in place of ids if the model was cut."""
        return taken_by_engines(inputs, self.split, self.context.threads)

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
