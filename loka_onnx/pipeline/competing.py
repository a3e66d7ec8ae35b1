"""Default list of plans: FP32, BF16, FP8, and FP16 where a target's backend runs it."""

from __future__ import annotations

from collections.abc import Collection

from loka_onnx.config import PlanId, RunConfig, TargetConfig
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
    """The plans of a run, in the order they compete.

    Args:
        config: The run file; plans that it lists are the answer.
        timed: Devices that kernel times are known of: `fp8-fast` is made by them.
    """
    if config.plan.plans is not None:
        return config.plan.plans
    fp16 = (PlanId.FP16,) if runs(config, Precision.FP16) else ()
    fast = (PlanId.FP8_FAST,) if any(target.device in timed for target in config.targets) else ()
    return (PlanId.FP32, PlanId.BF16, *fp16, PlanId.FP8_ALL, PlanId.FP8_SAFE, *fast)


def runs(config: RunConfig, precision: Precision) -> bool:
    """Return True if a target's backend can run the whole model in a precision.

    CPUs are left out: they gain no time by FP16, which takes a pass of calibration to make safe.
    """
    return any(
        architecture != CPU and get_backend(name).decline(_plan(precision), architecture) is None
        for target in config.targets
        for name in target.backends
        for architecture in _architectures(target, name)
    )


def _architectures(target: TargetConfig, backend: str) -> tuple[str, ...]:
    return tuple(target.architectures) or get_backend(backend).architectures(target.device)


def _plan(precision: Precision) -> PrecisionPlan:
    return PrecisionPlan(str(precision), "", precision, (), {}, 0.0)
