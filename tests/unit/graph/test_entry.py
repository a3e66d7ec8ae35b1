"""Models at the entry: what is refused, and what becomes of an exported one."""

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from graph_runs import randn, run
from onnx import TensorProto, numpy_helper

from loka_onnx.errors import ModelError, OutputError
from loka_onnx.graph import detached, storage, weights
from loka_onnx.graph.detached import number_of
from loka_onnx.graph.entry import OPSET, canonicalize
from loka_onnx.graph.model import GraphModel, is_constant, values_of
from loka_onnx.graph.sites import find_sites
from loka_onnx.graph.storage import all_initializers, model_digest
from loka_onnx.sessions.onnx_session import OnnxSession, SessionOptions

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


@pytest.mark.parametrize(
    "constant",
    ["u = Unsqueeze(v, axes)", "c = Cast<to=16>(v)  d = Erf(c)  u = Cast<to=1>(d)"],
    ids=["warned of by ONNX Runtime", "not computed by it"],
)
def test_folding_constants_prints_nothing(constant, write_model, capfd):
    body = f"{{ {constant}  m = MatMul(x, w)  y = Add(m, u) }}"
    weights = {"w": (8, 8), "v": (8,), "axes": np.array([0])}
    canonicalize(write_model(f"g (float[b,8] x) => (float[b,8] y) {body}", weights))
    assert capfd.readouterr() == ("", "")


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


CUSTOM = {
    "of a domain": ("[lookup_7] z = acme.FusedLookup(x)", "lookup_7", "acme::FusedLookup"),
    "of no domain": ("[lookup_7] z = Frobnicate(x)", "lookup_7", "ai.onnx::"),
    "without a name": ("looked_up = acme.FusedLookup(x)", "looked_up", "acme::FusedLookup"),
    "in a branch": (
        "[pick] z = If(c) <then_branch = t () => (p) { [inner] p = acme.Relu(x) },"
        " else_branch = e () => (p) { p = Relu(x) }>",
        "inner",
        "acme::Relu",
    ),
}


@pytest.mark.parametrize("case", CUSTOM)
def test_a_custom_operator_is_refused_by_name(case, write_model):
    body, node, shown = CUSTOM[case]
    path = write_model(
        f"g (float[b,4] x, bool c) => (float[b,3] y) {{ y = MatMul(x, w) {body} }}", {"w": (4, 3)}
    )
    refused(path, "E0305", f"node '{node}'", f"uses the custom operator '{shown}")


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


BASIC = SessionOptions(optimize=False)
CHOICE = """g (float[b,64] x, bool c) => (float[b,64] y) {
    h = MatMul(x, w)
    y = If(c) <then_branch = t () => (p) { q = MatMul(h, inner)  p = Add(q, bias) },
               else_branch = e () => (p) { p = If(c) <then_branch = tt () => (r) { r = MatMul(h, w) },
                                                      else_branch = ee () => (r) { r = MatMul(h, inner) }> }>
}"""
LOW = """g (float[b,64] x) => (float[b,64] y) {
    w8f = DequantizeLinear(w8, one)
    h = MatMul(x, w8f)
    w16f = Cast<to=1>(w16)
    y = MatMul(h, w16f)
}"""
TYPES = """g (float[b,64] x) => (float[b,64] y, int64[b] i) {
    half = Cast<to=1>(half_weight)  double = Cast<to=1>(double_weight)  whole = Cast<to=1>(ids)
    s = Add(half, double)  t = Add(s, whole)  y = MatMul(x, t)
    some = Slice(ids, zero, three, zero)  i = ReduceMax<keepdims=0>(some)
}"""


@pytest.fixture
def models(write_model) -> dict[str, Path]:
    """Branches within branches, types that NumPy lacks, and integers, all beyond the limit."""
    wide, ids = randn(64, 64), np.arange(64 * 64).reshape(64, 64)
    low = {
        "w8": randn(64, 128).astype(ml_dtypes.float8_e4m3fn),
        "w16": randn(128, 64).astype(ml_dtypes.bfloat16),
        "one": np.ones((), np.float32),
    }
    types = {"half_weight": wide.astype(np.float16), "double_weight": wide.astype(float), "ids": ids}
    ends = {"zero": np.array([0]), "three": np.array([3])}
    path = write_model(CHOICE, {"w": wide, "inner": randn(64, 64), "bias": randn(64)}, name="choice.onnx")
    proto = onnx.load(path)
    # A weight of the branch's own.
    (inner,) = (tensor for tensor in proto.graph.initializer if tensor.name == "inner")
    branch = next(a.g for node in proto.graph.node for a in node.attribute if a.name == "then_branch")
    branch.initializer.add().CopyFrom(inner)
    branch.initializer[0].name = branch.node[0].input[1] = "own"
    onnx.save(proto, path)
    return {
        "choice": path,
        "low": write_model(LOW, low, name="low.onnx"),
        "types": write_model(TYPES, types | ends, name="types.onnx"),
    }


def edited(path: Path) -> GraphModel:
    """Some weights are new, one is renamed, one not in C order."""
    model = GraphModel.load(path)
    products = [node for node in model.nodes if node.op == "MatMul" and is_constant(node.inputs[1])]
    for node in products:
        node.inputs[1].name += ".renamed"
    if products:
        node = products[0]
        node.inputs[1].values = np.asfortranarray(values_of(node.inputs[1]))
        scaled = model.constant("scaled", values_of(node.inputs[1]) * np.float32(2))
        (last,) = (tensor for tensor in model.outputs if tensor.name == "y")
        model.replace_uses(last, model.add("MatMul", [last, scaled], "more"), [])
    return model


@pytest.mark.parametrize("change", [GraphModel.load, edited])
@pytest.mark.parametrize("name", ["choice", "low", "types"])
@pytest.mark.parametrize("limit", [1 << 30, 4000])
def test_a_file_has_the_bytes_that_protobuf_writes(name, change, limit, models, tmp_path, monkeypatch):
    monkeypatch.setattr(storage, "INLINE_LIMIT_BYTES", limit)
    model = change(models[name])
    held = model.export()
    assert len(held.detached) >= 2
    digest = model.save(tmp_path / "held/m.onnx")
    # With no weight large enough to be held, onnx-graphsurgeon and protobuf have all of them.
    for module in (weights, detached):
        monkeypatch.setattr(module, "STRIP_BYTES", 1 << 40)
    plain = change(models[name])
    assert not plain.export().detached
    assert plain.save(tmp_path / "plain/m.onnx") == digest
    for path in (tmp_path / "plain").iterdir():
        assert (tmp_path / "held" / path.name).read_bytes() == path.read_bytes()
    assert len(list((tmp_path / "held").iterdir())) == 1 + (limit < 1 << 30)
    whole = held.whole().SerializeToString(deterministic=True)
    if limit == 1 << 30:
        assert (tmp_path / "held/m.onnx").read_bytes() == whole
    # What was written is not read again for its digest, which is that of a reading.
    storage._DIGESTS.clear()
    assert model_digest(tmp_path / "held/m.onnx") == digest


@pytest.mark.parametrize("name", ["choice", "low", "types"])
def test_a_model_read_back_is_the_model_loaded(name, models, tmp_path):
    held = edited(models[name]).export()
    digest = held.write(tmp_path / "m.onnx")
    back, loaded = GraphModel.read_back(held), GraphModel.load(tmp_path / "m.onnx")
    assert list(back.tensors()) == list(loaded.tensors())
    for key, tensor in loaded.tensors().items():
        other = back.tensors()[key]
        assert (type(other), other.dtype) == (type(tensor), tensor.dtype)
        assert (other.shape and list(other.shape)) == (tensor.shape and list(tensor.shape))
        if is_constant(tensor):
            assert values_of(other).tobytes() == values_of(tensor).tobytes()
    assert back.save(tmp_path / "back.onnx") == loaded.save(tmp_path / "loaded.onnx")
    # Reading back consumes nothing, and weights are shared, not copied.
    assert held.write(tmp_path / "again.onnx") == digest
    if name == "types":
        again = GraphModel.read_back(held).tensors()["double_weight"]
        assert np.shares_memory(values_of(again), values_of(back.tensors()["double_weight"]))


def test_weights_survive_the_replacement_of_their_file_and_cannot_be_changed(models, tmp_path, monkeypatch):
    """Those of a model that is read back are the other's, to which a mod may be rolled back."""
    monkeypatch.setattr(storage, "INLINE_LIMIT_BYTES", 1000)
    GraphModel.load(models["types"]).save(tmp_path / "m.onnx")
    model = GraphModel.load(tmp_path / "m.onnx")
    values = values_of(model.tensors()["double_weight"])
    before = values.tobytes()
    (tmp_path / "m.onnx.data").write_bytes(b"")
    assert values.tobytes() == before
    model = GraphModel.load(models["choice"])
    product = next(node for node in model.nodes if node.op == "MatMul")
    product.inputs[1] = model.constant("new", randn(64, 64))
    for held in (values, values_of(GraphModel.read_back(model.export()).tensors()["new"])):
        with pytest.raises(ValueError, match="read-only"):
            held[0] = 0


@pytest.mark.parametrize("name", ["choice", "low", "types"])
def test_the_weights_of_a_copy_are_held_once_they_are_read_as_well(name, models, tmp_path):
    model = GraphModel.load(models[name])
    copy = model.copy()
    for tensor in copy.tensors().values():
        if is_constant(tensor):
            values_of(tensor)
    in_copy, in_model = (
        {t.name for t in all_initializers(of.export().headers.graph) if number_of(t) is not None}
        for of in (copy, model)
    )
    assert in_copy == in_model != set()
    assert copy.save(tmp_path / "copy.onnx") == model.save(tmp_path / "model.onnx")


FNUZ = """g (float[b,64] x, bool c) => (float[b,64] y) {
    y = If(c) <then_branch = t () => (p) { s = QuantizeLinear(x, one, zero)
                                           q = DequantizeLinear(s, one, zero)
                                           v = DequantizeLinear(w, one, zero)
                                           p = MatMul(q, v) },
               else_branch = e () => (p) { p = Identity(x) }>
}"""


@pytest.mark.parametrize("copied", [False, True])
def test_e4m3fnuz_stays_what_it_is(copied, write_model, tmp_path):
    """Large and small, in branches, in copies, and read: as E4M3FN its bytes are twice the values."""
    kind = ml_dtypes.float8_e4m3fnuz
    stored = {"w": randn(64, 128).astype(kind), "zero": np.zeros((), kind), "one": np.ones((), np.float32)}
    model = GraphModel.load(write_model(FNUZ, stored))
    model = model.copy() if copied else model
    for part in model.graph.subgraphs():
        for name, tensor in part.tensors().items():
            if is_constant(tensor):
                values_of(tensor)
            elif name == "s":
                tensor.dtype = np.dtype(kind)
    model.save(tmp_path / "m.onnx")
    parts = [*storage.with_subgraphs(onnx.load(tmp_path / "m.onnx").graph)]
    found = {tensor.name: tensor for part in parts for tensor in part.initializer}
    for name, values in stored.items():
        assert numpy_helper.to_array(found[name]).dtype == values.dtype
        assert found[name].raw_data == values.tobytes()
    types = {info.name: info.type.tensor_type.elem_type for part in parts for info in part.value_info}
    assert types["s"] == TensorProto.FLOAT8E4M3FNUZ


@pytest.mark.parametrize("limit", [1 << 30, 4000])
def test_a_write_that_fails_leaves_the_earlier_files(limit, models, tmp_path, monkeypatch):
    monkeypatch.setattr(storage, "INLINE_LIMIT_BYTES", limit)
    path = tmp_path / "out/m.onnx"
    GraphModel.load(models["choice"]).save(path)
    before = {file.name: file.read_bytes() for file in path.parent.iterdir()}
    full = OSError(28, "No space left on device")

    def fail(*_: object) -> memoryview:
        raise full

    # The last weight does not fit on the disk.
    monkeypatch.setattr(*((storage, "bytes_of") if limit == 4000 else (weights, "fill")), fail)
    with pytest.raises(OutputError, match="cannot write"):
        edited(models["types"]).save(path)
    assert {file.name: file.read_bytes() for file in path.parent.iterdir()} == before


@pytest.mark.parametrize("limit", [1 << 30, 4000])
def test_what_is_written_over_stays_under_its_other_names(limit, models, tmp_path, monkeypatch):
    """The models of jobs are links."""
    monkeypatch.setattr(storage, "INLINE_LIMIT_BYTES", limit)
    digest = GraphModel.load(models["choice"]).save(tmp_path / "out/m.onnx")
    (tmp_path / "job").mkdir()
    for file in (tmp_path / "out").iterdir():
        (tmp_path / "job" / file.name).hardlink_to(file)
    again = edited(tmp_path / "out/m.onnx").save(tmp_path / "out/m.onnx")
    storage._DIGESTS.clear()
    assert model_digest(tmp_path / "job/m.onnx") == digest != again
    assert model_digest(tmp_path / "out/m.onnx") == again


def both(path: Path, feeds: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Outputs of a file, and of the same model in memory."""
    held = GraphModel.load(path).export()
    held.write(path.with_name("written.onnx"))
    model = held.in_memory()
    assert model is not None
    # By the ONNX specification, a tensor has either its own data or those of a file.
    held_outside = [t for t in model.proto.graph.initializer if t.name in model.weights]
    assert not [t.name for t in held_outside if t.HasField("raw_data")]
    session = OnnxSession.in_memory(model.proto, model.weights, path, BASIC)
    return OnnxSession(path.with_name("written.onnx"), BASIC).run(feeds), session.run(feeds)


@pytest.mark.parametrize("name", ["choice", "low", "types"])
@pytest.mark.parametrize("condition", [True, False])
def test_a_session_in_memory_has_the_outputs_of_the_file(name, condition, models):
    pytest.importorskip("onnxruntime", reason="needs onnxruntime: pip install 'loka-onnx[cpu]'")
    feeds: dict[str, Any] = {"x": randn(7, 64)} | ({"c": np.array(condition)} if name == "choice" else {})
    want, got = both(models[name], feeds)
    assert want.keys() == got.keys()
    for key, values in want.items():
        assert values.tobytes() == got[key].tobytes()


@pytest.mark.parametrize("kind", [np.float32, np.float16, ml_dtypes.bfloat16, np.int8, np.int64])
def test_tables_stay_outside_in_memory_too(kind, write_model, tmp_path):
    """At an odd place of their file, as nothing keeps writers from it."""
    table, weight = (randn(20, 4) * 50).astype(kind), randn(4, 1200)
    body = "{ e = Gather(table, i)  f = Cast<to=1>(e)  y = MatMul(f, w) }"
    path = write_model(f"g (int64[b] i) => (float[b,1200] y) {body}", {"table": table, "w": weight})
    proto = onnx.load(path)
    stored = proto.graph.initializer[0]
    (path.parent / "tables.bin").write_bytes(b"abc" + stored.raw_data + b"tail")
    onnx.external_data_helper.set_external_data(stored, "tables.bin", 3, table.nbytes)
    stored.ClearField("raw_data")
    path.write_bytes(proto.SerializeToString())
    model = GraphModel.load(path)
    assert set(model.tables) == {"table"}
    ids = np.array([0, 19, 7])
    want, got = both(path, {"i": ids})
    assert want["y"].tobytes() == got["y"].tobytes()
    np.testing.assert_allclose(got["y"], table[ids].astype(np.float64) @ weight, rtol=1e-4, atol=1e-3)
    back = GraphModel.read_back(model.export())
    assert set(back.tables) == {"table"}
    (tmp_path / "other").mkdir()
    assert back.save(tmp_path / "other/m.onnx") == model_digest(tmp_path / "other/m.onnx")


def of_canonical(path: Path, feeds: dict[str, Any]) -> dict[str, Any]:
    canonicalize(path).model.save(path.with_name("canonical.onnx"))
    return OnnxSession(path.with_name("canonical.onnx")).run(feeds)


BUCKETS = "c = Cast<to=1>(ids)  d = Mul(c, half)  e = Cast<to=7>(d)"


@pytest.mark.parametrize("place", ["alone", "in a branch"])
def test_numbers_between_casts_are_not_computed_in_integers(place, write_model):
    """Ids that a model makes buckets of: half of one is no product with the integer 0."""
    body = f"{BUCKETS}  y = Gather(table, e)"
    if place == "in a branch":
        then, other = f"(int64[b] e) {{ {BUCKETS} }}", "(int64[b] f) { f = Identity(ids) }"
        branches = f"<then_branch = g1 () => {then}, else_branch = g2 () => {other}>"
        sign = "s = ReduceSum<keepdims=0>(ids)  n = Less(zero, s)"
        body = f"{sign}  i = If (n) {branches}  y = Gather(table, i)"
    weights = {"half": np.float32(0.5), "zero": np.int64(0), "table": randn(20, 4)}
    path = write_model(f"g (int64[b] ids) => (float[b,4] y) {{ {body} }}", weights)
    ids = {"ids": np.arange(20)}
    np.testing.assert_array_equal(of_canonical(path, ids)["y"], OnnxSession(path).run(ids)["y"])


@pytest.mark.parametrize(("nodes", "length"), [
    ("t = Transpose<perm = [1, 0]>(x)  s = Shape<start = 1>(t)  n = Gather(s, first)", 3.0),
    ("u = Unsqueeze(x, last)  s = Shape<end = -1>(u)  n = Gather(s, back)", 4.0),
    ("d = ReduceMax<keepdims=0>(x)  e = Expand(d, sizes)  s = Shape<start=1>(e)  n = Gather(s, first)", 5.0),
    ("s = Shape(x)  p = Slice(s, back, end)  n = Gather(p, first)", 4.0), ("n = Shape(sizes)", 2.0),
])  # fmt: skip
def test_a_part_of_a_shape_is_the_length_of_its_axis(nodes, length, write_model):
    values = {"first": 0, "back": [-1], "end": [9], "last": [2], "sizes": [2, 5]}
    weights = {name: np.array(value) for name, value in values.items()}
    text = f"g (float[b,4] x) => (float[b,4] y) {{ {nodes}  f = Cast<to = 1>(n)  y = Mul(x, f) }}"
    found = of_canonical(write_model(text, weights), {"x": np.ones((3, 4), np.float32)})
    np.testing.assert_array_equal(found["y"], np.full((3, 4), length))


@pytest.mark.parametrize("attribute", ["value_float = 0.5", "value_floats = [0.5]"])
def test_numbers_of_a_constant_are_fp32(attribute, write_model):
    text = f"g (float[b,4] x) => (float[b,4] y) {{ c = Constant<{attribute}>()  y = Mul(x, c) }}"
    found = of_canonical(write_model(text), {"x": np.ones((3, 4), np.float32)})["y"]
    np.testing.assert_array_equal(found, np.full((3, 4), 0.5))
