"""Gated sums of parallel linears become one linear; experts that differ, or are read elsewhere, stay."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from rewrite_models import op_types
from shape_models import Case, match, rewrite

from loka_onnx.transforms.linears.sum_experts import SumExperts

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


FORMS = {
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


@pytest.mark.parametrize("form", FORMS)
def test_a_gated_sum_is_one_linear(form: str, tmp_path: Path) -> None:
    done = rewrite(case(FORMS[form]).model(), SumExperts(), tmp_path)
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
def test_others_are_left_alone(form: str, tmp_path: Path) -> None:
    body, constants, declined = LEFT_ALONE[form]
    found = match(case(body, **constants).model(), SumExperts(), tmp_path)
    assert found.matches == ()
    assert len(found.declined) == declined
