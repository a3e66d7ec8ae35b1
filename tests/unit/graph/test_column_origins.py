"""Columns of inputs, followed through what keeps them apart and lost through what mixes them."""

from __future__ import annotations

import numpy as np
import pytest

from loka_onnx.graph.model import GraphModel
from loka_onnx.graph.moves import Origin, column_origins

X = tuple(Origin("x", column) for column in range(3))
AGE = (Origin("age", 0),)
FORMS = {
    "the input itself": ("y = Identity(x)", X),
    "functions of each element": ("a = Abs(x)  b = Log(a)  c = Clip(b, low)  y = Tanh(c)", X),
    "arithmetic with constants": ("a = Sub(x, mean)  b = Div(a, mean)  y = Mul(half, b)", X),
    "joined with others": (
        "l = Gather(table, ids)  a = Relu(x)  y = Concat<axis=-1>(l, a)",
        (None, None, *X),
    ),
    "a vector made a column": ("a = Unsqueeze(age, axis1)  y = Concat<axis=1>(a, x, a)", (*AGE, *X, *AGE)),
    "a product mixes": ("y = MatMul(x, square)", (None,) * 3),
    "two activations mix": ("y = Mul(x, x)", (None,) * 3),
    "joined along the batch": ("y = Concat<axis=0>(x, x)", (None,) * 3),
    "a broadcast column": ("a = Unsqueeze(age, axis1)  y = Add(a, mean)", (None,) * 3),
}


HEADER = "g (float[b,3] x, float[b] age, int64[b] ids) => (float[b,n] y)"
WEIGHTS = {
    "low": np.float32(-1),
    "half": np.float32(0.5),
    "mean": (3,),
    "square": (3, 3),
    "table": (5, 2),
    "axis1": np.array([1]),
}


@pytest.mark.parametrize("form", FORMS)
def test_columns_are_followed(form, write_model):
    body, wanted = FORMS[form]
    # The width of an output is the one that is declared: one more step, and the tensor has its own.
    path = write_model(f"{HEADER} {{ {body.replace('y =', 'z =')}  y = Relu(z) }}", WEIGHTS)
    assert column_origins(GraphModel.load(path).tensors()["z"]) == wanted


def test_inputs_have_their_own_columns_and_constants_and_vectors_none(write_model):
    tensors = GraphModel.load(write_model(f"{HEADER} {{ y = MatMul(x, square) }}", WEIGHTS)).tensors()
    assert column_origins(tensors["x"]) == X
    assert column_origins(tensors["age"]) == ()
    assert column_origins(tensors["square"]) == ()
