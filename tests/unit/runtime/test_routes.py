"""Requests of different sizes to different engines of one bundle."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from routed_contents import FP8, FP32, routed
from sample_run import SampleRun

from loka_onnx.bundle.writer import write_bundle
from loka_onnx.runtime import load


@pytest.fixture(scope="module")
def bundle(sample: SampleRun, tmp_path_factory: pytest.TempPathFactory) -> Path:
    contents = routed(sample.contents, (4, FP32), (64, FP8))
    return write_bundle(contents, tmp_path_factory.mktemp("routed") / "bundle")


def rows(count: int) -> np.ndarray:
    return np.random.default_rng(5).standard_normal((count, 16)).astype(np.float32)


@pytest.mark.parametrize(
    ("count", "place"), [(1, FP32), (4, FP32), (5, FP8), (64, FP8), (65, FP8), (300, FP8)]
)
def test_a_request_goes_to_the_engine_of_the_next_size(sample, bundle, tmp_path, count, place):
    alone = dataclasses.replace(sample.contents, engines=(sample.contents.engines[place],))
    expected = load(write_bundle(alone, tmp_path / "alone")).infer({"dense": rows(count)})["ctr"]
    got = load(bundle).infer({"dense": rows(count)})["ctr"]
    np.testing.assert_array_equal(got, expected)


def test_health_sees_the_engine_behind_a_route(sample, bundle, monkeypatch):
    engine = load(bundle)
    (other,) = engine._others
    wrong = np.full((8, 1), np.nan, np.float32)
    monkeypatch.setattr(other._runner, "run", lambda inputs: {"ctr": wrong})
    health = engine.health()
    assert not health.ready
    assert health.detail.startswith(f"engine '{other.entry.id}': output 'ctr' is off by nan")


def test_sizes_of_an_engine_that_does_not_run_here_stay_with_the_main_one(sample, tmp_path):
    gpu = 0
    contents = routed(sample.contents, (4, gpu), (64, FP32), places=(FP32, gpu))
    engine = load(write_bundle(contents, tmp_path / "bundle"))
    assert engine.health().routes == {}
    assert [skipped.engine for skipped in engine.skipped] == [sample.contents.engines[gpu].artifact.id]
    assert engine.infer({"dense": rows(2)})["ctr"].shape == (2, 1)
