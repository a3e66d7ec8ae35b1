"""The monitor of a serving process: what it measures, what it refuses, and that it stays out of the way."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from drift_models import BATCH, NAMES, baseline, drift_of, live_columns
from prometheus_client.parser import text_string_to_metric_families

from loka_onnx.core import serde
from loka_onnx.errors import ConfigError, MissingPackage
from loka_onnx.operations.drift.monitor import Monitor, MonitorOptions
from loka_onnx.operations.drift.report import DriftReport, Measure

ALL = MonitorOptions(sample_rate=1.0, window=16, pending=100, seed=1)


@pytest.fixture
def monitor() -> Iterator[Monitor]:
    with Monitor(baseline(), ALL) as opened:
        yield opened


def feed_in_calls(monitor: Monitor, x: np.ndarray, rows: int = 37) -> None:
    for start in range(0, len(x), rows):
        monitor.feed({"x": x[start : start + rows]})
    assert monitor.flush(30)


def largest(monitor: Monitor) -> float:
    """Largest magnitude of the input in the window."""
    report = monitor.report()
    assert report is not None
    return next(tensor for tensor in report.tensors if tensor.tensor == "x").range.live_amax


def metrics(monitor: Monitor) -> dict[tuple[str, ...], float]:
    """Value of each sample by its name and its labels' values, in the order of their names."""
    found: dict[tuple[str, ...], float] = {}
    for family in text_string_to_metric_families(monitor.text()):
        for sample in family.samples:
            assert (sample.name, *sample.labels.values()) not in found
            assert sample.name.endswith("_total") == (family.type == "counter")
            found[sample.name, *sample.labels.values()] = sample.value
    return found


def test_rows_of_many_calls_are_compared_as_a_file_of_them_is(monitor):
    """Batches are those of the file, whatever the calls were; the window holds them all."""
    x = live_columns() * np.float32(1.4)
    feed_in_calls(monitor, x)
    wanted, found = drift_of(x[: len(x) // BATCH * BATCH]), monitor.report()
    assert found is not None and found.is_judged
    assert found.tensors == wanted.tensors
    assert found.live_rows == wanted.live_rows == 16 * BATCH
    pairs = [sorted(each.sites, key=lambda s: s.site) for each in (found, wanted)]
    for ours, theirs in zip(*pairs, strict=True):
        assert (ours.site, ours.live_saturated) == (theirs.site, theirs.live_saturated)
        # Two sessions may add in another order.
        assert ours.live_noise == pytest.approx(theirs.live_noise, rel=1e-6)
    # What was not measured (KL) is told from 0, also in the document.
    assert found.outputs[0].live_kl is None and found.outputs[0].standard_error == np.inf
    assert serde.loads(DriftReport, serde.dumps(found)) == found
    assert {a.measure for a in found.alarms} == {a.measure for a in wanted.alarms} - {Measure.DELTA_NE}


def test_the_metrics_of_a_change(monitor):
    x = live_columns() * np.float32(1.4)
    x[:, 3] *= 2
    x[5, 0] = np.nan
    feed_in_calls(monitor, x)
    report, found = monitor.report(), metrics(monitor)
    assert report is not None
    tensor = next(t for t in report.tensors if t.tensor == "x")
    site = next(s for s in report.sites if s.site == "left")
    elements = 16 * BATCH * 16
    for name, expected in {
        ("monitor_rows_fed_total",): len(x),
        ("monitor_rows_sampled_total",): len(x) - 1,
        ("monitor_rows_rejected_total",): 1,
        ("monitor_batches_total",): 16,
        ("window_batches",): 16,
        ("window_judged",): 1,
        ("drift_alarms",): len(report.alarms),
        ("tensor_rms_ratio", "x"): pytest.approx(1 + tensor.effect("rms")),
        ("tensor_range_ratio", "x"): tensor.range.growth,
        ("tensor_stability_index", "x"): tensor.stability_index,
        ("tensor_batches_beyond_total", "x"): tensor.range.beyond,
        ("column_rms_ratio", NAMES[3], "x"): pytest.approx(2.8, rel=0.1),
        ("column_mean_shift", NAMES[4], "x"): pytest.approx(0, abs=0.2),
        ("site_saturated_share", "left"): site.live_saturated,
        ("site_noise_ratio", "left"): site.live_noise / site.profile_noise,
        ("site_activation_elements_total", "left"): elements,
        ("site_saturated_elements_total", "left"): pytest.approx(elements * site.live_saturated),
    }.items():
        assert found[f"loka_onnx_{name[0]}", *name[1:]] == expected, name
    assert found["loka_onnx_monitor_cpu_seconds_total",] > 0
    assert found["loka_onnx_drift_alarm", "column", "x"] > 1
    assert len(report.alarms) > 3 and tensor.range.growth > 1.25
    assert tensor.range.beyond > 0 and site.live_saturated > 0


def test_the_window_moves_on_and_counters_do_not_fall(monitor):
    wide, usual = live_columns(20 * BATCH) * np.float32(3), live_columns(20 * BATCH, seed=8)
    feed_in_calls(monitor, wide)
    before = metrics(monitor)
    assert before["loka_onnx_drift_alarms",] > 0 and before["loka_onnx_window_batches",] == 16
    feed_in_calls(monitor, usual)
    after = metrics(monitor)
    assert after["loka_onnx_window_batches",] == 16 and after["loka_onnx_drift_alarms",] == 0
    assert after["loka_onnx_tensor_rms_ratio", "x"] == pytest.approx(1, abs=0.02)
    assert after["loka_onnx_monitor_batches_total",] == 40
    saturated = ("loka_onnx_site_saturated_elements_total", "left")
    assert after[saturated] >= before[saturated]
    known = baseline().ranges["x"].amax
    peaks = np.abs(np.concatenate([wide, usual])).reshape(-1, BATCH * 16).max(axis=1)
    assert after["loka_onnx_tensor_batches_beyond_total", "x"] == (peaks > known).sum() >= 20


WRONG: list[tuple[Any, str]] = [
    ({"y": np.zeros((4, 16), np.float32)}, "evidence: fed y; the inputs are x"),
    ({}, "evidence: fed nothing; the inputs are x"),
    ({"x": np.zeros((4, 15), np.float32)}, "its shape is (4, 15); the model takes float32 of shape"),
    ({"x": np.zeros(4, np.float32)}, "evidence: its shape is (4,)"),
    ({"x": np.array([["a"] * 16])}, "evidence: its type is <U1"),
    ({"x": np.zeros((4, 16), np.complex64)}, "evidence: its type is complex64"),
    (None, "NoneType"),
    (7, "int"),
    ({"x": None}, "its shape is ()"),
    ({"x": [[1, 2], [3]]}, "inhomogeneous"),
]


@pytest.mark.parametrize(("inputs", "message"), WRONG)
def test_what_are_not_the_models_inputs_is_counted_and_not_raised(monitor, inputs, message, caplog):
    with caplog.at_level("DEBUG"):
        monitor.feed(inputs)
    assert (monitor.tally().rejected_calls, monitor.tally().fed) == (1, 0)
    assert message in caplog.text


def test_wider_types_lists_and_empty_calls_are_taken_and_a_caller_may_reuse_its_arrays(monitor, tmp_path):
    x = live_columns(2 * BATCH)
    first, second = x[: BATCH - 1].astype(np.float64), x[BATCH:].copy()
    monitor.feed({"x": first})
    assert monitor.report() is None
    before = metrics(monitor)
    assert before["loka_onnx_monitor_rows_fed_total",] == BATCH - 1
    assert not [key for key in before if key[0].startswith(("loka_onnx_window", "loka_onnx_tensor_rms"))]
    monitor.feed({"x": x[BATCH - 1 : BATCH].tolist()})
    monitor.feed({"x": second})
    for given in (first, second):
        given[:] = 1e6
    monitor.feed({"x": x[:0]})
    assert monitor.flush(30)
    assert (monitor.tally().batches, monitor.tally().rejected_calls) == (2, 0)
    assert largest(monitor) == np.abs(x).max()
    beyond_float32 = x[:4].astype(np.float64)
    beyond_float32[2] = 1e300
    monitor.feed({"x": beyond_float32})
    assert monitor.tally().rejected == 1
    # The file for the collector is whole.
    target = tmp_path / "metrics" / "loka.prom"
    monitor.write(target)
    assert target.read_text(encoding="utf-8") == monitor.text()
    assert [path.name for path in target.parent.iterdir()] == ["loka.prom"]


def test_batches_that_come_too_fast_are_dropped_and_counted(monkeypatch):
    gate = threading.Event()
    with Monitor(baseline(), MonitorOptions(sample_rate=1.0, pending=2)) as monitor:
        measure = monitor._take
        monkeypatch.setattr(monitor, "_take", lambda batch: (gate.wait(30), measure(batch)))
        for seed in range(12):
            monitor.feed({"x": live_columns(BATCH, seed)})
        # Two wait; the worker holds one more, if it came to that before the last call.
        assert monitor.tally().dropped in {9 * BATCH, 10 * BATCH}
        gate.set()
        assert monitor.flush(30)
        assert monitor.tally().batches * BATCH + monitor.tally().dropped == 12 * BATCH


def test_a_batch_that_fails_is_counted_and_the_next_one_measured(monitor, caplog):
    x = live_columns(2 * BATCH)
    # Finite, but its products are not.
    monitor.feed({"x": np.full((BATCH, 16), 3e38, np.float32)})
    monitor.feed({"x": x[:BATCH]})
    assert monitor.flush(30)
    assert (monitor.tally().failed_batches, monitor.tally().batches) == (1, 1)
    assert "a batch could not be measured" in caplog.text
    assert "is not finite in a batch that was fed" in caplog.text


def test_many_threads_lose_nothing(monitor):
    threads, calls, rows = 8, 40, 8
    x = live_columns(rows)

    def serve(_: int) -> None:
        for call in range(calls):
            monitor.feed({"x": x})
            if call % 10 == 0:
                monitor.text()

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(serve, range(threads)))
    assert monitor.flush(30)
    tally = monitor.tally()
    assert tally.fed == tally.sampled == threads * calls * rows
    assert tally.batches == threads * calls * rows // BATCH
    # The same eight rows again and again: every batch is the same, whoever fed it.
    assert largest(monitor) == np.abs(x).max()


def test_after_closing_rows_are_passed_over_and_files_are_gone(tmp_path):
    monitor = Monitor(baseline(), ALL, tmp_path)
    assert all(path.name.startswith(".monitor-") for path in tmp_path.iterdir())
    assert len(list(tmp_path.iterdir())) == 1
    feed_in_calls(monitor, live_columns(2 * BATCH))
    monitor.close()
    monitor.close()
    monitor.feed({"x": live_columns(2 * BATCH)})
    assert monitor.tally().batches == 2
    assert list(tmp_path.iterdir()) == []
    assert "loka-onnx-monitor" not in {thread.name for thread in threading.enumerate()}


def test_a_missing_package_and_options_out_of_range_are_named(monitor, monkeypatch):
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(MissingPackage, match=r"remedy: pip install 'loka-onnx\[serve\]'"):
        monitor.text()
    for wrong in ({"sample_rate": 0.0}, {"sample_rate": 1.5}, {"window": 3}, {"pending": 0}):
        with pytest.raises(ConfigError, match="a monitor samples a share of the rows, over a window of some"):
            MonitorOptions(**wrong)
