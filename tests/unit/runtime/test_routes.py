"""Requests of different sizes to different engines of one bundle."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sample_run import SampleRun

from loka_onnx.bundle.writer import BundleContents, write_bundle
from loka_onnx.core.evaluation import Choice, Route
from loka_onnx.errors import EngineError
from loka_onnx.runtime import Cause, Engine, load, loading

FP32, FP8 = 1, 2
"""Places of two engines for this host among those of the sample; they answer differently."""


def routed(
    contents: BundleContents, *routes: tuple[int, int], places: tuple[int, ...] = (FP32, FP8)
) -> BundleContents:
    """The contents with the engines of these places, the first one main, and routes of (rows, place)."""
    artifacts = [engine.artifact for engine in contents.engines]
    table = tuple(Route(rows, artifacts[place].id, artifacts[place].plan) for rows, place in routes)
    main = artifacts[places[0]]
    choice = dataclasses.replace(
        contents.choice.targets[0], target=main.target, engine=main.id, plan=main.plan, routes=table
    )
    engines = tuple(contents.engines[place] for place in places)
    return dataclasses.replace(contents, engines=engines, choice=Choice((choice,)))


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


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Engine]:
    """Engines that were made, loaded or not."""
    seen: list[Engine] = []

    class Watched(Engine):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            seen.append(self)

    monkeypatch.setattr(loading, "Engine", Watched)
    return seen


@pytest.mark.parametrize("error", [EngineError, RuntimeError])
def test_an_engine_that_fails_at_the_size_of_its_route_loses_it(sample, tmp_path, made, sessions, error):
    sessions.fail_at(300, "fp8-safe", error)
    place = write_bundle(routed(sample.contents, (16, FP32), (300, FP8)), tmp_path / "bundle")
    with load(place) as engine:
        fp32, fp8 = (sample.contents.engines[each].artifact.id for each in (FP32, FP8))
        health = engine.health()
        assert (health.ready, health.engine, health.routes) == (True, fp32, {})
        # What went to the other one has run on this one instead.
        assert health.warm == (16, 300)
        (skipped,) = health.skipped
        assert (skipped.engine, skipped.cause) == (fp8, Cause.SELF_TEST)
        assert skipped.reason.startswith("300 rows: ")
        assert engine.infer({"dense": np.zeros((300, 16), np.float32)})["ctr"].shape == (300, 1)
        assert [each.entry.id for each in made if not each._gate.is_closed] == [fp32]


def test_a_main_engine_that_fails_at_its_route_is_passed_over(sample, tmp_path, made, sessions):
    sessions.fail_at(16, "fp32", EngineError)
    place = write_bundle(routed(sample.contents, (16, FP32), (300, FP8)), tmp_path / "bundle")
    with load(place) as engine:
        assert engine.entry.id == sample.contents.engines[FP8].artifact.id
        assert engine.health().ready
        assert [each for each in made if not each._gate.is_closed] == [engine]


def test_what_stops_loading_frees_the_engines_that_are_open(sample, tmp_path, made, sessions):
    sessions.fail_at(300, "fp8-safe", KeyboardInterrupt)
    place = write_bundle(routed(sample.contents, (16, FP32), (300, FP8)), tmp_path / "bundle")
    with pytest.raises(KeyboardInterrupt):
        load(place)
    assert [each._gate.is_closed for each in made] == [True, True]
