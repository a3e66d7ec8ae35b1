"""Execution providers of ONNX Runtime: what they may be told, and what of them this host has.

Sources: onnxruntime.ai, pages of the CUDA, TensorRT and MIGraphX execution providers, and in its repository
`core/providers/<provider>/…_execution_provider_info.cc` for the names of options.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from loka_onnx.core.cache_directory import cache_directory
from loka_onnx.errors import ConfigError, EngineError, MissingPackage
from loka_onnx.sessions.cuda import list_cuda_devices
from loka_onnx.sessions.host_devices import list_amd_architectures
from loka_onnx.sessions.onnx_session import import_onnxruntime

Options = Mapping[str, str]
"""Names of a provider's options, and their values as ONNX Runtime takes them."""


@dataclass(frozen=True)
class Provider:
    """An execution provider.

    Attributes:
        key: As an engine's settings name it.
        name: As ONNX Runtime names it.
        memory: Where inputs and outputs lie, as ONNX Runtime names it. A provider that copies what lies
            elsewhere has "cpu".
        compiles: It turns subgraphs into programs of its own, which are kept beside the engine: they are
            code, and belong to one architecture and one version.
        options: Options that an engine's settings may set. Those that name a file or a library are not
            among them, because settings come with an engine that need not be trusted.
        package: Optional dependency of this project that brings it.
    """

    key: str
    name: str
    memory: str
    compiles: bool
    options: frozenset[str]
    package: str


CPU = Provider("cpu", "CPUExecutionProvider", "cpu", False, frozenset(), "cpu")
CUDA = Provider(
    "cuda",
    "CUDAExecutionProvider",
    "cuda",
    False,
    frozenset({"arena_extend_strategy", "enable_cuda_graph", "use_tf32"}),
    "nvidia",
)
TENSORRT = Provider(
    "tensorrt",
    "TensorrtExecutionProvider",
    "cuda",
    True,
    frozenset(
        {
            "trt_builder_optimization_level",
            "trt_cuda_graph_enable",
            "trt_profile_max_shapes",
            "trt_profile_min_shapes",
            "trt_profile_opt_shapes",
        }
    ),
    "nvidia",
)
MIGRAPHX = Provider(
    "migraphx",
    "MIGraphXExecutionProvider",
    "cpu",
    True,
    frozenset({"migraphx_exhaustive_tune"}),
    "amd",
)
PROVIDERS: Mapping[str, Provider] = {p.key: p for p in (CPU, CUDA, TENSORRT, MIGRAPHX)}
"""By key."""

GRAPH_OPTIONS: Mapping[str, str] = {"cuda": "enable_cuda_graph", "tensorrt": "trt_cuda_graph_enable"}
"""By key of a provider that can: the option that records each run of fixed buffers as a CUDA graph."""

_KEYS: Mapping[tuple[str, str], str] = {
    ("onnxruntime", "cpu"): CPU.key,
    ("onnxruntime", "sm"): CUDA.key,
    ("onnxruntime", "gfx"): MIGRAPHX.key,
    ("onnxruntime_tensorrt", "sm"): TENSORRT.key,
}


def provider_for(backend: str, architecture: str) -> Provider:
    """The provider that runs a backend's engines for an architecture.

    Args:
        backend: ``onnxruntime`` or ``onnxruntime_tensorrt``.
        architecture: ``cpu``, ``sm90``, ``gfx942`` and the like.

    Raises:
        ConfigError: There is none.
    """
    kind = re.match(r"cpu\Z|sm(?=\d)|gfx(?=\d)", architecture)
    key = _KEYS.get((backend, kind.group() if kind else ""))
    if key is None:
        raise ConfigError(f"ONNX Runtime has no provider for backend '{backend}' on '{architecture}'")
    return PROVIDERS[key]


def provider_chain(
    provider: Provider, options: Options, device: int, programs: Path | None, timing: Path | None = None
) -> list[tuple[str, dict[str, str]]]:
    """A session's providers in order: what one does not support is run by the next.

    Args:
        provider: The one that is meant to run everything.
        options: What the engine's settings tell it.
        device: Number of its GPU.
        programs: Where it keeps what it compiles; not kept when None.
        timing: Where it keeps what kernels took, between builds; not kept when None.
    """
    if provider.key == CPU.key:
        return [(CPU.name, {})]
    own = {"device_id": str(device), **options}
    if provider.key == MIGRAPHX.key and programs is not None:
        own |= {"migraphx_model_cache_dir": str(programs)}
    if provider.key == TENSORRT.key and programs is not None:
        own |= {"trt_engine_cache_enable": "1", "trt_engine_cache_path": str(programs)}
    if provider.key == TENSORRT.key and timing is not None:
        own |= {"trt_timing_cache_enable": "1", "trt_timing_cache_path": str(timing)}
    chain = [(provider.name, own)]
    if provider.key == TENSORRT.key:
        chain.append((CUDA.name, {"device_id": str(device), "use_tf32": "0"}))
    return [*chain, (CPU.name, {})]


def timing_directory(version: str) -> Path:
    """Where TensorRT's provider keeps its timing cache; it names the file for the architecture itself.

    Args:
        version: Of ONNX Runtime, which is built for one version of TensorRT.
    """
    return cache_directory() / "timing" / f"onnxruntime_tensorrt-{version}"


def why_no_provider(provider: Provider) -> str:
    """Why the ONNX Runtime of this host has not a provider; empty when it has it."""
    try:
        ort = import_onnxruntime()
    except MissingPackage as error:
        return f"{error.what}; {error.remedy}"
    offered = ort.get_available_providers()
    if provider.name not in offered:
        return (
            f"this build of ONNX Runtime has no {provider.name} (it has {', '.join(offered)}); "
            f"pip install 'loka-onnx[{provider.package}]' in place of it"
        )
    return ""


def why_not_here(provider: Provider, architecture: str) -> str:
    """Why this host cannot run a provider on an architecture; empty when it can."""
    reason = why_no_provider(provider)
    if reason:
        return reason
    if provider.key == CPU.key or architecture in _architectures(provider):
        return ""
    maker = "AMD" if provider.key == MIGRAPHX.key else "NVIDIA"
    here = ", ".join(_architectures(provider)) or f"no {maker} GPU"
    return f"the engine is for {architecture} and this host has {here}"


def device_of(provider: Provider, architecture: str) -> int:
    """Number of the first GPU of an architecture.

    Raises:
        EngineError: This host has none.
    """
    if provider.key == CPU.key:
        return 0
    found = _architectures(provider)
    if architecture not in found:
        raise EngineError(f"there is no GPU of {architecture}", evidence=", ".join(found) or "no GPU")
    return found.index(architecture)


def _architectures(provider: Provider) -> tuple[str, ...]:
    if provider.key == MIGRAPHX.key:
        return list_amd_architectures()
    return tuple(device.architecture for device in list_cuda_devices())
