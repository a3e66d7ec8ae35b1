"""Preflight: every batch size runs, every row is its own, and what breaks either is named."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx_text import parsed

from loka_onnx.export.preflight import Batches, Fault, preflight
from loka_onnx.graph.entry import canonicalize
from loka_onnx.graph.model import GraphModel

RANDOM = np.random.default_rng(0)
CONSTANTS: dict[str, np.ndarray] = {
    "w": RANDOM.standard_normal((16, 16)).astype(np.float32),
    "w1": RANDOM.standard_normal((16, 1)).astype(np.float32),
    "ones": np.ones(16, np.float32),
    "zeros": np.zeros(16, np.float32),
    "half": np.array(0.5, np.float32),
    "yes": np.array(True),
    "zero": np.array(0),
    "first": np.array([0]),
    "last": np.array([-1]),
    "two": np.array([2]),
    "flat": np.array([-1, 16]),
    "pairs": np.array([-1, 2, 16]),
    "rows": np.array([-1, 32]),
    "table": RANDOM.standard_normal((9, 16)).astype(np.float32),
}


def canonical(text: str, folder: Path) -> GraphModel:
    """A model `y` of `x` (n, 16) and `ids` (n,): a product, these nodes from h to k, and a product."""
    body = f"h = MatMul(x, w)\n{text}\n[last] y = MatMul(k, w1)"
    model = parsed(body, CONSTANTS, inputs="float[n,16] x, int64[n] ids", outputs="float[n,1] y")
    onnx.save(model, folder / "model.onnx")
    return canonicalize(folder / "model.onnx").model


def batches(smallest: int = 1, largest: int = 300) -> Batches:
    random = np.random.default_rng(1)
    dense, ids = random.standard_normal((512, 16)).astype(np.float32), random.integers(0, 9, 512)
    return Batches({"x": dense, "ids": ids}, smallest, largest, threads=1)


NAN = "NaN that stays in its row"
INDEPENDENT = {
    "a layer": "k = Relu(h)",
    "softmax over features": "k = Softmax<axis=-1>(h)",
    "dropout in inference": "k = Dropout(h)",
    "a lookup": "e = Gather(table, ids)\nk = Add(h, e)",
    "batch norm in inference": "k = BatchNormalization(h, ones, zeros, zeros, ones)",
    "rows by their number": "s = Shape(h)\nr = Reshape(h, s)\nk = Relu(r)",
    "a batch that is not first": "t = Transpose<perm=[1,0]>(h)\nr = Relu(t)\nk = Transpose<perm=[1,0]>(r)",
    "fields and rows in one axis": "r = Reshape(h, col)\nq = Sigmoid(r)\nk = Reshape(q, flat)",
    "lists as long as the longest": """
        m = ReduceMax<keepdims=1>(ids)
        l = Add(m, two)
        e = Expand(h, l3)
        k = ReduceMean<keepdims=0>(e, first)
    """,
    NAN: "q = Log(h)\nk = Add(q, q)",
}


@pytest.mark.parametrize("name", INDEPENDENT)
def test_independent_rows_pass(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CONSTANTS, "col", np.array([-1, 1]))
    monkeypatch.setitem(CONSTANTS, "l3", np.array([3, 1, 1]))
    rows = replace(batches(), are_generated=name == NAN)
    assert preflight(canonical(INDEPENDENT[name], tmp_path), rows, ["y"]) == ()


def test_nan_on_the_user_s_rows_is_found_at_its_operator(tmp_path: Path) -> None:
    (finding,) = preflight(canonical(INDEPENDENT[NAN], tmp_path), batches(), ["y"])
    assert (finding.fault, finding.operator) == (Fault.NOT_FINITE, "node '/log' (Log)")


RANDOM_MODELS = {
    "RandomNormalLike": "q = RandomNormalLike(h)\nk = Add(h, q)",
    "RandomUniformLike": "q = RandomUniformLike<seed = 3.0>(h)\nk = Add(h, q)",
    "Bernoulli": "p = Sigmoid(h)\nk = Bernoulli(p)",
    "Multinomial": "i = Multinomial<sample_size=1>(h)\nf = Cast<to=1>(i)\nk = Add(h, f)",
    "Dropout": "k = Dropout(h, half, yes)",
}


@pytest.mark.parametrize("operator", RANDOM_MODELS)
def test_random_operators_are_named(operator: str, tmp_path: Path) -> None:
    (finding,) = preflight(canonical(RANDOM_MODELS[operator], tmp_path), batches(), ["y"])
    assert finding.fault is Fault.RANDOM
    assert f"({operator})" in finding.operator
    assert finding.is_about_rows


COUPLED = {
    "Softmax": "k = Softmax<axis=0>(h)",
    "ReduceMean": "m = ReduceMean<keepdims=1>(h, first)\nk = Sub(h, m)",
    "ReduceMax": "m = ReduceMax<keepdims=1>(h, first)\nk = Div(h, m)",
    "CumSum": "k = CumSum(h, zero)",
    "CumSum, reversed": "k = CumSum<reverse=1>(h, zero)",
    "TopK": "v, i = TopK<axis=0>(h, one)\nk = Sub(h, v)",
    "Gather": "g = Gather<axis=0>(h, zero)\nk = Add(h, g)",
    "LpNormalization": "k = LpNormalization<axis=0>(h)",
    "MatMul": "t = Transpose<perm=[1,0]>(h)\ng = MatMul(h, t)\nk = MatMul(g, h)",
    "Mul": "u = Unsqueeze(h, one)\np = Mul(h, u)\nk = ReduceMax<keepdims=0>(p, one)",
    "a position": "s = Shape(h)\nn = Gather(s, zero)\nr = Range(zero, n, step)\nf = Cast<to=1>(r)\n"
    "c = Unsqueeze(f, last)\nk = Add(h, c)",
    "a size": "s = Shape(h)\nn = Gather(s, zero)\nf = Cast<to=1>(n)\nk = Div(h, f)",
}


@pytest.mark.parametrize("name", COUPLED)
def test_coupled_rows_are_refused_and_their_operator_named(name, tmp_path, monkeypatch):
    monkeypatch.setitem(CONSTANTS, "one", np.array([1]))
    monkeypatch.setitem(CONSTANTS, "step", np.array(1))
    (finding,) = preflight(canonical(COUPLED[name], tmp_path), batches(), ["y"])
    assert finding.fault is Fault.COUPLED
    operator = {"a position": "Cast", "a size": "Cast"}.get(name, name.partition(",")[0])
    assert f"({operator})" in finding.operator


def test_batch_norm_in_training_mode_is_named(tmp_path: Path) -> None:
    """ONNX Runtime 1.31 also changes its weights as it goes, so that no two runs are the same."""
    text = "k, m, v = BatchNormalization<training_mode=1>(h, ones, zeros, zeros, ones)"
    (finding,) = preflight(canonical(text, tmp_path), batches(), ["y"])
    assert finding.is_about_rows
    assert "(BatchNormalization)" in finding.operator


def test_what_is_not_judged_may_couple_rows_and_the_model_stays(tmp_path: Path) -> None:
    model = canonical("k = Relu(h)\nz = Softmax<axis=0>(h)", tmp_path)
    model.graph.outputs.append(model.tensors().get("z") or model.tensors()["h"])
    assert preflight(model, batches(), ["y"]) == ()
    model = canonical(COUPLED["Softmax"], tmp_path)
    before = model.to_proto().SerializeToString(deterministic=True)
    preflight(model, batches(), ["y"])
    assert model.to_proto().SerializeToString(deterministic=True) == before


@pytest.mark.parametrize(("smallest", "largest", "fails"), [(1, 300, 1), (2, 289, 289), (3, 48, 3)])
def test_a_size_that_fails_is_told_with_its_operator(smallest, largest, fails, tmp_path):
    """Two rows make one: odd batches fail. The geometric middle of 2 and 289 is 24."""
    model = canonical("[pair] r = Reshape(h, rows)\nk = Reshape(r, flat)", tmp_path)
    (finding,) = preflight(model, batches(smallest, largest), ["y"])
    assert finding.fault is Fault.FAILS
    assert finding.operator == "node 'pair/reshape' (Reshape)"
    assert f"batch of {fails} rows" in finding.evidence
    assert not finding.is_about_rows


def test_a_failure_within_a_branch_names_both_nodes(tmp_path: Path) -> None:
    text = """
        m = ReduceMax<keepdims=0>(h)
        c = Greater(m, half)
        k = If(c) <
            then_branch = yes () => (float[n,16] a) { r = Reshape(h, rows) [in] a = Reshape(r, flat) },
            else_branch = no () => (float[n,16] b) { q = Reshape(h, rows) [out] b = Reshape(q, flat) }
        >
    """
    (finding,) = preflight(canonical(text, tmp_path), batches(), ["y"])
    assert finding.fault is Fault.FAILS
    assert "(Reshape)" in finding.operator
    assert "(If)" in finding.operator


def test_a_batch_axis_that_is_lost_at_one_row(tmp_path: Path) -> None:
    body = "h = MatMul(x, w1)\n[lost] s = Squeeze(h)\ny = Relu(s)"
    model = parsed(body, CONSTANTS, inputs="float[n,16] x", outputs="float[m] y")
    onnx.save(model, tmp_path / "model.onnx")
    rows = Batches({"x": RANDOM.standard_normal((64, 16)).astype(np.float32)})
    (finding,) = preflight(canonicalize(tmp_path / "model.onnx").model, rows, ["y"])
    assert finding.fault is Fault.SHAPE
    assert finding.operator == "node 'lost/squeeze' (Squeeze)"
    # Where one row is never asked for, the model is good.
    served = Batches(rows.rows, smallest=2)
    assert preflight(canonicalize(tmp_path / "model.onnx").model, served, ["y"]) == ()


@pytest.mark.parametrize(("smallest", "largest"), [(1, 1), (64, 64), (1, 2), (100, 4096), (3, 5)])
def test_only_sizes_that_are_served_are_run(smallest: int, largest: int) -> None:
    found = batches(smallest, largest)
    assert found.sizes[0] == smallest
    assert found.sizes[-1] == largest
    assert all(smallest <= size <= largest for size in (*found.sizes, found.compared))
    assert {len(found.first(size)["x"]) for size in found.sizes} == set(found.sizes)
