"""TensorRT as a backend, with and without its GPU, and what its builder is asked; no library is needed."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from planned import plan_of_one

from loka_onnx.core.engine import BuildStatus
from loka_onnx.core.formats import E5M2, INT8, UINT8, Precision
from loka_onnx.core.job import BatchSizes
from loka_onnx.core.recipe import PER_CHANNEL_WEIGHT, PER_TENSOR, Recipe
from loka_onnx.engines.request import BuildRequest
from loka_onnx.engines.tensorrt import backend as module
from loka_onnx.engines.tensorrt import build
from loka_onnx.engines.tensorrt.backend import TensorRtBackend, TensorRtRtxBackend
from loka_onnx.engines.tensorrt.build import BuildSettings
from loka_onnx.engines.tensorrt.spec import TensorRtSpec
from loka_onnx.errors import ConfigError
from loka_onnx.sessions import cuda
from loka_onnx.sessions.cuda import CudaDevice

FP8, KEPT = plan_of_one(recipe=PER_TENSOR), plan_of_one()
H100 = CudaDevice(1, "NVIDIA H100 80GB HBM3", "sm90")
OLD = CudaDevice(0, "Tesla P100", "sm60")


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch):
    """Call it with the GPUs that this machine is to have; TensorRT 10.16 is installed."""

    def make(*gpus: CudaDevice) -> TensorRtBackend:
        for place in (module, cuda):
            monkeypatch.setattr(place, "list_cuda_devices", lambda: gpus)
        trt = SimpleNamespace(__name__="tensorrt", __version__="10.16.1")
        monkeypatch.setattr(TensorRtSpec, "load_library", lambda self: trt)
        return TensorRtBackend()

    return make


def request(tmp_path: Path, **options: int) -> BuildRequest:
    for name in ("model.onnx", "sample.npz"):
        (tmp_path / name).write_bytes(b"")
    batch, paths = BatchSizes(1, 8, 16, (4, 8)), (tmp_path / "engine", tmp_path / "sample.npz")
    return BuildRequest(
        tmp_path / "model.onnx", FP8, (), "nvidia-h100", "sm90", batch, *paths, options=options
    )


def test_with_a_gpu_it_builds_for_that_one_and_runs(host):
    availability = host(OLD, H100).availability()
    assert (availability.can_build, availability.can_run) == (True, True)
    assert availability.devices == ("NVIDIA H100 80GB HBM3 (sm90)",)
    assert (availability.version, availability.reason, availability.remedy) == ("10.16.1", "", "")
    backend = host(H100)
    assert backend.build_blocker("sm90") == ""
    assert backend.build_blocker("sm100") == (
        "the engine is for sm100 and this host has NVIDIA H100 80GB HBM3 (sm90)"
    )
    # What no machine can do is declined everywhere; what another can is not.
    assert backend.decline(FP8, "sm100") is None


@pytest.mark.parametrize("gpus", [(), (OLD,)])
def test_without_a_gpu_it_builds_nothing(host, gpus, tmp_path):
    backend = host(*gpus)
    availability = backend.availability()
    assert (availability.installed, availability.can_build, availability.can_run) == (True, False, False)
    assert availability.reason == "TensorRT builds on the GPU that its engine is for, and none is here"
    assert "sm90" in availability.remedy
    artifact = backend.build(request(tmp_path))
    assert artifact.status is BuildStatus.DECLINED
    assert artifact.detail.startswith(availability.reason)


@pytest.mark.parametrize("kind", [TensorRtBackend, TensorRtRtxBackend])
@pytest.mark.parametrize(
    ("planned", "architecture", "said"),
    [
        (FP8, "sm90", None),
        (plan_of_one(recipe=PER_CHANNEL_WEIGHT), "sm89", None),
        (FP8, "sm80", "sm80 has no FP8 products (sm89 is the first that has)"),
        (KEPT, "sm80", None),
        (KEPT, "sm75", "sm75 has no BF16 products (sm80 is the first that has)"),
        (plan_of_one(Precision.FP16), "sm75", None),
        (plan_of_one(recipe=Recipe.of(E5M2)), "sm90", "site 'fc' asks for E5M2"),
        (plan_of_one(Precision.FP16, recipe=Recipe.of(INT8)), "sm75", None),
        (plan_of_one(recipe=Recipe.of(INT8)), "sm86", None),
        (plan_of_one(recipe=Recipe.of(INT8)), "sm75", "sm75 has no BF16 products"),
        (plan_of_one(recipe=Recipe.of(UINT8)), "sm86", "site 'fc' asks for UINT8"),
    ],
)
def test_what_it_declines(kind, planned, architecture, said):
    assert str(said) in str(kind().decline(planned, architecture))


@pytest.mark.parametrize("recipe", [None, Recipe.of(INT8)])
def test_fp32_products_for_turing_are_those_of_tensorrt_alone(recipe):
    planned = plan_of_one(Precision.FP32, recipe=recipe)
    assert TensorRtBackend().decline(planned, "sm75") is None
    assert "no FP32 products for sm75" in str(TensorRtRtxBackend().decline(planned, "sm75"))
    assert TensorRtRtxBackend().decline(planned, "sm86") is None


def test_a_build_has_a_profile_for_each_size_and_a_cache_of_its_device(host, monkeypatch, tmp_path):
    monkeypatch.setenv("LOKA_ONNX_CACHE", str(tmp_path))
    backend = host(OLD, H100)
    asked = request(tmp_path, optimization_level=4, workspace_mib=100)
    settings = backend.settings(backend.spec.load_library(), asked)
    cache = tmp_path / "timing" / "tensorrt-10.16.1" / "NVIDIA-H100-80GB-HBM3-sm90.cache"
    asks = BuildSettings("sm90", asked.batch, optimization_level=4, workspace_mib=100)
    assert TensorRtRtxBackend().settings(None, asked) == asks
    assert settings == replace(asks, timing_cache=cache, profile_each_size=True, rtx_dialect=False)


@pytest.mark.parametrize(("option", "value"), [("optimization_level", 6), ("workspace_mib", 0)])
def test_options_have_ranges(host, tmp_path, option, value):
    with pytest.raises(ConfigError, match=f"option '{option}' of backend 'tensorrt' is out of range"):
        host(H100).build(request(tmp_path, **{option: value}))


class Config:
    """A builder's configuration that has what it is given, and refuses everything else."""

    def __init__(self, *names: str) -> None:
        vars(self).update(dict.fromkeys(names), limits={}, cleared=[])
        vars(self)["names"] = {"profiling_verbosity", *names}

    def __setattr__(self, name: str, value: Any) -> None:
        assert name in self.names, f"this version has no '{name}'"
        object.__setattr__(self, name, value)

    def clear_flag(self, flag: str) -> None:
        self.cleared.append(flag)

    def set_memory_pool_limit(self, pool: str, size: int) -> None:
        self.limits[pool] = size


def vendor(**more: Any) -> SimpleNamespace:
    return SimpleNamespace(
        __name__="tensorrt",
        __version__="10.2",
        ProfilingVerbosity=SimpleNamespace(DETAILED="detailed"),
        BuilderFlag=SimpleNamespace(TF32="tf32"),
        MemoryPoolType=SimpleNamespace(WORKSPACE="workspace"),
        NetworkDefinitionCreationFlag=SimpleNamespace(),
        **more,
    )


def test_options_and_choices_reach_the_configuration():
    config, plain = Config("builder_optimization_level"), BuildSettings("sm90", BatchSizes(1, 8, 16))
    build._configure(vendor(), config, replace(plain, optimization_level=5, workspace_mib=3))
    assert (config.profiling_verbosity, config.builder_optimization_level) == ("detailed", 5)
    assert (config.limits, config.cleared) == ({"workspace": 3 << 20}, ["tf32"])
    config = Config()
    build._configure(vendor(), config, plain)
    assert config.limits == {}
    trt, config = vendor(), Config()
    assert build._network_flags(trt) == 0
    trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED = 1
    assert build._network_flags(trt) == 2
    before = dict(vars(config))
    build._choose_architecture(trt, config, "sm90")
    assert vars(config) == before, "nothing is asked of it"


def test_profiles_for_every_size_and_for_each():
    def profiles(batch: BatchSizes, *, each: bool) -> list[tuple[int, int, int]]:
        return list(build._profile_sizes(BuildSettings("sm90", batch, profile_each_size=each)))

    served = BatchSizes(1, 256, 2048, (64, 256, 2048))
    assert profiles(served, each=False) == [(1, 256, 2048)]
    assert profiles(served, each=True) == [(1, 256, 2048), (64,) * 3, (256,) * 3, (2048,) * 3]
    assert profiles(BatchSizes(8, 8, 8), each=True) == [(8, 8, 8)]
