"""Bounds of ids, from every form in which a column reaches its table."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

from loka_onnx.graph.id_bounds import id_bounds
from loka_onnx.graph.model import GraphModel

I64 = np.int64
WEIGHTS = {
    "t10": (10, 4),
    "t20": (20, 4),
    "t7": (7, 4),
    "i0": I64(0),
    "i1": np.array([1], I64),
    "i_last": I64(-1),
    "i20": np.array([2, 0], I64),
    "flat": np.array([-1], I64),
    "axis1": np.array([1], I64),
    "start": np.array([1], I64),
    "end": np.array([np.iinfo(I64).max], I64),
    "starts": np.array([0, 1], I64),
    "ends": np.array([np.iinfo(I64).max, 3], I64),
    "axes": np.array([0, 1], I64),
    "steps": np.array([1, 1], I64),
    "sizes": np.array([1, 2], I64),
    "two": I64(2),
    "rows": np.array([2], I64),
    "zero": np.array([0], I64),
}
FORMS = {
    "straight into one table": ("y = Gather(t10, ids)", (10, 10, 10)),
    "a column with a scalar index": ("c = Gather<axis=1>(ids, i0)  y = Gather(t10, c)", (10, None, None)),
    "a negative axis and index": ("c = Gather<axis=-1>(ids, i_last)  y = Gather(t10, c)", (None, None, 10)),
    "a one-element index, then Squeeze": (
        "c = Gather<axis=1>(ids, i1)  d = Squeeze(c, axis1)  y = Gather(t10, d)",
        (None, 10, None),
    ),
    "casts and reshapes": (
        "c = Gather<axis=1>(ids, i0)  d = Cast<to=6>(c)  e = Reshape(d, flat)  f = Identity(e)"
        " g = Unsqueeze(f, axis1)  h = Flatten(g)  y = Gather(t20, h)",
        (20, None, None),
    ),
    "several columns into one table": (
        "c = Gather<axis=1>(ids, i20)  y = Gather(t10, c)",
        (10, None, 10),
    ),
    "a slice to the end": ("c = Slice(ids, start, end, axis1)  y = Gather(t10, c)", (None, 10, 10)),
    "a slice with a whole batch axis": (
        "c = Slice(ids, starts, ends, axes, steps)  d = Cast<to=6>(c)  y = Gather(t10, d)",
        (None, 10, 10),
    ),
    "a split with sizes": (
        "c, d = Split<axis=1>(ids, sizes)  y = Gather(t10, c)  z = Gather(t20, d)",
        (10, 20, 20),
    ),
    "a split in equal parts": (
        "c, d = Split<axis=1, num_outputs=2>(ids)  y = Gather(t10, c)  z = Gather(t20, d)",
        (10, 10, 20),
    ),
    "a column of a slice": (
        "c = Slice(ids, start, end, axis1)  d = Gather<axis=1>(c, i0)  y = Gather(t10, d)",
        (None, 10, None),
    ),
    "the smaller of two tables": (
        "c = Gather<axis=1>(ids, i0)  y = Gather(t20, c)  z = Gather(t7, c)",
        (7, None, None),
    ),
    "the columns of a table": ("c = Gather<axis=1>(ids, i0)  y = Gather<axis=1>(t10, c)", (4, None, None)),
    "an offset": ("c = Add(ids, two)  y = Gather(t10, c)", (None, None, None)),
    "a hash": ("c = Mod(ids, two)  y = Gather(t10, c)", (None, None, None)),
    "some rows only": ("c = Gather<axis=0>(ids, i0)  y = Gather(t10, c)", (None, None, None)),
    "a slice of the rows": ("c = Slice(ids, zero, rows, zero)  y = Gather(t10, c)", (None, None, None)),
    "never looked up": ("c = Cast<to=1>(ids)  y = Relu(c)", (None, None, None)),
}


@pytest.mark.parametrize("form", FORMS)
def test_bounds_of_the_columns(form, write_model):
    body, bounds = FORMS[form]
    model = GraphModel.load(write_model(f"g (int64[b,3] ids) => (float[] y) {{ {body} }}", WEIGHTS))
    assert id_bounds(model) == {"ids": bounds}


@pytest.mark.parametrize("form", [form for form, (_, bounds) in FORMS.items() if any(bounds)])
def test_the_bound_is_where_the_runtime_starts_to_refuse(form, write_model):
    """Ids one below every bound run, and an id at the bound of any one column fails."""
    runtime = pytest.importorskip("onnxruntime")
    body, bounds = FORMS[form]
    outputs = "float[] y, float[] z" if "z =" in body else "float[] y"
    path = write_model(f"g (int64[b,3] ids) => ({outputs}) {{ {body} }}", WEIGHTS)
    session = runtime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    largest = np.array([[(bound or 10**6) - 1 for bound in bounds]] * 2)
    session.run(None, {"ids": largest})
    for column, bound in enumerate(bounds):
        if bound is not None:
            beyond = largest.copy()
            beyond[:, column] = bound
            with pytest.raises(Exception, match="out of data bounds"):
                session.run(None, {"ids": beyond})


def test_rank_one_external_and_unbounded_inputs(write_model):
    path = write_model(
        "g (int64[b] user, int32[b,2] tags, int64[b,n] history, float[b,2] dense) => (float[] y) {"
        " y = Gather(t10, user)  a = Gather(t20, tags)  c = Gather(t20, history)  d = Relu(dense) }",
        {"t10": (10, 4), "t20": (20, 4)},
    )
    onnx.save(onnx.load(path), path, save_as_external_data=True, location="tables.bin", size_threshold=0)
    model = GraphModel.load(path)
    assert set(model.tables) == {"t10", "t20"}
    # Bounds are for columns, and the columns of `history` are not known.
    assert id_bounds(model) == {"user": (10,), "tags": (20, 20)}
