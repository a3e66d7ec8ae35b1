"""The rules for Q/DQ pairs: what they leave in the graph, and that the numbers stay."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import TensorProto as T
from onnx import numpy_helper
from planned_graphs import FN, FNUZ, Array, Planned, evaluate, reread

from loka_onnx.engines.draft import GraphDraft
from loka_onnx.engines.migraphx.pairs import (
    explicit_zero_points,
    rank_0_scales,
    separate_sources,
    to_carrier,
    to_fnuz,
)
from loka_onnx.errors import ModelError

FINITE = np.array([i for i in range(256) if i & 0x7F != 0x7F], np.uint8).view(FN)
"""Every number of E4M3FN."""


def under(model: onnx.ModelProto, *rules: Callable[[GraphDraft], None]) -> onnx.ModelProto:
    """The model under rules."""
    draft = GraphDraft(deepcopy(model), Path("nowhere"))
    for rule in rules:
        rule(draft)
    return draft.finished()


def constants(model: onnx.ModelProto) -> dict[str, onnx.TensorProto]:
    return {tensor.name: tensor for tensor in model.graph.initializer}


def quantizers(model: onnx.ModelProto) -> list[onnx.NodeProto]:
    return [node for node in model.graph.node if node.op_type in {"QuantizeLinear", "DequantizeLinear"}]


def same_nodes(one: onnx.ModelProto, other: onnx.ModelProto) -> bool:
    return list(one.graph.node) == list(other.graph.node)


def one_pair(scale: Any = 0.25, *, zero_point: bool = True, **attributes: Any) -> onnx.ModelProto:
    p = Planned()
    inputs = [p.constant("s", scale)]
    if zero_point:
        inputs.append(p.constant("z", np.zeros(np.shape(scale)), FN))
    else:
        attributes["output_dtype"] = T.FLOAT8E4M3FN
    q = p.op("QuantizeLinear", ["x", *inputs], "q", **attributes)
    return p.model(p.op("DequantizeLinear", [q, *inputs], "dq"))


class TestZeroPoints:
    def test_a_missing_one_becomes_explicit(self) -> None:
        model = under(one_pair(zero_point=False), explicit_zero_points)
        onnx.checker.check_model(model, full_check=True)
        for node in quantizers(model):
            zero = constants(model)[node.input[2]]
            assert (zero.data_type, list(zero.dims), zero.raw_data) == (T.FLOAT8E4M3FN, [], b"\0")
            assert not [each for each in node.attribute if each.name == "output_dtype"]
        x = np.linspace(-200, 200, 16, dtype=np.float32).reshape(2, 8)
        (got,) = evaluate(model, x=x)
        np.testing.assert_array_equal(got, (np.clip(x / 0.25, -448, 448)).astype(FN).astype(np.float32) / 4)

    def test_one_that_is_not_zero_is_refused(self) -> None:
        p = Planned()
        p.op("QuantizeLinear", ["x", p.constant("s", 1.0), p.constant("z", 1.0, FN)], "fc.q")
        with pytest.raises(ModelError, match=r"'fc.q': an FP8 zero point must be zero(?s:.*)'z' is not"):
            under(p.model(p.op("Relu", ["x"], "r")), explicit_zero_points)

    def test_a_computed_scale_is_refused(self) -> None:
        p = Planned()
        scale = p.op("Abs", [p.constant("s", 1.0)], "computed")
        q = p.op("QuantizeLinear", ["x", scale, p.constant("z", 0.0, FN)], "fc.q")
        model = p.model(p.op("DequantizeLinear", [q, scale, "z"], "fc.dq"))
        with pytest.raises(ModelError, match=r"'fc.q': MIGraphX drops Q/DQ pairs"):
            under(model, explicit_zero_points)

    def test_integers_are_left_alone(self) -> None:
        p = Planned()
        inputs = [p.constant("s", 1.0), p.constant("z", 3, np.int8)]
        q = p.op("QuantizeLinear", ["x", *inputs], "q")
        model = p.model(p.op("DequantizeLinear", [q, *inputs], "dq"))
        assert same_nodes(under(model, explicit_zero_points, to_fnuz), model)


class TestRank0:
    @pytest.mark.parametrize("scale", [[0.25], 0.25])
    def test_scales_and_zero_points_have_rank_0_in_raw_data(self, scale: Any) -> None:
        before = one_pair(scale, axis=0)
        for tensor in before.graph.initializer:
            if tensor.name == "z":
                # The spelling that MIGraphX reads as numbers.
                tensor.ClearField("raw_data")
                tensor.int32_data.append(0)
        model = under(before, rank_0_scales)
        for node in quantizers(model):
            for tensor in (constants(model)[name] for name in node.input[1:]):
                assert (list(tensor.dims), bool(tensor.raw_data), list(tensor.int32_data)) == ([], True, [])
            assert not node.attribute
        x = np.linspace(-3, 3, 8, dtype=np.float32).reshape(1, 8)
        np.testing.assert_array_equal(evaluate(model, x=x)[0], evaluate(one_pair(0.25), x=x)[0])


def with_residual(base: int = T.FLOAT, *, scales: tuple[float, ...] = (0.25,)) -> onnx.ModelProto:
    """``x + DQ(Q(x))`` for each scale: the pattern whose residual MIGraphX rounds."""
    p = Planned(base)
    x = p.op("Relu", [p.enter()], "relu")
    y = x
    for number, scale in enumerate(scales):
        y = p.op("Add", [y, p.pair(x, f"s{number}", scale)], f"add{number}")
    return p.model(y)


class TestSharedSources:
    def test_a_shared_tensor_is_quantized_through_a_copy(self) -> None:
        model = under(with_residual(), separate_sources)
        by_name = {node.name: node for node in model.graph.node}
        quantize = by_name["s0/q"]
        copy = next(node for node in model.graph.node if quantize.input[0] in node.output)
        assert (copy.op_type, copy.input[0]) == ("Mul", "relu:0")
        # Nothing but the Q reads the copy, and no Q reads what others read.
        assert [n.name for n in model.graph.node if copy.output[0] in n.input] == ["s0/q"]
        read = (copy.input[1], quantize.input[1], by_name["s0/dq"].input[1])
        assert [numpy_helper.to_array(constants(model)[name]) for name in read] == [2, 0.5, 0.25]

    @pytest.mark.parametrize("scales", [(0.25,), (0.25, 2.0**-12)])
    def test_every_number_stays(self, scales: tuple[float, ...]) -> None:
        before = with_residual(scales=scales)
        exponents = np.arange(-149.0, 128.0)
        x = (np.float32(1.1875) * 2.0 ** exponents[None, :]).astype(np.float32)
        x = np.concatenate([x, [[np.float32(3.4e38)] * x.shape[1]]]).astype(np.float32)
        before.graph.input[0].type.tensor_type.shape.dim[1].dim_value = x.shape[1]
        after = under(before, separate_sources)
        with np.errstate(over="ignore"):
            np.testing.assert_array_equal(evaluate(after, x=x)[0], evaluate(before, x=x)[0])

    def test_a_tensor_that_only_the_q_reads_is_left_alone(self) -> None:
        assert same_nodes(under(one_pair(), separate_sources), one_pair())

    def test_a_cast_does_not_hide_who_else_reads(self) -> None:
        p = Planned(T.BFLOAT16)
        x = p.op("Relu", [p.enter()], "relu")
        wide = p.op("Cast", [x], "wide", to=T.FLOAT)
        inputs = [p.constant("s", 0.25, np.float32), p.constant("z", 0.0, FN)]
        q = p.op("QuantizeLinear", [wide, *inputs], "q")
        dq = p.op("Cast", [p.op("DequantizeLinear", [q, *inputs], "dq")], "narrow", to=T.BFLOAT16)
        model = under(p.model(p.op("Add", [x, dq], "add")), separate_sources)
        (copy,) = (node for node in model.graph.node if node.op_type == "Mul")
        assert copy.input[0] == wide


class TestFnuz:
    def test_every_number_has_its_half_bit_for_bit(self) -> None:
        """The claim of the docstring, from the formats alone."""
        half = (FINITE.astype(np.float64) / 2).astype(FNUZ)
        np.testing.assert_array_equal(half.astype(np.float64) * 2, FINITE.astype(np.float64))
        positive = ~np.signbit(FINITE.astype(np.float32)) | (FINITE.astype(np.float32) != 0)
        np.testing.assert_array_equal(half.view(np.uint8)[positive], FINITE.view(np.uint8)[positive])

    def test_a_stored_weight_keeps_its_values(self) -> None:
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

    def test_what_does_not_saturate_is_rounded_alike(self) -> None:
        scale = 0.0390625
        before = one_pair(scale)
        model = under(before, to_fnuz)
        assert {t.data_type for t in model.graph.initializer} == {T.FLOAT, T.FLOAT8E4M3FNUZ}
        exact = FINITE[:127].astype(np.float64) * scale
        positive = np.concatenate(
            [np.geomspace(1e-6, 448 * scale, 4000), exact, (exact[:-1] + exact[1:]) / 2]
        )
        x = np.concatenate([positive, -positive, [0.0, -0.0]]).astype(np.float32)
        x = np.repeat(x[:, None], 8, axis=1)
        np.testing.assert_array_equal(evaluate(model, x=x)[0], evaluate(before, x=x)[0])

    def test_what_saturates_is_nearer_to_what_it_stands_for(self) -> None:
        before = one_pair(1.0)
        x = np.array([[448.0, 463.9, 464.0, 464.1, 480.0, 1e4, -500.0, np.inf]], np.float32)
        (fnuz,), (fn,) = evaluate(under(before, to_fnuz), x=x), evaluate(before, x=x)
        np.testing.assert_array_equal(fn, [[448, 448, 448, 448, 448, 448, -448, 448]])
        np.testing.assert_array_equal(fnuz, [[448, 448, 448, 480, 480, 480, -480, 480]])

    def test_nan_weights_and_other_formats_are_refused(self) -> None:
        p = Planned()
        stored = p.constant("w", np.full((1, 8), np.nan), FN)
        dq = p.op("DequantizeLinear", [stored, p.constant("s", 1.0), p.constant("z", 0.0, FN)], "fc.dq")
        with pytest.raises(ModelError, match=r"'fc.dq': a stored FP8 weight is NaN"):
            under(p.model(p.op("Add", ["x", dq], "add")), to_fnuz)
        p = Planned()
        model = p.model(p.pair("x", "fc", 1.0, ml_dtypes.float8_e5m2))
        for rule in (to_fnuz, to_carrier):
            with pytest.raises(ModelError, match=r"E4M3FN plans only(?s:.*)is float8_e5m2"):
                under(model, rule)


class TestCarrier:
    def test_bits_stay_and_the_name_changes(self) -> None:
        p = Planned()
        values: Array = FINITE.reshape(1, -1)
        inputs = [p.constant("w", values, FN), p.constant("s", 2.0**-7), p.constant("z", 0.0, FN)]
        dq = p.op("DequantizeLinear", inputs, "dq")
        before = p.model(p.op("Add", [p.pair("x", "a", 0.25), dq], "add"), x=(FINITE.size,))
        model = under(before, to_carrier)
        kinds = {t.data_type for t in model.graph.initializer}
        assert kinds == {T.FLOAT, T.FLOAT8E4M3FNUZ}
        weight = next(t for t in model.graph.initializer if t.name.startswith("w"))
        assert weight.raw_data == values.tobytes()
        scales = {float(numpy_helper.to_array(t)) for t in model.graph.initializer if t.data_type == T.FLOAT}
        assert scales == {0.25, 2.0**-7}
        x = np.linspace(-200, 200, 2 * FINITE.size, dtype=np.float32).reshape(2, -1)
        np.testing.assert_array_equal(evaluate(reread(model), x=x)[0], evaluate(before, x=x)[0])


@pytest.mark.parametrize("form", [to_fnuz, to_carrier])
def test_a_constant_that_is_quantized_in_the_graph_keeps_its_numbers(form: Any) -> None:
    """A Q may read a constant in FP32, which is no stored FP8."""
    p = Planned()
    values = p.constant("w", np.linspace(-100, 100, 8).reshape(1, 8))
    pair = p.pair(values, "w", 0.25)
    before = p.model(p.op("Add", ["x", pair], "sum"))
    after = under(before, form)
    (quantize,) = [node for node in after.graph.node if node.op_type == "QuantizeLinear"]
    assert constants(after)[quantize.input[0]].data_type == T.FLOAT
    x = np.zeros((2, 8), np.float32)
    (got,) = evaluate(reread(after) if form is to_carrier else after, x=x)
    np.testing.assert_array_equal(got, evaluate(before, x=x)[0])
