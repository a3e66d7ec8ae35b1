"""TensorRT on a GPU: what only real engines show. `test_backends` holds it to what every backend must do."""

from pathlib import Path

import numpy as np
import pytest
from tiny_models import MlpShape, TinyModel, mlp, request_for

from loka_onnx.core.devices import NVIDIA
from loka_onnx.core.engine import BuildStatus, EngineArtifact
from loka_onnx.core.formats import Precision
from loka_onnx.core.job import BatchSizes
from loka_onnx.engines.tensorrt.backend import TensorRtBackend
from loka_onnx.engines.tensorrt.session import TensorRtSession
from loka_onnx.sessions.cuda import first_gpu, list_cuda_devices

trt = pytest.importorskip("tensorrt", reason="needs tensorrt and a GPU")
ARCHITECTURES = {architectures[0]: device for device, architectures in NVIDIA.items()}
HERE = [gpu.architecture for gpu in list_cuda_devices() if gpu.architecture in ARCHITECTURES]

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not HERE, reason="needs tensorrt on a GPU that it builds for"),
]


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("LOKA_ONNX_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "timing"


def build(output: Path, model: TinyModel) -> EngineArtifact:
    where = {"architecture": HERE[0], "batch": BatchSizes(1, 8, 16, (4, 8))}
    artifact = TensorRtBackend().build(request_for(model, output, ARCHITECTURES[HERE[0]], **where))
    assert artifact.status is BuildStatus.READY, artifact.detail
    return artifact


def fp8_model(folder: Path, per_channel: tuple[str, ...] = ()) -> TinyModel:
    shape = MlpShape(widths=(256, 512, 256), per_channel=per_channel)
    return mlp(folder, Precision.BF16, Precision.BF16, fp8=True, shape=shape)


def test_the_inspector_knows_every_site(tmp_path: Path) -> None:
    artifact = build(tmp_path / "e", fp8_model(tmp_path))
    assert all(site.operands for site in artifact.sites), artifact.sites
    assert not any("cannot be told" in site.evidence for site in artifact.sites), artifact.sites
    assert not artifact.fallbacks


def test_per_channel_weights_are_built_and_what_they_run_in_is_told(tmp_path: Path) -> None:
    artifact = build(tmp_path / "e", fp8_model(tmp_path, ("mlp.fc0", "mlp.fc1")))
    for site in artifact.sites:
        assert site.engaged == (set(site.operands) == {"fp8_e4m3"}), site


def test_the_timing_cache_is_kept_and_taken(tmp_path: Path, cache: Path) -> None:
    model = fp8_model(tmp_path)
    build(tmp_path / "first", model)
    (file,) = cache.rglob("*.cache")
    assert file.stat().st_size > 0
    build(tmp_path / "second", model)
    log = (tmp_path / "second.log").read_text(encoding="utf-8")
    assert "begun anew" not in log


def test_every_size_gives_what_the_model_computes(tmp_path: Path) -> None:
    model = mlp(tmp_path, Precision.FP32, Precision.FP32, fp8=False)
    artifact = build(tmp_path / "e", model)
    assert artifact.path is not None
    device = first_gpu(HERE[0]).index
    with TensorRtSession(trt, tmp_path / "e" / artifact.path, device) as session:
        assert session.served_sizes == (4, 8)
        for _ in range(3):
            for rows in (1, 4, 8, 16):
                got = session.run(model.rows(rows))["out"]
                # FP32 without TF32: sums of 64 and 128 terms of order one differ by their order only.
                np.testing.assert_allclose(got, model.expected(rows), atol=2e-5)
