"""A number format is one value in `FORMATS`: what measures, scales, plans and writes Q/DQ names none.

Run files name theirs (`config.choices`), and a site's precision is FP8 or INT8 (`NumberFormat.precision`).
"""

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx.reference import ReferenceEvaluator
from small_models import LOGIT, artifact_of, columns_of, dataset_of

from loka_onnx.calibration.calibrate import ProbeOptions, calibrate
from loka_onnx.core.exact_sum import ExactSum
from loka_onnx.core.formats import FORMATS, NumberFormat, Precision
from loka_onnx.core.recipe import MSE, Granularity, Recipe
from loka_onnx.core.statistics import RangeStats
from loka_onnx.numerics.histograms import count_magnitudes, histogram_of
from loka_onnx.numerics.product_error import Rounding, SampledProduct
from loka_onnx.numerics.rounding import fake_quantize
from loka_onnx.numerics.scale_choice import activation_scaling
from loka_onnx.numerics.scales import amax_scale
from loka_onnx.planning.policy import PlanOptions, make_plans
from loka_onnx.transforms.precision.apply_plan import PlanForm, apply_plan

WIDE = NumberFormat("e5m2fnuz", 8, 57344.0, -57344.0, 20, "float8_e5m2fnuz", 2, 2.0**-15)
NARROW = NumberFormat("int4", 4, 7.0, -8.0, 22, "int4")
GRIDS = {
    WIDE.id: np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e5m2fnuz).astype(np.float64),
    NARROW.id: np.arange(-8.0, 8.0),
}


@pytest.fixture(params=[WIDE, NARROW], ids=lambda toy: toy.id)
def toy(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> NumberFormat:
    assert request.param.id not in FORMATS
    monkeypatch.setitem(FORMATS, request.param.id, request.param)
    return request.param


def nearest(x: np.ndarray, scale: float, toy: NumberFormat) -> np.ndarray:
    """The nearest number of the grid, by looking at all of them."""
    grid = np.sort(GRIDS[toy.id][np.isfinite(GRIDS[toy.id])]) * scale
    return grid[np.abs(x.astype(np.float64)[..., None] - grid).argmin(-1)]


def stats_of(x: np.ndarray) -> RangeStats:
    ends = float(np.abs(x).max()), float(x.min()), float(x.max())
    sums = ExactSum.of([float(x.sum())]), ExactSum.of([float(np.square(x).sum())])
    return RangeStats(x.size, *ends, *sums, histogram_of(count_magnitudes(x)))


def test_scales_rounding_and_the_error_of_a_product(toy):
    random = np.random.default_rng(0)
    x, w = (random.standard_normal(shape).astype(np.float32) for shape in ((64, 32), (32, 8)))
    stats = stats_of(x)
    scale = amax_scale(stats.amax, toy)
    assert toy.max / 1.01 < stats.amax / scale <= toy.max
    np.testing.assert_array_equal(fake_quantize(x, scale, toy), nearest(x, scale, toy).astype(np.float32))
    chosen = activation_scaling(stats, Recipe.of(toy, scale=MSE)).scale
    noise = {s: np.square(nearest(x, s, toy) - x).sum() for s in (scale, chosen)}
    assert noise[chosen] <= noise[scale] * 1.02
    wide, weight = x.astype(np.float64), w.astype(np.float64)
    product = SampledProduct(np.abs(wide).max(axis=0), weight, np.arange(8))
    rounding = Rounding(toy, (Granularity.PER_TENSOR,))
    found = product.relative_error(wide, wide @ weight, np.ones(32), np.ones(8), rounding)
    rounded = nearest(x, scale, toy) @ nearest(w, amax_scale(float(np.abs(w).max()), toy), toy)
    wanted = np.square(rounded - wide @ weight).sum() / np.square(wide @ weight).sum()
    assert found == pytest.approx(wanted, rel=0.5) and wanted > 1e-4


def test_from_rows_to_a_plan_and_its_graph(toy, tmp_path):
    artifact, columns = artifact_of(tmp_path), columns_of(256)
    data, recipe = dataset_of(tmp_path / "data", columns), Recipe.of(toy)
    profile = calibrate(artifact, (LOGIT,), data, tmp_path, ProbeOptions((recipe,), threads=1, draws=1))
    asked = PlanOptions(plans=("fp8-all",), base=Precision.FP32)
    (plan,) = make_plans(artifact, profile, (LOGIT,), (recipe,), asked).plans
    left = plan.decision("left")
    assert (left.recipe, left.activation_scale) == (recipe, amax_scale(np.abs(columns["x"]).max(), toy))
    stored = {tensor.name: tensor for tensor in onnx.load(artifact.path).graph.initializer}
    w = onnx.numpy_helper.to_array(stored["w_left"])
    want = nearest(columns["x"], left.activation_scale, toy) @ nearest(w, left.weight_scale[0], toy)
    exact = columns["x"].astype(np.float64) @ w
    error = np.sqrt(np.square(want - exact).sum() / np.square(exact).sum())
    assert profile.site("left").error(recipe.id).relative_error == pytest.approx(error, rel=1e-3)
    if toy.bits < 8:
        return  # onnx-graphsurgeon 0.6.1 does not write elements that share a byte.
    planned = apply_plan(artifact, plan, PlanForm(Precision.FP32), tmp_path / "planned.onnx")
    model = onnx.load(planned.path)
    onnx.checker.check_model(model, full_check=True)
    stored = {tensor.name: tensor for tensor in model.graph.initializer}
    assert stored[f"left/weight/{left.precision}"].data_type == toy.onnx_type
    (y,) = (node for node in model.graph.node if node.name == "left")
    model.graph.output.append(onnx.helper.make_tensor_value_info(y.output[0], 1, None))
    *_, got = ReferenceEvaluator(model).run(None, {"x": columns["x"]})
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-4 * np.abs(want).max())
