"""Execution providers of ONNX Runtime: their options, their availability on this host, and sessions on them.

Sources: onnxruntime.ai, pages of the execution providers; `core/providers/<provider>/…_provider_info.cc`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loka_onnx.core.installation import cache_directory
from loka_onnx.errors import ConfigError, EngineError, MissingPackage, ModelError, line_of
from loka_onnx.sessions.backends import in_phrase
from loka_onnx.sessions.cuda import list_cuda_devices
from loka_onnx.sessions.host_devices import list_amd_architectures
from loka_onnx.sessions.model_files import read_model
from loka_onnx.sessions.onnx_session import holds_float8, import_onnxruntime, keep_float8_exact


@dataclass(frozen=True)
class Provider:
    """An execution provider.

    Attributes:
        key: Its name in an engine's settings.
        name: ONNX Runtime's name.
        package: Optional dependency of this project that provides it.
        memory: ONNX Runtime's name for the memory of inputs and outputs; "cpu" for a provider that copies.
        compiles: It compiles subgraphs to programs, for one architecture and one version.
        graph_option: Option that records runs on fixed buffers as CUDA graphs, if it has one.
        options: Options that an engine's settings may set; none names a file or a library.
    """

    key: str
    name: str
    package: str
    memory: str = "cpu"
    compiles: bool = False
    graph_option: str = ""
    options: frozenset[str] = frozenset()


CPU = Provider("cpu", "CPUExecutionProvider", "cpu")
CUDA = Provider(
    "cuda",
    "CUDAExecutionProvider",
    "nvidia",
    memory="cuda",
    graph_option="enable_cuda_graph",
    options=frozenset({"arena_extend_strategy", "enable_cuda_graph", "use_tf32"}),
)
TENSORRT = Provider(
    "tensorrt",
    "TensorrtExecutionProvider",
    "nvidia",
    memory="cuda",
    compiles=True,
    graph_option="trt_cuda_graph_enable",
    options=frozenset(
        {
            *("trt_builder_optimization_level", "trt_cuda_graph_enable"),
            *("trt_profile_max_shapes", "trt_profile_min_shapes", "trt_profile_opt_shapes"),
        }
    ),
)
MIGRAPHX = Provider(
    "migraphx",
    "MIGraphXExecutionProvider",
    "amd",
    compiles=True,
    options=frozenset({"migraphx_exhaustive_tune"}),
)
PROVIDERS: Mapping[str, Provider] = {p.key: p for p in (CPU, CUDA, TENSORRT, MIGRAPHX)}
"""Providers by key."""

_KEYS: Mapping[tuple[str, str], str] = {
    ("onnxruntime", "cpu"): CPU.key,
    ("onnxruntime", "sm"): CUDA.key,
    ("onnxruntime", "gfx"): MIGRAPHX.key,
    ("onnxruntime_tensorrt", "sm"): TENSORRT.key,
}


def provider_for(backend: str, architecture: str) -> Provider:
    """Return the provider of an architecture (``cpu``, ``sm90``, …); a `ConfigError` where there is none."""
    kind = re.match(r"cpu\Z|sm(?=\d)|gfx(?=\d)", architecture)
    key = _KEYS.get((backend, kind.group() if kind else ""))
    if key is None:
        raise ConfigError(f"E0878 ONNX Runtime has no provider for backend '{backend}' on '{architecture}'")
    return PROVIDERS[key]


def provider_chain(
    provider: Provider,
    options: Mapping[str, str],
    device: int,
    programs: Path | None,
    timing: Path | None = None,
) -> list[tuple[str, dict[str, str]]]:
    """Providers of a session in order; each runs what the ones before do not support. Compiled programs and
    kernel timings are kept in `programs` and `timing`, where given.
    """
    if provider.key == CPU.key:
        return [(CPU.name, {})]
    own = {"device_id": str(device), **options}
    if provider.key == MIGRAPHX.key and programs is not None:
        own |= {"migraphx_model_cache_dir": str(programs)}
    if provider.key != TENSORRT.key:
        return [(provider.name, own), (CPU.name, {})]
    if programs is not None:
        own |= {"trt_engine_cache_enable": "1", "trt_engine_cache_path": str(programs)}
    if timing is not None:
        own |= {"trt_timing_cache_enable": "1", "trt_timing_cache_path": str(timing)}
    return [(provider.name, own), (CUDA.name, {"device_id": str(device), "use_tf32": "0"}), (CPU.name, {})]


def timing_directory(version: str) -> Path:
    """Directory of the timing caches of TensorRT's provider, for a version of ONNX Runtime."""
    return cache_directory() / "timing" / f"onnxruntime_tensorrt-{version}"


def why_no_provider(provider: Provider) -> str:
    """Reason why this host's ONNX Runtime lacks a provider; empty when it has it."""
    try:
        offered = import_onnxruntime().get_available_providers()
    except MissingPackage as error:
        return in_phrase(error)
    if provider.name in offered:
        return ""
    remedy = f"pip install 'loka-onnx[{provider.package}]' in place of it"
    return f"this build of ONNX Runtime has no {provider.name} (it has {', '.join(offered)}); {remedy}"


def host_blocker(provider: Provider, architecture: str) -> str:
    """Reason why this host cannot run a provider on an architecture; empty when it can."""
    reason = why_no_provider(provider)
    if reason or provider.key == CPU.key or architecture in _architectures(provider):
        return reason
    here = ", ".join(_architectures(provider)) or f"no {provider.package.upper()} GPU"
    return f"the engine is for {architecture} and this host has {here}"


def gpu_index(provider: Provider, architecture: str) -> int:
    """Number of the first GPU of an architecture; an `EngineError` where this host has none."""
    if provider.key == CPU.key:
        return 0
    here = _architectures(provider)
    if architecture not in here:
        raise EngineError(f"E0879 there is no GPU of {architecture}", evidence=", ".join(here) or "no GPU")
    return here.index(architecture)


def _architectures(provider: Provider) -> tuple[str, ...]:
    if provider.key == MIGRAPHX.key:
        return list_amd_architectures()
    return tuple(device.architecture for device in list_cuda_devices())


@dataclass(frozen=True)
class PlacedNode:
    """Node of the graph after basic optimizations, with ONNX Runtime's name of its provider."""

    name: str
    op: str
    provider: str


def start_session(engine: Path, settings: Any, chain: list[tuple[str, dict[str, str]]]) -> Any:
    """Start an `onnxruntime.InferenceSession` that runs on the first provider of a `provider_chain`. Raises
    ModelError if ONNX Runtime refuses the model, EngineError if the provider does not start: ONNX Runtime
    only logs that it falls back to the CPU.
    """
    ort = import_onnxruntime()
    name = chain[0][0]
    if name in {CUDA.name, TENSORRT.name} and hasattr(ort, "preload_dlls"):
        # CUDA and cuDNN may be Python packages, which the dynamic linker does not search.
        ort.preload_dlls()
    # onnxruntime raises errors of unrelated types.
    with ModelError(f"E0880 ONNX Runtime refuses '{engine}' on {name}").in_place_of(Exception, words=line_of):
        session = ort.InferenceSession(os.fspath(engine), settings, providers=chain, enable_fallback=0)
    started = session.get_providers()
    if started[0] != name:
        raise EngineError(
            f"E0881 {name} does not start",
            where=str(engine),
            evidence=f"the session would run on {', '.join(started)}",
            remedy="see the log for the library that it misses: CUDA and cuDNN of the versions that this "
            "build of ONNX Runtime names, for example",
        )
    return session


def session_options(engine: Path, provider: Provider) -> Any:
    """`onnxruntime.SessionOptions` for an engine that keep values exact and record placement. A provider that
    compiles gets the original graph, because it has its own optimizer and patterns. Otherwise a graph with
    FP8 is not optimized above BASIC (see `onnx_session`).
    """
    ort = import_onnxruntime()
    settings = ort.SessionOptions()
    settings.log_severity_level = 3
    settings.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
    levels = ort.GraphOptimizationLevel
    if provider.compiles:
        settings.graph_optimization_level = levels.ORT_DISABLE_ALL
    elif holds_float8(read_model(engine)):
        keep_float8_exact(settings)
    else:
        settings.graph_optimization_level = levels.ORT_ENABLE_ALL
    return settings


def placed_nodes(session: Any) -> tuple[PlacedNode, ...]:
    """Provider of each node in a session with `session_options`; of a subgraph, of its original nodes."""
    tell = getattr(session, "get_provider_graph_assignment_info", None)
    if tell is None:
        raise EngineError(
            "E0882 ONNX Runtime does not say which provider runs which node",
            evidence=f"version {import_onnxruntime().__version__}; it does from 1.24 on",
            remedy="install a newer one",
        )
    return tuple(
        PlacedNode(node.name, node.op_type, subgraph.ep_name)
        for subgraph in tell()
        for node in subgraph.get_nodes()
    )
