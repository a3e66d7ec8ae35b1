"""Strong typing in BF16 and FP16: which tensors carry which type, and what is refused."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import TensorProto, numpy_helper
from onnx.external_data_helper import set_external_data, uses_external_data
from qdq_models import PRODUCTS, quantizing_plan
from rewrite_models import artifact, evaluate, initializer, named, op_types, parse, random_rows

from loka_onnx.core.artifact import ModelArtifact
from loka_onnx.core.formats import Precision
from loka_onnx.core.plan import Decision, PrecisionPlan, Verdict
from loka_onnx.core.recipe import PER_CHANNEL_WEIGHT, PER_TENSOR
from loka_onnx.core.rewrite import Applied
from loka_onnx.errors import InternalError, TransformError
from loka_onnx.graph.model import GraphModel
from loka_onnx.sessions.onnx_session import OnnxSession
from loka_onnx.transforms.precision.apply_plan import PlanForm, apply_plan
from loka_onnx.transforms.precision.explicit_casts import cast_to_base

BASES = {Precision.BF16: TensorProto.BFLOAT16, Precision.FP16: TensorProto.FLOAT16}
both_bases = pytest.mark.parametrize("base", list(BASES))


@dataclass(frozen=True)
class Typed:
    source: ModelArtifact
    model: onnx.ModelProto
    path: Path
    applied: tuple[Applied, ...]

    @property
    def types(self) -> dict[str, int]:
        """Element type of every tensor, by strict inference."""
        inferred = onnx.shape_inference.infer_shapes(self.model, check_type=True, strict_mode=True)
        infos = (*inferred.graph.input, *inferred.graph.output, *inferred.graph.value_info)
        known = {info.name: info.type.tensor_type.elem_type for info in infos}
        return known | {tensor.name: tensor.data_type for tensor in inferred.graph.initializer}

    def fp32_tensors(self) -> set[str]:
        """Names of the FP32 tensors that a node reads or writes."""
        types = self.types
        touched = {name for node in self.model.graph.node for name in (*node.input, *node.output) if name}
        return {name for name in touched if types[name] == TensorProto.FLOAT}


def cast(proto: onnx.ModelProto, base: Precision, folder: Path, fp32: tuple[str, ...] = ()) -> Typed:
    source = artifact(proto, folder / "before.onnx")
    plan = quantizing_plan(source, {}, PER_TENSOR, base=base, fp8=(), fp32=fp32)
    planned = apply_plan(source, plan, PlanForm(base), folder / "after.onnx")
    after = onnx.load(planned.path, load_external_data=False)
    onnx.checker.check_model(planned.path, full_check=True)
    return Typed(source, after, planned.path, planned.log.records[-1].applied)


def mlp() -> onnx.ModelProto:
    """LayerNorm between two products; ``gain`` is read by two nodes."""
    return parse("[fc0] h = Gemm<transB=1>(x, w0, b0) [ln] n = LayerNormalization(h, g, b) a = Relu(n)"
        " c = Mul(a, gain) d = Mul(c, gain) [fc1] y = MatMul(d, w1)", {"w0": random_rows(16, 8) / 4,
        "b0": random_rows(16, seed=1), "g": np.linspace(0.5, 1.5, 16), "b": np.linspace(-1, 1, 16),
        "gain": np.array(1.5), "w1": random_rows(16, 8, seed=2) / 4})  # fmt: skip


TOLERANCES = {Precision.BF16: 0.2, Precision.FP16: 0.015}
"""Sums of 16 terms, up to 5.8, of rounded operands: 0.106 seen in BF16, 0.0068 in FP16. An output that
ignores the norm is off by more than 1."""


@both_bases
def test_everything_between_inputs_and_outputs_is_rounded_once_to_the_base(base, tmp_path):
    typed = cast(mlp(), base, tmp_path)
    before = onnx.load(typed.source.path)
    assert list(typed.model.graph.input) == list(before.graph.input)
    assert list(typed.model.graph.output) == list(before.graph.output)
    assert typed.fp32_tensors() == {"x", "y"}
    assert set(typed.types.values()) == {TensorProto.FLOAT, BASES[base]}
    assert op_types(typed.model)[0] == op_types(typed.model)[-1] == "Cast"
    dtype = {Precision.BF16: ml_dtypes.bfloat16, Precision.FP16: np.float16}[base]
    exact = numpy_helper.to_array(initializer(mlp(), "w0"))
    stored = numpy_helper.to_array(initializer(typed.model, f"w0.{base}"))
    np.testing.assert_array_equal(stored.astype(np.float32), exact.astype(dtype).astype(np.float32))
    names = [f"{name}.{base}" for name in ("b", "b0", "g", "gain", "w0", "w1")]
    assert sorted(t.name for t in typed.model.graph.initializer) == names
    assert Applied("model", f"6 constants rounded to {base}") in typed.applied
    x = {"x": random_rows(64, 8, seed=5)}
    exact, rounded = evaluate(mlp(), x)["y"], evaluate(typed.model, x)["y"]
    assert rounded.dtype == np.float32
    # Neither exact (nothing would have been rounded) nor far off.
    assert 1e-4 < float(np.abs(exact - rounded).max()) < TOLERANCES[base]
    if base is Precision.FP16:
        found = OnnxSession(typed.path).run(x)["y"]
        np.testing.assert_allclose(found, exact, rtol=0, atol=TOLERANCES[base])


@both_bases
def test_a_site_kept_in_fp32_stands_between_casts(base, tmp_path):
    typed = cast(mlp(), base, tmp_path, fp32=("ln",))
    norm = named(typed.model, "ln")
    assert typed.fp32_tensors() == {"x", "y", *norm.input, *norm.output}
    assert list(norm.input[1:]) == ["g", "b"]
    assert Applied("ln", "kept in FP32 between casts") in typed.applied
    assert op_types(typed.model).count("Cast") == 4


@both_bases
def test_a_kept_site_at_input_and_output_needs_no_cast(base, tmp_path):
    model = parse("[ln] y = LayerNormalization(x, g) [fc] z = MatMul(y, w)",
        {"g": np.ones(8), "w": np.eye(8)}, outputs="y, z")  # fmt: skip
    typed = cast(model, base, tmp_path, fp32=("ln",))
    assert named(typed.model, "ln").input[0] == "x"
    assert named(typed.model, "ln").output[0] == "y"
    # One cast of y for the product that reads it in the base precision, one of z back.
    assert op_types(typed.model) == ["LayerNormalization", "Cast", "MatMul", "Cast"]


def test_a_kept_site_that_the_graph_lacks_or_whose_type_is_not_known_is_refused(tmp_path):
    source = artifact(mlp(), tmp_path / "m.onnx")
    lost = Decision("gone", Precision.FP32, None, Verdict.NOT_JUDGED, "test")
    plan = PrecisionPlan("bf16", source.digest, Precision.BF16, (lost,), {}, 0.0)
    with pytest.raises(InternalError, match="no node named 'gone'"):
        apply_plan(source, plan, PlanForm(Precision.BF16), tmp_path / "after.onnx")
    source = artifact(mlp(), tmp_path / "m.onnx")
    graph = GraphModel.load(source.path)
    graph.node("ln").inputs[0].dtype = None
    plan = quantizing_plan(source, {}, PER_TENSOR, base=Precision.BF16, fp8=(), fp32=("ln",))
    with pytest.raises(TransformError) as caught:
        cast_to_base(graph, Precision.BF16, plan)
    assert caught.value.code == "E0605"


def with_table(folder: Path) -> onnx.ModelProto:
    """An embedding table in a file of its own, two lookups."""
    model = parse(
        "e = Gather(table, ids) f = Gather(table, more) s = Add(e, f) y = MatMul(s, w)",
        {"table": random_rows(100, 8), "w": np.eye(8)},
        inputs="int64[batch] ids, int64[batch] more",
    )
    table = initializer(model, "table")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "table.bin").write_bytes(table.raw_data)
    set_external_data(table, "table.bin", 0, len(table.raw_data))
    table.ClearField("raw_data")
    table.data_location = TensorProto.EXTERNAL
    return model


@both_bases
def test_a_table_outside_stays_fp32_and_its_rows_are_cast(base, tmp_path, monkeypatch):
    monkeypatch.setattr("loka_onnx.graph.storage.TABLE_LIMIT_BYTES", 0)
    typed = cast(with_table(tmp_path), base, tmp_path)
    table = initializer(typed.model, "table")
    assert uses_external_data(table)
    assert table.data_type == TensorProto.FLOAT
    assert (tmp_path / "table.bin").stat().st_size == 100 * 8 * 4
    assert typed.fp32_tensors() == {"table", "e", "f", "y"}
    assert Applied("block/e", "table stays in FP32, its rows are cast") in typed.applied
    rows = {"ids": np.array([3, 99]), "more": np.array([0, 7])}
    values = random_rows(100, 8)
    exact = values[rows["ids"]] + values[rows["more"]]
    whole = onnx.load(typed.path)
    # Two roundings of numbers up to 4: half of 2⁻⁶ each in BF16.
    np.testing.assert_allclose(evaluate(whole, rows)["y"], exact, rtol=0, atol=0.04)


UNDEFINED: dict[str, tuple[str, dict[str, Any]]] = {
    "Softplus": ("h = Softplus(x) y = Relu(h)", {}),
    "Einsum": ('h = Einsum<equation="bi,bi->bi">(x, x) y = Relu(h)', {}),
    "between_base_nodes": ("a = Relu(x) h = Softplus(a) b = Relu(h) y = Softplus(b)", {}),
    "TopK": ("h, i = TopK(x, k) y = Relu(h)", {"k": np.array([8])}),
    "Range": ("r = Range(zero, eight, one) y = Add(x, r)", {"zero": 0.0, "eight": 8.0, "one": 1.0}),
    "OneHot": ("i = Cast<to=7>(x) s = Squeeze(i, last) o = OneHot(s, depth, off_on) y = Relu(o)",
        {"last": np.array([1]), "depth": np.array(8), "off_on": np.array([0.0, 1.0])}),
}  # fmt: skip


@pytest.mark.parametrize("case", UNDEFINED)
def test_an_operator_without_a_bf16_form_stays_in_fp32(case, tmp_path):
    body, constants = UNDEFINED[case]
    inputs = "float[batch,1] x" if case == "OneHot" else "float[batch,8] x"
    typed = cast(parse(body, constants, inputs=inputs), Precision.BF16, tmp_path)
    assert_defined_types(typed)
    assert any("defines no bf16 for it" in a.what for a in typed.applied)
    # What does have a BF16 form runs in it.
    for node in typed.model.graph.node:
        if node.op_type in {"Relu", "Add"}:
            assert typed.types[node.output[0]] == TensorProto.BFLOAT16


def assert_defined_types(typed: Typed) -> None:
    """Every operand has a type that the operator set defines: what an ONNX engine checks when it loads."""
    types, version = typed.types, typed.model.opset_import[0].version
    spelled = {
        TensorProto.FLOAT: "tensor(float)",
        TensorProto.BFLOAT16: "tensor(bfloat16)",
        TensorProto.FLOAT16: "tensor(float16)",
    }
    for node in typed.model.graph.node:
        schema = onnx.defs.get_schema(node.op_type, version)
        for names, formal in ((node.input, schema.inputs), (node.output, schema.outputs)):
            for index, name in enumerate(names):
                kind = spelled.get(types[name]) if name else None
                if kind is not None:
                    assert kind in formal[min(index, len(formal) - 1)].types, (node.op_type, name, kind)


def test_limits_of_fp16_constants_and_identifiers_that_arrive_as_floats_are_not_rounded(tmp_path):
    typed = cast(parse("h = Softplus(x) y = Relu(h)"), Precision.FP16, tmp_path)
    assert typed.fp32_tensors() == {"x", "y"}
    cast(parse("y = Max(x, mask)", {"mask": -65504.0}), Precision.FP16, tmp_path)
    typed = cast(parse("y = Mul(x, small)", {"small": 2.3e-5}), Precision.FP16, tmp_path)
    stored = float(numpy_helper.to_array(initializer(typed.model, "small.fp16")))
    assert stored == float(np.float16(2.3e-5)) != 2.3e-5
    # BF16 holds whole numbers up to 256 only.
    model = parse("i = Cast<to=7>(x) e = Gather(table, i) y = Add(e, x)", {"table": np.arange(1000.0)},
        inputs="float[batch] x", outputs="float[batch] y")  # fmt: skip
    typed = cast(model, Precision.BF16, tmp_path)
    assert named(typed.model, "block/i").input[0] == "x"
    assert named(typed.model, "block/y").input[1] != "x"


FLAT, SQUARED = "float[batch,8]", "float[8,8]"
MAKERS = {
    "constant_of_shape": ("s = Shape(x) f = ConstantOfShape<value = float[1] {0.5}>(s) y = Add(x, f)", FLAT,
        0.5),
    "constant_of_shape_default": ("s = Shape(x) f = ConstantOfShape(s) y = Add(x, f)", FLAT, 0.0),
    "constant_node": ("f = Constant<value = float[1] {0.5}>() y = Add(x, f)", FLAT, 0.5),
    "constant_float": ("f = Constant<value_float = 0.5>() y = Add(x, f)", FLAT, 0.5),
    "cast_from_integers": ("i = Cast<to=7>(x) f = Cast<to=1>(i) z = Sub(f, f) y = Add(x, z)", FLAT, 0.0),
    "cast_like": ("i = Cast<to=7>(x) f = CastLike(i, x) z = Sub(f, f) y = Add(x, z)", FLAT, 0.0),
    "eye_like": ("e = EyeLike(x) y = Add(x, e)", SQUARED, np.eye(8)),
    "eye_like_of_a_type": ("e = EyeLike<dtype=1>(x) y = Add(x, e)", SQUARED, np.eye(8)),
}  # fmt: skip


@both_bases
@pytest.mark.parametrize("case", MAKERS)
def test_a_node_that_makes_a_tensor_makes_the_base_type(case, base, tmp_path):
    body, shape, shift = MAKERS[case]
    typed = cast(parse(body, inputs=f"{shape} x", outputs=f"{shape} y"), base, tmp_path)
    assert_defined_types(typed)
    assert typed.types[named(typed.model, "block/y").output[0]] == BASES[base]
    x = random_rows(8, 8)
    np.testing.assert_allclose(evaluate(typed.model, {"x": x})["y"], x + shift, rtol=0, atol=0.02)


def test_a_cast_to_an_integer_or_to_float64_keeps_its_type(tmp_path):
    model = parse(
        "i = Cast<to=7>(x) d = Cast<to=11>(i) n = Neg(d) f = Cast<to=1>(n) y = Relu(f)",
        outputs="float[batch,8] y, double[batch,8] d",
    )
    types = cast(model, Precision.BF16, tmp_path).types
    wanted = [TensorProto.INT64, TensorProto.DOUBLE, TensorProto.BFLOAT16]
    assert [types[name] for name in "idf"] == wanted


@both_bases
def test_an_absent_optional_input_stays_absent_and_an_infinite_constant_is_exact(base, tmp_path):
    typed = cast(parse("y = Clip(x, , six)", {"six": 6.0}), base, tmp_path)
    assert list(named(typed.model, "block/y").input)[1:] == ["", f"six.{base}"]
    for value in (np.inf, -np.inf):
        typed = cast(parse("y = Max(x, mask)", {"mask": value}), base, tmp_path)
        assert numpy_helper.to_array(initializer(typed.model, f"mask.{base}")) == value


@pytest.mark.parametrize(("base", "value", "evidence"), [
    (Precision.FP16, -1e9, "it holds -1e+09, fp16 ends at 65504"),
    (Precision.BF16, np.finfo(np.float32).min, "it holds -3.403e+38, bf16 ends at 3.38953e+38"),
])  # fmt: skip
def test_a_constant_that_overflows_is_refused(base, value, evidence, tmp_path):
    with pytest.raises(TransformError) as caught:
        cast(parse("y = Max(x, mask)", {"mask": float(value)}), base, tmp_path)
    assert (caught.value.code, caught.value.evidence) == ("E0603", evidence)


@both_bases
def test_control_flow_is_refused(base, tmp_path):
    model = parse("c = ReduceSum<keepdims=0>(x) b = Cast<to=9>(c) y = If<"
        "then_branch = t () => (float[batch,8] p) { p = Identity(x) },"
        "else_branch = e () => (float[batch,8] q) { q = Neg(x) }>(b)")  # fmt: skip
    with pytest.raises(TransformError) as caught:
        cast(model, base, tmp_path)
    assert caught.value.code == "E0606"
    assert "'block/y'" in caught.value.what


def quantized(base: Precision, folder: Path, case: str = "gemm_transb", size: float = 1.0) -> Typed:
    """An FP8 product whose weight has been multiplied by `size`."""
    product = PRODUCTS[case]
    model = product.model()
    tensor = initializer(model, "w")
    tensor.CopyFrom(numpy_helper.from_array(product.weights["w"] * np.float32(size), "w"))
    source = artifact(model, folder / "before.onnx")
    rows = {"x": random_rows(16, *product.shape)}
    recipe = PER_CHANNEL_WEIGHT if base is Precision.BF16 else PER_TENSOR
    plan = quantizing_plan(source, rows, recipe, base=base)
    planned = apply_plan(source, plan, PlanForm(base), folder / "after.onnx")
    onnx.checker.check_model(planned.path, full_check=True)
    return Typed(source, onnx.load(planned.path), planned.path, planned.log.records[-1].applied)


@both_bases
def test_qdq_is_typed_by_the_base_and_keeps_its_scales(base, tmp_path):
    typed = quantized(base, tmp_path)
    assert_defined_types(typed)
    assert typed.fp32_tensors() == {"x", "y"}
    rows = {"x": random_rows(16, *PRODUCTS["gemm_transb"].shape)}
    recipe = PER_CHANNEL_WEIGHT if base is Precision.BF16 else PER_TENSOR
    plan = quantizing_plan(typed.source, rows, recipe)
    exact = onnx.load(apply_plan(typed.source, plan, PlanForm(Precision.FP32), tmp_path / "fp32.onnx").path)
    for name in ("fc/weight/scale", "fc/in0/scale"):
        np.testing.assert_array_equal(
            numpy_helper.to_array(initializer(typed.model, f"{name}.{base}")).astype(np.float32),
            numpy_helper.to_array(initializer(exact, name)),
        )
    stored = [initializer(model, "fc/weight/fp8").raw_data for model in (typed.model, exact)]
    assert stored[0] == stored[1]


def test_a_scale_that_fp16_cannot_hold_is_refused(tmp_path):
    with pytest.raises(TransformError) as caught:
        quantized(Precision.FP16, tmp_path, size=0.01)
    error = caught.value
    assert (error.code, error.where) == ("E0604", "node 'fc/weight/dq'")
    assert error.evidence == "scale 0 of 1 is 2.241e-05, normal fp16 numbers begin at 6.104e-05"
    assert quantized(Precision.BF16, tmp_path, size=0.01).model
