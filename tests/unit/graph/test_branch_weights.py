"""Weights that branches hold: beside the model where they are too large for it, and read back from there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from graph_runs import randn
from onnx import numpy_helper

from loka_onnx.errors import ModelError
from loka_onnx.graph import storage
from loka_onnx.graph.model import GraphModel
from loka_onnx.graph.storage import all_initializers, model_digest, model_files
from loka_onnx.sessions.onnx_session import OnnxSession

LOW, EXACT = randn(8, 200), randn(8, 200)
X = np.linspace(-1, 1, 24, dtype=np.float32).reshape(3, 8)
TEXT = """g (float[b,8] x, bool is_low, int64[b] user) => (float[b,2,100] y, float[b,4] e) {
    y = If(is_low) <then_branch = low () => (l) { p = MatMul(x, low_w)  l = Reshape(p, low_shape) },
                    else_branch = exact () => (r) { q = MatMul(x, exact_w)  r = Reshape(q, exact_shape) }>
    e = Gather(table, user)
}"""


@pytest.fixture
def source(write_model: Callable[..., Path]) -> Path:
    """A table in a file of its own, and a choice between two weights, in the model and in their branches."""
    path = write_model(
        TEXT, {"table": np.arange(80, dtype=np.float32).reshape(20, 4)}, name="source/model.onnx"
    )
    model = onnx.load(path)
    onnx.save(model, path, save_as_external_data=True, location="table.bin", size_threshold=0)
    model = onnx.load(path, load_external_data=False)
    for attribute, weight in zip(model.graph.node[0].attribute, (LOW, EXACT), strict=True):
        stored = {"w": weight, "shape": np.array([-1, 2, 100])}
        attribute.g.initializer.extend(
            numpy_helper.from_array(values, f"{attribute.g.name}_{name}") for name, values in stored.items()
        )
    path.write_bytes(model.SerializeToString())
    return path


def check_outputs(path: Path) -> None:
    """Both branches and the table, against NumPy."""
    user = np.array([0, 19, 7])
    for is_low, weight in ((True, LOW), (False, EXACT)):
        found = OnnxSession(path).run({"x": X, "is_low": np.array(is_low), "user": user})
        y, e = found["y"], found["e"]
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
    assert stored["low_shape"].raw_data and not stored["low_w"].raw_data
    check_outputs(target)
    onnx.checker.check_model(str(target))
    read = {t.name: t for t in all_initializers(onnx.load(target).graph)}
    for name, weight in (("low_w", LOW), ("exact_w", EXACT)):
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
    assert stored_in(tmp_path / "inside/model.onnx")["low_w"].raw_data
    check_outputs(tmp_path / "inside/model.onnx")


def test_weights_of_a_branch_that_are_gone_are_told(source, tmp_path, monkeypatch):
    monkeypatch.setattr(storage, "INLINE_LIMIT_BYTES", 1000)
    target = tmp_path / "run/model.onnx"
    GraphModel.load(source).save(target)
    data = target.parent / "model.onnx.data"
    data.write_bytes(data.read_bytes()[:-1])
    with pytest.raises(ModelError) as caught:
        GraphModel.load(target)
    assert caught.value.code == "E0315" and "'model.onnx.data', which has" in caught.value.evidence
    data.unlink()
    with pytest.raises(ModelError) as caught:
        GraphModel.load(target)
    assert caught.value.code == "E0314" and "'model.onnx.data'" in caught.value.evidence
