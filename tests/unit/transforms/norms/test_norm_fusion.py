"""LayerNorm and RMSNorm rules: every decomposed form is fused and equal, every near miss is left alone."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from norm_bodies import EPSILON, ROOTS, SQUARES, Body, assert_equal_to_primitives, fuse
from rewrite_models import artifact, as_double, attribute, evaluate, named, op_types, parse, random_rows

from loka_onnx.graph.model import GraphModel
from loka_onnx.transforms.norms.fuse import FuseLayerNorm, FuseRMSNorm


@pytest.mark.parametrize("centred", [True, False], ids=["layer_norm", "rms_norm"])
@pytest.mark.parametrize("square", SQUARES)
@pytest.mark.parametrize("root", ROOTS)
def test_every_form_is_fused(centred: bool, square: str, root: str, tmp_path: Path) -> None:
    body = Body(centred, SQUARES[square], ROOTS[root])
    fused = fuse(body.model(), body.mod(), tmp_path)
    assert op_types(fused.after) == [body.op(), "Relu"]
    assert_equal_to_primitives(fused, body)


AXES = {
    "last": ((4, 8), (-1,)),
    "two": ((4, 8), (-2, -1)),
    "two_positive_unordered": ((4, 8), (2, 1)),
    "three": ((3, 4, 8), (1, 2, 3)),
}


@pytest.mark.parametrize("centred", [True, False], ids=["layer_norm", "rms_norm"])
@pytest.mark.parametrize("case", AXES)
def test_trailing_axes_in_any_spelling(centred: bool, case: str, tmp_path: Path) -> None:
    shape, axes = AXES[case]
    body = Body(centred, shape=shape, axes=axes)
    fused = fuse(body.model(), body.mod(), tmp_path)
    assert op_types(fused.after) == [body.op(), "Relu"]
    assert attribute(fused.after.graph.node[0], "axis") == -len(axes)
    assert_equal_to_primitives(fused, body)


SCALE = np.linspace(0.5, 1.5, 8, dtype=np.float32)
BIAS = np.linspace(-1, 1, 8, dtype=np.float32)
AFFINE = {
    "vector": (SCALE, BIAS),
    "row": (SCALE.reshape(1, 8), BIAS.reshape(1, 8)),
    "scalar": (np.float32(1.5), np.float32(-0.25)),
    "one_element": (np.array([1.5], np.float32), np.array([[-0.25]], np.float32)),
}


@pytest.mark.parametrize("case", AFFINE)
@pytest.mark.parametrize("text", ["g = Mul(q, scale) n = Add(g, bias)", "g = Mul(scale, q) n = Add(bias, g)"])
def test_scale_and_bias_of_any_shape(case: str, text: str, tmp_path: Path) -> None:
    scale, bias = AFFINE[case]
    body = Body(affine=text)
    fused = fuse(body.model({"scale": scale, "bias": bias}), body.mod(), tmp_path)
    assert op_types(fused.after) == ["LayerNormalization", "Relu"]
    assert_equal_to_primitives(fused, body, scale, bias)


@pytest.mark.parametrize("case", AFFINE)
def test_rms_norm_takes_the_scale_and_leaves_the_bias(case: str, tmp_path: Path) -> None:
    scale, bias = AFFINE[case]
    body = Body(centred=False, affine="g = Mul(q, scale) n = Add(g, bias)")
    fused = fuse(body.model({"scale": scale, "bias": bias}), body.mod(), tmp_path)
    assert op_types(fused.after) == ["RMSNormalization", "Add", "Relu"]
    assert_equal_to_primitives(fused, body, scale, bias)


NOT_AFFINE = {
    "per_token": np.linspace(0.5, 1.5, 4, dtype=np.float32).reshape(4, 1),
    "whole": np.linspace(0.5, 1.5, 32, dtype=np.float32).reshape(4, 8),
}


@pytest.mark.parametrize("case", NOT_AFFINE)
def test_a_factor_that_varies_outside_the_normalized_axes_stays(case: str, tmp_path: Path) -> None:
    body = Body(affine="n = Mul(q, scale)", shape=(4, 8))
    fused = fuse(body.model({"scale": NOT_AFFINE[case]}), body.mod(), tmp_path)
    assert op_types(fused.after) == ["LayerNormalization", "Mul", "Relu"]
    assert_equal_to_primitives(fused, body, NOT_AFFINE[case])


def test_a_factor_that_is_an_activation_stays(tmp_path: Path) -> None:
    body = Body(affine="gate = Sigmoid(x) n = Mul(q, gate)")
    fused = fuse(body.model(), body.mod(), tmp_path)
    assert sorted(op_types(fused.after)) == ["LayerNormalization", "Mul", "Relu", "Sigmoid"]


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
def test_a_shared_intermediate_is_declined_with_the_reason(case: str, tmp_path: Path) -> None:
    body = DECLINED[case]
    before = body.model()
    fused = fuse(before, body.mod(), tmp_path)
    assert sorted(op_types(fused.after)) == sorted(op_types(before))
    assert [(d.at, d.reason) for d in fused.record.declined] == [("block/q", ELSEWHERE)]


@pytest.mark.parametrize(("mean", "variance"), [([1], [-1]), ([-1], [-2, -1])])
def test_mean_and_variance_over_different_axes_are_an_rms_norm(
    mean: list[int], variance: list[int], tmp_path: Path
) -> None:
    model = parse(
        "m = ReduceMean(x, first) d = Sub(x, m) s = Mul(d, d) v = ReduceMean(s, axes)"
        "e = Add(v, epsilon) r = Sqrt(e) q = Div(d, r) y = Relu(q)",
        {"first": np.array(mean), "axes": np.array(variance), "epsilon": EPSILON},
        inputs="float[batch,4,8] x",
        outputs="float[batch,4,8] y",
    )
    record = fuse(model, FuseLayerNorm(), tmp_path).record
    assert (record.applied, record.declined) == ((), ())
    fused = fuse(model, FuseRMSNorm(), tmp_path)
    assert op_types(fused.after) == ["ReduceMean", "Sub", "RMSNormalization", "Relu"]
    x = {"x": random_rows(5, 4, 8).astype(np.float64)}
    before, after = (evaluate(as_double(m), x)["y"] for m in (fused.before, fused.after))
    np.testing.assert_allclose(after, before, rtol=0, atol=1e-9)


def test_axes_of_unknown_length_are_declined(tmp_path: Path) -> None:
    model = Body().model()
    for info in (model.graph.input[0], model.graph.output[0]):
        info.type.tensor_type.shape.dim[1].dim_param = "width"
    fused = fuse(model, FuseLayerNorm(), tmp_path)
    assert [d.reason for d in fused.record.declined] == ["the length of a normalized axis is not known"]


def test_a_float64_norm_is_declined(tmp_path: Path) -> None:
    model = as_double(Body().model())
    source = artifact(model, tmp_path / "before.onnx")
    found = FuseLayerNorm().match(GraphModel.load(source.path))
    assert not found.matches
    assert "only FP32 norms" in found.declined[0].reason


# Names ------------------------------------------------------------------------------------------------


def test_the_fused_node_takes_the_module_path_and_readers_see_the_same_tensor(tmp_path: Path) -> None:
    body = Body(affine="g = Mul(q, scale) n = Add(g, bias)")
    model = body.model({"scale": SCALE, "bias": BIAS})
    # A tensor that bears the module's name does not push the node off it.
    for node in model.graph.node:
        node.output[:] = ["block" if name == "e" else name for name in node.output]
        node.input[:] = ["block" if name == "e" else name for name in node.input]
    fused = fuse(model, body.mod(), tmp_path)
    assert list(named(fused.after, "block").output) == ["n"]
    assert list(named(fused.after, "block/y").input) == ["n"]
    assert [a.at for a in fused.record.applied] == ["block"]


def test_a_norm_at_the_top_of_the_model_is_named_after_its_operator(tmp_path: Path) -> None:
    model = Body().model()
    for node in model.graph.node:
        node.name = node.name.removeprefix("block")
    assert named(fuse(model, FuseLayerNorm(), tmp_path).after, "layernormalization").output[0] == "q"


@pytest.mark.parametrize("centred", [True, False], ids=["layer_norm", "rms_norm"])
def test_a_norm_that_is_the_output_keeps_the_output_name(centred: bool, tmp_path: Path) -> None:
    body = Body(centred)
    model = body.model()
    del model.graph.node[-1]
    model.graph.node[-1].output[0] = "y"
    fused = fuse(model, body.mod(), tmp_path)
    assert op_types(fused.after) == [body.op()]
    assert [o.name for o in fused.after.graph.output] == ["y"]


# RMSNorm needs a newer operator set -------------------------------------------------------------------


def test_rms_norm_moves_the_model_to_operator_set_23(tmp_path: Path) -> None:
    fused = fuse(Body(centred=False).model(), FuseRMSNorm(), tmp_path)
    assert [(o.domain, o.version) for o in fused.after.opset_import] == [("", 23)]
    assert [o.version for o in fuse(Body().model(), FuseLayerNorm(), tmp_path).after.opset_import] == [21]
