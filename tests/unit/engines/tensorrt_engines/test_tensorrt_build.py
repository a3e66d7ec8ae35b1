"""What the builder is asked for where TensorRT for RTX cannot show it: settings, profiles."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from loka_onnx.engines.request import BatchRange
from loka_onnx.engines.tensorrt.build import (
    BuildSettings,
    _choose_architecture,
    _configure,
    _network_flags,
    _profile_sizes,
)


class Config:
    """A builder's configuration that has what it is given, and refuses everything else."""

    def __init__(self, *names: str) -> None:
        object.__setattr__(self, "names", {"profiling_verbosity", *names})
        object.__setattr__(self, "limits", {})
        object.__setattr__(self, "cleared", [])
        for name in names:
            object.__setattr__(self, name, None)

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


def test_every_option_reaches_the_configuration() -> None:
    config = Config("builder_optimization_level")
    settings = BuildSettings("sm90", BatchRange(1, 8, 16), optimization_level=5, workspace_mib=3)
    _configure(vendor(), config, settings)
    assert config.profiling_verbosity == "detailed"
    assert config.builder_optimization_level == 5
    assert config.limits == {"workspace": 3 << 20}
    assert config.cleared == ["tf32"]


def test_options_that_are_not_given_are_left_alone() -> None:
    config = Config()
    _configure(vendor(), config, BuildSettings("sm90", BatchRange(1, 8, 16)))
    assert config.limits == {}


def test_a_network_is_strongly_typed_where_that_is_a_choice() -> None:
    assert _network_flags(vendor()) == 0
    trt = vendor()
    trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED = 1
    assert _network_flags(trt) == 2


def test_a_module_without_a_choice_builds_for_its_gpu() -> None:
    config = Config()
    before = dict(vars(config))
    _choose_architecture(vendor(), config, "sm90")
    assert vars(config) == before, "nothing is asked of it"


def test_profiles_for_every_size_and_for_each() -> None:
    def profiles(batch: BatchRange, *, each: bool) -> list[tuple[int, int, int]]:
        return list(_profile_sizes(BuildSettings("sm90", batch, profile_each_size=each)))

    served = BatchRange(1, 256, 2048, (64, 256, 2048))
    assert profiles(served, each=False) == [(1, 256, 2048)]
    assert profiles(served, each=True) == [(1, 256, 2048), (64,) * 3, (256,) * 3, (2048,) * 3]
    assert profiles(BatchRange(8, 8, 8), each=True) == [(8, 8, 8)]
