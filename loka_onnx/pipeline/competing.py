"""Default list of plans: FP32, BF16, FP8, and FP16 where a target's backend runs it."""

from __future__ import annotations

from collections.abc import Collection

from loka_onnx.config import PlanId, RunConfig
from loka_onnx.core.formats import Precision
from loka_onnx.core.plan import PrecisionPlan
from loka_onnx.engines.registry import get_backend

CPU = "cpu"


def check_options(config: RunConfig) -> None:
    """Check the options of every backend before any work is done.

    Raises:
        ConfigError: A backend has no such setting, or takes another value.
    """
    for number, target in enumerate(config.targets):
        for name, options in target.options.items():
            where = f"`targets[{number}].options.{name}` (device '{target.device}')"
            get_backend(name).check_options(options, where)


def competing_plans(config: RunConfig, timed: Collection[str] = ()) -> tuple[PlanId, ...]:
    """Return the plans of a run, in the order they compete: those that the run file lists, if it lists any.

    Args:
        timed: Devices that kernel times are known of: `fp8-fast` is made by them.
    """
    if config.plan.plans is not None:
        return config.plan.plans
    fp16 = (PlanId.FP16,) if runs(config, Precision.FP16) else ()
    fast = (PlanId.FP8_FAST,) if any(target.device in timed for target in config.targets) else ()
    return (PlanId.FP32, PlanId.BF16, *fp16, PlanId.FP8_ALL, PlanId.FP8_SAFE, *fast)


def runs(config: RunConfig, precision: Precision) -> bool:
    """Return True if a backend of any target can run the whole model in a precision.

    CPUs never count: they gain no time by it, and FP16 needs a further pass of calibration to be safe.
    """
    plan = PrecisionPlan(str(precision), "", precision, (), {}, 0.0)
    return any(
        architecture != CPU and backend.decline(plan, architecture) is None
        for target in config.targets
        for backend in map(get_backend, target.backends)
        for architecture in target.architectures or backend.architectures(target.device)
    )
