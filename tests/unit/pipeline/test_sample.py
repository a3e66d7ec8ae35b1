"""Generated inputs: of the widths that the data have, and such as the model answers with numbers."""

from pathlib import Path

import numpy as np
import onnx
from onnx_text import parsed

from loka_onnx.config import RunConfig, build_run_config
from loka_onnx.core.artifact import TensorSpec
from loka_onnx.data import InputBinding
from loka_onnx.pipeline.accepting import accept
from loka_onnx.pipeline.context import RunSettings
from loka_onnx.pipeline.directory import RunDirectory
from loka_onnx.pipeline.rows import bounded_by, generated_rows

WEIGHTS = {
    "w": np.random.default_rng(0).standard_normal((6, 1)),
    "table": np.random.default_rng(1).standard_normal((9, 4)),
    "axis": np.array([1]),
}


def drawn(body: str, folder: Path, width: str = "2") -> dict[str, np.ndarray]:
    """What a run generates for a model of `x` (n, 2) and `ids` (n, m)."""
    body += " e = Gather(table, ids)  s = ReduceSum<keepdims=0>(e, axis)"
    body += " c = Concat<axis=1>(l, s)  y = MatMul(c, w)"
    inputs = f"float[n,{width}] x, int64[n,m] ids"
    onnx.save(parsed(body, WEIGHTS, inputs=inputs, outputs="float[n,1] y"), folder / "ranker.onnx")
    random = np.random.default_rng(2)
    np.savez(
        folder / "rows.npz",
        x=random.uniform(0.5, 2.0, (300, 2)).astype(np.float32),
        ids=random.integers(0, 9, (300, 5)),
        label=random.integers(0, 2, 300).astype(np.float32),
    )
    config: RunConfig = build_run_config(
        {
            "name": "drawn",
            "model": {"onnx": "ranker.onnx"},
            "outputs": [{"name": "y", "kind": "logit", "label": "label"}],
            "data": {"path": "rows.npz", "split": {"by": "order"}},
            "batch": {"max": 64, "serve": [16]},
            "targets": [{"device": "cpu", "backends": ["onnxruntime"]}],
            "output": "run",
        },
        folder,
    )
    with RunDirectory.create(config.output, {}, {}, force=False, resume=False) as directory:
        return accept(RunSettings(config, directory)).context.requests.sample(32)


def test_numbers_have_both_signs_where_the_model_takes_them(tmp_path):
    found = drawn("l = Relu(x)", tmp_path)
    assert (found["x"] < 0).any()
    assert found["x"].shape == (32, 2)


def test_numbers_are_positive_where_the_model_answers_others_with_nan(tmp_path):
    found = drawn("l = Log(x)", tmp_path)
    assert (found["x"] > 0).all()


def test_integers_that_no_table_bounds_are_in_the_range_of_the_data():
    random = np.random.default_rng(0)
    rows = random.integers(-5, 40, (500, 3))
    spec = TensorSpec("i", "int64", (None, 3))
    for columns, bounds, expected in (
        (("a", "b", "c"), None, rows.max(axis=0) + 1),
        (("a", "b", "c"), (range(7), None, None), np.array([7, *rows.max(axis=0)[1:] + 1])),
        (("a",), None, np.full(3, rows.max() + 1)),
    ):
        binding = bounded_by(InputBinding("i", columns, "int64", 2, bounds), rows)
        found = generated_rows([spec], [binding], 4000)["i"]
        assert (found.max(axis=0) == expected - 1).all()
        assert (found.min(axis=0) == 0).all()
    floats = InputBinding("i", ("a", "b", "c"), "float32", 2)
    assert bounded_by(floats, rows.astype(np.float32)) is floats


def test_lists_are_as_long_as_those_of_the_data(tmp_path):
    found = drawn("l = Relu(x)", tmp_path)
    assert found["ids"].shape == (32, 5)
    assert found["ids"].dtype == np.int64
