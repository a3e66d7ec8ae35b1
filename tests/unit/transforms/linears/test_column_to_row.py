"""A weight on the left of column vectors becomes a linear layer; matrices and computed weights stay."""

from __future__ import annotations

from pathlib import Path

import pytest
from rewrite_models import op_types
from shape_models import Case, match, rewrite

from loka_onnx.core.site import SiteKind
from loka_onnx.transforms.linears.column_to_row import ColumnToRow

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
