"""Execution providers of ONNX Runtime: their options, and their availability on this host.

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
"""Names and values of a provider's options, as ONNX Runtime takes them."""


@dataclass(frozen=True)
class Provider:
    """An execution provider.

    Attributes:
        key: Its name in an engine's settings.
        name: ONNX Runtime's name.
        memory: ONNX Runtime's name for the memory of inputs and outputs; "cpu" for a provider that copies.
        compiles: Whether it compiles subgraphs to programs, which are kept beside the engine: they are code,
            for one architecture and one version.
        options: Options that an engine's settings may set; none names a file or a library, because an engine
            need not be trusted.
        package: Optional dependency of this project that provides it.
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
"""Providers by key."""

GRAPH_OPTIONS: Mapping[str, str] = {"cuda": "enable_cuda_graph", "tensorrt": "trt_cuda_graph_enable"}
"""Option of each provider that records runs on fixed buffers as CUDA graphs, by key."""

_KEYS: Mapping[tuple[str, str], str] = {
    ("onnxruntime", "cpu"): CPU.key,
    ("onnxruntime", "sm"): CUDA.key,
    ("onnxruntime", "gfx"): MIGRAPHX.key,
    ("onnxruntime_tensorrt", "sm"): TENSORRT.key,
}


def provider_for(backend: str, architecture: str) -> Provider:
    """Return the provider that runs a backend's engines for an architecture (``cpu``, ``sm90``, ``gfx942``,
    …).

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
    """Providers of a session in order; each runs what the ones before do not support.

    Args:
        programs: Directory of compiled programs; None: not kept.
        timing: Directory of kernel timings between builds; None: not kept.
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
    """Reason why this host's ONNX Runtime lacks a provider; empty when it has it."""
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
    """Reason why this host cannot run a provider on an architecture; empty when it can."""
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
