"""Weights on the left of column vectors, and gated sums of parallel linears, become one linear layer each."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from rewrite_models import op_types
from shape_models import Case, match, rewrite

from loka_onnx.core.site import SiteKind
from loka_onnx.transforms.linears.column_to_row import ColumnToRow
from loka_onnx.transforms.linears.sum_experts import SumExperts

COLUMNS = "float[batch,16,1] x"
FORMS = {
    "alone": ("y = MatMul(w, x)", {"w": (24, 16)}, 1),
    "bias": ("p = MatMul(w, x) y = Add(p, b)", {"w": (24, 16), "b": (24, 1)}, 1),
    "bias_first": ("p = MatMul(w, x) y = Sub(b, p)", {"w": (24, 16), "b": (1, 24, 1)}, 1),
    "activation": ("p = MatMul(w, x) q = Add(p, b) y = Tanh(q)", {"w": (24, 16), "b": (24, 1)}, 1),
    "two": (
        "p = MatMul(w, x) q = Tanh(p) r = MatMul(v, q) s = Add(r, b) y = Mul(s, x)",
        {"w": (8, 16), "v": (16, 8), "b": (16, 1)},
        2,
    ),
    "two_readers": ("p = MatMul(w, x) q = Tanh(p) y = Add(p, q)", {"w": (24, 16)}, 1),
    "row_of_a_matrix": ("p = MatMul(w, x) y = Add(p, b)", {"w": (24, 16), "b": (1,)}, 1),
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_becomes_a_linear_layer(form: str, tmp_path: Path) -> None:
    body, weights, products = FORMS[form]
    channels = 16 if form == "two" else 24
    case = Case(body, weights, inputs=COLUMNS, outputs=f"float[batch,{channels},1] y")
    done = rewrite(case.model(), ColumnToRow(), tmp_path)
    sites = done.artifact.sites
    assert [site.kind for site in sites] == [SiteKind.LINEAR] * products
    assert all(site.weight is not None and site.weight.index == 1 for site in sites)
    assert done.record.max_abs < 1e-5


def test_bias_and_activation_follow_the_product_as_rows(tmp_path: Path) -> None:
    body, weights, _ = FORMS["activation"]
    case = Case(body, weights, inputs=COLUMNS, outputs="float[batch,24,1] y")
    assert op_types(rewrite(case.model(), ColumnToRow(), tmp_path).after) == [
        "Squeeze",
        "MatMul",
        "Add",
        "Tanh",
        "Unsqueeze",
    ]


@pytest.mark.parametrize(
    ("body", "inputs", "outputs"),
    [
        ("y = MatMul(w, x)", "float[batch,16,3] x", "float[batch,24,3] y"),
        ("y = MatMul(w, x)", "float[16,1] x", "float[24,1] y"),
        ("s = Relu(v) y = MatMul(s, x)", "float[batch,16,1] x, float[24,16] v", "float[batch,24,1] y"),
        ("y = MatMul(x, v)", "float[batch,5,16] x, float[16,1] v", "float[batch,5,1] y"),
    ],
)
def test_others_are_left_alone(body: str, inputs: str, outputs: str, tmp_path: Path) -> None:
    model = Case(body, {"w": (24, 16)}, inputs=inputs, outputs=outputs).model()
    assert match(model, ColumnToRow(), tmp_path).matches == ()


INPUTS = "float[batch,8] u, float[batch,8] v, float[batch,24,1] x, float[batch,2,1] g"
BODY = """
    p = MatMul(u, w1) a = Add(p, b) c1 = Unsqueeze(a, last) m1 = Mul(x, c1)
    q = MatMul(v, w2) d = Add(q, b2) c2 = Unsqueeze(d, last) m2 = Mul(c2, x)
    s = Concat<axis=2>(m1, m2) gates = Softmax<axis=1>(g) y = MatMul(s, gates)
"""


def case(body: str = BODY, **more: object) -> Case:
    shared = np.linspace(-1, 1, 24, dtype=np.float32)
    constants = {"w1": (8, 24), "w2": (8, 24), "last": np.array([-1]), "b": shared, "b2": shared, **more}
    return Case(body, constants, inputs=INPUTS, outputs="float[batch,24,1] y")


SUMS = {
    "factor, bias, softmax": BODY,
    "gates that do not sum to one": BODY.replace("Softmax<axis=1>(g)", "Sigmoid(g)"),
    "no factor": BODY.replace("m1 = Mul(x, c1)", "")
    .replace("m2 = Mul(c2, x)", "")
    .replace("m1, m2", "c1, c2"),
    "no bias": BODY.replace("a = Add(p, b)", "")
    .replace("d = Add(q, b2)", "")
    .replace("Unsqueeze(a", "Unsqueeze(p")
    .replace("Unsqueeze(d", "Unsqueeze(q"),
}


@pytest.mark.parametrize("form", SUMS)
def test_a_gated_sum_is_one_linear(form: str, tmp_path: Path) -> None:
    done = rewrite(case(SUMS[form]).model(), SumExperts(), tmp_path)
    (site,) = done.artifact.sites
    assert (site.k, site.n) == (16, 24)
    assert len(site.merged_from) == 3
    assert op_types(done.after).count("MatMul") == 1
    assert done.record.max_abs < 1e-5


LEFT_ALONE = {
    "different biases": (BODY, {"b2": np.ones(24, np.float32)}, 1),
    "a column that is read elsewhere": (
        BODY.replace("y = MatMul(s, gates)", "t = MatMul(s, gates) y = Add(t, m1)"),
        {},
        1,
    ),
    "an activation behind the linear": (BODY.replace("d = Add(q, b2)", "r = Add(q, b2) d = Relu(r)"), {}, 1),
    "factors that differ": (
        BODY.replace("Mul(c2, x)", "Mul(c2, z)").replace("p = ", "z = Relu(x) p = ", 1),
        {},
        0,
    ),
}


@pytest.mark.parametrize("form", LEFT_ALONE)
def test_other_sums_are_left_alone(form: str, tmp_path: Path) -> None:
    body, constants, declined = LEFT_ALONE[form]
    found = match(case(body, **constants).model(), SumExperts(), tmp_path)
    assert found.matches == ()
    assert len(found.declined) == declined
