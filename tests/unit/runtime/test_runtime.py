import logging
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
from sample_run import expectation

from loka_onnx.bundle.writer import BundleContents, write_bundle
from loka_onnx.errors import DataError, EngineError
from loka_onnx.runtime import load


@pytest.fixture
def bundle(original: Path) -> Path:
    return original


def with_engines(contents: BundleContents, *places: int) -> BundleContents:
    return replace(contents, engines=tuple(contents.engines[i] for i in places))


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
    exact = sample.contents.fallback.outputs["ctr"]
    np.testing.assert_allclose(engine.infer(sample.contents.sample)["ctr"], exact, atol=1e-5)


def test_an_engine_that_answers_wrong_is_never_ready(sample, tmp_path, caplog):
    wrong = expectation(np.zeros(8))
    engines = (replace(sample.contents.engines[1], expectation=wrong),)
    contents = replace(sample.contents, engines=engines)
    with caplog.at_level(logging.WARNING, "loka_onnx.runtime"):
        engine = load(write_bundle(contents, tmp_path / "bundle"))
    assert engine.health().is_fallback
    assert "the self-test fails" in engine.skipped[0].reason
    assert "output 'ctr' is off by" in caplog.text
    broken = replace(contents, fallback=wrong)
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


def batch(*shape: int) -> np.ndarray:
    return np.zeros(shape, np.float32)


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        ({}, r"missing \['dense'\], unknown \[\]"),
        ({"dense": batch(2, 16), "other": batch(2, 16)}, r"unknown \['other'\]"),
        ({"dense": np.zeros((2, 16))}, r"float64\(2, 16\), the model takes float32\(None, 16\)"),
        ({"dense": batch(2, 5)}, r"float32\(2, 5\)"),
        ({"dense": batch(16)}, r"float32\(16,\)"),
        ({"dense": batch(0, 16)}, r"batches of 1 to 4096"),
        ({"dense": batch(4097, 16)}, r"batches of 1 to 4096"),
    ],
)
def test_requests_that_the_engine_was_not_built_for(bundle, request_, message):
    with pytest.raises(DataError, match=message):
        load(bundle).infer(request_)
