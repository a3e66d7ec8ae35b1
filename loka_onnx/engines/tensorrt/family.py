"""Common base of TensorRT and TensorRT for RTX."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from loka_onnx.core.devices import FLOAT8_FROM, capability
from loka_onnx.core.formats import Precision
from loka_onnx.core.plan import PrecisionPlan
from loka_onnx.engines.base import Backend
from loka_onnx.engines.request import BuildRequest
from loka_onnx.engines.tensorrt.build import (
    MAX_TACTICS,
    OPTIMIZATION_LEVEL,
    OPTIONS,
    TILING_LEVEL,
    WORKSPACE_MIB,
    BuildSettings,
    build_engine,
)
from loka_onnx.engines.tensorrt.session import open_engine
from loka_onnx.engines.tensorrt.spec import TensorRtSpec
from loka_onnx.sessions.runner import Runner

ENGINE_FILE = "engine.trt"
BF16_FROM = 80
"""Lowest compute capability with BF16 tensor cores."""


class TensorRtFamily(Backend):
    """A backend on the TensorRT API."""

    spec: ClassVar[TensorRtSpec]
    options: ClassVar[Mapping[str, range]] = OPTIONS

    @abstractmethod
    def settings(self, trt: Any, request: BuildRequest) -> BuildSettings:
        """Settings for a request."""

    def decline(self, plan: PrecisionPlan, architecture: str) -> str | None:
        """FP8 needs E4M3FN and sm89 or later; BF16 needs sm80 or later."""
        number = capability(architecture)
        if plan.fp8_sites and number < FLOAT8_FROM:
            return f"{architecture} has no FP8 products (sm{FLOAT8_FROM} is the first that has)"
        if plan.base is Precision.BF16 and number < BF16_FROM:
            return f"{architecture} has no BF16 products (sm{BF16_FROM} is the first that has)"
        return self.foreign_format(plan)

    def base_precision(self, plan: PrecisionPlan) -> Precision:
        """The plan's base."""
        return plan.base

    def portability(self, architecture: str) -> str:
        """One architecture, one version, one operating system."""
        version = self.availability().version
        return f"one GPU architecture ({architecture}), one {self.spec.title} version ({version}), one OS"

    def compile(self, request: BuildRequest, into: Path) -> Path:
        """Build the serialized engine."""
        engine = into / ENGINE_FILE
        trt = self.spec.load_library()
        build_engine(trt, request.model, self.settings(trt, request), engine)
        return engine

    def load(self, engine: Path, architecture: str) -> Runner:
        """Deserialize the engine on the first GPU of its architecture."""
        return open_engine(self.spec, engine, architecture)


def asked_settings(request: BuildRequest, **more: Any) -> BuildSettings:
    """Settings of a request, with those that its backend adds."""
    return BuildSettings(
        request.architecture,
        request.batch,
        optimization_level=request.options.get(OPTIMIZATION_LEVEL),
        workspace_mib=request.options.get(WORKSPACE_MIB),
        max_tactics=request.options.get(MAX_TACTICS),
        tiling_level=request.options.get(TILING_LEVEL),
        **more,
    )
