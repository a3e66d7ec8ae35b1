"""`doctor --model`: what it says of a model must be what a run does with it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import pytest
from onnx import TensorProto, helper, numpy_helper

from loka_onnx.cli.doctor import describe_model
from loka_onnx.cli.main import main
from loka_onnx.core.artifact import OutputKind, OutputSpec
from loka_onnx.errors import ModelError
from loka_onnx.export.onnx_model import import_onnx
from loka_onnx.pipeline.rows import bind_columns

SPEC = OutputSpec("y", OutputKind.LOGIT, None)


def saved(path: Path, *, node: str, shape: list[str | int]) -> Path:
    """A model of one product or one norm, of an input of this shape."""
    constants = {"w": np.ones((16, 16), np.float32), "scale": np.ones(16, np.float32)}
    used = {"MatMul": "w", "LayerNormalization": "scale"}[node]
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name in ("x", "y")]
    made = helper.make_node(node, ["x", used], ["y"], "block/op")
    values = [numpy_helper.from_array(constants[used], used)]
    graph = helper.make_graph([made], "g", ends[:1], ends[1:], values)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10), path)
    return path


def told(capsys: pytest.CaptureFixture[str], model: Path) -> str:
    """The part of what `doctor` prints that is about the model."""
    with pytest.raises(SystemExit) as ended:
        main(["doctor", "--model", str(model)])
    assert not ended.value.code
    return capsys.readouterr().out.partition("\nModel ")[2]


@pytest.mark.slow
def test_no_problem_is_all_that_the_file_alone_can_show(tmp_path, capsys):
    model = saved(tmp_path / "plain.onnx", node="MatMul", shape=["n", 16])
    assert describe_model(model).problems == ()
    assert "  ✓ no problem found; the run file and its rows decide the rest\n" in told(capsys, model)
    artifact = import_onnx(model, tmp_path / "taken.onnx", (SPEC,))
    assert bind_columns({}, artifact.inputs)


@pytest.mark.parametrize(
    ("node", "shape", "problem"),
    [
        ("MatMul", ["n", 3, 16], "input 'x' has 3 axes (shape (None, 3, 16)): a table feeds inputs of shape"),
        (
            "LayerNormalization",
            ["n", 16],
            "it has no product to quantize: no MatMul or Gemm of an activation",
        ),
    ],
)
def test_what_a_run_refuses_is_a_problem(tmp_path, capsys, node, shape, problem):
    model = saved(tmp_path / "model.onnx", node=node, shape=shape)
    with pytest.raises(ModelError):
        bind_columns({}, import_onnx(model, tmp_path / "taken.onnx", (SPEC,)).inputs)
    page = told(capsys, model)
    assert f"  ✗ {problem}" in page and "✓" not in page


def test_a_batch_that_is_fixed_is_told_once(tmp_path):
    model = saved(tmp_path / "fixed.onnx", node="MatMul", shape=[4, 16])
    assert describe_model(model).problems == ("input 'x' has no dynamic batch: its shape is [4, 16]",)


def test_a_model_that_ends_the_process_is_a_problem_and_does_not_end_doctor(tmp_path):
    """A GRU over the rows whose id is not 0; generated ids of no table are all 0."""
    model = onnx.parser.parse_model("""
        <ir_version: 10, opset_import: ["" : 21]>
        g (float[n,16] x, int64[n] ids) => (float[n,1] y)
        <int64[3] lists = {-1, 4, 4}, int64 zero = {0}, int64[1] first = {0}> {
          known = Greater(ids, zero)
          some = Compress<axis=0>(x, known)
          history = Reshape(some, lists)
          steps = Transpose<perm=[1,0,2]>(history)
          [history_gru] all, last = GRU<hidden_size=16>(steps, w, r)
          state = Squeeze(last, first)
          found = NonZero(known)
          at = Transpose<perm=[1,0]>(found)
          joined = ScatterND(x, at, state)
          y = MatMul(joined, head)
        }""")
    shapes = {"w": (1, 48, 4), "r": (1, 48, 16), "head": (16, 1)}
    values = (numpy_helper.from_array(np.ones(shape, np.float32), name) for name, shape in shapes.items())
    model.graph.initializer.extend(values)
    onnx.save(model, tmp_path / "gru.onnx")
    (problem,) = describe_model(tmp_path / "gru.onnx").problems
    assert problem.startswith("node 'history_gru/gru' (GRU) fails")
    assert "a process that ran it died of SIG" in problem
