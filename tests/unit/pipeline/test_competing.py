"""Which plans compete where none are listed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from small_configs import config_of

from loka_onnx.config import PlanId, RunConfig
from loka_onnx.errors import ConfigError
from loka_onnx.pipeline.plans import check_targets, competing_plans, planned_recipes

LISTED = (PlanId.FP32, PlanId.BF16, PlanId.FP8_ALL, PlanId.FP8_SAFE)
WITH_FP16 = (PlanId.FP32, PlanId.BF16, PlanId.FP16, PlanId.FP8_ALL, PlanId.FP8_SAFE)


@pytest.fixture
def config(tmp_path: Path) -> Callable[..., RunConfig]:
    """Makes a run file of targets and what it says of plans."""
    return lambda *targets, **plan: config_of(tmp_path, targets=list(targets), plan=plan)


CPU = {"device": "cpu", "backends": ["onnxruntime"]}
RTX = {"device": "nvidia-rtx-ada", "backends": ["tensorrt_rtx"]}


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
def test_high_precision_competes_where_it_runs(config, targets, timed, plans):
    assert competing_plans(config(*targets), timed) == plans


def test_integers_compete_where_they_are_asked_for(config):
    integers = config(CPU, formats=["int8"])
    listed = (PlanId.FP32, PlanId.BF16, PlanId.INT8_ALL, PlanId.INT8_SAFE)
    assert competing_plans(integers) == listed
    assert {recipe.id for recipe in planned_recipes(integers.plan)} == {
        "uint8/per_tensor/per_tensor/mse",
        "uint8/per_tensor/per_channel/mse",
    }
    amax = config(CPU, formats=["int8"], scale="amax")
    assert {recipe.scale for recipe in planned_recipes(amax.plan)} == {"amax"}
    assert {recipe.activation_id for recipe in planned_recipes(config(CPU).plan)} == {"e4m3fn/amax"}


def test_integers_need_a_backend_that_multiplies_them(config):
    check_targets(config(CPU, RTX, formats=["int8"]))
    for target in (RTX, {"device": "cpu", "backends": ["inductor"]}):
        check_targets(config(target))
        with pytest.raises(ConfigError) as caught:
            check_targets(config(target, formats=["int8"]))
        assert caught.value.code == "E1533"
        assert caught.value.where == "`plan.formats`"


def test_what_the_user_lists_is_what_competes(config):
    listed = config(RTX, plans=["fp32", "fp8-safe"])
    assert competing_plans(listed, ("nvidia-rtx-ada",)) == (PlanId.FP32, PlanId.FP8_SAFE)


def test_a_cpu_gets_no_fp16_whoever_runs_it(config):
    assert competing_plans(config({"device": "cpu", "backends": ["inductor"]})) == LISTED
