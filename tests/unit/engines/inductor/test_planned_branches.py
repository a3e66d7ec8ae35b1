"""Branches of a planned graph: what they hold outside is read, and what they read of the graph stays in it.

No branch is lowered. What refuses it must be the lowering, with its reason, and not a file that a fused model
no longer finds.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import onnxruntime as ort
import pytest
from onnx import numpy_helper

pytest.importorskip("torch", reason="needs torch: pip install 'loka-onnx[export]'")

from fusion_models import fused, ops, product
from onnx import TensorProto

from loka_onnx.engines.inductor.compile import fused as write_fused
from loka_onnx.engines.inductor.fusions import planned
from loka_onnx.engines.inductor.fusions.planned import PlannedGraph
from loka_onnx.engines.inductor.lowering.model import lower
from loka_onnx.errors import EngineError

RANDOM = np.random.default_rng(5)
TEXT = """
<ir_version: 10, opset_import: ["" : 21]>
g (float[batch, 4] x, bool flag) => (float[batch, 3] y) {
  [fc] h = MatMul(x, w)
  [doubled] d = Add(h, h)
  [choose] y = If(flag) <
    then_branch = then () => (float[batch, 3] yes) { yes = Add(d, shift) },
    else_branch = otherwise () => (float[batch, 3] no) { no = Mul(h, outer) }
  >
}
"""


def branching(folder: Path) -> Path:
    """One branch has a weight of its own, the other reads one of the graph; all of them lie outside."""
    model = onnx.parser.parse_model(TEXT)
    weights = {"w": (4, 3), "outer": (3,)}
    model.graph.initializer.extend(
        numpy_helper.from_array(RANDOM.standard_normal(shape).astype(np.float32), name)
        for name, shape in weights.items()
    )
    (then,) = (a.g for a in model.graph.node[-1].attribute if a.name == "then_branch")
    then.initializer.append(numpy_helper.from_array(np.arange(3, dtype=np.float32), "shift"))
    path = folder / "model.onnx"
    folder.mkdir()
    onnx.save(model, path, save_as_external_data=True, location="weights", size_threshold=0)
    assert then.initializer[0].data_location == TensorProto.EXTERNAL
    return path


def test_a_saved_graph_holds_what_its_branches_hold_and_read(tmp_path: Path) -> None:
    path = branching(tmp_path / "planned")
    (tmp_path / "fused").mkdir()
    saved = tmp_path / "fused" / "model.onnx"
    PlannedGraph.load(path).save(saved)
    x = RANDOM.standard_normal((5, 4)).astype(np.float32)
    for flag in (True, False):
        fed = {"x": x, "flag": np.array(flag)}
        one, other = (ort.InferenceSession(os.fspath(each)).run(None, fed)[0] for each in (path, saved))
        np.testing.assert_array_equal(one, other)


def test_where_a_graph_is_only_looked_at_large_weights_of_branches_stay_outside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = branching(tmp_path / "planned")
    (path.parent / "weights").unlink()
    (path.parent / "weights").write_bytes(b"\0" * (1 << 16))
    monkeypatch.setattr(planned, "MOST_READ", 2)
    read: list[str] = []
    monkeypatch.setattr(planned, "read_external", lambda tensor, folder: read.append(tensor.name))
    PlannedGraph.load(path, TensorProto.BFLOAT16)
    assert read == []


def test_what_a_branch_reads_is_not_fused_away_and_the_lowering_says_why_not(tmp_path: Path) -> None:
    model = product(bias=True, behind="relu", outputs="wide")
    graph, report = fused(model, tmp_path)
    assert report.fused["float8-product"] and "Relu" not in ops(graph, tmp_path)
    # The same, but for a branch that reads what the product gives before the ReLU.
    model.constant("yes", np.array(True))
    branch = onnx.helper.make_graph(
        [onnx.helper.make_node("Add", ["g", "own"], ["inner"])],
        "branch",
        [],
        [onnx.helper.make_tensor_value_info("inner", TensorProto.BFLOAT16, None)],
        [
            onnx.helper.make_tensor(
                "own", TensorProto.BFLOAT16, (48,), np.zeros(96, np.uint8).tobytes(), raw=True
            )
        ],
    )
    model.add("If", ["yes"], "chosen", then_branch=branch, else_branch=branch)
    model.outputs = ("wide", "chosen")
    path = model.save(tmp_path / "planned.onnx")
    onnx.save(onnx.load(path), path, save_as_external_data=True, location="weights", size_threshold=0)
    written = write_fused(path, tmp_path / "fused")
    assert written != path
    assert "Relu" in [node.op_type for node in onnx.load(written).graph.node]
    with pytest.raises(EngineError, match=r"If is not lowered(?s:.*)control flow"):
        lower(written)
