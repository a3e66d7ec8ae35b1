"""Spans of rows and who runs them; the error pass stops when errors are known well enough; moved scales."""

import sys
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from small_models import TWO_SITES, W1, artifact_of, data_of

from loka_onnx.calibration.effects.switchable import Switch, write_switchable
from loka_onnx.calibration.observers.arithmetic import draw_factors, moved_activations, moved_scales
from loka_onnx.calibration.passes.executors import (
    BatchResult,
    BatchWork,
    LocalExecutor,
    Span,
    first_rows,
    scattered_spans,
    span_rows,
    spans_in_order,
    spans_in_random_order,
)
from loka_onnx.calibration.passes.probe import MeasuredErrors, PassOptions, Probe, scales_of
from loka_onnx.calibration.passes.ray_executor import RayExecutor
from loka_onnx.core.formats import E4M3FN
from loka_onnx.core.recipe import PER_CHANNEL_WEIGHT, PER_TENSOR
from loka_onnx.data.batch import Batch, InputBinding
from loka_onnx.data.splits import open_dataset
from loka_onnx.errors import CalibrationError, ConfigError, MissingPackage
from loka_onnx.graph.model import GraphModel, values_of

ROWS = 20_000


@given(st.integers(0, 200_000), st.sampled_from([1, 64, 512, 700, 4096, 10_000]), st.integers(0, 5))
@example(100_000, 512, 3)  # longer spans are divided at the end of the file
def test_spans_are_whole_batches_that_cover_every_row_once(rows, size, seed):
    spans = spans_in_order(rows, size)
    assert [s.start for s in spans] == [0, *(s.stop for s in spans[:-1])][: len(spans)]
    assert spans[-1].stop == rows if rows else not spans
    assert all((s.stop - s.start) % size == 0 for s in spans[:-1])
    # One batch, or about 4,096 rows.
    assert all(max(size, 4096 - size) < s.stop - s.start + 1 <= max(size, 4096) + 1 for s in spans[:-1])
    drawn = spans_in_random_order(rows, size, seed)
    assert sorted(drawn, key=lambda s: s.start) == spans
    assert drawn == spans_in_random_order(rows, size, seed)
    apart = scattered_spans(rows, size, seed) if rows else []
    ends = sorted((span.start, span.stop) for span in apart)
    assert [start for start, _ in ends] == [0, *(stop for _, stop in ends[:-1])][: len(ends)]
    assert all(start % size == 0 and (stop % size == 0 or stop == rows) for start, stop in ends)
    assert not rows or (apart == scattered_spans(rows, size, seed) and span_rows(apart) == rows)


@dataclass(frozen=True)
class FirstRow(BatchWork[float]):
    """The first row's number, taken from the data."""

    seen: list[int] = field(default_factory=list)

    def open(self) -> Callable[[Batch], float]:
        def run(batch: Batch) -> float:
            self.seen.append(batch.first_row)
            return float(batch.inputs["x"][0])

        return run


@pytest.fixture
def data(tmp_path):
    np.savez(tmp_path / "rows.npz", x=np.arange(ROWS, dtype=np.float32))
    return open_dataset(tmp_path / "rows.npz", (InputBinding("x", ("x",), "float32", 1),), ())


@pytest.mark.parametrize("threads", [1, 3])
def test_results_come_in_the_order_of_spans_and_batches(threads, data):
    spans = spans_in_random_order(ROWS, 300, seed=1)
    results = list(LocalExecutor(threads).run(FirstRow(Path("unused")), data, spans, 300))
    starts = [row for s in spans for row in range(s.start, s.stop, 300)]
    assert [r.value for r in results] == starts
    assert results[-1] == BatchResult(min(300, ROWS - starts[-1]), float(starts[-1]))
    assert sum(r.rows for r in results) == ROWS


def test_who_closes_the_results_stops_the_work(data):
    work = FirstRow(Path("unused"))
    with closing(LocalExecutor(2).run(work, data, spans_in_order(ROWS, 10), 10)) as results:
        next(results)
    assert 1 <= len(work.seen) <= 5


def test_ray_is_optional_and_refused_at_once_where_nothing_listens(monkeypatch):
    pytest.importorskip("ray", reason="needs ray")
    import ray

    assert not ray.is_initialized()
    with pytest.raises(CalibrationError) as caught:
        list(RayExecutor("127.0.0.1:1").run(FirstRow(Path("unused")), None, [], 1))  # type: ignore[arg-type]
    assert caught.value.code == "E0517" and "refused" in caught.value.evidence
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MissingPackage) as caught:
        RayExecutor()
    assert caught.value.code == "E0511"


# In which order rows are taken


def test_the_first_rows_come_from_everywhere_and_spans_are_cut_at_a_row_or_behind_a_batch():
    spans = scattered_spans(10_000_000, 512, seed=0)
    first = first_rows(spans, 4096)
    assert [span.stop - span.start for span in first] == [512] * 8
    assert len({span.start // 1_000_000 for span in first}) >= 5
    assert first != first_rows(scattered_spans(10_000_000, 512, seed=1), 4096)
    # Ends included: without going around them, they come first a hundred times as often.
    random = np.random.default_rng(0)
    counts = np.zeros(50)
    for seed in random.integers(0, 2**31, 400):
        for span in first_rows(scattered_spans(500_000, 512, int(seed)), 8192):
            counts[span.start // 10_000] += 1
    # 6,400 spans over 50 places: 128 each, give or take 11 and a little more. Seen: 102 to 152.
    assert counts.min() > 85 and counts.max() < 175
    spans = [Span(1000, 1300), Span(0, 500), Span(500, 1000)]
    assert first_rows(spans, 350) == [Span(1000, 1300), Span(0, 50)]
    # The last batch of the file is short, and cut rows count from where a span begins.
    assert first_rows(spans, 350, 100) == [Span(1000, 1300), Span(0, 100)]
    assert first_rows(spans, 350, 400) == [Span(1000, 1300), Span(0, 400)]
    assert first_rows(spans, 10_000) == first_rows(spans, 10_000, 64) == spans
    assert span_rows(spans) == 1300


SORTED_ROWS = 60_000
EXACT = 448.0 * np.sign(W1)
"""Weights that FP8 holds under their own scale, 1."""


def measure(folder, x, options, executor=None, weight=W1):
    artifact = artifact_of(folder, TWO_SITES, w1=weight)
    seen: list[tuple[str, int, int]] = []
    data = data_of(folder, x)
    probe = Probe(artifact, artifact.sites, data, options, executor, lambda *step: seen.append(step))
    ranges = probe.ranges(folder)
    assert seen[-1] == ("ranges", len(x), len(x))
    found = probe.errors(folder, ranges, scales_of(ranges, options.recipes))
    # A bar of progress ends where the pass does.
    assert seen[-1][0].startswith("fp8 error") and seen[-1][1:] == (found.rows, found.rows)
    return found


def relative(found: MeasuredErrors) -> np.ndarray:
    return np.array([error.relative_error for errors in found.by_site.values() for error in errors])


@pytest.fixture(scope="module")
def rows() -> np.ndarray:
    return np.random.default_rng(1).standard_normal((SORTED_ROWS, 16)).astype(np.float32)


def options(precision: float | None, **changes) -> PassOptions:
    return PassOptions(recipes=(PER_TENSOR,), batch_size=256, error_precision=precision, **changes)


@pytest.mark.slow
def test_it_stops_with_the_asked_precision_and_takes_more_rows_for_more(rows, tmp_path):
    whole = measure(tmp_path, rows, options(None))
    assert whole.rows == SORTED_ROWS
    loose = measure(tmp_path, rows, options(0.02))
    # Eight spans of 4,096 rows are the fewest, of which one may be the short one at the end.
    assert 7 * 4096 < loose.rows <= 9 * 4096
    np.testing.assert_allclose(relative(loose), relative(whole), rtol=0.02)
    assert measure(tmp_path, rows, options(0.016)).rows in range(loose.rows + 1, SORTED_ROWS)
    assert measure(tmp_path, rows, options(1e-5)).rows == SORTED_ROWS


@pytest.mark.slow
def test_a_sorted_file_does_not_mislead(rows, tmp_path):
    """In its first half all values are FP8 numbers: no noise there, and batches of one span are alike."""
    x = rows * (448 / np.abs(rows).max())
    x[: SORTED_ROWS // 2] = 2.0 ** np.floor(np.log2(np.maximum(np.abs(x[: SORTED_ROWS // 2]), 1.0)))
    x[0, 0] = 448.0
    whole = relative(measure(tmp_path, x, options(None), weight=EXACT))
    first = measure(tmp_path, x[: SORTED_ROWS // 2], options(0.05), weight=EXACT)
    assert relative(first)[0] == 0.0 < whole[0]
    for seed in range(3):
        found = measure(tmp_path, x, options(0.05, seed=seed), weight=EXACT)
        np.testing.assert_allclose(relative(found), whole, rtol=0.05)
        assert found.rows > 10 * 4096


def test_an_output_that_is_not_finite_names_site_and_batch(tmp_path):
    """Inputs are finite: the range pass has nothing against them."""
    x = np.ones((640, 16), np.float32)
    x[389] = 1e38
    artifact = artifact_of(tmp_path, "[fc1] y = MatMul(x, w1)", w1=np.full((16, 1), 10.0))
    data = data_of(tmp_path, x)
    probe = Probe(artifact, artifact.sites, data, PassOptions(batch_size=64))
    with pytest.raises(CalibrationError) as caught:
        probe.errors(tmp_path, {}, {"e4m3fn/amax": {"x": 1.0}})
    assert caught.value.code == "E0505" and caught.value.evidence.startswith("sum of squares inf")
    assert caught.value.what.endswith("is not finite in batch 7 of 10 of 'clicks-0412.npz'")


def test_ranges_from_some_rows_are_those_of_a_draw_over_the_whole_file(rows, tmp_path):
    """The largest values stand at the end: the first rows alone would miss them."""
    x = rows.copy()
    x[-4096 * 7 :] *= 10.0
    artifact = artifact_of(tmp_path, TWO_SITES)
    seen: list[tuple[str, int, int]] = []
    asked, data = options(None, range_rows=20_000), data_of(tmp_path, x)
    some = Probe(artifact, artifact.sites, data, asked, progress=lambda *step: seen.append(step))
    found = some.ranges(tmp_path)["x"]
    assert 20_000 <= some.range_rows < 20_000 + 4096 and found.count == some.range_rows * 16
    assert seen[-1] == ("ranges", some.range_rows, some.range_rows)
    whole = float(np.abs(x).max())
    assert 0.7 * whole < found.amax <= whole
    beside = (data_of(tmp_path / "beside", -3.0 * x[:1000]),)
    more = Probe(artifact, artifact.sites, data, replace(asked, beside=beside))
    both = more.ranges(tmp_path)["x"]
    assert more.range_rows == some.range_rows + 1000 and both.count == more.range_rows * 16
    assert both.histogram.total > found.histogram.total
    # Errors are not bound to these rows.
    ranges = some.ranges(tmp_path)
    assert some.errors(tmp_path, ranges, scales_of(ranges, (PER_TENSOR,))).rows == SORTED_ROWS


def test_factors_are_steps_of_an_octave_and_moved_scales_are_bfloat16():
    assert draw_factors(1) == (1.0,)
    assert draw_factors(4) == pytest.approx([1, 2**0.2, 2**0.4, 2**0.6])
    assert draw_factors(8) == pytest.approx([2 ** (step / 8) for step in range(8)])
    for draws in (0, 9):
        with pytest.raises(ConfigError) as caught:
            draw_factors(draws)
        assert caught.value.code == "E0503"
    scales = (np.random.default_rng(0).random(1000) + 0.01).astype(ml_dtypes.bfloat16).astype(np.float32)
    for factor in draw_factors(8)[1:]:
        found = moved_scales(scales, factor, E4M3FN)
        np.testing.assert_array_equal(found, found.astype(ml_dtypes.bfloat16).astype(np.float32))
        ratio = found.astype(np.float64) / (scales.astype(np.float64) * factor)
        assert found.dtype == np.float32 and ratio.min() >= 1.0 and ratio.max() < 1 + 2**-7
    assert moved_scales(scales, 1.0, E4M3FN) is scales
    assert moved_activations({"e4m3fn/amax": {"x": 0.5}}, 2**0.5) == {
        "e4m3fn/amax": {"x": 0.70703125 + 2**-8}
    }
    scales = {"uint8/mse": {"x": 0.5}, "uint8/mse/zero_point": {"x": 7.0}}
    again = moved_activations(scales, 2 ** (4 / 5))
    assert again["uint8/mse/zero_point"] == {"x": 7.0}
    assert 2 ** (1 / 10) <= again["uint8/mse"]["x"] / 0.5 <= 2 ** (1 / 10) * (1 + 2**-7)


@pytest.mark.parametrize("recipe", [PER_TENSOR, PER_CHANNEL_WEIGHT])
def test_a_site_under_moved_scales_is_rounded_on_the_moved_grid(recipe, tmp_path):
    artifact = artifact_of(tmp_path, "[left] y = MatMul(x, w_left)")
    x = np.random.default_rng(0).standard_normal((64, 16)).clip(-3.4, 3.4).astype(np.float32)
    scales = {recipe.activation_id: {"x": 0.0078125}}
    weight = values_of(GraphModel.load(artifact.path).node("left").inputs[1])
    amax = np.abs(weight).max(axis=0 if recipe is PER_CHANNEL_WEIGHT else None).astype(np.float64)
    found = []
    for number, factor in enumerate(draw_factors(4)):
        file = write_switchable(
            GraphModel.load(artifact.path),
            [Switch(artifact.site("left"), recipe)],
            scales,
            tmp_path / f"switchable-{number}.onnx",
            factor,
        )
        found.append(file.open().run({"x": x}, ("left",))["y"])
        # Scales as documented: amax / 448, up to BF16, times the factor, up to BF16 again.
        weight_scale = _up(_up(amax / 448) * factor).astype(np.float32)
        rounded = [
            (values / scale).astype(ml_dtypes.float8_e4m3fn).astype(np.float32) * scale
            for values, scale in (
                (x, _up(np.array(0.0078125 * factor)).astype(np.float32)),
                (weight, weight_scale),
            )
        ]
        np.testing.assert_allclose(found[-1], rounded[0] @ rounded[1], rtol=0, atol=1e-5)
    errors = np.stack([(y - x @ weight).ravel() for y in found])
    assert np.abs(np.corrcoef(errors) - np.eye(4)).max() < 0.5


def _up(scales: np.ndarray) -> np.ndarray:
    """The next BF16 number at or above, by search."""
    near = scales.astype(ml_dtypes.bfloat16)
    above = np.nextafter(near, np.array(np.inf, dtype=ml_dtypes.bfloat16))
    return np.where(near.astype(np.float64) >= scales, near, above).astype(np.float64)
