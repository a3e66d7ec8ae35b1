"""Builds a strongly typed engine through the TensorRT API.

`TensorRtBuild` takes the vendor module as a parameter: the same calls exist in `tensorrt_rtx` and in
`tensorrt` 10 and 11. What only some of them have is detected by attribute, never by version
(`STRONGLY_TYPED` is required by 10 and gone from others; compute capabilities are chosen only in
TensorRT for RTX). Precision flags are never set: precision comes from the graph alone.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx

from loka_onnx.engines.request import BatchRange
from loka_onnx.engines.tensorrt_rtx.dialect import keep_tables_once
from loka_onnx.errors import EngineError, ModelError

MAX_MESSAGES = 8
OPTIMIZATION_LEVEL = "optimization_level"


@dataclass(frozen=True)
class BuildSettings:
    """How to build.

    Attributes:
        architecture: Target, for example ``sm89``.
        batch: Rows per request; becomes the optimization profile.
        optimization_level: 0 to 5, how long the builder searches; None for its default.
    """

    architecture: str
    batch: BatchRange
    optimization_level: int | None = None


def build_engine(trt: Any, model: Path, settings: BuildSettings, target: Path) -> None:
    """Build and write one serialized engine.

    Args:
        trt: The vendor module, `tensorrt_rtx` or `tensorrt`.
        model: ONNX file; external data is read from beside it.
        settings: How to build.
        target: File to write.

    Raises:
        ModelError: The parser refuses the model.
        EngineError: The builder fails.
    """
    logger = _make_logger(trt)
    builder = trt.Builder(logger)
    network = builder.create_network(_network_flags(trt))
    parser = trt.OnnxParser(network, logger)
    if not _parse(parser, model):
        raise ModelError(
            f"the ONNX parser of {trt.__name__} refuses the model",
            where=str(model),
            evidence=_parser_errors(parser) or logger.said(),
            remedy="keep the site in the base precision, or choose another backend",
        )
    config = builder.create_builder_config()
    config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED
    if hasattr(trt.BuilderFlag, "TF32"):
        # On by default; it would round the operands of FP32 products to 10 bits under the name FP32.
        config.clear_flag(trt.BuilderFlag.TF32)
    if settings.optimization_level is not None and hasattr(config, "builder_optimization_level"):
        config.builder_optimization_level = settings.optimization_level
    _choose_architecture(trt, config, settings.architecture)
    config.add_optimization_profile(_profile(builder, network, settings.batch))
    serialized = builder.build_serialized_network(network, config)
    if serialized is None:
        raise EngineError(
            f"{trt.__name__} could not build the engine",
            where=f"architecture {settings.architecture}",
            evidence=logger.said() or "the builder gave no reason",
            remedy="the log of the build has every message",
        )
    with target.open("wb") as stream:
        stream.write(serialized)


def _parse(parser: Any, model: Path) -> bool:
    """Hand the model over in the dialect; external data is read from beside the file either way."""
    proto = onnx.load(os.fspath(model), load_external_data=False)
    if not keep_tables_once(proto):
        return bool(parser.parse_from_file(os.fspath(model)))
    return bool(parser.parse(proto.SerializeToString(), os.fspath(model)))


def known_capabilities(trt: Any) -> frozenset[str]:
    """Architectures that the module can be told to build for, in lower case; empty when it has no choice."""
    kinds = getattr(trt, "ComputeCapability", None)
    members = getattr(kinds, "__members__", {}) if kinds is not None else {}
    return frozenset(name.lower() for name in members if name.startswith("SM"))


def _make_logger(trt: Any) -> Any:
    """A logger that prints to the log of the child process and keeps what matters for a failure."""

    class Logger(trt.ILogger):  # type: ignore[misc]  # the base exists only at run time
        def __init__(self) -> None:
            trt.ILogger.__init__(self)
            self.messages: list[str] = []

        def log(self, severity: Any, message: str) -> None:
            name = str(severity).rpartition(".")[2]
            if name in {"INTERNAL_ERROR", "ERROR", "WARNING"}:
                print(f"[{name}] {message}", flush=True)
            if name in {"INTERNAL_ERROR", "ERROR"}:
                self.messages.append(message)

        def said(self) -> str:
            return "; ".join(self.messages[:MAX_MESSAGES])

    return Logger()


def _network_flags(trt: Any) -> int:
    flag = getattr(trt.NetworkDefinitionCreationFlag, "STRONGLY_TYPED", None)
    return 0 if flag is None else 1 << int(flag)


def _parser_errors(parser: Any) -> str:
    errors = []
    for index in range(min(parser.num_errors, MAX_MESSAGES)):
        error = parser.get_error(index)
        # Parsers before TensorRT 10 do not name the node.
        named = hasattr(error, "node_name") and hasattr(error, "node_operator")
        where = f"{error.node_operator()} '{error.node_name()}': " if named and error.node_name() else ""
        errors.append(f"{where}{error.desc()}")
    return "; ".join(errors)


def _choose_architecture(trt: Any, config: Any, architecture: str) -> None:
    """Select the target GPU, where the module lets one choose; others build for the GPU they run on.

    Raises:
        EngineError: The module does not know the architecture.
    """
    known = known_capabilities(trt)
    if not known:
        return
    if architecture not in known:
        raise EngineError(
            f"this version of {trt.__name__} cannot build for '{architecture}'",
            evidence=f"it builds for {', '.join(sorted(known))}",
            remedy=f"install another version of {trt.__name__}",
        )
    config.num_compute_capabilities = 1
    config.set_compute_capability(getattr(trt.ComputeCapability, architecture.upper()), 0)


def _profile(builder: Any, network: Any, batch: BatchRange) -> Any:
    """One optimization profile over axis 0 of every input.

    Raises:
        ModelError: An input has another dynamic axis.
    """
    profile = builder.create_optimization_profile()
    for index in range(network.num_inputs):
        tensor = network.get_input(index)
        shape = tuple(int(size) for size in tensor.shape)
        if any(size < 0 for size in shape[1:]):
            raise ModelError(
                f"input '{tensor.name}' has a dynamic axis besides the batch",
                evidence=f"shape {shape}",
                remedy="fix every axis but axis 0 when exporting",
            )
        if shape and shape[0] < 0:
            sizes = (batch.minimum, batch.serve, batch.maximum)
            profile.set_shape(tensor.name, *[(size, *shape[1:]) for size in sizes])
    return profile
