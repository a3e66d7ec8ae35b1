"""What a loaded engine counts, with and without prometheus_client."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx.parser
import pytest
from sample_run import SampleRun

from loka_onnx.bundle.format.files import verify_bundle
from loka_onnx.bundle.writer import write_bundle
from loka_onnx.errors import DataError, EngineError, MissingPackage
from loka_onnx.runtime import Engine, Metrics, Serving, load
from loka_onnx.runtime.gate import Gate
from loka_onnx.runtime.metrics import LATENCY_BOUNDS_S, MOST_SIZES, MOST_TENSORS, EngineSeries
from loka_onnx.runtime.saturation import Look, Sampler, limits_of_inputs, look_at


def rows(count: int) -> dict[str, np.ndarray]:
    return {"dense": np.random.default_rng(2).standard_normal((count, 16)).astype(np.float32)}


@pytest.fixture(scope="module")
def bundle(sample: SampleRun, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_bundle(sample.contents, tmp_path_factory.mktemp("metrics") / "bundle")


@pytest.fixture
def engine(bundle: Path) -> Iterator[Engine]:
    with load(bundle) as engine:
        yield engine


def test_requests_are_counted_by_engine_and_batch(engine: Engine) -> None:
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


def test_what_loading_does_is_no_request(engine: Engine) -> None:
    engine.health()
    engine.warm_up([1, 4])
    assert engine.metrics.snapshot().requests == 0


def test_errors_are_counted_by_kind(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DataError):
        engine.infer({})
    with pytest.raises(DataError):
        engine.infer({"dense": [1.0, 2.0]})

    def fail(inputs: object) -> None:
        raise EngineError("it fails")

    def break_(inputs: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(engine._runner, "run", fail)
    with pytest.raises(EngineError, match="it fails"):
        engine.infer(rows(2))
    monkeypatch.setattr(engine._runner, "run", break_)
    with pytest.raises(ZeroDivisionError):
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
def test_the_bucket_of_a_batch(sizes: tuple[int, ...], largest: int, count: int, bucket: str) -> None:
    series = EngineSeries("e", sizes, largest)
    metrics = Metrics()
    metrics.describe_engines([(series, ("e", "b", "p", "a"))], (), Gate(), is_fallback=False)
    metrics.answered(series.of(count), count, 2e-4)
    (found,) = metrics.snapshot().latency
    assert (found.batch, found.rows) == (bucket, count)
    # A bound belongs to its bucket, as `le` says.
    assert found.counts.index(1) == LATENCY_BOUNDS_S.index(2e-4)


def test_metrics_can_be_off(bundle: Path) -> None:
    engine = load(bundle, serving=Serving(metrics=False))
    engine.infer(rows(2))
    with pytest.raises(DataError):
        engine.infer({})
    now = engine.metrics.snapshot()
    assert (now.requests, sum(now.errors.values())) == (0, 0)


def test_prometheus_reads_the_same_numbers(engine: Engine, bundle: Path) -> None:
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
    prometheus.CollectorRegistry().register(load(bundle).metrics)
    labels = {"engine": engine.entry.id, "batch": "8"}
    value = registry.get_sample_value
    assert value("loka_onnx_request_seconds_count", labels) == 2
    assert value("loka_onnx_request_seconds_bucket", {**labels, "le": "+Inf"}) == 2
    (family,) = (f for f in registry.collect() if f.name == "loka_onnx_request_seconds")
    own = [s for s in family.samples if s.name.endswith("_bucket") and s.labels["batch"] == "8"]
    assert [s.value for s in own] == sorted(s.value for s in own)
    assert value("loka_onnx_rows_total", labels) == 13
    assert value("loka_onnx_errors_total", {"kind": "request"}) == 1
    assert value("loka_onnx_skipped_engines", {"reason": "untrusted"}) == 1
    assert value("loka_onnx_skipped_engines", {"reason": "version"}) == 0
    assert value("loka_onnx_fallback") == 0
    assert value("loka_onnx_running_requests") == 0
    described = {"engine": engine.entry.id, "backend": "onnxruntime", "plan": "fp32", "architecture": "cpu"}
    assert value("loka_onnx_engine_info", described) == 1
    assert b"# TYPE loka_onnx_request_seconds histogram" in prometheus.generate_latest(registry)
    # Nothing is in the registry of the process.
    assert b"loka_onnx" not in before + prometheus.generate_latest(prometheus.REGISTRY)


def test_without_prometheus_the_numbers_are_there_and_the_collector_says_what_it_needs(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "prometheus_client"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    engine.infer(rows(1))
    assert engine.metrics.snapshot().requests == 1
    with pytest.raises(MissingPackage, match=r"prometheus_client is not installed(?s:.*)snapshot\(\)"):
        list(engine.metrics.collect())


def test_values_are_looked_at_where_the_plan_has_scales(sample: SampleRun, tmp_path: Path) -> None:
    fp8 = replace(sample.contents, engines=(sample.contents.engines[2],))
    bundle = write_bundle(fp8, tmp_path / "fp8")
    engine = load(bundle, serving=Serving(sample_every=2))
    # The sample's plan quantizes what its first layer reads with amax 6.
    assert engine.sampler is not None
    assert engine.sampler.limits == {"dense": pytest.approx(6.0)}
    asked = rows(4)
    asked["dense"][0, :4] = [6.5, -7.0, np.nan, np.inf]
    for _ in range(6):
        engine.infer(asked)
    now = engine.metrics.snapshot()
    assert now.sampled == 3
    assert now.looks["dense"] == Look(3 * 64, 3 * 2, 3 * 2)
    # One row holds NaN, and so does its answer.
    assert now.looks["ctr"] == Look(3 * 4, 3 * 1, None)
    prometheus = pytest.importorskip(
        "prometheus_client", reason="needs prometheus_client: pip install 'loka-onnx[serve]'"
    )
    registry = prometheus.CollectorRegistry()
    registry.register(engine.metrics)
    value = registry.get_sample_value
    assert value("loka_onnx_sampled_requests_total") == 3
    assert value("loka_onnx_sampled_saturated_total", {"tensor": "dense"}) == 6
    assert value("loka_onnx_sampled_nonfinite_total", {"tensor": "ctr"}) == 3
    assert value("loka_onnx_sampled_saturated_total", {"tensor": "ctr"}) is None
    assert load(bundle, serving=Serving(sample_every=0)).sampler is None


def test_a_plan_without_scales_is_not_sampled(engine: Engine) -> None:
    assert engine.entry.plan == "fp32"
    assert engine.sampler is None


def test_one_request_in_so_many_is_due() -> None:
    sampler = Sampler({}, 3)
    assert [sampler.is_due() for _ in range(7)] == [False, False, True, False, False, True, False]


def test_a_large_request_is_looked_at_in_part() -> None:
    held = np.zeros((4096, 3), np.float32)
    held[255:257] = 9.0
    looks = Sampler({"x": 4.0}, 1).look({"x": held, "ids": np.arange(4096)}, {"y": held[:, 0]})
    assert looks == {"x": Look(256 * 3, 0, 3), "y": Look(256, 0, None)}


def test_what_is_seen_merges_in_any_order() -> None:
    looks = [Look(3, 1, None), Look(5, 0, 2), Look(7, 2, 0)]
    first, second, third = looks
    assert first.merge(second).merge(third) == first.merge(second.merge(third)) == Look(15, 3, 2)
    assert Look().merge(first) == first
    assert look_at(np.array([1.0, -3.0, np.nan, -np.inf], np.float16), 2.0) == Look(4, 2, 1)


GRAPH = """
ranker (float[b,2] x, float[b,2] z, int64[b] item, float[b,4] low) => (float[b,1] y) {
    e = Gather(table, item)
    c = Concat<axis=1>(x, e)
    flat = Flatten(c)
    [first] a = MatMul(flat, w)
    [second] b = MatMul(w, z)
    moved = Relu(low)
    [third] d = MatMul(moved, w)
    [fourth] f = MatMul(x, w)
    y = Add(a, b)
}
"""


def test_an_input_has_the_least_range_of_the_sites_that_read_it_unchanged(bundle: Path) -> None:
    graph = onnx.parser.parse_graph(GRAPH)
    graph.initializer.append(onnx.numpy_helper.from_array(np.zeros((2, 2), np.float32), "w"))
    manifest = verify_bundle(bundle)
    (spec,) = manifest.inputs
    inputs = tuple(replace(spec, name=name) for name in ("x", "z", "item", "low"))
    manifest = replace(manifest, inputs=inputs)
    limits = limits_of_inputs(graph, {"first": 4.0, "second": 3.0, "third": 1.0, "fourth": 9.0}, manifest)
    # `third` reads what Relu made of `low`; the ids pass through Gather, which reads other values.
    assert limits == {"x": 4.0, "z": 3.0}


def test_labels_are_few_however_many_tensors_and_sizes_there_are() -> None:
    metrics = Metrics()
    looks = {f"c{n}": Look(2, 1) for n in range(200)} | {"ranged": Look(2, 0, 1)}
    metrics.looked(looks)
    metrics.looked(looks)
    sampled = next(each for each in metrics.collect() if each.name == "loka_onnx_sampled_values")
    counts = {each.labels["tensor"]: each.value for each in sampled.samples if each.name.endswith("_total")}
    assert len(counts) == MOST_TENSORS + 1
    assert (counts["ranged"], counts["c0"], counts["other"]) == (4, 4, 4 * (201 - MOST_TENSORS))
    assert len(metrics.snapshot().looks) == 201
    assert set(metrics.snapshot().looks) == set(looks)

    series = EngineSeries("e", range(1, 4097), 4096)
    for rows in range(1, 4098):
        metrics.answered(series.of(rows), rows, 1e-3)
    found = {each.batch: each.requests for each in series.histograms()}
    assert len(found) == MOST_SIZES + 1
    assert (found["4096"], found["more"], sum(found.values())) == (128, 1, 4097)
    assert len(list(EngineSeries("e", (), 10**200)._sizes)) <= MOST_SIZES
