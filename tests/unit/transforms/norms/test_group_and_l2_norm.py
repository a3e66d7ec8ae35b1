"""GroupNorm and L2-norm written by hand: the operators' limits, and what lies beyond them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from norm_models import Outcome, assert_equal, fused
from onnx import numpy_helper
from rewrite_models import artifact, attribute, evaluate, initializer, named, parse, random_rows

from loka_onnx.errors import ModelError
from loka_onnx.graph.entry import canonicalize
from loka_onnx.sessions.onnx_session import OnnxSession
from loka_onnx.transforms.base import Mod
from loka_onnx.transforms.norms.fuse import FuseL2Norm, FuseLayerNorm
from loka_onnx.transforms.norms.fuse_group_norm import FuseGroupNorm

CHANNELS = np.linspace(0.5, 2.25, 8, dtype=np.float32)
CORE = (
    "z = Reshape(x, split) m = ReduceMean(z, axes) d = Sub(z, m) s = Mul(d, d) v = ReduceMean(s, axes)"
    " e = Add(v, epsilon) r = Sqrt(e) q = Div(d, r)"
)
INSTANCE = "z = Reshape(x, split) q = InstanceNormalization<epsilon=0.001>(z, ones, zeros)"
BACK = "n = Reshape(q, back)"


@dataclass(frozen=True)
class Case:
    """A norm of (batch, 8, 6) in two groups, as text."""

    body: str
    constants: Mapping[str, Any] = field(default_factory=dict)
    shape: tuple[int, ...] = (8, 6)

    def run(self, folder: Path, mods: tuple[type[Mod[Any]], ...] = (FuseGroupNorm,)) -> Outcome:
        values = {
            "split": np.array([0, 2, -1]),
            "back": np.array([0, *self.shape]),
            "axes": np.array([2]),
            "epsilon": np.float32(1e-3),
            "ones": np.ones(2, np.float32),
            "zeros": np.zeros(2, np.float32),
            "gain": CHANNELS.reshape(8, 1),
            "shift": -CHANNELS.reshape(1, 8, 1),
        } | dict(self.constants)
        used = {name: value for name, value in values.items() if name in self.body}
        dims = ",".join(map(str, ("batch", *self.shape)))
        model = parse(f"{self.body} y = Relu(n)", used, inputs=f"float[{dims}] x", outputs=f"float[{dims}] y")
        return fused(artifact(model, folder / "m.onnx"), folder, mods)


AFFINE = "n0 = Reshape(q, back) g = Mul(n0, gain) n = Add(g, shift)"
GROUPED = {
    "primitives": Case(f"{CORE} {BACK}"),
    "instance_norm": Case(f"{INSTANCE} {BACK}"),
    "affine_behind": Case(f"{CORE} {AFFINE}"),
    "one_factor": Case(f"{INSTANCE} n0 = Reshape(q, back) n = Mul(n0, epsilon)"),
    "bias_alone": Case(f"{INSTANCE} n0 = Reshape(q, back) n = Add(shift, n0)"),
    "channels_of_a_group_apart": Case(
        f"{CORE} g = Mul(q, gain) k = Add(g, shift) n = Reshape(k, back)",
        {
            "split": np.array([0, 2, 4, 6]),
            "axes": np.array([2, 3]),
            "gain": CHANNELS.reshape(2, 4, 1),
            "shift": CHANNELS.reshape(1, 2, 4, 1),
        },
    ),
    "factor_of_a_group": Case(f"{INSTANCE} {BACK}", {"ones": np.array([2.0, -3.0], np.float32)}),
    "image": Case(f"{CORE} {BACK}", {"gain": CHANNELS.reshape(8, 1, 1)}, (8, 3, 2)),
    "one_group": Case(
        f"{INSTANCE} {BACK}",
        {"split": np.array([0, 1, -1]), "ones": np.ones(1, np.float32), "zeros": np.zeros(1, np.float32)},
    ),
    "reshaped_by_computed_shapes": Case(
        "s0 = Shape<end=1>(x) t = Concat<axis=0>(s0, rest) z = Reshape(x, t)"
        " q = InstanceNormalization<epsilon=0.001>(z, ones, zeros) w = Shape(x) n = Reshape(q, w)",
        {"rest": np.array([2, 24])},
    ),
}


@pytest.mark.parametrize("name", GROUPED)
def test_groups_of_channels_become_one_operator(name: str, tmp_path: Path) -> None:
    result = GROUPED[name].run(tmp_path)
    assert result.ops == ["GroupNormalization", "Relu"], result.reasons
    assert_equal(result)


def test_a_factor_of_a_group_is_one_of_each_of_its_channels(tmp_path: Path) -> None:
    result = GROUPED["factor_of_a_group"].run(tmp_path)
    scale = numpy_helper.to_array(initializer(result.after, result.after.graph.node[0].input[1]))
    assert scale.tolist() == [2.0] * 4 + [-3.0] * 4


def test_an_instance_norm_is_a_site_and_keeps_its_name(tmp_path: Path) -> None:
    body = INSTANCE.replace(" q = ", " [norm] q = ")
    result = Case(f"{body} {AFFINE}").run(tmp_path)
    assert named(result.after, "norm").op_type == "GroupNormalization"


def test_the_shape_behind_the_operator_stays_known(tmp_path: Path) -> None:
    """ONNX infers none: what follows would lose its own."""
    result = GROUPED["primitives"].run(tmp_path)
    info = next(info for info in result.after.graph.value_info if info.name == "n")
    assert [d.dim_param or d.dim_value for d in info.type.tensor_type.shape.dim] == ["batch", 8, 6]


def test_what_varies_along_more_than_channels_stays_behind(tmp_path: Path) -> None:
    gain = np.linspace(0.5, 1.5, 48, dtype=np.float32).reshape(8, 6)
    result = Case(f"{CORE} {AFFINE}", {"gain": gain}).run(tmp_path)
    assert result.ops == ["GroupNormalization", "Mul", "Add", "Relu"]
    assert_equal(result)


@pytest.mark.parametrize("inner", ["Mul(q, gain4)", "Add(q, gain4)"])
def test_a_second_factor_stays_behind(inner: str, tmp_path: Path) -> None:
    body = f"{CORE} k = {inner} n0 = Reshape(k, back) n = Mul(n0, gain)"
    constants = {
        "split": np.array([0, 2, 4, 6]),
        "axes": np.array([2, 3]),
        "gain4": CHANNELS.reshape(2, 4, 1),
    }
    result = Case(body, constants).run(tmp_path)
    assert result.ops == ["GroupNormalization", "Mul", "Relu"]
    assert_equal(result)


NOT_GROUPED = {
    "positions_in_the_groups": (
        Case(
            f"{CORE} g = Mul(q, many) n = Reshape(g, back)", {"many": np.linspace(1, 2, 24, dtype=np.float32)}
        ),
        ["its scale or bias does not vary along its channels"],
    ),
    "rank_2": (
        Case(f"{INSTANCE} {BACK}", shape=(8,)),
        ["GroupNormalization takes inputs of rank 3 and up, this one has rank 2"],
    ),
    "groups_read_elsewhere": (
        Case(f"{CORE} n1 = Reshape(q, back) o = Relu(d) p = Reshape(o, back) n = Add(n1, p)"),
        ["an intermediate result of the norm is read elsewhere"],
    ),
    # The rest is no GroupNorm at all, and nothing is told of it.
    "another_shape_behind": (
        Case(f"{CORE} n1 = Reshape(q, other) n = Reshape(n1, back)", {"other": np.array([0, 6, 8])}),
        [],
    ),
    "groups_across_channels": (Case(f"{INSTANCE} {BACK}", {"split": np.array([0, 2, -1])}, (3, 4)), []),
    "the_batch_in_the_groups": (
        Case(f"{INSTANCE} {BACK}", {"split": np.array([-1, 2, 4]), "back": np.array([-1, 8, 6])}),
        [],
    ),
    "of_a_part_of_a_group": (
        Case(f"{CORE} {BACK}", {"split": np.array([0, 2, 4, 6]), "axes": np.array([3])}),
        [],
    ),
    "root_mean_square": (
        Case(
            "z = Reshape(x, split) s = Mul(z, z) v = ReduceMean(s, axes) e = Add(v, epsilon) r = Sqrt(e)"
            f" q = Div(z, r) {BACK}"
        ),
        [],
    ),
}


@pytest.mark.parametrize("name", NOT_GROUPED)
def test_what_is_no_group_norm_stays(name: str, tmp_path: Path) -> None:
    case, reasons = NOT_GROUPED[name]
    result = case.run(tmp_path)
    assert (result.applied, result.reasons) == ((), reasons)


def test_primitives_of_rank_2_are_left_to_the_layer_norm_rule(tmp_path: Path) -> None:
    result = Case(f"{CORE} {BACK}", shape=(8,)).run(tmp_path, (FuseGroupNorm, FuseLayerNorm))
    assert result.ops == ["Reshape", "LayerNormalization", "Reshape", "Relu"]
    assert_equal(result)


OLD = (
    '<ir_version: 10, opset_import: ["" : 18]> g (float[batch,8,6] {1}) => (float[batch,8,6] y) <{0}>'
    " {{ y = GroupNormalization<num_groups=2, epsilon=0.001>(x, s, b) }}"
)


def test_the_old_operator_with_a_scale_for_each_group(tmp_path: Path) -> None:
    """GroupNormalization of operator set 18: the entry repeats it for channels, and it stays one operator."""
    model = onnx.parser.parse_model(OLD.format("float[2] s = {2, -3}, float[2] b = {0.5, 1}", "x"))
    expected = evaluate(model, {"x": random_rows(5, 8, 6)})["y"]
    onnx.save(model, tmp_path / "m.onnx")
    canonical = canonicalize(tmp_path / "m.onnx")
    assert "the scales of 1 GroupNormalizations repeated, from groups to channels" in canonical.notes
    canonical.model.save(tmp_path / "c.onnx")
    actual = OnnxSession(tmp_path / "c.onnx").run({"x": random_rows(5, 8, 6)})["y"]
    np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-5)


def test_the_old_operator_with_as_many_groups_as_channels(tmp_path: Path) -> None:
    numbers = ", ".join(str(n) for n in range(8))
    text = OLD.replace("num_groups=2", "num_groups=8")
    model = onnx.parser.parse_model(
        text.format(f"float[8] s = {{{numbers}}}, float[8] b = {{{numbers}}}", "x")
    )
    onnx.save(model, tmp_path / "m.onnx")
    canonical = canonicalize(tmp_path / "m.onnx")
    assert canonical.notes == ("converted from opset 18 to 21",)


def test_the_old_operator_with_a_computed_scale_is_refused(tmp_path: Path) -> None:
    text = OLD.format("float[2] b = {0.5, 1}", "x, float[2] s")
    onnx.save(onnx.parser.parse_model(text), tmp_path / "m.onnx")
    with pytest.raises(ModelError, match="normalizes groups in a form that is not converted to opset 21"):
        canonicalize(tmp_path / "m.onnx")


# L2 ----------------------------------------------------------------------------------------------------

LENGTHS = {
    "reduce_l2": "l = ReduceL2(x, axes) q = Div(x, l)",
    "root_of_a_sum": "s = Mul(x, x) v = ReduceSum(s, axes) l = Sqrt(v) q = Div(x, l)",
    "reciprocal": "v = ReduceSumSquare(x, axes) l = Sqrt(v) r = Reciprocal(l) q = Mul(r, x)",
    "power": "s = Pow(x, two) v = ReduceSum(s, axes) r = Pow(v, minus) q = Mul(x, r)",
}


def length(body: str, folder: Path, axes: tuple[int, ...] = (-1,)) -> Outcome:
    constants = {"axes": np.array(axes), "two": 2.0, "minus": -0.5}
    used = {name: value for name, value in constants.items() if name in body}
    model = parse(f"{body} y = Relu(q)", used, inputs="float[batch,4,8] x", outputs="float[batch,4,8] y")
    return fused(artifact(model, folder / "m.onnx"), folder, (FuseL2Norm,))


@pytest.mark.parametrize("axis", [-1, 1, 2])
@pytest.mark.parametrize("form", LENGTHS)
def test_a_quotient_by_the_length_becomes_one_operator(form: str, axis: int, tmp_path: Path) -> None:
    result = length(LENGTHS[form], tmp_path, (axis,))
    assert result.ops == ["LpNormalization", "Relu"]
    norm = named(result.after, "block")
    assert attribute(norm, "axis") == (axis if axis < 0 else axis - 3)
    assert_equal(result, lambda x: np.maximum(x / np.linalg.norm(x, axis=axis, keepdims=True), 0))


def test_a_row_of_zeros_gives_zeros_where_the_primitives_give_nan(tmp_path: Path) -> None:
    result = length(LENGTHS["reduce_l2"], tmp_path)
    zeros = {"x": np.zeros((1, 4, 8), np.float32)}
    assert np.isnan(OnnxSession(tmp_path / "m.onnx").run(zeros)["y"]).all()
    assert (OnnxSession(result.path).run(zeros)["y"] == 0).all()


def test_the_length_over_two_axes_is_declined(tmp_path: Path) -> None:
    result = length(LENGTHS["reduce_l2"], tmp_path, (-2, -1))
    assert result.reasons == ["it takes the length over axes [-2, -1], LpNormalization over one"]


def test_the_length_of_another_tensor_stays(tmp_path: Path) -> None:
    result = length("o = Tanh(x) l = ReduceL2(o, axes) q = Div(x, l)", tmp_path)
    assert result.applied == ()
