"""Ranges and errors that the graph measures, against float64 and ml_dtypes on captured tensors."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from zoo_runs import BATCH, EACH_MODEL, FAST_MODEL, MODEL_NAMES, ROWS, ZooRun, capture, capture_from, zoo_run

from loka_onnx.calibration.calibrate import ProbeOptions
from loka_onnx.calibration.observers.reductions import BatchTotals
from loka_onnx.calibration.observers.site_observers import observe_errors, recipes_for
from loka_onnx.calibration.passes.executors import LocalExecutor
from loka_onnx.calibration.passes.probe import PassOptions, Probe, scales_of
from loka_onnx.core.exact_sum import ExactSum
from loka_onnx.core.formats import E4M3FN, E4M3FNUZ, E5M2
from loka_onnx.core.recipe import PER_CHANNEL_WEIGHT, PER_TENSOR, Recipe
from loka_onnx.core.site import Site, SiteKind
from loka_onnx.core.statistics import ErrorStats, RangeStats
from loka_onnx.errors import InternalError
from loka_onnx.graph.model import is_constant, values_of
from loka_onnx.graph.sites import channel_axis
from loka_onnx.numerics.rounding import fake_quantize, storage_type
from loka_onnx.numerics.scales import weight_scales

pytest.importorskip("torch", reason="needs torch")

RECIPES = (PER_TENSOR, PER_CHANNEL_WEIGHT)
OPTIONS = PassOptions(recipes=RECIPES, batch_size=BATCH)


class Reference:
    """Sites of one model in float64, from the values that their inputs had in ONNX Runtime."""

    def __init__(self, graph, values, scales):
        self.graph, self.values, self.scales = graph, values, scales

    def output(self, site: Site, recipe: Recipe | None) -> Any:
        """The product; exact for None."""
        node = self.graph.node(site.name)
        inputs = [self.value(tensor) for tensor in node.inputs]
        for operand in site.operands if recipe is not None else ():
            axis, format = channel_axis(operand), recipe.format
            if operand.constant:
                scale = weight_scales(inputs[operand.index], recipe.weight, axis, format)
            else:
                scale = self.scales[recipe.activation_id][operand.tensor]
            inputs[operand.index] = fake_quantize(
                inputs[operand.index], scale, format, axis if np.ndim(scale) else None
            )
        left, right, *bias = (array.astype(np.float64) for array in inputs)
        if node.attrs.get("transB"):
            right = right.T
        return left @ right + (bias[0] if bias else 0.0)

    def norm(self, site: Site, narrow: bool) -> Any:
        """Layer normalization over the last axis, operands and result rounded to BF16 if asked."""
        node = self.graph.node(site.name)
        x, *parameters = (rounded(self.value(tensor), narrow) for tensor in node.inputs)
        spread = np.sqrt(x.var(-1, keepdims=True) + node.attrs["epsilon"])
        result = (x - x.mean(-1, keepdims=True)) / spread * parameters[0]
        if len(parameters) > 1:
            result = result + parameters[1]
        return rounded(result.astype(np.float32), narrow)

    def value(self, tensor: Any) -> Any:
        return values_of(tensor) if is_constant(tensor) else self.values[tensor.name]


def rounded(values: Any, narrow: bool) -> Any:
    return (values.astype(ml_dtypes.bfloat16) if narrow else values).astype(np.float64)


def activations_of(run: ZooRun) -> list[str]:
    return [o.tensor for s in run.artifact.sites for o in s.operands if not o.constant]


def tensors_of(run: ZooRun) -> list[str]:
    return activations_of(run) + [site.output for site in run.artifact.sites]


def range_of(values: Any) -> RangeStats:
    wide = values.astype(np.float64)
    low, high = float(wide.min()), float(wide.max())
    return RangeStats(
        wide.size, max(-low, high), low, high, ExactSum.of([wide.sum()]), ExactSum.of([squares(wide)])
    )


def squares(values: Any) -> float:
    return float(np.square(values).sum())


@pytest.mark.slow
@pytest.mark.parametrize("name", EACH_MODEL)
def test_ranges_and_errors_of_both_passes(name, tmp_path):
    """Batches of 512, 512 and 476 rows, against what the same session computes inside."""
    run = zoo_run(name)
    probe = Probe(run.artifact, run.artifact.sites, run.data, OPTIONS, LocalExecutor(2))
    ranges = probe.ranges(tmp_path)
    scales = scales_of(ranges, RECIPES)
    measured = probe.errors(tmp_path, ranges, scales)
    assert measured.rows == ROWS
    values = capture_from(tmp_path / "ranges.onnx", activations_of(run), run.data, tmp_path)
    for tensor, stats in ranges.items():
        x = values[tensor].astype(np.float64)
        assert stats.count == x.size
        assert (stats.amax, stats.minimum, stats.maximum) == (np.abs(x).max(), x.min(), x.max())
        # Seen: 3e-8.
        assert stats.total_squares.value == pytest.approx(squares(x), rel=1e-6)
        assert stats.total.value == pytest.approx(x.sum(), abs=1e-6 * np.abs(x).sum())
    values = capture_from(tmp_path / "errors.onnx", activations_of(run), run.data, tmp_path)
    reference = Reference(run.graph(), values, scales)
    for site in run.artifact.sites:
        if site.kind is SiteKind.NORM:
            continue
        errors = measured.by_site[site.name]
        assert [e.recipe for e in errors] == [r.id for r in recipes_for(site, RECIPES)]
        for recipe, error in zip(recipes_for(site, RECIPES), errors, strict=True):
            assert error.activation_scale == scales[recipe.activation_id][site.activation.tensor]
            check_error(error, reference.output(site, None), reference.output(site, recipe))


def check_error(error: ErrorStats, exact: Any, low: Any) -> None:
    """Every number against float64, within 1e-6; seen: 7e-7, for noise, and 1e-7 for the others."""
    assert error.count == exact.size
    assert error.signal.value == pytest.approx(squares(exact), rel=1e-6)
    assert error.noise.value == pytest.approx(squares(low - exact), rel=1e-6)
    assert error.relative_error == pytest.approx(
        np.linalg.norm(low - exact) / np.linalg.norm(exact), rel=1e-6
    )
    assert error.relative_error > 1e-3


OTHERS = [(name, E4M3FN) for name in MODEL_NAMES if name != FAST_MODEL]


@pytest.mark.parametrize(
    ("name", "format"),
    [
        (FAST_MODEL, E4M3FN),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (*OTHERS, ("wukong", E4M3FNUZ), ("wukong", E5M2))
        ),
    ],
)
def test_errors_from_equal_activations(name, format, tmp_path):
    """The instrumented graph itself hands out the activations, so that nothing but its sums is in question.

    What remains is that its products are FP32 and the reference's float64.
    """
    run = zoo_run(name)
    plain = capture(run.graph(), tensors_of(run), run.inputs(), tmp_path)
    ranges = {t: range_of(v) for t, v in plain.items()}
    # A third of the range, so that some of the activations saturate.
    recipes = tuple(Recipe.of(format, recipe.weight) for recipe in RECIPES)
    rounding = recipes[0].activation_id
    scales = {rounding: {t: float(np.float32(r.amax / format.max / 3)) for t, r in ranges.items()}}
    graph = run.graph()
    observers = observe_errors(graph, run.artifact.sites, recipes, scales, ranges)
    measured = [output.name for output in graph.outputs]
    values = capture(graph, [*tensors_of(run), *measured], run.inputs(), tmp_path)
    reference = Reference(run.graph(), values, scales)
    totals = BatchTotals()
    totals.add(values, ROWS)
    saturated = 0
    for observer in observers:
        site, error = run.artifact.site(observer.site), observer.read(totals)
        if site.kind is SiteKind.NORM:
            continue
        recipe = next(r for r in recipes if r.id == observer.recipe)
        exact, low = reference.output(site, None), reference.output(site, recipe)
        check_error(error, exact, low)
        x = np.abs(values[site.activation.tensor] / np.float32(scales[rounding][site.activation.tensor]))
        assert error.activation_count == x.size
        assert error.saturated == int((x > format.max).sum())
        gone = x.astype(storage_type(format)).astype(np.float32) == 0
        assert error.underflowed == int(((x > 0) & gone).sum())
        saturated += error.saturated
    assert saturated > 0


@pytest.mark.parametrize("name", [case for case in EACH_MODEL if "dlrm" not in case.values])
def test_norms_in_bfloat16(name, tmp_path):
    run = zoo_run(name)
    norms = tuple(site for site in run.artifact.sites if site.kind is SiteKind.NORM)
    assert norms
    probe = Probe(run.artifact, norms, run.data, PassOptions(batch_size=BATCH), LocalExecutor(1))
    measured = probe.errors(tmp_path, {}, {})
    values = capture(run.graph(), tensors_of(run), run.inputs(), tmp_path)
    reference = Reference(run.graph(), values, {})
    for site in norms:
        exact, low = reference.norm(site, narrow=False), reference.norm(site, narrow=True)
        (error,) = measured.by_site[site.name]
        assert (error.recipe, error.activation_scale, error.count) == ("bf16", None, exact.size)
        assert error.signal.value == pytest.approx(squares(exact), rel=1e-6)
        # FP32 statistics may put a result on the other side of a BF16 tie: one in some thousand results.
        assert error.noise.value == pytest.approx(squares(low - exact), rel=1e-3)
        assert 5e-4 < error.relative_error < 5e-3


def test_a_recipe_with_per_tensor_weights_is_required():
    with pytest.raises(InternalError):
        ProbeOptions(recipes=(PER_CHANNEL_WEIGHT,))
