"""What a loaded engine counts, with and without prometheus_client."""

import sys
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest

from loka_onnx.errors import DataError, EngineError, MissingPackage
from loka_onnx.runtime import Engine, Metrics, load
from loka_onnx.runtime.metrics import LATENCY_BOUNDS_S, MOST_SIZES, EngineSeries


def rows(count: int) -> dict[str, np.ndarray]:
    return {"dense": np.random.default_rng(2).standard_normal((count, 16)).astype(np.float32)}


@pytest.fixture
def engine(original: Path) -> Iterator[Engine]:
    with load(original) as engine:
        yield engine


def test_requests_are_counted_by_engine_and_batch(engine):
    for count in (1, 5, 8, 8, 4096):
        engine.infer(rows(count))
    now = engine.metrics.snapshot()
    assert {(each.engine, each.batch): (each.requests, each.rows) for each in now.latency} == {
        (engine.entry.id, "1"): (1, 1),
        (engine.entry.id, "8"): (3, 21),
        (engine.entry.id, "4096"): (1, 4096),
    }
    assert (now.requests, now.rows, now.running) == (5, 4118, 0)
    assert all(0 < each.seconds < 60 for each in now.latency)


def test_errors_are_counted_by_kind(engine, monkeypatch):
    with pytest.raises(DataError):
        engine.infer({})
    with pytest.raises(DataError):
        engine.infer({"dense": [1.0, 2.0]})

    for error in (EngineError("it fails"), ZeroDivisionError()):
        monkeypatch.setattr(engine._runner, "run", Mock(side_effect=error))
        with pytest.raises(type(error)):
            engine.infer(rows(2))
    engine.close()
    with pytest.raises(EngineError, match="the engine is closed"):
        engine.infer(rows(2))
    now = engine.metrics.snapshot()
    assert now.errors == {"request": 2, "engine": 1, "internal": 1, "closed": 1}
    assert now.requests == 0


@pytest.mark.parametrize(
    ("sizes", "largest", "count", "bucket"),
    [
        ((), 4096, 1, "1"),
        ((), 4096, 3, "4"),
        ((), 3000, 3000, "4096"),
        ((), 1, 1, "1"),
        ((256, 1024), 4096, 7, "256"),
        ((256, 1024), 4096, 257, "1024"),
        ((256, 1024), 4096, 1025, "more"),
    ],
)
def test_the_bucket_of_a_batch(sizes, largest, count, bucket):
    series = EngineSeries("e", sizes, largest)
    metrics = Metrics()
    metrics.engines = ((series, ("e", "b", "p", "a")),)
    metrics.answered(series.of(count), count, 2e-4)
    (found,) = metrics.snapshot().latency
    assert (found.batch, found.rows) == (bucket, count)
    # A bound belongs to its bucket, as `le` says.
    assert found.counts.index(1) == LATENCY_BOUNDS_S.index(2e-4)


def test_prometheus_reads_the_same_numbers(engine, original):
    prometheus = pytest.importorskip(
        "prometheus_client", reason="needs prometheus_client: pip install 'loka-onnx[serve]'"
    )
    before = prometheus.generate_latest(prometheus.REGISTRY)
    for count in (1, 5, 8):
        engine.infer(rows(count))
    with pytest.raises(DataError):
        engine.infer({})
    registry = prometheus.CollectorRegistry()
    registry.register(engine.metrics)
    # A second engine of the process has a registry of its own, or shares none of its names.
    prometheus.CollectorRegistry().register(load(original).metrics)
    labels = {"engine": engine.entry.id, "batch": "8"}
    described = {"engine": engine.entry.id, "backend": "onnxruntime", "plan": "fp32", "architecture": "cpu"}
    for name, labelled, expected in (
        ("request_seconds_count", labels, 2),
        ("request_seconds_bucket", {**labels, "le": "+Inf"}, 2),
        ("rows_total", labels, 13),
        ("errors_total", {"kind": "request"}, 1),
        ("skipped_engines", {"reason": "untrusted"}, 1),
        ("skipped_engines", {"reason": "version"}, 0),
        ("fallback", {}, 0),
        ("running_requests", {}, 0),
        ("engine_info", described, 1),
    ):
        assert registry.get_sample_value(f"loka_onnx_{name}", labelled) == expected, name
    (family,) = (f for f in registry.collect() if f.name == "loka_onnx_request_seconds")
    own = [s for s in family.samples if s.name.endswith("_bucket") and s.labels["batch"] == "8"]
    assert [s.value for s in own] == sorted(s.value for s in own)
    assert b"# TYPE loka_onnx_request_seconds histogram" in prometheus.generate_latest(registry)
    # Nothing is in the registry of the process.
    assert b"loka_onnx" not in before + prometheus.generate_latest(prometheus.REGISTRY)


def test_without_prometheus_the_numbers_are_there_and_the_collector_says_what_it_needs(engine, monkeypatch):
    for name in [name for name in sys.modules if name.split(".")[0] == "prometheus_client"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    engine.infer(rows(1))
    assert engine.metrics.snapshot().requests == 1
    with pytest.raises(MissingPackage, match=r"prometheus_client is not installed(?s:.*)snapshot\(\)"):
        list(engine.metrics.collect())


def test_labels_are_few_however_many_sizes_there_are():
    metrics = Metrics()
    series = EngineSeries("e", range(1, 4097), 4096)
    for rows in range(1, 4098):
        metrics.answered(series.of(rows), rows, 1e-3)
    found = {each.batch: each.requests for each in series.histograms()}
    assert len(found) == MOST_SIZES + 1
    assert (found["4096"], found["more"], sum(found.values())) == (128, 1, 4097)
    assert len(list(EngineSeries("e", (), 10**200)._sizes)) <= MOST_SIZES
