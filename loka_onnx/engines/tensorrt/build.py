"""Build of a strongly typed engine through the TensorRT API.

The calls are equal in `tensorrt_rtx` and in `tensorrt` 10 and 11. Features that some lack are detected by
attribute, not by version (`STRONGLY_TYPED` is required by 10 and gone from others; only TensorRT for RTX
selects compute capabilities). Precision flags are never set: precision comes from the graph alone.

The first optimization profile covers all batch sizes, tuned for the one served most. TensorRT measures
tactics for the tuned size, and can fold more for a fixed size; with `profile_each_size` each served size
therefore gets a profile of its own behind the first, which the session prefers. Each costs the time of the
first.

Half of a build is measuring tactics. TensorRT can reuse the measurements of an earlier build for the same
device and version (NVIDIA's developer guide, "Timing Cache"), which have a file below `core.installation`. A
build replaces the file as a whole, after merging another process's changes under a lock; the first of
conflicting entries stays. A cache that is refused, or cannot be written, fails no build.
"""

from __future__ import annotations

import fcntl
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loka_onnx.core.installation import cache_directory
from loka_onnx.core.job import BatchSizes
from loka_onnx.engines.draft import GraphDraft
from loka_onnx.engines.tensorrt.dialect import keep_tables_once, split_by_heads
from loka_onnx.errors import EngineError, ModelError
from loka_onnx.sessions.model_files import read_model

MAX_MESSAGES = 8
OPTIONS = {"optimization_level": range(6), "workspace_mib": range(1, 1 << 20)}
"""Options of a build, named like the fields of `BuildSettings`, and their ranges."""
MIB = 1 << 20


@dataclass(frozen=True)
class BuildSettings:
    """Settings of a build; None is the builder's default.

    Attributes:
        batch: Rows per request; becomes the optimization profiles.
        optimization_level: Effort of the builder's search, 0 to 5.
        workspace_mib: Most scratch memory of a tactic.
        timing_cache: File of the timing cache; None for no cache.
        profile_each_size: Give each of `batch.sizes` a profile of its own.
        rtx_dialect: Rewrite the model for TensorRT for RTX (`dialect`).
    """

    architecture: str
    batch: BatchSizes
    optimization_level: int | None = None
    workspace_mib: int | None = None
    timing_cache: Path | None = None
    profile_each_size: bool = False
    rtx_dialect: bool = True


def build_engine(trt: Any, model: Path, settings: BuildSettings, target: Path) -> None:
    """Build and write one serialized engine of an ONNX file, whose external data is beside it. Raises
    ModelError if the parser refuses the model, EngineError if the builder fails.
    """
    logger = _make_logger(trt)
    builder = trt.Builder(logger)
    network = builder.create_network(_network_flags(trt))
    parser = trt.OnnxParser(network, logger)
    if not _parse(parser, model, settings):
        errors = []
        for error in map(parser.get_error, range(min(parser.num_errors, MAX_MESSAGES))):
            where = f"{error.node_operator()} '{error.node_name()}': " if error.node_name() else ""
            errors.append(f"{where}{error.desc()}")
        raise ModelError(
            f"E0890 the ONNX parser of {trt.__name__} refuses the model",
            where=str(model),
            evidence="; ".join(errors) or logger.said(),
            remedy="keep the site in the base precision, or choose another backend",
        )
    config = builder.create_builder_config()
    _configure(trt, config, settings)
    _choose_architecture(trt, config, settings.architecture)
    for sizes in _profile_sizes(settings):
        config.add_optimization_profile(_profile(builder, network, sizes))
    cache = TimingCache(settings.timing_cache) if settings.timing_cache is not None else None
    if cache is not None:
        cache.attach(config)
    serialized = builder.build_serialized_network(network, config)
    if serialized is None:
        raise EngineError(
            f"E0891 {trt.__name__} could not build the engine",
            where=f"architecture {settings.architecture}",
            evidence=logger.said() or "the builder gave no reason",
            remedy="the log of the build has every message",
        )
    if cache is not None:
        cache.keep(config)
    target.write_bytes(serialized)


def known_capabilities(trt: Any) -> frozenset[str]:
    """Return the architectures that this TensorRT can select (``sm89``); empty where it has no setting."""
    kinds = getattr(trt, "ComputeCapability", None)
    members = getattr(kinds, "__members__", {}) if kinds is not None else {}
    return frozenset(name.lower() for name in map(str, members) if name.startswith("SM"))


def _parse(parser: Any, model: Path, settings: BuildSettings) -> bool:
    if settings.rtx_dialect:
        draft = GraphDraft(read_model(model), model.parent)
        if [*keep_tables_once(draft), *split_by_heads(draft)]:
            return bool(parser.parse(draft.finished().SerializeToString(), os.fspath(model)))
    return bool(parser.parse_from_file(os.fspath(model)))


def _make_logger(trt: Any) -> Any:
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


def _configure(trt: Any, config: Any, settings: BuildSettings) -> None:
    config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED
    if hasattr(trt.BuilderFlag, "TF32"):
        # On by default; it rounds the operands of FP32 products to 10 bits.
        config.clear_flag(trt.BuilderFlag.TF32)
    if settings.workspace_mib is not None:
        config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, settings.workspace_mib * MIB)
    if settings.optimization_level is not None:
        config.builder_optimization_level = settings.optimization_level


def _choose_architecture(trt: Any, config: Any, architecture: str) -> None:
    # Others build for the current GPU.
    if not hasattr(config, "num_compute_capabilities") or not hasattr(config, "set_compute_capability"):
        return
    kinds, known = getattr(trt, "ComputeCapability", None), known_capabilities(trt)
    if architecture not in known:
        raise EngineError(
            f"E0892 this version of {trt.__name__} cannot build for '{architecture}'",
            evidence=f"it builds for {', '.join(sorted(known))}",
            remedy=f"install another version of {trt.__name__}",
        )
    config.num_compute_capabilities = 1
    config.set_compute_capability(getattr(kinds, architecture.upper()), 0)


def _profile_sizes(settings: BuildSettings) -> Iterator[tuple[int, int, int]]:
    """Smallest, tuned and largest batch of each optimization profile; the one for all sizes comes first."""
    batch = settings.batch
    yield batch.minimum, batch.serve, batch.maximum
    if settings.profile_each_size and batch.minimum < batch.maximum:
        for size in batch.sizes:
            yield size, size, size


def _profile(builder: Any, network: Any, sizes: tuple[int, int, int]) -> Any:
    profile = builder.create_optimization_profile()
    for index in range(network.num_inputs):
        tensor = network.get_input(index)
        shape = tuple(int(size) for size in tensor.shape)
        if any(size < 0 for size in shape[1:]):
            raise ModelError(
                f"E0893 input '{tensor.name}' has a dynamic axis besides the batch",
                evidence=f"shape {shape}",
                remedy="fix every axis but axis 0 when exporting",
            )
        if shape and shape[0] < 0:
            profile.set_shape(tensor.name, *[(size, *shape[1:]) for size in sizes])
    return profile


def timing_cache_file(module: str, version: str, device: str, architecture: str) -> Path:
    """File of a device, by the driver's name of it, and a version."""
    name = re.sub(r"[^A-Za-z0-9.]+", "-", f"{device} {architecture}").strip("-")
    return cache_directory() / "timing" / f"{module}-{version}" / f"{name}.cache"


@dataclass
class TimingCache:
    """The timing cache of one build; `before` is the file's content at its start, `attached` stays alive."""

    file: Path
    before: bytes = b""
    attached: object = None

    def attach(self, config: Any) -> None:
        """Add earlier measurements to a builder configuration."""
        self.before = self._read()
        cache = self.attached = config.create_timing_cache(self.before)
        if cache is not None and config.set_timing_cache(cache, ignore_mismatch=False):
            print(f"timing cache '{self.file}': {len(self.before)} bytes", flush=True)
            return
        print(
            f"timing cache '{self.file}' is of another device or version, or damaged: begun anew", flush=True
        )
        self.before = b""
        cache = self.attached = config.create_timing_cache(b"")
        config.set_timing_cache(cache, ignore_mismatch=False)

    def keep(self, config: Any) -> None:
        """Write the build's measurements, merged with those of other processes."""
        cache = config.get_timing_cache()
        if cache is None:
            return
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            lock = os.open(self.file.with_suffix(".lock"), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
            with os.fdopen(lock):
                fcntl.flock(lock, fcntl.LOCK_EX)
                now = self._read()
                if now not in {b"", self.before}:
                    other = config.create_timing_cache(now)
                    if other is not None and not cache.combine(other, ignore_mismatch=False):
                        print(f"timing cache '{self.file}' of another process is not merged", flush=True)
                unfinished = self.file.with_suffix(".unfinished")
                unfinished.write_bytes(bytes(cache.serialize()))
                unfinished.replace(self.file)
        except OSError as error:
            print(f"timing cache '{self.file}' is not kept: {error}", flush=True)

    def _read(self) -> bytes:
        try:
            return self.file.read_bytes()
        except OSError:
            return b""
