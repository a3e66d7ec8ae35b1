"""Corrected plans in real engines: FP8 where it was planned, and no kernel on top."""

import numpy as np
import pytest
from test_transforms import batch, fp8_plan, ranker
from tiny_models import TinyModel, request_for

from loka_onnx.core.artifact import OutputKind
from loka_onnx.core.correction import BiasCorrection, Corrections, OutputConstant
from loka_onnx.core.formats import Precision
from loka_onnx.core.recipe import PER_CHANNEL_WEIGHT
from loka_onnx.engines.registry import get_backend
from loka_onnx.engines.tensorrt.compiled_graph import read_compiled_graphs
from loka_onnx.transforms.precision.apply_plan import PlanForm, apply_plan
from loka_onnx.transforms.sequence import apply_mods

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::DeprecationWarning")]

BIASES = {"bottom": 16, "over": 32, "head": 1}
"""Sites and their channels: a Gemm with a bias, a MatMul without, and the Gemm in front of the output."""


CORRECTIONS = Corrections(
    tuple(
        BiasCorrection(site, (1, n), tuple(np.linspace(-0.1, 0.2, n).tolist()), 0.1, 0.0)
        for site, n in BIASES.items()
    ),
    (OutputConstant("logit", OutputKind.LOGIT, 0.25),),
)


@pytest.mark.parametrize("backend", ["onnxruntime", "tensorrt_rtx"])
def test_corrected_sites_run_in_fp8_and_corrections_cost_no_kernel(backend, tmp_path):
    is_rtx = backend == "tensorrt_rtx"
    if is_rtx:
        pytest.importorskip("tensorrt_rtx", reason="needs tensorrt_rtx")
    model = apply_mods(ranker(tmp_path), [batch()], tmp_path / "after.onnx").model
    base, counts = Precision.BF16 if is_rtx else Precision.FP32, []
    plan, where = (
        fp8_plan(model, PER_CHANNEL_WEIGHT, base),
        ("nvidia-rtx-ada", "sm89") if is_rtx else ("cpu", "cpu"),
    )
    np.savez(tmp_path / "sample.npz", **batch(16))
    for corrections in (CORRECTIONS, *[None] * is_rtx):
        folder = tmp_path / str(corrections is None)
        path = apply_plan(model, plan, PlanForm(base, corrections=corrections), folder / "planned.onnx").path
        built = TinyModel(path, plan, model.sites, tmp_path / "sample.npz")
        request = request_for(built, folder / "engine", where[0], architecture=where[1])
        artifact = get_backend(backend).build(request)
        assert artifact.is_built, artifact.detail
        sites = {site.site: site for site in artifact.sites}
        for site in plan.fp8_sites:
            assert sites[site].engaged, sites[site].evidence
            assert sites[site].planned == Precision.FP8
        engines = (folder / "engine").rglob("engine.trt")
        counts += [[len(graph.operations) for graph in read_compiled_graphs(each)] for each in engines]
    assert counts[:1] == counts[1:] and len(counts) == 2 * is_rtx
