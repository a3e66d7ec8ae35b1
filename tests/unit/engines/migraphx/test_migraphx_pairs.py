"""The rules for Q/DQ pairs: what they leave in the graph, and that the numbers stay."""

from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import TensorProto as T
from planned_graphs import FN, Planned, constants, evaluate, reread

from loka_onnx.engines.draft import GraphDraft
from loka_onnx.engines.migraphx.pairs import explicit_zero_points, separate_sources, to_carrier, to_fnuz
from loka_onnx.errors import ModelError

FINITE = np.array([i for i in range(256) if i & 0x7F != 0x7F], np.uint8).view(FN)
"""Every number of E4M3FN."""


def under(model: onnx.ModelProto, *rules: Callable[[GraphDraft], None]) -> onnx.ModelProto:
    """The model under rules."""
    draft = GraphDraft(deepcopy(model), Path("nowhere"))
    for rule in rules:
        rule(draft)
    return draft.finished()


def same_nodes(one: onnx.ModelProto, other: onnx.ModelProto) -> bool:
    return list(one.graph.node) == list(other.graph.node)


def one_pair(scale: float = 0.25) -> onnx.ModelProto:
    p = Planned()
    return p.model(p.pair("x", "fc", scale))


def test_integers_are_left_alone() -> None:
    p = Planned()
    inputs = [p.constant("s", 1.0), p.constant("z", 3, np.int8)]
    q = p.op("QuantizeLinear", ["x", *inputs], "q")
    model = p.model(p.op("DequantizeLinear", [q, *inputs], "dq"))
    assert same_nodes(under(model, explicit_zero_points, to_fnuz), model)


def with_residual(base: int = T.FLOAT, *, scales: tuple[float, ...] = (0.25,)) -> onnx.ModelProto:
    """``x + DQ(Q(x))`` for each scale: the pattern whose residual MIGraphX rounds."""
    p = Planned(base)
    x = p.op("Relu", [p.enter()], "relu")
    y = x
    for number, scale in enumerate(scales):
        y = p.op("Add", [y, p.pair(x, f"s{number}", scale)], f"add{number}")
    return p.model(y)


@pytest.mark.parametrize("scales", [(0.25,), (0.25, 2.0**-12)])
def test_every_number_stays(scales: tuple[float, ...]) -> None:
    before = with_residual(scales=scales)
    exponents = np.arange(-149.0, 128.0)
    x = (np.float32(1.1875) * 2.0 ** exponents[None, :]).astype(np.float32)
    x = np.concatenate([x, [[np.float32(3.4e38)] * x.shape[1]]]).astype(np.float32)
    before.graph.input[0].type.tensor_type.shape.dim[1].dim_value = x.shape[1]
    after = under(before, separate_sources)
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(evaluate(after, x=x)[0], evaluate(before, x=x)[0])


def test_a_tensor_that_only_the_q_reads_is_left_alone() -> None:
    assert same_nodes(under(one_pair(), separate_sources), one_pair())


def test_a_cast_does_not_hide_who_else_reads() -> None:
    p = Planned(T.BFLOAT16)
    x = p.op("Relu", [p.enter()], "relu")
    wide = p.op("Cast", [x], "wide", to=T.FLOAT)
    inputs = [p.constant("s", 0.25, np.float32), p.constant("z", 0.0, FN)]
    q = p.op("QuantizeLinear", [wide, *inputs], "q")
    dq = p.op("Cast", [p.op("DequantizeLinear", [q, *inputs], "dq")], "narrow", to=T.BFLOAT16)
    model = under(p.model(p.op("Add", [x, dq], "add")), separate_sources)
    (copy,) = (node for node in model.graph.node if node.op_type == "Mul")
    assert copy.input[0] == wide


def test_a_stored_weight_keeps_its_values() -> None:
    p = Planned()
    stored = p.constant("w", FINITE.reshape(1, -1), FN)
    inputs = [stored, p.constant("s", 2.0**-7), p.constant("z", 0.0, FN)]
    dq = p.op("DequantizeLinear", inputs, "dq")
    model = under(p.model(p.op("Add", ["x", dq], "add"), x=(FINITE.size,)), to_fnuz)
    onnx.checker.check_model(model, full_check=True)
    weight = next(t for t in model.graph.initializer if t.name.startswith("w"))
    assert weight.data_type == T.FLOAT8E4M3FNUZ
    assert weight.raw_data
    # 0x80 is NaN in E4M3FNUZ.
    assert b"\x80" not in weight.raw_data
    x = np.zeros((1, FINITE.size), np.float32)
    expected = FINITE.astype(np.float64).reshape(1, -1) * 2.0**-7
    np.testing.assert_array_equal(evaluate(model, x=x)[0], expected.astype(np.float32))


def test_what_does_not_saturate_is_rounded_alike() -> None:
    scale = 0.0390625
    before = one_pair(scale)
    model = under(before, to_fnuz)
    assert {t.data_type for t in model.graph.initializer} == {T.FLOAT, T.FLOAT8E4M3FNUZ}
    exact = FINITE[:127].astype(np.float64) * scale
    positive = np.concatenate([np.geomspace(1e-6, 448 * scale, 4000), exact, (exact[:-1] + exact[1:]) / 2])
    x = np.concatenate([positive, -positive, [0.0, -0.0]]).astype(np.float32)
    x = np.repeat(x[:, None], 8, axis=1)
    np.testing.assert_array_equal(evaluate(model, x=x)[0], evaluate(before, x=x)[0])


def test_what_saturates_is_nearer_to_what_it_stands_for() -> None:
    before = one_pair(1.0)
    x = np.array([[448.0, 463.9, 464.0, 464.1, 480.0, 1e4, -500.0, np.inf]], np.float32)
    (fnuz,), (fn,) = evaluate(under(before, to_fnuz), x=x), evaluate(before, x=x)
    np.testing.assert_array_equal(fn, [[448, 448, 448, 448, 448, 448, -448, 448]])
    np.testing.assert_array_equal(fnuz, [[448, 448, 448, 480, 480, 480, -480, 480]])


def test_nan_weights_and_other_formats_are_refused() -> None:
    p = Planned()
    stored = p.constant("w", np.full((1, 8), np.nan), FN)
    dq = p.op("DequantizeLinear", [stored, p.constant("s", 1.0), p.constant("z", 0.0, FN)], "fc.dq")
    with pytest.raises(ModelError, match=r"'fc.dq': a stored FP8 weight is NaN"):
        under(p.model(p.op("Add", ["x", dq], "add")), to_fnuz)
    p = Planned()
    inputs = [p.constant("s", 1.0), p.constant("z", 1.0, FN)]
    shifted = p.op("DequantizeLinear", [p.op("QuantizeLinear", ["x", *inputs], "q"), *inputs], "dq")
    with pytest.raises(ModelError) as refused:
        under(p.model(shifted), to_fnuz)
    assert refused.value.code == "E0852"
    p = Planned()
    model = p.model(p.pair("x", "fc", 1.0, ml_dtypes.float8_e5m2))
    for rule in (to_fnuz, to_carrier):
        with pytest.raises(ModelError, match=r"E4M3FN plans only(?s:.*)is float8_e5m2"):
            under(model, rule)


@pytest.mark.parametrize("form", [to_fnuz, to_carrier])
def test_a_constant_that_is_quantized_in_the_graph_keeps_its_numbers(form: Any) -> None:
    """A Q may read a constant in FP32, which is no stored FP8."""
    p = Planned()
    pair = p.pair(p.constant("w", np.linspace(-100, 100, 8).reshape(1, 8)), "w", 0.25)
    before = p.model(p.op("Add", ["x", pair], "sum"))
    after = under(before, form)
    (quantize,) = [node for node in after.graph.node if node.op_type == "QuantizeLinear"]
    assert constants(after)[quantize.input[0]].dtype == np.float32
    x = np.zeros((2, 8), np.float32)
    (got,) = evaluate(reread(after) if form is to_carrier else after, x=x)
    np.testing.assert_array_equal(got, evaluate(before, x=x)[0])
