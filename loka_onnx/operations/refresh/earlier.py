"""The finished run that a refresh starts from."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from loka_onnx.core import serde
from loka_onnx.core.artifact import ModelArtifact
from loka_onnx.core.engine import BuildStatus, EngineArtifact, EngineSet
from loka_onnx.core.evaluation import Choice, EvaluationSet, Rejection, Why
from loka_onnx.core.lineage import RunRecord
from loka_onnx.core.plan import PlanSet
from loka_onnx.core.profile import Profile
from loka_onnx.core.refinement import read_refined
from loka_onnx.core.rewrite import HighErrorChannels
from loka_onnx.errors import ConfigError
from loka_onnx.pipeline.directory import RECORD, refuse_links
from loka_onnx.pipeline.jobs import JOBS, RESULT
from loka_onnx.pipeline.mods import HIGH_ERROR_CHANNELS
from loka_onnx.pipeline.probing import MODIFIED
from loka_onnx.pipeline.run import GIVEN

_DOCUMENTS = ("choice.json", "engines.json", "evaluation.json", "plan.json")
_NEEDED = (RECORD, "model/exported.json", "model/modified.json", *_DOCUMENTS, MODIFIED)
_GIVEN = {"directory": str, "values": str}
"""Types of what a record holds of its run file."""


@dataclass(frozen=True)
class EarlierRun:
    """A finished run; the profile is of the modified model, and paths of models are absolute."""

    directory: Path
    record: RunRecord
    exported: ModelArtifact
    modified: ModelArtifact
    profile: Profile
    plans: PlanSet
    engines: EngineSet
    evaluations: EvaluationSet
    choice: Choice

    @classmethod
    def read(cls, directory: Path) -> EarlierRun:
        """Read the documents of a run of this version; a ConfigError where it is not finished, or the engines
        of a target wait for their build jobs.
        """
        refuse_links(directory)
        missing = [name for name in _NEEDED if not (directory / name).is_file()]
        if "engines.json" not in missing:
            _refuse_waiting(directory)
        if missing:
            raise ConfigError(
                f"E1633 '{directory}' is not a finished run",
                where="--run",
                evidence=f"it has no '{missing[0]}'",
                remedy="name a run directory, or finish the run with `loka-onnx run --resume`",
            )
        plans = serde.read(PlanSet, directory / "plan.json")
        engines = serde.read(EngineSet, directory / "engines.json")
        added = read_refined(directory)
        return cls(
            directory,
            serde.read(RunRecord, directory / RECORD),
            _model(directory, "exported"),
            _model(directory, "modified"),
            serde.read(Profile, directory / MODIFIED),
            replace(plans, plans=(*plans.plans, *added.plans)),
            replace(engines, engines=(*engines.engines, *added.engines)),
            serde.read(EvaluationSet, directory / "evaluation.json"),
            serde.read(Choice, directory / "choice.json"),
        )

    @property
    def config(self) -> dict[str, Any]:
        """Values of its run file."""
        try:
            values = json.loads(self._given["values"])
        except (ValueError, RecursionError):
            values = None
        if not isinstance(values, dict) or not isinstance(values.get("model"), dict):
            raise self._of_another_version()
        return values

    @property
    def base(self) -> Path:
        """The directory that its run file stood in, where a torch builder is looked for."""
        return Path(self._given["directory"])

    @property
    def _given(self) -> dict[str, Any]:
        given = self.record.config.get(GIVEN)
        if not isinstance(given, dict) or {name: type(value) for name, value in given.items()} != _GIVEN:
            raise self._of_another_version()
        return given

    def _of_another_version(self) -> ConfigError:
        return ConfigError(
            f"E1634 the run '{self.directory}' was recorded by another version of loka-onnx",
            where="--run",
            evidence=f"its '{RECORD}' does not hold what the run file gave",
            remedy="run the whole pipeline again with this version",
        )

    @property
    def seconds(self) -> float:
        """Wall time of its stages."""
        return sum(stage.seconds for stage in self.record.stages if stage.stage != "train")

    @property
    def high_error_channels(self) -> Mapping[str, float]:
        """Error that each site with split channels may keep; empty if not recorded."""
        document = self.directory / HIGH_ERROR_CHANNELS
        return serde.read(HighErrorChannels, document).left if document.is_file() else {}

    @cached_property
    def chosen(self) -> tuple[str, ...]:
        """Ids of the engines that it emitted."""
        return tuple(dict.fromkeys(e for target in self.choice.targets for e in target.engines))

    @cached_property
    def judged(self) -> frozenset[str]:
        """Ids of the engines whose outputs certify the chosen ones: theirs, or simulations of their plans."""
        run = [engine for engine in self.engines.engines if engine.was_run]
        chosen = self._named(self.chosen)
        others = {engine.plan for engine in chosen if not engine.was_run}
        return frozenset(e.id for e in run if e in chosen or e.plan in others)

    @cached_property
    def wanted(self) -> frozenset[str]:
        """Ids of the engines to build."""
        return frozenset({*self.chosen, *self.judged})

    @cached_property
    def wanted_plans(self) -> frozenset[str]:
        """Ids of their plans."""
        return frozenset(engine.plan for engine in self._named(self.wanted))

    @property
    def note(self) -> str:
        """Note for the report of the refresh."""
        return (
            f"Refreshed from the run '{self.directory.name}': sites, precisions and engines are those that "
            "it chose; scales, corrections and certification are of this model. Speed was not measured "
            "again, and errors and sensitivities are from few rows."
        )

    def choice_again(self, engines: Collection[EngineArtifact]) -> Choice:
        """Copy the earlier choice for the targets of `engines`."""
        others = [engine for engine in engines if engine.id not in self.chosen]
        why = "built to simulate a plan: the run that was refreshed chose another"
        targets = []
        for choice in self.choice.targets:
            lost = (engine.id for engine in others if engine.target == choice.target)
            losers = tuple(Rejection(engine, Why.NOT_SELECTED, why) for engine in lost)
            reason = f"chosen by the run '{self.directory.name}' ({choice.reason}), certified again"
            if choice.target in {engine.target for engine in engines}:
                targets.append(replace(choice, reason=reason, losers=losers))
        return Choice(tuple(targets))

    def _named(self, names: Collection[str]) -> list[EngineArtifact]:
        return [engine for engine in self.engines.engines if engine.id in names]


def _refuse_waiting(directory: Path) -> None:
    """Refuse a run without a choice for a target whose engines wait for build jobs."""
    engines = serde.read(EngineSet, directory / "engines.json").engines
    document = directory / "choice.json"
    decided = {t.target for t in serde.read(Choice, document).targets} if document.is_file() else set()
    waiting = [e for e in engines if e.status is BuildStatus.WAITING and e.target not in decided]
    if waiting:
        targets = ", ".join(dict.fromkeys(engine.target for engine in waiting))
        raise ConfigError(
            f"E1635 '{directory}' has chosen no engine for {targets} yet, so that there is no choice to keep",
            where="--run",
            evidence="; ".join(f"{engine.id}: {engine.detail}" for engine in waiting),
            remedy=f"execute the jobs in `{JOBS}/` where their devices are, bring each `{RESULT}/` back into "
            "its job, go on with `loka-onnx run --resume`, and refresh then",
        )


def _model(directory: Path, name: str) -> ModelArtifact:
    return serde.read(ModelArtifact, directory / "model" / f"{name}.json").placed(directory)
