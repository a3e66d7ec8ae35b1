"""Smoothing moves factors between what makes an activation and the weights that read it, exactly."""

import re
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import numpy as np
import onnx
import pytest
import shape_models
from norm_models import assert_folded_equally
from onnx import numpy_helper
from rewrite_models import artifact, evaluate, initializer, named, op_types
from shape_models import feeds, match, weight

from loka_onnx.core.rewrite import Applied, Declined
from loka_onnx.graph.model import GraphModel
from loka_onnx.numerics.smoothing import to_powers_of_two
from loka_onnx.transforms.base import Mod
from loka_onnx.transforms.linears.makers import Maker, find_makers, smooth
from loka_onnx.transforms.sequence import apply_mods


class Smooth(Mod[Maker]):
    name = "smooth"

    def __init__(self, factors: Mapping[str, Any]) -> None:
        self.factors = {name: np.asarray(values, np.float64) for name, values in factors.items()}

    def _find(self, model: GraphModel) -> Iterator[Maker | Declined]:
        for found in find_makers(model):
            if (found.at if isinstance(found, Declined) else found.name) in self.factors:
                yield found

    def rewrite(self, model: GraphModel, match: Maker) -> Applied:
        return smooth(model, match, self.factors[match.name])


GAIN = np.linspace(0.5, 30, 8, dtype=np.float32)
SHIFT = np.linspace(1.5, -1, 8, dtype=np.float32)
LAYER = "[norm] n = LayerNormalization<axis=-1, epsilon=0.001>(x, gain, shift)"
S = np.linspace(0.1, 5, 8)

W, B, V = weight(8, 4), weight(4), weight(8, 8)


class Case(shape_models.Case):
    shared: ClassVar[Any] = {"gain": GAIN, "shift": SHIFT, "w": W, "b": B, "v": V, "c": SHIFT}


SMOOTHED = {
    "behind_a_norm": Case(f"{LAYER} [fc] y = Gemm(n, w, b)"),
    "two_linears_behind_a_norm": Case(
        f"{LAYER} [fc] h = MatMul(n, w) [gate] g = Gemm<transB=1>(n, v, b) y = Mul(h, g)", {"v": W.T.copy()}),
    "behind_a_gemm": Case("[fc1] h = Gemm<transB=1>(x, v, c) [fc2] y = MatMul(h, w)"),
    "behind_a_matmul": Case("[fc1] h = MatMul(x, v) [fc2] y = MatMul(h, w)"),
    "through_relu": Case("[fc1] g = MatMul(x, v) h = Add(g, c) r = Relu(h) [fc2] y = Gemm(r, w, b)"),
    "through_leaky_relu_and_layout": Case(
        "[fc1] g = MatMul(x, v) r = LeakyRelu<alpha=0.1>(g) f = Reshape(r, rows) [fc2] y = MatMul(f, w)",
        {"rows": [-1, 8]}, "float[batch,3,8] x", outputs="float[rows,4] y"),
    "chain": Case(
        "[fc1] h = MatMul(x, v) a = Relu(h) [fc2] g = MatMul(a, u) r = Relu(g) [fc3] y = MatMul(r, w)",
        {"u": weight(8, 8) + 1}),
    "weight_on_the_left": Case("[fc1] h = MatMul(v, x) r = Relu(h) [fc2] y = MatMul(w, r)", {"w": W.T.copy()},
        "float[batch,8,3] x"),
    "flattened_alike": Case(f"{LAYER} f = Flatten<axis=1>(n) [fc] y = MatMul(f, w)", {"w": weight(24, 4)},
        "float[batch,3,8] x"),
    "flattened_to_the_batch_as_it_is": Case(
        f"{LAYER} s = Shape<start=0,end=1>(x) t = Concat<axis=0>(s, width) f = Reshape(n, t)"
        " [fc] y = MatMul(f, w)", {"w": weight(24, 4), "width": [24]}, "float[batch,3,8] x"),
    "behind_a_product_with_constants": Case(
        "d = Sub(x, shift) [unit] n = Mul(d, gain) [fc] y = Gemm(n, w, b)"),
    "behind_a_division_by_one_number": Case("[unit] n = Div(x, c) [fc] y = MatMul(n, w)", {"c": 3.0}),
    "joined_with_another": Case(
        "[fc1] h = MatMul(x, v) r = Relu(h) j = Concat<axis=-1>(r, x) [fc2] y = MatMul(j, w)",
        {"w": weight(16, 4)}),
    "joined_with_itself": Case(
        "[fc1] h = MatMul(x, v) r = Relu(h) j = Concat<axis=1>(r, h, r) [fc2] y = MatMul(j, w)",
        {"w": weight(24, 4)}),
    "a_slice_of_it": Case(
        "[fc1] h = MatMul(x, v) s = Slice(h, first, last, axis, step) [fc2] y = MatMul(s, w)", {"w": weight(3,
        4), **{n: np.array([i]) for n, i in (("first", 1), ("last", 7), ("axis", 1), ("step", 2))}}),
    "two_parts_of_it": Case("[fc1] h = MatMul(x, v) p, q = Split<axis=1>(h, sizes) [fc2] a = MatMul(p, w)"
        " [fc3] b = MatMul(q, u) y = Add(a, b)", {"w": weight(3, 4), "u": weight(5, 4), "sizes": [3, 5]}),
    "columns_of_it": Case("[fc1] h = MatMul(x, v) s = Gather<axis=1>(h, columns) [fc2] y = MatMul(s, w)",
        {"w": weight(4, 4), "columns": [6, 0, 6, 3]}),
}  # fmt: skip
INPUTS = {
    "of_the_model": Case("[fc] y = Gemm(x, w, b)"),
    "read_by_two_linears": Case("[fc] h = MatMul(x, w) [gate] g = Gemm<transB=1>(x, v, b) y = Mul(h, g)",
        {"v": W.T.copy()}),
    "read_by_others_too": Case("[fc] h = MatMul(x, v) y = Add(h, x)"),
    "beside_embeddings": Case("rows = Gather(table, ids) j = Concat<axis=1>(x, rows) [fc] y = MatMul(j, w)",
        {"table": weight(10, 6), "w": weight(14, 4)}, "float[batch,8] x, int64[batch] ids"),
    "columns_of_the_model": Case(
        "a, b = Split<axis=1, num_outputs=2>(x) [fc] f = MatMul(a, w) [gate] g = MatMul(b, u) y = Mul(f, g)",
        {"w": weight(4, 4), "u": weight(4, 4)}),
}  # fmt: skip


def factors_of(name: str) -> dict[str, Any]:
    """Factors by what makes a tensor: the first layer with a name, or the input."""
    if name == "chain":
        return {"fc1": S, "fc2": S[::-1]}
    return {"x" if name in INPUTS else re.findall(r"\[(\w+)\]", SMOOTHED[name].body)[0]: S}


def run(case, factors, folder):
    before = case.model()
    source = artifact(before, folder / "before.onnx")
    result = apply_mods(source, [feeds(before)], folder / "after.onnx", [Smooth(factors)])
    return result.log.records[0], onnx.load(source.path), onnx.load(result.model.path)


@pytest.mark.parametrize("name", SMOOTHED)
def test_factors_move_and_the_model_stays_equal(name, tmp_path):
    case, factors = SMOOTHED[name], factors_of(name)
    record, before, after = run(case, factors, tmp_path)
    assert not record.rolled_back
    assert record.declined == ()
    assert len(record.applied) == (2 if name == "chain" else 1)
    assert_folded_equally(case.model(), Smooth(factors), tmp_path)
    # Nothing is computed for it.
    assert [node.op_type for node in after.graph.node] == [node.op_type for node in before.graph.node]
    onnx.checker.check_model(after, full_check=True)


@pytest.mark.parametrize("name", INPUTS)
def test_features_are_scaled_behind_the_input(name, tmp_path):
    case, factors = INPUTS[name], factors_of(name)
    record, before, after = run(case, factors, tmp_path)
    assert not record.rolled_back
    assert len(record.applied) == 1
    assert_folded_equally(case.model(), Smooth(factors), tmp_path)
    assert sorted(op_types(after)) == sorted([*op_types(before), "Mul"])
    scaled = next(node for node in after.graph.node if node.input[0] == "x" and node.op_type == "Mul")
    np.testing.assert_array_equal(
        numpy_helper.to_array(initializer(after, scaled.input[1])), (1 / S).astype(np.float32)
    )
    assert list(after.graph.input) == list(before.graph.input)
    onnx.checker.check_model(after, full_check=True)


def test_a_reader_without_factors_reads_the_input_as_it_was_and_changed_sites_are_told_of(tmp_path):
    case = INPUTS["read_by_others_too"]
    record, _, after = run(case, {"x": S}, tmp_path)
    assert "x" in named(after, "block/y").input
    assert "x" not in named(after, "fc").input
    assert record.declined == (
        Declined("x", "'block/y' reads the input without scales: 'block/y' reads it, a Add"),
    )
    # They are calibrated again: the maker, whose weight is divided, and the readers.
    source = artifact(SMOOTHED["chain"].model(), tmp_path / "before.onnx")
    rows = [feeds(onnx.load(source.path))]
    result = apply_mods(source, rows, tmp_path / "after.onnx", [Smooth({"fc2": S})])
    assert {site.name: site.merged_from for site in result.model.sites} == {
        "fc1": (),
        "fc2": ("fc2",),
        "fc3": ("fc3",),
    }


@pytest.mark.parametrize("name", [*SMOOTHED, *INPUTS])
def test_powers_of_two_change_no_bit_of_the_model_in_fp32(name, tmp_path):
    case = {**SMOOTHED, **INPUTS}[name]
    factors = {maker: to_powers_of_two(values) for maker, values in factors_of(name).items()}
    _, before, after = run(case, factors, tmp_path)
    x = feeds(before, seed=3)
    np.testing.assert_array_equal(evaluate(after, x)["y"], evaluate(before, x)["y"])


OUT = "its output is not smoothed: "
DECLINED = {
    "read_by_a_sum": Case(f"{LAYER} [fc] h = MatMul(n, v) y = Add(h, n)",
        why=("norm", f"{OUT}'block/y' reads it, a Add")),
    "another_function_in_between": Case("[a] h = MatMul(x, v) g = Sigmoid(h) [fc] y = MatMul(g, w)",
        why=("a", f"{OUT}'block/g' reads it, a Sigmoid")),
    "scale_not_constant": Case("[norm] n = LayerNormalization(x, g) [fc] y = MatMul(n, w)",
        inputs="float[batch,8] x, float[8] g", why=("norm", f"{OUT}the scale of 'norm' is not constant")),
    "contraction_over_another_axis": Case(f"{LAYER} t = Transpose<perm=[0,2,1]>(n) [fc] y = MatMul(t, w)",
        {"w": weight(3, 4)}, "float[batch,3,8] x",
        why=("norm", f"{OUT}a row of a weight meets several channels")),
    "joined_along_rows_of_the_weight": Case(
        "[fc1] h = MatMul(x, v) j = Concat<axis=1>(h, z) [fc2] y = MatMul(j, w)",
        inputs="float[batch,2,8] x, float[batch,2,8] z",
        why=("fc1", f"{OUT}a row of a weight meets several channels")),
    "a_part_of_the_batch": Case(
        "[fc1] h = MatMul(x, v) s = Slice(h, first, last, axis) [fc2] y = MatMul(s, w)",
        {**{n: np.array([i]) for n, i in (("first", 0), ("last", 1), ("axis", 0))}},
        outputs="float[rows,4] y",
        why=("fc1", f"{OUT}'block/s', a Slice, is not followed: it takes a part of the batch")),
    "positions_of_an_input": Case(
        "[fc1] h = MatMul(x, v) s = Gather<axis=1>(h, columns) [fc2] y = MatMul(s, w)",
        inputs="float[batch,8] x, int64[8] columns",
        why=("fc1", f"{OUT}'block/s', a Gather, is not followed: what it takes is not constant")),
    "batched_weight_in_front": Case("[a] h = MatMul(x, v) [fc] y = MatMul(h, w)", {"v": weight(3, 8, 8)},
        "float[batch,3,5,8] x", why=("a", f"{OUT}its weight has rank 3, not 2")),
    "factor_that_varies_within_a_channel": Case("[unit] n = Mul(x, c) [fc] y = MatMul(n, w)",
        {"c": weight(3, 8)}, "float[batch,3,8] x", why=("unit", f"{OUT}a constant varies within a channel")),
    "divided_by_an_activation": Case("[unit] n = Div(gain, x) [fc] y = MatMul(n, w)",
        why=("unit", f"{OUT}it multiplies with no constant")),
    "ids": Case("f = Cast<to=1>(ids) [fc] y = MatMul(f, w)", inputs="int64[batch,8] ids",
        why=("ids", "the input is not scaled: it holds int64, not features")),
    "an_input_through_a_function": Case("l = Log(x) [fc] y = MatMul(l, w)",
        why=("x", "'block/l' reads the input without scales: 'block/l' reads it, a Log")),
    "an_input_named_like_a_node": Case("[x] y = MatMul(x, w)",
        why=("x", "the input is not scaled: a node has the same name")),
}  # fmt: skip


@pytest.mark.parametrize("name", DECLINED)
def test_what_cannot_take_the_factors_is_told_of(name, tmp_path):
    case = DECLINED[name]
    found = match(case.model(), Smooth({case.why[0]: S}), tmp_path)
    assert found.matches == ()
    assert [(d.at, d.reason) for d in found.declined] == [case.why]
