"""The base precision that a run chooses, what stays in FP32 beside it, and what measuring it leaves."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper
from synthetic_runs import HIDDEN, make_workplace

from loka_onnx.config import load_run_file
from loka_onnx.core import serde
from loka_onnx.core.formats import Precision
from loka_onnx.core.plan import PlanSet
from loka_onnx.core.profile import Profile
from loka_onnx.pipeline.run import RunOptions, Stage, run


@pytest.mark.slow
def test_fp16_where_the_rows_show_that_it_fits(tmp_path):
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
    config = load_run_file(place.write_run_file(calibration=settings))
    run(config.model_copy(update={"output": tmp_path / "plain"}), RunOptions(until=Stage.PLAN))
    assert serde.read(Profile, tmp_path / "plain" / "profile.json").tensors == {}


@pytest.mark.slow
def test_a_kept_batch_norm_that_is_folded_ends_no_run(tmp_path):
    place = make_workplace(tmp_path / "place")
    path = place.path / "ranker.onnx"
    proto = onnx.load(path)
    (index,) = (i for i, node in enumerate(proto.graph.node) if node.name == "relu1")
    numbers = ["gain", "shift", "mean", "variance"]
    for name, value in zip(numbers, (1.5, 0.25, 0.125, 2.0), strict=True):
        proto.graph.initializer.append(numpy_helper.from_array(np.full(HIDDEN, value, np.float32), name))
    proto.graph.node.insert(
        index, helper.make_node("BatchNormalization", ["h1", *numbers], ["n1"], "tower.bn")
    )
    proto.graph.node[index + 1].input[0] = "n1"
    onnx.save(proto, path)
    place.write_run_file(
        plan={"keep": ["tower.bn", "fc2"]},
        calibration={"rows": 1000, "draws": 1},
        mods={"split_channels": True},
    )
    run(place.run_file, RunOptions(until=Stage.PLAN))
    modified = onnx.load(place.output / "model" / "modified.onnx")
    assert "BatchNormalization" not in {node.op_type for node in modified.graph.node}
    plans = serde.read(PlanSet, place.output / "plan.json")
    assert plans.notes == (
        "'tower.bn' of plan.keep decides nothing: mods removed all that it names in the exported model",
    )
    assert plans.plan("fp8-all").decision("fc2").reason.startswith("kept in bf16 by 'fc2'")
