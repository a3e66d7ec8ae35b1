"""Columns of inputs: bounds of ids from every form in which one reaches its table, and where columns mix."""

import numpy as np
import onnx
import pytest

from loka_onnx.graph.entry import canonicalize
from loka_onnx.graph.id_bounds import id_bounds
from loka_onnx.graph.model import GraphModel
from loka_onnx.graph.moves import InputColumn, column_origins

I64 = np.int64
LAST = np.iinfo(I64).max
NONE = (None, None, None)
# fmt: off
WEIGHTS = {
    "t7": (7, 4), "t10": (10, 4), "t20": (20, 4), "t60": (60, 4),
    "i0": I64(0), "i_last": I64(-1), "two": I64(2), "nine": I64(9),
    **{name: np.array(values, I64) for name, values in {
        "i1": [1], "i20": [2, 0], "flat": [-1], "axis0": [0], "axis1": [1], "start": [1], "end": [LAST],
        "starts": [0, 1], "ends": [LAST, 3], "axes": [0, 1], "steps": [1, 1], "sizes": [1, 2], "rows": [2],
        "zero": [0], "three": [3], "two1": [2], "one_each": [1, 1, 1], "scattered": [30, 0],
        "offsets": [[0, 10, 30]], "four": [[30, 0, 5, 2]], "of_two_rows": [[0, 10, 30], [5, 0, 2]],
    }.items()},
}
FORMS = {
    "straight into one table": ("y = Gather(t10, ids)", (10, 10, 10)),
    "a column with a scalar index": ("c = Gather<axis=1>(ids, i0)  y = Gather(t10, c)", (10, None, None)),
    "a negative axis and index": ("c = Gather<axis=-1>(ids, i_last)  y = Gather(t10, c)", (None, None, 10)),
    "a one-element index, then Squeeze": (
        "c = Gather<axis=1>(ids, i1)  d = Squeeze(c, axis1)  y = Gather(t10, d)", (None, 10, None)),
    "casts and reshapes": (
        "c = Gather<axis=1>(ids, i0)  d = Cast<to=6>(c)  e = Reshape(d, flat)  f = Identity(e)"
        " g = Unsqueeze(f, axis1)  h = Flatten(g)  y = Gather(t20, h)", (20, None, None)),
    "several columns into one table": ("c = Gather<axis=1>(ids, i20)  y = Gather(t10, c)", (10, None, 10)),
    "a slice to the end": ("c = Slice(ids, start, end, axis1)  y = Gather(t10, c)", (None, 10, 10)),
    "a slice with a whole batch axis": (
        "c = Slice(ids, starts, ends, axes, steps)  d = Cast<to=6>(c)  y = Gather(t10, d)", (None, 10, 10)),
    "a split with sizes": (
        "c, d = Split<axis=1>(ids, sizes)  y = Gather(t10, c)  z = Gather(t20, d)", (10, 20, 20)),
    "a split in equal parts": (
        "c, d = Split<axis=1, num_outputs=2>(ids)  y = Gather(t10, c)  z = Gather(t20, d)", (10, 10, 20)),
    "a column of a slice": (
        "c = Slice(ids, start, end, axis1)  d = Gather<axis=1>(c, i0)  y = Gather(t10, d)", (None, 10, None)),
    "the smaller of two tables": (
        "c = Gather<axis=1>(ids, i0)  y = Gather(t20, c)  z = Gather(t7, c)", (7, None, None)),
    "the columns of a table": ("c = Gather<axis=1>(ids, i0)  y = Gather<axis=1>(t10, c)", (4, None, None)),
    "one offset for all": ("c = Add(ids, two)  y = Gather(t10, c)", (range(-12, 8),) * 3),
    "ids that begin at 2": ("c = Sub(ids, two)  y = Gather(t10, c)", (range(-8, 12),) * 3),
    "fields that share a table": (
        "c = Add(offsets, ids)  y = Gather(t60, c)", (60, range(-70, 50), range(-90, 30))),
    "offsets of some fields, cast": (
        "c = Gather<axis=1>(ids, i20)  d = Cast<to=6>(c)  o = Cast<to=6>(scattered)  e = Add(d, o)"
        "  f = Flatten(e)  y = Gather(t60, f)", (60, None, range(-90, 30))),
    "two offsets before two tables": (
        "c = Add(ids, offsets)  d, e = Split<axis=1>(c, sizes)  y = Gather(t20, d)  z = Gather(t60, e)",
        (20, range(-70, 50), range(-90, 30))),
    "unbound": (
        "c, d, e = Split<axis=1>(ids, one_each)  f = Squeeze(d, axis1)  g = Squeeze(e, axis1)"
        "  y = Gather(t10, f)  z = Gather(t7, g)", (None, 10, 7)),
    "turned, then taken by field": (
        "c = Transpose<perm=[1, 0]>(ids)  d = Gather<axis=0>(c, i0)  y = Gather(t10, d)"
        "  e = Slice(c, start, end, axis0)  z = Gather(t20, e)", (10, 20, 20)),
    "with an axis in front": (
        "c = Unsqueeze(ids, axis1)  d = Slice(c, start, end, two1)  y = Gather(t10, d)", (None, 10, 10)),
    "turned by the shape of the batch": (
        "b = Shape<start=0, end=1>(ids)  s = Concat<axis=0>(b, three, axis1)  c = Reshape(ids, s)"
        "  d = Gather<axis=1>(c, i1)  y = Gather(t10, d)  e = Gather<axis=1>(c, i0)  z = Gather(t7, e)",
        (7, 10, None)),
    "joined again in another order": (
        "c = Gather<axis=1>(ids, i0)  d = Gather<axis=1>(ids, i_last)  e = Unsqueeze(c, axis1)"
        "  f = Unsqueeze(d, axis1)  g = Concat<axis=1>(f, e)  h = Gather<axis=1>(g, i0)"
        "  y = Gather(t10, h)  z = Gather(t20, g)", (20, None, 10)),
    "an offset behind a join": (
        "c = Gather<axis=1>(ids, i1)  d = Concat<axis=1>(c, ids)  e = Add(d, four)  y = Gather(t60, e)",
        (60, range(-65, 30), range(-62, 58))),
    "offsets of ids that are repeated": (
        "b = Shape<start=0, end=1>(ids)  s = Concat<axis=0>(b, axis1)  c = Tile(ids, s)  d = Add(c, offsets)"
        "  y = Gather(t60, d)", NONE),
    "a clip": ("c = Clip(ids, two, nine)  y = Gather(t10, c)", NONE),
    "an offset that is computed": ("c = Gather<axis=1>(ids, i1)  d = Add(ids, c)  y = Gather(t10, d)", NONE),
    "an offset of each row": ("c = Add(ids, of_two_rows)  y = Gather(t60, c)", NONE),
    "taken from a number": ("c = Sub(nine, ids)  y = Gather(t10, c)", NONE),
    "through a narrow type": ("c = Cast<to=3>(ids)  d = Cast<to=7>(c)  y = Gather(t10, d)", NONE),
    "unknown ids mapped in the graph": (
        "c = Less(ids, two)  d = Where(c, two, ids)  y = Gather(t10, d)", NONE),
    "a hash": ("c = Mod(ids, two)  y = Gather(t10, c)", NONE),
    "some rows only": ("c = Gather<axis=0>(ids, i0)  y = Gather(t10, c)", NONE),
    "a slice of the rows": ("c = Slice(ids, zero, rows, zero)  y = Gather(t10, c)", NONE),
    "never looked up": ("c = Cast<to=1>(ids)  y = Relu(c)", NONE),
}
# fmt: on


def ranges(bounds):
    """A number of rows stands for the ids of a whole table."""
    return tuple(range(-bound, bound) if isinstance(bound, int) else bound for bound in bounds)


def written(form, write_model):
    body = FORMS[form][0]
    outputs = "float[] y, float[] z" if " z =" in body else "float[] y"
    return write_model(f"g (int64[b,3] ids) => ({outputs}) {{ {body} }}", WEIGHTS)


@pytest.mark.parametrize("form", FORMS)
def test_bounds_of_the_columns(form, write_model):
    model = canonicalize(written(form, write_model)).model
    assert id_bounds(model) == {"ids": ranges(FORMS[form][1])}


@pytest.mark.parametrize("form", [form for form, (_, bounds) in FORMS.items() if any(bounds)])
def test_the_bound_is_where_the_runtime_starts_to_refuse(form, write_model):
    """Ids at both ends of every range run, and an id beyond the end of any one column fails."""
    runtime = pytest.importorskip("onnxruntime")
    bounds = ranges(FORMS[form][1])
    session = runtime.InferenceSession(str(written(form, write_model)), providers=["CPUExecutionProvider"])
    within = [range(10**6) if ids is None else ids for ids in bounds]
    for inside, beyond in ((-1, lambda ids: ids.stop), (0, lambda ids: ids.start - 1)):
        good = np.array([[ids[inside] for ids in within]] * 2)
        session.run(None, {"ids": good})
        for column, ids in enumerate(within):
            if bounds[column] is not None:
                bad = good.copy()
                bad[:, column] = beyond(ids)
                with pytest.raises(Exception, match="out of data bounds"):
                    session.run(None, {"ids": bad})


def test_other_inputs_have_bounds_of_their_own(write_model):
    path = write_model(
        "g (int64[b] user, int32[b,2] tags, int64[b,n] history, float[b,2] dense) => (float[] y) {"
        " y = Gather(t10, user)  a = Gather(t20, tags)  c = Gather(t20, history)  d = Relu(dense) }",
        {"t10": (10, 4), "t20": (20, 4)},
    )
    onnx.save(onnx.load(path), path, save_as_external_data=True, location="tables.bin", size_threshold=0)
    model = GraphModel.load(path)
    assert set(model.tables) == {"t10", "t20"}
    # Bounds are for columns, and the columns of `history` are not known.
    assert id_bounds(model) == {"user": (range(-10, 10),), "tags": (range(-20, 20),) * 2}
    # The form of DeepCTR-Torch: one float matrix, of which some columns are cast and looked up.
    body = "c = Gather<axis=1>(x, i1)  d = Cast<to=7>(c)  y = Gather(t10, d)"
    path = write_model(f"g (float[b,3] x, float[b,2] dense) => (float[] y) {{ {body} }}", WEIGHTS)
    assert id_bounds(canonicalize(path).model) == {"x": (None, range(-10, 10), None)}
    # Only one of the branches runs, and which one the ids may decide.
    path = write_model(
        "g (int64[b,2] ids, bool large) => (float[] y) { y = If(large)"
        " <then_branch = a () => (float[] p) { p = Gather(t60, ids) },"
        " else_branch = c () => (float[] q) { q = Gather(t10, ids) }> }",
        {"t10": (10, 4), "t60": (60, 4)},
    )
    assert id_bounds(GraphModel.load(path)) == {"ids": (None, None)}


X = tuple(InputColumn("x", column) for column in range(3))
AGE = (InputColumn("age", 0),)
ORIGINS = {
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
CONSTANTS = {
    "low": np.float32(-1),
    "half": np.float32(0.5),
    "mean": (3,),
    "square": (3, 3),
    "table": (5, 2),
    "axis1": np.array([1]),
}


@pytest.mark.parametrize("form", ORIGINS)
def test_columns_are_followed(form, write_model):
    body, wanted = ORIGINS[form]
    # The width of an output is the one that is declared: one more step, and the tensor has its own.
    path = write_model(f"{HEADER} {{ {body.replace('y =', 'z =')}  y = Relu(z) }}", CONSTANTS)
    assert column_origins(GraphModel.load(path).tensors()["z"]) == wanted


def test_inputs_have_their_own_columns_and_constants_and_vectors_none(write_model):
    tensors = GraphModel.load(write_model(f"{HEADER} {{ y = MatMul(x, square) }}", CONSTANTS)).tensors()
    assert column_origins(tensors["x"]) == X
    assert column_origins(tensors["age"]) == ()
    assert column_origins(tensors["square"]) == ()
