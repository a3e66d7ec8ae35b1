"""Pages of the Python names: what a user imports, in groups, with the types that it takes and returns.

The text of each is its docstring; mkdocstrings reads it from the sources without importing them.
"""

from __future__ import annotations

from dataclasses import dataclass

from docs_site.markdown import code, table

DIRECTORY = "reference/api"


@dataclass(frozen=True)
class Group:
    """One page.

    Attributes:
        address: Name of its file.
        title: Its title.
        text: What the names are for.
        names: Public names, below `loka_onnx`.
        types: What they take and return, below `loka_onnx`.
    """

    address: str
    title: str
    text: str
    names: tuple[str, ...]
    types: tuple[str, ...] = ()


GROUPS = (
    Group(
        "runs",
        "Whole runs",
        "From a run file to a report and a bundle, and what a retrained checkpoint needs of it again.",
        (
            "run",
            "load_run_file",
            "refresh",
            "RunOptions",
            "RunResult",
            "Stage",
            "RefreshOptions",
            "RunConfig",
        ),
        ("operations.refresh.refreshing.RefreshResult", "core.evaluation.Choice", "report.data.ReportData"),
    ),
    Group(
        "serving",
        "Loading and serving",
        "What a fleet host does with a bundle. It needs ONNX Runtime, and PyTorch or a TensorRT only for "
        "engines of theirs.",
        ("load", "verify_bundle"),
        (
            "runtime.Engine",
            "runtime.Serving",
            "runtime.Health",
            "runtime.Skipped",
            "runtime.Metrics",
            "runtime.Snapshot",
            "sessions.onnx_session.SessionOptions",
            "core.manifest.Manifest",
            "core.manifest.EngineEntry",
            "core.rewrite.Part",
        ),
    ),
    Group(
        "stages",
        "Single stages",
        "Each stage alone, in the order of a run. Stages meet in frozen values, each of which is also a "
        "versioned JSON document.",
        (
            "import_onnx",
            "export_torch",
            "calibrate",
            "apply_mods",
            "make_plans",
            "PlanForm",
            "apply_plan",
            "get_backend",
            "judge_engine",
            "choose",
            "render",
            "write_bundle",
        ),
        (
            "core.artifact.ModelArtifact",
            "core.artifact.OutputSpec",
            "core.artifact.OutputKind",
            "core.profile.Profile",
            "core.recipe.Recipe",
            "core.plan.PlanSet",
            "core.plan.PrecisionPlan",
            "core.plan.Decision",
            "core.evaluation.Evaluation",
            "core.evaluation.EvaluationSet",
            "core.engine.EngineArtifact",
            "calibration.calibrate.ProbeOptions",
            "planning.policy.PlanOptions",
            "planning.choice.ChoiceOptions",
            "transforms.sequence.Rewritten",
            "transforms.precision.apply_plan.PlannedModel",
            "data.dataset.Dataset",
            "engines.base.Backend",
            "bundle.writer.BundleContents",
        ),
    ),
    Group(
        "live-data",
        "Live data",
        "Rows of today against the profile that a run left: on disk, or inside the process that serves.",
        ("open_run", "check_drift", "measure_drift", "open_monitor", "Monitor"),
        (
            "operations.drift.report.DriftReport",
            "operations.drift.run.OpenedRun",
            "operations.drift.report.DriftOptions",
            "operations.drift.monitor.MonitorOptions",
            "operations.drift.live.Baseline",
        ),
    ),
    Group(
        "errors",
        "Errors",
        "Everything that is raised on purpose. The message says what, where, on which evidence, and "
        "what to do.",
        ("LokaError", "UserError", "StageError", "CheckFailed", "InternalError"),
        (
            "errors.ConfigError",
            "errors.DataError",
            "errors.ModelError",
            "errors.OutputError",
            "errors.MissingPackage",
            "errors.ExportError",
            "errors.CalibrationError",
            "errors.TransformError",
            "errors.PlanningError",
            "errors.EngineError",
            "errors.EvaluationError",
            "errors.BundleError",
            "errors.DriftFound",
            "errors.BundleInvalid",
            "errors.BudgetMissed",
        ),
    ),
)


def api_pages() -> dict[str, str]:
    """Address in the site → page."""
    return {f"{DIRECTORY}/index.md": _index()} | {
        f"{DIRECTORY}/{group.address}.md": _page(group) for group in GROUPS
    }


def _index() -> str:
    rows = [
        (
            f"[{group.title}]({group.address}.md)",
            ", ".join(f"[{code(name)}]({group.address}.md#loka_onnx.{name})" for name in group.names),
        )
        for group in GROUPS
    ]
    return "\n\n".join(
        (
            "# Python",
            "Every public name is an attribute of `loka_onnx` and is imported when it is first used, so that "
            "`import loka_onnx` costs nothing. `loka_onnx.load` needs `onnxruntime` only.",
            table(("Page", "Names"), rows),
        )
    )


def _page(group: Group) -> str:
    parts = [f"# {group.title}", group.text, "## Names"]
    parts += [_entry(name) for name in group.names]
    if group.types:
        parts += ["## What they take and return" if group.address != "errors" else "## More exact kinds"]
        parts += [_entry(name) for name in group.types]
    return "\n\n".join(parts) + "\n"


def _entry(name: str) -> str:
    return f"::: loka_onnx.{name}"
