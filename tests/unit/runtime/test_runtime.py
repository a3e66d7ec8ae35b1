import dataclasses
import logging
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
from sample_run import expectation

from loka_onnx.bundle.writer import BundleContents, write_bundle
from loka_onnx.engines.tensorrt import spec as tensorrt
from loka_onnx.errors import DataError, EngineError
from loka_onnx.runtime import load
from loka_onnx.sessions import cuda, host_devices
from loka_onnx.sessions.cuda import CudaDevice
from loka_onnx.sessions.runner import Runner


@pytest.fixture
def bundle(original: Path) -> Path:
    return original


def rows(count: int) -> np.ndarray:
    return np.random.default_rng(2).standard_normal((count, 16)).astype(np.float32)


def with_engines(contents: BundleContents, *places: int) -> BundleContents:
    return dataclasses.replace(contents, engines=tuple(contents.engines[i] for i in places))


def test_the_first_engine_that_runs_here_is_loaded(sample, bundle, caplog):
    with caplog.at_level(logging.INFO, "loka_onnx.runtime"):
        engine = load(bundle)
    gpu, fp32, _ = (e.artifact for e in sample.contents.engines)
    assert engine.entry.id == fp32.id
    assert [s.engine for s in engine.skipped] == [gpu.id]
    assert "this engine of tensorrt_rtx on sm89 is a program" in engine.skipped[0].reason
    assert "`trust=True`" in caplog.text
    assert caplog.text.count(f"engine '{gpu.id}' is not used") == 1
    assert f"engine '{fp32.id}' is ready" in caplog.text


def with_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host with an RTX 4090 and the library that the engine was built by."""
    gpu = CudaDevice(0, "NVIDIA GeForce RTX 4090", "sm89")
    for module in (cuda, host_devices):
        monkeypatch.setattr(module, "list_cuda_devices", lambda: (gpu,))
    library = SimpleNamespace(__name__="tensorrt_rtx", __version__="1.5", __spec__=object())
    monkeypatch.setitem(sys.modules, "tensorrt_rtx", library)


class Answers(Runner):
    """Stands for a TensorRT engine: answers what the bundle expects, or something else."""

    def __init__(self, answer: np.ndarray) -> None:
        self.answer, self.closed = answer, False

    def run(self, inputs):
        return {"ctr": self.answer[np.arange(len(inputs["dense"])) % len(self.answer)]}

    def close(self):
        self.closed = True


def test_a_program_is_loaded_only_from_a_trusted_origin(sample, bundle, monkeypatch):
    gpu = sample.contents.engines[0]
    opened = []

    def open_engine(spec, path, architecture, version, *, is_new):
        opened.append((path.name, architecture, version))
        return Answers(gpu.expectation.outputs["ctr"])

    monkeypatch.setattr(tensorrt, "open_engine", open_engine)
    assert load(bundle).entry.backend == "onnxruntime"
    assert opened == []
    with_gpu(monkeypatch)
    assert load(bundle).entry.backend == "onnxruntime"
    assert opened == []
    engine = load(bundle, trust=True)
    assert engine.health().trust == "caller"
    assert engine.entry.id == gpu.artifact.id
    assert opened == [("engine.bin", "sm89", "1.5")]
    engine.close()
    assert engine._runner.closed


def test_answers_are_those_of_the_model_that_was_evaluated(sample, tmp_path):
    engine = load(write_bundle(with_engines(sample.contents, 2), tmp_path / "bundle"))
    assert engine.entry.simulated
    got = engine.infer(sample.contents.sample)["ctr"]
    expected = sample.contents.engines[2].expectation.outputs["ctr"]
    exact = sample.contents.fallback.outputs["ctr"]
    np.testing.assert_allclose(got, expected, atol=1e-5)
    # FP8 was really there: the exact answers are farther away than any rounding.
    assert np.abs(got - exact).max() > 1e-3


def test_without_an_engine_for_this_host_the_fp32_model_serves(sample, tmp_path, caplog):
    with caplog.at_level(logging.WARNING, "loka_onnx.runtime"):
        engine = load(write_bundle(with_engines(sample.contents, 0), tmp_path / "bundle"))
    assert engine.health().is_fallback
    assert "no emitted engine runs here; serving the FP32 model" in caplog.text
    answer = engine.infer({"dense": rows(3)})
    assert answer["ctr"].shape == (3, 1)


def test_an_engine_that_answers_wrong_is_never_ready(sample, tmp_path, caplog):
    wrong = expectation(np.zeros(8))
    engines = (dataclasses.replace(sample.contents.engines[1], expectation=wrong),)
    contents = dataclasses.replace(sample.contents, engines=engines)
    with caplog.at_level(logging.WARNING, "loka_onnx.runtime"):
        engine = load(write_bundle(contents, tmp_path / "bundle"))
    assert engine.health().is_fallback
    assert "the self-test fails" in engine.skipped[0].reason
    assert "output 'ctr' is off by" in caplog.text
    broken = dataclasses.replace(contents, fallback=wrong)
    with pytest.raises(EngineError, match=r"no engine of the bundle runs here[\s\S]*self-test fails"):
        load(write_bundle(broken, tmp_path / "broken"))


def test_health_notices_an_engine_that_goes_wrong(bundle, monkeypatch):
    engine = load(bundle)
    monkeypatch.setattr(engine._runner, "run", lambda inputs: {"ctr": np.full((8, 1), np.nan, np.float32)})
    health = engine.health()
    assert not health.ready
    assert "output 'ctr' is off by nan" in health.detail

    monkeypatch.setattr(engine._runner, "run", Mock(side_effect=EngineError("ONNX Runtime failed")))
    assert engine.health().detail == "ONNX Runtime failed"


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        ({}, r"missing \['dense'\], unknown \[\]"),
        ({"dense": rows(2), "other": rows(2)}, r"unknown \['other'\]"),
        ({"dense": rows(2).astype(np.float64)}, r"float64\(2, 16\), the model takes float32\(None, 16\)"),
        ({"dense": rows(2)[:, :5]}, r"float32\(2, 5\)"),
        ({"dense": rows(2)[0]}, r"float32\(16,\)"),
        ({"dense": rows(0)}, r"batches of 1 to 4096"),
        ({"dense": rows(4097)}, r"batches of 1 to 4096"),
    ],
)
def test_requests_that_the_engine_was_not_built_for(bundle, request_, message):
    with pytest.raises(DataError, match=message):
        load(bundle).infer(request_)
