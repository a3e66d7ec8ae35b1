"""Stages of a run over its directory; `run` holds their order."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from loka_onnx.config import RunConfig
from loka_onnx.core import serde
from loka_onnx.core.artifact import ModelArtifact
from loka_onnx.core.correction import CorrectionSet
from loka_onnx.core.digests import digest_json
from loka_onnx.core.ladder import Climb
from loka_onnx.core.plan import PlanSet, PrecisionPlan
from loka_onnx.core.profile import Profile
from loka_onnx.core.progress import Progress
from loka_onnx.core.rewrite import HighErrorChannels, RewriteLog
from loka_onnx.core.split import ModelSplit
from loka_onnx.data import Dataset, InputBinding, Splits, ensure_disjoint, open_dataset
from loka_onnx.errors import DataError
from loka_onnx.evaluation.columns import read_scores, read_truth
from loka_onnx.export.onnx_model import import_onnx
from loka_onnx.export.preflight import KEY, Batches, check_conversion, preflight
from loka_onnx.export.retrained import EarlierExport, export_retrained
from loka_onnx.export.torch_module import export_torch
from loka_onnx.graph.id_bounds import id_bounds
from loka_onnx.graph.model import GraphModel
from loka_onnx.graph.storage import model_digest, model_files
from loka_onnx.pipeline.candidates import EngineBuilder
from loka_onnx.pipeline.competing import competing_plans
from loka_onnx.pipeline.correcting import Correcting, CorrectionInputs
from loka_onnx.pipeline.directory import RunDirectory, Stage
from loka_onnx.pipeline.judging import Judging
from loka_onnx.pipeline.mods import ChosenMods
from loka_onnx.pipeline.probing import MERGED, Probing
from loka_onnx.pipeline.recipes import planned_recipes
from loka_onnx.pipeline.sample import Requests, bounded_by
from loka_onnx.pipeline.splits import bind_columns, open_splits
from loka_onnx.pipeline.splitting import cut_model
from loka_onnx.pipeline.survival import find_fatal_batch
from loka_onnx.pipeline.torch_source import build_torch_model
from loka_onnx.pipeline.tuning import device_timings
from loka_onnx.planning.high_error_channels import errors_to_leave
from loka_onnx.planning.policy import PlanOptions, make_plans, refine_fast_plans
from loka_onnx.sessions.onnx_session import OnnxSession, SessionOptions
from loka_onnx.transforms.linears.split_high_error_channels import SplitHighErrorChannels
from loka_onnx.transforms.sequence import Rewritten, apply_mods

CHECK_ROWS = 2048
"""Rows of the calibration split that mods and export parity are held against."""
LABEL_ROWS = 65536
"""Rows read at a time where only labels and weights are."""


@dataclass(frozen=True)
class ModdedModel:
    """The model after mods, with what was rewritten, and the high-error channels that were asked for."""

    model: ModelArtifact
    log: RewriteLog
    left: HighErrorChannels = field(default_factory=lambda: HighErrorChannels({}))


HIGH_ERROR_CHANNELS = "model/loud-channels.json"
EXPORT = Stage("export", "model/exported.json", ModelArtifact)
MODS = Stage("mods", {"model": "model/merged.json", "log": "model/merged-mods.json"}, ModdedModel)
HIGH_ERROR = Stage(
    "loud channels",
    {"model": "model/modified.json", "log": "model/mods.json", "left": HIGH_ERROR_CHANNELS},
    ModdedModel,
)
PLAN = Stage("plan", "plan.json", PlanSet)


class Steps:
    """The stages of one run, each over the same directory and configuration.

    Args:
        looks: Times that certification is looked at for this model; its error is divided.
        signing_key: Private key for the bundle; None to leave it unsigned.

    Attributes:
        notes: Facts of the model for the reader of the report.
    """

    def __init__(
        self,
        config: RunConfig,
        directory: RunDirectory,
        progress: Progress,
        *,
        looks: int = 1,
        signing_key: Path | None = None,
    ) -> None:
        self.config, self.directory, self.progress = config, directory, progress
        self.looks, self.signing_key = looks, signing_key
        self.specs = config.output_specs
        self.threads = config.threads or 0
        self.notes: list[str] = []
        self._mods = ChosenMods(config)

    # Model and data --------------------------------------------------------------------------------

    def export(self, earlier: EarlierExport | None = None) -> ModelArtifact:
        """Torch or a foreign ONNX file → `model/exported.onnx` with named sites.

        Args:
            earlier: What the same module was exported to with other weights, which may save the exporter.
        """
        target, config = self._path("model/exported.onnx"), self.config
        if config.model.onnx is not None:
            source = config.model.onnx
            reads: dict[str, Any] = {"onnx": [source.name, model_digest(source)]}

            def make() -> ModelArtifact:
                return import_onnx(source, target, self.specs)
        else:
            torch_model = build_torch_model(config.model, config.directory)
            reads = {"torch": torch_model.key}

            def make() -> ModelArtifact:
                bindings = bind_columns(config.data.inputs, torch_model.inputs)
                rows = next(open_splits(config, bindings).calibration.batches(CHECK_ROWS))
                parts = (torch_model.module, rows.inputs, target, self.specs)
                return export_torch(*parts) if earlier is None else export_retrained(*parts, earlier)

        self._exported = self.directory.document(EXPORT, {**reads, "outputs": config.outputs}, make)
        return self._exported

    @cached_property
    def bindings(self) -> tuple[InputBinding, ...]:
        """Bindings of model inputs to columns, with the bounds of ids."""
        graph = GraphModel.load(self._exported.path)
        return bind_columns(self.config.data.inputs, self._exported.inputs, id_bounds(graph))

    @cached_property
    def splits(self) -> Splits:
        """The three splits."""
        return open_splits(self.config, self.bindings)

    def check_data(self) -> None:
        """Read every row once, so that what the user must correct is found before the first long stage.

        Raises:
            DataError: A row, a label or a weight cannot be used.
            ConfigError: An output does not hold what its declared kind allows.
            ModelError: The model does not run at every batch size, or its rows are not independent.
        """
        for data in (self.splits.calibration, self.splits.selection, self.splits.certification):
            data.check()
        for data in (self.splits.selection, self.splits.certification):
            self._check_labels(data)
        self._preflight()
        rows = next(self.splits.selection.batches(CHECK_ROWS))
        outputs = OnnxSession(self._exported.path, SessionOptions(threads=self.threads)).run(rows.inputs)
        for spec in self.specs:
            read_scores(outputs, spec, rows.rows, is_reference=True)

    def _preflight(self) -> None:
        """A few batches of calibration rows through the exported model.

        Raises:
            ModelError: It does not run at every batch size, its rows are not independent, or it does not
                compute what its file does.
        """
        config = self.config
        rows = next(self.splits.calibration.batches(CHECK_ROWS)).inputs
        batches = Batches(rows, config.batch.min, config.batch.max, self.threads)
        fatal = find_fatal_batch(self._exported, batches)
        if fatal is not None:
            raise fatal.error(config.model.onnx or self._exported.path)
        model = GraphModel.load(self._exported.path)
        judged = [spec.name for spec in self.specs]
        for finding in preflight(model, batches, judged):
            if config.model.require_independent_rows or not finding.is_about_rows:
                raise finding.error(config.model.onnx or self._exported.path)
            self.notes.append(
                f"The model {finding.what} ({finding.operator}; {finding.evidence}). The run went on because "
                f"`{KEY}` is false: every figure is of the batches that were run."
            )
        if config.model.onnx is not None and not self.notes:
            check_conversion(config.model.onnx, model, batches, judged)

    def open_added(self, path: Path) -> Dataset:
        """Open and check a file whose rows are to be added to the profile.

        Raises:
            ConfigError: Its rows are those of selection or of certification.
            DataError: A row, a label or a weight cannot be used.
        """
        config = self.config
        columns, nullable = config.columns, config.nullable_columns
        added = open_dataset(path, self.bindings, columns, None, nullable, config.column_keys)
        ensure_disjoint(added, self.splits.selection, self.splits.certification)
        added.check()
        self._check_labels(added)
        return added

    def _check_labels(self, data: Dataset) -> None:
        wanted = [name for spec in self.specs for name in (spec.label, spec.weight) if name is not None]
        if not wanted:
            return
        names = tuple(dict.fromkeys(wanted))
        batches = list(self.read_columns(data, names))
        columns = {name: np.concatenate([batch[name] for batch in batches]) for name in names}
        for spec in self.specs:
            try:
                read_truth(columns, spec, None)
            except DataError as error:
                raise DataError(
                    error.what, where=f"'{data.name}'", evidence=error.evidence, remedy=error.remedy
                ) from error

    def read_columns(self, data: Dataset, names: tuple[str, ...]) -> Iterator[Mapping[str, Any]]:
        """Columns of a split without its inputs, `LABEL_ROWS` at a time."""
        alone = open_dataset(data.path, (), names, data.selection)
        return (batch.columns for batch in alone.batches(LABEL_ROWS))

    # Probe and mods --------------------------------------------------------------------------------

    @cached_property
    def probing(self) -> Probing:
        """The calibration stages."""
        return Probing(self.config, self.directory, self.splits.calibration, self.progress)

    def modify(self, model: ModelArtifact, probed: Profile | None) -> ModdedModel:
        """Mods but for high-error channels, each checked on calibration rows → `model/modified.onnx`.

        Args:
            probed: Its profile, to measure what mods changed → `calibration/merged.json`; None for nothing.
        """
        merged = [] if probed is None else [self._path(MERGED)]
        reads = {
            "model": model,
            "data": self.splits.calibration,
            **self._mods.key,
            "rows": self._mod_rows,
        }
        if probed is not None:
            reads |= {"profile": digest_json(serde.to_plain(probed)), "measured": self.probing.key(model)}

        def make() -> ModdedModel:
            rewritten = self.rewrite(model, self._path("model/modified.onnx"))
            if probed is not None:
                serde.write(self.probing.changed(rewritten.model, probed), self._path(MERGED))
            return ModdedModel(rewritten.model, rewritten.log)

        return self.directory.document(MODS, reads, make, lambda written: [*written, *merged])

    def split_high_error(self, merged: ModdedModel, left: Mapping[str, float]) -> ModdedModel:
        """High-error channels of sites that do not fit as products of their own → `model/modified.json`."""

        def make() -> ModdedModel:
            split = Rewritten(merged.model, RewriteLog(()))
            if left:
                target = self._path("model/loud.onnx")
                rows = next(self.splits.calibration.batches(self._mod_rows)).inputs
                mod = SplitHighErrorChannels(
                    left, [rows], target.parent, self.config.plan.format.number_format
                )
                split = apply_mods(merged.model, [rows], target, [mod], self.progress)
            log = RewriteLog((*merged.log.records, *split.log.records))
            return ModdedModel(split.model, log, HighErrorChannels(dict(left)))

        reads = {
            "model": merged.model,
            "data": self.splits.calibration,
            "left": left,
            "format": self.config.plan.format,
            "rows": self._mod_rows,
        }
        # A model that stays as it is, and its tables in any case, belong to the stage that wrote them.
        return self.directory.document(
            HIGH_ERROR, reads, make, lambda written: sorted({*written} - {*model_files(merged.model.path)})
        )

    def rewrite(self, model: ModelArtifact, target: Path) -> Rewritten:
        """Apply the mods to a model and write it; high-error channels are split off later."""
        rows = next(self.splits.calibration.batches(self._mod_rows))
        mods = self._mods.make(rows.inputs, target.parent)
        return apply_mods(model, [rows.inputs], target, mods, self.progress)

    @property
    def _mod_rows(self) -> int:
        """Rows that mods are held against."""
        return min(CHECK_ROWS, self.config.calibration.rows or CHECK_ROWS)

    def errors_to_leave(self, model: ModelArtifact, profile: Profile) -> dict[str, float]:
        """Part of its error that each site which does not fit may keep; nothing where none is split."""
        if not self.config.mods.split_channels:
            return {}
        chosen = self.config.plan
        options = PlanOptions(keep=chosen.keep, force=chosen.force, protect=chosen.protect)
        recipes = planned_recipes(chosen)
        return errors_to_leave(model, profile, self.specs, recipes, options, self.judged_rows)

    @property
    def judged_rows(self) -> dict[str, int]:
        """Rows of the splits that engines are judged on."""
        return {
            "selection": self.splits.selection.rows,
            "certification": self.splits.certification.rows,
        }

    def cut(self, model: ModelArtifact) -> ModelSplit | None:
        """The modified model cut at its embeddings, where the run file asks for it; engines follow it."""
        asked_for = self.config.model.split_sparse
        self.requests.split = cut_model(model, self.splits.calibration, self.directory, asked_for)
        return self.requests.split

    @property
    def split(self) -> ModelSplit | None:
        """The model cut at its embeddings, where it was."""
        return self.requests.split

    @cached_property
    def requests(self) -> Requests:
        """Generated inputs of the model, and what engines take of any."""
        rows = next(self.splits.calibration.batches(CHECK_ROWS)).inputs
        # How many ids or numbers a list has, where the model leaves that open, the data say; so they do which
        # ids there are, where no table tells.
        inputs = [replace(spec, shape=(None, *rows[spec.name].shape[1:])) for spec in self._exported.inputs]
        bindings = [bounded_by(binding, rows[binding.input]) for binding in self.bindings]
        requests = Requests(inputs, bindings, self.threads)
        exact = OnnxSession(self._exported.path, SessionOptions(threads=self.threads))
        drawn = requests.sample(max(self.config.batch.min, min(CHECK_ROWS, self.config.batch.max)))
        answers = exact.run(drawn).values()
        requests.unsigned = not all(np.isfinite(a).all() for a in answers if a.dtype.kind == "f")
        return requests

    # Plan ------------------------------------------------------------------------------------------

    def plan(self, model: ModelArtifact, profile: Profile, safe: Climb | None = None) -> PlanSet:
        """Profile → `plan.json`; `safe` says how far the ladder of `fp8-safe` was climbed."""
        chosen, options = self.config.plan, replace(self.plan_options(model), safe=safe)
        reads = {
            "model": model,
            "profile": profile,
            "plan": chosen,
            "plans": options.plans,
            "confidence": options.confidence,
            "budgets": [spec.budget for spec in self.specs],
            "timings": [known.key for known in options.devices],
            "safe": safe,
        }
        recipes = planned_recipes(chosen)
        return self.directory.document(
            PLAN, reads, lambda: make_plans(model, profile, self.specs, recipes, options)
        )

    def plan_options(self, model: ModelArtifact) -> PlanOptions:
        """Plan options of the run file, with the current kernel times of every target."""
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
            most: Rows that constants are fitted to, and selection rows that decide, at most; None for as
                many as a run takes.
        """
        return self._correcting(most).correct(CorrectionInputs(exported, modified, plans))

    def fit_corrections(
        self, exported: ModelArtifact, modified: ModelArtifact, plans: PlanSet
    ) -> CorrectionSet:
        """Fit the constants of further plans, without a stage of its own."""
        return self._correcting().fit(CorrectionInputs(exported, modified, plans))

    def _correcting(self, most: int | None = None) -> Correcting:
        config, directory = self.config, self.directory
        # Fewer rows than a run takes need a reference of their own.
        known = self.judging.reference_on_selection if most is None else None
        return Correcting(config, directory, self.splits, self.progress, known, most=most)

    def search_plans(self, model: ModelArtifact, profile: Profile) -> tuple[PrecisionPlan, ...]:
        """Plans beside the best one of the search over kernel times, for every device with such times."""
        recipes = planned_recipes(self.config.plan)
        return refine_fast_plans(model, profile, self.specs, recipes, self.plan_options(model))

    # Engines ---------------------------------------------------------------------------------------

    def builder(
        self,
        sample: Path,
        corrections: CorrectionSet,
        only: Collection[str] | None = None,
        *,
        is_addition: bool = False,
    ) -> EngineBuilder:
        """Return the builder of engines: of all candidates, or only of some."""
        return EngineBuilder(
            self.config,
            self.directory,
            sample,
            self.progress,
            corrections,
            None if only is None else frozenset(only),
            self.judging.job_rows(),
            self.judging.timed_rows,
            is_addition,
        )

    @cached_property
    def judging(self) -> Judging:
        """Accuracy and latency of the engines."""
        return Judging(
            self.config, self.directory, self.splits, self.requests, self.progress, looks=self.looks
        )

    def _path(self, relative: str) -> Path:
        return self.directory.path / relative
