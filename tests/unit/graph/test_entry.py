"""Foreign models: what is converted keeps its outputs, what cannot be taken is refused in words."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from graph_runs import randn, run

from loka_onnx.errors import ModelError
from loka_onnx.graph.entry import OPSET, canonicalize
from loka_onnx.graph.model import GraphModel, values_of
from loka_onnx.graph.sites import find_sites

RANKER = """g (float[b,8] x, int64[b] user) => (float[b,1] y) {
    e = Gather(table, user)
    [fc1] h = Gemm<transB=1>(x, w1, b1)
    [norm] n = LayerNormalization(h, gain)
    r = Relu(n)
    m = ReduceSum<keepdims=1>(r, axis)
    s = Mul(r, m)
    c = Concat<axis=1>(s, e)
    [fc2] y = MatMul(c, w2)
}"""


def ranker_weights() -> dict[str, np.ndarray]:
    shapes = {"table": (20, 4), "w1": (6, 8), "b1": (6,), "gain": (6,), "w2": (10, 1)}
    return {"axis": np.array([1]), **{name: randn(*shape) for name, shape in shapes.items()}}


def outside(path: Path, size: int = 64) -> Path:
    """The file with its weights beside it."""
    onnx.save(onnx.load(path), path, save_as_external_data=True, location="weights.bin", size_threshold=size)
    return path


def taken(path: Path) -> Path:
    """Its canonical form, written elsewhere."""
    target = path.parent / "taken" / "model.onnx"
    canonicalize(path).model.save(target, link_tables=False)
    return target


@pytest.mark.parametrize("external", [False, True])
def test_constant_expressions_of_large_weights_are_folded(external, write_model):
    """Of 16 KB, which the graph holds beside its messages: ONNX Runtime gets them all the same."""
    weight = randn(64, 64)
    body = "{ t = Transpose<perm=[1,0]>(w)  s = Mul(t, half)  y = MatMul(x, s) }"
    path = write_model(f"g (float[b,64] x) => (float[b,64] y) {body}", {"w": weight, "half": np.float32(0.5)})
    if external:
        outside(path)
    canonical = canonicalize(path)
    (node,), (site,) = canonical.model.nodes, find_sites(canonical.model)
    assert (node.op, site.kind, canonical.notes) == ("MatMul", "linear", ("2 constant nodes folded",))
    np.testing.assert_array_equal(values_of(node.inputs[1]), weight.T * np.float32(0.5))


@pytest.mark.parametrize("opset", [17, 19, 21, 22])
@pytest.mark.parametrize("external", [False, True])
def test_conversion_keeps_names_and_outputs(opset, external, write_model):
    path = write_model(RANKER, ranker_weights(), opset)
    if external:
        # ONNX Runtime wants the axes of a reduction inside the model.
        outside(path)
    canonical = canonicalize(path)
    assert canonical.model.opset == max(opset, OPSET)
    assert [s.name for s in find_sites(canonical.model)] == ["fc1", "norm", "fc2"]
    assert canonical.notes == ((f"converted from opset {opset} to 21",) if opset < 21 else ())
    assert set(canonical.model.tables) == ({"table"} if external else set())
    feeds = {"x": randn(5, 8), "user": np.arange(5)}
    np.testing.assert_array_equal(run(taken(path), **feeds), run(path, **feeds))
    onnx.checker.check_model(str(taken(path)))


OLD_FORMS = {
    "softmax over all later axes": "s = Softmax<axis=1>(h)",
    "softmax over one axis": "s = Softmax<axis=2>(h)",
    "log-softmax": "s = LogSoftmax<axis=1>(h)",
    "axes as attributes": "q = ReduceSum<axes=[2], keepdims=0>(h) u = Unsqueeze<axes=[2]>(q) s = Mul(h, u)",
    "squeeze": "u = Unsqueeze<axes=[1]>(h) v = Squeeze<axes=[1]>(u) s = Tanh(v)",
    "split": "l, r = Split<axis=2, split=[1, 3]>(h) s = Concat<axis=2>(r, l)",
    "split in two, and a largest": "l, r = Split<axis=2>(h) m = ReduceMax<axes=[2]>(l) s = Mul(r, m)",
    "clip": "s = Clip(h, low, high)",
    "pad": "s = Pad(h, pads, low)",
    "dropout": "s = Dropout<ratio=0.5>(h)",
    "layer norm in parts": "m = ReduceMean<axes=[-1]>(h) d = Sub(h, m) v = Mul(d, d)"
    " e = ReduceMean<axes=[-1]>(v) f = Add(e, high) r = Sqrt(f) s = Div(d, r)",
    "batch norm": "s = BatchNormalization(h, ones, zeros, zeros, twos)",
}


UNTIL_12 = {"axes as attributes", "squeeze", "split", "dropout"}


@pytest.mark.parametrize(
    ("form", "opset"), [(form, 11) for form in OLD_FORMS] + [(f, 13) for f in OLD_FORMS if f not in UNTIL_12]
)
def test_forms_of_older_operator_sets(form, opset, write_model):
    """Softmax flattened what came before and after its axis until 12, reductions had attributes until 12."""
    body = OLD_FORMS[form]
    constants = {"w": randn(4, 4), "low": np.float32(0.0), "high": np.float32(0.25)}
    constants |= {"pads": np.array([0, 0, 0, 0, 0, 1]), "ones": np.ones(3, np.float32)}
    constants |= {"zeros": np.zeros(3, np.float32), "twos": np.full(3, 2, np.float32)}
    text = f"g (float[b,3,4] x) => (float[] y) {{ h = MatMul(x, w) {body} y = Abs(s) }}"
    used = {name: values for name, values in constants.items() if name in body + "w"}
    path = write_model(text, used, opset)
    canonical = canonicalize(path)
    assert canonical.model.opset == OPSET
    assert f"converted from opset {opset} to 21" in canonical.notes
    x = randn(5, 3, 4)
    before, after = run(path, x=x), run(taken(path), x=x)
    assert np.ptp(before) > 0.1
    np.testing.assert_allclose(after, before, rtol=1e-6, atol=1e-7)


def test_model_local_functions_are_inlined(tmp_path):
    text = """
    <ir_version: 10, opset_import: ["" : 21, "local" : 1]>
    g (float[b,4] x, float[4,3] w) => (float[b,3] y) { y = local.dense(x, w) }
    <opset_import: ["" : 21], domain: "local">
    dense (a, k) => (r) { p = MatMul(a, k)  r = Relu(p) }
    """
    model = onnx.parser.parse_model(text)
    del model.graph.input[1]
    model.graph.initializer.append(onnx.numpy_helper.from_array(randn(4, 3), "w"))
    path = tmp_path / "functions.onnx"
    onnx.save(model, path)
    canonical = canonicalize(path)
    assert canonical.notes == ("model-local functions inlined",)
    (site,) = find_sites(canonical.model)
    assert (site.op_type, site.k, site.n) == ("MatMul", 4, 3)
    x = randn(5, 4)
    np.testing.assert_array_equal(run(taken(path), x=x), run(path, x=x))


PRODUCT = "g (float[b,4] x) => (float[b,3] y) { y = MatMul(x, w) }"


def refused(path: Path, code: str, *parts: str) -> None:
    with pytest.raises(ModelError) as caught:
        canonicalize(path)
    assert caught.value.code == code
    assert all(part in str(caught.value) for part in parts)


def test_old_opsets_absent_files_and_other_kinds_are_refused(write_model, tmp_path):
    refused(write_model(PRODUCT, {"w": (4, 3)}, 10), "E0303")
    refused(tmp_path / "absent.onnx", "E0311")
    text = tmp_path / "text.onnx"
    text.write_text("model: ranker\n")
    refused(text, "E0312")


@pytest.mark.parametrize(
    ("domain", "op", "shown"), [("acme", "FusedLookup", "acme::FusedLookup"), ("", "Frobnicate", "ai.onnx::")]
)
def test_a_custom_operator_is_refused_by_name(domain, op, shown, write_model):
    path = write_model(PRODUCT, {"w": (4, 3)})
    model = onnx.load(path)
    model.graph.node.add(op_type=op, domain=domain, name="lookup_7", input=["x"], output=["z"])
    model.opset_import.append(onnx.helper.make_opsetid("acme", 1))
    onnx.save(model, path)
    refused(path, "E0305", "node 'lookup_7'", f"uses the custom operator '{shown}")


def test_a_custom_operator_inside_a_branch_is_refused(write_model):
    path = write_model(
        "g (float[b,4] x, bool c) => (float[] y) {"
        " y = If(c) <then_branch = t () => (z) { z = Relu(x) }, else_branch = e () => (z) { z = Relu(x) }> }"
    )
    model = onnx.load(path)
    model.graph.node[0].attribute[0].g.node[0].domain = "acme"
    onnx.save(model, path)
    refused(path, "E0305", "'acme::Relu'")


def test_a_custom_operator_without_a_name_is_refused_by_its_output(write_model):
    path = write_model(PRODUCT, {"w": (4, 3)})
    model = onnx.load(path)
    model.graph.node.add(op_type="FusedLookup", domain="acme", input=["x"], output=["looked_up"])
    model.opset_import.append(onnx.helper.make_opsetid("acme", 1))
    onnx.save(model, path)
    refused(path, "E0305", "node 'looked_up'")


def test_axes_of_minus_one_are_dynamic(write_model):
    """As in ONNX Runtime; some converters write them for an axis without a size."""
    path = write_model(RANKER, ranker_weights())
    model = onnx.load(path)
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.shape.dim[0].dim_value = -1
    onnx.save(model, path)
    assert [tensor.shape[0] for tensor in canonicalize(path).model.inputs] == [None, None]
    feeds = {"x": randn(3, 8), "user": np.array([1, 0, 19])}
    np.testing.assert_array_equal(*(run(each, **feeds) for each in (path, taken(path))))


@pytest.mark.parametrize("keep", [0, 1, 40, 0.5, 0.99])
def test_a_truncated_file_is_refused(keep, write_model):
    path = write_model(PRODUCT, {"w": (40, 30)})
    whole = path.read_bytes()
    path.write_bytes(whole[: int(keep * len(whole)) if isinstance(keep, float) else keep])
    refused(path, "E0312")


@pytest.fixture
def with_external(write_model) -> Path:
    return outside(write_model(PRODUCT, {"w": (4, 3)}), 0)


@pytest.mark.parametrize("read", [canonicalize, GraphModel.load])
def test_truncated_external_data_are_refused(read, with_external):
    (with_external.parent / "weights.bin").write_bytes(b"\0" * 47)
    with pytest.raises(
        ModelError, match=r"are truncated(?s:.*)'w' ends at byte 48 of 'weights\.bin', which has 47"
    ):
        read(with_external)


def test_every_dense_type_survives(write_model):
    """Constants that are no products: integers, booleans, FP16."""
    others = {"half": np.float16(0.5), "mask": np.array([True, False, True]), "zero": np.float32(0)}
    path = write_model(
        "g (float[b,4] x) => (float[b,3] y) { h = Cast<to=10>(x)  s = Add(h, half)  f = Cast<to=1>(s)"
        " p = MatMul(f, w)  y = Where(mask, p, zero) }",
        {"w": randn(4, 3), **others},
    )
    x = randn(5, 4)
    np.testing.assert_array_equal(run(taken(path), x=x), run(path, x=x))
