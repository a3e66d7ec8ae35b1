"""What is shown to fit FP16, and what is not: for each rule a case, its near miss, and the words."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from planned_models import graph_of

from loka_onnx.core.statistics import TensorRange
from loka_onnx.graph.model import GraphModel
from loka_onnx.planning.fp16 import LARGEST, MARGIN, count_places, scale_fits, unproven_places

CONSTANTS = {
    "w": np.eye(8),
    "huge": np.array(-1e9),
    "edge": np.array(65504.0),
    "infinite": np.array(-np.inf),
    "epsilon": np.array(1e-12),
    "small": np.array(1e-7),
    "nought": np.array(0.0),
    "minus": np.array(-1.0),
    "last": np.array([1]),
    "first": np.array([0]),
}


def load(folder: Path, body: str) -> GraphModel:
    constants = {name: values for name, values in CONSTANTS.items() if name in body}
    return graph_of(folder / "m.onnx", f"(float[b,8] x) => (float[] y) {{ {body} }}", constants)


def ranges_of(model: GraphModel, **amax: float | TensorRange) -> dict[str, TensorRange]:
    """What is not given reaches 1, and is at least 0.5 where it is divided by."""
    computed = [t for node in model.nodes for t in node.outputs]
    known = {t.name: TensorRange(1.0, 0.5) for t in (*model.inputs, *computed)}
    return known | {k: v if isinstance(v, TensorRange) else TensorRange(v, v) for k, v in amax.items()}


def reasons(model: GraphModel, **amax: float | TensorRange) -> dict[str, str]:
    """By node; a node of several places has the first reason."""
    found: dict[str, str] = {}
    for place in unproven_places(model, ranges_of(model, **amax)):
        for node in place.nodes:
            found.setdefault(node, place.reason)
    return found


MLP = "h = MatMul(x, w) t = Transpose(h) r = Relu(t) s = Tanh(x) y = Add(r, s)"


def test_an_activation_of_70000_is_refused_and_named(tmp_path: Path) -> None:
    model = load(tmp_path, MLP)
    why = "tensor 'h' reaches 7e+04: 8 times that is beyond FP16's 65504"
    assert reasons(model, h=7e4, t=7e4) == dict.fromkeys(("inner/h", "inner/t", "inner/r"), why)
    # What is written, what is read, and the view are one place.
    assert count_places(unproven_places(model, ranges_of(model, h=7e4, t=7e4))) == 1
    assert reasons(model) == {}

    # So are a constant and what it makes: an attention mask.
    model = load(tmp_path, "s = Add(x, huge) y = Softmax(s)")
    places = unproven_places(model, ranges_of(model, s=1e9))
    assert {node for place in places for node in place.nodes} == {"inner/s", "inner/y"}
    assert (len(places), count_places(places)) == (2, 1)


def test_the_margin_is_for_rows_that_were_not_seen(tmp_path: Path) -> None:
    model = load(tmp_path, MLP)
    inside = LARGEST / MARGIN
    assert reasons(model, h=inside, t=inside) == {}
    assert set(reasons(model, r=np.nextafter(inside, np.inf))) == {"inner/r", "inner/y"}
    # What was not measured is not shown.
    ranges = ranges_of(model)
    del ranges["r"]
    (place,) = unproven_places(model, ranges)
    assert (place.nodes, place.reason) == (("inner/r", "inner/y"), "tensor 'r' was not measured")


@pytest.mark.parametrize(
    ("body", "x", "expected"),
    [
        ("y = ReduceSum(x, last)", 8000.0, {}),
        ("y = ReduceSum(x, last)", LARGEST / 8, {}),
        ("y = ReduceSum(x, last)", 8190.0, "'inner/y' sums 8 terms of up to 8190; FP16 ends at 65504"),
        ("y = ReduceMean(x, last)", 8190.0, "'inner/y' sums 8 terms of up to 8190; FP16 ends at 65504"),
        ("y = ReduceSumSquare(x, last)", 90.0, {}),
        ("y = ReduceL2(x, last)", 91.0, "'inner/y' sums 8 terms of up to 8281; FP16 ends at 65504"),
        ("y = ReduceSum(x, first)", 1.0, "'inner/y' sums over an axis of unknown length"),
        ("y = ReduceMax(x, first)", 8000.0, {}),
    ],
)
def test_sums_are_bounded_whatever_their_order(body, x, expected, tmp_path):
    model = load(tmp_path, body)
    places = unproven_places(model, ranges_of(model, x=x))
    # The terms themselves may lack the margin; what is asked here is the sum.
    found = {place.nodes[0]: place.reason for place in places if "sums" in place.reason}
    assert found == (expected if isinstance(expected, dict) else {"inner/y": expected})


def test_constants_and_scales(tmp_path: Path) -> None:
    for body, expected in (
        ("y = Add(x, huge)", "constant 'huge' of 'inner/y' holds 1e+09, FP16 ends at 65504"),
        ("y = Add(x, edge)", None),
        ("y = Max(x, infinite)", None),
        ("y = Add(x, epsilon)", "constant 'epsilon' of 'inner/y' is 1e-12, which is 0 in FP16"),
        ("y = Add(x, small)", None),
        ("y = Add(x, nought)", None),
    ):
        assert reasons(load(tmp_path, body)) == ({} if expected is None else {"inner/y": expected})
    held = [2.0**-14, 0.0078125, 1.0, 65280.0]
    lost = [2.0**-15, 2.24e-5, 1.0 + 2.0**-12, 2.0**16]
    assert [scale_fits(scale) for scale in held + lost] == [True] * 4 + [False] * 4


def l2_norm(floor: str) -> str:
    return (
        "q = Mul(x, x) s = ReduceSum(q, last) r = Sqrt(s)"
        f" m = Max(r, {floor}) t = Tanh(x) d = Div(t, m) y = Relu(d)"
    )


def test_a_guard_that_becomes_zero_keeps_all_of_the_divisor_in_fp32(tmp_path: Path) -> None:
    found = reasons(load(tmp_path, l2_norm("epsilon")))
    assert set(found) == {"inner/q", "inner/s", "inner/r", "inner/m", "inner/d"}
    assert found["inner/s"] == "'inner/d' divides by 'm', which only 1e-12 keeps from 0; in FP16 that is 0"
    assert reasons(load(tmp_path, l2_norm("small"))) == {}


@pytest.mark.parametrize("result", ["Div(x, h)", "Reciprocal(h)", "Log(h)", "Pow(h, minus)"])
def test_what_is_divided_by_must_be_normal(result: str, tmp_path: Path) -> None:
    model = load(tmp_path, f"h = Exp(x) y = {result}")
    assert reasons(model, h=TensorRange(1.0, 2.0**-14)) == {}
    why = "'inner/y' divides by 'h', which is as small as 6e-05; FP16 begins at 6.104e-05"
    assert reasons(model, h=TensorRange(1.0, 6e-5)) == dict.fromkeys(("inner/y", "inner/h"), why)
