"""Magnitudes of every tensor, against numpy over all rows; NaN is refused, an infinity is a magnitude."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from small_models import LOGIT, artifact_of, columns_of, dataset_of

from loka_onnx.calibration.calibrate import ProbeOptions, ProfiledModel, calibrate, update
from loka_onnx.calibration.passes.executors import LocalExecutor
from loka_onnx.calibration.passes.probe import PassOptions, Probe
from loka_onnx.core.artifact import ModelArtifact
from loka_onnx.core.statistics import TensorRange
from loka_onnx.data.dataset import Dataset
from loka_onnx.errors import CalibrationError
from loka_onnx.sessions.onnx_session import OnnxSession

BODY = """
    [left] a = MatMul(x, w_left)
    t = Transpose(a)  u = Transpose(t)
    b = Relu(u)  c = Exp(a)
    q = Div(b, c)
    [head] y = MatMul(q, w_head)
"""


def measure(artifact: ModelArtifact, data: Dataset, folder: Path, **options: int) -> dict[str, TensorRange]:
    return Probe(artifact, (), data, PassOptions(**options), LocalExecutor(2)).magnitudes(folder)


def test_every_tensor_that_is_no_constant_against_numpy(tmp_path):
    artifact = artifact_of(tmp_path, BODY)
    columns = columns_of(700)
    found = measure(artifact, dataset_of(tmp_path, columns), tmp_path, batch_size=128)
    model = onnx.load(artifact.path)
    computed = [name for node in model.graph.node for name in node.output]
    assert list(found) == ["x", *computed]
    del model.graph.output[:]
    model.graph.output.extend(onnx.helper.make_empty_tensor_value_info(name) for name in computed)
    onnx.save(model, tmp_path / "all.onnx")
    values = OnnxSession(tmp_path / "all.onnx").run({"x": columns["x"]}) | {"x": columns["x"]}
    for name, known in found.items():
        magnitude = np.abs(values[name])
        # Batches of another size round sums in another order.
        assert known.amax == pytest.approx(magnitude.max(), rel=1e-5), name
        if name == "c":
            assert known.smallest == pytest.approx(magnitude.min(), rel=1e-5)
        else:
            assert known.smallest is None


def test_an_infinity_counts_as_the_largest_number_and_nan_is_named(tmp_path):
    body = "r = Relu(x) n = Neg(r) l = Log(r) e = Exp(l) [head] y = MatMul(e, w_head)"
    columns = columns_of(64)
    found = measure(artifact_of(tmp_path, body), dataset_of(tmp_path, columns), tmp_path)
    # Zeros do not count as the smallest of what a logarithm is taken of.
    assert found["r"].smallest == columns["x"][columns["x"] > 0].min()
    # Log(0) is -inf, and its exponential is 0 again.
    assert found["l"].amax == float(np.finfo(np.float32).max)
    assert found["e"].amax == pytest.approx(found["r"].amax, rel=1e-5)
    body = "l = Log(x) e = Exp(l) [head] y = MatMul(e, w_head)"
    with pytest.raises(CalibrationError) as caught:
        measure(artifact_of(tmp_path, body), dataset_of(tmp_path, columns_of(64)), tmp_path)
    assert caught.value.code == "E0507"
    assert caught.value.what.startswith("tensor 'l' is not a number in batch 1 of 1 of 'clicks-0412")


def test_calibration_measures_them_where_it_is_asked_to_and_rows_are_added(tmp_path):
    artifact = artifact_of(tmp_path)
    first = dataset_of(tmp_path / "one", columns_of(300, 1))
    options = ProbeOptions(threads=1, draws=1, magnitudes=True)
    profile = calibrate(artifact, (LOGIT,), first, tmp_path, options)
    assert set(profile.tensors) == {"x", "a", "b", "c", "d", "e", "f", "g", "y"}
    assert list(profile.seconds)[:2] == ["ranges", "magnitudes"]
    larger = columns_of(300, 2)
    larger["x"] *= 3
    more = dataset_of(tmp_path / "two", larger)
    # The options of an update are those of the profile.
    plain = ProbeOptions(threads=1, draws=1)
    both = update(profile, ProfiledModel(artifact, (LOGIT,)), more, tmp_path, plain)
    assert both.tensors["x"].amax == np.abs(larger["x"]).max() > profile.tensors["x"].amax
    assert calibrate(artifact, (LOGIT,), first, tmp_path, plain).tensors == {}
