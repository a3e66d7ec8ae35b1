"""The door for foreign models: what is unsound is refused as such, and odd models that run come through."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import onnxruntime
import pytest
from onnx import helper, numpy_helper
from onnx_text import with_constants

from loka_onnx.core.artifact import OutputKind, OutputSpec
from loka_onnx.errors import LokaError, ModelError
from loka_onnx.export.onnx_model import import_onnx
from loka_onnx.graph.naming import NAME_SCOPES
from loka_onnx.graph.soundness import parsing

TEXT = """<ir_version: 10, opset_import: ["": 21, "own": 1]>
g (float[b,8] x) => (float[b,4] y) {
    h = own.layer(x, w)
    s = ReduceSum<keepdims=0>(x)
    zero = Constant<value = float {0.0}>()
    more = Greater(s, zero)
    r = If (more) <then_branch = t () => (p) { p = Relu(h) }, else_branch = f () => (q) { q = Identity(h) }>
    axes = Constant<value_ints=[0,1]>()
    z = Transpose<perm=[0,1]>(r)
    [fc] y = MatMul(z, v)
}
<domain: "own", opset_import: ["": 21]>
layer (a, m) => (o) { o = MatMul(a, m) }"""


def model() -> onnx.ModelProto:
    w, v = (np.random.default_rng(0).standard_normal(shape) for shape in ((8, 16), (16, 4)))
    return with_constants(onnx.parser.parse_model(TEXT), {"w": w, "v": v})


def node(of: onnx.ModelProto, kind: str) -> onnx.NodeProto:
    return next(node for node in of.graph.node if node.op_type == kind)


def recursive(of: onnx.ModelProto) -> None:
    of.functions[0].node.append(helper.make_node("layer", ["a", "m"], ["again"], domain="own"))


def mutual(of: onnx.ModelProto) -> None:
    for name, called in (("one", "two"), ("two", "one")):
        body = [helper.make_node(called, ["a"], ["o"], domain="own")]
        of.functions.append(
            helper.make_function("own", name, ["a"], ["o"], body, [helper.make_opsetid("", 18)])
        )
    of.graph.node.append(helper.make_node("one", ["x"], ["unused"], domain="own"))


def vector(of: onnx.ModelProto) -> None:
    of.graph.initializer.append(numpy_helper.from_array(np.array([True, False]), "both"))
    node(of, "If").input[0] = "both"


def reshape(of: onnx.ModelProto, *sizes: int) -> None:
    of.graph.initializer[0].dims[:] = sizes


UNSOUND: dict[str, Callable[[onnx.ModelProto], object]] = {
    "a cycle": lambda m: node(m, "Transpose").input.__setitem__(0, "y"),
    "a function that calls itself": recursive,
    "functions that call one another": mutual,
    "a function that is not there": lambda m: m.functions.pop(),
    "an input that nothing makes": lambda m: node(m, "MatMul").input.__setitem__(0, "nowhere"),
    "a product of one input": lambda m: node(m, "MatMul").input.pop(),
    "a product without inputs": lambda m: node(m, "MatMul").ClearField("input"),
    "no outputs": lambda m: node(m, "MatMul").ClearField("output"),
    "a condition that is a vector": vector,
    "a branch without outputs": lambda m: node(m, "If").attribute[0].g.ClearField("output"),
    "a missing branch": lambda m: node(m, "If").attribute.pop(),
    "a constant without a value": lambda m: node(m, "Constant").attribute[0].ClearField("t"),
    "the value of an attribute of no function": lambda m: setattr(
        node(m, "Transpose").attribute[0], "ref_attr_name", "z"
    ),
    "an attribute of another type": lambda m: setattr(node(m, "Transpose").attribute[0], "type", 1),
    "a permutation of more axes": lambda m: node(m, "Transpose").attribute[0].ints.extend([7]),
    "an unknown opset": lambda m: setattr(m.opset_import[0], "version", 100),
    "no opset": lambda m: m.ClearField("opset_import"),
    "an operator that is not UTF-8": lambda m: m.ParseFromString(
        m.SerializeToString().replace(b"Transpose", b"\xff" * 9)
    ),
    "a weight of another shape": lambda m: reshape(m, 8, 17),
    "a weight of negative shape": lambda m: reshape(m, -8, -16),
    "a weight of no type": lambda m: setattr(m.graph.initializer[0], "data_type", 77),
    "two weights of one name": lambda m: m.graph.initializer.append(m.graph.initializer[0]),
    "half a weight": lambda m: setattr(m.graph.initializer[0], "raw_data", bytes(508)),
    "shapes that do not fit": lambda m: reshape(m, 16, 8),
}  # fmt: skip


@pytest.mark.parametrize("change", UNSOUND.values(), ids=UNSOUND.keys())
def test_an_unsound_model_is_refused(change: Callable[[onnx.ModelProto], object], tmp_path: Path) -> None:
    broken = model()
    change(broken)
    (tmp_path / "model.onnx").write_bytes(broken.SerializeToString())
    with pytest.raises(ModelError) as caught:
        take(tmp_path)
    assert str(tmp_path / "model.onnx") in str(caught.value) or caught.value.where
    assert len(str(caught.value)) < 2000 and not (tmp_path / "taken.onnx").exists()


def unsorted(of: onnx.ModelProto) -> None:
    nodes = list(of.graph.node)[::-1]
    del of.graph.node[:]
    of.graph.node.extend(nodes)


ODD: dict[str, Callable[[onnx.ModelProto], object]] = {
    "as it is": lambda m: None,
    "nodes out of order": unsorted,
    "an output without a shape": lambda m: m.graph.output[0].type.tensor_type.ClearField("shape"),
    "an output without a type": lambda m: m.graph.output[0].ClearField("type"),
    "a graph without a name": lambda m: setattr(m.graph, "name", ""),
    "a very long note": lambda m: setattr(m, "doc_string", "x" * 100000),
    "names of scopes that are no list": lambda m: node(m, "MatMul").metadata_props.add(
        key=NAME_SCOPES, value="1+1"
    ),
    "names of scopes nested without end": lambda m: node(m, "MatMul").metadata_props.add(
        key=NAME_SCOPES, value="[" * 9000
    ),
}


@pytest.mark.parametrize("change", ODD.values(), ids=ODD.keys())
def test_an_odd_model_that_runs_comes_through_with_its_outputs(
    change: Callable[[onnx.ModelProto], object], tmp_path: Path
) -> None:
    """onnx's checker refuses several of these; ONNX Runtime does not."""
    odd = model()
    change(odd)
    (tmp_path / "model.onnx").write_bytes(odd.SerializeToString())
    rows = np.random.default_rng(1).standard_normal((3, 8)).astype(np.float32)
    (before,) = onnxruntime.InferenceSession(tmp_path / "model.onnx").run(None, {"x": rows})
    take(tmp_path)
    (after,) = onnxruntime.InferenceSession(tmp_path / "taken.onnx").run(None, {"x": rows})
    np.testing.assert_allclose(after, before, rtol=1e-6, atol=1e-6)


def take(place: Path) -> None:
    import_onnx(place / "model.onnx", place / "taken.onnx", (OutputSpec("y", OutputKind.LOGIT, "label"),))


def test_our_own_errors_and_the_lack_of_memory_pass_the_door_as_they_are(tmp_path: Path) -> None:
    for error in (MemoryError(), LokaError("ours")):
        with pytest.raises(type(error)) as caught, parsing(tmp_path, "read"):
            raise error
        assert caught.value is error
    with pytest.raises(ModelError) as told, parsing(tmp_path, "read"):
        raise KeyError("x" * 100000)
    assert isinstance(told.value.__cause__, KeyError) and len(str(told.value)) < 2000
