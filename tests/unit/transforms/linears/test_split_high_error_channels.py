"""Loud channels are split off where they make most of the error, and the model stays what it was."""

import re
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import numpy_helper
from rewrite_models import Arrays, artifact, as_double, evaluate, initializer, named, op_types, parse

from loka_onnx.core.formats import E4M3FN, INT8, Precision
from loka_onnx.core.plan import Decision, PrecisionPlan, Verdict
from loka_onnx.core.recipe import PER_TENSOR
from loka_onnx.errors import TransformError
from loka_onnx.graph.model import GraphModel
from loka_onnx.sessions.onnx_session import OnnxSession
from loka_onnx.transforms.linears.split_high_error_channels import (
    TOLERANCE,
    SplitHighErrorChannels,
    channel_errors,
    rejoin,
)
from loka_onnx.transforms.precision.apply_plan import PlanForm, apply_plan
from loka_onnx.transforms.sequence import apply_mods

ROWS, K, N = 256, 64, 24
HIGH_ERROR = [3, 17, 40]
UNITS = np.where(np.isin(np.arange(K), HIGH_ERROR), 30.0, 1.0).astype(np.float32)
BODIES = {
    "Gemm": "[fc] y = Gemm(x, w, b)",
    "transposed Gemm": "[fc] y = Gemm<transB=1>(x, wt, b)",
    "Gemm without bias": "[fc] y = Gemm(x, w)",
    "MatMul and Add": "[fc] h = MatMul(x, w) y = Add(h, b)",
    "MatMul": "[fc] y = MatMul(x, w)",
    "rank 3": "z = Unsqueeze(x, one) [fc] h = MatMul(z, w) g = Add(h, b) y = Squeeze(g, one)",
    "a reader behind": "[fc] h = Gemm(x, w, b) r = Relu(h) y = Add(h, r)",
}


def model(body: str) -> onnx.ModelProto:
    random = np.random.default_rng(0)
    w = (random.normal(size=(K, N)) / np.sqrt(K)).astype(np.float32)
    constants = {
        "w": w, "wt": w.T.copy(), "b": random.normal(size=N).astype(np.float32), "one": np.array([1]),
    }  # fmt: skip
    return parse(body, constants, inputs=f"float[batch,{K}] x", outputs=f"float[batch,{N}] y")


def rows(seed: int = 0) -> Arrays:
    return {"x": np.random.default_rng(seed).normal(size=(ROWS, K)).astype(np.float32) * UNITS}


def values(proto: onnx.ModelProto, name: str) -> np.ndarray[Any, Any]:
    return numpy_helper.to_array(initializer(proto, name))


def split(proto, folder, left=0.1, site="fc", formats=(E4M3FN,)):
    source = artifact(proto, folder / "before.onnx")
    mods = [SplitHighErrorChannels({site: left}, [rows()], folder, formats)]
    result = apply_mods(source, [rows(1)], folder / "after.onnx", mods)
    (record,) = result.log.records
    return onnx.load(result.model.path), record


@pytest.mark.parametrize("formats", [(E4M3FN,), (INT8,), (E4M3FN, INT8)])
@pytest.mark.parametrize("form", BODIES)
def test_the_outputs_stay_and_the_loud_rows_are_zeros(form, formats, tmp_path):
    before = model(BODIES[form])
    after, record = split(before, tmp_path, formats=formats)
    assert not record.rolled_back and not record.declined
    (applied,) = record.applied
    assert applied.origins == {"fc": ("fc",), "fc.loud": ("fc",)}
    assert applied.what.startswith("16 of 64 channels, with 9")

    feeds = {"x": rows(2)["x"].astype(np.float64)}
    expected, found = (evaluate(as_double(proto), feeds) for proto in (before, after))
    np.testing.assert_allclose(found["y"], expected["y"], rtol=0, atol=1e-9 * np.abs(expected["y"]).max())

    main = values(after, named(after, "fc").input[1])
    main = main.T if "transB" in BODIES[form] else main
    channels = values(after, named(after, "fc.loud.gather").input[1])
    assert set(HIGH_ERROR) <= set(channels) and len(channels) == 16
    assert not main[channels].any() and main.any(axis=1).sum() == K - 16

    # The grid of INT8 follows the largest value, which is then that of the rest.
    x = as_double(after)
    read = onnx.helper.make_tensor_value_info(named(x, "fc").input[0], onnx.TensorProto.DOUBLE, None)
    x.graph.output.append(read)
    amax = np.abs(evaluate(x, feeds)[read.name]).reshape(-1, K).max(axis=0)
    assert (amax[channels] == 0.0).all() == (INT8 in formats)
    assert amax[[k for k in range(K) if k not in channels]].all()

    # Put back, they are the product that was there.
    graph = GraphModel.load(tmp_path / "after.onnx")
    rejoin(graph, "fc")
    graph.save(tmp_path / "joined.onnx")
    joined = onnx.load(tmp_path / "joined.onnx")
    assert op_types(joined) == op_types(before)
    was = values(before, "wt" if "wt" in BODIES[form] else "w")
    np.testing.assert_array_equal(values(joined, named(joined, "fc").input[1]), was)
    np.testing.assert_array_equal(evaluate(joined, rows())["y"], evaluate(before, rows())["y"])


@pytest.mark.parametrize("base", [Precision.FP32, Precision.BF16, Precision.FP16])
@pytest.mark.parametrize("fp8", [(), ("fc",), ("fc.loud",), ("fc", "fc.loud")])
def test_only_a_plan_with_a_part_in_fp8_pays_for_two_products(fp8, base, tmp_path):
    source = artifact(model(BODIES["Gemm"]), tmp_path / "before.onnx")
    split_model = apply_mods(
        source, [rows(1)], tmp_path / "after.onnx", [SplitHighErrorChannels({"fc": 0.1}, [rows()], tmp_path)]
    ).model
    decisions = tuple(
        Decision(site.name, Precision.FP8, PER_TENSOR, Verdict.SAFE, "", 0.25, (0.0078125,))
        if site.name in fp8
        else Decision(site.name, base, None, Verdict.NOT_JUDGED, "")
        for site in split_model.sites
    )
    plan = PrecisionPlan("p", split_model.digest, base, decisions, {}, 0.0)
    planned = apply_plan(split_model, plan, PlanForm(base), tmp_path / "planned.onnx")
    products = [n.name for n in onnx.load(planned.path).graph.node if n.op_type in {"Gemm", "MatMul"}]
    assert sorted(products) == (["fc", "fc.loud"] if fp8 else ["fc"])
    assert sorted(site.name for site in planned.sites) == sorted(products)
    joined = [record for record in planned.log.records if record.transform == "rejoin-loud-channels"]
    assert bool(joined) is not bool(fp8)
    if not fp8 and base is Precision.FP32:
        np.testing.assert_array_equal(
            OnnxSession(planned.path).run(rows(2))["y"], OnnxSession(source.path).run(rows(2))["y"]
        )


@pytest.mark.slow
def test_the_most_channels_do_where_they_leave_little_more_than_was_asked_for(tmp_path):
    before, least = model(BODIES["Gemm"]), 1.0
    for left in np.geomspace(0.5, 1e-6, 40):
        after, record = split(before, tmp_path, float(left))
        if record.declined:
            break
        (site,) = [node for node in after.graph.node if node.op_type == "Gather"]
        channels = len(values(after, site.input[1]))
        (kept,) = re.findall(r"with ([\d.]+)% of the error", record.applied[0].what)
        rest = 1.0 - float(kept) / 100
        assert rest <= left * (TOLERANCE if channels == K // 2 else 1.0) + 0.001
        least = min(least, rest)
    assert record.declined and channels == K // 2 and left * TOLERANCE < least + 0.001


def test_the_error_of_a_channel_is_that_of_the_product_in_it():
    random = np.random.default_rng(4)
    x, w = random.normal(size=(4000, 8)) * np.arange(1, 9), random.normal(size=(8, 300))
    amax = np.abs(x).max(axis=0)
    found = channel_errors(w, amax, x, E4M3FN)

    def rounded(values: Any, largest: float) -> Any:
        # The scales of the package are BF16 numbers.
        scale = float(np.float32(largest / 448).astype(ml_dtypes.bfloat16))
        scaled = np.clip(values / scale, -448, 448).astype(np.float32)
        return scaled.astype(ml_dtypes.float8_e4m3fn).astype(np.float64) * scale

    xq, wq = rounded(x, amax.max()), rounded(w, np.abs(w).max())
    for k in range(8):
        measured = np.square(np.outer(xq[:, k], wq[k]) - np.outer(x[:, k], w[k])).sum(axis=1).mean()
        assert found[k] == pytest.approx(measured, rel=0.1)


@pytest.mark.parametrize(("body", "left", "site", "reason"), [
    ("Gemm", 1e-6, "fc", "without its 32 loudest of 64 channels it still makes "),
    ("Gemm", 0.1, "gone", "there is no node of that name"),
    ("a reader behind", 0.1, "r", "there is no node of that name"),
])  # fmt: skip
def test_what_cannot_be_split_is_told_of(body, left, site, reason, tmp_path):
    after, record = split(model(BODIES[body]), tmp_path, left, site)
    assert not record.applied
    (declined,) = record.declined
    assert declined.at == site and declined.reason.startswith(reason)
    assert not [node for node in after.graph.node if node.op_type == "Gather"]


@pytest.mark.parametrize("width", [1, 16, 31])
@pytest.mark.parametrize("left", [0.1, 0.5])
def test_too_few_channels_for_an_aligned_part_are_left_alone(width, left, tmp_path):
    random = np.random.default_rng(0)
    w, x = (random.normal(size=size).astype(np.float32) for size in ((width, N), (ROWS, width)))
    proto = parse(BODIES["MatMul"], {"w": w}, inputs=f"float[batch,{width}] x", outputs=f"float[batch,{N}] y")
    mods = [SplitHighErrorChannels({"fc": left}, [{"x": x}], tmp_path)]
    (record,) = apply_mods(
        artifact(proto, tmp_path / "before.onnx"), [{"x": x}], tmp_path / "after.onnx", mods
    ).log.records
    assert [d.reason for d in record.declined] == [f"of its {width} channels no 16 are a small part"]


def test_a_weight_on_the_left_is_left_alone_and_a_part_must_be_one(tmp_path):
    w = np.ones((N, K), np.float32)
    proto = parse("t = Transpose<perm=[1, 0]>(x) [fc] h = MatMul(w, t) y = Transpose<perm=[1, 0]>(h)",
        {"w": w}, inputs=f"float[batch,{K}] x", outputs=f"float[batch,{N}] y")  # fmt: skip
    _, record = split(proto, tmp_path)
    assert [d.reason for d in record.declined] == ["its weight stands on the left"]
    for part in (0.0, 1.0, -0.1):
        with pytest.raises(TransformError) as caught:
            SplitHighErrorChannels({"fc": part}, [rows()], tmp_path)
        assert caught.value.code == "E0601"
