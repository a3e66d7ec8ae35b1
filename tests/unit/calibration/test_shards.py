"""What batches leave behind: exact sums however they are cut, their spread, and the rows of samples."""

import functools
import itertools
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from zoo_runs import BATCH, EACH_MODEL, FAST_MODEL, ROWS, ZooRun, capture, capture_from, zoo_run

from loka_onnx.calibration.observers.sampling import SAMPLED_ROWS, sampling_stride
from loka_onnx.calibration.observers.site_observers import observe_errors, observe_ranges
from loka_onnx.calibration.passes.executors import BatchResult, LocalExecutor, ReductionWork
from loka_onnx.calibration.passes.probe import PassOptions, Probe, scales_of
from loka_onnx.calibration.passes.totals import ErrorTotals, RangeTotals, RangeWork
from loka_onnx.core.recipe import PER_CHANNEL_WEIGHT, PER_TENSOR
from loka_onnx.core.site import Site, SiteKind
from loka_onnx.core.statistics import ErrorStats, RangeStats
from loka_onnx.graph.layout import layout_root
from loka_onnx.numerics.histograms import count_magnitudes

pytest.importorskip("torch", reason="needs torch")

SMALL = 64
"""Rows of a batch here: 23 full ones, and one of 28 rows."""
RECIPES = (PER_TENSOR, PER_CHANNEL_WEIGHT)


class Batches:
    """Every batch of both passes over one model."""

    def __init__(self, run: ZooRun, folder: Path) -> None:
        sites = run.artifact.sites
        graph = run.graph()
        self.range_observers = observe_ranges(graph, sites, sampling_stride(SMALL))
        graph.save(folder / "ranges.onnx")
        work = RangeWork(folder / "ranges.onnx", RangeTotals(self.range_observers, SMALL).samples).open()
        self.ranges = [BatchResult(b.rows, work(b)) for b in run.data.batches(SMALL)]
        ranges = self.range_of(range(len(self.ranges)))
        graph = run.graph()
        self.error_observers = observe_errors(graph, sites, RECIPES, scales_of(ranges, RECIPES), ranges)
        graph.save(folder / "errors.onnx")
        run_errors = ReductionWork(folder / "errors.onnx").open()
        self.errors = [BatchResult(b.rows, run_errors(b)) for b in run.data.batches(SMALL)]

    def range_of(self, numbers) -> dict[str, RangeStats]:
        totals = RangeTotals(self.range_observers, SMALL)
        for number in numbers:
            totals.add(self.ranges[number], "")
        return totals.read()

    def error_of(self, numbers) -> dict[str, list[ErrorStats]]:
        totals = ErrorTotals(self.error_observers)
        for number in numbers:
            totals.add(self.errors[number], "")
        return totals.read()


@pytest.fixture(scope="module")
def batches(tmp_path_factory) -> Batches:
    """Of DCNv2: with a norm, and activations that several sites read."""
    return Batches(zoo_run(FAST_MODEL), tmp_path_factory.mktemp("batches"))


def test_any_cut_into_shards_gives_the_same_to_the_last_bit(batches):
    count = len(batches.ranges)
    whole_ranges, whole_errors = batches.range_of(range(count)), batches.error_of(range(count))

    @settings(max_examples=10)
    @given(st.permutations(range(count)), st.lists(st.integers(1, count - 1), max_size=3, unique=True))
    def check(order: list[int], cuts: list[int]) -> None:
        shards = [order[a:b] for a, b in itertools.pairwise([0, *sorted(cuts), count])]
        ranges, errors = map(batches.range_of, shards), map(batches.error_of, shards)
        merged = functools.reduce(lambda a, b: {t: a[t].merge(b[t]) for t in a}, ranges)
        assert merged == whole_ranges
        found = functools.reduce(
            lambda a, b: {s: [x.merge(y) for x, y in zip(a[s], b[s], strict=True)] for s in a}, errors
        )
        assert found == whole_errors

    check()


def octaves_of(x: np.ndarray) -> dict[str, float]:
    """Share of each octave, zeros counted in the whole."""
    magnitude = np.abs(x[x != 0]).astype(np.float64)
    exponents, counts = np.unique(np.floor(np.log2(magnitude)).astype(int), return_counts=True)
    return {f"log2.{e}": c / x.size for e, c in zip(exponents.tolist(), counts.tolist(), strict=True)}


@pytest.mark.parametrize("name", EACH_MODEL)
def test_statistics_of_full_batches(name, tmp_path):
    """Two full batches of 512 rows; the third has 476 and does not count."""
    run = zoo_run(name)
    probe = Probe(run.artifact, run.artifact.sites, run.data, PassOptions(batch_size=BATCH), LocalExecutor(1))
    found = probe.ranges(tmp_path)
    graph, stride = run.graph(), sampling_stride(BATCH)
    roots = {t: layout_root(_tensor(graph, run.artifact.sites, t)).tensor.name for t in found}
    values = capture_from(tmp_path / "ranges.onnx", sorted(set(roots.values())), run.data, tmp_path)
    seen = 0
    for tensor, stats in found.items():
        x = values[roots[tensor]]
        if len(x) != ROWS:
            continue
        seen += 1
        parts = [x[start : start + BATCH] for start in (0, BATCH)]
        expected = [_statistics(part.astype(np.float64), part[::stride]) for part in parts]
        assert (stats.spread.batches, stats.spread.rows) == (2, BATCH)
        statistics = {n: s for n, s in stats.spread.statistics.items() if not n.startswith("column.")}
        assert set(statistics) == {n for each in expected for n, value in each.items() if value}
        for statistic, sums in statistics.items():
            each = np.array([numbers.get(statistic, 0.0) for numbers in expected])
            # Means are of sums over each row in FP32.
            size = 1e-6 * float(np.abs(x).max()) if statistic in ("mean", "rms") else 1e-15
            assert sums.total.value == pytest.approx(each.sum(), abs=size)
            assert sums.squares.value == pytest.approx(np.square(each).sum(), rel=1e-6, abs=size**2)
    assert seen > len(found) // 2


def _tensor(graph, sites: tuple[Site, ...], name: str):
    return next(graph.node(s.name).inputs[o.index] for s in sites for o in s.operands if o.tensor == name)


def _statistics(wide: np.ndarray, sampled: np.ndarray) -> dict[str, float]:
    return {
        "mean": wide.mean(), "rms": np.sqrt(np.square(wide).mean()), "zeros": float((sampled == 0).mean()),
        **octaves_of(sampled),
    }  # fmt: skip


def test_the_stride_bounds_the_sample_and_without_a_full_batch_no_spread_is_told(tmp_path):
    run = zoo_run(FAST_MODEL)
    options = PassOptions(batch_size=ROWS + 1)
    found = Probe(run.artifact, run.artifact.sites, run.data, options, LocalExecutor(1)).ranges(tmp_path)
    assert {(s.spread.batches, s.spread.rows, len(s.spread.statistics)) for s in found.values()} == {
        (0, 0, 0)
    }
    # The stride is a prime.
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
