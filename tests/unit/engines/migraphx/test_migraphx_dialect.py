"""The dialect as a whole, on models that the planner's own transform wrote, and the rule for norms."""

from copy import deepcopy
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto as T
from onnx_text import parsed
from planned import quantized_site
from planned_graphs import NUMPY, Array, Planned, constants, evaluate, quantizers, reread

from loka_onnx.core.artifact import ModelArtifact
from loka_onnx.core.formats import E4M3FN, INT8, NumberFormat, Precision
from loka_onnx.core.plan import Decision, PrecisionPlan, Verdict
from loka_onnx.core.recipe import Granularity, Recipe
from loka_onnx.engines.draft import GraphDraft
from loka_onnx.engines.migraphx.dialect import Float8Form, decompose_rms_norms, write_dialect
from loka_onnx.errors import ModelError
from loka_onnx.graph.model import GraphModel
from loka_onnx.graph.sites import find_sites
from loka_onnx.numerics.rounding import fake_quantize, storage_type
from loka_onnx.sessions.backends import fusions_of
from loka_onnx.transforms.precision.apply_plan import PlanForm, apply_plan

EPSILON = 1e-3
ROWS = 6


def block(folder: Path) -> Path:
    """A residual block: x + fc1(relu(fc0(rms(x)))), then a head; fc0 and head read what others read."""
    body = f"""
        [norm] n = RMSNormalization<epsilon={EPSILON}>(x, g)
        [fc0] a = MatMul(n, w0) [relu] r = Relu(a)
        [fc1] c = Gemm<transB=1>(r, w1, b1) [residual] d = Add(c, n)
        [head] y = MatMul(d, w2)
    """
    random = np.random.default_rng(3)
    sizes = {"g": (1, 16), "w0": (4, 16, 32), "w1": (6, 16, 32), "b1": (1, 16), "w2": (4, 16, 2)}
    constants = {name: random.normal(size=shape) / divisor for name, (divisor, *shape) in sizes.items()}
    ends = {"inputs": "float[batch,16] x", "outputs": "float[batch,2] y"}
    model = parsed(body, constants, opset=23, **ends)
    onnx.checker.check_model(model, full_check=True)
    path = folder / "block.onnx"
    onnx.save(model, path)
    return path


def planned(
    folder: Path, base: Precision, *, per_channel: bool = False, format: NumberFormat = E4M3FN
) -> Path:
    """The block with its three products in eight bits, as this backend's candidates are written."""
    source = block(folder)
    graph = GraphModel.load(source)
    sites = find_sites(graph)
    recipe = Recipe.of(format, Granularity.PER_CHANNEL if per_channel else Granularity.PER_TENSOR)
    scale = 2.0**-6 if format.is_float else 2.0**-5
    decisions = [
        Decision(site.name, base, None, Verdict.NOT_JUDGED, "test")
        if site.weight is None
        else quantized_site(graph, site, recipe, scale)
        for site in sites
    ]
    plan = PrecisionPlan("fp8-all", "digest", base, tuple(decisions), {}, 1.0)
    artifact = ModelArtifact(source, "digest", 23, (), (), sites, "test")
    target = folder / "planned" / "model.onnx"
    return apply_plan(artifact, plan, PlanForm(base, fusions_of("migraphx")), target).path


def written(path: Path, form: Float8Form) -> onnx.ModelProto:
    model = write_dialect(onnx.load(path, load_external_data=False), path.parent, form)
    onnx.checker.check_model(model, full_check=True)
    return model


@pytest.mark.parametrize("form", Float8Form)
@pytest.mark.parametrize("per_channel", [False, True])
@pytest.mark.parametrize("format", [E4M3FN, INT8], ids=str)
def test_the_numbers_of_an_fp32_plan_stay(tmp_path, format, form, per_channel):
    path = planned(tmp_path, Precision.FP32, per_channel=per_channel, format=format)
    model = written(path, form)
    x = np.random.default_rng(5).normal(size=(ROWS, 16)).astype(np.float32)
    (expected,) = evaluate(onnx.load(path), x=x)
    (got,) = evaluate(reread(model) if form is Float8Form.CARRIER else model, x=x)
    # Sums of up to 32 FP32 terms in another order; one step of an activation would be 2e-2.
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("base", [Precision.BF16, Precision.FP16])
@pytest.mark.parametrize("form", Float8Form)
def test_the_numbers_of_a_16_bit_plan_stay(tmp_path: Path, base: Precision, form: Float8Form) -> None:
    """Against the same plan in FP32: what remains is rounding to the base, and FP8 steps that it flips."""
    for name in ("base", "fp32"):
        (tmp_path / name).mkdir()
    model = written(planned(tmp_path / "base", base), form)
    exact = onnx.load(planned(tmp_path / "fp32", Precision.FP32))
    x = np.random.default_rng(5).normal(size=(256, 16)).astype(np.float32)
    (expected,) = evaluate(exact, x=x)
    (got,) = evaluate(reread(model) if form is Float8Form.CARRIER else model, x=x)
    error = np.sqrt(np.mean((got - expected) ** 2) / np.mean(expected**2))
    # A sixteenth of the activations lie within a BF16 rounding of an FP8 step (2⁻⁴), in each of three layers:
    # √(3/16)·2⁻⁴ = 2.7 %. A scale or a type that is wrong by a factor of two gives 50 % and more.
    assert error < 2.0**-4


@pytest.mark.parametrize("form", Float8Form)
@pytest.mark.parametrize("base", [Precision.FP32, Precision.BF16])
@pytest.mark.parametrize(("format", "kind"), [(E4M3FN, T.FLOAT8E4M3FNUZ), (INT8, T.INT8)], ids=str)
def test_nothing_that_migraphx_drops_or_refuses_is_left(tmp_path, format, kind, form, base):
    model = written(planned(tmp_path, base, per_channel=True, format=format), form)
    tensors = {tensor.name: tensor for tensor in model.graph.initializer}

    def readers(tensor: str) -> list[str]:
        return [node.op_type for node in model.graph.node if tensor in node.input]

    assert not {"Gemm", "RMSNormalization"} & {node.op_type for node in model.graph.node}
    assert T.FLOAT8E4M3FN not in {tensor.data_type for tensor in tensors.values()}
    assert len(quantizers(model)) == 3 + 3 + 3
    for node in quantizers(model):
        scale, zero = (tensors[name] for name in node.input[1:])
        assert (scale.data_type, list(scale.dims), len(scale.raw_data)) == (T.FLOAT, [], 4)
        assert (zero.data_type, list(zero.dims), len(zero.raw_data)) == (kind, [], 1)
        if node.op_type == "DequantizeLinear":
            assert {*readers(node.output[0])} == {"MatMul"}
        else:
            # No residual is read beside a Q.
            assert readers(node.input[0]) == ["QuantizeLinear"]
    # Sites keep their names on what multiplies.
    products = {node.name for node in model.graph.node if node.op_type == "MatMul"}
    assert products == {"fc0", "fc1", "head"}


def test_the_planned_model_is_not_changed_nor_one_without_fp8(tmp_path: Path) -> None:
    path = planned(tmp_path, Precision.BF16)
    model = onnx.load(path)
    before = model.SerializeToString()
    write_dialect(model, path.parent, Float8Form.FNUZ)
    assert model.SerializeToString() == before
    p = Planned(T.BFLOAT16)
    model = p.model(p.op("MatMul", [p.enter(), p.constant("w", p.normal(8, 4))], "fc"))
    after = write_dialect(model, Path("nowhere"), Float8Form.FNUZ)
    assert list(after.graph.node) == list(model.graph.node)


def rms(base: int, *, axis: int | None = None, shape: tuple[int, ...] = (8,), scale: Array | None = None):
    p = Planned(base)
    gain = p.constant("g", np.linspace(0.5, 2, shape[-1]) if scale is None else scale)
    attributes = {"epsilon": EPSILON} if axis is None else {"epsilon": EPSILON, "axis": axis}
    return p.model(p.op("RMSNormalization", [p.enter(), gain], "norm", **attributes), opset=23, x=shape)


def decomposed(model: onnx.ModelProto) -> onnx.ModelProto:
    draft = GraphDraft(deepcopy(model), Path("nowhere"))
    decompose_rms_norms(draft)
    result = draft.finished()
    onnx.checker.check_model(result, full_check=True)
    return result


@pytest.mark.parametrize(
    ("base", "rounding"), [(T.FLOAT, 2.0**-21), (T.BFLOAT16, 2.0**-7), (T.FLOAT16, 2.0**-10)]
)
def test_an_rms_norm_is_decomposed_with_fp32_statistics(base: int, rounding: float) -> None:
    model = decomposed(rms(base))
    assert "RMSNormalization" not in {node.op_type for node in model.graph.node}
    # Large enough for the squares to overflow FP16, were they taken there.
    x = (np.random.default_rng(1).normal(size=(4, 8)) * 1000).astype(np.float32)
    wide = x.astype(NUMPY[base]).astype(np.float64)
    gain = np.linspace(0.5, 2, 8).astype(NUMPY[base]).astype(np.float64)
    expected = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + EPSILON) * gain
    # The quotient and its product with the scale are rounded to the base.
    np.testing.assert_allclose(evaluate(model, x=x)[0], expected, rtol=rounding)
    kept = next(node for node in model.graph.node if node.name == "norm")
    assert kept.op_type == "Mul"


@pytest.mark.parametrize("axis", [1, -2])
def test_several_axes(axis: int) -> None:
    model = decomposed(rms(T.FLOAT, axis=axis, shape=(3, 8), scale=np.ones((3, 8))))
    x = np.random.default_rng(1).normal(size=(4, 3, 8)).astype(np.float32)
    expected = x / np.sqrt((x.astype(np.float64) ** 2).mean((-2, -1), keepdims=True) + EPSILON)
    np.testing.assert_allclose(evaluate(model, x=x)[0], expected, rtol=1e-6)


@pytest.mark.parametrize(
    ("attributes", "said"),
    [({"axis": 1}, "axis 1 (?s:.*)unknown rank"), ({"stash_type": T.BFLOAT16}, "cannot be decomposed")],
)
def test_other_axes_and_statistics_are_refused(attributes: dict[str, int], said: str) -> None:
    p = Planned()
    inner = p.op("Relu", ["x"], "relu")
    norm = p.op("RMSNormalization", [inner, p.constant("g", np.ones(8))], "norm", **attributes)
    with pytest.raises(ModelError, match=rf"'norm'(?s:.*){said}"):
        decomposed(p.model(norm, opset=23))


def test_pairs_that_others_wrote_are_brought_into_form() -> None:
    """Scales of shape (1,), zero points absent or not in ``raw_data``: MIGraphX would throw, run the model
    unquantized, or read numbers.
    """
    p = Planned()
    scale = p.constant("s", [0.25])
    q = p.op("QuantizeLinear", ["x", scale], "fc/q", output_dtype=T.FLOAT8E4M3FN)
    left = p.op("DequantizeLinear", [q, scale], "fc/dq")
    stored = p.constant("w", p.normal(8, 4) * 64, storage_type(E4M3FN))
    others = [p.constant("ws", [2.0**-7]), p.constant("wz", [0.0], storage_type(E4M3FN))]
    right = p.op("DequantizeLinear", [stored, *others], "fc/wdq", axis=0)
    before = p.model(p.op("MatMul", [left, right], "fc"))
    (zero,) = (tensor for tensor in before.graph.initializer if tensor.name == "wz")
    zero.ClearField("raw_data")
    zero.int32_data.append(0)
    model = write_dialect(before, Path("nowhere"), Float8Form.FNUZ)
    onnx.checker.check_model(model, full_check=True)
    tensors = {tensor.name: tensor for tensor in model.graph.initializer}
    assert len(quantizers(model)) == 3
    for node in quantizers(model):
        assert not node.attribute
        for tensor in (tensors[name] for name in node.input[1:]):
            assert (list(tensor.dims), bool(tensor.raw_data), list(tensor.int32_data)) == ([], True, [])
    x = np.linspace(-100, 100, 16, dtype=np.float32).reshape(2, 8)
    weight = constants(before)["w"]
    left = fake_quantize(x, 0.25, E4M3FN).astype(np.float64)
    expected = left @ (weight.astype(np.float64) * 2.0**-7)
    np.testing.assert_allclose(evaluate(model, x=x)[0], expected, rtol=1e-5, atol=1e-4)
