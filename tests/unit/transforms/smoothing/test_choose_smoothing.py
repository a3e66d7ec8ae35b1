"""Smoothing is chosen where it lowers the measured FP8 error, and nowhere else."""

from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from rewrite_models import Arrays, artifact, evaluate, initializer, named, op_types, parse
from shape_models import weight

from loka_onnx.core.formats import E4M3FN, INT8
from loka_onnx.core.recipe import Granularity
from loka_onnx.core.rewrite import RewriteLog
from loka_onnx.graph.model import GraphModel
from loka_onnx.numerics.product_error import Rounding
from loka_onnx.transforms.linears import site_rows
from loka_onnx.transforms.linears.choose_smoothing import ChooseSmoothing
from loka_onnx.transforms.linears.pattern import read_linear
from loka_onnx.transforms.linears.site_rows import read_rows
from loka_onnx.transforms.sequence import DEFAULT_MODS, apply_mods

ROWS, K, N = 256, 32, 24


def rows(seed: int = 0, count: int = ROWS) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).normal(size=(count, K)).astype(np.float32)


WILD = np.where(np.arange(K) == 3, 3e6, 1.0).astype(np.float32)
"""One channel in units of its own; the rows of weights take them back."""
BODIES = {
    "norm": "[norm] n = LayerNormalization(x, gain, shift) [fc] y = Gemm(n, w, b)",
    "linear": "[fc1] h = Gemm(x, v, c) r = Relu(h) [fc] y = Gemm(r, w, b)",
    "product": "[unit] n = Mul(x, gain) [fc] y = Gemm(n, w, b)",
    "input": "[fc] y = Gemm(x, w, b)",
}
MAKERS = {"norm": "norm", "linear": "fc1", "product": "unit", "input": "x"}


def model(kind: str, units: np.ndarray[Any, Any]) -> onnx.ModelProto:
    """A layer ``fc`` whose input channels come in some units."""
    values = {"w": weight(K, N) / units[:, None], "b": weight(N)}
    if kind in ("norm", "product"):
        values["gain"] = units
    if kind == "norm":
        values["shift"] = units * weight(K)
    if kind == "linear":
        values |= {"v": weight(K, K, seed=1) * units, "c": weight(K) * units}
    return parse(BODIES[kind], values, inputs=f"float[batch,{K}] x", outputs=f"float[batch,{N}] y")


def feeds(kind: str, units: np.ndarray[Any, Any], seed: int = 0) -> Arrays:
    return {"x": rows(seed) * units if kind == "input" else rows(seed)}


def rounded(values: np.ndarray[Any, Any], axis: int | None = None) -> np.ndarray[Any, Any]:
    """E4M3 under amax / 448, by ml_dtypes."""
    scale = np.abs(values).max(axis=axis, keepdims=axis is not None) / 448
    return (values / scale).astype(ml_dtypes.float8_e4m3fn).astype(np.float64) * scale


def error(proto: onnx.ModelProto, site: str, x: Arrays) -> float:
    """Relative error energy of a product on rows, with per-channel weights."""
    node = named(proto, site)
    watched = onnx.ModelProto()
    watched.CopyFrom(proto)
    values = x.get(node.input[0])
    if values is None:
        watched.graph.output.append(onnx.helper.make_tensor_value_info(node.input[0], 1, ["batch", K]))
        values = evaluate(watched, x)[node.input[0]]
    w = onnx.numpy_helper.to_array(initializer(proto, node.input[1]))
    values, w = values.astype(np.float64), w.astype(np.float64)
    exact = values @ w
    return float(np.square(rounded(values) @ rounded(w, 0) - exact).sum() / np.square(exact).sum())


def constants(proto: onnx.ModelProto) -> dict[str, bytes]:
    return {tensor.name: tensor.raw_data for tensor in proto.graph.initializer}


def smoothed(proto, x, folder, *roundings: Rounding):
    source = artifact(proto, folder / "before.onnx")
    mod = ChooseSmoothing([x], folder, roundings or (Rounding(),))
    result = apply_mods(source, [x], folder / "after.onnx", [mod])
    again = apply_mods(result.model, [x], folder / "again.onnx", [mod])
    assert again.log.records[0].applied == ()
    assert again.model.digest == result.model.digest
    # Nothing is left of what it was measured with.
    assert sorted(path.name for path in folder.iterdir()) == ["after.onnx", "again.onnx", "before.onnx"]
    return result.log.records[0], onnx.load(result.model.path)


@pytest.mark.parametrize("kind", BODIES)
def test_one_wild_channel_is_smoothed(kind, tmp_path):
    before = model(kind, WILD)
    record, after = smoothed(before, feeds(kind, WILD), tmp_path)
    assert not record.rolled_back
    assert MAKERS[kind] not in {declined.at for declined in record.declined}
    assert [applied.at for applied in record.applied] == [MAKERS[kind]]
    assert "which moved into 'fc'; strength " in record.applied[0].what
    assert "relative FP8 error energy of 'fc'" in record.applied[0].what
    # On other rows, by another implementation: without, all other channels are below the smallest number.
    x = feeds(kind, WILD, seed=9)
    assert error(before, "fc", x) > 0.3
    assert error(after, "fc", x) < 3e-3
    # Powers of two: not a bit of the model in FP32.
    np.testing.assert_array_equal(evaluate(after, x)["y"], evaluate(before, x)["y"])
    assert op_types(after) == (["Mul", *op_types(before)] if kind == "input" else op_types(before))


def test_a_linear_behind_what_makes_no_units_is_a_maker(tmp_path):
    linear, x = model("linear", WILD), feeds("linear", WILD)
    values = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in linear.graph.initializer}
    body = f"t = Tanh(x) {BODIES['linear'].replace('Gemm(x', 'Gemm(t')}"
    before = parse(body, values, inputs=f"float[batch,{K}] x", outputs=f"float[batch,{N}] y")
    record, _ = smoothed(before, x, tmp_path)
    assert [applied.at for applied in record.applied] == ["fc1"]


@pytest.mark.parametrize("kind", BODIES)
def test_channels_alike_are_left_alone_with_the_figures(kind, tmp_path):
    before = model(kind, np.ones(K, np.float32))
    record, after = smoothed(before, feeds(kind, np.ones(1)), tmp_path)
    assert record.applied == ()
    told = {declined.at: declined.reason for declined in record.declined}
    sites = "'fc', 'fc1', summed," if kind == "linear" else "'fc'"
    assert told[MAKERS[kind]].startswith(f"no strength lowers the relative FP8 error energy of {sites} 0.00")
    assert " by 10%: 0.00" in told[MAKERS[kind]]
    assert " at strength " in told[MAKERS[kind]]
    assert constants(after) == constants(before)


def test_what_is_measured_is_the_error_of_the_product(tmp_path):
    before = model("input", np.ones(K, np.float32))
    x = feeds("input", np.ones(1))
    record, _ = smoothed(before, x, tmp_path, Rounding(weights=(Granularity.PER_CHANNEL,)))
    told = float(record.declined[0].reason.split("'fc' ")[1].split(" ")[0])
    # The half that accepts, under several scales.
    assert told == pytest.approx(error(before, "fc", {"x": x["x"][ROWS // 2 :]}), rel=0.1)


def test_two_formats_are_measured_side_by_side(tmp_path):
    """Channels of unequal range cost integers accuracy, and E4M3 nothing: factors for both are found."""
    uneven = np.geomspace(1.0, 64.0, K).astype(np.float32)
    before, x = model("norm", uneven), feeds("norm", uneven)
    told = {}
    for name, formats in (("fp8", (E4M3FN,)), ("both", (E4M3FN, INT8))):
        folder = tmp_path / name
        folder.mkdir()
        record, _ = smoothed(before, x, folder, *map(Rounding, formats))
        told[name] = {each.at: each.what for each in record.applied}
        told[name] |= {each.at: each.reason for each in record.declined}
    assert told["fp8"][MAKERS["norm"]].startswith("no strength lowers the relative FP8 error energy of 'fc' ")
    assert "the relative FP8 and INT8 error energy of 'fc', summed, " in told["both"][MAKERS["norm"]]
    assert "which moved into 'fc'; strength " in told["both"][MAKERS["norm"]]


def test_linears_of_one_tensor_share_the_factors_and_a_chain_is_smoothed_until_nothing_changes(tmp_path):
    body = (
        "[norm] n = LayerNormalization(x, gain) [fc] f = MatMul(n, w) [gate] g = MatMul(n, u) y = Mul(f, g)"
    )
    values = {"w": weight(K, N) / WILD[:, None], "u": weight(K, N, seed=2) / WILD[:, None], "gain": WILD}
    before = parse(body, values, inputs=f"float[batch,{K}] x", outputs=f"float[batch,{N}] y")
    record, after = smoothed(before, {"x": rows()}, tmp_path)
    assert len(record.applied) == 1
    assert "moved into 'fc', 'gate'; " in record.applied[0].what
    assert "of 'fc', 'gate', summed," in record.applied[0].what
    for site in ("fc", "gate"):
        assert error(after, site, {"x": rows(9)}) < 3e-3 < error(before, site, {"x": rows(9)})
    # Each layer is a reader and a maker; `smoothed` runs the mod again and finds nothing.
    other = np.roll(WILD, 7)
    body = "[norm] n = LayerNormalization(x, gain) [fc1] h = MatMul(n, v) r = Relu(h) [fc2] y = MatMul(r, w)"
    values = {"gain": WILD, "v": weight(K, K) / WILD[:, None] * other, "w": weight(K, N) / other[:, None]}
    before = parse(body, values, inputs=f"float[batch,{K}] x", outputs=f"float[batch,{N}] y")
    record, after = smoothed(before, {"x": rows()}, tmp_path)
    assert [applied.at for applied in record.applied] == ["norm", "fc1"]
    assert record.applied[1].origins == {"fc2": ("fc2",), "fc1": ("fc1",)}
    for site in ("fc1", "fc2"):
        assert error(after, site, {"x": rows(9)}) < 3e-3


def test_a_channel_without_values_keeps_its_factor_and_few_rows_choose_nothing(tmp_path):
    x = feeds("input", WILD)
    x["x"][:, 5] = 0.0
    record, after = smoothed(model("input", WILD), x, tmp_path)
    assert len(record.applied) == 1
    (scaled,) = (node for node in after.graph.node if node.op_type == "Mul")
    factors = onnx.numpy_helper.to_array(initializer(after, scaled.input[1]))
    assert np.isfinite(factors).all()
    assert np.frexp(factors)[0].tolist() == [0.5] * K
    np.testing.assert_array_equal(evaluate(after, x)["y"], evaluate(model("input", WILD), x)["y"])
    x = {"x": rows(count=63) * WILD}
    (tmp_path / "few").mkdir()
    record, _ = smoothed(model("input", WILD), x, tmp_path / "few")
    assert [(d.at, d.reason) for d in record.declined] == [
        ("x", "63 rows are too few to measure errors on; 64 are needed")
    ]


def test_the_default_mods_leave_what_was_smoothed(tmp_path):
    """A norm's scale is folded into linears; the powers of two of smoothing are not folded back."""
    x = feeds("input", WILD)
    body = "[norm] n = RMSNormalization<axis=-1>(x, gain) [fc] y = MatMul(n, w)"
    values = {"gain": np.linspace(0.7, 1.9, K), "w": weight(K, N) / WILD[:, None] * 1e6}
    before = parse(body, values, inputs=f"float[batch,{K}] x", outputs=f"float[batch,{N}] y", opset=23)
    source = artifact(before, tmp_path / "before.onnx")

    def mods() -> list[Any]:
        return [*(kind() for kind in DEFAULT_MODS), ChooseSmoothing([x], tmp_path)]

    once = apply_mods(source, [x], tmp_path / "once.onnx", mods())
    assert applied_by(once.log) == {"fold-norm-affine", "smooth-by-error"}
    twice = apply_mods(once.model, [x], tmp_path / "twice.onnx", mods())
    assert applied_by(twice.log) == set()
    assert twice.model.digest == once.model.digest


def applied_by(log: RewriteLog) -> set[str]:
    return {record.transform for record in log.records if record.applied}


def test_rows_are_kept_by_halves_and_a_large_layer_is_measured_on_some_columns(monkeypatch, tmp_path):
    body = "[a] h = MatMul(v, x) r = Relu(h) t = Transpose<perm=[0,2,1]>(r) [fc] y = MatMul(t, w)"
    proto = parse(body, {"v": weight(6, 4), "w": weight(6, 3)}, inputs="float[batch,4,5] x",
        outputs="float[batch,5,3] y")  # fmt: skip
    artifact(proto, tmp_path / "m.onnx")
    x = np.random.default_rng(0).normal(size=(90, 4, 5)).astype(np.float32)
    graph = GraphModel.load(tmp_path / "m.onnx")
    linears = {site: read_linear(graph, graph.node(site)) for site in ("a", "fc")}
    hidden = np.maximum(np.einsum("ij,bjk->bik", weight(6, 4), x), 0)
    vectors = {"a": np.moveaxis(x, 1, -1), "fc": np.moveaxis(hidden, 1, -1)}

    def kept() -> dict[str, site_rows.SiteRows]:
        return read_rows(graph, linears, [{"x": x[:60]}, {"x": x[60:]}], tmp_path)

    for site, found in kept().items():
        np.testing.assert_allclose(found.amax, np.abs(vectors[site]).max(axis=(0, 1)), rtol=1e-6)
        for half, part in zip(found.halves, (vectors[site][:45], vectors[site][45:]), strict=True):
            np.testing.assert_allclose(half, part.reshape(half.shape), rtol=1e-5, atol=1e-6)
    # Batch by batch of 3 rows, and fewer vectors than there are: the ranges are still those of all.
    monkeypatch.setattr(site_rows, "_ELEMENTS", 150)
    monkeypatch.setattr(site_rows, "_FEWEST_VECTORS", 20)
    for site, found in kept().items():
        np.testing.assert_allclose(found.amax, np.abs(vectors[site]).max(axis=(0, 1)), rtol=1e-6)
        everything = {tuple(np.round(v, 4)) for v in vectors[site].reshape(-1, found.amax.size).tolist()}
        for half in found.halves:
            assert 20 <= len(half) <= 40
            assert {tuple(np.round(v, 4)) for v in half.tolist()} <= everything
    proto = parse("y = MatMul(x, w)", {"w": weight(8, 100)}, outputs="float[batch,100] y")
    artifact(proto, tmp_path / "m.onnx")
    graph = GraphModel.load(tmp_path / "m.onnx")
    linear = read_linear(graph, graph.node("block/y"))
    assert site_rows.measured_columns(linear).tolist() == list(range(100))
    monkeypatch.setattr(site_rows, "_WEIGHTS", 160)
    columns = site_rows.measured_columns(linear)
    assert len(columns) == 20
    assert (columns[0], columns[-1]) == (0, 99)
