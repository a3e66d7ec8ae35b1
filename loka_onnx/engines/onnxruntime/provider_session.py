"""Sessions on one execution provider, and the placement of their nodes."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loka_onnx.engines.onnxruntime.providers import CUDA, TENSORRT, Provider
from loka_onnx.errors import EngineError, ModelError
from loka_onnx.sessions.model_files import read_model
from loka_onnx.sessions.onnx_session import holds_float8, import_onnxruntime, keep_float8_exact


@dataclass(frozen=True)
class PlacedNode:
    """Node with the provider that runs it.

    Attributes:
        name: Name of the node, in the graph after basic optimizations.
        provider: ONNX Runtime's name of the provider.
    """

    name: str
    op: str
    provider: str


def start_session(engine: Path, settings: Any, chain: list[tuple[str, dict[str, str]]]) -> Any:
    """Start an `onnxruntime.InferenceSession` that runs on the first provider of the chain.

    By itself, ONNX Runtime falls back to the CPU where a provider does not start, and only logs it.

    Args:
        chain: Providers and their options, from `provider_chain`.

    Raises:
        ModelError: ONNX Runtime refuses the model.
        EngineError: The provider does not start.
    """
    ort = import_onnxruntime()
    name = chain[0][0]
    if name in {CUDA.name, TENSORRT.name} and hasattr(ort, "preload_dlls"):
        # CUDA and cuDNN may be Python packages, which the dynamic linker does not search.
        ort.preload_dlls()
    try:
        session = ort.InferenceSession(os.fspath(engine), settings, providers=chain, enable_fallback=0)
    except Exception as error:
        # onnxruntime raises errors of unrelated types.
        raise ModelError(
            f"ONNX Runtime refuses '{engine}' on {name}", evidence=str(error).splitlines()[0][:400]
        ) from error
    started = session.get_providers()
    if started[0] != name:
        raise EngineError(
            f"{name} does not start",
            where=str(engine),
            evidence=f"the session would run on {', '.join(started)}",
            remedy="see the log for the library that it misses: CUDA and cuDNN of the versions that this "
            "build of ONNX Runtime names, for example",
        )
    return session


def session_options(engine: Path, provider: Provider) -> Any:
    """`onnxruntime.SessionOptions` for an engine that keep values exact and record placement.

    A provider that compiles gets the original graph, because it has its own optimizer and patterns. Otherwise
    a graph with FP8 is not optimized above BASIC (see `onnx_session`).

    Raises:
        ModelError: The file is no model.
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
    """Provider of each node in a session with `session_options`.

    Raises:
        EngineError: This version of ONNX Runtime does not report it.
    """
    tell = getattr(session, "get_provider_graph_assignment_info", None)
    if tell is None:
        raise EngineError(
            "ONNX Runtime does not say which provider runs which node",
            evidence=f"version {import_onnxruntime().__version__}; it does from 1.24 on",
            remedy="install a newer one",
        )
    return tuple(
        PlacedNode(node.name, node.op_type, subgraph.ep_name)
        for subgraph in tell()
        for node in subgraph.get_nodes()
    )
