"""What comes close to a LayerNorm or RMSNorm, and other spellings of those that are one."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from norm_bodies import EPSILON, Body, fuse
from norm_models import widened
from rewrite_models import evaluate, op_types, parse, random_rows

from loka_onnx.transforms.norms.fuse import FuseLayerNorm, FuseRMSNorm

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
DECLINED = {"first_axis", "batch_axis", "sum_of_8_instead_of_mean", "rms_wrong_axis", "rms_sum_of_8"}
"""Norms that the operator does not compute."""
EXTRA = {
    "three": 3.0,
    "bessel": np.float32(8 / 7),
    "many": np.full((1, 8), 1e-3, np.float32),
    "third": 1 / 3,
    "front": np.array([1], np.int64),
    "zero": 0.0,
}


@pytest.mark.parametrize("case", NEAR_MISSES)
def test_a_near_miss_is_left_alone(case: str, tmp_path: Path) -> None:
    body = NEAR_MISSES[case]
    records = [
        fuse(body.model(EXTRA), mod, tmp_path / mod.name).record for mod in (FuseLayerNorm(), FuseRMSNorm())
    ]
    assert [record.applied for record in records] == [(), ()]
    own, other = records if body.centred else records[::-1]
    assert [d.at for d in own.declined] == ["block/q"] * (case in DECLINED)
    assert other.declined == ()


SPELLINGS = {
    "mean_computed_twice": Body(square="m2 = ReduceMean(x, axes) d2 = Sub(x, m2) s = Mul(d2, d2)"),
    "difference_computed_twice": Body(square="d2 = Sub(x, m) d3 = Sub(x, m) s = Mul(d2, d3)"),
    "axes_restored": Body(variance="u = ReduceMean<keepdims=0>(s, axes) v = Unsqueeze(u, axes)"),
    "axes_restored_behind_the_root": Body(
        variance="v = ReduceMean<keepdims=0>(s, axes)",
        root="t = Sqrt(e) r = Unsqueeze(t, axes) q = Div(d, r)",
    ),
    "reshaped_by_a_computed_shape": Body(
        variance="u = ReduceMean<keepdims=0>(s, axes) z = Shape(u) w = Concat<axis=0>(z, ones)"
        " v = Reshape(u, w)"
    ),
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
}
NUMBERS = {"eight": 8.0, "eighth": 0.125, "zero": 0.0, "ones": np.array([1], np.int64)}


@pytest.mark.parametrize("case", SPELLINGS)
def test_other_spellings_are_fused(case: str, tmp_path: Path) -> None:
    body = SPELLINGS[case]
    fused = fuse(body.model(NUMBERS), body.mod(), tmp_path)
    assert op_types(fused.after) == [body.op(), "Relu"]
    x = {"x": random_rows(5, *body.shape, seed=1).astype(np.float64)}
    before, after = (evaluate(widened(m), x)["y"] for m in (fused.before, fused.after))
    np.testing.assert_allclose(after, before, rtol=0, atol=1e-9)


def test_the_mean_of_another_tensor_is_no_layer_norm(tmp_path: Path) -> None:
    model = parse(
        "o = Relu(x) m = ReduceMean(o, axes) d = Sub(x, m) s = Mul(d, d) v = ReduceMean(s, axes)"
        "e = Add(v, epsilon) r = Sqrt(e) q = Div(d, r) y = Relu(q)",
        {"axes": np.array([-1]), "epsilon": EPSILON},
    )
    record = fuse(model, FuseLayerNorm(), tmp_path).record
    # Not rolled back either: it was never tried. It is the RMSNorm of the difference.
    assert (record.applied, record.declined) == ((), ())
