"""Linears of one input channel become elementwise, with the same values."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rewrite_models import op_types
from shape_models import Case, match, rewrite

from loka_onnx.sessions.onnx_session import OnnxSession
from loka_onnx.transforms.linears.outer_to_mul import OuterToMul

NUMBER = "float[batch,1] x"
FORMS = {
    "matmul": ("y = MatMul(x, w)", (1, 16), ["Mul"]),
    "gemm": ("y = Gemm(x, w)", (1, 16), ["Mul"]),
    "stored as a column": ("y = Gemm<transB=1>(x, w, b)", (16, 1), ["Mul", "Add"]),
    "bias": ("y = Gemm(x, w, b)", (1, 16), ["Mul", "Add"]),
    "bias behind": ("p = MatMul(x, w) y = Add(p, b)", (1, 16), ["Mul", "Add"]),
}


@pytest.mark.parametrize(
    ("form", "axes"), [*((form, "") for form in FORMS), ("matmul", ",5"), ("bias behind", ",5")]
)
def test_every_form_is_elementwise(form: str, axes: str, tmp_path: Path) -> None:
    body, weight, operators = FORMS[form]
    constants = {"w": weight} | ({"b": (16,)} if "b)" in body else {})
    case = Case(body, constants, inputs=f"float[batch{axes},1] x", outputs=f"float[batch{axes},16] y")
    done = rewrite(case.model(), OuterToMul(), tmp_path)
    assert op_types(done.after) == operators
    assert done.artifact.sites == ()
    assert done.record.max_abs < 1e-6


@pytest.mark.parametrize("body", ["y = Gemm(x, w, b)", "p = MatMul(x, w) y = Add(p, b)"])
def test_a_bias_of_zeros_goes(body: str, tmp_path: Path) -> None:
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


@pytest.mark.parametrize(
    ("body", "inputs", "weight"),
    [
        ("y = MatMul(x, w)", "float[batch,2] x", (2, 16)),
        ("y = MatMul(x, w)", "float[batch,16] x", (16, 1)),
        ("y = MatMul(w, x)", "float[1,batch] x", (16, 1)),
        ("y = Gemm<transA=1>(x, w)", "float[1,batch] x", (1, 16)),
        ("y = Gemm<alpha=0.5>(x, w)", NUMBER, (1, 16)),
        ("s = Relu(v) y = MatMul(x, s)", f"{NUMBER}, float[1,16] v", (1, 16)),
    ],
)
def test_others_are_left_alone(body: str, inputs: str, weight: tuple[int, int], tmp_path: Path) -> None:
    model = Case(body, {"w": weight}, inputs=inputs, outputs="float[p,q] y").model()
    assert match(model, OuterToMul(), tmp_path).matches == ()
