"""LoKA-ONNX: from a trained recommendation model to the fastest inference engine that is still accurate.

The public names; each is imported when it is first used, so that `import loka_onnx` costs nothing and a bare
install can do whatever its packages allow.

Whole runs: `load_run_file`, `run` (of a run file, or a model and rows), `refresh` (a retrained checkpoint),
and `load` for the bundle on a fleet host. Single stages, in their order: `import_onnx` or `export_torch`,
`calibrate`, `apply_mods`, `make_plans`, `apply_plan`, `get_backend` (whose `build` makes an engine),
`judge_engine`, `choose`, `render`, `write_bundle`, `verify_bundle`. Afterwards, on live data: `open_run` and
`check_drift` for rows on disk (`measure_drift` without a run directory), `open_monitor` or `Monitor` for the
process that serves.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from loka_onnx.bundle.format.files import verify_bundle
    from loka_onnx.bundle.writer import write_bundle
    from loka_onnx.calibration.calibrate import calibrate
    from loka_onnx.config import RunConfig, load_run_file
    from loka_onnx.engines.registry import get_backend
    from loka_onnx.errors import CheckFailed, InternalError, LokaError, StageError, UserError
    from loka_onnx.evaluation.engines import judge_engine
    from loka_onnx.export.onnx_model import import_onnx
    from loka_onnx.export.torch_module import export_torch
    from loka_onnx.operations.drift.measure import measure_drift
    from loka_onnx.operations.drift.monitor import Monitor
    from loka_onnx.operations.drift.run import check_drift, open_monitor, open_run
    from loka_onnx.operations.refresh.refreshing import RefreshOptions, refresh
    from loka_onnx.operations.running import run
    from loka_onnx.pipeline.run import RunOptions, RunResult, Stage
    from loka_onnx.planning.choice import choose
    from loka_onnx.planning.policy import make_plans
    from loka_onnx.report import render
    from loka_onnx.runtime import load
    from loka_onnx.transforms.precision.apply_plan import PlanForm, apply_plan
    from loka_onnx.transforms.sequence import apply_mods

__all__ = [
    "CheckFailed",
    "InternalError",
    "LokaError",
    "Monitor",
    "PlanForm",
    "RefreshOptions",
    "RunConfig",
    "RunOptions",
    "RunResult",
    "Stage",
    "StageError",
    "UserError",
    "apply_mods",
    "apply_plan",
    "calibrate",
    "check_drift",
    "choose",
    "export_torch",
    "get_backend",
    "import_onnx",
    "judge_engine",
    "load",
    "load_run_file",
    "make_plans",
    "measure_drift",
    "open_monitor",
    "open_run",
    "refresh",
    "render",
    "run",
    "verify_bundle",
    "write_bundle",
]

_HOMES = {
    "bundle.format.files": ("verify_bundle",),
    "bundle.writer": ("write_bundle",),
    "calibration.calibrate": ("calibrate",),
    "operations.drift.measure": ("measure_drift",),
    "operations.drift.monitor": ("Monitor",),
    "config": ("RunConfig", "load_run_file"),
    "engines.registry": ("get_backend",),
    "errors": ("CheckFailed", "InternalError", "LokaError", "StageError", "UserError"),
    "evaluation.engines": ("judge_engine",),
    "export.onnx_model": ("import_onnx",),
    "export.torch_module": ("export_torch",),
    "operations.drift.run": ("check_drift", "open_monitor", "open_run"),
    "operations.refresh.refreshing": ("RefreshOptions", "refresh"),
    "operations.running": ("run",),
    "pipeline.run": ("RunOptions", "RunResult", "Stage"),
    "planning.choice": ("choose",),
    "planning.policy": ("make_plans",),
    "report": ("render",),
    "runtime": ("load",),
    "transforms.precision.apply_plan": ("PlanForm", "apply_plan"),
    "transforms.sequence": ("apply_mods",),
}
_MODULES = {name: module for module, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("loka-onnx")
    if name not in _MODULES:
        raise AttributeError(f"module 'loka_onnx' has no attribute '{name}'")
    value = getattr(importlib.import_module(f"loka_onnx.{_MODULES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
