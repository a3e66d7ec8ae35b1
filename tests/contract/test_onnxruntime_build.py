"""The backend around its providers, with the CPU provider under CUDA's and TensorRT's settings."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from planned import plan_of_one
from rewrite_models import artifact, parse
from tiny_models import TinyModel, mlp, request_for

from loka_onnx.core import serde
from loka_onnx.core.formats import Precision
from loka_onnx.core.job import BatchSizes
from loka_onnx.core.recipe import PER_TENSOR
from loka_onnx.engines.onnxruntime import backend as module
from loka_onnx.engines.onnxruntime import providers
from loka_onnx.engines.onnxruntime.backend import OnnxRuntimeBackend, OnnxRuntimeTensorRtBackend
from loka_onnx.engines.onnxruntime.io_binding_session import IoBindingSession
from loka_onnx.engines.onnxruntime.io_binding_settings import PROGRAMS, SETTINGS_FILE, IoBindingSettings
from loka_onnx.engines.onnxruntime.providers import CPU, CUDA, PROVIDERS, TENSORRT
from loka_onnx.engines.onnxruntime.site_precision import dump_optimized
from loka_onnx.engines.request import BuildRequest
from loka_onnx.errors import EngineError, ModelError
from loka_onnx.sessions.cuda import CudaDevice
from loka_onnx.transforms.sequence import apply_mods

ort = pytest.importorskip("onnxruntime")

HAS_CUDA = CUDA.name in ort.get_available_providers()


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A host with an H100 whose providers for it are the CPU's: everything but the vendor's kernels."""
    monkeypatch.setattr(providers, "list_cuda_devices", lambda: (CudaDevice(0, "H100", "sm90"),))
    for provider in (CUDA, TENSORRT):
        changed = replace(provider, name=CPU.name, memory="cpu")
        monkeypatch.setitem(PROVIDERS, provider.key, changed)  # type: ignore[arg-type]

    def chain(provider: Any, *_: Any) -> list[tuple[str, dict[str, str]]]:
        return [(CPU.name, {})]

    monkeypatch.setattr("loka_onnx.engines.onnxruntime.io_binding_session.provider_chain", chain)
    monkeypatch.setattr("loka_onnx.engines.onnxruntime.site_precision.provider_chain", chain)
    return


def request_of(model: TinyModel, folder: Path, **options: int) -> BuildRequest:
    more = {"batch": BatchSizes(1, 8, 16, (8, 16)), "options": options}
    return request_for(model, folder / "e", "nvidia-h100", architecture="sm90", **more)


def test_devices_what_runs_them_and_where_engines_may_be_loaded():
    backend = OnnxRuntimeBackend()
    assert backend.architectures("cpu") == ("cpu",)
    assert backend.architectures("nvidia-h100") == ("sm90",)
    assert backend.architectures("amd-mi300x") == ("gfx942",)
    assert OnnxRuntimeTensorRtBackend().architectures("nvidia-l4") == ("sm89",)
    assert "cpu" in backend.availability().devices
    assert not set(OnnxRuntimeTensorRtBackend().devices) & {"cpu", "amd-mi300x"}
    backend = OnnxRuntimeBackend()
    assert backend.portability("cpu").startswith("any host with ONNX Runtime")
    assert "a GPU of sm90 and ONNX Runtime with CUDAExecutionProvider" in backend.portability("sm90")
    for text in (backend.portability("gfx942"), OnnxRuntimeTensorRtBackend().portability("sm90")):
        assert "the versions of ONNX Runtime and of the library behind" in text


@pytest.mark.skipif(HAS_CUDA, reason="needs a GPU-less ONNX Runtime")
def test_a_host_without_a_provider_says_so_instead_of_building(tmp_path):
    model = mlp(tmp_path / "m", Precision.FP16, Precision.FP16, fp8=False)
    backend = OnnxRuntimeBackend()
    said = "this build of ONNX Runtime has no CUDAExecutionProvider"
    assert said in backend.build_blocker("sm90")
    assert backend.build_blocker("cpu") == ""
    artifact = backend.build(request_of(model, tmp_path))
    assert not artifact.is_built
    assert said in artifact.detail
    assert "pip install 'loka-onnx[nvidia]'" in artifact.detail
    tensorrt = OnnxRuntimeTensorRtBackend().availability()
    assert not tensorrt.can_build
    assert "this build of ONNX Runtime has no TensorrtExecutionProvider" in tensorrt.reason


@pytest.mark.parametrize("simulated", [False, True])
@pytest.mark.parametrize("base", [Precision.FP32, Precision.FP16, Precision.BF16])
def test_fp8_is_simulated_in_fp32_and_nothing_else_is(base, simulated):
    backend, plan = OnnxRuntimeBackend(), plan_of_one(base, PER_TENSOR if simulated else None)
    assert backend.base_precision(plan) is (Precision.FP32 if simulated else base)
    assert [backend.is_simulated(plan, architecture) for architecture in ("sm90", "cpu")] == [simulated] * 2


MMOE = """
    [age] e = Gemm(x, w_age, b_age)
    [expert0] y0 = Gemm(e, w0, b0) a0 = Relu(y0) [deep0] d0 = MatMul(a0, v0)
    [expert1] y1 = Gemm(e, w1, b1) a1 = Relu(y1) [deep1] d1 = MatMul(a1, v1)
    [gate] g = MatMul(e, wg) p = Softmax(g) [other] h = MatMul(e, wh) q = Sigmoid(h)
    s = Sum(d0, d1) m = Mul(s, p) n = Mul(s, q) out = Concat<axis = 1>(m, n)
"""


def test_an_engine_of_the_cpu_has_the_kernels_of_the_exported_model(tmp_path):
    """What mods merge for GPUs is taken apart: ONNX Runtime fuses bias and activation of each part."""
    shapes = {"w_age": (1, 16), "b_age": (16,), "w0": (16, 24), "b0": (24,), "w1": (16, 24), "b1": (24,)}
    shapes |= {"v0": (24, 8), "v1": (24, 8), "wg": (16, 8), "wh": (16, 8)}
    random = np.random.default_rng(0)
    constants = {name: random.normal(size=shape) for name, shape in shapes.items()}
    model = parse(MMOE, constants, inputs="float[batch,1] x", outputs="float[batch,16] out")
    exported, rows = artifact(model, tmp_path / "m.onnx"), {"x": np.ones((4, 1), np.float32)}
    modified = apply_mods(exported, [rows], tmp_path / "after.onnx")
    applied = {record.transform for record in modified.log.records if record.applied}
    assert {"outer-to-mul", "merge-parallel-linears"} <= applied
    request = request_of(mlp(tmp_path / "mlp", Precision.FP32, Precision.FP32, fp8=False), tmp_path)
    request = replace(request, model=modified.model.path, architecture="cpu")
    engine = OnnxRuntimeBackend().compile(request, tmp_path)
    kernels = []
    for path in (exported.path, engine):
        dump_optimized(path, tmp_path / "optimized.onnx", CPU, keeps_float8=False)
        nodes = onnx.load(tmp_path / "optimized.onnx", load_external_data=False).graph.node
        kernels.append(sorted(node.op_type for node in nodes))
    assert kernels[1] == kernels[0]
    assert kernels[0].count("FusedGemm") == 2


def test_a_weight_on_the_left_is_a_convolution_on_the_cpu(tmp_path):
    body, ends = "[fc] y = MatMul(w, x)", ("float[batch,16,6] x", "float[batch,24,6] y")
    left = parse(body, {"w": np.ones((24, 16))}, inputs=ends[0], outputs=ends[1])
    request = request_of(mlp(tmp_path / "mlp", Precision.FP32, Precision.FP32, fp8=False), tmp_path)
    request = replace(request, model=artifact(left, tmp_path / "m.onnx").path, architecture="cpu")
    engine = onnx.load(OnnxRuntimeBackend().compile(request, tmp_path))
    assert [node.op_type for node in engine.graph.node] == ["Conv"]


@pytest.mark.usefixtures("stand_in")
class TestBuilding:
    @pytest.fixture
    def model(self, tmp_path: Path) -> TinyModel:
        return mlp(tmp_path / "model", Precision.FP32, Precision.FP32, fp8=False)

    def test_an_engine_is_its_model_and_its_settings(self, model, tmp_path):
        backend, request = OnnxRuntimeBackend(), request_of(model, tmp_path)
        engine = backend.compile(request, tmp_path)
        assert backend.files(engine) == (engine, tmp_path / SETTINGS_FILE)
        settings = serde.read(IoBindingSettings, tmp_path / SETTINGS_FILE)
        assert (settings.provider, settings.sizes) == ("cuda", (8, 16))
        assert settings.version == ort.__version__
        with backend.load(engine, "sm90") as runner:
            sample = dict(np.load(model.sample))
            got = runner.run({"x": sample["x"][:5]})["out"]
        weights = OnnxRuntimeBackend().load(engine, "cpu").run({"x": sample["x"][:5]})["out"]
        # The same graph on the same kernels, padded from 5 rows to 8.
        np.testing.assert_allclose(got, weights, rtol=1e-5)

    def test_sites_are_read_with_the_provider_that_runs_them(self, model, tmp_path):
        backend, request = OnnxRuntimeBackend(), request_of(model, tmp_path)
        sites = backend.read_precision(request, backend.compile(request, tmp_path))
        assert [site.site for site in sites] == ["mlp.fc0", "mlp.fc1"]
        assert all(site.engaged and site.operands == ("float", "float") for site in sites)
        assert all(site.evidence.endswith("; on CPUExecutionProvider") for site in sites)

    def test_fp8_is_read_as_simulated(self, tmp_path):
        model = mlp(tmp_path / "fp8", Precision.FP32, Precision.BF16, fp8=True)
        backend, request = OnnxRuntimeBackend(), request_of(model, tmp_path)
        sites = backend.read_precision(request, backend.compile(request, tmp_path))
        assert all(site.engaged for site in sites)
        assert all("simulated: FP8 Q/DQ around an FP32 product" in site.evidence for site in sites)

    def test_fp16_that_runs_between_casts_is_a_fallback(self, tmp_path):
        """The stand-in has no FP16 Gemm; what its session really holds is what is reported."""
        model = mlp(tmp_path / "fp16", Precision.FP16, Precision.FP16, fp8=False)
        backend, request = OnnxRuntimeBackend(), request_of(model, tmp_path)
        sites = backend.read_precision(request, backend.compile(request, tmp_path))
        assert [site.operands for site in sites] == [("float", "float")] * 2
        assert not any(site.engaged for site in sites)

    def test_what_a_provider_compiled_is_part_of_the_engine(self, model, tmp_path, monkeypatch):
        backend = OnnxRuntimeTensorRtBackend()
        monkeypatch.setenv("LOKA_ONNX_CACHE", str(tmp_path / "cache"))
        request = request_of(model, tmp_path)
        engine = backend.compile(request, tmp_path)
        assert (tmp_path / "cache/timing" / f"onnxruntime_tensorrt-{ort.__version__}").is_dir()
        (tmp_path / PROGRAMS / "a.engine").write_bytes(b"program")
        assert backend.files(engine) == (engine, tmp_path / SETTINGS_FILE, tmp_path / PROGRAMS / "a.engine")
        sites = backend.read_precision(request, engine)
        assert {site.evidence for site in sites} == {
            f"Gemm '{site.site}' of the graph whose types CPUExecutionProvider keeps; on CPUExecutionProvider"
            for site in sites
        }

    def test_graphs_that_cannot_be_recorded_are_left_out(self, model, tmp_path, monkeypatch, capsys):
        tried = []

        class Unrecordable(IoBindingSession):
            def __init__(self, engine: Path, settings: IoBindingSettings, **keywords: Any) -> None:
                tried.append(settings)
                if "enable_cuda_graph" in settings.options:
                    raise EngineError("operation not permitted when stream is capturing")
                super().__init__(engine, settings, **keywords)

        monkeypatch.setattr(module, "IoBindingSession", Unrecordable)
        OnnxRuntimeBackend().compile(request_of(model, tmp_path), tmp_path)
        settings = serde.read(IoBindingSettings, tmp_path / SETTINGS_FILE)
        assert settings.options == {"arena_extend_strategy": "kSameAsRequested", "use_tf32": "0"}
        assert settings.sizes == ()
        assert len(tried) == 2
        assert "no CUDA graphs: operation not permitted" in capsys.readouterr().out

    def test_a_model_that_does_not_load_without_graphs_either_is_refused(self, model, tmp_path):
        model.path.write_bytes(model.path.read_bytes().replace(b"Relu", b"Rolu"))
        for graphs in (1, 0):
            with pytest.raises(ModelError, match=r"refuses(?s:.*)Rolu"):
                OnnxRuntimeBackend().compile(request_of(model, tmp_path, cuda_graph=graphs), tmp_path)
