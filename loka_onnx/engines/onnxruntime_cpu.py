"""ONNX Runtime on the CPU: FP32 for real, FP8 as a simulation of its accuracy.

The engine is the ONNX file itself. Its CPU provider has kernels for FP8 QuantizeLinear and DequantizeLinear
but multiplies in FP32, and has no BF16 or FP16 products (it would insert casts), so plans based on those are
declined rather than run under a wrong name.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import ClassVar

import onnx
from onnx.external_data_helper import ExternalDataInfo, uses_external_data

from loka_onnx.core.engine import SitePrecision
from loka_onnx.core.formats import Precision
from loka_onnx.core.plan import PrecisionPlan
from loka_onnx.engines.base import Availability, Backend
from loka_onnx.engines.onnx_operands import OperandReader, Source, is_same_up_to_transpose
from loka_onnx.engines.request import BuildRequest
from loka_onnx.errors import MissingPackage, ModelError
from loka_onnx.sessions.onnx_session import OnnxSession, import_onnxruntime, keep_float8_exact
from loka_onnx.sessions.runner import Runner

ENGINE_FILE = "engine.onnx"
BIG_INITIALIZER_BYTES = "1024"


class OnnxRuntimeBackend(Backend):
    """ONNX Runtime, CPU provider."""

    name = "onnxruntime"
    devices: ClassVar[Mapping[str, tuple[str, ...]]] = {"cpu": ("cpu",)}

    def availability(self) -> Availability:
        """Whether ONNX Runtime is installed."""
        try:
            version = str(import_onnxruntime().__version__)
        except MissingPackage as error:
            return Availability(False, "", False, False, (), error.what, error.remedy)
        return Availability(True, version, True, True, ("cpu",), "", "")

    def decline(self, plan: PrecisionPlan, architecture: str) -> str | None:
        """Plans that run wholly in BF16 or FP16 are declined; those with FP8 run as a simulation."""
        if plan.fp8_sites or plan.base is Precision.FP32:
            return None
        lacks = f"the CPU provider has no {plan.base.upper()} products"
        if plan.id == plan.base:
            return f"{lacks}: it would run plan '{plan.id}' in FP32 between casts"
        return (
            f"no site of plan '{plan.id}' runs in FP8, which makes it plan '{plan.base}', and {lacks}: "
            "it would run it in FP32 between casts"
        )

    def base_precision(self, plan: PrecisionPlan) -> Precision:
        """FP32, whatever the plan's base: the simulation isolates the error of FP8."""
        return Precision.FP32

    def is_simulated(self, plan: PrecisionPlan) -> bool:
        """FP8 is simulated."""
        return bool(plan.fp8_sites)

    def portability(self, architecture: str) -> str:
        """An ONNX file runs wherever ONNX Runtime does."""
        return (
            "any host with ONNX Runtime that reads this opset; load FP8 at ORT_ENABLE_BASIC or below, with "
            "session.disable_quant_qdq=1"
        )

    def why_not_run(self, architecture: str) -> str:
        """Every host can run it."""
        return ""

    def load(self, engine: Path, architecture: str) -> Runner:
        """Open a session, never above BASIC for FP8."""
        return OnnxSession(engine)

    def files(self, engine: Path) -> tuple[Path, ...]:
        """The ONNX file and its external data; the file alone when it is not ONNX, as its digest shows."""
        try:
            locations = sorted(external_locations(onnx.load(os.fspath(engine), load_external_data=False)))
        except Exception:
            # Which exception is up to the protobuf implementation.
            return (engine,)
        return (engine, *(engine.parent / location for location in locations))

    def compile(self, request: BuildRequest, into: Path) -> Path:
        """Copy the model; its external data is hard-linked where the file system allows it.

        Raises:
            ModelError: External data is missing or lies outside the model's directory.
        """
        engine = into / ENGINE_FILE
        shutil.copyfile(request.model, engine)
        source = request.model.parent.resolve()
        for location in external_locations(onnx.load(os.fspath(request.model), load_external_data=False)):
            data = (source / location).resolve()
            if not data.is_relative_to(source) or not data.is_file() or Path(location).name == ENGINE_FILE:
                raise ModelError(
                    "external data is missing, or outside the model's directory",
                    where=str(request.model),
                    evidence=f"location '{location}'",
                    remedy="export the model again",
                )
            place = into / location
            place.parent.mkdir(parents=True, exist_ok=True)
            try:
                os.link(data, place)
            except OSError:
                shutil.copyfile(data, place)
        return engine

    def read_precision(self, request: BuildRequest, engine: Path) -> tuple[SitePrecision, ...]:
        """Read the operands of each planned site from the graph that ONNX Runtime has optimized."""
        planned = {decision.site: decision.precision for decision in request.plan.decisions}
        with tempfile.TemporaryDirectory(prefix="optimized-", dir=engine.parent) as folder:
            optimized = Path(folder) / "optimized.onnx"
            _dump_optimized(engine, optimized)
            after, before = OperandReader(optimized), OperandReader(engine)
            return tuple(
                _site_precision(site.name, planned[site.name], before, after)
                for site in request.planned_sites
            )


def _dump_optimized(engine: Path, target: Path) -> None:
    """Write the graph as it is loaded where it holds FP8.

    Levels above rename and fuse for speed, and change no type of an FP32 graph.
    """
    ort = import_onnxruntime()
    settings = ort.SessionOptions()
    settings.log_severity_level = 3
    keep_float8_exact(settings)
    settings.optimized_model_filepath = os.fspath(target)
    settings.add_session_config_entry(
        "session.optimized_model_external_initializers_file_name", f"{target.name}.data"
    )
    settings.add_session_config_entry(
        "session.optimized_model_external_initializers_min_size_in_bytes", BIG_INITIALIZER_BYTES
    )
    try:
        ort.InferenceSession(os.fspath(engine), settings, providers=["CPUExecutionProvider"])
    except Exception as error:
        # onnxruntime raises a family of unrelated extension types here.
        raise ModelError(
            f"ONNX Runtime refuses '{engine.name}'", evidence=str(error).splitlines()[0][:400]
        ) from error


def _site_precision(
    site: str, planned: Precision, before: OperandReader, after: OperandReader
) -> SitePrecision:
    node = after.product(site)
    if planned is not Precision.FP8:
        if node is None and after.float_types() == {"float"}:
            said = "fused; the optimized graph is FP32 throughout"
            return SitePrecision(site, planned, ("float",), True, said)
        types = tuple(source.describe() for source in after.operands(node)) if node is not None else ()
        # FP32 is the base of every graph that this backend accepts, also where the plan says BF16.
        engaged = node is not None and all(kind == "float" for kind in types)
        exact = "" if planned is Precision.FP32 else f"; stands for {planned.upper()}, run in FP32"
        return SitePrecision(site, planned, types, engaged, f"{_where(node)}{exact}")
    if node is None:
        return SitePrecision(site, planned, (), False, "no product of that name in the optimized graph")
    sources = tuple(_confirmed(source, site, before, after) for source in after.operands(node))
    engaged = len(sources) == 2 and all(source.float8 for source in sources)
    said = "simulated: FP8 Q/DQ around an FP32 product" if engaged else "not FP8: an operand lacks its Q/DQ"
    return SitePrecision(
        site, planned, tuple(source.describe() for source in sources), engaged, f"{said}; {_where(node)}"
    )


def _where(node: onnx.NodeProto | None) -> str:
    if node is None:
        return "no node of that name in the optimized graph"
    return f"{node.op_type} '{node.name}' of the graph as ONNX Runtime optimized it (BASIC)"


def _confirmed(source: Source, site: str, before: OperandReader, after: OperandReader) -> Source:
    """A folded constant counts as FP8 only when its values are those of the FP8 weight times its scale."""
    if not source.constant:
        return source
    expected = before.dequantized_weight(site)
    if expected is None or not is_same_up_to_transpose(after.constant(source.constant), expected):
        return source
    return Source(source.element_type, "float8 weight, folded,", source.constant)


def external_locations(model: onnx.ModelProto) -> frozenset[str]:
    """Files that hold a model's external data, relative to it."""
    return frozenset(
        ExternalDataInfo(tensor).location for tensor in _tensors(model.graph) if uses_external_data(tensor)
    )


def _tensors(graph: onnx.GraphProto) -> Iterator[onnx.TensorProto]:
    yield from graph.initializer
    for node in graph.node:
        for attribute in node.attribute:
            yield from attribute.tensors
            if attribute.type == onnx.AttributeProto.TENSOR:
                yield attribute.t
            for inner in (attribute.g, *attribute.graphs):
                yield from _tensors(inner)
