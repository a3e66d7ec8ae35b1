"""Hostile ONNX models: sound ones of several kinds, of which some fields are changed."""

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import onnx
import onnx.parser
import onnxruntime as ort
from onnx import TensorProto, helper, numpy_helper

from loka_onnx.core.artifact import OutputKind, OutputSpec
from loka_onnx.errors import ModelError
from loka_onnx.export.onnx_model import import_onnx
from loka_onnx.graph.naming import NAME_SCOPES
from loka_onnx.graph.storage import model_digest
from tests.fuzz.values import HOSTILE, OUTSIDE, damaged

HEAD = '<ir_version: 10, opset_import: ["" : {opset}, "own" : 1]>\n'
BODIES = (
    """g (float[b,8] x, int64[b] user) => (float[b,1] y) {
        e = Gather(table, user)
        c = Concat<axis=1>(x, e)
        [fc1] h = Gemm<transB=1>(c, w1, bias)
        a = Relu(h)
        [fc2] z = MatMul(a, w2)
        y = Sigmoid(z)
    }""",
    """g (float[b,8] x) => (float[b,1] y) {
        s = ReduceSum<keepdims=0>(x)
        zero = Constant<value = float {0.0}>()
        is_more = Greater(s, zero)
        r = If (is_more) <
            then_branch = t () => (float[b,1] p) { h1 = MatMul(x, w8) p = MatMul(h1, w2) },
            else_branch = f () => (float[b,1] q) { h2 = MatMul(x, w8) h3 = Relu(h2) q = MatMul(h3, w2) }
        >
        [last] y = Identity(r)
    }""",
    """g (float[b,8] x) => (float[b,1] y) {
        h = own.layer(x, w8)
        [fc2] y = MatMul(h, w2)
    }
    <domain: "own", opset_import: ["" : 18]>
    layer (v, w) => (o) { m = MatMul(v, w) o = Relu(m) }""",
    """g (float[b,2,8] x) => (float[b,2,1] y) {
        n = LayerNormalization<axis=-1>(x, gain)
        q = MatMul(n, w88)
        k = Transpose<perm=[0,2,1]>(n)
        s = MatMul(q, k)
        p = Softmax<axis=-1>(s)
        v = MatMul(p, n)
        c = Constant<value_ints=[0,2,8]>()
        w = Reshape(v, c)
        h = Einsum<equation="bij,jk->bik">(w, w8)
        y = MatMul(h, w2)
    }""",
    """g (float[b,8] x) => (float[b,1] y) {
        trips = Constant<value_int=3>()
        yes = Constant<value = bool {1}>()
        last, all = Loop(trips, yes, x) <
            body = l (int64 i, bool c, float[b,8] v) => (bool c2, float[b,8] v2, float[b,8] o) {
                c2 = Identity(c) m = MatMul(v, w88) v2 = Relu(m) o = Identity(v2)
            }
        >
        h = MatMul(last, w8)
        y = MatMul(h, w2)
    }""",
)
SHAPES = {
    **{"table": (20, 8), "w1": (16, 16), "bias": (16,), "w2": (16, 1)},
    **{"w8": (8, 16), "w88": (8, 8), "gain": (8,)},
}
OPERATORS = (
    *("MatMul", "Gemm", "Add", "Gather", "Concat", "Relu", "Reshape", "Transpose", "If", "Loop", "Constant"),
    *("Split", "Softmax", "LayerNormalization", "Einsum", "Conv", "SequenceAt", "Cast", "Nothing", ""),
)
SPEC = OutputSpec("y", OutputKind.LOGIT, "label")
REASONS = (
    *("has no sites", "custom operator", "no output named", "no dynamic batch", "uses opset"),
    *("outside its directory", "cannot be read", "are missing", "are truncated"),
)
"""Words of messages about models that may be sound and are not taken."""


def sound(random: Random) -> onnx.ModelProto:
    """A model that ONNX Runtime runs."""
    opset = random.choice((18, 20, 21))
    # The inliner takes functions of the model's own operator set only.
    text = HEAD.format(opset=opset) + random.choice(BODIES).replace('"" : 18', f'"" : {opset}')
    model = onnx.parser.parse_model(text)
    used = text.replace(",", " ").replace("(", " ").replace(")", " ").split()
    numbers = np.random.default_rng(1)
    for name, shape in SHAPES.items():
        if name in used:
            values = numbers.standard_normal(shape).astype(np.float32)
            model.graph.initializer.append(numpy_helper.from_array(values, name))
    for index, node in enumerate(model.graph.node):
        if random.random() < 0.2:
            node.metadata_props.add(key=NAME_SCOPES, value=f"['', 'layer{index}', 'node']")
    return model


def attempt(random: Random, place: Path) -> str:
    """Write a model, and take it in; returns why one that ONNX Runtime runs was not taken."""
    path = place / "model.onnx"
    model = sound(random)
    for _ in range(random.choice((0, 1, 1, 1, 2, 3))):
        random.choice(CHANGES)(random, model)
    if random.random() < 0.15:
        _stored_outside(random, model, place)
    data = model.SerializeToString()
    path.write_bytes(damaged(random, data) if random.random() < 0.1 else data)
    try:
        model_digest(path)
        artifact = import_onnx(path, place / "run" / "model.onnx", (SPEC,))
    except ModelError as error:
        if not any(reason in error.what for reason in REASONS) and _runs(path):
            return error.what.replace(str(path), "MODEL").replace(str(place), "")
        raise
    _compare(path, artifact.path)
    return ""


def _runs(path: Path) -> bool:
    """In a process of its own: some models that are refused end it."""
    asked = "import sys, pathlib; from tests.fuzz.models import _outputs; "
    asked += "sys.exit(_outputs(pathlib.Path(sys.argv[1])) is None)"
    return subprocess.run([sys.executable, "-c", asked, path], check=False).returncode == 0


def _outputs(path: Path, level: Any = ort.GraphOptimizationLevel.ORT_ENABLE_ALL) -> dict[str, Any] | None:
    """Outputs on three rows; None where ONNX Runtime does not load or run the model."""
    options = ort.SessionOptions()
    options.graph_optimization_level = level
    options.intra_op_num_threads, options.log_severity_level = 1, 4
    try:
        session = ort.InferenceSession(os.fspath(path), options, providers=["CPUExecutionProvider"])
        feeds = {}
        for spec in session.get_inputs():
            shape = [size if isinstance(size, int) else 3 for size in spec.shape]
            values = np.random.default_rng(2).integers(0, 5, shape)
            feeds[spec.name] = values.astype(np.float32 if "float" in spec.type else np.int64)
        names = [spec.name for spec in session.get_outputs()]
        # A loop may have lost its end.
        limit = ort.RunOptions()
        timer = threading.Timer(5.0, setattr, (limit, "terminate", True))
        timer.start()
        try:
            return dict(zip(names, session.run(names, feeds, limit), strict=True))
        finally:
            timer.cancel()
    except Exception:
        return None


def _compare(source: Path, taken: Path) -> None:
    # Optimizing some that are taken, ONNX Runtime ends the process.
    before = _outputs(source, ort.GraphOptimizationLevel.ORT_DISABLE_ALL)
    if before is None:
        return
    after = _outputs(taken)
    assert after is not None, "the model runs, and what was taken of it does not"
    for name, values in before.items():
        if isinstance(values, np.ndarray) and values.dtype == np.float32:
            with np.errstate(all="ignore"):
                assert np.allclose(values, after[name], rtol=1e-3, atol=1e-3, equal_nan=True), (
                    f"wrong output {name}"
                )


# Changes -------------------------------------------------------------------------------------------


def _graphs(model: onnx.ModelProto) -> list[Any]:
    """The graph, branches, bodies and functions: whatever holds nodes."""
    found: list[Any] = [model.graph, *model.functions]
    for part in found:
        for node in part.node:
            found += [a.g for a in node.attribute if a.type == onnx.AttributeProto.GRAPH]
    return found


def _node(random: Random, model: onnx.ModelProto) -> onnx.NodeProto:
    nodes = [node for part in _graphs(model) for node in part.node]
    return random.choice(nodes) if nodes else model.graph.node.add(op_type="Relu")


def _text(random: Random) -> str:
    texts = [value for value in HOSTILE if isinstance(value, str) and value != "\ud800"]
    return random.choice(texts)


def _inputs(random: Random, model: onnx.ModelProto) -> None:
    node = _node(random, model)
    outputs = [name for other in model.graph.node for name in other.output]
    match random.randrange(6):
        case 0:
            del node.input[random.randrange(len(node.input) + 1) :]
        case 1:
            node.input.append(random.choice((*outputs, "x", "")))
        case 2 if outputs and node.input:
            node.input[random.randrange(len(node.input))] = random.choice(outputs)
        case 3 if node.input:
            node.input[random.randrange(len(node.input))] = random.choice(("", "nowhere", "x", "w2"))
        case 4:
            del node.output[:]
        case _ if node.output:
            node.output[0] = random.choice((*outputs, "", "x", _text(random)))


def _attributes(random: Random, model: onnx.ModelProto) -> None:
    node = _node(random, model)
    if not node.attribute:
        node.attribute.append(helper.make_attribute(random.choice(("axis", "perm", "to", "nothing")), 7))
    attribute = random.choice(node.attribute)
    match random.randrange(7):
        case 0:
            node.attribute.remove(attribute)
        case 1:
            node.attribute.append(attribute)
        case 2:
            attribute.type = random.choice(onnx.AttributeProto.AttributeType.values())
        case 3:
            del attribute.ints[:]
            attribute.ints.extend(random.choice(([], [0, 0], [9, 9, 9], [-(2**62)], [2, 1, 0])))
            attribute.type = onnx.AttributeProto.INTS
        case 4:
            attribute.i = random.choice((-1, 99, 2**62, -(2**62)))
        case 5:
            attribute.name = random.choice(("axis", "", "to", _text(random)))
        case _:
            attribute.s, attribute.ref_attr_name = (
                random.choice((b"", b"\xff", b"a" * 999)),
                random.choice(("", "z")),
            )


def _operators(random: Random, model: onnx.ModelProto) -> None:
    node = _node(random, model)
    if random.random() < 0.7:
        node.op_type = random.choice(OPERATORS)
    else:
        node.domain = random.choice(("com.microsoft", "ai.onnx", "own", "ai.onnx.ml", _text(random)))
    if random.random() < 0.3:
        node.overload = "b"


def _versions(random: Random, model: onnx.ModelProto) -> None:
    match random.randrange(5):
        case 0 if model.opset_import:
            model.opset_import[0].version = random.choice((0, 1, 7, 9, 10, 13, 27, 100, -1, 2**40))
        case 1:
            del model.opset_import[:]
        case 2:
            model.opset_import.add(
                domain=random.choice(("", "ai.onnx", "z")), version=random.choice((1, 13, 21))
            )
        case 3:
            model.ir_version = random.choice((0, 1, 3, 99, 2**40))
        case _:
            model.graph.name = ""


def _functions(random: Random, model: onnx.ModelProto) -> None:
    if not model.functions:
        body = [helper.make_node("again", ["v"], ["o"], domain="own")]
        model.functions.append(
            helper.make_function("own", "again", ["v"], ["o"], body, [helper.make_opsetid("", 18)])
        )
        model.graph.node.append(helper.make_node("again", [model.graph.output[0].name], ["f"], domain="own"))
        return
    function = random.choice(model.functions)
    match random.randrange(5):
        case 0:
            calls = helper.make_node(function.name, list(function.input), ["o2"], domain=function.domain)
            function.node.append(calls)
        case 1:
            model.functions.remove(function)
        case 2:
            model.functions.append(function)
        case 3:
            del function.opset_import[:]
        case _:
            function.output.append("nowhere")


def _branches(random: Random, model: onnx.ModelProto) -> None:
    holders = [node for part in _graphs(model) for node in part.node if node.op_type in {"If", "Loop"}]
    if not holders:
        deep = helper.make_graph([helper.make_node("Identity", ["x"], ["deep"])], "d", [], [])
        for level in range(random.choice((3, 9, 30))):
            name = f"c{level}"
            node = helper.make_node(
                "If", ["yes"], [name], then_branch=deep, else_branch=deep if level < 8 else None
            )
            deep = helper.make_graph([node], "d", [], [])
        model.graph.node.extend(deep.node)
        return
    node = random.choice(holders)
    match random.randrange(4):
        case 0 if node.input:
            node.input[0] = random.choice(("x", "w2", "", "nowhere"))
        case 1 if node.attribute:
            del node.attribute[0].g.output[:]
        case 2 if node.attribute:
            node.attribute[0].g.Clear()
        case _ if node.attribute:
            node.attribute.remove(node.attribute[0])


def _weights(random: Random, model: onnx.ModelProto) -> None:
    if not model.graph.initializer:
        return
    tensor = random.choice(model.graph.initializer)
    match random.randrange(8):
        case 0:
            del tensor.dims[:]
            tensor.dims.extend(random.choice(([], [0], [-1, 4], [3, 5], [2**40, 2**40], [128])))
        case 1:
            tensor.data_type = random.choice((*TensorProto.DataType.values(), 77))
        case 2:
            tensor.raw_data = tensor.raw_data[: random.choice((0, 1, 7, len(tensor.raw_data) - 1))]
        case 3:
            tensor.float_data.extend([1.0, 2.0])
        case 4:
            tensor.name = random.choice(("", "x", "y", _text(random)))
        case 5:
            model.graph.initializer.append(tensor)
        case 6:
            model.graph.initializer.remove(tensor)
        case _:
            sparse = model.graph.sparse_initializer.add()
            sparse.values.CopyFrom(tensor)
            sparse.dims.extend(tensor.dims)


def _ends(random: Random, model: onnx.ModelProto) -> None:
    end = random.choice([*model.graph.input, *model.graph.output])
    match random.randrange(8):
        case 0:
            end.ClearField("type")
        case 1:
            end.type.tensor_type.ClearField("shape")
        case 2:
            end.type.tensor_type.elem_type = random.choice((0, 1, 7, 8, 10, 11, 16, 77))
        case 3:
            end.name = random.choice(("", "x", "y", _text(random)))
        case 4:
            for dim in end.type.tensor_type.shape.dim:
                dim.dim_value = random.choice((0, -1, 1, 5, 2**50))
        case 5:
            end.type.sequence_type.elem_type.tensor_type.elem_type = 1
        case 6:
            random.choice((model.graph.input, model.graph.output)).append(end)
        case _:
            info = model.graph.value_info.add()
            info.CopyFrom(helper.make_tensor_value_info(random.choice(("h", "c", "y", "")), 7, [1, 2, 3]))


def _names(random: Random, model: onnx.ModelProto) -> None:
    node = _node(random, model)
    scopes = (
        *("[", "1+1", "['a'", "[" * 9000, "5", "None"),
        *("{'a': 1}", "", "[[1], 2]", "'a'", "['', '', '']", "\0"),
    )
    if random.random() < 0.6:
        key = random.choice((NAME_SCOPES, "pkg.torch.onnx.class_hierarchy"))
        node.metadata_props.add(key=key, value=random.choice((*scopes, _text(random))))
    else:
        node.name = random.choice(("", "fc2", "a/b/c", "/", "//", "a" * 9000, _text(random)))


def _order(random: Random, model: onnx.ModelProto) -> None:
    nodes = list(model.graph.node)
    random.shuffle(nodes)
    del model.graph.node[:]
    model.graph.node.extend(nodes if random.random() < 0.7 else [*nodes, *nodes[:1]])


CHANGES: tuple[Callable[[Random, onnx.ModelProto], None], ...] = (
    _inputs, _inputs, _attributes, _attributes, _operators, _versions, _functions, _branches, _weights, _ends,
    _names, _order,
)  # fmt: skip


def _stored_outside(random: Random, model: onnx.ModelProto, place: Path) -> None:
    """Move weights into a file beside the model, or to where none should be."""
    (place / "w.bin").write_bytes(bytes(4096))
    (place / "link").symlink_to(place.parent / OUTSIDE / "kept")
    os.mkfifo(place / "pipe")
    for tensor in model.graph.initializer:
        if random.random() < 0.6:
            continue
        length = len(tensor.raw_data)
        tensor.ClearField("raw_data")
        tensor.data_location = TensorProto.EXTERNAL
        elsewhere = (f"../{OUTSIDE}/kept", "/dev/zero", "/etc/passwd", "link", "pipe", ".", "", "model.onnx")
        location = random.choice((*["w.bin"] * 3, *elsewhere, _text(random)))
        tensor.external_data.add(key="location", value=location)
        for key, value in (("offset", "0"), ("length", str(length))):
            if random.random() < 0.7:
                odd = random.choice(("-1", "99999999", "", "a", "1e3", "9" * 5000, "٣"))
                tensor.external_data.add(key=key, value=value if random.random() < 0.6 else odd)
