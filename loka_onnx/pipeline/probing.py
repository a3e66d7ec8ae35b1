"""The calibration stages: of the exported model, of what mods changed, and of rows that came in later.

In the profile of a model after mods, sites that are measured now stand beside those that did not change. All
are measured on the same rows and under the same recipes; how many of the rows it took to reach a verdict may
differ from site to site.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

from loka_onnx.calibration.calibrate import OpenVerdicts, ProbeOptions, ProfiledModel, calibrate, update
from loka_onnx.calibration.passes.executors import BatchExecutor, LocalExecutor
from loka_onnx.calibration.passes.probe import Probe, scales_of
from loka_onnx.calibration.passes.ray_executor import RayExecutor
from loka_onnx.config import Executor, PlanId, WeightGranularity
from loka_onnx.core import serde
from loka_onnx.core.artifact import ModelArtifact
from loka_onnx.core.digests import digest_json
from loka_onnx.core.exact_sum import NOTHING_ADDED, ExactSum
from loka_onnx.core.formats import Precision
from loka_onnx.core.profile import Profile, Sampling
from loka_onnx.core.recipe import Granularity
from loka_onnx.core.statistics import TensorRange
from loka_onnx.data import Dataset
from loka_onnx.errors import ConfigError
from loka_onnx.graph.layout import layout_root
from loka_onnx.graph.model import GraphModel
from loka_onnx.pipeline.context import Context
from loka_onnx.pipeline.directory import DocumentStage
from loka_onnx.pipeline.plans import base_precision, competing_plans, planned_recipes
from loka_onnx.planning.policy import open_verdicts
from loka_onnx.transforms.linears.outer_to_mul import OuterToMul

EXPORTED, MODIFIED = "calibration/exported.json", "profile.json"
"""Profiles of the exported model and of the model after mods, below the run directory."""
CALIBRATE = DocumentStage("calibrate", EXPORTED, Profile)
RECALIBRATE = DocumentStage("recalibrate", MODIFIED, Profile)
REFRESH = DocumentStage("refresh", MODIFIED, Profile)
REFRESH_ROWS = 4096
"""Rows that errors and sensitivities of a retrained model are taken from, at most."""


class Probing:
    """Calibration of the models of one run on its calibration split; ranges are of its selection rows too."""

    def __init__(self, context: Context) -> None:
        self.context, self.config, self.specs = context, context.config, context.specs
        self.data, self.progress = context.splits.calibration, context.progress
        self.document = context.directory.document

    def calibrate(self) -> Profile:
        """Calibrate sites of the exported model → `calibration/exported.json`.

        Those that become elementwise are left out; where one stays a site, `changed` measures it.
        """
        exported, outer = self.context.exported, OuterToMul()
        found = outer.match(GraphModel.load(exported.path)).matches
        gone = {match.node.name for match in found if outer.name not in self.config.mods.skip}
        model = replace(exported, sites=tuple(site for site in exported.sites if site.name not in gone))
        options = self._options(lambda profile: self._open_verdicts(model, profile))
        return self.document(
            CALIBRATE,
            self.key(exported),
            lambda: self._measure(model, options),
            again=lambda earlier: self._may_decide_more(model, earlier),
        )

    def changed(self, model: ModelArtifact, earlier: Profile, before: ModelArtifact | None = None) -> Profile:
        """Calibrate the sites that differ from `before` (the exported model if None); carry the others."""
        changed = changed_sites(earlier, model)
        if before is not None:
            changed -= {site.name for site in before.sites if site in model.sites}
        if not changed:
            return without_removed_sites(earlier, model)
        only = with_partners(model, changed)

        def still_open(profile: Profile) -> tuple[str, ...]:
            whole = with_sites(earlier, profile, model)
            return tuple(name for name in self._open_verdicts(model, whole) if name in only)

        later = self._measure(model, replace(self._options(still_open), only=only))
        return with_sites(earlier, later, model)

    def recalibrate(self, model: ModelArtifact, before: ModelArtifact, earlier: Profile) -> Profile:
        """Profile the modified model → `profile.json`.

        Sites whose high-error channels were split off since `before`, whose profile is `earlier`, are
        measured, and where FP16 may be used, the magnitudes of all tensors.
        """
        # Sites that were calibrated again must reach the profile of the modified model.
        key = {**self.key(model), "earlier": digest_json(serde.to_plain(earlier))}
        key |= {"magnitudes": True} if self._may_use_fp16 else {}
        return self.document(
            RECALIBRATE, key, lambda: self._with_magnitudes(self.changed(model, earlier, before), model)
        )

    def add_rows(self, earlier: Profile, added: Dataset) -> Profile:
        """Add new rows to the exported model's profile → `calibration/exported.json`; its key stays."""
        exported, measured = self.context.exported, {entry.site for entry in earlier.sites}
        model = replace(exported, sites=tuple(site for site in exported.sites if site.name in measured))
        if added.digest in earlier.data_digest.split("+"):
            raise ConfigError(
                f"E1521 the rows of '{added.name}' are in the profile already",
                where="--update",
                evidence=f"SHA-256 {added.digest[:16]} is among the {earlier.rows} rows that it holds",
                remedy="give a file with other rows: those of one that is given twice would count twice",
            )

        def measure() -> Profile:
            # `calibration.rows` is about the split; whoever names a file means all of it.
            options = self._options(lambda profile: self._open_verdicts(model, earlier.merge(profile)))
            with self._executor() as executor:
                options = replace(options, rows=None, range_rows=None, beside=(), executor=executor)
                subject = ProfiledModel(model, self.specs)
                merged = update(earlier, subject, added, self._scratch, options, self.progress)
            if not self.config.calibration.stop_when_decided:
                return merged
            undecided = self._open_verdicts(model, merged)
            return replace(merged, sampling=replace(merged.sampling, undecided=undecided))

        return self.document(CALIBRATE, self.key(exported), measure, again=True)

    def refresh(self, model: ModelArtifact, planned: Mapping[str, Collection[str]]) -> Profile:
        """Profile a retrained model under the recipes that were chosen for its sites → `profile.json`.

        Ranges, and the scales that follow, are from all rows. Errors and sensitivities come from few rows and
        one draw: for the report, not for decisions. `planned` are the recipes' ids of each product.
        """
        known = planned_recipes(self.config)
        # Interactions and unplanned sites need one with per-tensor weights in each precision.
        plain = {recipe.precision: recipe.id for recipe in known if recipe.weight is Granularity.PER_TENSOR}
        needed = {*plain.values(), *chain.from_iterable(planned.values())}
        recipes = tuple(recipe for recipe in known if recipe.id in needed)

        def measure() -> Profile:
            began, options = time.perf_counter(), self._options()
            few = min(REFRESH_ROWS, self.data.rows if options.rows is None else options.rows)
            with self._executor() as executor:
                probe = Probe(model, model.sites, self.data, options, executor, self.progress)
                ranges = probe.ranges(self._scratch)
                seconds = ExactSum.of((time.perf_counter() - began,))
                options = replace(
                    options,
                    recipes=recipes,
                    planned=planned,
                    scales=scales_of(ranges, recipes),
                    rows=few,
                    range_rows=None,
                    beside=(),
                    error_precision=None,
                    sensitivity_rows=few,
                    draws=1,
                    executor=executor,
                )
                profile = calibrate(model, self.specs, self.data, self._scratch, options, self.progress)
            sites = tuple(
                replace(e, operands={name: ranges.get(name, stats) for name, stats in e.operands.items()})
                for e in profile.sites
            )
            by_pass = {**profile.seconds, "ranges": seconds}
            profile = replace(profile, rows=probe.range_rows, sites=sites, seconds=by_pass)
            return self._with_magnitudes(profile, model)

        key = {**self.key(model), "planned": dict(planned), "rows": REFRESH_ROWS}
        return self.document(REFRESH, key, measure)

    @property
    def _scratch(self) -> Path:
        return self.context.path("calibration/instrumented")

    @property
    def _may_use_fp16(self) -> bool:
        base = base_precision(self.config)
        return base in (Precision.FP16, None) or PlanId.FP16 in competing_plans(self.config)

    def _with_magnitudes(self, profile: Profile, model: ModelArtifact) -> Profile:
        """The profile with the magnitudes of all tensors over all rows, where FP16 may be used."""
        if not self._may_use_fp16:
            return profile
        began, options = time.perf_counter(), self._options()
        with self._executor() as executor:
            tensors = Probe(model, (), self.data, options, executor, self.progress).magnitudes(self._scratch)
        seconds = ExactSum.of((time.perf_counter() - began,))
        return replace(profile, tensors=tensors, seconds={**profile.seconds, "magnitudes": seconds})

    def _measure(self, model: ModelArtifact, options: ProbeOptions) -> Profile:
        with self._executor() as executor:
            options = replace(options, executor=executor)
            return calibrate(model, self.specs, self.data, self._scratch, options, self.progress)

    def _options(self, still_open: OpenVerdicts | None = None) -> ProbeOptions:
        settings, plan = self.config.calibration, self.config.plan
        best = plan.weight_granularity is WeightGranularity.BEST
        return ProbeOptions(
            recipes=planned_recipes(self.config),
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
            beside=(self.context.splits.selection,),
        )

    def _open_verdicts(self, model: ModelArtifact, profile: Profile) -> tuple[str, ...]:
        """Sites whose verdict a profile leaves open, as if nothing were kept: it serves any `plan.keep`."""
        return open_verdicts(model, profile, self.specs, self.config.calibration.confidence)

    def _may_decide_more(self, model: ModelArtifact, earlier: Profile) -> bool:
        """True if a profile that was stopped early leaves a verdict open, as it may under another budget."""
        settings = self.config.calibration
        most = [n for n in (self.data.rows, settings.rows, settings.sensitivity_rows) if n is not None]
        was_stopped = settings.stop_when_decided and earlier.sampling.rows < min(most)
        return was_stopped and bool(self._open_verdicts(model, earlier))

    def _executor(self) -> BatchExecutor:
        settings, threads = self.config.calibration, self.context.threads
        if settings.executor is Executor.RAY:
            return RayExecutor(settings.ray_address, threads)
        return LocalExecutor(threads)

    def key(self, model: ModelArtifact) -> dict[str, Any]:
        """Inputs and settings that a profile depends on; where batches run changes nothing."""
        return {
            "model": model,
            "data": [self.data, self.context.splits.selection],
            "calibration": self.config.calibration.model_dump(
                mode="json", exclude={"executor", "ray_address"}
            ),
            "plan.weight_granularity": self.config.plan.weight_granularity,
            "recipes": [recipe.id for recipe in planned_recipes(self.config)],
            "outputs": self.context.outputs_without_limits,
            "data.group": self.config.data.group,
            "data.synthetic": self.config.data.synthetic,
        }


# Profiles of a model after mods ---------------------------------------------------------------------


def changed_sites(earlier: Profile, model: ModelArtifact) -> frozenset[str]:
    """Return sites that an earlier profile does not cover: new, changed by a mod, or with other operands."""
    known = {entry.site: set(entry.operands) for entry in earlier.sites}
    return frozenset(
        site.name
        for site in model.sites
        if site.merged_from or known.get(site.name) != {operand.tensor for operand in site.operands}
    )


def with_partners(model: ModelArtifact, names: Collection[str]) -> frozenset[str]:
    """Return sites with those that share a tensor with one of them in FP8: they are measured together."""
    graph = GraphModel.load(model.path)
    readers: dict[str, set[str]] = {}
    for site in model.sites:
        if site.is_fp8_able:
            tensor = layout_root(graph.node(site.name).inputs[site.activation.index]).tensor
            readers.setdefault(tensor.name, set()).add(site.name)
    partners = (group for group in readers.values() if group & set(names))
    return frozenset(names).union(*partners)


def with_sites(earlier: Profile, later: Profile, model: ModelArtifact) -> Profile:
    """Replace sites of the earlier profile by those of the later one, for a model that has them all.

    Rows are the fewest of both profiles; intervals hold at any number of rows if one of them stopped early.
    The later profile has partners (`with_partners`) too; the model decides the sites and their order.
    """
    entries = {entry.site: entry for entry in (*earlier.sites, *later.sites)}
    again = {entry.site for entry in later.sites}
    order = [site.name for site in model.sites]
    kept = [
        group for group in earlier.groups if again.isdisjoint(group.sites) and set(group.sites) <= set(order)
    ]
    operands = {tensor for name in order for tensor in entries[name].operands}
    one, two = earlier.sampling, later.sampling
    still_open = (name for name in one.undecided if name in order and name not in again)
    undecided = tuple(sorted({*still_open, *two.undecided}))
    may_stop, looks = one.may_stop_early or two.may_stop_early, max(one.looks, two.looks)
    return replace(
        earlier,
        model_digest=model.digest,
        error_rows=min(earlier.error_rows, later.error_rows),
        sampling=Sampling(min(one.rows, two.rows), looks, two.tightest_at, undecided, may_stop),
        sites=tuple(entries[name] for name in order),
        scales={
            rounding: {**earlier.scales.get(rounding, {}), **later.scales.get(rounding, {})}
            for rounding in sorted({*earlier.scales, *later.scales})
        },
        seconds={
            name: earlier.seconds.get(name, NOTHING_ADDED).merge(later.seconds.get(name, NOTHING_ADDED))
            for name in sorted({*earlier.seconds, *later.seconds})
        },
        groups=tuple(sorted((*kept, *later.groups), key=lambda group: order.index(group.sites[0]))),
        weights=tuple(sorted({*earlier.weights, *later.weights} & operands)),
        tensors=_tensors(earlier, model),
    )


def without_removed_sites(earlier: Profile, model: ModelArtifact) -> Profile:
    """Return a profile for a model whose sites it has; ranges of tensors are dropped for another model."""
    order = [site.name for site in model.sites]
    entries = {entry.site: entry for entry in earlier.sites}
    return replace(
        earlier,
        model_digest=model.digest,
        sites=tuple(entries[name] for name in order),
        groups=tuple(group for group in earlier.groups if set(group.sites) <= set(order)),
        tensors=_tensors(earlier, model),
    )


def _tensors(earlier: Profile, model: ModelArtifact) -> dict[str, TensorRange]:
    """Return ranges of tensors; none for another model, because a mod may have changed any of them."""
    return earlier.tensors if earlier.model_digest == model.digest else {}
