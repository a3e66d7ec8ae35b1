"""What each stage of a run does with the run directory; the order is in `run`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import count
from pathlib import Path

import numpy as np

from loka_onnx.config import RunConfig
from loka_onnx.core import serde
from loka_onnx.core.artifact import ModelArtifact
from loka_onnx.core.correction import CorrectionSet
from loka_onnx.core.engine import EngineArtifact, EngineSet
from loka_onnx.core.evaluation import Evaluation, EvaluationSet
from loka_onnx.core.plan import PlanSet, PrecisionPlan
from loka_onnx.core.profile import Profile
from loka_onnx.core.progress import Progress
from loka_onnx.core.rewrite import RewriteLog
from loka_onnx.core.split import ModelSplit, Part
from loka_onnx.data import Dataset, InputBinding, Splits, ensure_disjoint, open_dataset
from loka_onnx.engines.registry import get_backend
from loka_onnx.errors import DataError, UserError
from loka_onnx.evaluation.columns import read_scores, read_truth
from loka_onnx.evaluation.engines import (
    Reference,
    Split,
    judge_engine,
    judge_reference,
    predict_reference,
    with_latencies,
)
from loka_onnx.evaluation.latency import Interleaved, LatencyOptions
from loka_onnx.evaluation.predictions import Run, padded
from loka_onnx.export.onnx_model import import_onnx
from loka_onnx.export.retrained import EarlierExport, export_retrained
from loka_onnx.export.torch_module import export_torch
from loka_onnx.graph.id_bounds import id_bounds
from loka_onnx.graph.model import GraphModel
from loka_onnx.graph.storage import model_digest, model_files
from loka_onnx.numerics.intervals import CONFIDENCE
from loka_onnx.pipeline.competing import competing_plans
from loka_onnx.pipeline.correcting import Correcting, CorrectionInputs
from loka_onnx.pipeline.directory import RunDirectory
from loka_onnx.pipeline.engine_times import TimingBench, counts_here
from loka_onnx.pipeline.job_results import ElsewhereRuns
from loka_onnx.pipeline.jobs import SplitRows
from loka_onnx.pipeline.mods import ChosenMods
from loka_onnx.pipeline.probing import Probing
from loka_onnx.pipeline.recipes import planned_recipes
from loka_onnx.pipeline.sample import Arrays, generated_rows
from loka_onnx.pipeline.splits import bind_inputs, open_splits
from loka_onnx.pipeline.splitting import (
    cut_model,
    open_lookup,
    taken_by_engines,
    with_lookup,
)
from loka_onnx.pipeline.torch_source import build_torch_model
from loka_onnx.pipeline.tuning import device_timings
from loka_onnx.planning.loud import errors_to_leave
from loka_onnx.planning.policy import PlanOptions, make_plans, refine_fast_plans
from loka_onnx.sessions.onnx_session import OnnxSession, SessionOptions
from loka_onnx.sessions.runner import Runner
from loka_onnx.transforms.sequence import apply_mods

CHECK_ROWS = 2048
"""Rows of the calibration split that mods and export parity are held against."""
JOB_TIMED_BYTES = 1 << 26
"""Most bytes of the generated rows that a build job carries for latencies; rows repeat beyond."""
JUDGED_ROWS = 4096
"""Most rows of a request that engines are judged by."""
LABEL_ROWS = 65536
"""Rows read at a time where only labels and weights are."""


@dataclass(frozen=True)
class ModdedModel:
    """The model after mods, with what was rewritten."""

    model: ModelArtifact
    log: RewriteLog


class Steps:
    """The stages of one run, each over the same directory and configuration.

    Attributes:
        split: The model cut at its embeddings, where it was.
        looks: Times that certification is looked at for this model; its error is divided.
        signing_key: Private key for the bundle; None to leave it unsigned.
    """

    def __init__(self, config: RunConfig, directory: RunDirectory, progress: Progress) -> None:
        self.config, self.directory, self.progress = config, directory, progress
        self.specs = config.output_specs
        self.threads = config.threads or 0
        self.split: ModelSplit | None = None
        self.looks = 1
        self.signing_key: Path | None = None
        self.elsewhere = ElsewhereRuns(directory.path)
        self._seeds = count(1)
        self._mods = ChosenMods(config)
        self._references: dict[tuple[str, str], Reference] = {}

    # Model and data --------------------------------------------------------------------------------

    def export(self, earlier: EarlierExport | None = None) -> ModelArtifact:
        """Torch or a foreign ONNX file → `model/exported.onnx` with named sites.

        Args:
            earlier: What the same module was exported to with other weights, which may save the exporter.
        """
        target = self._path("model/exported.onnx")
        document = self._path("model/exported.json")
        outputs = [output.model_dump(mode="json") for output in self.config.outputs]
        if self.config.model.onnx is not None:
            source = self.config.model.onnx
            key = {"onnx": [str(source.name), model_digest(source)], "outputs": outputs}

            def produce() -> Sequence[Path]:
                return self._write_model(import_onnx(source, target, self.specs), document)
        else:
            torch_model = build_torch_model(self.config.model, self.config.directory)
            key = {"torch": torch_model.key, "outputs": outputs}

            def produce() -> Sequence[Path]:
                bindings = bind_inputs(self.config, torch_model.inputs)
                rows = next(open_splits(self.config, bindings).calibration.batches(CHECK_ROWS))
                parts = (torch_model.module, rows.inputs, target, self.specs)
                artifact = export_torch(*parts) if earlier is None else export_retrained(*parts, earlier)
                return self._write_model(artifact, document)

        exported = self.directory.stage("export", key, produce, lambda: self._read_model(document))
        self._exported = exported
        return exported

    @cached_property
    def bindings(self) -> tuple[InputBinding, ...]:
        """How model inputs are made of columns, with the bounds of their ids."""
        graph = GraphModel.load(self._exported.path)
        return bind_inputs(self.config, self._exported.inputs, id_bounds(graph))

    @cached_property
    def splits(self) -> Splits:
        """The three splits."""
        return open_splits(self.config, self.bindings)

    def check_data(self) -> None:
        """Read every row once, so that what the user must correct is found before the first long stage.

        Raises:
            DataError: A row, a label or a weight cannot be used.
            ConfigError: An output does not hold what its declared kind allows.
        """
        for data in (self.splits.calibration, self.splits.selection, self.splits.certification):
            data.check()
        for data in (self.splits.selection, self.splits.certification):
            self._check_labels(data)
        rows = next(self.splits.selection.batches(CHECK_ROWS))
        outputs = OnnxSession(self._exported.path, SessionOptions(threads=self.threads)).run(rows.inputs)
        for spec in self.specs:
            read_scores(outputs, spec, rows.rows, is_reference=True)

    def open_added(self, path: Path) -> Dataset:
        """Open and check a file whose rows are to be added to the profile.

        Raises:
            ConfigError: Its rows are those of selection or of certification.
            DataError: A row, a label or a weight cannot be used.
        """
        columns, nullable = self.config.columns, self.config.nullable_columns
        added = open_dataset(path, self.bindings, columns, None, nullable)
        ensure_disjoint(added, self.splits.selection, self.splits.certification)
        added.check()
        self._check_labels(added)
        return added

    def _check_labels(self, data: Dataset) -> None:
        wanted = [name for spec in self.specs for name in (spec.label, spec.weight) if name is not None]
        if not wanted:
            return
        names = tuple(dict.fromkeys(wanted))
        batches = [b.columns for b in open_dataset(data.path, (), names, data.selection).batches(LABEL_ROWS)]
        columns = {name: np.concatenate([batch[name] for batch in batches]) for name in names}
        for spec in self.specs:
            try:
                read_truth(columns, spec, None)
            except DataError as error:
                raise DataError(
                    error.what, where=f"'{data.name}'", evidence=error.evidence, remedy=error.remedy
                ) from error

    # Probe and mods --------------------------------------------------------------------------------

    @cached_property
    def probing(self) -> Probing:
        """The calibration stages."""
        return Probing(self.config, self.directory, self.splits.calibration, self.progress)

    def modify(self, model: ModelArtifact, profile: Profile) -> ModdedModel:
        """Mods, each checked on calibration rows → `model/modified.onnx`."""
        left = self._errors_to_leave(model, profile) if self.config.mods.split_channels else {}
        most = min(CHECK_ROWS, self.config.calibration.rows or CHECK_ROWS)
        target, document = self._path("model/modified.onnx"), self._path("model/modified.json")
        log = self._path("model/mods.json")

        def produce() -> Sequence[Path]:
            rows = next(self.splits.calibration.batches(most))
            mods = self._mods.make(rows.inputs, target.parent, left)
            rewritten = apply_mods(model, [rows.inputs], target, mods, self.progress)
            serde.write(rewritten.log, log)
            return [*self._write_model(rewritten.model, document), log]

        return self.directory.stage(
            "mods",
            {
                "model": model.digest,
                "data": self.splits.calibration.digest,
                **self._mods.key,
                "left": left,
                "rows": most,
            },
            produce,
            lambda: ModdedModel(self._read_model(document), serde.read(RewriteLog, log)),
        )

    def _errors_to_leave(self, model: ModelArtifact, profile: Profile) -> dict[str, float]:
        options = PlanOptions(self.config.plan.keep, confidence=self.config.calibration.confidence)
        return errors_to_leave(model, profile, self.specs, options)

    def cut(self, model: ModelArtifact) -> ModelSplit | None:
        """The modified model cut at its embeddings, where the run file asks for it; engines follow it."""
        asked_for = self.config.model.split_sparse
        self.split = cut_model(model, self.splits.calibration, self.directory, asked_for)
        return self.split

    # Plan ------------------------------------------------------------------------------------------

    def plan(self, model: ModelArtifact, profile: Profile) -> PlanSet:
        """Profile → `plan.json`."""
        document = self._path("plan.json")
        chosen, options = self.config.plan, self.plan_options(model)

        def produce() -> Sequence[Path]:
            recipes = planned_recipes(chosen)
            serde.write(make_plans(model, profile, self.specs, recipes, options), document)
            return [document]

        key = {
            "model": model.digest,
            "profile": serde.to_plain(profile),
            "plan": chosen.model_dump(mode="json"),
            "plans": options.plans,
            "confidence": options.confidence,
            "budgets": [spec.budget for spec in self.specs],
            "timings": [known.key for known in options.devices],
        }
        return self.directory.stage("plan", key, produce, lambda: serde.read(PlanSet, document))

    def plan_options(self, model: ModelArtifact) -> PlanOptions:
        """What the user decided about plans, with the kernel times of every target as they are now."""
        chosen, devices = self.config.plan, device_timings(self.config, self.directory.path, model.path)
        return PlanOptions(
            keep=chosen.keep,
            force=chosen.force,
            base=None if chosen.base == "auto" else chosen.base,
            plans=competing_plans(self.config, [known.device for known in devices if known.timings]),
            confidence=self.config.calibration.confidence,
            protect=chosen.protect,
            exported=self._exported,
            devices=devices,
        )

    def correct(
        self, exported: ModelArtifact, modified: ModelArtifact, plans: PlanSet, most: int | None = None
    ) -> CorrectionSet:
        """Constants fitted to each FP8 plan, kept where they help on selection → `corrections.json`.

        Args:
            exported: The FP32 model that plans are judged against.
            modified: The model that they are for.
            plans: The plans.
            most: Rows that constants are fitted to, and selection rows that decide, at most; None for as
                many as a run takes.
        """
        stage = Correcting.of(self.config, self.directory, self.splits, self.progress, most)
        return stage.correct(CorrectionInputs(exported, modified, plans))

    def fit_corrections(
        self, exported: ModelArtifact, modified: ModelArtifact, plans: PlanSet
    ) -> CorrectionSet:
        """The same for further plans, without a stage of its own."""
        stage = Correcting.of(self.config, self.directory, self.splits, self.progress)
        return stage.fit(CorrectionInputs(exported, modified, plans))

    def search_plans(self, model: ModelArtifact, profile: Profile) -> tuple[PrecisionPlan, ...]:
        """Plans beside the best one of the search over kernel times, for every device with such times."""
        recipes = planned_recipes(self.config.plan)
        return refine_fast_plans(model, profile, self.specs, recipes, self.plan_options(model))

    # Evaluation ------------------------------------------------------------------------------------

    def evaluate(
        self, exported: ModelArtifact, engines: EngineSet, known: EvaluationSet | None = None
    ) -> EvaluationSet:
        """Accuracy on selection and certification, latency per batch size → `evaluation.json`.

        Args:
            exported: What engines are judged against.
            engines: Every candidate.
            known: What was judged of them before, which is not judged again.
        """
        document = self._path("evaluation.json")

        def produce() -> Sequence[Path]:
            timed = self.time_engines(engines.engines)
            timed.latencies.update(self.elsewhere.latencies(engines.engines))
            measured = [
                with_latencies(evaluation, timed)
                for split in self._judged_splits()
                for evaluation in self._judge(split, exported, engines.engines, known)
            ]
            serde.write(EvaluationSet(tuple(measured)), document)
            return [document]

        key = {
            "exported": exported.digest,
            "engines": [[e.id, e.status, e.digest or e.detail] for e in engines.engines],
            "elsewhere": self.elsewhere.key(engines.engines),
            "split": () if self.split is None else self.split.digests,
            "data": [self.splits.selection.digest, self.splits.certification.digest],
            "outputs": [output.model_dump(mode="json") for output in self.config.outputs],
            "group": self.config.data.group,
            "slices": self.config.data.slices,
            "batch": self.config.batch.model_dump(mode="json"),
            "inputs": self.config.serving.inputs,
            "looks": self.looks,
        }
        return self.directory.stage(
            "evaluate",
            key,
            produce,
            lambda: serde.read(EvaluationSet, document),
            again=document.is_file() and self._counts_now(document, engines),
        )

    def _counts_now(self, document: Path, engines: EngineSet) -> bool:
        """Whether this machine has a target that engines were not timed on before."""
        try:
            return counts_here(serde.read(EvaluationSet, document).evaluations, engines.engines)
        except UserError:
            return False

    @property
    def certification(self) -> Split:
        """The certification rows, with what each look at them may err."""
        rows = self.config.data
        return Split(
            "certification",
            self.splits.certification,
            self.config.columns,
            rows.group,
            rows.slices,
            self._judged_at_once,
            confidence=1.0 - (1.0 - CONFIDENCE) / self.looks,
        )

    def as_batch(self, rows: int) -> int:
        """So many rows, or as near to it as engines are built for."""
        return max(self.config.batch.min, min(rows, self.config.batch.max))

    @property
    def _judged_at_once(self) -> int:
        """Rows of a request that engines are judged by; the last one of a split may have fewer."""
        return self.as_batch(JUDGED_ROWS)

    def _judged_splits(self) -> tuple[Split, Split]:
        columns, rows = self.config.columns, self.config.data
        return (
            Split("selection", self.splits.selection, columns, rows.group, rows.slices, self._judged_at_once),
            self.certification,
        )

    def job_rows(self) -> tuple[SplitRows, ...]:
        """What engines take for the rows that they are judged on, as build jobs carry them."""
        return tuple(
            SplitRows(
                split.name,
                split.data.rows,
                split.batch_size,
                partial(self._engine_batches, split),
                split.data.digest,
            )
            for split in self._judged_splits()
        )

    def timed_rows(self) -> SplitRows:
        """Generated rows that latencies of build jobs are drawn from, as engines take them: no user's row.

        As many as the largest requests take in turns, so that none of them repeats a row, below
        `JOB_TIMED_BYTES`.
        """
        largest = max(self.config.batch.serve)
        one = self.taken_by_engines(self.sample(1))
        room = JOB_TIMED_BYTES // max(1, sum(values.nbytes for values in one.values()))
        rows = max(1, min(LatencyOptions().input_sets * largest, room))
        return SplitRows("timed", rows, rows, lambda: iter([self.taken_by_engines(self.sample(rows))]))

    def _engine_batches(self, split: Split) -> Iterator[Arrays]:
        for batch in split.data.batches(split.batch_size):
            yield self.taken_by_engines(dict(batch.inputs))

    def judge_on_selection(
        self, exported: ModelArtifact, engines: Sequence[EngineArtifact]
    ) -> list[Evaluation]:
        """Each engine on the selection split, without latencies."""
        return self._judge(self._judged_splits()[0], exported, engines)[1:]

    def _judge(
        self,
        split: Split,
        exported: ModelArtifact,
        engines: Sequence[EngineArtifact],
        known: EvaluationSet | None = None,
    ) -> list[Evaluation]:
        """The reference, then each engine."""
        reference = self._reference(split, exported)
        earlier = {(e.engine, e.split): e for e in (known.evaluations if known is not None else ())}
        found = [judge_reference(split, reference, self.specs)]
        for engine in engines:
            if (engine.id, split.name) in earlier:
                found.append(earlier[engine.id, split.name])
                continue
            with ExitStack() as stack:
                opener = self.elsewhere.opener(engine, split.name) or partial(self.open_engine, engine, stack)
                found.append(judge_engine(engine, split, reference, self.specs, opener, self.progress))
        return found

    def _reference(self, split: Split, exported: ModelArtifact) -> Reference:
        """What engines are compared with on a split; predicted once."""
        key = (split.name, exported.digest)
        if key not in self._references:
            session = OnnxSession(exported.path, SessionOptions(threads=self.threads))
            self._references[key] = predict_reference(split, session.run, self.specs, self.progress)
        return self._references[key]

    def open_engine(self, engine: EngineArtifact, stack: ExitStack) -> Run:
        """Load an engine until the stack closes; returns what runs one batch of the model's own inputs.

        Batches may be shorter than `batch.min`.
        """
        runner = self.open_alone(engine)
        if engine.part is Part.DENSE:
            runner = with_lookup(runner, self.split, self.threads)
        return padded(stack.enter_context(runner).run, self.config.batch.min)

    def open_alone(self, engine: EngineArtifact) -> Runner:
        """Load an engine without the lookup before it; takes what engines take."""
        return get_backend(engine.backend).open(engine, self._path(engine.path or Path()))

    def time_engines(self, engines: Sequence[EngineArtifact]) -> Interleaved:
        """Latency of every engine that runs here; see `TimingBench.time`."""
        bench = TimingBench(
            self.config,
            self.progress,
            self.open_alone,
            partial(open_lookup, self.split, self.threads),
            self.generated,
        )
        return bench.time(engines)

    def generated(self, rows: int) -> Arrays:
        """Generated model inputs, others at every call; no row of the user's data."""
        return generated_rows(self._exported.inputs, self.bindings, rows, next(self._seeds))

    def sample(self, rows: int) -> Arrays:
        """Generated model inputs, the same ones however often the run was resumed."""
        return generated_rows(self._exported.inputs, self.bindings, rows)

    def taken_by_engines(self, inputs: Arrays) -> Arrays:
        """What engines take for these inputs of the model."""
        return taken_by_engines(inputs, self.split, self.threads)

    # Files -----------------------------------------------------------------------------------------

    def _path(self, relative: str | Path) -> Path:
        return self.directory.path / relative

    def _write_model(self, artifact: ModelArtifact, document: Path) -> list[Path]:
        relative = self.directory.relative(artifact.path)
        serde.write(replace(artifact, path=relative), document)
        return [document, *model_files(artifact.path)]

    def _read_model(self, document: Path) -> ModelArtifact:
        artifact = serde.read(ModelArtifact, document)
        return replace(artifact, path=self._path(artifact.path))
