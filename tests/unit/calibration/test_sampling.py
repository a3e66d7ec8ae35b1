"""Histograms and channel ranges of a calibration, against the captured activations."""

from __future__ import annotations

import numpy as np
import pytest
from zoo_runs import BATCH, EACH_MODEL, FAST_MODEL, ROWS, capture, zoo_run

from loka_onnx.calibration.observers.sampling import SAMPLED_ROWS, sampling_stride
from loka_onnx.calibration.passes.executors import LocalExecutor
from loka_onnx.calibration.passes.probe import PassOptions, Probe, scales_of
from loka_onnx.core.site import SiteKind
from loka_onnx.graph.layout import layout_root
from loka_onnx.numerics.histograms import count_magnitudes

pytest.importorskip("torch", reason="needs torch")


def test_the_stride_is_a_prime_that_bounds_the_sample():
    assert [sampling_stride(size) for size in (1, 64)] == [1, 1]
    for size in (65, 512, 832, 1024, 4096, 100_000):
        stride = sampling_stride(size)
        assert -(-size // stride) <= SAMPLED_ROWS and stride >= 11
        assert all(stride % divisor for divisor in range(2, stride))


@pytest.mark.parametrize(
    ("name", "batch"),
    [*(pytest.param(*each.values, BATCH, marks=each.marks) for each in EACH_MODEL), (FAST_MODEL, 50)],
)
def test_the_sample_is_every_nth_row_of_each_batch(name, batch, tmp_path):
    """At a batch of 50 every row is in it."""
    run = zoo_run(name)
    options = PassOptions(batch_size=batch)
    found = Probe(run.artifact, run.artifact.sites, run.data, options, LocalExecutor(2)).ranges(tmp_path)
    graph, stride = run.graph(), sampling_stride(batch)
    tensors = {o.tensor: graph.node(s.name).inputs[o.index] for s in run.artifact.sites for o in s.operands}
    roots = {tensor: layout_root(tensors[tensor]).tensor.name for tensor in found}
    values = capture(graph, list(roots.values()), run.inputs(), tmp_path)
    taken = np.concatenate(
        [np.arange(start, min(start + batch, ROWS), stride) for start in range(0, ROWS, batch)]
    )
    assert batch > 64 or taken.size == ROWS
    known = 0
    for tensor, stats in found.items():
        x = values[roots[tensor]]
        # A first axis that folds fields into the batch is cut into batches as well.
        rows = x.reshape(ROWS, -1) if len(x) == ROWS else None
        if rows is None:
            continue
        histogram = stats.histogram
        assert histogram.total == rows[taken].size
        cumulated = np.cumsum(histogram.counts)
        expected = count_magnitudes(rows[taken])[histogram.first :][: len(histogram.counts)]
        # The capture moves an activation in its last bit (fusions), and then one may cross an edge.
        np.testing.assert_allclose(cumulated, np.cumsum(expected), atol=2e-5 * histogram.total + 1)
        if roots[tensor] == tensor:
            channels = np.abs(x[taken]).reshape(-1, x.shape[-1]).max(axis=0)
            np.testing.assert_allclose(stats.channel_amax, channels, rtol=1e-5)
            known += 1
        else:
            assert stats.channel_amax == ()
    assert known > 0


def test_zeros_are_counted_over_all_rows(tmp_path):
    run = zoo_run(FAST_MODEL)
    options = PassOptions(batch_size=BATCH)
    probe = Probe(run.artifact, run.artifact.sites, run.data, options, LocalExecutor(1))
    ranges = probe.ranges(tmp_path)
    errors = probe.errors(tmp_path, ranges, scales_of(ranges, options.recipes)).by_site
    sites = [site for site in run.artifact.sites if site.kind is not SiteKind.NORM]
    values = capture(run.graph(), [site.activation.tensor for site in sites], run.inputs(), tmp_path)
    counted = {site.name: errors[site.name][0].zeros for site in sites}
    assert counted == {site.name: int((values[site.activation.tensor] == 0).sum()) for site in sites}
    assert max(counted.values()) > ROWS
