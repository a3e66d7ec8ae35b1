"""A backend in one folder, as an installed package would bring it: ONNX Runtime under another name."""

import os
from pathlib import Path
from typing import ClassVar

import onnx

from loka_onnx.core.engine import SitePrecision
from loka_onnx.core.formats import Precision
from loka_onnx.core.plan import PrecisionPlan
from loka_onnx.engines.base import Availability, Backend
from loka_onnx.engines.request import BuildRequest
from loka_onnx.sessions.backends import BackendSpec
from loka_onnx.sessions.onnx_session import OnnxSession, SessionOptions
from loka_onnx.sessions.runner import Runner


class ToySpec(BackendSpec):
    """Runs where ONNX Runtime does."""

    def open(self, engine: Path, architecture: str, version: str, options: SessionOptions | None) -> Runner:
        return OnnxSession(engine, options)

    def device_obstacle(self, architecture: str) -> str:
        return ""


TOY = ToySpec(
    name="toy",
    title="Toy compiler",
    modules=("toy_backend",),
    install="pip install toy-backend",
    use="engines of toy boards",
    maker="toy_backend:ToyBackend",
    devices={"toy-board": ("toy1",)},
)
__version__ = "1.0"


class ToyBackend(Backend):
    """Writes the planned graph into one file."""

    spec: ClassVar[BackendSpec] = TOY

    def availability(self) -> Availability:
        return Availability(True, __version__, True, True, ("toy-board",), "", "")

    def decline(self, plan: PrecisionPlan, architecture: str) -> str | None:
        return "toys have no FP8" if plan.fp8_sites else None

    def base_precision(self, plan: PrecisionPlan) -> Precision:
        return plan.base

    def portability(self, architecture: str) -> str:
        return "any toy board"

    def compile(self, request: BuildRequest, into: Path) -> Path:
        engine = into / "engine.toy"
        onnx.save(onnx.load(os.fspath(request.model)), os.fspath(engine))
        return engine

    def read_precision(self, request: BuildRequest, engine: Path) -> tuple[SitePrecision, ...]:
        planned = {decision.site: decision.precision for decision in request.plan.decisions}
        return tuple(
            SitePrecision(site.name, planned[site.name], ("FLOAT", "FLOAT"), True, "toy boards have no other")
            for site in request.planned_sites
        )

    def load(self, engine: Path, architecture: str) -> Runner:
        return OnnxSession(engine)
