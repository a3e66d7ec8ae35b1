"""Corrected plans in real engines: FP8 where it was planned, and no kernel on top."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from test_transforms import batch, fp8_plan, ranker
from tiny_models import TinyModel, request_for

from loka_onnx.core.artifact import ModelArtifact, OutputKind
from loka_onnx.core.correction import BiasCorrection, Corrections, OutputConstant
from loka_onnx.core.engine import EngineArtifact
from loka_onnx.core.formats import Precision
from loka_onnx.core.plan import PrecisionPlan
from loka_onnx.core.recipe import PER_CHANNEL_WEIGHT
from loka_onnx.engines.registry import get_backend
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


def planned(model: ModelArtifact, base: Precision, corrections: Corrections | None, path: Path) -> Path:
    plan = fp8_plan(model, PER_CHANNEL_WEIGHT, base)
    return apply_plan(model, plan, PlanForm(base, corrections=corrections), path).path


def engine_of(
    backend: str, model: Path, plan: PrecisionPlan, source: ModelArtifact, folder: Path
) -> EngineArtifact:
    target, architecture = ("nvidia-rtx-ada", "sm89") if backend == "tensorrt_rtx" else ("cpu", "cpu")
    np.savez(folder / "sample.npz", **batch(16))
    built = TinyModel(model, plan, source.sites, folder / "sample.npz")
    request = request_for(built, folder / "engine", target, architecture=architecture)
    artifact = get_backend(backend).build(request)
    assert artifact.is_built, artifact.detail
    return artifact


@pytest.mark.parametrize("backend", ["onnxruntime", "tensorrt_rtx"])
def test_corrected_sites_run_in_fp8(backend: str, tmp_path: Path) -> None:
    if backend == "tensorrt_rtx":
        pytest.importorskip("tensorrt_rtx", reason="needs tensorrt_rtx")
    model = apply_mods(ranker(tmp_path), [batch()], tmp_path / "after.onnx").model
    base = Precision.BF16 if backend == "tensorrt_rtx" else Precision.FP32
    plan = fp8_plan(model, PER_CHANNEL_WEIGHT, base)
    path = planned(model, base, CORRECTIONS, tmp_path / "planned.onnx")
    sites = {site.site: site for site in engine_of(backend, path, plan, model, tmp_path).sites}
    for site in plan.fp8_sites:
        assert sites[site].engaged, sites[site].evidence
        assert sites[site].planned == Precision.FP8


def test_corrections_cost_no_kernel(tmp_path: Path) -> None:
    pytest.importorskip("tensorrt_rtx", reason="needs tensorrt_rtx")
    from loka_onnx.engines.tensorrt.compiled_graph import read_compiled_graphs

    model = apply_mods(ranker(tmp_path), [batch()], tmp_path / "after.onnx").model
    plan, counts = fp8_plan(model, PER_CHANNEL_WEIGHT, Precision.BF16), []
    for name, corrections in (("plain", None), ("corrected", CORRECTIONS)):
        folder = tmp_path / name
        folder.mkdir()
        path = planned(model, Precision.BF16, corrections, folder / "planned.onnx")
        engine_of("tensorrt_rtx", path, plan, model, folder)
        graphs = read_compiled_graphs(next((folder / "engine").rglob("engine.trt")))
        counts.append([len(graph.operations) for graph in graphs])
    assert counts[0] == counts[1]
