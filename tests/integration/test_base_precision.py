"""The base precision that a run chooses, what stays in FP32 beside it, and what measuring it leaves."""

from __future__ import annotations

import onnx
import pytest
from synthetic_runs import make_workplace

from loka_onnx.core import serde
from loka_onnx.core.formats import Precision
from loka_onnx.core.plan import PlanSet
from loka_onnx.core.profile import Profile
from loka_onnx.pipeline.run import RunOptions, Stage, run


@pytest.mark.slow
def test_fp16_where_the_rows_show_that_it_fits(tmp_path, finished):
    place = make_workplace(tmp_path / "place")
    settings = {"rows": 1000, "draws": 1}
    plan = {"base": "auto", "plans": ["fp32", "bf16", "fp16", "fp8-all"], "keep": ["relu2"]}
    place.write_run_file(plan={**plan, "protect": ["logits"]}, calibration=settings)
    run(place.run_file, RunOptions(until=Stage.PLAN))
    profile = serde.read(Profile, place.output / "profile.json")
    model = onnx.load(place.output / "model" / "modified.onnx")
    floats = {
        i.name for i in (*model.graph.input, *model.graph.value_info) if i.type.tensor_type.elem_type == 1
    }
    assert floats <= profile.tensors.keys() and "cvr" in profile.tensors
    assert 0.1 < profile.tensors["cvr"].amax < 1.0 and profile.tensors["dense"].amax > 3
    assert profile.seconds["magnitudes"].value > 0
    plans = serde.read(PlanSet, place.output / "plan.json")
    assert [p.base for p in plans.plans] == [Precision.FP32, Precision.BF16, Precision.FP16, Precision.FP16]
    assert plans.plan("fp8-all").base_reason == "8 times what was measured fits fp16"
    for name in ("bf16", "fp16", "fp8-all"):
        assert {wide.node: wide.reason for wide in plans.plan(name).wide} == {
            "relu2/relu": "kept by 'relu2'",
            "sigmoid/sigmoid": "is computed behind the last product of output 'cvr'",
        }
    # Nothing of it is measured where nothing asks for it.
    assert serde.read(Profile, finished.directory / "profile.json").tensors == {}
