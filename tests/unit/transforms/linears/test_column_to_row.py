"""Columns become rows, gated sums of linears one linear, and linears of one input channel elementwise."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rewrite_models import op_types
from shape_models import Case, match, rewrite

from loka_onnx.core.site import SiteKind
from loka_onnx.sessions.onnx_session import OnnxSession
from loka_onnx.transforms.linears.column_to_row import ColumnToRow
from loka_onnx.transforms.linears.outer_to_mul import OuterToMul
from loka_onnx.transforms.linears.sum_experts import SumExperts

COLUMNS = "float[batch,16,1] x"
FORMS = {
    "alone": ("y = MatMul(w, x)", {"w": (24, 16)}, 1),
    "bias": ("p = MatMul(w, x) y = Add(p, b)", {"w": (24, 16), "b": (24, 1)}, 1),
    "bias_first": ("p = MatMul(w, x) y = Sub(b, p)", {"w": (24, 16), "b": (1, 24, 1)}, 1),
    "activation": ("p = MatMul(w, x) q = Add(p, b) y = Tanh(q)", {"w": (24, 16), "b": (24, 1)}, 1),
    "two": ("p = MatMul(w, x) q = Tanh(p) r = MatMul(v, q) s = Add(r, b) y = Mul(s, x)",
        {"w": (8, 16), "v": (16, 8), "b": (16, 1)}, 2),
    "two_readers": ("p = MatMul(w, x) q = Tanh(p) y = Add(p, q)", {"w": (24, 16)}, 1),
    "row_of_a_matrix": ("p = MatMul(w, x) y = Add(p, b)", {"w": (24, 16), "b": (1,)}, 1),
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_every_form_becomes_a_linear_layer(form, tmp_path):
    body, weights, products = FORMS[form]
    channels = 16 if form == "two" else 24
    case = Case(body, weights, inputs=COLUMNS, outputs=f"float[batch,{channels},1] y")
    done = rewrite(case.model(), ColumnToRow(), tmp_path)
    sites = done.artifact.sites
    assert [site.kind for site in sites] == [SiteKind.LINEAR] * products
    assert all(site.weight is not None and site.weight.index == 1 for site in sites)
    assert done.record.max_abs < 1e-5


def test_bias_and_activation_follow_the_product_as_rows(tmp_path):
    body, weights, _ = FORMS["activation"]
    case = Case(body, weights, inputs=COLUMNS, outputs="float[batch,24,1] y")
    after = rewrite(case.model(), ColumnToRow(), tmp_path).after
    assert op_types(after) == ["Squeeze", "MatMul", "Add", "Tanh", "Unsqueeze"]


@pytest.mark.parametrize(("body", "inputs", "outputs"), [
    ("y = MatMul(w, x)", "float[batch,16,3] x", "float[batch,24,3] y"),
    ("y = MatMul(w, x)", "float[16,1] x", "float[24,1] y"),
    ("s = Relu(v) y = MatMul(s, x)", "float[batch,16,1] x, float[24,16] v", "float[batch,24,1] y"),
    ("y = MatMul(x, v)", "float[batch,5,16] x, float[16,1] v", "float[batch,5,1] y"),
])  # fmt: skip
def test_others_are_left_alone(body, inputs, outputs, tmp_path):
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
    "no factor": BODY.replace("m1 = Mul(x, c1)",
        "") .replace("m2 = Mul(c2, x)", "") .replace("m1, m2", "c1, c2"),
    "no bias": BODY.replace("a = Add(p, b)", "") .replace("d = Add(q, b2)", "") .replace("Unsqueeze(a",
        "Unsqueeze(p") .replace("Unsqueeze(d", "Unsqueeze(q"),
}  # fmt: skip


@pytest.mark.parametrize("form", SUMS)
def test_a_gated_sum_is_one_linear(form, tmp_path):
    done = rewrite(case(SUMS[form]).model(), SumExperts(), tmp_path)
    (site,) = done.artifact.sites
    assert (site.k, site.n) == (16, 24)
    assert len(site.merged_from) == 3
    assert op_types(done.after).count("MatMul") == 1
    assert done.record.max_abs < 1e-5


LEFT_ALONE = {
    "different biases": (BODY, {"b2": np.ones(24, np.float32)}, 1),
    "a column that is read elsewhere": (
        BODY.replace("y = MatMul(s, gates)", "t = MatMul(s, gates) y = Add(t, m1)"), {}, 1),
    "an activation behind the linear": (BODY.replace("d = Add(q, b2)", "r = Add(q, b2) d = Relu(r)"), {}, 1),
    "factors that differ": (BODY.replace("Mul(c2, x)", "Mul(c2, z)").replace("p = ", "z = Relu(x) p = ", 1),
        {}, 0),
}  # fmt: skip


@pytest.mark.parametrize("form", LEFT_ALONE)
def test_other_sums_are_left_alone(form, tmp_path):
    body, constants, declined = LEFT_ALONE[form]
    found = match(case(body, **constants).model(), SumExperts(), tmp_path)
    assert found.matches == ()
    assert len(found.declined) == declined


NUMBER = "float[batch,1] x"
ELEMENTWISE = {
    "matmul": ("y = MatMul(x, w)", (1, 16), ["Mul"]),
    "gemm": ("y = Gemm(x, w)", (1, 16), ["Mul"]),
    "stored as a column": ("y = Gemm<transB=1>(x, w, b)", (16, 1), ["Mul", "Add"]),
    "bias": ("y = Gemm(x, w, b)", (1, 16), ["Mul", "Add"]),
    "bias behind": ("p = MatMul(x, w) y = Add(p, b)", (1, 16), ["Mul", "Add"]),
}


@pytest.mark.parametrize(
    ("form", "axes"), [*((form, "") for form in ELEMENTWISE), ("matmul", ",5"), ("bias behind", ",5")]
)
def test_every_form_is_elementwise(form, axes, tmp_path):
    body, weight, operators = ELEMENTWISE[form]
    constants = {"w": weight} | ({"b": (16,)} if "b)" in body else {})
    case = Case(body, constants, inputs=f"float[batch{axes},1] x", outputs=f"float[batch{axes},16] y")
    done = rewrite(case.model(), OuterToMul(), tmp_path)
    assert op_types(done.after) == operators
    assert done.artifact.sites == ()
    assert done.record.max_abs < 1e-6


@pytest.mark.parametrize("body", ["y = Gemm(x, w, b)", "p = MatMul(x, w) y = Add(p, b)"])
def test_a_bias_of_zeros_goes(body, tmp_path):
    """Mods leave such a bias behind a product; behind a Mul it would be an operator that changes nothing."""
    constants = {"w": (1, 16), "b": np.zeros(16, np.float32)}
    case = Case(body, constants, inputs=NUMBER, outputs="float[batch,16] y")
    assert op_types(rewrite(case.model(), OuterToMul(), tmp_path).after) == ["Mul"]


@settings(max_examples=8)
@given(width=st.integers(1, 40), scale=st.sampled_from([1e-6, 1.0, 1e6]), seed=st.integers(0, 2**31))
def test_each_product_is_rounded_once(width, scale, seed, tmp_path_factory):
    random = np.random.default_rng(seed)
    weight = (scale * random.standard_normal((1, width))).astype(np.float32)
    case = Case("y = MatMul(x, w)", {"w": weight}, inputs=NUMBER, outputs=f"float[batch,{width}] y")
    done = rewrite(case.model(), OuterToMul(), tmp_path_factory.mktemp("outer"))
    x = random.standard_normal((7, 1)).astype(np.float32)
    (found,) = OnnxSession(done.artifact.path).run({"x": x}).values()
    np.testing.assert_array_equal(found, x * weight)


@pytest.mark.parametrize(("body", "inputs", "weight"), [
    ("y = MatMul(x, w)", "float[batch,2] x", (2, 16)),
    ("y = MatMul(x, w)", "float[batch,16] x", (16, 1)),
    ("y = MatMul(w, x)", "float[1,batch] x", (16, 1)),
    ("y = Gemm<transA=1>(x, w)", "float[1,batch] x", (1, 16)),
    ("y = Gemm<alpha=0.5>(x, w)", NUMBER, (1, 16)),
    ("s = Relu(v) y = MatMul(x, s)", f"{NUMBER}, float[1,16] v", (1, 16)),
])  # fmt: skip
def test_products_of_more_channels_stay(body, inputs, weight, tmp_path):
    model = Case(body, {"w": weight}, inputs=inputs, outputs="float[p,q] y").model()
    assert match(model, OuterToMul(), tmp_path).matches == ()
