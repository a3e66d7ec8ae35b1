"""The calibration stages: of the exported model, of what mods changed, and of rows that came in later."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from loka_onnx.calibration.calibrate import OpenVerdicts, ProbeOptions, calibrate
from loka_onnx.calibration.passes.executors import Executor, LocalExecutor
from loka_onnx.calibration.passes.probe import PassOptions, Probe, scales_of
from loka_onnx.calibration.passes.ray_executor import RayExecutor
from loka_onnx.calibration.updating import ProfiledModel, update
from loka_onnx.config import Executor as ExecutorName
from loka_onnx.config import PlanId, WeightGranularity
from loka_onnx.core import serde
from loka_onnx.core.artifact import ModelArtifact
from loka_onnx.core.digests import digest_json
from loka_onnx.core.exact_sum import ExactSum
from loka_onnx.core.formats import Precision
from loka_onnx.core.profile import Profile
from loka_onnx.core.recipe import Granularity
from loka_onnx.data import Dataset
from loka_onnx.errors import ConfigError
from loka_onnx.pipeline.context import Context
from loka_onnx.pipeline.directory import Stage
from loka_onnx.pipeline.plans import competing_plans, planned_recipes
from loka_onnx.pipeline.redo import (
    carried,
    changed_sites,
    with_partners,
    with_sites,
)
from loka_onnx.planning.policy import PlanOptions, open_verdicts

EXPORTED = "calibration/exported.json"
"""Profile of the exported model, below the run directory."""
MODIFIED = "profile.json"
"""Profile of the model after mods."""
CALIBRATE = Stage("calibrate", EXPORTED, Profile)
RECALIBRATE = Stage("recalibrate", MODIFIED, Profile)
REFRESH = Stage("refresh", MODIFIED, Profile)
REFRESH_ROWS = 4096
"""Rows that errors and sensitivities of a retrained model are taken from, at most."""


class Probing:
    """Calibration of the models of one run, on its calibration split."""

    def __init__(self, context: Context) -> None:
        self.context, self.config, self.specs = context, context.config, context.specs
        self.data, self.progress = context.splits.calibration, context.progress
        self.document = context.directory.document

    def calibrate(self) -> Profile:
        """Calibrate every site of the exported model → `calibration/exported.json`."""
        model = self.context.exported
        options = self._options(lambda profile: self._open_verdicts(model, profile))
        return self.document(CALIBRATE, self.key(model), lambda: self._measure(model, options))

    def changed(self, model: ModelArtifact, earlier: Profile, before: ModelArtifact | None = None) -> Profile:
        """Calibrate the sites that differ from `before` (the exported model if None); carry the others."""
        changed = changed_sites(earlier, model)
        if before is not None:
            changed -= {site.name for site in before.sites if site in model.sites}
        if not changed:
            return carried(earlier, model)
        return self._with_sites(model, earlier, with_partners(model, changed))

    def recalibrate(self, model: ModelArtifact, before: ModelArtifact, earlier: Profile) -> Profile:
        """Profile the modified model → `profile.json`.

        Sites whose high-error channels were split off are measured, and where FP16 may be used, the
        magnitudes of all tensors.

        Args:
            before: The model before high-error channels were split off.
            earlier: Its profile.
        """
        # Sites that were calibrated again must reach the profile of the modified model.
        key = {**self.key(model), "earlier": digest_json(serde.to_plain(earlier))}
        key |= {"magnitudes": True} if self._may_use_fp16 else {}
        return self.document(
            RECALIBRATE, key, lambda: self._with_magnitudes(self.changed(model, earlier, before), model)
        )

    def add_rows(self, earlier: Profile, added: Dataset) -> Profile:
        """Add rows to the profile of the exported model → `calibration/exported.json`.

        The stage keeps its key, so that later stages and later runs go on from it.

        Raises:
            ConfigError: The rows are in the profile already.
        """
        model = self.context.exported
        if added.digest in earlier.data_digest.split("+"):
            raise ConfigError(
                f"E1521 the rows of '{added.name}' are in the profile already",
                where="--update",
                evidence=f"SHA-256 {added.digest[:16]} is among the {earlier.rows} rows that it holds",
                remedy="give a file with other rows: those of one that is given twice would count twice",
            )

        def measure() -> Profile:
            # `calibration.rows` is about the split; whoever names a file means all of it.
            options = replace(
                self._options(lambda profile: self._open_verdicts(model, earlier.merge(profile))),
                rows=None,
                range_rows=None,
            )
            with self._executor() as executor:
                options = replace(options, executor=executor)
                subject = ProfiledModel(model, self.specs)
                merged = update(earlier, subject, added, self._scratch, options, self.progress)
            if not self.config.calibration.stop_when_decided:
                return merged
            undecided = self._open_verdicts(model, merged)
            return replace(merged, sampling=replace(merged.sampling, undecided=undecided))

        return self.document(CALIBRATE, self.key(model), measure, again=True)

    def refresh(self, model: ModelArtifact, planned: Mapping[str, str]) -> Profile:
        """Profile a retrained model under the recipes that were chosen for its sites → `profile.json`.

        Ranges, and the scales that follow, are from all rows. Errors and sensitivities come from few rows and
        one draw: for the report, not for decisions.

        Args:
            planned: Id of the recipe of each site that is a product.
        """
        known = {recipe.id: recipe for recipe in planned_recipes(self.config.plan)}
        # Interactions and unplanned sites need one with per-tensor weights.
        plain = next(name for name, recipe in known.items() if recipe.weight is Granularity.PER_TENSOR)
        recipes = tuple(recipe for name, recipe in known.items() if name in {*planned.values(), plain})

        def measure() -> Profile:
            began, settings = time.perf_counter(), self.config.calibration
            few = min(REFRESH_ROWS, self.data.rows if settings.rows is None else settings.rows)
            with self._executor() as executor:
                probe = Probe(model, model.sites, self.data, self._passes, executor, self.progress)
                ranges = probe.ranges(self._scratch)
                seconds = ExactSum.of((time.perf_counter() - began,))
                options = replace(
                    self._options(lambda profile: ()),
                    recipes=recipes,
                    planned=planned,
                    scales=scales_of(ranges, recipes),
                    rows=few,
                    range_rows=None,
                    error_precision=None,
                    sensitivity_rows=few,
                    open_verdicts=None,
                    draws=1,
                    executor=executor,
                )
                profile = calibrate(model, self.specs, self.data, self._scratch, options, self.progress)
            sites = tuple(
                replace(e, operands={name: ranges.get(name, stats) for name, stats in e.operands.items()})
                for e in profile.sites
            )
            seconds_by_pass = {**profile.seconds, "ranges": seconds}
            profile = replace(profile, rows=probe.range_rows, sites=sites, seconds=seconds_by_pass)
            return self._with_magnitudes(profile, model)

        return self.document(
            REFRESH, {**self.key(model), "planned": dict(planned), "rows": REFRESH_ROWS}, measure
        )

    @property
    def _passes(self) -> PassOptions:
        settings = self.config.calibration
        return PassOptions(
            batch_size=settings.batch_size,
            rows=settings.rows,
            range_rows=settings.range_rows,
            seed=settings.seed,
        )

    @property
    def _scratch(self) -> Path:
        return self.context.path("calibration/instrumented")

    def _with_sites(self, model: ModelArtifact, earlier: Profile, only: frozenset[str]) -> Profile:
        """The earlier profile with some sites measured now."""

        def still_open(profile: Profile) -> tuple[str, ...]:
            whole = with_sites(earlier, profile, model)
            return tuple(name for name in self._open_verdicts(model, whole) if name in only)

        later = self._measure(model, replace(self._options(still_open), only=only))
        return with_sites(earlier, later, model)

    @property
    def _may_use_fp16(self) -> bool:
        plan = self.config.plan
        return plan.base in (Precision.FP16, "auto") or PlanId.FP16 in competing_plans(self.config)

    def _with_magnitudes(self, profile: Profile, model: ModelArtifact) -> Profile:
        """The profile with the magnitudes of all tensors over all rows, where FP16 may be used."""
        if not self._may_use_fp16:
            return profile
        settings, began = self.config.calibration, time.perf_counter()
        options = PassOptions(batch_size=settings.batch_size, rows=settings.rows)
        with self._executor() as executor:
            tensors = Probe(model, (), self.data, options, executor, self.progress).magnitudes(self._scratch)
        seconds = ExactSum.of((time.perf_counter() - began,))
        return replace(profile, tensors=tensors, seconds={**profile.seconds, "magnitudes": seconds})

    def _measure(self, model: ModelArtifact, options: ProbeOptions) -> Profile:
        with self._executor() as executor:
            options = replace(options, executor=executor)
            return calibrate(model, self.specs, self.data, self._scratch, options, self.progress)

    def _options(self, still_open: OpenVerdicts) -> ProbeOptions:
        settings, plan = self.config.calibration, self.config.plan
        best = plan.weight_granularity is WeightGranularity.BEST
        return ProbeOptions(
            recipes=planned_recipes(plan),
            weight=None if best else Granularity(plan.weight_granularity),
            synthetic=self.config.data.synthetic,
            batch_size=settings.batch_size,
            rows=settings.rows,
            range_rows=settings.range_rows,
            error_precision=settings.error_precision,
            sensitivity_rows=settings.sensitivity_rows,
            open_verdicts=still_open if settings.stop_when_decided else None,
            group=self.config.data.group,
            draws=settings.draws,
            seed=settings.seed,
        )

    def _open_verdicts(self, model: ModelArtifact, profile: Profile) -> tuple[str, ...]:
        """Sites whose verdict a profile leaves open.

        As if nothing were kept: a profile serves any `plan.keep`, and is not taken again when that changes.
        """
        options = PlanOptions(confidence=self.config.calibration.confidence)
        return open_verdicts(model, profile, self.specs, options)

    def _executor(self) -> Executor:
        settings, threads = self.config.calibration, self.context.threads
        if settings.executor is ExecutorName.RAY:
            return RayExecutor(settings.ray_address, threads)
        return LocalExecutor(threads)

    def key(self, model: ModelArtifact) -> dict[str, Any]:
        """Inputs and settings that a profile depends on; not where batches run, which changes nothing."""
        return {
            "model": model,
            "data": self.data,
            "settings": self.config.calibration.model_dump(mode="json", exclude={"executor", "ray_address"}),
            "weight": self.config.plan.weight_granularity,
            "recipes": [recipe.id for recipe in planned_recipes(self.config.plan)],
            "outputs": self.config.outputs,
            "group": self.config.data.group,
            "synthetic": self.config.data.synthetic,
        }
