"""The trial in a child process: it names the batch that ends ONNX Runtime, and leaves other faults alone."""

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx_text import parsed

from loka_onnx.core.artifact import ModelArtifact, OutputKind, OutputSpec
from loka_onnx.export.onnx_model import import_onnx
from loka_onnx.export.preflight import Batches, Fault
from loka_onnx.pipeline.survival import find_fatal_batch

pytestmark = pytest.mark.slow

LAYERS = {
    "GRU": "all, last = GRU<hidden_size=16>(steps, w3, r3)",
    "LSTM": "all, last, cells = LSTM<hidden_size=16>(steps, w4, r4)",
}


def ranker(folder: Path, op: str, rows: str = "some = Compress<axis=0>(x, known)") -> ModelArtifact:
    """y (n, 1) of a recurrent layer over the rows of x (n, 16) whose id is not 0."""
    body = f"""known = Greater(ids, zero)
        {rows}
        history = Reshape(some, lists)
        steps = Transpose<perm=[1,0,2]>(history)
        [recurrent] {LAYERS[op]}
        state = Squeeze(last, first)
        found = NonZero(known)
        at = Transpose<perm=[1,0]>(found)
        joined = ScatterND(x, at, state)
        y = MatMul(joined, head)"""
    random = np.random.default_rng(0)
    shapes = {"w3": (1, 48, 4), "r3": (1, 48, 16), "w4": (1, 64, 4), "r4": (1, 64, 16), "head": (16, 1)}
    constants = {name: random.standard_normal(shape) for name, shape in shapes.items()}
    constants |= {"lists": np.array([-1, 4, 4]), "zero": np.array(0), "first": np.array([0])}
    model = parsed(body, constants, inputs="float[n,16] x, int64[n] ids", outputs="float[n,1] y")
    onnx.save(model, folder / "foreign.onnx")
    return import_onnx(
        folder / "foreign.onnx", folder / "model.onnx", (OutputSpec("y", OutputKind.LOGIT, "label"),)
    )


def batches(ids: list[int], smallest: int = 1) -> Batches:
    x = np.random.default_rng(1).standard_normal((len(ids), 16)).astype(np.float32)
    return Batches({"x": x, "ids": np.array(ids)}, smallest, 8, threads=1)


@pytest.mark.parametrize("op", LAYERS)
def test_the_batch_that_ends_the_process_is_named(tmp_path, op):
    model = ranker(tmp_path, op)
    finding = find_fatal_batch(model.path, model.other_products, batches([0, 1, 1, 1]))
    assert finding is not None and finding.fault is Fault.FAILS
    assert finding.operator == f"node 'recurrent/{op.lower()}' ({op})"
    assert finding.evidence.startswith("a batch of 1 rows: a process that ran it died of SIG")


def test_a_later_batch_is_named_too(tmp_path):
    """Rows 2 and 3 hold one that is known, and so do rows 4 and 5."""
    model = ranker(tmp_path, "GRU")
    assert find_fatal_batch(model.path, model.other_products, batches([1, 1, 1, 0, 0, 1], smallest=2)) is None
    last = find_fatal_batch(model.path, model.other_products, batches([1, 1, 1, 1, 0, 0], smallest=2))
    assert last is not None and last.evidence.startswith("a batch of 2 rows, from row 4 on: ")


def test_a_layer_that_always_has_rows_and_errors_that_are_raised_are_left_to_preflight(tmp_path):
    always = ranker(tmp_path, "GRU", "some = Identity(x)")
    # Its ScatterND fails, by an exception, where an id is 0.
    assert find_fatal_batch(always.path, always.other_products, batches([1, 1])) is None
    assert find_fatal_batch(always.path, always.other_products, batches([0, 0])) is None
