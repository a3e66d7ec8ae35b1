"""ONNX Runtime on a GPU of this host, through each provider that it has: placement, precision, graphs."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
from tiny_models import TinyModel, mlp, request_for

from loka_onnx.core import serde
from loka_onnx.core.devices import AMD, NVIDIA
from loka_onnx.core.engine import BuildStatus, EngineArtifact
from loka_onnx.core.formats import Precision
from loka_onnx.core.job import BatchSizes
from loka_onnx.engines.onnxruntime.backend import OnnxRuntimeBackend, OnnxRuntimeTensorRtBackend
from loka_onnx.engines.onnxruntime.io_binding_session import IoBindingSession
from loka_onnx.engines.onnxruntime.io_binding_settings import SETTINGS_FILE, IoBindingSettings

pytest.importorskip("onnxruntime")
pytestmark = [pytest.mark.gpu, pytest.mark.slow]

SIZES = (4, 16)
TOLERANCE = {Precision.FP32: 2e-5, Precision.FP16: 5e-3, Precision.BF16: 4e-2}
"""Of outputs of order one: FP32 sums differ by their order; 16-bit types keep 11 and 8 bits in two layers."""


@dataclass(frozen=True)
class Subject:
    """A backend on a device of this host."""

    backend: OnnxRuntimeBackend
    device: str
    architecture: str


CASES = {
    "cuda": (OnnxRuntimeBackend(), NVIDIA),
    "tensorrt": (OnnxRuntimeTensorRtBackend(), NVIDIA),
    "migraphx": (OnnxRuntimeBackend(), AMD),
}


@pytest.fixture(params=CASES)
def subject(request: pytest.FixtureRequest) -> Subject:
    backend, devices = CASES[request.param]
    reason = ""
    for device, architectures in devices.items():
        for architecture in architectures:
            reason = backend.why_not_run(architecture)
            if not reason:
                return Subject(backend, device, architecture)
    pytest.skip(f"needs a GPU: {reason}")


Build = Callable[..., tuple[TinyModel, EngineArtifact, Path]]


@pytest.fixture
def build(subject: Subject, tmp_path: Path) -> Build:
    def made(base: Precision, *, fp8: bool = False, **options: int) -> tuple[TinyModel, EngineArtifact, Path]:
        model = mlp(tmp_path / "model", Precision.FP32 if fp8 else base, base, fp8=fp8)
        reason = subject.backend.decline(model.plan, subject.architecture)
        if reason is not None:
            pytest.skip(f"needs a GPU provider that takes this plan: {reason}")
        more = {"architecture": subject.architecture, "batch": BatchSizes(1, 4, 16, SIZES)}
        request = request_for(model, tmp_path / "e", subject.device, options=options, **more)
        artifact = subject.backend.build(request)
        assert artifact.status is BuildStatus.READY, artifact.detail
        assert artifact.path is not None
        return model, artifact, tmp_path / "e" / artifact.path

    return made


@pytest.mark.parametrize("base", list(TOLERANCE))
def test_an_engine_agrees_with_the_reference_at_every_batch(subject, build, base):
    model, artifact, engine = build(base)
    assert not artifact.fallbacks, [site.evidence for site in artifact.fallbacks]
    assert not artifact.simulated
    exact = mlp(engine.parent / "exact", Precision.FP32, Precision.FP32, fp8=False)
    with subject.backend.open(artifact, engine) as runner:
        # Twice: the second run of a size replays its graph.
        for rows in (1, 3, 4, 16, 9, 4, 16):
            got = runner.run(model.rows(rows))["out"]
            np.testing.assert_allclose(got, exact.expected(rows), atol=TOLERANCE[base])


def test_fp8_is_a_simulation_with_the_right_values(subject, build):
    model, artifact, engine = build(Precision.BF16, fp8=True)
    assert artifact.simulated
    assert not artifact.fallbacks, [site.evidence for site in artifact.fallbacks]
    with subject.backend.open(artifact, engine) as runner:
        np.testing.assert_allclose(runner.run(model.rows(16))["out"], model.expected(16), atol=2e-5)


def test_a_replayed_graph_computes_what_kernels_one_by_one_do(subject, build, tmp_path):
    _, _, engine = build(Precision.FP16)
    settings = serde.read(IoBindingSettings, engine.with_name(SETTINGS_FILE))
    assert settings.sizes == SIZES
    plain = replace(
        settings, options={k: v for k, v in settings.options.items() if "graph" not in k or "mig" in k}
    )
    random = np.random.default_rng(3)
    with IoBindingSession(engine, settings) as recorded, IoBindingSession(engine, plain) as launched:
        for rows in (4, 16, 4, 3):
            x = {"x": random.normal(size=(rows, 64)).astype(np.float32)}
            np.testing.assert_array_equal(recorded.run(x)["out"], launched.run(x)["out"])


def test_a_resident_batch_can_be_launched_again(subject, build):
    model, artifact, engine = build(Precision.FP16)
    sample = dict(np.load(model.sample))
    with subject.backend.open(artifact, engine) as runner:
        before = runner.run(sample)["out"]
        resident = runner.resident(sample)
        for _ in range(3):
            resident()
        np.testing.assert_array_equal(runner.run(sample)["out"], before)
