"""`doctor --model`: what it says of a model must be what a run does with it."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import pytest
from onnx_text import parsed

from loka_onnx.cli.doctor import describe_model, diagnose
from loka_onnx.cli.main import main
from loka_onnx.core.artifact import OutputKind, OutputSpec
from loka_onnx.errors import ModelError
from loka_onnx.export.onnx_model import import_onnx
from loka_onnx.pipeline.rows import bind_columns

SPEC = OutputSpec("y", OutputKind.LOGIT, None)


def saved(path: Path, *, node: str, shape: list[str | int]) -> Path:
    """A model of one product or one norm, of an input of this shape."""
    read = {"MatMul": np.ones((16, 16)), "LayerNormalization": np.ones(16)}[node]
    axes = ",".join(map(str, shape))
    model = parsed(f"y = {node}(x, w)", {"w": read}, inputs=f"float[{axes}] x", outputs=f"float[{axes}] y")
    model.graph.node[0].name = "block/op"
    onnx.save(model, path)
    return path


def told(capsys: pytest.CaptureFixture[str], model: Path) -> str:
    """The part of what `doctor` prints that is about the model."""
    with pytest.raises(SystemExit) as ended:
        main(["doctor", "--model", str(model)])
    assert not ended.value.code
    return capsys.readouterr().out.partition("\nModel ")[2]


def test_memory_is_in_billions_of_bytes():
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert diagnose().machine.memory_gb == pytest.approx(pages / 1e9, rel=0.02, abs=0.1)


@pytest.mark.slow
def test_no_problem_is_all_that_the_file_alone_can_show(tmp_path, capsys):
    model = saved(tmp_path / "plain.onnx", node="MatMul", shape=["n", 16])
    assert describe_model(model).problems == ()
    assert "  ✓ no problem found; the run file and its rows decide the rest\n" in told(capsys, model)
    artifact = import_onnx(model, tmp_path / "taken.onnx", (SPEC,))
    assert bind_columns({}, artifact.inputs)


NO_PRODUCT = "it has no product to quantize: no MatMul or Gemm of an activation"


@pytest.mark.parametrize(
    ("node", "shape", "problem"),
    [
        ("MatMul", ["n", 3, 16], "input 'x' has 3 axes (shape (None, 3, 16)): a table feeds inputs of shape"),
        ("LayerNormalization", ["n", 16], NO_PRODUCT),
        ("MatMul", [4, 16], "input 'x' has no dynamic batch: its shape is [4, 16]"),
    ],
)
def test_what_a_run_refuses_is_a_problem_told_once(tmp_path, capsys, node, shape, problem):
    model = saved(tmp_path / "model.onnx", node=node, shape=shape)
    with pytest.raises(ModelError):
        bind_columns({}, import_onnx(model, tmp_path / "taken.onnx", (SPEC,)).inputs)
    page = told(capsys, model)
    assert page.count("✗") == 1 and f"  ✗ {problem}" in page and "✓" not in page


def test_a_model_that_ends_the_process_is_a_problem_and_does_not_end_doctor(tmp_path):
    """A GRU over the rows whose id is not 0; generated ids of no table are all 0."""
    shapes = {"w": (1, 48, 4), "r": (1, 48, 16), "head": (16, 1)}
    integers = {"lists": [-1, 4, 4], "zero": 0, "first": [0]}
    model = parsed(
        """known = Greater(ids, zero)
           some = Compress<axis=0>(x, known)
           history = Reshape(some, lists)
           steps = Transpose<perm=[1,0,2]>(history)
           [history_gru] all, last = GRU<hidden_size=16>(steps, w, r)
           state = Squeeze(last, first)
           found = NonZero(known)
           at = Transpose<perm=[1,0]>(found)
           joined = ScatterND(x, at, state)
           y = MatMul(joined, head)""",
        {**integers, **{name: np.ones(shape) for name, shape in shapes.items()}},
        inputs="float[n,16] x, int64[n] ids",
        outputs="float[n,1] y",
    )
    onnx.save(model, tmp_path / "gru.onnx")
    (problem,) = describe_model(tmp_path / "gru.onnx").problems
    assert problem.startswith("node 'history_gru/gru' (GRU) fails")
    assert "a process that ran it died of SIG" in problem


def test_a_model_of_one_batch_size_is_a_problem(tmp_path):
    """TorchScript keeps `len(x)` as a number: no output has a batch."""
    weights = {"w": np.ones((4, 3)), "rows": np.ones((8, 3))}
    text = "h = MatMul(x, w) [add] y = Add(h, rows)"
    model = parsed(text, weights, inputs="float[n,4] x", outputs="float[8,3] y")
    onnx.save(model, tmp_path / "m.onnx")
    (problem,) = describe_model(tmp_path / "m.onnx").problems
    assert problem.startswith("node 'add/add' (Add) fails at a batch size that it is to serve: a batch of 2")
