"""Which plans compete where none are listed."""

from __future__ import annotations

import pytest

from loka_onnx.config import PlanId, RunConfig
from loka_onnx.pipeline.plans import competing_plans

LISTED = (PlanId.FP32, PlanId.BF16, PlanId.FP8_ALL, PlanId.FP8_SAFE)
WITH_FP16 = (PlanId.FP32, PlanId.BF16, PlanId.FP16, PlanId.FP8_ALL, PlanId.FP8_SAFE)


def config(*targets: dict[str, object], **plan: object) -> RunConfig:
    return RunConfig.model_validate(
        {
            "name": "run",
            "model": {"onnx": "/m.onnx"},
            "outputs": ({"name": "ctr", "kind": "logit", "label": "y"},),
            "data": {"calibration": "/a.npz", "selection": "/b.npz", "certification": "/c.npz"},
            "targets": targets,
            "plan": plan,
            "output": "/runs/run",
        },
        strict=False,
        context={"directory": "/"},
    )


CPU = {"device": "cpu", "backends": ("onnxruntime",)}
RTX = {"device": "nvidia-rtx-ada", "backends": ("tensorrt_rtx",)}


@pytest.mark.parametrize(
    ("targets", "timed", "plans"),
    [
        ((CPU,), (), LISTED),
        ((RTX,), (), WITH_FP16),
        ((CPU, RTX), (), WITH_FP16),
        ((CPU, RTX), ("nvidia-rtx-ada",), (*WITH_FP16, PlanId.FP8_FAST)),
        ((CPU,), ("nvidia-rtx-ada",), LISTED),
    ],
)
def test_high_precision_competes_where_it_runs(
    targets: tuple[dict[str, object], ...], timed: tuple[str, ...], plans: tuple[PlanId, ...]
) -> None:
    assert competing_plans(config(*targets), timed) == plans


def test_what_the_user_lists_is_what_competes() -> None:
    listed = (PlanId.FP32, PlanId.FP8_SAFE)
    assert competing_plans(config(RTX, plans=listed), ("nvidia-rtx-ada",)) == listed


def test_a_cpu_gets_no_fp16_whoever_runs_it() -> None:
    assert competing_plans(config({"device": "cpu", "backends": ("inductor",)})) == LISTED
