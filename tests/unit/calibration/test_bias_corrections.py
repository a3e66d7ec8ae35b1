"""Fitted biases against means of whole products, computed in float64 from ml_dtypes' own rounding."""

from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import pytest
from small_models import LOGIT, artifact_of, columns_of, dataset_of

from loka_onnx.calibration.corrections.biases import Fit, fit_biases
from loka_onnx.calibration.corrections.means import MeanRows
from loka_onnx.calibration.passes.executors import span_rows
from loka_onnx.core.artifact import ModelArtifact, OutputKind, OutputSpec
from loka_onnx.core.formats import Precision
from loka_onnx.core.plan import Decision, PrecisionPlan, Verdict
from loka_onnx.core.recipe import PER_CHANNEL_WEIGHT, PER_TENSOR, Recipe
from loka_onnx.errors import CalibrationError

ROWS = 700


@dataclass(frozen=True)
class Case:
    """A site ``fc`` in a model of x (rows, 16), which ends in one number for each row.

    Attributes:
        body: From x to ``z``.
        weight: Shape of w.
        spec: The product as einsum, of the activation in the shape below with the weight as it is stored.
        shape: Of the activation, without the rows.
        correction: Shape of the correction.
        factor: On the product.
    """

    body: str
    weight: tuple[int, ...]
    spec: str
    shape: tuple[int, ...]
    correction: tuple[int, ...]
    factor: float = 1.0


CASES = {
    "gemm": Case("[fc] z = Gemm(x, w, b)", (16, 8), "bk,kn->bn", (16,), (1, 8)),
    "gemm_with_factors": Case("[fc] z = Gemm<transB=1, alpha=0.5, beta=2.0>(x, w, b)", (8, 16), "bk,nk->bn",
        (16,), (1, 8), 0.5),
    "gemm_transposed": Case("t = Transpose(x) [fc] z = Gemm<transA=1>(t, w)", (16, 8), "bk,kn->bn", (16,),
        (1, 8)),
    "rank_3": Case("t = Reshape(x, tokens) [fc] z = MatMul(t, w)", (4, 8), "btk,kn->bn", (4, 4), (1, 1, 8)),
    "experts": Case("t = Reshape(x, tokens) e = Transpose<perm=[1,0,2]>(t) [fc] z = MatMul(e, w)", (4, 4, 8),
        "bek,ekn->ben", (4, 4), (4, 1, 8)),
    "on_the_left": Case("t = Reshape(x, tokens) [fc] z = MatMul(w, t)", (8, 4), "bkt,nk->bn", (4, 4),
        (1, 8, 1)),
    "one_channel": Case("[fc] z = MatMul(x, w)", (16, 1), "bk,kn->bn", (16,), (1, 1)),
}  # fmt: skip


def model_of(folder: Path, case: Case) -> ModelArtifact:
    """The case; the score is the mean over everything but the rows, whose axis the experts have second."""
    axes = [0, 2] if "e = " in case.body else [1] if len(case.shape) == 1 else [1, 2]
    random = np.random.default_rng(5)
    return artifact_of(folder, f"{case.body} y = ReduceMean<keepdims=0>(z, axes)",
        w=random.standard_normal(case.weight) / 3, b=random.standard_normal(8), tokens=np.array([-1, 4, 4]),
        axes=np.array(axes))  # fmt: skip


def plan_of(model: ModelArtifact, recipe: Recipe, scales: dict[str, float]) -> PrecisionPlan:
    """Sites with a scale in FP8, with weight scales that leave visible errors."""

    def decide(name: str) -> Decision:
        if name not in scales:
            return Decision(name, Precision.FP32, None, Verdict.NOT_JUDGED, "test")
        channels = model.site(name).n if recipe is PER_CHANNEL_WEIGHT else 1
        weight_scale = tuple(np.linspace(0.003, 0.006, channels).astype(np.float32).tolist())
        return Decision(name, Precision.FP8, recipe, Verdict.SAFE, "test", scales[name], weight_scale)

    decisions = tuple(decide(site.name) for site in model.sites)
    return PrecisionPlan("fp8-all", model.digest, Precision.FP32, decisions, {}, 1.0)


def rounded(values: np.ndarray, scale: np.ndarray | float) -> np.ndarray:
    narrow = (values / np.asarray(scale, np.float32)).astype(ml_dtypes.float8_e4m3fn)
    return (narrow.astype(np.float32) * np.asarray(scale, np.float32)).astype(np.float64)


@pytest.mark.parametrize("recipe", [PER_TENSOR, PER_CHANNEL_WEIGHT], ids=lambda r: r.weight)
@pytest.mark.parametrize("name", CASES)
def test_the_correction_is_the_mean_error_of_the_whole_product(name, recipe, tmp_path):
    case, columns = CASES[name], columns_of(ROWS)
    model = model_of(tmp_path, case)
    plan = plan_of(model, recipe, {"fc": 0.05})
    data = dataset_of(tmp_path, columns)
    fit = fit_biases(model, [plan], (LOGIT,), MeanRows(data, batch_size=256), tmp_path / "means.onnx")

    x = columns["x"].reshape(ROWS, *case.shape)
    w = onnx.numpy_helper.to_array(
        next(t for t in onnx.load(model.path).graph.initializer if t.dims == list(case.weight))
    )
    scale = np.array(plan.decision("fc").weight_scale, np.float32)
    if scale.size > 1:
        last = case.weight[-1] == scale.size
        scale = scale if last else scale.reshape((-1, *[1] * (len(case.weight) - 1)))
    error = np.einsum(case.spec, rounded(x, 0.05), rounded(w, scale)) - np.einsum(
        case.spec, x.astype(np.float64), w.astype(np.float64)
    )
    if "t" in case.spec:
        error = error / 4  # Einsum has summed over the tokens.
    wanted = -case.factor * error.mean(axis=0)
    found = fit.plans["fp8-all"].values["fc"]
    assert found.shape == case.correction
    np.testing.assert_allclose(found.reshape(wanted.shape), wanted, rtol=1e-9, atol=1e-12)
    # What is compared is far above what is left.
    assert np.abs(wanted).max() > 1e-3
    assert fit.plans["fp8-all"].left_alone == {}


def small_fit(folder: Path, most: int = 32_768) -> tuple[Fit, ModelArtifact, dict[str, np.ndarray]]:
    model, columns = artifact_of(folder), columns_of(ROWS)
    weighted = OutputSpec("y", OutputKind.LOGIT, "label", "weight")
    plan = plan_of(model, PER_TENSOR, {"left": 0.05, "right": 0.05, "deep": 0.02})
    rows = MeanRows(dataset_of(folder, columns), most, batch_size=128)
    return fit_biases(model, [plan], (weighted,), rows, folder / "means.onnx"), model, columns


def test_the_mean_score_is_weighted_and_sites_are_averaged(tmp_path):
    fit, model, columns = small_fit(tmp_path)
    from onnx.reference import ReferenceEvaluator

    proto = onnx.load(model.path)
    (y,) = ReferenceEvaluator(proto).run(None, {"x": columns["x"]})
    wanted = np.average(y[:, 0].astype(np.float64), weights=columns["weight"])
    # FP32 through four layers.
    assert fit.exact.scores["y"] == pytest.approx(wanted, abs=1e-6)
    assert abs(wanted - y.mean()) > 1e-4, "the weights matter"
    w = {t.name: onnx.numpy_helper.to_array(t).astype(np.float64) for t in proto.graph.initializer}
    left = columns["x"].astype(np.float64) @ w["w_left"]
    np.testing.assert_allclose(fit.exact.tensors["left"], left.mean(axis=0)[None], atol=1e-6)
    assert set(fit.plans["fp8-all"].values) == {"left", "right", "deep"}, "the head is not planned"


def test_rows_are_drawn_up_to_a_number(tmp_path):
    data = dataset_of(tmp_path, columns_of(9000))
    rows = MeanRows(data, most=5000, batch_size=512, seed=3)
    assert span_rows(rows.spans) == 5000
    assert [span.start for span in rows.spans] == sorted(span.start for span in rows.spans)
    assert span_rows(MeanRows(data, most=10**6).spans) == 9000
    firsts = {MeanRows(data, most=4096, seed=seed).spans[0].start for seed in range(8)}
    assert len(firsts) > 1, "not always the first rows of the file"
    assert MeanRows(data, most=5000, first=700).spans[-1].stop == 700


def test_an_interaction_is_left_alone_and_what_is_not_finite_refused(tmp_path):
    body = (
        "t = Unsqueeze(x, one) u = Transpose<perm=[0,2,1]>(t) [dot] d = MatMul(t, u) "
        "f = Flatten(d) [head] y = Gemm(f, w)"
    )
    artifact = artifact_of(tmp_path, body, one=np.array([1]), w=np.full((1, 1), 0.3))
    plan = plan_of(artifact, PER_TENSOR, {"dot": 0.05, "head": 0.5})
    rows = MeanRows(dataset_of(tmp_path, columns_of(50)))
    found = fit_biases(artifact, [plan], (LOGIT,), rows, tmp_path / "means.onnx").plans["fp8-all"]
    assert found.left_alone == {"dot": "a product of two activations has no bias"}
    assert set(found.values) == {"head"}
    columns = columns_of(100)
    columns["x"][60] = 3e38
    model = artifact_of(tmp_path)
    plan = plan_of(model, PER_TENSOR, {"left": 0.05})
    rows = MeanRows(dataset_of(tmp_path, columns), batch_size=32)
    with pytest.raises(CalibrationError) as caught:
        fit_biases(model, [plan], (LOGIT,), rows, tmp_path / "means.onnx")
    assert caught.value.what.endswith("is not finite")
    assert caught.value.where == "the batch after 32 rows of 'clicks-0412.npz'"
    assert "drop the rows that overflow" in caught.value.remedy
