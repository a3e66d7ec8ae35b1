"""Every batch size that is served has run before a request comes, and smaller requests are padded to one."""

from dataclasses import FrozenInstanceError, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sample_run import SampleRun

from loka_onnx.bundle.writer import write_bundle
from loka_onnx.engines.onnxruntime.io_binding_session import IoBindingSession
from loka_onnx.engines.onnxruntime.io_binding_settings import IoBindingSettings
from loka_onnx.errors import EngineError
from loka_onnx.runtime import Cause, load
from loka_onnx.runtime.engine import WARM_UPS
from loka_onnx.sessions import onnx_session

ort = pytest.importorskip("onnxruntime", reason="needs onnxruntime: pip install 'loka-onnx[cpu]'")


@pytest.fixture
def bundle(sample: SampleRun, tmp_path: Path) -> Path:
    first, fp32, fp8 = sample.contents.engines
    evaluations = sample.report.evaluations.evaluations
    timed = next(each for each in evaluations if each.engine == fp32.artifact.id and each.latencies)
    engines = (first, replace(fp32, evaluation=timed), fp8)
    return write_bundle(replace(sample.contents, engines=engines), tmp_path / "bundle")


def test_sizes_that_were_timed_are_run_before_the_engine_is_ready(bundle, sessions):
    engine = load(bundle)
    assert engine.entry.evaluation is not None
    assert [latency.batch for latency in engine.entry.evaluation.latencies] == [1024]
    # The self-test first: an engine that is wrong is not warmed up.
    assert sessions.ran == [8, *[1024] * WARM_UPS]
    assert engine.health().warm == (1024,)


def test_an_engine_that_fails_at_a_size_that_it_serves_is_passed_over(sample, bundle, sessions):
    sessions.fail_at(1024, "", EngineError)
    engine = load(bundle)
    # The next engine was not timed, so that it does not run the size.
    assert engine.entry.id == sample.contents.engines[2].artifact.id
    (skipped,) = (each for each in engine.skipped if each.cause is Cause.SELF_TEST)
    assert "no memory for 1024 rows" in skipped.reason
    with pytest.raises(FrozenInstanceError):
        skipped.reason = ""
    with pytest.raises(FrozenInstanceError):
        engine.health().ready = False


def test_a_request_is_padded_to_the_next_size_and_the_answer_is_cut(bundle, monkeypatch):
    sizes = (16, 64)
    launched: list[int] = []

    class Watched(IoBindingSession):
        def _launch(self, bound: Any) -> None:
            launched.append(next(iter(bound.inputs.values())).shape()[0])
            super()._launch(bound)

    def open_session(path: Path, *arguments: Any) -> IoBindingSession:
        return Watched(path, IoBindingSettings("cpu", str(ort.__version__), sizes=sizes))

    exact = load(bundle)
    monkeypatch.setattr(onnx_session, "OnnxSession", open_session)
    engine = load(bundle)
    health = engine.health()
    assert engine.served_sizes == health.served_sizes == sizes
    assert health.warm == (16, 64, 1024)
    rows = np.random.default_rng(3).standard_normal((64, 16)).astype(np.float32)
    for count, ran in ((16, 16), (9, 16), (40, 64), (64, 64)):
        launched.clear()
        answer = engine.infer({"dense": rows[:count]})["ctr"]
        assert launched == [ran]
        assert answer.shape == (count, 1)
        np.testing.assert_allclose(answer, exact.infer({"dense": rows[:count]})["ctr"], atol=1e-5)
    # Padding that is most of the work is not done: three rows run as they come.
    launched.clear()
    assert engine.infer({"dense": rows[:3]})["ctr"].shape == (3, 1)
    assert launched == []
    buckets = {each.batch: each.requests for each in engine.metrics.snapshot().latency}
    assert buckets == {"16": 3, "64": 2}
