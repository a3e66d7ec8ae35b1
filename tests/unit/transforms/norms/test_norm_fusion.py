"""LayerNorm and RMSNorm: every form is fused, those of tf2onnx too (tf_norm_forms.txt); near misses stay."""

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest
from norm_models import FOLDS, FUSIONS, Outcome, assert_equal, assert_folded_equally, fused, taken_in
from rewrite_models import artifact, as_double, attribute, named, op_types, parse

from loka_onnx.graph.model import GraphModel
from loka_onnx.transforms.base import Mod
from loka_onnx.transforms.norms.fold_batch_norm import FoldBatchNorm
from loka_onnx.transforms.norms.fuse import FuseLayerNorm, FuseRMSNorm

LAYER, RMS = "LayerNormalization", "RMSNormalization"
EPSILON = np.float32(1e-3)
SCALARS = {"two": 2.0, "one": 1.0, "half": 0.5, "minus_half": -0.5, "epsilon": EPSILON}

SQUARES = {"pow": "s = Pow(d, two)", "mul": "s = Mul(d, d)"}
ROOTS = {
    "div_sqrt": "r = Sqrt(e) q = Div(d, r)",
    "times_reciprocal": "t = Sqrt(e) r = Reciprocal(t) q = Mul(d, r)",
    "reciprocal_times": "t = Sqrt(e) r = Reciprocal(t) q = Mul(r, d)",
    "one_over_sqrt": "t = Sqrt(e) r = Div(one, t) q = Mul(d, r)",
    "pow_half": "r = Pow(e, half) q = Div(d, r)",
    "pow_minus_half": "r = Pow(e, minus_half) q = Mul(d, r)",
}


@dataclass(frozen=True)
class Body:
    """Text of a norm over ``x``; the result is ``n`` and Relu reads it."""

    centred: bool = True
    square: str = SQUARES["mul"]
    root: str = ROOTS["div_sqrt"]
    affine: str = ""
    epsilon: str = "e = Add(v, epsilon)"
    variance: str = "v = ReduceMean(s, axes)"
    tail: str = ""
    shape: tuple[int, ...] = (8,)
    axes: tuple[int, ...] = (-1,)
    extra_outputs: str = ""

    def model(self, constants: dict[str, Any] | None = None) -> onnx.ModelProto:
        centring = "m = ReduceMean(x, axes) d = Sub(x, m)" if self.centred else ""
        parts = (centring, self.square, self.variance, self.epsilon, self.root, self.affine)
        body = " ".join(parts)
        if not self.centred:
            body = body.replace("(d, d)", "(x, x)").replace("(d,", "(x,").replace(", d)", ", x)")
        body += "y = Relu(n)" if "n = " in body else "y = Relu(q)"
        dims = ",".join(map(str, ("batch", *self.shape)))
        values = SCALARS | {"axes": np.array(self.axes, np.int64)} | (constants or {})
        outputs = f"float[{dims}] y{self.extra_outputs}"
        return parse(f"{body} {self.tail}", values, inputs=f"float[{dims}] x", outputs=outputs)

    def mod(self) -> type[Mod[Any]]:
        return FuseLayerNorm if self.centred else FuseRMSNorm

    def op(self) -> str:
        return LAYER if self.centred else RMS

    def formula(self, x: Any, scale: Any = 1.0, bias: Any = 0.0) -> Any:
        """The textbook norm in float64, then Relu."""
        d = x - x.mean(axis=self.axes, keepdims=True) if self.centred else x
        root = np.sqrt((d * d).mean(axis=self.axes, keepdims=True) + float(EPSILON))
        return np.maximum(d / root * scale + bias, 0)


def fuse(model: onnx.ModelProto, mod: type[Mod[Any]], folder: Path) -> Outcome:
    return fused(artifact(model, folder / "before.onnx"), folder, (mod,))


SCALE = np.linspace(0.5, 1.5, 8, dtype=np.float32)
BIAS = np.linspace(-1, 1, 8, dtype=np.float32)
AFFINE = {
    "vector": (SCALE, BIAS),
    "row": (SCALE.reshape(1, 8), BIAS.reshape(1, 8)),
    "scalar": (np.float32(1.5), np.float32(-0.25)),
    "one_element": (np.array([1.5], np.float32), np.array([[-0.25]], np.float32)),
}
SCALED, TURNED = "g = Mul(q, scale) n = Add(g, bias)", "g = Mul(scale, q) n = Add(bias, g)"
TRAILING = {
    "last": ((4, 8), (-1,)), "two": ((4, 8), (-2, -1)), "two_positive_unordered": ((4, 8), (2, 1)),
    "three": ((3, 4, 8), (1, 2, 3)),
}  # fmt: skip
# A factor that varies outside the normalized axes stays.
PER_TOKEN = np.linspace(0.5, 1.5, 4, dtype=np.float32).reshape(4, 1)
WHOLE = np.linspace(0.5, 1.5, 32, dtype=np.float32).reshape(4, 8)
FORMS: dict[str, tuple[Body, tuple[Any, ...], tuple[str, ...]]] = {
    **{f"{Body(centred).op()}-{square}-{root}": (Body(centred, SQUARES[square], ROOTS[root]), (), ())
        for centred in (True, False) for square in SQUARES for root in ROOTS},
    **{f"{Body(centred).op()}-{axes}": (Body(centred, shape=TRAILING[axes][0], axes=TRAILING[axes][1]), (), (
        )) for centred in (True, False) for axes in TRAILING},
    **{f"scaled_by_{name}": (Body(affine=SCALED), values, ()) for name, values in AFFINE.items()},
    **{f"turned_by_{name}": (Body(affine=TURNED), values, ()) for name, values in AFFINE.items()},
    # RMSNorm takes the scale and leaves the bias.
    **{f"rms_by_{name}": (Body(False, affine=SCALED), values, ("Add",)) for name, values in AFFINE.items()},
    "per_token": (Body(affine="n = Mul(q, scale)", shape=(4, 8)), (PER_TOKEN,), ("Mul",)),
    "whole": (Body(affine="n = Mul(q, scale)", shape=(4, 8)), (WHOLE,), ("Mul",)),
}  # fmt: skip


@pytest.mark.parametrize("name", FORMS)
def test_every_form_is_fused_and_equal_to_the_formula(name, tmp_path):
    body, affine, left = FORMS[name]
    outcome = fuse(body.model(dict(zip(("scale", "bias"), affine, strict=False))), body.mod(), tmp_path)
    assert outcome.ops == [body.op(), *left, "Relu"]
    assert attribute(outcome.after.graph.node[0], "axis") == -len(body.axes)
    # 1.5e-7 seen in FP32 on values of size 2.
    assert_equal(outcome, lambda x: body.formula(x, *affine), single=1e-6)


SPELLINGS = {
    "mean_computed_twice": Body(square="m2 = ReduceMean(x, axes) d2 = Sub(x, m2) s = Mul(d2, d2)"),
    "difference_computed_twice": Body(square="d2 = Sub(x, m) d3 = Sub(x, m) s = Mul(d2, d3)"),
    "axes_restored": Body(variance="u = ReduceMean<keepdims=0>(s, axes) v = Unsqueeze(u, axes)"),
    "axes_restored_behind_the_root": Body(variance="v = ReduceMean<keepdims=0>(s, axes)",
        root="t = Sqrt(e) r = Unsqueeze(t, axes) q = Div(d, r)"),
    "reshaped_by_a_computed_shape": Body(
        variance="u = ReduceMean<keepdims=0>(s, axes) z = Shape(u) w = Concat<axis=0>(z, ones)"
        " v = Reshape(u, w)"),
    "expanded": Body(root="t = Sqrt(e) z = Shape(x) r = Expand(t, z) q = Div(d, r)"),
    "sum_over_count": Body(variance="u = ReduceSum(s, axes) v = Div(u, eight)"),
    "sum_times_reciprocal": Body(variance="u = ReduceSum(s, axes) v = Mul(u, eighth)"),
    "sum_of_squares": Body(square="", variance="u = ReduceSumSquare(d, axes) v = Div(u, eight)"),
    "clamped": Body(variance="u = ReduceMean(s, axes) v = Max(u, zero)"),
    "clipped": Body(variance="u = ReduceMean(s, axes) v = Clip(u, zero)"),
    "rectified": Body(variance="u = ReduceMean(s, axes) v = Relu(u)"),
    "cast_to_its_own_type": Body(variance="u = ReduceMean(s, axes) v = Cast<to=1>(u)"),
    "two_over_the_root_is_a_scale": Body(root="t = Sqrt(e) r = Div(two, t) q = Mul(d, r)"),
    "sum_of_16": Body(shape=(16,), variance="v = ReduceSum(s, axes)"),
    "rms_sum_of_16": Body(centred=False, shape=(16,), variance="v = ReduceSum(s, axes)"),
    "rms_scaled_first": Body(centred=False, root="r = Sqrt(e) g = Mul(two, d) q = Div(g, r)"),
}  # fmt: skip
NUMBERS = {"eight": 8.0, "eighth": 0.125, "zero": 0.0, "ones": np.array([1], np.int64)}


@pytest.mark.parametrize("case", SPELLINGS)
def test_other_spellings_are_fused(case, tmp_path):
    body = SPELLINGS[case]
    outcome = fuse(body.model(NUMBERS), body.mod(), tmp_path)
    assert outcome.ops == [body.op(), "Relu"]
    assert_equal(outcome)


def test_a_factor_that_is_an_activation_stays_and_unknown_lengths_and_float64_are_declined(tmp_path):
    body = Body(affine="gate = Sigmoid(x) n = Mul(q, gate)")
    outcome = fuse(body.model(), body.mod(), tmp_path)
    assert sorted(outcome.ops) == ["LayerNormalization", "Mul", "Relu", "Sigmoid"]
    model = Body().model()
    for info in (model.graph.input[0], model.graph.output[0]):
        info.type.tensor_type.shape.dim[1].dim_param = "width"
    outcome = fuse(model, FuseLayerNorm, tmp_path)
    assert [d.reason for d in outcome.declined] == ["the length of a normalized axis is not known"]
    model = as_double(Body().model())
    source = artifact(model, tmp_path / "before.onnx")
    found = FuseLayerNorm().match(GraphModel.load(source.path))
    assert not found.matches
    assert "only FP32 norms" in found.declined[0].reason


ELSEWHERE = "an intermediate result of the norm is read elsewhere"
TAIL = ", float[batch,8] z"
DECLINED = {
    "centred_tensor_read_elsewhere": Body(tail="z = Neg(d)", extra_outputs=TAIL),
    "quotient_read_beside_the_scale": Body(
        root="r = Sqrt(e) q = Div(d, r)", tail="z = Neg(r)", extra_outputs=", float[batch,1] z"
    ),
    "variance_is_a_graph_output": Body(extra_outputs=", float[batch,1] v"),
    "rms_squares_read_elsewhere": Body(centred=False, tail="z = Neg(s)", extra_outputs=TAIL),
}


@pytest.mark.parametrize("case", DECLINED)
def test_a_shared_intermediate_is_declined_with_the_reason(case, tmp_path):
    body = DECLINED[case]
    before = body.model()
    outcome = fuse(before, body.mod(), tmp_path)
    assert sorted(outcome.ops) == sorted(op_types(before))
    assert [(d.at, d.reason) for d in outcome.declined] == [("block/q", ELSEWHERE)]


@pytest.mark.parametrize(
    ("source", "mean", "variance"), [("x", [1], [-1]), ("x", [-1], [-2, -1]), ("o", [-1], [-1])]
)
def test_mean_and_variance_over_different_axes_or_tensors_are_an_rms_norm(source, mean, variance, tmp_path):
    before = ["Relu"] if source == "o" else []
    model = parse(
        f"{'o = Relu(x)' if before else ''} m = ReduceMean({source}, first) d = Sub(x, m) s = Mul(d, d)"
        " v = ReduceMean(s, axes) e = Add(v, epsilon) r = Sqrt(e) q = Div(d, r) y = Relu(q)",
        {"first": np.array(mean), "axes": np.array(variance), "epsilon": EPSILON},
        inputs="float[batch,4,8] x", outputs="float[batch,4,8] y")  # fmt: skip
    # Not rolled back either: it was never tried.
    record = fuse(model, FuseLayerNorm, tmp_path)
    assert (record.applied, record.declined) == ((), ())
    outcome = fuse(model, FuseRMSNorm, tmp_path)
    assert outcome.ops == [*before, "ReduceMean", "Sub", "RMSNormalization", "Relu"]
    assert_equal(outcome)


def test_the_fused_node_takes_the_module_path_and_rms_norm_operator_set_23(tmp_path):
    body = Body(affine="g = Mul(q, scale) n = Add(g, bias)")
    model = body.model({"scale": SCALE, "bias": BIAS})
    # A tensor that bears the module's name does not push the node off it.
    for node in model.graph.node:
        node.output[:] = ["block" if name == "e" else name for name in node.output]
        node.input[:] = ["block" if name == "e" else name for name in node.input]
    outcome = fuse(model, body.mod(), tmp_path)
    assert list(named(outcome.after, "block").output) == ["n"]
    assert list(named(outcome.after, "block/y").input) == ["n"]
    assert len(outcome.applied) == 1
    model = Body().model()
    for node in model.graph.node:
        node.name = node.name.removeprefix("block")
    assert named(fuse(model, FuseLayerNorm, tmp_path).after, "layernormalization").output[0] == "q"
    outcome = fuse(Body(centred=False).model(), FuseRMSNorm, tmp_path)
    assert [(o.domain, o.version) for o in outcome.after.opset_import] == [("", 23)]
    assert [o.version for o in fuse(Body().model(), FuseLayerNorm, tmp_path).after.opset_import] == [21]


@pytest.mark.parametrize("centred", [True, False], ids=["layer_norm", "rms_norm"])
def test_a_norm_that_is_the_output_keeps_the_output_name(centred, tmp_path):
    body = Body(centred)
    model = body.model()
    del model.graph.node[-1]
    model.graph.node[-1].output[0] = "y"
    outcome = fuse(model, body.mod(), tmp_path)
    assert outcome.ops == [body.op()]
    assert [o.name for o in outcome.after.graph.output] == ["y"]


NEAR_MISSES = {
    "first_axis": Body(shape=(4, 8), axes=(1,)),
    "batch_axis": Body(axes=(0,)),
    "exponent_3": Body(square="s = Pow(d, three)"),
    "square_of_another_tensor": Body(square="o = Relu(x) s = Mul(o, o)"),
    "product_of_two_tensors": Body(square="o = Relu(d) s = Mul(d, o)"),
    "unbiased_variance": Body(epsilon="w = Mul(v, bessel) e = Add(w, epsilon)"),
    "scaled_variance": Body(epsilon="w = Mul(v, half) e = Add(w, epsilon)"),
    "epsilon_from_data": Body(epsilon="o = ReduceMax(x, axes) e = Add(v, o)"),
    "epsilon_per_channel": Body(epsilon="e = Add(v, many)"),
    "epsilon_beside_the_root": Body(epsilon="", root="t = Sqrt(v) r = Add(t, epsilon) q = Div(d, r)"),
    "two_epsilons": Body(epsilon="w = Add(v, epsilon) e = Add(w, epsilon)"),
    "bounded_variance": Body(epsilon="e = Max(v, epsilon)"),
    "variance_bounded_from_above": Body(epsilon="o = Identity(v) e = Clip(o,,two)"),
    "division_by_the_reciprocal": Body(root="t = Sqrt(e) r = Reciprocal(t) q = Div(d, r)"),
    "product_with_the_root": Body(root="r = Sqrt(e) q = Mul(d, r)"),
    "cube_root": Body(root="r = Pow(e, third) q = Div(d, r)"),
    "sum_of_8_instead_of_mean": Body(variance="v = ReduceSum(s, axes)"),
    "varying_scale": Body(root="t = Sqrt(e) r = Reciprocal(t) g = Sigmoid(x) u = Mul(r, g) q = Mul(d, u)"),
    "two_scales": Body(root="t = Sqrt(e) r = Reciprocal(t) u = Mul(r, many) w = Mul(d, many) q = Mul(w, u)"),
    "axes_not_kept": Body(
        shape=(8, 8), variance="u = ReduceMean<keepdims=0>(s, axes) v = Unsqueeze(u, front)"
    ),
    "rms_of_another_tensor": Body(centred=False, square="o = Relu(x) s = Mul(o, o)"),
    "rms_wrong_axis": Body(centred=False, shape=(4, 8), axes=(1,)),
    "rms_exponent_3": Body(centred=False, square="s = Pow(d, three)"),
    "rms_sum_of_8": Body(centred=False, variance="v = ReduceSum(s, axes)"),
}
NEAR_DECLINED = {"first_axis", "batch_axis", "sum_of_8_instead_of_mean", "rms_wrong_axis", "rms_sum_of_8"}
"""Norms that the operator does not compute."""
EXTRA = {
    "three": 3.0, "bessel": np.float32(8 / 7), "many": np.full((1, 8), 1e-3, np.float32), "third": 1 / 3,
    "front": np.array([1], np.int64), "zero": 0.0,
}  # fmt: skip


@pytest.mark.parametrize("case", NEAR_MISSES)
def test_a_near_miss_is_left_alone(case, tmp_path):
    body = NEAR_MISSES[case]
    records = [fuse(body.model(EXTRA), mod, tmp_path / mod.name) for mod in (FuseLayerNorm, FuseRMSNorm)]
    assert [record.applied for record in records] == [(), ()]
    own, other = records if body.centred else records[::-1]
    assert [d.at for d in own.declined] == ["block/q"] * (case in NEAR_DECLINED)
    assert other.declined == ()


HERE = Path(__file__).parent
OPSETS = (13, 18)
"""Axes as an attribute, and as an input."""
# `tf_norm_forms.txt` is what tf2onnx wrote of these: TensorFlow takes 1.6 GB, and tests do without.
OF_TENSORFLOW = {
    "moments": [LAYER], "by_hand": [LAYER], "layer_norm": [LAYER], "layer_norm_of_rank_3": [LAYER],
    "layer_norm_of_two_axes": [LAYER], "layer_norm_without_affine": [LAYER],
    "layer_norm_in_float16": ["Cast", LAYER, "Cast"], "root_mean_square": [RMS], "rms_norm": [RMS],
    "rms_norm_in_float16": ["Cast", RMS, "Cast"],
}  # fmt: skip


@cache
def transcribed() -> dict[tuple[str, int], str]:
    forms: dict[tuple[str, int], str] = {}
    key = ("", 0)
    for line in (HERE / "tf_norm_forms.txt").read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            forms[key] = forms.get(key, "") + line + "\n"
        elif line.split()[-1].isdigit():
            name, opset = line.split()[1:]
            key = (name, int(opset))
    return forms


def parsed(text: str) -> onnx.ModelProto:
    model: onnx.ModelProto = onnx.parser.parse_model(text)
    for node in model.graph.node:
        # As TensorFlow names the operations of a layer.
        node.name = f"model/norm/{node.output[0]}"
    return model


@pytest.mark.parametrize("opset", OPSETS)
@pytest.mark.parametrize("name", OF_TENSORFLOW)
def test_every_form_becomes_one_operator(name, opset, tmp_path):
    result = fused(taken_in(parsed(transcribed()[name, opset]), tmp_path), tmp_path)
    assert result.ops == OF_TENSORFLOW[name], result.reasons
    norm = next(node for node in result.after.graph.node if node.op_type.endswith("Normalization"))
    assert norm.name == "model.norm"
    # What is rounded to FP16 behind the norm may fall on the next number: 2⁻¹¹ of 4.
    assert_equal(result, single=4e-3 if "Cast" in result.ops else 5e-6)


@pytest.mark.parametrize("opset", OPSETS)
@pytest.mark.parametrize(
    "name", ["norm", "l2_normalize", "unit_norm", "layer_norm_without_mean", "group_norm_of_last_channels"]
)
def test_a_near_miss_of_tensorflow_is_left_alone(name, opset, tmp_path):
    assert fused(taken_in(parsed(transcribed()[name, opset]), tmp_path), tmp_path).applied == ()


@pytest.mark.parametrize("opset", OPSETS)
def test_batch_norm_behind_dense_is_folded(opset, tmp_path):
    model = taken_in(parsed(transcribed()["dense_batch_norm", opset]), tmp_path)
    result = fused(model, tmp_path, (*FUSIONS, *FOLDS))
    assert result.ops == ["MatMul", "Add"]
    assert_folded_equally(onnx.load(model.path), FoldBatchNorm(), tmp_path)
