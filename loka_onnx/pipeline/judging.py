"""Judging the engines of a run: accuracy on the splits that are for it, latency on this machine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path

from loka_onnx.config import RunConfig
from loka_onnx.core.artifact import ModelArtifact
from loka_onnx.core.engine import EngineArtifact, EngineSet
from loka_onnx.core.evaluation import Evaluation, EvaluationSet
from loka_onnx.core.progress import Joined, Progress
from loka_onnx.core.split import Part
from loka_onnx.data import Splits
from loka_onnx.engines.registry import get_backend
from loka_onnx.evaluation.engines import (
    REQUEST_ROWS,
    Reference,
    Split,
    judge_engine,
    judge_reference,
    predict_reference,
    with_latencies,
)
from loka_onnx.evaluation.latency import Interleaved, LatencyOptions
from loka_onnx.evaluation.predictions import Run, padded
from loka_onnx.numerics.intervals import CONFIDENCE
from loka_onnx.pipeline.directory import RunDirectory, Stage
from loka_onnx.pipeline.engine_times import TimingBench, counts_here
from loka_onnx.pipeline.job_results import ElsewhereRuns
from loka_onnx.pipeline.jobs import SplitRows
from loka_onnx.pipeline.sample import Arrays, Requests
from loka_onnx.pipeline.splitting import open_lookup, with_lookup
from loka_onnx.planning.climbing import SHARES
from loka_onnx.sessions.onnx_session import OnnxSession, SessionOptions
from loka_onnx.sessions.runner import Runner

EVALUATE = Stage("evaluate", "evaluation.json", EvaluationSet)
JOB_TIMED_BYTES = 1 << 26
"""Most bytes of the generated rows that a build job carries for latencies; rows repeat beyond."""


class Judging:
    """Judges the engines of one run, those of this host and those that ran elsewhere.

    Args:
        splits: The rows; selection and certification are read.
        looks: Times that certification is looked at for this model; its error is divided.

    Attributes:
        elsewhere: What engines did on other hosts.
    """

    def __init__(
        self,
        config: RunConfig,
        directory: RunDirectory,
        splits: Splits,
        requests: Requests,
        progress: Progress,
        *,
        looks: int = 1,
    ) -> None:
        self.config, self.directory, self.splits = config, directory, splits
        self.requests, self.progress, self.looks = requests, progress, looks
        self.specs = config.output_specs
        self.threads = config.threads or 0
        self.elsewhere = ElsewhereRuns(directory.path)
        self._references: dict[tuple[str, str], Reference] = {}

    def evaluate(
        self, exported: ModelArtifact, engines: EngineSet, known: EvaluationSet | None = None
    ) -> EvaluationSet:
        """Judge on selection and certification, and time per batch size → `evaluation.json`.

        Args:
            known: Earlier evaluations, which are not repeated.
        """

        def judge() -> EvaluationSet:
            timed = self.time_engines(engines.engines)
            timed.latencies.update(self.elsewhere.latencies(engines.engines))
            measured = (
                with_latencies(evaluation, timed)
                for split in self.judged_splits()
                for evaluation in self.judge(split, exported, engines.engines, known)
            )
            return EvaluationSet(tuple(measured))

        reads = {
            "exported": exported,
            "engines": [[e.id, e.status, e.digest or e.detail] for e in engines.engines],
            "elsewhere": self.elsewhere.key(engines.engines),
            "split": () if self.requests.split is None else self.requests.split.digests,
            "data": [self.splits.selection, self.splits.certification],
            "outputs": self.config.outputs,
            "group": self.config.data.group,
            "slices": self.config.data.slices,
            "batch": self.config.batch,
            "inputs": self.config.serving.inputs,
            "looks": self.looks,
        }
        earlier = self.directory.earlier(EVALUATE)
        again = earlier is not None and counts_here(earlier.evaluations, engines.engines)
        return self.directory.document(EVALUATE, reads, judge, again=again)

    def judge_attempt(
        self, exported: ModelArtifact, engines: Sequence[EngineArtifact], number: int
    ) -> list[Evaluation]:
        """Judge the engines of an attempt (from 0) on selection and certification, and time them."""
        timed = self.time_engines(engines)
        timed.latencies.update(self.elsewhere.latencies(engines))
        return [
            with_latencies(evaluation, timed)
            for split in (self.judged_splits()[0], self.attempt(number))
            for evaluation in self.judge(split, exported, engines)[1:]
        ]

    @property
    def certification(self) -> Split:
        """The certification rows, with the confidence of each look at them."""
        rows = self.config.data
        return Split(
            "certification",
            self.splits.certification,
            self.config.columns,
            rows.group,
            rows.slices,
            self.as_batch(REQUEST_ROWS),
            confidence=1.0 - (1.0 - CONFIDENCE) / self.looks,
        )

    def attempt(self, number: int) -> Split:
        """Return the certification rows with the share of error of an attempt (from 0; `climbing.SHARES`)."""
        whole = self.certification
        return replace(whole, confidence=1.0 - (1.0 - whole.confidence) * SHARES[number])

    def as_batch(self, rows: int) -> int:
        """Return the nearest number of rows that engines are built for."""
        return max(self.config.batch.min, min(rows, self.config.batch.max))

    def judged_splits(self) -> tuple[Split, Split]:
        """Return selection, and certification at the first attempt."""
        columns, rows, at_once = self.config.columns, self.config.data, self.as_batch(REQUEST_ROWS)
        return (
            Split("selection", self.splits.selection, columns, rows.group, rows.slices, at_once),
            self.attempt(0),
        )

    def job_rows(self) -> tuple[SplitRows, ...]:
        """Return engine inputs of the judged rows, for build jobs."""
        return tuple(
            SplitRows(
                split.name,
                split.data.rows,
                split.batch_size,
                partial(self._engine_batches, split),
                split.data.digest,
            )
            for split in self.judged_splits()
        )

    def timed_rows(self) -> SplitRows:
        """Return generated engine inputs that latencies of build jobs are measured on.

        As many as the largest requests take in turns, so that no row repeats, below `JOB_TIMED_BYTES`.
        """
        largest = max(self.config.batch.serve)
        one = self._sample(1)
        room = JOB_TIMED_BYTES // max(1, sum(values.nbytes for values in one.values()))
        rows = max(1, min(LatencyOptions().input_sets * largest, room))
        return SplitRows("timed", rows, rows, lambda: iter([self._sample(rows)]))

    def _sample(self, rows: int) -> Arrays:
        return self.requests.taken_by_engines(self.requests.sample(rows))

    def _engine_batches(self, split: Split) -> Iterator[Arrays]:
        for batch in split.data.batches(split.batch_size):
            yield self.requests.taken_by_engines(dict(batch.inputs))

    def judge_on_selection(
        self, exported: ModelArtifact, engines: Sequence[EngineArtifact]
    ) -> list[Evaluation]:
        """Judge each engine on the selection split, without latencies."""
        return self.judge(self.judged_splits()[0], exported, engines)[1:]

    def judge(
        self,
        split: Split,
        exported: ModelArtifact,
        engines: Sequence[EngineArtifact],
        known: EvaluationSet | None = None,
    ) -> list[Evaluation]:
        """Judge the reference on a split, then each engine, without latencies.

        Args:
            known: Earlier evaluations, which are not repeated.
        """
        earlier = {(e.engine, e.split): e for e in (known.evaluations if known is not None else ())}
        rows, run = split.data.rows, [e for e in engines if e.was_run and (e.id, split.name) not in earlier]
        progress = Joined(self.progress, (1 + len(run)) * rows)
        reference = self.reference(split, exported, progress)
        found = [judge_reference(split, reference, self.specs)]
        for engine in engines:
            if (engine.id, split.name) in earlier:
                found.append(earlier[engine.id, split.name])
                continue
            progress.skip_to_next(rows if engine.was_run else 0)
            with ExitStack() as stack:
                opener = self.elsewhere.opener(engine, split.name) or partial(self.open_engine, engine, stack)
                found.append(judge_engine(engine, split, reference, self.specs, opener, progress))
        return found

    def reference(self, split: Split, exported: ModelArtifact, progress: Progress | None = None) -> Reference:
        """Return the outputs of the FP32 model on a split; predicted once."""
        progress = progress or self.progress
        key = (split.name, exported.digest)
        if key not in self._references:
            session = OnnxSession(exported.path, SessionOptions(threads=self.threads))
            self._references[key] = predict_reference(split, session.run, self.specs, progress)
        return self._references[key]

    def reference_on_selection(self, exported: ModelArtifact) -> Reference:
        """Return the outputs of the FP32 model on selection."""
        return self.reference(self.judged_splits()[0], exported)

    def open_engine(self, engine: EngineArtifact, stack: ExitStack) -> Run:
        """Load an engine until the stack closes; its inputs are the model's, in batches of any size."""
        runner = self.open_alone(engine)
        if engine.part is Part.DENSE:
            runner = with_lookup(runner, self.requests.split, self.threads)
        return padded(stack.enter_context(runner).run, self.config.batch.min)

    def open_alone(self, engine: EngineArtifact) -> Runner:
        """Load an engine without the lookup before it."""
        return get_backend(engine.backend).open(engine, self.directory.path / (engine.path or Path()))

    def time_engines(self, engines: Sequence[EngineArtifact]) -> Interleaved:
        """Measure the latency of every engine that runs here, in turns; see `TimingBench.time`."""
        bench = TimingBench(
            self.config,
            self.progress,
            self.open_alone,
            partial(open_lookup, self.requests.split, self.threads),
            self.requests.generated,
        )
        return bench.time(engines)
