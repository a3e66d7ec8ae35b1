"""The zoo's models after all mods against ONNX Runtime: in FP32, and with every product in FP8."""

from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs torch")
pytest.importorskip("onnxruntime", reason="needs onnxruntime")
from lowering_models import Array, exported, run  # noqa: E402
from planned import quantized_model  # noqa: E402

from loka_onnx.core.artifact import ModelArtifact, OutputKind, OutputSpec  # noqa: E402
from loka_onnx.core.formats import Precision  # noqa: E402
from loka_onnx.core.recipe import PER_CHANNEL_WEIGHT, PER_TENSOR  # noqa: E402
from loka_onnx.core.site import SiteKind  # noqa: E402
from loka_onnx.engines.inductor.lowering.model import lower  # noqa: E402
from loka_onnx.export.torch_module import export_torch  # noqa: E402
from loka_onnx.sessions.onnx_session import OnnxSession  # noqa: E402
from loka_onnx.transforms.precision.apply_plan import PlanForm, apply_plan  # noqa: E402
from loka_onnx.transforms.sequence import apply_mods  # noqa: E402
from loka_zoo import FeatureSpec, create  # noqa: E402

FEATURES = FeatureSpec(tuple((f"c{i}", 20 + i) for i in range(6)), tuple(f"n{i}" for i in range(5)))
LOGIT = (OutputSpec("logit", OutputKind.LOGIT, "label"),)
pytestmark = pytest.mark.slow


def rows(batch: int = 32) -> dict[str, Array]:
    random = np.random.default_rng(batch)
    return {
        "dense": random.normal(size=(batch, 5)).astype(np.float32),
        "ids": random.integers(0, 20, size=(batch, 6)),
    }


def far(found: Array, expected: Array) -> float:
    """Largest difference, over the scale of the output."""
    return float(np.abs(found - expected).max() / max(1.0, np.abs(expected).max()))


def outputs(path: Path) -> tuple[dict[int, Array], dict[int, Array], dict[str, object]]:
    """Of the module and of its exported program by batch size, and the lowered sites."""
    model = lower(path)
    given = {batch: {name: rows(batch)[name] for name in model.input_names} for batch in (1, 5, 32, 64)}
    plain, traced = (
        {batch: run(each, feeds)[0].astype(np.float64) for batch, feeds in given.items()}
        for each in (model, exported(model, given[32]))
    )
    return plain, traced, dict(model.sites)


@pytest.fixture(scope="module", params=("dlrm", "dcnv2", "wukong", "interformer"))
def artifact(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ModelArtifact:
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("zoo")
    module = create(request.param, FEATURES, "tiny").eval()
    source = export_torch(module, rows(), folder / "model.onnx", LOGIT)
    return apply_mods(source, [rows()], folder / "after.onnx").model


def test_a_model_agrees_with_onnx_runtime(artifact: ModelArtifact) -> None:
    plain, traced, sites = outputs(artifact.path)
    for batch in plain:
        expected = OnnxSession(artifact.path).run(rows(batch))["logit"]
        # FP32 sums in another order through up to a dozen layers.
        assert max(far(plain[batch], expected), far(traced[batch], expected)) < 1e-5
    assert {site.name for site in artifact.sites if site.kind is not SiteKind.NORM} <= sites.keys()


@pytest.mark.parametrize("recipe", [PER_TENSOR, PER_CHANNEL_WEIGHT], ids=["tensor", "channel"])
def test_a_plan_of_float8_agrees_with_onnx_runtime(artifact, recipe, tmp_path) -> None:
    plan, form = quantized_model(artifact, recipe, Precision.FP32, amax=8.0), PlanForm(Precision.FP32)
    planned = apply_plan(artifact, plan, form, tmp_path / "planned.onnx")
    plain, traced, sites = outputs(planned.path)
    expected, exact = (OnnxSession(path).run(rows())["logit"] for path in (planned.path, artifact.path))
    effect = far(expected, exact)
    assert effect > 1e-3
    assert far(plain[32], expected) < 0.1 * effect
    # The products differ by 3e-8 here. Where a sum that is rounded differently falls on the other side of a
    # tie of FP8, one row differs by the effect of one rounding; no row of this one does on the CPUs seen.
    assert np.count_nonzero(np.abs(plain[32] - expected).ravel() > 1e-5) <= 1
    assert max(far(traced[batch], plain[batch]) for batch in plain) < 1e-5
    for site in artifact.sites:
        if site.kind is not SiteKind.NORM:
            done = sites[site.name]
            is_matrix = site.kind is SiteKind.LINEAR and site.k % 16 == 0 and site.n % 16 == 0
            assert done.engaged == is_matrix, (site, done)
            assert done.engaged or done.reason
