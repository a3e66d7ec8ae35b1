"""What each provider is told and declines."""

from __future__ import annotations

from pathlib import Path

import onnx
import onnx.parser
import pytest

from loka_onnx.core.formats import E4M3FN, E4M3FNUZ, NumberFormat, Precision
from loka_onnx.core.plan import Decision, PrecisionPlan, Verdict
from loka_onnx.core.recipe import Recipe
from loka_onnx.engines.onnxruntime.io_binding_settings import settings_for, why_declined, without_graphs
from loka_onnx.engines.onnxruntime.providers import CPU, CUDA, MIGRAPHX, TENSORRT, Provider
from loka_onnx.engines.request import BatchRange, BuildRequest
from loka_onnx.errors import ModelError

HEADER = '<ir_version: 10, opset_import: ["" : 21]>'


def plan_of(base: Precision, float8: NumberFormat | None = None) -> PrecisionPlan:
    decision = Decision("fc", base, None, Verdict.NOT_JUDGED, "")
    if float8 is not None:
        recipe = Recipe.of(float8)
        decision = Decision("fc", Precision.FP8, recipe, Verdict.SAFE, "", 1.0, (1.0,))
    return PrecisionPlan("fp8-all" if float8 else base.value, "d", base, (decision,), {}, 0.0)


ROWS = "g (float[b,13] x, int64[b,26] ids) => (float[b,13] y) { y = Relu(x) }"


def request_for(tmp_path: Path, text: str = ROWS, **options: int) -> BuildRequest:
    onnx.save(onnx.parser.parse_model(f"{HEADER} {text}"), tmp_path / "m.onnx")
    return BuildRequest(
        model=tmp_path / "m.onnx",
        plan=plan_of(Precision.FP16),
        sites=(),
        target="nvidia-h100",
        architecture="sm90",
        batch=BatchRange(2, 64, 512, (32, 64, 128)),
        output=tmp_path / "e",
        sample=tmp_path / "sample.npz",
        options=options,
    )


@pytest.mark.parametrize(
    ("provider", "accepted"),
    [
        (CPU, {"fp32", "fp8"}),
        (CUDA, {"fp32", "fp16", "bf16", "fp8"}),
        (TENSORRT, {"fp16", "bf16"}),
        (MIGRAPHX, {"fp32", "fp16", "bf16"}),
    ],
)
def test_the_plans_that_a_provider_takes(provider: Provider, accepted: set[str]) -> None:
    plans = {base.value: plan_of(base) for base in (Precision.FP32, Precision.FP16, Precision.BF16)}
    plans["fp8"] = plan_of(Precision.BF16, E4M3FN)
    assert {name for name, plan in plans.items() if why_declined(provider, plan) is None} == accepted


def test_cuda_multiplies_no_fnuz() -> None:
    reason = why_declined(CUDA, plan_of(Precision.BF16, E4M3FNUZ))
    assert reason is not None and reason.startswith("site 'fc' asks for E4M3FNUZ")


def test_cuda_records_graphs_of_the_served_sizes_and_keeps_fp32_exact(tmp_path: Path) -> None:
    settings = settings_for(CUDA, request_for(tmp_path), "1.31.1")
    assert settings.options == {
        "arena_extend_strategy": "kSameAsRequested",
        "enable_cuda_graph": "1",
        "use_tf32": "0",
    }
    assert (settings.provider, settings.version) == ("cuda", "1.31.1")
    assert (settings.sizes, settings.programs) == ((32, 64, 128), False)


@pytest.mark.parametrize("provider", [CUDA, TENSORRT, MIGRAPHX])
def test_an_engine_without_graphs_says_nothing_of_them(provider: Provider, tmp_path: Path) -> None:
    asked = settings_for(provider, request_for(tmp_path, cuda_graph=0), "1.31.1")
    assert not [name for name in asked.options if "graph" in name and "migraphx" not in name]
    assert asked == without_graphs(settings_for(provider, request_for(tmp_path), "1.31.1"))
    # What compiles for shapes keeps its sizes; CUDA then needs none.
    assert asked.sizes == ((32, 64, 128) if provider.compiles else ())
    assert without_graphs(asked) == asked


def test_tensorrt_is_strongly_typed_over_the_range_of_batches(tmp_path: Path) -> None:
    options = settings_for(TENSORRT, request_for(tmp_path, optimization_level=5), "1").options
    assert options == {
        "trt_builder_optimization_level": "5",
        "trt_cuda_graph_enable": "1",
        "trt_profile_min_shapes": "x:2x13,ids:2x26",
        "trt_profile_opt_shapes": "x:64x13,ids:64x26",
        "trt_profile_max_shapes": "x:512x13,ids:512x26",
    }


def test_tensorrt_needs_the_shape_of_a_row(tmp_path: Path) -> None:
    text = "g (float[b,n] x) => (float[b,n] y) { y = Relu(x) }"
    with pytest.raises(ModelError, match=r"'x' has an open axis beside the batch(?s:.*)\[b, n\]"):
        settings_for(TENSORRT, request_for(tmp_path, text=text), "1")


@pytest.mark.parametrize("tune", [0, 1])
def test_migraphx_keeps_a_program_a_size(tune: int, tmp_path: Path) -> None:
    settings = settings_for(MIGRAPHX, request_for(tmp_path, exhaustive_tune=tune), "1")
    assert settings.options == {"migraphx_exhaustive_tune": str(tune)}
    assert (settings.sizes, settings.programs) == ((32, 64, 128), True)
