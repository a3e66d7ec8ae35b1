"""Where Q/DQ pairs are put, what is left alone and why; every result is bit-equal to the graph before."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from qdq_models import (
    RTX,
    Placed,
    Scales,
    assert_bit_equal,
    place,
    plan_of,
    run_basic,
    sources,
    square,
    weight,
)
from rewrite_models import Arrays, artifact, initializer, named, parse, random_rows

from loka_onnx.core.backends import Fusions
from loka_onnx.core.formats import Precision
from loka_onnx.graph.model import GraphModel
from loka_onnx.transforms.precision.apply_plan import PlanForm, apply_plan
from loka_onnx.transforms.precision.place_qdq import place_qdq

S = 0.0078125
OTHER_SCALE = "it is not one scale, known beforehand, for the tensor"


def model(body: str, constants: dict[str, Any] | None = None, **interface: str) -> onnx.ModelProto:
    """``fc0`` and a ReLU, then `body` from ``h`` to ``y``."""
    text = f"[fc0] p = MatMul(x, w0) [relu] h = Relu(p) {body}"
    return parse(text, {**square(8, "w0", "w1", "w2"), **(constants or {})}, **{"outputs": "", **interface})


def checked(proto: onnx.ModelProto, scales: Scales, folder: Path, rows: Arrays | None = None) -> Placed:
    placed = place(proto, scales, folder)
    assert_bit_equal(placed, rows or {"x": random_rows(6, 8)})
    return placed


ASKED = (
    "[flat] z = Flatten<axis=1>(h) d = {}(z) e = Cast<to=1>(d) r = ReduceMax<keepdims=0>(e) "
    "[fc1] k = MatMul(z, w1) y = Add(k, r)"
)


def ints(*values: int) -> np.ndarray[Any, Any]:
    return np.array(values, np.int64)


MOVED: dict[str, tuple[str, dict[str, Any]]] = {
    "reshape": ("[m] m = Reshape(h, s)", {"s": ints(-1, 2, 4), "w1": weight(4, 4)}),
    "flatten": ("[m] m = Flatten<axis=1>(h)", {}),
    "identity": ("[m] m = Identity(h)", {}),
    "unsqueeze": ("[m] m = Unsqueeze(h, s)", {"s": ints(1)}),
    "transpose": ("[m] m = Transpose<perm=[1,0]>(h)", {"w1": weight(6, 8)}),
    "slice": ("[m] m = Slice(h, a, b, c)", {"a": ints(2), "b": ints(6), "c": ints(1), "w1": weight(4, 8)}),
    "gather": ("[m] m = Gather<axis=1>(h, s)", {"s": ints(7, 0, 3, 3), "w1": weight(4, 8)}),
    "expand": ("u = Unsqueeze(h, one) [m] m = Expand(u, s)", {"one": ints(1), "s": ints(1, 3, 1)}),
    "tile": ("[m] m = Tile(h, s)", {"s": ints(1, 2), "w1": weight(16, 8)}),
}


@pytest.mark.parametrize("case", MOVED)
def test_a_pair_goes_in_front_of_what_moves_its_values(case, tmp_path):
    body, constants = MOVED[case]
    inputs = "float[6,8] x" if case == "transpose" else "float[batch,8] x"
    proto = model(f"{body} [fc1] y = MatMul(m, w1)", constants, inputs=inputs)
    placed = checked(proto, {"fc1": S}, tmp_path)
    assert sources(placed.before) == {"fc1/in0/q": "m"}
    assert sources(placed.after) == {"fc1/in0/q": "h"}
    assert placed.declined == []
    moves = [n for n in placed.after.graph.node if n.op_type not in {"QuantizeLinear", "DequantizeLinear"}]
    assert [n.op_type for n in moves] == [n.op_type for n in proto.graph.node]
    ((at, what),) = placed.applied
    assert at == "fc1/in0"
    assert what.startswith("hoisted in front of ")
    assert what.endswith("'m', to 'h'")


@dataclass(frozen=True)
class Placing:
    """What follows ``h``, and what becomes of its pairs: by Q, the tensor that it reads then.

    `applied` and `declined` are what is said of pairs, by name; None where nothing is asked.
    """

    body: str
    sources: dict[str, str]
    applied: dict[str, str] | None = None
    declined: dict[str, str] | None = None
    constants: dict[str, Any] = field(default_factory=dict)
    scales: dict[str, Any] = field(default_factory=lambda: {"fc1": S})
    inputs: str = "float[batch,8] x"
    outputs: str = ""
    exact: tuple[tuple[str, str], ...] = ()
    """Nodes, and tensors that they go on reading as they are."""


BOTH = {"fc1": S, "fc2": S}
IDS = "ids = Cast<to=7>(x)"
PLACED = {
    "a_chain_of_movements_is_passed_at_once": Placing(
        "r = Reshape(h, s) [turn] t = Transpose<perm=[0,2,1]>(r) [fc1] y = MatMul(t, w1)", {"fc1/in0/q": "h"},
        {"fc1/in0": "hoisted in front of Reshape 'block/r', Transpose 'turn', to 'h'"},
        constants={"s": ints(-1, 2, 4), "w1": weight(2, 4)}),
    "both_parts_of_a_split_share_one_pair": Placing(
        "a, b = Split<axis=1>(h, s) [fc1] k = MatMul(a, u) [fc2] l = MatMul(b, v) y = Concat<axis=1>(k, l)",
        {"fc1/in0/q": "h"}, {"fc1/in0": "hoisted in front of Split 'block/a', to 'h'; 2 pairs made 1"},
        constants={"s": ints(4, 4), "u": weight(4, 4), "v": weight(4, 4, seed=9)}, scales=BOTH),
    "the_two_operands_of_an_interaction_share_one_pair": Placing(
        "r = Reshape(h, s) t = Transpose<perm=[0,2,1]>(r) [dot] y = MatMul(r, t)", {"dot/in0/q": "h"},
        constants={"s": ints(-1, 2, 4)}, scales={"dot": (S, S)}),
    "pairs_behind_two_views_become_one": Placing(
        "r = Reshape(h, s) t = Unsqueeze(h, one) [fc1] k = MatMul(r, w1) [fc2] l = MatMul(t, w2) "
        "f = Flatten<axis=1>(l) y = Add(k, f)", {"fc1/in0/q": "h"},
        constants={"s": ints(-1, 8), "one": ints(1)}, scales=BOTH),
    "a_view_that_is_read_exactly_too_is_copied_for_a_shared_pair": Placing(
        "[view] r = Unsqueeze(h, one) [fc1] k = MatMul(h, w1) [fc2] l = MatMul(r, w2) m = Add(l, r) "
        "f = Flatten<axis=1>(m) y = Add(k, f)",
        {"fc1/in0/q": "h"},
        {"fc2/in0": "shares the Q/DQ 'fc1/in0' through a copy of Unsqueeze 'view'"},
        constants={"one": ints(1)},
        scales=BOTH,
        # The residual sum still reads the exact view.
        exact=(("block/m", "r"),),
    ),
    "a_tensor_that_something_else_reads_keeps_its_exact_value": Placing(
        "[turn] t = Transpose<perm=[1,0]>(h) [fc1] k = MatMul(t, w1) "
        "[norm] n = LayerNormalization(t, gain) y = Add(k, n)", {"fc1/in0/q": "t"}, {},
        {"fc1/in0": "stays behind Transpose 'turn': LayerNormalization 'norm' reads 't' as it is"},
        constants={"gain": np.ones(8), "w1": weight(8, 8)}, inputs="float[8,8] x", exact=(("norm", "t"),)),
    # The second pair goes in front of the Unsqueeze, beside the norm: the norm reads the sum itself.
    "no_pair_comes_between_a_residual_sum_and_its_norm": Placing(
        "[residual] s = Add(h, x) [norm] n = LayerNormalization(s, gain) [fc1] k = MatMul(n, w1) "
        "u = Unsqueeze(s, one) [fc2] l = MatMul(u, w2) f = Flatten<axis=1>(l) y = Add(k, f)",
        {"fc1/in0/q": "n", "fc2/in0/q": "s"}, constants={"gain": np.ones(8), "one": ints(1)}, scales=BOTH,
        exact=(("norm", "s"),)),
    "an_output_is_not_rounded": Placing("[flat] z = Flatten<axis=1>(h) [fc1] y = MatMul(z, w1)",
        {"fc1/in0/q": "z"}, declined={"fc1/in0": "stays behind Flatten 'flat': it leaves the graph"},
        outputs="y, z"),
    "parts_under_other_scales_stay_apart": Placing(
        "[cut] a, b = Split<axis=1>(h, s) u = Unsqueeze(a, one) [fc1] k = MatMul(u, w1) "
        "[fc2] l = MatMul(b, w2) f = Flatten<axis=1>(k) y = Concat<axis=1>(f, l)",
        {"fc1/in0/q": "a", "fc2/in0/q": "b"}, declined=dict.fromkeys(("fc1/in0", "fc2/in0"),
        "stays behind Split 'cut': it is rounded to scale 0.0078125, float8_e4m3fn and to scale "
        "0.015625, float8_e4m3fn"),
        constants={"s": ints(4, 4), "one": ints(1), "w1": weight(4, 4), "w2": weight(4, 4, seed=9)},
        scales={"fc1": S, "fc2": 2 * S}),
    "one_tensor_under_two_scales_has_two_pairs": Placing(
        "[fc1] k = MatMul(h, w1) r = Identity(h) [fc2] l = MatMul(r, w2) y = Add(k, l)",
        {"fc1/in0/q": "h", "fc2/in0/q": "h"}, declined={
        "fc1/in0": "'h' is rounded under several scales, which stay apart: 'fc1/in0' scale 0.0078125, "
        "float8_e4m3fn; 'fc2/in0' scale 0.015625, float8_e4m3fn"}, scales={"fc1": S, "fc2": 2 * S}),
    "a_choice_out_of_an_exact_tensor_is_quantized_after_it_is_taken": Placing(
        "[some] g = Gather<axis=1>(h, s) [fc1] k = MatMul(g, w1) y = Add(k, h)", {"fc1/in0/q": "g"},
        declined={"fc1/in0": "stays behind Gather 'some': more than these values of 'h' would be quantized"},
        constants={"s": ints(0, 5), "w1": weight(2, 8)}),
    "two_choices_that_are_all_that_is_read_are_taken_from_fp8": Placing(
        "g = Gather<axis=1>(h, s) [fc1] k = MatMul(g, w1) t = Gather<axis=1>(h, s) "
        "[fc2] l = MatMul(t, w2) y = Add(k, l)", {"fc1/in0/q": "h"},
        constants={"s": ints(0, 5), "w1": weight(2, 8), "w2": weight(2, 8, seed=9)}, scales=BOTH),
    "rows_of_a_table_are_joined_first": Placing(
        f"{IDS} [one] i = Gather<axis=1>(ids, zero) [two] j = Gather<axis=1>(ids, three) "
        "r = Gather<axis=0>(table, i) q = Gather<axis=0>(table, j) [cat] c = Concat<axis=1>(r, q) "
        "[flat] f = Flatten<axis=1>(c) [fc1] y = MatMul(f, w1)", {"fc1/in0/q": "c"}, declined={
        "fc1/in0": "stays behind Concat 'cat': it joins rows of a table, which engines store in FP8 for "
        "one Q behind it"}, constants={"zero": 0, "three": 3, "table": weight(5, 4), "w1": weight(8, 8)}),
    # A Q of an initializer would be that of a weight, which no second look would take for a pair.
    "a_constant_part_of_a_concat_is_no_activation": Placing(
        "[cat] c = Concat<axis=1>(h, e) [flat] f = Flatten<axis=1>(c) [fc1] y = MatMul(f, w1)",
        {"fc1/in0/q": "c"}, declined={
        "fc1/in0": "stays behind Concat 'cat': it joins a constant, which is not to be quantized like an "
        "activation"}, constants={"e": weight(6, 4), "w1": weight(12, 8)}, inputs="float[6,8] x"),
    "a_lookup_is_no_choice_of_an_activation": Placing(
        f"{IDS} r = Gather<axis=0>(table, ids) [flat] f = Flatten(r) [fc1] y = MatMul(f, w1)",
        {"fc1/in0/q": "r"}, constants={"table": weight(5, 4), "w1": weight(32, 8)}),
    "who_asks_for_a_shape_does_not_need_values": Placing(ASKED.format("Shape"), {"fc1/in0/q": "h"}),
    "who_asks_for_a_size_does_not_need_values": Placing(ASKED.format("Size"), {"fc1/in0/q": "h"}),
}  # fmt: skip


@pytest.mark.parametrize("name", PLACED)
def test_pairs_are_placed(name, tmp_path):
    case = PLACED[name]
    is_lookup = IDS in case.body
    proto = (parse if is_lookup else model)(
        case.body, case.constants, inputs=case.inputs, outputs=case.outputs
    )
    ids = np.random.default_rng(0).integers(0, 5, (6, 8)).astype(np.float32)
    rows = random_rows(8 if case.inputs == "float[8,8] x" else 6, 8)
    placed = checked(proto, case.scales, tmp_path, {"x": ids if is_lookup else rows})
    assert sources(placed.after) == case.sources
    assert case.applied is None or dict(placed.applied) == case.applied
    assert case.declined is None or dict(placed.declined) == case.declined
    assert all(tensor in named(placed.after, node).input for node, tensor in case.exact)


def test_each_part_of_a_concat_is_quantized_under_the_scale_of_all(tmp_path):
    body = "[fc2] r = MatMul(h, w2) g = Tanh(r) [cat] c = Concat<axis=1>(h, g, x) [fc1] y = MatMul(c, v)"
    placed = checked(model(body, {"v": weight(24, 8)}), {"fc1": S}, tmp_path)
    assert sorted(sources(placed.after).values()) == ["g", "h", "x"]
    names = sources(placed.after)
    scales = {named(placed.after, name).input[1] for name in names}
    assert {float(numpy_helper.to_array(initializer(placed.after, name))) for name in scales} == {S}
    # 'h' is read by the second site as well, which is not planned and reads it exactly.
    assert named(placed.after, "fc2").input[0] == "h"
    assert placed.applied[0][1] == "hoisted in front of Concat 'cat', to 'h', 'g', 'x'"


def test_a_backend_that_is_not_known_to_move_fp8_keeps_the_pairs(tmp_path):
    proto = model("[flat] z = Flatten<axis=1>(h) [fc1] y = MatMul(z, w1)")
    placed = place(proto, {"fc1": S}, tmp_path, Fusions())
    assert placed.after == placed.before
    assert placed.applied == []
    assert placed.declined == [
        ("fc1/in0", "stays behind Flatten 'flat': the backend is not known to move FP8 values through it")
    ]
    # Rounding shows, else bit-equality would hold for pairs that round nothing.
    proto = model("[flat] z = Flatten<axis=1>(h) [fc1] y = MatMul(z, w1)")
    placed = place(proto, {"fc1": S}, tmp_path)
    rows = {"x": random_rows(6, 8)}
    exact, rounded = run_basic(proto, rows)["y"], run_basic(placed.after, rows)["y"]
    assert np.abs(exact - rounded).max() > 1e-3


def quantized(q_scale: Any, zero: Any, *, saturate: int = 1, extra: bool = False) -> GraphModel:
    """x → Transpose → Q → DQ → y, from the hand."""
    nodes = [
        helper.make_node("Transpose", ["x"], ["t"], name="turn", perm=[1, 0]),
        helper.make_node("QuantizeLinear", ["t", "s", "z"], ["n"], name="q", saturate=saturate, axis=0),
        helper.make_node("DequantizeLinear", ["n", "s", "z"], ["d"], name="dq", axis=0),
        helper.make_node("Relu", ["d"], ["y"], name="relu"),
    ]
    outputs = [helper.make_tensor_value_info("y", TensorProto.FLOAT, [4, 4])]
    if extra:
        nodes.append(helper.make_node("Cast", ["n"], ["e"], name="cast", to=TensorProto.FLOAT))
        outputs.append(helper.make_tensor_value_info("e", TensorProto.FLOAT, [4, 4]))
    values = np.asarray(zero, np.uint8)
    kind = TensorProto.FLOAT8E4M3FN
    constants = [
        numpy_helper.from_array(np.asarray(q_scale, np.float32), "s"),
        helper.make_tensor("z", kind, values.shape, values.tobytes(), raw=True),
    ]
    inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, [4, 4])]
    graph = helper.make_graph(nodes, "g", inputs, outputs, constants)
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    onnx.checker.check_model(proto, full_check=True)
    return GraphModel.from_proto(proto, Path())


OTHER_FORMS: dict[str, tuple[dict[str, Any], str]] = {
    "one_scale": ({}, ""),
    "per_channel": ({"q_scale": [S] * 4, "zero": [0] * 4}, OTHER_SCALE),
    "wrapping": ({"saturate": 0}, OTHER_SCALE),
    "read_as_fp8": ({"extra": True}, "something besides a DQ of its scale reads its quantized values"),
}


@pytest.mark.parametrize("form", OTHER_FORMS)
def test_other_forms_stay_where_they_are(form):
    changes, reason = OTHER_FORMS[form]
    graph = quantized(**{"q_scale": S, "zero": 0, **changes})
    record = place_qdq(graph, (), RTX)
    assert len(record.applied) == (not reason)
    assert [(d.at, d.reason) for d in record.declined] == ([("q", reason)] if reason else [])
    assert graph.node("q").inputs[0].name == ("t" if reason else "x")


def test_chains_are_told_and_end_at_a_tensor_that_is_read_elsewhere(tmp_path):
    body = (
        "k = Add(p, b) g = Relu(k) r = Unsqueeze(g, one) [fc1] q = MatMul(r, w1) t = Sigmoid(q) "
        "m = Mul(q, t) [fc2] l = MatMul(m, w2) y = ReduceMax<keepdims=0>(l, one)"
    )
    proto = parse(
        f"[fc0] p = MatMul(x, w0) {body}", {**square(8, "w0", "w1", "w2"), "b": np.ones(8), "one": ints(1)}
    )
    placed = checked(proto, {"fc0": S, "fc1": S, "fc2": S}, tmp_path)
    assert sources(placed.after) == {"fc0/in0/q": "x", "fc1/in0/q": "g", "fc2/in0/q": "m"}
    assert placed.chains == [
        ("fc1/in0", "chain: 'fc0' feeds 'fc1' in FP8 through Add, Relu"),
        ("fc2/in0", "chain: 'fc1' feeds 'fc2' in FP8 through Sigmoid, Mul"),
    ]
    # The sum in front of the norm is the residual stream: it is in memory, whatever the norm writes.
    body = "[sum] s = Add(h, x) [norm] n = LayerNormalization(s, gain) [fc1] k = MatMul(n, w1) y = Add(k, s)"
    placed = checked(model(body, {"gain": np.ones(8)}), {"fc0": S, "fc1": S}, tmp_path)
    assert placed.chains == []
    body = body.replace("y = Add(k, s)", "y = Relu(k)")
    placed = checked(model(body, {"gain": np.ones(8)}), {"fc0": S, "fc1": S}, tmp_path / "alone")
    assert placed.chains == [
        ("fc1/in0", "chain: 'fc0' feeds 'fc1' in FP8 through Relu, Add, LayerNormalization")
    ]


@pytest.mark.parametrize(("body", "declined"), [
    ("e = Cumulate(p)", "no kernel is known that computes CumSum 'block/e' and quantizes it"),
    ("k = Relu(p) e = Add(k, p)", ""),
], ids=["operator", "inside_the_kernel"])  # fmt: skip
def test_a_chain_ends_at_an_operator_that_does_not_quantize(body, declined, tmp_path):
    text = f"[fc0] p = MatMul(x, w0) {body.replace('Cumulate(p)', 'CumSum(p, axis)')} [fc1] y = MatMul(e, w1)"
    proto = parse(text, {**square(8, "w0", "w1"), "axis": np.array(1)})
    placed = checked(proto, {"fc0": S, "fc1": S}, tmp_path)
    assert [at for at, _ in placed.chains] == ([] if declined else ["fc1/in0"])
    assert placed.declined == ([("fc1/in0", declined)] if declined else [])


def test_weights_zero_points_and_scales_keep_their_form_and_a_placed_graph_is_cast_to_bf16(tmp_path):
    body = "[cat] c = Concat<axis=1>(h, x) [fc1] y = MatMul(c, v)"
    placed = checked(model(body, {"v": weight(16, 8)}), {"fc0": S, "fc1": 2 * S}, tmp_path)
    for name in ("fc0/weight/dq", "fc1/weight/dq"):
        before, after = named(placed.before, name), named(placed.after, name)
        assert before == after
        assert all(initializer(placed.before, t) == initializer(placed.after, t) for t in before.input)
    for name in sources(placed.after):
        scale, zero = (initializer(placed.after, t) for t in named(placed.after, name).input[1:])
        assert (list(scale.dims), list(zero.dims)) == ([], [])
        assert zero.data_type == TensorProto.FLOAT8E4M3FN
    # 'x' is rounded under the scale of each site that reads it.
    assert sorted(sources(placed.after).values()) == ["h", "x", "x"]
    proto = model("[cat] c = Concat<axis=1>(h, x) [fc1] y = MatMul(c, v)", {"v": weight(16, 8)})
    source = artifact(proto, tmp_path / "source.onnx")
    plan = plan_of(source, {"fc0": S, "fc1": S})
    plan = type(plan)(**{**vars(plan), "decisions": tuple(plan.decisions), "base": Precision.BF16})
    planned = apply_plan(source, plan, PlanForm(Precision.BF16, RTX), tmp_path / "bf16.onnx")
    found = onnx.load(planned.path)
    onnx.checker.check_model(found, full_check=True)
    inferred = onnx.shape_inference.infer_shapes(found).graph.value_info
    types = {info.name: info.type.tensor_type.elem_type for info in inferred}
    assert types[named(found, "cat").output[0]] == TensorProto.BFLOAT16
    assert len(sources(found)) == 2
    assert [record.transform for record in planned.log.records][:2] == ["insert-qdq", "place-qdq"]
