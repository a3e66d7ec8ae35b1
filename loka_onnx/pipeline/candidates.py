"""Every backend × every plan: the planned models and the engines built from them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from loka_onnx.config import RunConfig
from loka_onnx.core import serde
from loka_onnx.core.artifact import ModelArtifact
from loka_onnx.core.correction import CorrectionSet
from loka_onnx.core.engine import EngineArtifact, EngineSet
from loka_onnx.core.formats import Precision
from loka_onnx.core.fusions import Fusions, fusions_of
from loka_onnx.core.plan import PlanSet, PrecisionPlan
from loka_onnx.core.progress import Progress
from loka_onnx.core.rewrite import RewriteLog, RewriteLogs
from loka_onnx.engines.base import Backend
from loka_onnx.engines.registry import get_backend
from loka_onnx.engines.request import BatchRange, BuildRequest, Limits
from loka_onnx.errors import TransformError
from loka_onnx.pipeline.directory import RunDirectory
from loka_onnx.pipeline.splitting import Source
from loka_onnx.transforms.precision.apply_plan import PlanForm, apply_plan


@dataclass(frozen=True)
class Candidate:
    """One engine to build."""

    backend: Backend
    target: str
    architecture: str
    plan: PrecisionPlan

    @property
    def base(self) -> Precision:
        """Precision of everything that is not FP8 in the graph for this backend."""
        return self.backend.base_precision(self.plan)

    @property
    def fusions(self) -> Fusions:
        """What Q/DQ are placed by; nothing for a plan that has none."""
        return fusions_of(self.backend.name) if self.plan.fp8_sites else Fusions()

    @property
    def directory(self) -> str:
        """``<target>-<backend>-<architecture>-<plan>``."""
        return f"{self.target}-{self.backend.name}-{self.architecture}-{self.plan.id}"


@dataclass(frozen=True)
class Built:
    """Every candidate, and what was written into the planned models."""

    engines: EngineSet
    rewrites: RewriteLogs


class EngineBuilder:
    """Builds every candidate of a run; a failure costs that candidate only.

    Args:
        config: The run file.
        directory: Where engines and planned models go.
        sample: ``.npz`` of generated inputs for the first inference.
        progress: Called after each candidate.
        corrections: Constants that were fitted to plans; those that were accepted are written with them.
    """

    def __init__(
        self,
        config: RunConfig,
        directory: RunDirectory,
        sample: Path,
        progress: Progress,
        corrections: CorrectionSet,
    ) -> None:
        self.config, self.directory, self.sample, self.progress = config, directory, sample, progress
        self.corrections = corrections
        self._planned: dict[tuple[str, Precision, Fusions], Path] = {}
        self._logs: dict[str, RewriteLog] = {}

    def build(self, source: Source) -> Built:
        """Build every candidate."""
        candidates = list(self._candidates(source.plans))
        engines: list[EngineArtifact] = []
        for number, candidate in enumerate(candidates):
            self.progress(f"build {candidate.directory}", number, len(candidates))
            engines.append(replace(self._build(source.model, candidate), part=source.part))
        self.progress("build", len(candidates), len(candidates))
        return Built(EngineSet(tuple(engines)), RewriteLogs(self._logs))

    def _candidates(self, plans: PlanSet) -> Iterator[Candidate]:
        for target in self.config.targets:
            for name in target.backends:
                backend = get_backend(name)
                for architecture in target.architectures or backend.architectures(target.device):
                    for plan in plans.plans:
                        yield Candidate(backend, target.device, architecture, plan)

    def _build(self, model: ModelArtifact, candidate: Candidate) -> EngineArtifact:
        backend, plan = candidate.backend, candidate.plan
        reason = backend.decline(plan, candidate.architecture)
        if reason is not None:
            return backend.refusal(plan, candidate.target, candidate.architecture, reason)
        try:
            planned = self._planned_model(model, candidate)
        except TransformError as error:
            return backend.failure(plan, candidate.target, candidate.architecture, str(error))
        batch = self.config.batch
        serve = sorted(batch.serve)[len(batch.serve) // 2]
        limits = self.config.build
        return backend.build(
            BuildRequest(
                model=planned,
                plan=plan,
                sites=model.sites,
                target=candidate.target,
                architecture=candidate.architecture,
                batch=BatchRange(batch.min, serve, batch.max, tuple(sorted({*batch.serve}))),
                output=self.directory.path / "engines" / candidate.directory,
                sample=self.sample,
                relative_to=self.directory.path,
                limits=Limits(limits.timeout_seconds, int(limits.memory_gb * 1e9)),
            )
        )

    def _planned_model(self, model: ModelArtifact, candidate: Candidate) -> Path:
        """The model file that carries the plan in the form that the backend asks for; once for each form."""
        plan, fusions = candidate.plan, candidate.fusions
        key = (plan.id, candidate.base, fusions)
        if key not in self._planned:
            name = f"{plan.id}-{candidate.base}"
            if name in self._logs:
                name = f"{name}-{candidate.backend.name}"
            target = self.directory.path / "planned" / name / "model.onnx"
            form = PlanForm(candidate.base, fusions, self.corrections.accepted(plan.id))
            planned = apply_plan(model, plan, form, target)
            self._planned[key] = planned.path
            self._logs[name] = planned.log
        return self._planned[key]


def build_engines(builder: EngineBuilder, source: Source) -> Built:
    """Build, or take over, every candidate → `engines/`, `engines.json`, `rewrites.json`."""
    directory = builder.directory
    engines, rewrites = directory.path / "engines.json", directory.path / "rewrites.json"

    def produce() -> Sequence[Path]:
        built = builder.build(source)
        serde.write(built.engines, engines)
        serde.write(built.rewrites, rewrites)
        written = (directory.path / name for name in ("planned", "engines"))
        files = (path for root in written for path in sorted(root.rglob("*")) if path.is_file())
        return [engines, rewrites, *files]

    key = {
        "model": source.model.digest,
        "plans": serde.to_plain(source.plans),
        "corrections": serde.to_plain(builder.corrections),
        "part": source.part,
        "targets": [target.model_dump(mode="json") for target in builder.config.targets],
        "batch": builder.config.batch.model_dump(mode="json"),
    }
    return directory.stage(
        "build",
        key,
        produce,
        lambda: Built(serde.read(EngineSet, engines), serde.read(RewriteLogs, rewrites)),
    )
