"""Which plans compete where none are listed."""

from collections.abc import Callable
from pathlib import Path

import pytest
from small_configs import config_of

from loka_onnx.config import PlanId, RunConfig
from loka_onnx.core.formats import E4M3FN, E5M2, INT8, UINT8, Precision
from loka_onnx.core.timing import Kernel, KernelTiming, Provenance, Shape
from loka_onnx.errors import ConfigError
from loka_onnx.pipeline.plans import (
    base_precision,
    check_targets,
    competing_plans,
    moot_precisions,
    planned_formats,
    planned_recipes,
)
from loka_onnx.planning.site_speed import DeviceTimings

LISTED = (PlanId.FP32, PlanId.BF16, PlanId.FP8_ALL, PlanId.FP8_SAFE)
WITH_FP16 = (PlanId.FP32, PlanId.BF16, PlanId.FP16, PlanId.FP8_ALL, PlanId.FP8_SAFE)


@pytest.fixture
def config(tmp_path: Path) -> Callable[..., RunConfig]:
    """Makes a run file of targets and what it says of plans."""
    return lambda *targets, **plan: config_of(tmp_path, targets=list(targets), plan=plan)


@pytest.fixture(autouse=True)
def instructions(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Sets the integer instructions of this processor; it has none before."""

    def set_instructions(*names: str) -> None:
        monkeypatch.setattr("loka_onnx.engines.onnxruntime.backend.integer_instructions", lambda: names)

    set_instructions()
    return set_instructions


CPU = {"device": "cpu", "backends": ["onnxruntime"]}
RTX = {"device": "nvidia-rtx-ada", "backends": ["tensorrt_rtx"]}
A100, H100 = ({"device": f"nvidia-{name}", "backends": ["inductor"]} for name in ("a100", "h100"))
INDUCTOR = {"device": "cpu", "backends": ["inductor"]}


@pytest.mark.parametrize(
    ("targets", "timed", "plans"),
    [
        ((CPU,), (), LISTED),
        ((RTX,), (), WITH_FP16),
        ((CPU, RTX), (), WITH_FP16),
        ((CPU, RTX), (Precision.FP8,), (*WITH_FP16, PlanId.FP8_FAST)),
        # No INT8 is planned.
        ((CPU, RTX), (Precision.INT8,), WITH_FP16),
        ((CPU,), (Precision.FP8,), LISTED),
    ],
)
def test_high_precision_competes_where_it_runs(config, targets, timed, plans):
    kernels = (Kernel("nvidia-rtx-ada", "inductor", "mm", precision) for precision in timed)
    source = Provenance("a device", {}, "", "2026-11-27")
    times = tuple(KernelTiming(kernel, Shape(8, 16, 16), 1.0, None, source) for kernel in kernels)
    known = [DeviceTimings("nvidia-rtx-ada", "inductor", times, (8,))]
    assert competing_plans(config(*targets), known) == plans
    if timed:
        integers = competing_plans(config(*targets, formats=["int8"]), known)
        assert (PlanId.INT8_FAST in integers) is (RTX in targets and Precision.INT8 in timed)


@pytest.mark.parametrize(
    ("targets", "instructions_here", "formats"),
    [
        ((CPU,), (), ["e4m3fn"]),
        ((CPU,), ("avx512_vnni",), ["uint8"]),
        ((RTX,), ("avx512_vnni",), ["e4m3fn"]),
        ((CPU, RTX), ("avx512_vnni",), ["e4m3fn", "uint8"]),
        ((CPU, RTX), (), ["e4m3fn"]),
        ((INDUCTOR,), ("avx512_vnni",), ["e4m3fn"]),
        ((A100,), (), ["int8"]),
        ((H100,), (), ["e4m3fn"]),
        ((H100, CPU), ("avx512_vnni",), ["e4m3fn", "uint8"]),
        # One dialect for both: the GPU multiplies no other.
        ((A100, CPU), ("avx512_vnni",), ["int8"]),
        ((A100, H100), (), ["e4m3fn", "int8"]),
    ],
)
def test_formats_are_what_the_targets_multiply(config, instructions, targets, instructions_here, formats):
    instructions(*instructions_here)
    assert [format.id for format in planned_formats(config(*targets))] == formats


def test_the_untouched_model_competes_on_gpus_of_inductor(config, tmp_path):
    for targets in ((H100,), (CPU, A100)):
        assert PlanId.UNTOUCHED in competing_plans(config(*targets))
    for targets in ((CPU,), (INDUCTOR,), (RTX,)):
        assert PlanId.UNTOUCHED not in competing_plans(config(*targets))
    # The exported model has no part of its own for the lookups.
    cut = config_of(tmp_path, model={"onnx": "ranker.onnx", "split_sparse": True}, targets=[H100])
    assert PlanId.UNTOUCHED not in competing_plans(cut)


def test_formats_follow_what_is_asked_for(config, instructions):
    instructions("avx512_vnni")
    plans = ["fp32", "fp8-all", "int8-safe"]
    assert planned_formats(config(CPU, plans=plans[:2])) == (E4M3FN,)
    assert planned_formats(config(CPU, plans=plans)) == (E4M3FN, UINT8)
    assert planned_formats(config(RTX, plans=plans[::2])) == (INT8,)
    both = config(CPU, formats=["int8", "fp8"], format="E5M2")
    assert planned_formats(both) == (E5M2, UINT8)
    # Inductor simulates it on the CPU.
    for target in (H100, INDUCTOR):
        assert planned_formats(config(target, formats=["int8", "fp8"])) == (E4M3FN, INT8)
    # Mixed plans of the GPU need what it multiplies; its other plans do not run there.
    for changes in ({"formats": ["int8", "fp8"]}, {"plans": ["fp32", "mixed"]}):
        assert planned_formats(config(H100, CPU, **changes)) == (E4M3FN, INT8)
    quantized = (PlanId.FP8_ALL, PlanId.FP8_SAFE, PlanId.INT8_ALL, PlanId.INT8_SAFE)
    assert competing_plans(both) == (PlanId.FP32, PlanId.BF16, *quantized)
    mixing = competing_plans(config(H100, formats=["int8", "fp8"]))
    assert mixing[-5:] == (*quantized, PlanId.MIXED)


@pytest.mark.parametrize(
    ("targets", "moot"),
    [
        ((CPU,), {"cpu": (Precision.FP8,)}),
        # The simulation on the CPU judges the plans for a GPU that is not here.
        ((CPU, RTX), {"nvidia-rtx-ada": (Precision.INT8,)}),
        ((INDUCTOR,), {}),
        (({**CPU, "backends": ["inductor", "onnxruntime"]},), {"cpu": (Precision.FP8,)}),
    ],
)
def test_engines_that_cannot_be_chosen_are_not_built(config, instructions, targets, moot):
    instructions("avx512_vnni")
    assert moot_precisions(config(*targets, plans=["fp32", "fp8-safe", "int8-safe"])) == moot
    assert moot_precisions(config(*targets, plans=["fp32", "fp8-safe"])) == {}


def test_integers_compete_where_they_are_asked_for(config):
    integers = config(CPU, formats=["int8"])
    listed = (PlanId.FP32, PlanId.BF16, PlanId.INT8_ALL, PlanId.INT8_SAFE)
    assert competing_plans(integers) == listed
    assert {recipe.id for recipe in planned_recipes(integers)} == {
        "uint8/per_tensor/per_tensor/mse",
        "uint8/per_tensor/per_channel/mse",
    }
    amax = config(CPU, formats=["int8"], scale="amax")
    assert {recipe.scale for recipe in planned_recipes(amax)} == {"amax"}
    assert {recipe.activation_id for recipe in planned_recipes(config(CPU))} == {"e4m3fn/amax"}


def test_integers_need_a_backend_that_multiplies_them(config):
    check_targets(config(CPU, RTX, formats=["int8"]))
    check_targets(config(A100, formats=["int8"]))
    check_targets(config(RTX, formats=["int8"]))
    mi300 = {"device": "amd-mi300x", "backends": ["migraphx"]}
    check_targets(config(mi300, formats=["int8"]))
    assert planned_formats(config(mi300, formats=["int8"])) == (INT8,)
    assert planned_formats(config(mi300)) == (E4M3FN,)
    assert PlanId.MIXED in competing_plans(config(mi300, formats=["fp8", "int8"]))
    cuda = {"device": "nvidia-h100", "backends": ["onnxruntime"]}
    check_targets(config(cuda))
    for key, value in (("formats", ["int8"]), ("plans", ["fp32", "int8-safe"]), ("plans", ["fp32", "mixed"])):
        with pytest.raises(ConfigError) as caught:
            check_targets(config(cuda, **{key: value}))
        assert (caught.value.code, caught.value.where) == ("E1533", f"`plan.{key}`")


def test_a_gpu_without_bf16_has_fp16_as_the_base(config):
    turing = {"device": "nvidia-rtx-turing", "backends": ["tensorrt_rtx"]}
    assert base_precision(config(CPU, RTX)) is Precision.BF16
    # None is FP16 where magnitudes fit.
    assert base_precision(config(turing)) is None
    assert base_precision(config(CPU, RTX, turing)) is None
    assert base_precision(config(turing, base="bf16")) is Precision.BF16
    assert base_precision(config(RTX, base="auto")) is None


def test_what_the_user_lists_is_what_competes(config):
    listed = config(RTX, plans=["fp32", "fp8-safe"])
    assert competing_plans(listed, ("nvidia-rtx-ada",)) == (PlanId.FP32, PlanId.FP8_SAFE)


def test_a_cpu_gets_no_fp16_whoever_runs_it(config):
    assert competing_plans(config({"device": "cpu", "backends": ["inductor"]})) == LISTED
