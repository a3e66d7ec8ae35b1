"""Weights that branches hold: beside the model where they are too large for it, and read back from there."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from loka_onnx.errors import ModelError
from loka_onnx.graph import storage
from loka_onnx.graph.model import GraphModel
from loka_onnx.graph.storage import all_initializers, model_digest, model_files

RANDOM = np.random.default_rng(7)
LOW, EXACT = (RANDOM.standard_normal((8, 200)).astype(np.float32) for _ in range(2))
X = np.linspace(-1, 1, 24, dtype=np.float32).reshape(3, 8)


def branch(name: str, weight: np.ndarray) -> onnx.GraphProto:
    """x·W, reshaped by a constant that stays in the branch: both are its own initializers."""
    nodes = [
        helper.make_node("MatMul", ["x", f"{name}.w"], [f"{name}.product"], name=f"{name}.fc"),
        helper.make_node("Reshape", [f"{name}.product", f"{name}.shape"], [f"{name}.y"]),
    ]
    stored = [
        numpy_helper.from_array(weight, f"{name}.w"),
        numpy_helper.from_array(np.array([-1, 2, 100]), f"{name}.shape"),
    ]
    outputs = [helper.make_tensor_value_info(f"{name}.y", TensorProto.FLOAT, None)]
    return helper.make_graph(nodes, name, [], outputs, stored)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A table in a file of its own, and a choice between two weights, in the model."""
    chosen = helper.make_node(
        "If", ["is_low"], ["y"], "chosen", then_branch=branch("low", LOW), else_branch=branch("exact", EXACT)
    )
    rows = helper.make_node("Gather", ["table", "user"], ["e"])
    inputs = [
        helper.make_tensor_value_info("x", TensorProto.FLOAT, ["b", 8]),
        helper.make_tensor_value_info("is_low", TensorProto.BOOL, []),
        helper.make_tensor_value_info("user", TensorProto.INT64, ["b"]),
    ]
    outputs = [
        helper.make_tensor_value_info("y", TensorProto.FLOAT, ["b", 2, 100]),
        helper.make_tensor_value_info("e", TensorProto.FLOAT, ["b", 4]),
    ]
    table = numpy_helper.from_array(np.arange(80, dtype=np.float32).reshape(20, 4), "table")
    (tmp_path / "source").mkdir()
    (tmp_path / "source/table.bin").write_bytes(table.raw_data)
    onnx.external_data_helper.set_external_data(table, "table.bin", 0, 320)
    table.ClearField("raw_data")
    graph = helper.make_graph([rows, chosen], "g", inputs, outputs, [table])
    path = tmp_path / "source/model.onnx"
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    path.write_bytes(model.SerializeToString())
    return path


def check_outputs(path: Path) -> None:
    """Both branches and the table, against NumPy."""
    runtime = pytest.importorskip("onnxruntime")
    session = runtime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    user = np.array([0, 19, 7])
    for is_low, weight in ((True, LOW), (False, EXACT)):
        y, e = session.run(None, {"x": X, "is_low": np.array(is_low), "user": user})
        np.testing.assert_allclose(y, (X @ weight).reshape(3, 2, 100), rtol=1e-5, atol=1e-6)
        np.testing.assert_array_equal(e, np.arange(80).reshape(20, 4)[user])


def stored_in(path: Path) -> dict[str, onnx.TensorProto]:
    return {t.name: t for t in all_initializers(onnx.load(path, load_external_data=False).graph)}


def test_weights_of_branches_beyond_the_limit_go_beside_the_model(source, tmp_path, monkeypatch):
    # Only both together are beyond it, and the main graph has none.
    monkeypatch.setattr(storage, "INLINE_LIMIT_BYTES", LOW.nbytes + 100)
    target = tmp_path / "run/model.onnx"
    digest = GraphModel.load(source).save(target, link_tables=False)
    assert target.stat().st_size < 4096
    beside = (target, target.parent / "model.onnx.data", target.parent / "table.bin")
    assert model_files(target) == beside and model_digest(target) == digest
    stored = stored_in(target)
    assert stored["low.shape"].raw_data and not stored["low.w"].raw_data
    check_outputs(target)
    onnx.checker.check_model(str(target))
    read = {t.name: t for t in all_initializers(onnx.load(target).graph)}
    for name, weight in (("low.w", LOW), ("exact.w", EXACT)):
        np.testing.assert_array_equal(numpy_helper.to_array(read[name]), weight)


def test_a_branch_s_weights_decide_the_shape_where_they_are_small(source, tmp_path):
    """As an exporter that keeps everything outside writes it."""
    outside = tmp_path / "outside/model.onnx"
    outside.parent.mkdir()
    model = onnx.load(source)
    del model.graph.output[0].type.tensor_type.shape.dim[:]
    model.graph.output[0].type.tensor_type.ClearField("shape")
    onnx.save(model, outside, save_as_external_data=True, location="all.bin", size_threshold=0)
    loaded = GraphModel.load(outside)
    assert list(loaded.tensors()["y"].shape)[1:] == [2, 100]
    loaded.save(tmp_path / "inside/model.onnx")
    assert stored_in(tmp_path / "inside/model.onnx")["low.w"].raw_data
    check_outputs(tmp_path / "inside/model.onnx")


def test_weights_of_a_branch_that_are_gone_are_told(source, tmp_path, monkeypatch):
    monkeypatch.setattr(storage, "INLINE_LIMIT_BYTES", 1000)
    target = tmp_path / "run/model.onnx"
    GraphModel.load(source).save(target)
    data = target.parent / "model.onnx.data"
    data.write_bytes(data.read_bytes()[:-1])
    with pytest.raises(ModelError) as caught:
        GraphModel.load(target)
    assert caught.value.what == f"the weights of '{target}' are truncated"
    assert "'model.onnx.data', which has" in caught.value.evidence
    data.unlink()
    with pytest.raises(ModelError, match=r"stores tensors in 'model\.onnx\.data', which is not beside it"):
        GraphModel.load(target)
