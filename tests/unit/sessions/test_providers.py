"""Which provider runs what, what it is told, and what this host lacks for it."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from loka_onnx.core.devices import device_called
from loka_onnx.engines.onnxruntime import providers
from loka_onnx.engines.onnxruntime.providers import (
    CPU,
    CUDA,
    MIGRAPHX,
    TENSORRT,
    Provider,
    gpu_index,
    host_blocker,
    provider_chain,
    provider_for,
    timing_directory,
    why_no_provider,
)
from loka_onnx.errors import ConfigError, EngineError
from loka_onnx.sessions.cuda import CudaDevice
from loka_onnx.sessions.host_devices import list_amd_architectures, list_amd_devices


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host with two NVIDIA GPUs and an ONNX Runtime that has CUDA's provider."""
    here = SimpleNamespace(get_available_providers=lambda: [CUDA.name, CPU.name])
    monkeypatch.setattr(providers, "import_onnxruntime", lambda: here)
    devices = (CudaDevice(0, "L4", "sm89"), CudaDevice(1, "H100", "sm90"))
    monkeypatch.setattr(providers, "list_cuda_devices", lambda: devices)


def test_the_architecture_decides_the_provider() -> None:
    known = {"cpu": CPU, "sm90": CUDA, "gfx90a": MIGRAPHX, "gfx1201": MIGRAPHX}
    assert {architecture: provider_for("onnxruntime", architecture) for architecture in known} == known
    assert provider_for("onnxruntime_tensorrt", "sm120") is TENSORRT


@pytest.mark.parametrize(
    ("backend", "architecture"),
    [
        ("onnxruntime_tensorrt", "cpu"),
        ("onnxruntime_tensorrt", "gfx942"),
        ("onnxruntime", "smart"),
        ("onnxruntime", "cpus"),
        ("onnxruntime", "cpu\n"),
        ("tensorrt", "sm90"),
    ],
)
def test_what_no_provider_runs(backend: str, architecture: str) -> None:
    with pytest.raises(ConfigError, match=f"backend '{backend}' on '{architecture}'"):
        provider_for(backend, architecture)


def test_what_a_provider_does_not_take_is_run_by_the_next(tmp_path: Path) -> None:
    assert provider_chain(CPU, {}, 0, None) == [("CPUExecutionProvider", {})]
    assert provider_chain(CUDA, {"use_tf32": "0"}, 1, None) == [
        ("CUDAExecutionProvider", {"device_id": "1", "use_tf32": "0"}),
        ("CPUExecutionProvider", {}),
    ]
    # Behind TensorRT, too, FP32 products keep their mantissa.
    assert provider_chain(TENSORRT, {}, 1, None)[1:] == [
        ("CUDAExecutionProvider", {"device_id": "1", "use_tf32": "0"}),
        ("CPUExecutionProvider", {}),
    ]
    kept = {"device_id": "0", "trt_engine_cache_enable": "1", "trt_engine_cache_path": str(tmp_path)}
    assert provider_chain(TENSORRT, {}, 0, tmp_path)[0][1] == kept
    timing = {"trt_timing_cache_enable": "1", "trt_timing_cache_path": "/timing"}
    assert provider_chain(TENSORRT, {}, 0, tmp_path, Path("/timing"))[0][1] == kept | timing
    assert provider_chain(CUDA, {}, 0, tmp_path, Path("/timing"))[0][1] == {"device_id": "0"}
    own = {"device_id": "0", "migraphx_exhaustive_tune": "1", "migraphx_model_cache_dir": str(tmp_path)}
    assert provider_chain(MIGRAPHX, {"migraphx_exhaustive_tune": "1"}, 0, tmp_path) == [
        ("MIGraphXExecutionProvider", own),
        ("CPUExecutionProvider", {}),
    ]


@pytest.mark.parametrize("provider", [CUDA, TENSORRT, MIGRAPHX])
def test_an_engine_sets_no_option_that_names_a_file(provider: Provider) -> None:
    assert not [name for name in provider.options if "path" in name or "dir" in name or "lib" in name]


def test_the_first_gpu_of_an_architecture(host: None) -> None:
    assert gpu_index(CPU, "cpu") == 0
    assert gpu_index(CUDA, "sm90") == 1
    with pytest.raises(EngineError, match=r"no GPU of sm120(?s:.*)sm89, sm90"):
        gpu_index(CUDA, "sm120")


def test_what_a_host_lacks(host: None) -> None:
    assert host_blocker(CPU, "cpu") == ""
    assert host_blocker(CUDA, "sm90") == ""
    assert host_blocker(CUDA, "sm120") == "the engine is for sm120 and this host has sm89, sm90"
    assert why_no_provider(CUDA) == ""
    assert host_blocker(TENSORRT, "sm90") == (
        "this build of ONNX Runtime has no TensorrtExecutionProvider (it has CUDAExecutionProvider, "
        "CPUExecutionProvider); pip install 'loka-onnx[nvidia]' in place of it"
    )


def test_timings_are_kept_for_a_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOKA_ONNX_CACHE", "/caches")
    assert timing_directory("1.31.1") == Path("/caches/timing/onnxruntime_tensorrt-1.31.1")


def test_amd_gpus_are_read_from_the_driver(tmp_path: Path) -> None:
    # As Linux shows a CPU, an MI300X, an MI250 and an RX 9070; node 10 comes after node 2.
    for node, version in {0: 0, 1: 90402, 2: 90010, 10: 120001}.items():
        (tmp_path / str(node)).mkdir()
        text = f"cpu_cores_count {4 if not version else 0}\ngfx_target_version {version}\nname\n"
        (tmp_path / str(node) / "properties").write_text(text, encoding="ascii")
    assert list_amd_architectures(tmp_path) == ("gfx942", "gfx90a", "gfx1201")
    assert list_amd_architectures(tmp_path / "none") == ()


def test_amd_gpus_have_names(tmp_path: Path) -> None:
    """Of one architecture, and not of one speed; a board that does not tell is told by its numbers."""
    nodes, cards = tmp_path / "nodes", tmp_path / "drm"
    for node, (minor, name) in enumerate(
        [(128, "AMD Instinct MI300X OAM\n"), (136, "AMD Instinct MI325X\n"), (137, None)]
    ):
        (nodes / str(node)).mkdir(parents=True)
        text = f"gfx_target_version 90402\ndrm_render_minor {minor}\nvendor_id 4098\ndevice_id 29857\n"
        (nodes / str(node) / "properties").write_text(text, encoding="ascii")
        if name is not None:
            (cards / f"renderD{minor}" / "device").mkdir(parents=True)
            (cards / f"renderD{minor}" / "device" / "product_name").write_text(name)
    found = {d.name: device_called(d.name, d.architecture) for d in list_amd_devices(nodes, cards)}
    assert found == {
        "AMD Instinct MI300X OAM": "amd-mi300x",
        "AMD Instinct MI325X": "amd-mi325x",
        "PCI 1002:74a1": "",
    }
