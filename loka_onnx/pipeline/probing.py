"""The calibration stages: of the exported model, of what mods changed, and of rows that came in later."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from loka_onnx.calibration.calibrate import ProbeOptions, calibrate
from loka_onnx.calibration.executors import Executor, LocalExecutor
from loka_onnx.config import RunConfig, WeightGranularity
from loka_onnx.core import serde
from loka_onnx.core.artifact import ModelArtifact
from loka_onnx.core.digests import digest_json
from loka_onnx.core.profile import Profile
from loka_onnx.core.progress import Progress
from loka_onnx.core.recipe import Granularity
from loka_onnx.data import Dataset
from loka_onnx.pipeline.directory import RunDirectory
from loka_onnx.pipeline.recipes import planned_recipes
from loka_onnx.pipeline.redo import Measurement, carried, read_earlier, with_partners, with_sites
from loka_onnx.planning.policy import PlanOptions, matching_sites, open_verdicts

EXPORTED = "calibration/exported.json"
"""Profile of the exported model, below the run directory."""
MODIFIED = "profile.json"
"""Profile of the model after mods."""


class Probing:
    """Calibration over one run directory.

    Args:
        config: The run file.
        directory: The run directory.
        data: The calibration split.
        progress: Called as rows are done.
    """

    def __init__(self, config: RunConfig, directory: RunDirectory, data: Dataset, progress: Progress) -> None:
        self.config, self.directory, self.data, self.progress = config, directory, data, progress
        self.specs = config.output_specs

    def calibrate(self, model: ModelArtifact) -> Profile:
        """Every site of the exported model → `calibration/exported.json`."""
        return self._stage(
            "calibrate", EXPORTED, self._key(model), lambda: self._measure(model, self._options(model))
        )

    def recalibrate(self, model: ModelArtifact, earlier: Profile) -> Profile:
        """Sites that mods changed, the others as they were → `profile.json`."""
        known = {entry.site for entry in earlier.sites}
        changed = {site.name for site in model.sites if site.name not in known or site.merged_from}

        def measure() -> Profile:
            if not changed:
                return carried(earlier, model)
            only = with_partners(model, changed)
            later = self._measure(model, self._options(model, earlier, only))
            return with_sites(earlier, later, model)

        # Sites that were calibrated again must reach the profile of the modified model.
        key = {**self._key(model), "earlier": digest_json(serde.to_plain(earlier))}
        return self._stage("recalibrate", MODIFIED, key, measure)

    def again(self, model: ModelArtifact, patterns: Sequence[str]) -> Profile:
        """Some sites of the exported model once more → `calibration/exported.json`, the others as they were.

        Raises:
            ConfigError: A pattern names no site, or the run holds no profile that fits.
        """
        only = with_partners(model, matching_sites(patterns, model.sites, "--only"))
        rows = self.config.calibration.rows
        now = Measurement(
            model=model.digest,
            data=self.data.digest,
            rows=self.data.rows if rows is None else min(rows, self.data.rows),
            outputs=self.specs,
            recipes=planned_recipes(self.config.plan),
        )
        earlier = read_earlier(self.directory.path / EXPORTED, now)

        def measure() -> Profile:
            return with_sites(earlier, self._measure(model, self._options(model, earlier, only)), model)

        return self._stage("calibrate", EXPORTED, self._key(model), measure, again=True)

    def _stage(
        self, name: str, document: str, key: Any, measure: Callable[[], Profile], *, again: bool = False
    ) -> Profile:
        path = self.directory.path / document

        def produce() -> Sequence[Path]:
            serde.write(measure(), path)
            return [path]

        return self.directory.stage(name, key, produce, lambda: serde.read(Profile, path), again=again)

    def _measure(self, model: ModelArtifact, options: ProbeOptions) -> Profile:
        scratch = self.directory.path / "calibration/instrumented"
        return calibrate(model, self.specs, self.data, scratch, options, self.progress)

    def _options(
        self, model: ModelArtifact, earlier: Profile | None = None, only: frozenset[str] | None = None
    ) -> ProbeOptions:
        """Options of one measurement.

        Args:
            model: The model.
            earlier: Profile of the sites that are not measured.
            only: Sites that are; None for all.
        """
        settings, plan = self.config.calibration, self.config.plan

        def still_open(found: Profile) -> tuple[str, ...]:
            whole = found if earlier is None else with_sites(earlier, found, model)
            return tuple(name for name in self.open_verdicts(model, whole) if only is None or name in only)

        best = plan.weight_granularity is WeightGranularity.BEST
        return ProbeOptions(
            recipes=planned_recipes(plan),
            weight=None if best else Granularity(plan.weight_granularity),
            only=only,
            synthetic=self.config.data.synthetic,
            batch_size=settings.batch_size,
            rows=settings.rows,
            error_precision=settings.error_precision,
            sensitivity_rows=settings.sensitivity_rows,
            open_verdicts=still_open if settings.stop_when_decided else None,
            group=self.config.data.group,
            draws=settings.draws,
            seed=settings.seed,
            threads=self.config.threads or 0,
            executor=self._executor(),
        )

    def open_verdicts(self, model: ModelArtifact, profile: Profile) -> tuple[str, ...]:
        """Sites whose verdict a profile leaves open.

        As if nothing were kept: a profile serves any `plan.keep`, and is not taken again when that changes.
        """
        options = PlanOptions(confidence=self.config.calibration.confidence)
        return open_verdicts(model, profile, self.specs, options)

    def _executor(self) -> Executor:
        return LocalExecutor(self.config.threads or 0)

    def _key(self, model: ModelArtifact) -> dict[str, Any]:
        # Where batches run changes nothing in a profile.
        where = {"executor", "ray_address"}
        return {
            "model": model.digest,
            "data": self.data.digest,
            "settings": self.config.calibration.model_dump(mode="json", exclude=where),
            "weight": self.config.plan.weight_granularity,
            "recipes": [recipe.id for recipe in planned_recipes(self.config.plan)],
            "outputs": [output.model_dump(mode="json") for output in self.config.outputs],
            "group": self.config.data.group,
            "synthetic": self.config.data.synthetic,
        }
