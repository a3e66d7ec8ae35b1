"""What the builder is asked for where TensorRT for RTX cannot show it: settings, profiles."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from loka_onnx.engines.request import BatchRange
from loka_onnx.engines.tensorrt import build
from loka_onnx.engines.tensorrt.build import BuildSettings


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


def test_options_reach_the_configuration_and_others_are_left_alone() -> None:
    config, plain = Config("builder_optimization_level"), BuildSettings("sm90", BatchRange(1, 8, 16))
    build._configure(vendor(), config, replace(plain, optimization_level=5, workspace_mib=3))
    assert (config.profiling_verbosity, config.builder_optimization_level) == ("detailed", 5)
    assert (config.limits, config.cleared) == ({"workspace": 3 << 20}, ["tf32"])
    config = Config()
    build._configure(vendor(), config, plain)
    assert config.limits == {}


def test_what_is_a_choice_in_some_modules_only() -> None:
    trt, config = vendor(), Config()
    assert build._network_flags(trt) == 0
    trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED = 1
    assert build._network_flags(trt) == 2
    before = dict(vars(config))
    build._choose_architecture(trt, config, "sm90")
    assert vars(config) == before, "nothing is asked of it"


def test_profiles_for_every_size_and_for_each() -> None:
    def profiles(batch: BatchRange, *, each: bool) -> list[tuple[int, int, int]]:
        return list(build._profile_sizes(BuildSettings("sm90", batch, profile_each_size=each)))

    served = BatchRange(1, 256, 2048, (64, 256, 2048))
    assert profiles(served, each=False) == [(1, 256, 2048)]
    assert profiles(served, each=True) == [(1, 256, 2048), (64,) * 3, (256,) * 3, (2048,) * 3]
    assert profiles(BatchRange(8, 8, 8), each=True) == [(8, 8, 8)]
