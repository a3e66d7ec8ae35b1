"""Drift against the profile of a run directory, and a monitor for the process that serves the model.

Everything but the rows comes from the run: the model that the profile was measured on, how its inputs are
made of columns, the judged outputs with their budgets, and the plan whose sites run in FP8.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from loka_onnx.core import serde
from loka_onnx.core.artifact import ModelArtifact, OutputSpec
from loka_onnx.core.evaluation import Choice
from loka_onnx.core.plan import PlanSet, PrecisionPlan
from loka_onnx.core.profile import Profile
from loka_onnx.core.progress import Progress, silent
from loka_onnx.core.refinement import read_refined
from loka_onnx.data import InputBinding, open_dataset
from loka_onnx.errors import ConfigError, ModelError, UserError
from loka_onnx.graph.id_bounds import id_bounds
from loka_onnx.graph.model import GraphModel
from loka_onnx.graph.moves import column_origins
from loka_onnx.graph.storage import model_digest
from loka_onnx.operations.drift.live import Baseline
from loka_onnx.operations.drift.measure import measure_drift
from loka_onnx.operations.drift.monitor import Monitor, MonitorOptions
from loka_onnx.operations.drift.report import DriftOptions, DriftReport
from loka_onnx.operations.recorded import recorded_settings
from loka_onnx.pipeline.directory import RECORD, refuse_links
from loka_onnx.pipeline.rows import bind_columns

SAFE_PLANS = ("fp8-safe", "int8-safe")
MODELS = ("modified", "exported")
"""Models of a run that a profile may be of."""


@dataclass(frozen=True)
class OpenedRun:
    """A run directory, the baseline of its profile, and how model inputs are made of columns."""

    directory: Path
    baseline: Baseline
    bindings: tuple[InputBinding, ...]

    @property
    def scratch_parent(self) -> Path | None:
        """Directory of the model, whose tables are linked from there, if it is writable; else None."""
        beside = self.baseline.model.path.parent
        return beside if os.access(beside, os.W_OK) else None


def open_run(profile: str | Path, run: str | Path | None = None, plan: str | None = None) -> OpenedRun:
    """Open a profile with the run directory that it belongs to.

    Args:
        profile: The profile; as a rule `profile.json` in a run directory.
        run: The run directory, if the profile lies elsewhere.
        plan: The plan whose quantized sites count; None for the plan that was chosen if it has any, else
            ``fp8-safe``, else every FP8-able linear site.

    Raises UserError if a file is missing, or is of another version or model; ConfigError if there is no such
    plan or run directory; OutputError if a link leads out of it.
    """
    path = Path(profile)
    directory = _directory(path, None if run is None else Path(run))
    refuse_links(directory)
    recorded = recorded_settings(_Recorded, directory / RECORD, "run the pipeline again with this version")
    known = serde.read(Profile, path)
    model = _model(directory, known, path)
    graph = GraphModel.load(model.path)
    bindings = bind_columns(recorded.data.inputs, model.inputs, id_bounds(graph))
    chosen = _plan(directory, known, plan)
    baseline = Baseline(model, known, recorded.outputs)
    baseline = replace(baseline, columns=_column_names(graph, bindings, baseline.ranges))
    if chosen is not None:
        known = known.of(chosen.formats)
        counted = frozenset(chosen.quantized_sites)
        baseline = replace(baseline, profile=known, counted=counted, basis=f"plan {chosen.id}")
    return OpenedRun(directory, baseline, bindings)


def _column_names(
    graph: GraphModel, bindings: Sequence[InputBinding], tensors: Iterable[str]
) -> dict[str, tuple[str, ...]]:
    """Return the file columns that the columns of tensors come from; "" for one that comes from none."""
    files = {binding.input: binding.columns for binding in bindings}
    known, names = graph.tensors(), dict[str, tuple[str, ...]]()

    def name(input_name: str, position: int) -> str:
        # An input may be made of one column of lists.
        columns = files[input_name]
        return columns[position] if len(columns) > position else f"{columns[0]}[{position}]"

    for tensor in tensors:
        origins = column_origins(known[tensor])
        if any(origins):
            names[tensor] = tuple("" if o is None else name(o.input, o.column) for o in origins)
    return names


def check_drift(
    run: OpenedRun, data: str | Path, options: DriftOptions | None = None, progress: Progress = silent
) -> DriftReport:
    """Compare live rows with the profile of a run; labels are not read.

    Raises DataError if a row or a column cannot be used, CalibrationError if a value is not finite.
    """
    weights = [spec.weight for spec in run.baseline.outputs if spec.weight is not None]
    live = open_dataset(data, run.bindings, tuple(dict.fromkeys(weights)))
    with tempfile.TemporaryDirectory(dir=run.scratch_parent, prefix=".drift-") as scratch:
        return measure_drift(run.baseline, live, Path(scratch), options, progress)


def open_monitor(
    profile: str | Path, run: str | Path | None = None, plan: str | None = None, **options: Any
) -> Monitor:
    """Return a monitor for the process that serves the model of a run; close it, or use a `with` block.

    `options` are fields of `MonitorOptions`, such as `sample_rate`. Raises as `open_run`; ConfigError also if
    an option is out of range.
    """
    opened = open_run(profile, run, plan)
    return Monitor(opened.baseline, MonitorOptions(**options), opened.scratch_parent)


def _directory(profile: Path, run: Path | None) -> Path:
    """Return the given run directory, or that of the profile, which may lie one level down."""
    candidates = [profile.absolute().parent, profile.absolute().parent.parent] if run is None else [run]
    for candidate in candidates:
        if (candidate / RECORD).is_file():
            return candidate.absolute()
    raise ConfigError(
        "E1628 there is no run directory that says how the model's inputs are made of columns",
        where="--profile" if run is None else "--run",
        evidence=f"no {RECORD} in {' or '.join(map(str, candidates))}",
        remedy="name the run directory that the profile comes from: --run DIR",
    )


@dataclass(frozen=True)
class _DataPart:
    inputs: dict[str, tuple[str, ...]]


@dataclass(frozen=True)
class _Recorded:
    outputs: tuple[OutputSpec, ...]
    data: _DataPart


def _model(directory: Path, profile: Profile, where: Path) -> ModelArtifact:
    """Return the model that the profile was measured on; its file is checked, not only its description."""
    seen = []
    for name in MODELS:
        document = directory / "model" / f"{name}.json"
        if not document.is_file():
            continue
        artifact = serde.read(ModelArtifact, document).placed(directory)
        seen.append(f"{name} has {artifact.digest[:12]}…")
        if artifact.digest != profile.model_digest:
            continue
        actual = model_digest(artifact.path)
        if actual != artifact.digest:
            raise ModelError(
                "E1629 the model is not the one that the run left",
                where=str(artifact.path),
                evidence=f"its digest is {actual[:12]}…, that of '{document.name}' {artifact.digest[:12]}…",
                remedy="restore the file, or run the pipeline again",
            )
        return artifact
    raise UserError(
        f"E1630 the profile is of no model in '{directory}'",
        where=str(where),
        evidence=f"it is of {profile.model_digest[:12]}…; {', '.join(seen) or 'there is no model there'}",
        remedy="name the run directory that the profile comes from: --run DIR",
    )


def _plan(directory: Path, profile: Profile, wanted: str | None) -> PrecisionPlan | None:
    """Return the plan whose quantized sites count; None for every FP8-able linear site."""
    document = directory / "plan.json"
    plans = serde.read(PlanSet, document).plans if document.is_file() else ()
    fitting = {
        plan.id: plan
        for plan in (*plans, *read_refined(directory).plans)
        if plan.model_digest == profile.model_digest and plan.quantized_sites
    }
    if wanted is not None:
        if wanted not in fitting:
            raise ConfigError(
                f"E1631 there is no plan '{wanted}' with quantized sites for the model of the profile",
                where="--plan",
                evidence=f"'{document}' has {', '.join(fitting) or 'none'}",
                remedy="name one of these, or leave --plan out",
            )
        return fitting[wanted]
    choice = directory / "choice.json"
    targets = serde.read(Choice, choice).targets if choice.is_file() else ()
    chosen = [plan for target in targets for plan in target.plans]
    return next((fitting[name] for name in (*chosen, *SAFE_PLANS) if name in fitting), None)
